"""Two folders of drafters side by side: what their configurations say differently, and their tensors."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafttrain.export.format import word
from drafttrain.export.inspect import Inspection


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
    first, second = a.folder.tensors, b.folder.tensors
    rows = []
    for name in [*sorted(first), *sorted(second.keys() - first.keys())]:
        x, y = first.get(name), second.get(name)
        rows.append((name, _told(x), _told(y), _gap(x, y)))
    return rows


def _told(tensor: Tensor | None) -> str:
    return "-" if tensor is None else f"{list(tensor.shape)} {word(tensor.dtype)}"


def _gap(x: Tensor | None, y: Tensor | None) -> float | None:
    if x is None or y is None or x.shape != y.shape or not x.numel():
        return None
    gap = float((x.double() - y.double()).abs().max())
    return gap if math.isfinite(gap) else None
