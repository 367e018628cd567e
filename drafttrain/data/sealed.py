"""JSON objects that carry the hash of their own content, so that a flipped bit in a number or a name does not pass for another value.

The hash stands under `content_sha256`, over the other keys in any order and spacing. A file without it was written before there was
one, or by hand, and is believed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json_atomic

SEAL = "content_sha256"


def write_sealed(path: str | Path, values: Mapping[str, Any]) -> None:
    """Writes the object and its hash, whole or not at all. Raises OSError."""
    write_json_atomic(path, {**values, SEAL: _digest(values)})


def read_sealed(path: str | Path, what: str, way_out: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The object without its hash.

    UserError if it is missing, no JSON object, not what was written, or lacks one of `keys`; `way_out` says what to do then.
    """
    try:
        values = read_json(path, what)
    except UserError:
        if not Path(path).exists():
            raise
        raise unreadable(path, "it holds no JSON object", way_out) from None
    if not isinstance(values, dict):
        raise unreadable(path, "it holds no JSON object", way_out)
    seal = values.pop(SEAL, None)
    if seal is not None and seal != _digest(values):
        raise unreadable(path, "its content is not what was written there", way_out)
    if missing := [key for key in keys if key not in values]:
        raise unreadable(path, f"it has no {missing[0]}", way_out)
    return values


def unreadable(path: str | Path, why: str, way_out: str) -> UserError:
    return UserError(f"{path} is damaged ({why}); {way_out}.")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
