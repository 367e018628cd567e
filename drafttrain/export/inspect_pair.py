"""Two folders of drafters side by side: what their configurations say differently, and their tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafttrain.export.format import word
from drafttrain.export.inspect import Inspection


def config_differences(a: Inspection, b: Inspection) -> list[tuple[str, Any, Any]]:
    """(field, there, here) for each field of which the two say different things; None where one says nothing."""
    first, second = (_flat(_said(found)) for found in (a, b))
    return [
        (name, first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]


def _said(found: Inspection) -> dict[str, Any]:
    """config.json as it is written, and the class and options that our own records name."""
    record = found.folder.record or found.folder.made or {}
    ours = {key: record[key] for key in ("class_path", "init_args") if key in record}
    return (found.folder.config or {}) | ours


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
    return float((x.double() - y.double()).abs().max())
