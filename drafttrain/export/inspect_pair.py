"""Two folders of drafters side by side: what their configurations say differently, and their tensors.

Layouts call one tensor by several names, or keep it in several pieces. Where the two folders are of two layouts, pairs are found and told by the names of
our nets, by what readers of published drafters know of each layout (drafters/published.py); exports are read by the same.

A head that says some tokens has its rows by ascending token in all layouts but one: Medusa in vLLM lists them in a token_map, in any order. Its rows are
put in ours, and the map is told as our d2t.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.language_model import outer_name
from drafttrain.drafters.published import recognise
from drafttrain.drafters.published_layout import Published
from drafttrain.errors import UserError
from drafttrain.export.format import word
from drafttrain.export.inspect import Inspection
from drafttrain.export.inspect_kind import CAUSAL_LM
from drafttrain.export.inspect_table import WRONG_TYPES
from drafttrain.export.registry import NATIVE


def config_differences(a: Inspection, b: Inspection) -> list[tuple[str, Any, Any]]:
    """(field, what A says, what B says) for each field of which the two say different things; None where one says nothing.

    config.json is compared where both have one, and the class and options that drafttrain's own records name where both have such a record.
    """
    first, second = ({}, {}) if None in (a.folder.config, b.folder.config) else (a.folder.config or {}, b.folder.config or {})
    records = [found.folder.record or found.folder.made for found in (a, b)]
    if None not in records:
        first, second = ({**said, **_net(record or {})} for said, record in zip((first, second), records, strict=True))
    one, other = _flat(first), _flat(second)
    return [(name, one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]


def both_say(a: Inspection, b: Inspection) -> bool:
    """Whether there is something that both say of themselves, so that no difference means that they say the same."""
    folders = (a.folder, b.folder)
    return all(folder.config is not None for folder in folders) or all(
        (folder.record or folder.made) is not None for folder in folders
    )


def forms_note(a: Inspection, b: Inspection) -> str | None:
    """A sentence where the config.json of one drafter is compared in two forms, each of which has fields of its own."""
    first, second = _layout(a), _layout(b)
    if None in (a.folder.config, b.folder.config) or first.drafter != second.drafter or first.layout == second.layout:
        return None
    one, other = ("drafttrain's own" if found.layout == "ours" else found.layout for found in (first, second))
    return (
        f"A and B are written in two forms (A: {one}; B: {other}), so a field that only one of them has is mostly its form's own, and "
        "no difference between the drafters"
    )


def _net(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of our own record that is about the net."""
    return {key: record[key] for key in ("class_path", "init_args") if key in record}


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """a.b.c -> value. Lists of tensors' shapes in a native config.json are left to the tensors."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if name == "tensors":
            continue
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def tensor_rows(a: Inspection, b: Inspection) -> list[tuple[str, str, str, float | None]]:
    """(name, what A has, what B has, largest difference) for each tensor, A's first; None where the two cannot be subtracted."""
    first, second = _layouts(a, b)
    rows = []
    for told, ours, theirs in _pairs(first, second):
        x, y = _joined(first, ours), _joined(second, theirs)
        rows.append((told, _told(x), _told(y), _gap(x, y)))
    return rows


def names_note(a: Inspection, b: Inspection) -> str | None:
    """A sentence where tensors are told by other names than they have in one of the folders."""
    pairs = _pairs(*_layouts(a, b))
    found = []
    for letter, names in (("A", [(told, ours) for told, ours, _ in pairs]), ("B", [(told, theirs) for told, _, theirs in pairs])):
        if others := [(told, called) for told, called in names if called and called != [told]]:
            told, called = others[0]
            found.append(f"{letter} calls {told} {' and '.join(called[:3])}{' ...' if called[3:] else ''}{_more(others)}")
    return f"tensors are told by the names that drafttrain's training gives them: {'; '.join(found)}" if found else None


def rows_note(a: Inspection, b: Inspection) -> str | None:
    """A sentence where the rows of a head are told in another order than they have in one of the folders."""
    found = [
        letter
        for letter, layout in (("A", _layout(a)), ("B", _layout(b)))
        if (ids := _token_map(layout.tensors)) is not None and not bool((ids[1:] > ids[:-1]).all())
    ]
    if not found:
        return None
    whose, where = ("A and B list", "their token_maps") if len(found) == 2 else (f"{found[0]} lists", "its token_map")
    return f"{whose} the rows of the head in the order of {where}; they are compared by ascending token, and the map as d2t"


def names_fault(a: Inspection, b: Inspection) -> str | None:
    """A sentence where two drafters of one class have no tensor in common by name, which says nothing of their numbers. Two classes may well have none."""
    first, second = _layouts(a, b)
    same = first.drafter == second.drafter and first.tensors and second.tensors
    if not same or any(ours and theirs for _, ours, theirs in _pairs(first, second)):
        return None
    some = [min(layout.tensors) for layout in (first, second)]
    return (
        f"A and B name their tensors differently (such as {some[0]} and {some[1]}), and which stands for which is not known here, so no tensors were "
        "compared; set each beside a checkpoint of drafttrain's, whose names are known for both, or let --config RECIPE measure their tau."
    )


# ---- names -----------------------------------------------------------------------------------------------------------------


def _layouts(a: Inspection, b: Inspection) -> tuple[Published, Published]:
    """What our tensors are called in each; in two folders of one layout, whatever it is, every name stands for itself."""
    first, second = _layout(a), _layout(b)
    if (first.layout, first.drafter) == (second.layout, second.drafter):
        return _as_it_stands(a, first), _as_it_stands(b, second)
    first, second = (replace(layout, tensors=_by_token(layout.tensors, layout)) for layout in (first, second))
    return first, second


def _as_it_stands(found: Inspection, layout: Published) -> Published:
    return Published(layout.layout, layout.drafter, {}, _by_token(found.folder.tensors, layout))


def _token_map(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The target id of each row of the head; None where nothing lists them, or what does is damaged."""
    ids = tensors.get("token_map")
    return None if ids is None or ids.dim() != 1 or ids.is_floating_point() else ids.long()


def _by_token(tensors: Mapping[str, Tensor], layout: Published) -> dict[str, Tensor]:
    """The same with what a token_map lists by ascending token: the rows of the head, and the map itself, as d2t."""
    ids = _token_map(tensors)
    if ids is None:
        return dict(tensors)
    order = ids.argsort(stable=True)
    told = {name: tensor for name, tensor in tensors.items() if name != "token_map"} | {
        "d2t": ids[order] - torch.arange(len(ids))
    }
    for name in ("lm_head.weight", *_called(layout, "lm_head.weight")):  # a copy of the target's, and its own
        if name in told and told[name].dim() and len(told[name]) == len(order):
            told[name] = told[name][order]
    return told


def _layout(found: Inspection) -> Published:
    folder, config = found.folder, found.config
    named = (folder.record or folder.made or config).get("class_path")
    ours = Published("ours", str(named), {}, folder.tensors)
    if folder.record is not None or config.get("model_type") == NATIVE.architecture:
        return ours
    if config.get("speculators_model_type") is None and any(re.fullmatch(CAUSAL_LM, name) for name in folder.tensors):
        return Published("a language model", "Independent", {}, folder.tensors, theirs=lambda name: [outer_name(name)])
    try:
        return recognise(config, dict(folder.tensors), folder.where)
    except (UserError, *WRONG_TYPES):  # inspecting has told it
        return ours


def _pairs(a: Published, b: Published) -> list[tuple[str, list[str], list[str]]]:
    """(name as told, what it is called in A, and in B) for each tensor, A's first; [] where it is not there. Our own names stand in one of the two
    folders, else nothing is found but what both call alike."""
    both = []
    for told in sorted(a.tensors.keys() | b.tensors.keys()):
        names = _called(a, told), _called(b, told)
        if all(names):
            both.append((told, *names))
    taken = [{name for pair in both for name in pair[side]} for side in (1, 2)]
    of_a = [(name, [name], list[str]()) for name in a.tensors.keys() - taken[0]]
    of_b = [(name, list[str](), [name]) for name in sorted(b.tensors.keys() - taken[1])]
    return [*sorted([*both, *of_a]), *of_b]


def _called(found: Published, ours: str) -> list[str]:
    """The tensors that stand for one of ours; [] where not all of them are there, or they do not fit together."""
    try:
        names = found.theirs(ours)
    except LookupError:  # of a folder that lacks what its layout goes by
        return []
    return names if all(name in found.tensors for name in names) and _joined(found, names) is not None else []


def _joined(found: Published, names: Sequence[str]) -> Tensor | None:
    parts = [found.tensors[name] for name in names]
    if len(parts) < 2:
        return parts[0] if parts else None
    try:
        return torch.cat(parts, dim=-1)
    except RuntimeError:
        return None


def _more(names: Sequence[Any]) -> str:
    return f", and {len(names) - 1} more otherwise" if len(names) > 1 else ""


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def _told(tensor: Tensor | None) -> str:
    return "-" if tensor is None else f"{list(tensor.shape)} {word(tensor.dtype)}"


def _gap(x: Tensor | None, y: Tensor | None) -> float | None:
    if x is None or y is None or x.shape != y.shape or not x.numel():
        return None
    gap = float((x.double() - y.double()).abs().max())
    return gap if math.isfinite(gap) else None
