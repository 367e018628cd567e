"""The resume state on disk: either whole or not there.

    checkpoints/last/step_00000400/          what `train` continues from
        state                                Lightning's checkpoint: a file, or DeepSpeed's folder
        state/.../*.pt.sha256                beside each of DeepSpeed's pieces; earlier versions wrote none
        train.json                           where the run stood, and the parts of the recipe that must not change
    checkpoints/last/writing_00000600/       being written; renamed when whole, removed at the next save otherwise

An older step is deleted only behind the rename of a newer one, so a process killed at any moment leaves one that loads.
"""

import json
import os
import re
import shutil
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import read_json, sha256_file, sync
from drafttrain.tasks.distill import Position

STATE, FACTS = "state", "train.json"
PIECES, SUM = "*.pt", ".sha256"


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


def require_readable(saved: Saved, rank: int = 0, world: int = 1) -> None:
    """UserError where the state was cut short or changed since it was written: by a disk or a copy, since a save is renamed when whole.

    Of DeepSpeed's pieces each of the `world` processes looks at its share.
    """
    if found := damaged(saved.state, rank, world):
        checkpoints, what = saved.folder.parent.parent, "damaged or cut short" if found[0].exists() else "gone"
        raise UserError(
            f"{found[0]} is {what}, so the run cannot go on from it; restore it, or delete {saved.folder}/ to begin training anew "
            f"({checkpoints}/best/ stays)."
        )


def damaged(state: Path, rank: int = 0, world: int = 1) -> list[Path]:
    """Files of a state, or of a folder of DeepSpeed's pieces, that are not what was saved, or gone. A piece without a sum is believed."""
    if state.is_dir():
        pieces = [file.with_suffix("") for file in sorted(state.rglob(PIECES + SUM))[rank::world]]
        return [piece for piece in pieces if not _as_summed(piece)]
    try:
        # What torch.save writes: each record carries a checksum, at which torch.load does not look.
        with zipfile.ZipFile(state) as records:
            return [] if records.testzip() is None else [state]
    except Exception:  # of a damaged header zipfile raises what its reader happens to meet
        return [state]


def _as_summed(piece: Path) -> bool:
    try:
        return piece.with_name(piece.name + SUM).read_bytes().split()[:1] == [sha256_file(piece).encode()]
    except OSError:
        return False


def _sum_pieces(state: Path, rank: int) -> None:
    """Writes the sum of each piece that this process saved, as `sha256sum --check` reads it."""
    for piece in state.rglob(PIECES):
        writer = re.search(r"pp_rank_(\d+)_", piece.name)
        if (int(writer[1]) if writer else 0) == rank:
            piece.with_name(piece.name + SUM).write_text(f"{sha256_file(piece)}  {piece.name}\n")


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
    if (writing / STATE).is_dir():
        _sum_pieces(writing / STATE, trainer.global_rank)
        trainer.strategy.barrier("checkpoint summed")
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
