"""What a data folder is made with, kept in `settings.json`: a restart goes on with the same and never with something else."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.config import PrepareConfig
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json_atomic

FREE = ("slots",)
"""Fields of the recipe that do not decide what the data is."""
OF_SOURCE = re.compile(r"(prepare\.prompts\[\d+\])[. ]?(.*)")
SAMPLED = ("", "name", "temperature", "top_p", "max_tokens", "topics", "topics (sha256)", "examples")
"""Fields of SelfPrompts that decide what is sampled, its class included; the others decide which of it is kept."""


def settings(config: PrepareConfig, target) -> dict[str, Any]:
    """Dotted name, as the user typed it -> value. UserError if a prompt file cannot be read."""
    found: dict[str, Any] = {f"prepare.{k}": v for k, v in asdict(config).items() if k not in ("prompts", "engine", *FREE)}
    found["prepare.engine"] = type(config.engine).__name__
    found |= {f"prepare.engine.{name}": value for name, value in config.engine.decides().items()}
    for number, source in enumerate(config.prompts):
        here = f"prepare.prompts[{number}]"
        found[here] = type(source).__name__
        found |= {f"{here}.{name}": value for name, value in source.decides().items()}
        found |= {f"{here} {name}": value for name, value in source.content().items()}
    found |= {f"target {name}": value for name, value in asdict(target.identity).items() if name != "path"}
    found["target.dtype"] = str(target.dtype).removeprefix("torch.")
    return found


def require_same(folder: Path, wanted: dict[str, Any], leads: bool = True) -> None:
    """Writes `settings.json` into a new data folder, or checks it. UserError that names each difference and the way out.

    Until the prompts are decided (`prompts.json`) only those settings count which prompts sampled so far depend on: a run that was
    refused for too few prompts is mended in its folder.
    """
    path, decided = folder / "settings.json", (folder / "prompts.json").exists()
    if not path.exists() and decided:
        raise UserError(
            f"{path} is missing, so nobody can tell what that folder was made with; put it back, give the run another `name`, or "
            f"delete {folder}/."
        )
    made = read_json(path, "the data folder") if path.exists() else {}
    if not isinstance(made, dict):
        raise UserError(f"{path} is damaged (it holds no JSON object); put it back as it was, or delete {folder}/.")
    names = [name for name in dict.fromkeys([*wanted, *made]) if made.get(name) != wanted.get(name)]
    sampled = (folder / "attempts").exists()
    other = [name for name in names if decided or (sampled and _decides_samples(name, made, wanted))]
    if other:
        clauses = "; ".join(f"{name} was {_show(made, name)} and is now {_show(wanted, name)}" for name in other)
        rid = "delete that folder" if decided else f"delete the prompts sampled so far ({folder / 'attempts'}/)"
        raise UserError(
            f"{folder}/ was made with other settings: {clauses}. Set them back to go on with it, give the run another `name`, or {rid}."
        )
    if leads and names:
        write_json_atomic(path, wanted)


def _decides_samples(name: str, *settings: dict[str, Any]) -> bool:
    """Whether prompts that the target wrote itself would be others with another value of this."""
    if of := OF_SOURCE.fullmatch(name):
        return of[2] in SAMPLED and any(values.get(of[1]) == "SelfPrompts" for values in settings)
    return name.startswith(("target", "prepare.engine")) or name in ("prepare.seed", "prepare.chunk")


def _show(values: dict[str, Any], name: str) -> str:
    return "absent" if name not in values else "null" if values[name] is None else str(values[name])
