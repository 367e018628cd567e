"""The resume state on disk: either whole or not there.

    checkpoints/last/step_00000400/          what `train` continues from
        state                                Lightning's checkpoint: a file, or DeepSpeed's folder
        train.json                           where the run stood, and the parts of the recipe that must not change
    checkpoints/last/writing_00000600/       being written; renamed when whole, removed at the next save otherwise

An older step is deleted only behind the rename of a newer one, so a process killed at any moment leaves one that loads.
"""

import json
import os
import shutil
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import read_json, sync
from drafttrain.tasks.distill import Position

STATE, FACTS = "state", "train.json"


@dataclass(frozen=True)
class Saved:
    """A resume state found on disk."""

    folder: Path
    position: Position
    recipe: dict[str, Any]
    """What decides the run, as `recipe_facts` in sections.py gives it."""
    share: dict[str, int]
    """World, accumulate and rows it was made with."""

    @property
    def state(self) -> Path:
        return self.folder / STATE


def find_last(checkpoints: Path) -> Saved | None:
    """The newest whole resume state, or None. UserError if its facts are damaged."""
    steps = sorted((checkpoints / "last").glob("step_*"))
    if not steps:
        return None
    newest = steps[-1]
    try:
        facts = read_json(newest / FACTS, "the checkpoint")
    except UserError as error:
        raise UserError(
            f"{error} If it cannot be restored, delete {newest}/ to begin training anew; {checkpoints}/best/ stays as it is."
        ) from None
    if not (newest / STATE).exists():
        raise UserError(
            f"{newest}/ has lost its {STATE}; restore it, or delete {newest}/ to begin training anew ({checkpoints}/best/ stays)."
        )
    return Saved(steps[-1], Position(**facts["position"]), facts["recipe"], facts["share"])


def require_readable(saved: Saved) -> None:
    """UserError where the state is a file that was cut short or changed since it was written: by a disk or a copy, since a save is renamed when whole."""
    if saved.state.is_dir():
        return  # DeepSpeed's own
    try:
        with zipfile.ZipFile(saved.state) as pieces:  # what torch.save writes; each piece carries a checksum
            whole = pieces.testzip() is None
    except (zipfile.BadZipFile, OSError):
        whole = False
    if not whole:
        checkpoints = saved.folder.parent.parent
        raise UserError(
            f"{saved.state} is damaged or cut short, so the run cannot go on from it; restore it, or delete {saved.folder}/ to begin training anew "
            f"({checkpoints}/best/ stays)."
        )


def save_state(trainer, checkpoints: Path, position: Position, recipe: dict[str, Any], share: dict[str, int]) -> None:
    """Saves the resume state. Called on every rank, behind the optimizer step that `position` counts."""
    last = checkpoints / "last"
    writing, final = last / f"writing_{position.step:08d}", last / f"step_{position.step:08d}"
    if trainer.is_global_zero:
        for leftover in last.glob("writing_*"):
            shutil.rmtree(leftover)
        writing.mkdir(parents=True)
    trainer.strategy.barrier("checkpoint folder")
    trainer.save_checkpoint(writing / STATE)
    if trainer.is_global_zero:
        facts = {"position": asdict(position), "recipe": recipe, "share": share}
        (writing / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        _publish(writing, final)
    trainer.strategy.barrier("checkpoint renamed")


def _publish(writing: Path, final: Path) -> None:
    """Makes a whole folder the newest state, and deletes the older ones."""
    for path in [*writing.rglob("*"), writing]:
        sync(path)
    if final.exists():  # a run went back to an older state and came here again
        shutil.rmtree(final)
    os.rename(writing, final)
    sync(final.parent)
    for older in final.parent.glob("step_*"):
        if older != final:
            shutil.rmtree(older)


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Every leaf in which two recipes differ, as `drafter.depth: 5 before, 7 now`."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        a, b, name = before.get(key), now.get(key), prefix + key
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, name + ".")
        elif a != b:
            found.append(f"{name}: {a} before, {b} now")
    return found


def require_same_recipe(saved: Saved, recipe: dict[str, Any]) -> None:
    """UserError that names each part of the recipe in which a run cannot go on from its checkpoint."""
    changed = differences(saved.recipe, json.loads(json.dumps(recipe)))
    if changed:
        raise UserError(
            f"{saved.folder} was made with another recipe ({'; '.join(changed)}), so this run cannot go on from it; "
            f"undo the change, give the run another `name`, or delete {saved.folder.parent.parent} to begin anew."
        )
