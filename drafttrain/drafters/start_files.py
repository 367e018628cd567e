"""Finding the folder of a trained drafter, and reading its tensors: a local folder or a Hub id, safetensors or (on request) a pickle."""

import json
import os
import pickle as pickles
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.files import LONGEST_ID, typed_path

WEIGHTS = "*.safetensors"
PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
INDEX = "*.safetensors.index.json"
SAYS = ("config.json", "drafter.json")
"""One of these is in every folder of a drafter."""
BELOW = ("checkpoints/best", "best", "export")
"""Where a run keeps its drafters, from the run's folder or from its checkpoints."""
WANTED = ("config.json", "drafter.json", "drafttrain.json", WEIGHTS, INDEX)


def find(where: str, pickle: bool, asked: str = "checkpoint.start") -> Path:
    """The folder, downloaded (or taken from the cache) where it is a Hub id. `asked` is what names it: a key of the recipe or a flag.
    UserError if it is not to be had."""
    from huggingface_hub import snapshot_download

    local = typed_path(where)
    require_place(where, asked)
    if os.path.isdir(local):
        return local
    wanted = [*WANTED, *(PICKLES if pickle else ())]
    try:
        return Path(snapshot_download(where, allow_patterns=wanted))
    except Exception as error:  # the client raises a dozen kinds here; every one means that the checkpoint cannot be had
        raise UserError(
            f"{asked} {where} could not be downloaded: {_reason(error)} No such folder is here, so it was taken for a Hub id."
        ) from error


def require_place(where: str, asked: str) -> None:
    """UserError where this is neither a drafter's folder that is there nor what could be a Hub id. Asks nobody."""
    local = typed_path(where)
    if not where.strip():
        raise UserError(f"{asked} is empty; give an existing folder or a Hub id (owner/name).")
    typed = where.startswith(("/", "./", "../", "~")) or where.count("/") != 1 or len(where) > LONGEST_ID
    if not os.path.isdir(local) and (typed or os.path.exists(local)):
        raise UserError(f"{asked} is {where}, but there is no such folder; give an existing folder or a Hub id (owner/name).")
    if below := [] if _holds_drafter(local) else [f"{Path(where) / name}" for name in BELOW if _holds_drafter(local / name)]:
        raise UserError(f"{asked} is {where}, the folder of a run; name a drafter in it: {' or '.join(below)}.")


def _holds_drafter(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in SAYS)


def read_config(folder: Path, what: str) -> dict[str, Any]:
    """config.json of a folder that anybody made. UserError where it is missing, damaged or no object with keys."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{what} has no config.json, which says what the weights are; copy it there.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{what} has a config.json that cannot be read ({error}); download or copy it again.") from error
    if not isinstance(found, dict):
        raise UserError(
            f"{what} has a config.json that holds a {type(found).__name__} instead of an object with keys; download or copy it again."
        )
    return found


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Turns what Python raises inside the block, where a folder's JSON holds values that its reader does not expect, into a UserError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(
            f"{what} says things of itself that do not fit together ({told}); `python -m drafttrain inspect` names them, or download or copy it again."
        ) from error


def _reason(error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "it is gated; ask for access on its Hub page and log in with `hf auth login` on this machine."
    if "RepositoryNotFoundError" in kinds:
        return "there is no such repository on the Hub (or it is private and you are not logged in); check the id, or run `hf auth login`."
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}:
        return "the Hub cannot be reached and it is not in the local cache; give a local folder, or connect."
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240].rstrip('.')}."


def unlike(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """What keeps the tensors of a file from being a net's: each that is missing, unknown or of another shape, in words."""
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - got.keys())]
    faults += [f"{name} is unknown" for name in sorted(got.keys() - wanted.keys())]
    both = [(name, got[name].shape, wanted[name].shape) for name in sorted(got.keys() & wanted.keys())]
    return faults + [f"{name} is {list(there)} instead of {list(own)}" for name, there, own in both if there != own]


def read_tensors(folder: Path, pickle: bool, what: str) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors, or of its pickles if there are none and the recipe allows them. UserError otherwise."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        files = sorted(file for pattern in PICKLES for file in folder.glob(pattern))
        if not files:
            asked = "" if pickle else f" (if it holds a pickle, {' or '.join(PICKLES)}: set checkpoint.start_pickle to true)"
            raise UserError(f"{what} holds no weights (*.safetensors){asked}; give a folder or Hub id of a trained drafter.")
        if not pickle:
            raise UserError(
                f"{what} holds its weights as a pickle ({files[0].name}), which is not read unless you allow it; set checkpoint.start_pickle "
                "to true (only tensors are unpacked), or give a checkpoint in safetensors."
            )
    tensors: dict[str, Tensor] = {}
    for file in files:
        more = _read_file(file, what)
        if twice := sorted(tensors.keys() & more.keys()):
            raise UserError(f"{what} holds {', '.join(twice[:3])} in more than one file; leave only one set of weights there.")
        tensors |= more
    return tensors


def _read_file(file: Path, what: str) -> dict[str, Tensor]:
    way_out = "download or copy it again."
    if file.suffix == ".safetensors":
        try:
            return load_file(str(file))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{what}: {file.name} is damaged ({error}); {way_out}") from error
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickles.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{what}: {file.name} is damaged or holds more than tensors ({reason}); {way_out}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{what}: {file.name} holds something else than named tensors; give a checkpoint of weights alone.")
    return found
