"""`drafttrain compare`: two drafters for one target side by side. Configuration and tensors need nothing; tau needs a recipe's target and prompts."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.commands.drafts import Draft, load
from drafttrain.commands.folder_options import CompareOptions
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError, printable
from drafttrain.export.inspect import inspect_folder, require_sound
from drafttrain.export.inspect_pair import (
    both_say,
    config_differences,
    forms_note,
    names_fault,
    names_note,
    rows_note,
    tensor_rows,
)
from drafttrain.files import write_json_atomic
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run, command_line
from drafttrain.validation.compare import Compared, compare_tau


def run(options: CompareOptions, recipe: Recipe | None) -> None:
    """Print the tables, and write them as JSON where asked. Raises UserError, behind all of that, with a line for each fault of a folder, and one where
    no tensors could be compared: none but one that keeps the drafter from being built stops the measuring."""
    if options.json is not None:
        _require_file(options.json)
    a, b = inspect_folder(options.a), inspect_folder(options.b)
    for letter, found in (("A", a), ("B", b)):
        print(f"{letter}: {printable(options.a if found is a else options.b)}: {dict(found.lines)['what']}")
    faults = [f"{letter} has a fault: {fault}" for letter, found in (("A", a), ("B", b)) for fault in found.faults]
    configs, tensors = config_differences(a, b), tensor_rows(a, b)
    rows = [(printable(name), _short(x), _short(y)) for name, x, y in configs]
    alike = "configurations say the same" if both_say(a, b) else "configurations are not compared: not both can be read"
    if note := forms_note(a, b):
        print(f"note: {printable(note)}")
    _print_table(("configuration", "A", "B"), rows, alike)
    if note := names_note(a, b):
        print(f"note: {printable(note)}")
    if note := rows_note(a, b):
        print(f"note: {note}")
    if (unpaired := names_fault(a, b)) and recipe is None:
        faults.append(printable(unpaired))
    elif unpaired:  # tau is compared
        print(f"note: {printable(unpaired)}")
    equal = "tensors are equal, number for number" if tensors else "no tensors to compare"
    different = _different(tensors)
    _print_table(("tensor", "A", "B", "largest difference"), different, equal)
    if different and len(different) < len(tensors):
        print(f"{len(tensors) - len(different)} other tensors are equal, number for number\n")
    try:
        compared = None if recipe is None else _measured(options, recipe)
    except UserError as error:
        raise UserError("\n".join([*faults, str(error)]), error.notes) from error
    if options.json is not None:
        told = {
            "a": options.a, "b": options.b, "command": command_line(),
            "faults": {"a": a.faults, "b": b.faults}, "not_compared": unpaired,
            "config": [{"field": name, "a": x, "b": y} for name, x, y in configs],
            "tensors": [{"name": name, "a": x, "b": y, "largest_difference": gap} for name, x, y, gap in tensors],
            "tau": None if compared is None else asdict(compared),
        }  # fmt: skip
        _written(options.json, told)
        print(f"{options.json}: the same as JSON")
    require_sound(faults)


def _written(file: Path, told: dict[str, Any]) -> None:
    """Write it as JSON. UserError where no file can be."""
    try:
        write_json_atomic(file, _sayable(told))
    except (OSError, ValueError) as error:
        raise _no_file(file, getattr(error, "strerror", None) or str(error)) from error


def _require_file(file: Path) -> None:
    """UserError where a folder, or nothing, is named, before anything is measured."""
    if os.path.isdir(file) or not file.name:
        raise _no_file(file, "it is a folder")
    above = next(place for place in file.absolute().parents if os.path.exists(place))
    if not (os.path.isdir(above) and os.access(above, os.W_OK)):
        raise _no_file(file, f"{above} is no folder that can be written")


def _no_file(file: Path, why: str) -> UserError:
    return UserError(f"--json is {printable(str(file))}, where no file can be written ({why}); give the name of a file.")


def _sayable(value: Any) -> Any:
    """The same without numbers and characters that JSON in UTF-8 does not know, as text."""
    if isinstance(value, dict):
        return {_sayable(key): _sayable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(inner) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _measured(options: CompareOptions, recipe: Recipe) -> Compared:
    own = Run(options.runs / recipe.name)
    drafts = [Draft.of(recipe, Options(own, draft=Path(where))) for where in (options.a, options.b)]
    held_out = TokenStore.open(own.data / "held_out")
    target = load(recipe.target)
    held_out.require(target.identity)
    first, second = (draft.load(target, recipe)[0] for draft in drafts)
    config = recipe.validate
    requests = held_out.requests(config.max_tokens)[: config.prompts]
    found = compare_tau(target, first, second, requests, config.drafts, config.slots)
    print(f"tau on {found.prompts} held-out prompts, {found.drafts} drafts a round, with 95% intervals over prompts:")
    print(f"  A      {found.a}")
    print(f"  B      {found.b}")
    print(f"  B / A  {found.ratio}, on the same prompts")
    if found.unequal:
        print(
            f"note: answers differ on {len(found.unequal)} prompts, which greedy decoding of one target does not give: logits tie in half precision, or "
            "one of the drafters is decoded wrongly; try --target.dtype float32"
        )
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------------


def _different(rows: Sequence[tuple[str, str, str, float | None]]) -> list[tuple[str, ...]]:
    """The tensors that are not the same in both."""
    return [(printable(name), x, y, "" if gap is None else f"{gap:.3g}") for name, x, y, gap in rows if gap != 0 or x != y]


def _short(value: Any) -> str:
    return "-" if value is None else printable(str(value))


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], none: str) -> None:
    if not rows:
        print(f"\n{none}\n")
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print()
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
