"""The drafter's fp32 weights in what training saves to go on from: a plain Lightning checkpoint, or a folder of DeepSpeed's (ZeRO-1, -2, -3, offloaded
or not), where no file holds a whole weight.

    checkpoints/last/step_00000400/state          plain: one file with the net's weights under `net.`
    checkpoints/last/step_00000400/state/         DeepSpeed's: `latest` names a tag, and the folder of that tag holds
        checkpoint/*_model_states.pt              names and shapes, whole bf16 weights (ZeRO-1, -2) or none (ZeRO-3)
        checkpoint/*_optim_states.pt              a piece of the flat fp32 masters for each process
    checkpoints/last/writing_00000600/            interrupted: never read

These are pickles, and DeepSpeed's own consolidation unpacks whatever they hold. So the states of the run at hand are read, and any other only on
the recipe's word (`export.pickle`).
"""

import contextlib
import importlib.util
import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import UserError, install
from drafttrain.files import read_json, typed_path
from drafttrain.tasks.checkpoints import FACTS, LATEST, STATE, damaged, find_last, missing_pieces

NET = "net."
"""What the task calls its drafter."""
WRITING = "writing_"


@dataclass(frozen=True)
class TrainingState:
    """A state found on disk."""

    where: str
    """As the user typed it."""
    place: Path
    """A file, or DeepSpeed's folder."""
    facts: dict[str, Any]
    """train.json beside it; {} where there is none."""

    @staticmethod
    def newest(checkpoints: Path) -> "TrainingState":
        """The run's newest resume state. UserError if there is none that is whole."""
        saved = find_last(checkpoints)
        if saved is not None:
            return TrainingState(str(saved.folder), saved.state, read_json(saved.folder / FACTS, "the checkpoint"))
        if begun := sorted((checkpoints / "last").glob(f"{WRITING}*")):
            raise _interrupted(str(begun[-1]))
        raise UserError(
            f"export.checkpoint is last, but {checkpoints}/last/ holds no training state; run train first, or set it to best."
        )

    @staticmethod
    def at(where: str, checkpoints: Path, pickles: bool) -> "TrainingState":
        """A state at a path: a step's folder, a file or a folder of DeepSpeed's.

        UserError if it is not there, was interrupted while it was written, or lies outside of `checkpoints` without the word for it.
        """
        place = typed_path(where)
        if begun := next((part for part in (place, *place.parents) if part.name.startswith(WRITING)), None):
            raise _interrupted(str(begun))
        if not os.path.exists(place):
            raise UserError(
                f"export.checkpoint is {where}, but nothing is there; set it to best, last, or the path of a drafter, of a step of training "
                "(checkpoints/last/step_...), of a Lightning checkpoint or of a DeepSpeed folder."
            )
        home = next((folder for folder in (place, *place.parents[:2]) if (folder / FACTS).is_file()), None)
        facts = {} if home is None else read_json(home / FACTS, "the checkpoint")
        if place == home:
            place = place / STATE
        if not place.exists():
            raise _interrupted(where)
        if not pickles and not place.resolve().is_relative_to(checkpoints.resolve()):
            raise UserError(
                f"export.checkpoint is {where}, a training state from outside of this run: it is a pickle, which can run code when it is read; set "
                "export.pickle to true if you trust where it comes from."
            )
        return TrainingState(where, place, facts)

    def weights(self) -> dict[str, Tensor]:
        """The drafter's weights by name, fp32, on the CPU. UserError for what was interrupted, is damaged, or holds no drafter."""
        with self._explained():
            found = _consolidated(self.place) if self.place.is_dir() else _plain(self.place)
        weights = {name.removeprefix(NET): value.detach().float() for name, value in found.items() if name.startswith(NET)}
        if not weights:
            some = ", ".join(sorted(found)[:4]) or "nothing"
            raise UserError(
                f"export.checkpoint {self.where} holds no drafter that drafttrain trained (but {some}); give another checkpoint."
            )
        return weights

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (
            OSError,
            EOFError,
            RuntimeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            pickle.UnpicklingError,
        ) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"export.checkpoint {self.where} is not whole ({reason}): it was interrupted while it was written, or copied in part; give one that was "
                "finished."
            ) from error


def _interrupted(where: str) -> UserError:
    return UserError(
        f"{where} was interrupted while it was written, so no weights can be taken from it; give a step that was finished "
        "(checkpoints/last/step_...), or best."
    )


def _plain(file: Path) -> dict[str, Tensor]:
    if zipfile.is_zipfile(file):  # what else there may be has no checksums
        _require_undamaged(file)
    return torch.load(file, map_location="cpu", weights_only=True)["state_dict"]


def _consolidated(folder: Path) -> dict[str, Tensor]:
    """DeepSpeed's masters, put together by DeepSpeed; `folder` holds `latest`, or is a tag's."""
    if any(folder.glob("*_states.pt")) and not (folder / LATEST).exists():
        root, tag = folder.parent, folder.name
    else:
        if not (folder / LATEST).is_file():
            raise ValueError(f"it has no file `{LATEST}`, which is written last")
        root, tag = folder, (folder / LATEST).read_text().strip()
    if lacking := missing_pieces(root / tag):
        raise ValueError(f"{tag}/ lacks {lacking}")
    _require_undamaged(root / tag)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"{folder} was saved by DeepSpeed, which is not installed here and has to put its pieces together; run {install('deepspeed')}."
        )
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it counts
        found = get_fp32_state_dict_from_zero_checkpoint(str(root), tag=tag)
    return {name.removeprefix("_forward_module."): value for name, value in found.items()}


def _require_undamaged(state: Path) -> None:
    """ValueError that names a file whose bytes are not those that were saved."""
    if found := damaged(state):
        raise ValueError(f"{found[0].name} does not hold what was saved there")
