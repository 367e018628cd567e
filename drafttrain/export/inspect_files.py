"""What lies in the folder of a drafter, ours or anybody's, read without a target: JSON files and tensors, and what is wrong with the files.

Nothing that could run code is opened: a pickle is named and left alone, also where it calls itself safetensors. A file that cannot be read is
a fault like any other, so that one look tells all that is wrong.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.drafters.save import MADE_FILE
from drafttrain.drafters.source import MAPS
from drafttrain.drafters.start_files import INDEX, PICKLES, WEIGHTS, find
from drafttrain.export.eagle import TOKEN_MAP
from drafttrain.export.inspect_values import SHOWN, tidied

PICKLED = (*PICKLES, "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SMALL = (TOKEN_MAP, "mask_embedding.pt")
"""Pickles that an engine asks for beside the weights."""
PICKLE_BEGINS = (b"PK\x03\x04", b"\x80")
POINTER_BEGINS = b"version https://git-lfs"
LONGEST = 255
"""Bytes of a file's name."""
DEEPEST = 100
"""Objects within objects: who goes through them calls himself for each."""
AGAIN = "download or copy it again"


@dataclass
class Folder:
    """A folder as far as it could be read."""

    where: str
    """As the user typed it."""
    path: Path
    config: dict[str, Any] | None = None
    """config.json."""
    made: dict[str, Any] | None = None
    """drafttrain.json: what an export of ours says of itself."""
    record: dict[str, Any] | None = None
    """drafter.json: what a checkpoint of ours says of itself."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    whole: bool = True
    """Whether every file of weights could be read, so that a tensor which is not there is missing."""
    faults: list[str] = field(default_factory=list)
    """Why it would draft rubbish, or nothing; sentences for the user."""
    notes: list[str] = field(default_factory=list)
    """What else there is to know."""
    taken: set[str] = field(default_factory=set)
    """Keys whose values were of a wrong kind, which was told: they are not missing."""

    @property
    def ours(self) -> bool:
        """Whether drafttrain wrote it, so that it can be held to all that our formats say."""
        return self.made is not None or self.record is not None


def read_folder(where: str) -> Folder:
    """Everything in a local folder, or in the Hub's that has this id. Raises UserError where there is no such folder."""
    folder = Folder(where, find(where, pickle=False, asked="the drafter"))
    folder.config = _json(folder, "config.json")
    folder.made = _json(folder, MADE_FILE)
    folder.record = _json(folder, "drafter.json")
    if folder.config is None and folder.record is None and not (folder.path / "config.json").exists():
        folder.faults.append(f"{where} has no config.json, from which every engine builds the drafter; copy it there.")
    _read_weights(folder)
    return folder


def _json(folder: Folder, name: str) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none, or behind a fault."""
    try:
        found = json.loads((folder.path / name).read_text())
        if _levels(found) > DEEPEST:
            raise ValueError(f"objects within objects, more than {DEEPEST} deep")
        if isinstance(found, dict):
            return tidied(found, name, folder.faults.append, folder.taken)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        folder.faults.append(f"{name} is not JSON ({error}), so nobody can read the drafter; {AGAIN}.")
        return None
    folder.faults.append(f"{name} holds a {type(found).__name__} instead of an object with keys; {AGAIN}.")
    return None


def _levels(value: Any) -> int:
    """How deep objects and lists are nested."""
    levels, layer = 0, [value]
    while layer := [
        inner for each in layer for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
    ]:
        levels += 1
    return levels


# ---- weights ---------------------------------------------------------------------------------------------------------------


def _read_weights(folder: Folder) -> None:
    files = sorted(folder.path.glob(WEIGHTS))
    pickles = sorted({file.name for pattern in PICKLED for file in folder.path.glob(pattern)} - set(SMALL))
    if not files:
        folder.whole = False
        folder.faults.append(_no_weights(pickles))
    elif pickles:
        folder.notes.append(f"{', '.join(pickles)}: a pickle beside the safetensors, which is not opened here.")
    kept: dict[str, str] = {}
    for file in files:
        tensors = _read_file(folder, file)
        if twice := sorted(kept.keys() & tensors.keys()):
            folder.faults.append(
                f"{twice[0]}{_more(twice)} stands in {kept[twice[0]]} and in {file.name}, and readers take either; leave one set of weights there."
            )
        kept |= dict.fromkeys(tensors, file.name)
        folder.tensors |= tensors
    for name in [name for name in MAPS if name in folder.tensors and not folder.tensors[name].dim()]:
        folder.whole = False
        folder.faults.append(f"{name} is a single number, but must be a row of them; write it again from the trained drafter.")
        del folder.tensors[name]
    for index in sorted(folder.path.glob(INDEX)):
        _check_index(folder, index.name, kept)


def _no_weights(pickles: Sequence[str]) -> str:
    if not pickles:
        return "there are no weights (*.safetensors), so engines stop or draft at random; copy them there."
    return (
        f"the weights are a pickle ({', '.join(pickles)}), which can run any code and was not opened; write them as safetensors in a place that may "
        "run it, or let training read them with checkpoint.start_pickle true (only tensors are unpacked)."
    )


def _read_file(folder: Folder, file: Path) -> dict[str, Tensor]:
    """The tensors of a file; {} behind a fault."""
    try:
        return load_file(str(file))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        folder.whole = False
        folder.faults.append(f"{file.name} {_why_unread(file, error)}.")
        return {}


def _why_unread(file: Path, error: Exception) -> str:
    try:
        with open(file, "rb") as stream:
            begin = stream.read(len(POINTER_BEGINS))
    except OSError:
        begin = b""
    if begin.startswith(POINTER_BEGINS):
        return "is a Git LFS pointer and not the weights; run `git lfs pull` there"
    if begin.startswith(PICKLE_BEGINS) and begin[8:9] != b"{":  # a header's length may begin with the same byte
        return (
            "is a pickle under another name, which can run any code and was not opened as one; write the weights as safetensors"
        )
    return f"is damaged or cut off ({' '.join(str(error).split())[:120]}); {AGAIN}"


def _check_index(folder: Folder, name: str, kept: dict[str, str]) -> None:
    """Faults where the index of several shards names a shard or a tensor that is not there."""
    found = _json(folder, name)
    places = (found or {}).get("weight_map")
    if not isinstance(places, dict):
        if found is not None:
            folder.faults.append(f"{name} has no weight_map, by which readers find the tensors; {AGAIN}.")
        return
    if wrong := sorted(tensor for tensor, place in places.items() if not _plain_name(place)):
        folder.whole = False
        folder.faults.append(
            f"{name} looks for {wrong[0]}{_more(wrong)} in {str(places[wrong[0]])[:SHOWN]!r}, which is no name of a file in the folder; write the index "
            "again."
        )
        places = {tensor: place for tensor, place in places.items() if tensor not in wrong}
    for shard in sorted(set(places.values())):
        if not (folder.path / shard).is_file():
            lost = sorted(tensor for tensor, place in places.items() if place == shard)
            folder.whole = False
            folder.faults.append(f"{name} names {shard}, which is not there ({lost[0]}{_more(lost)} would be in it); {AGAIN}.")
    for tensor, place in sorted(places.items()):
        if (folder.path / place).is_file() and place in kept.values() and kept.get(tensor) != place:
            folder.faults.append(f"{name} looks for {tensor} in {place}, where it is not; write the index again.")
    for tensor in sorted(kept.keys() - places.keys() - set(wrong)):
        folder.faults.append(
            f"{name} does not name {tensor}, which is in {kept[tensor]} and would not be read; write the index again."
        )


def _plain_name(place: Any) -> bool:
    return (
        isinstance(place, str)
        and place not in ("", ".", "..")
        and "/" not in place
        and len(place.encode(errors="replace")) <= LONGEST
    )


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
