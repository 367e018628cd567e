"""A trained drafter on disk: `drafter.safetensors` (weights and d2t) and `drafter.json` (class, arguments, target, facts).

No pickles, nothing of the target, no training state: this is what exporting, validating and warm starts read.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.registry import known_drafters
from drafttrain.errors import UserError
from drafttrain.files import replace_folder, restore_folder, sha256_file, write_json_atomic, write_tensors_atomic
from drafttrain.target.identity import differences
from drafttrain.target.target import Target
from drafttrain.types import Identity
from drafttrain.vocab import DraftVocabulary

WEIGHTS = "drafter.safetensors"
MADE_FILE = "drafttrain.json"
"""What an export says of itself, beside its weights."""
RECORDED = {"class_path", "init_args", "identity", "facts"}
"""Keys of drafter.json."""


def save_drafter(
    folder: Path,
    net: DrafterNet,
    config: DrafterConfig,
    identity: Identity,
    facts: dict,
    weights: dict | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the folder whole or not at all. `weights` stands in for the net's own state dict (sharded training); `beside` writes more into it."""
    folder = Path(folder)
    making = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    tensors = {name: value.detach().cpu() for name, value in (weights or net.state_dict()).items()}
    weights_file = write_tensors_atomic(making / WEIGHTS, tensors | {"d2t": net.vocabulary.d2t})
    record = {
        "class_path": type(config).__name__,
        "init_args": asdict(config),
        "identity": asdict(identity),
        "facts": facts,
        "weights": {"file": WEIGHTS} | weights_file,
    }
    if sizes := net.own_sizes():
        record["own_sizes"] = sizes
    write_json_atomic(making / "drafter.json", record)
    if beside is not None:
        beside(making)
    replace_folder(making, folder)


def read_record(folder: Path) -> dict:
    """drafter.json of a saved drafter. Raises UserError if there is none."""
    restore_folder(Path(folder))
    file = Path(folder) / "drafter.json"
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no trained drafter (no drafter.json); run train first.") from None
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= RECORDED:
        raise UserError(f"{file} is damaged; train again from checkpoints/last, or restore it.")
    return record


def altered(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether the weights are other bytes than those that were saved. A record of an earlier version does not say which these were. Raises OSError."""
    said = record.get("weights")
    digest = said.get("sha256") if isinstance(said, dict) else None
    return digest is not None and sha256_file(Path(folder) / WEIGHTS) != digest


def require_unaltered(folder: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for weights that are not the ones saved: damage that no reader of tensors would see."""
    try:
        changed = altered(folder, record)
    except OSError:  # who reads it says what is wrong
        return
    if changed:
        raise UserError(
            f"{folder}/{WEIGHTS} is not the file that was saved (its sha256 is not the one in drafter.json); restore it, or train again from "
            "checkpoints/last."
        )


def require_as_exported(folder: Path, made: Mapping[str, Any]) -> None:
    """Raises UserError for weights that are not the ones exported. `made`: what drafttrain.json says."""
    weights = folder / made["weights"]["file"]
    if weights.is_file() and sha256_file(weights) != made["weights"]["sha256"]:
        raise UserError(
            f"{weights} is not the file that was exported (its sha256 differs from {MADE_FILE}); export or download it again."
        )


def check_identity(made_with: dict, target: Target, what: str) -> None:
    """Raises UserError that names every difference between the target at hand and the one something was made with."""
    found = differences(made_with, target.identity)
    if found:
        raise UserError(
            f"{what} was made with another target ({'; '.join(found)}); use the target it was made with, or make it again with this one."
        )


def load_drafter(folder: Path, target: Target) -> tuple[DrafterNet, dict]:
    """The net on the target's device, in eval mode, and its record. Raises UserError for another target or damaged files."""
    record = read_record(folder)
    check_identity(record["identity"], target, str(folder))
    classes = known_drafters()
    if record["class_path"] not in classes:
        raise UserError(
            f"{folder} holds a {record['class_path']}, which this version does not know ({', '.join(classes)}); update drafttrain."
        )
    try:
        tensors = load_file(str(Path(folder) / "drafter.safetensors"))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder}/drafter.safetensors cannot be read ({error}); train again from checkpoints/last, or restore it."
        ) from error
    if "d2t" not in tensors:
        raise UserError(
            f"{folder}/drafter.safetensors has no d2t, which says what its drafter's tokens are; train again, or restore it."
        )
    try:
        config = classes[record["class_path"]](**record["init_args"])
    except TypeError as error:
        raise UserError(
            f"{folder} holds a {record['class_path']} with other arguments than this version knows ({error}); update drafttrain."
        ) from error
    net = config.rebuild(target, DraftVocabulary.from_d2t(tensors.pop("d2t"), target.vocab), record.get("own_sizes") or {})
    own = net.state_dict()
    missing, extra = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own))
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if missing or extra or wrong:
        raise UserError(
            f"{folder} does not fit its own record (missing {missing}, unknown {extra}, shapes {wrong}); it is damaged, so train again."
        )
    require_unaltered(Path(folder), record)  # behind what says more of a file that is another one
    net.load_state_dict({name: value.to(torch.float32) for name, value in tensors.items()})
    return net.eval(), record
