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
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import read_json, sha256_file, sync
from drafttrain.tasks.distill import Position

STATE, FACTS = "state", "train.json"
PIECES, SUM = "*.pt", ".sha256"
CHOSEN = ("drafter.", "objective.")
"""Sections of a recipe whose parts are named by class_path and init_args."""
LATEST = "latest"
"""The file of a DeepSpeed folder that is written when everything else is there; it names the tag."""


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
        what = f"{found[0]} is {'damaged or cut short' if found[0].exists() else 'gone'}"
    elif saved.state.is_dir() and (lacking := _lacking(saved.state)):
        what = f"{saved.state}/ lacks {lacking}"
    else:
        return
    raise UserError(
        f"{what}, so the run cannot go on from it; restore it, or delete {saved.folder}/ to begin training anew "
        f"({saved.folder.parent.parent}/best/ stays)."
    )


def damaged(state: Path, rank: int = 0, world: int = 1) -> list[Path]:
    """Files of a state, or of a folder of DeepSpeed's pieces, that are not what was saved, or gone. A piece that has no sum is looked at as a state is."""
    if not state.is_dir():
        return [] if _as_checked(state) else [state]
    pieces = {file.with_suffix("") for file in state.rglob(PIECES + SUM)} | {*state.rglob(PIECES)}
    mine = sorted(pieces)[rank::world]
    return [piece for piece in mine if not (_as_summed if _sum_of(piece).exists() else _as_saved)(piece)]


def _sum_of(piece: Path) -> Path:
    return piece.with_name(piece.name + SUM)


def _as_summed(piece: Path) -> bool:
    try:
        return _sum_of(piece).read_bytes().split()[:1] == [sha256_file(piece).encode()]
    except OSError:
        return False


def _as_saved(piece: Path) -> bool:
    """A form of DeepSpeed's that has no checksums is believed."""
    with piece.open("rb") as file:
        begins = file.read(2)
    return _as_checked(piece) if begins == b"PK" else bool(begins)


def _as_checked(file: Path) -> bool:
    """What torch.save writes: each record carries a checksum, at which torch.load does not look."""
    try:
        with zipfile.ZipFile(file) as records:
            return records.testzip() is None
    except Exception:  # of a damaged header zipfile raises what its reader happens to meet
        return False


def _lacking(state: Path) -> str:
    """What a folder of DeepSpeed's lacks to be loaded; empty for nothing."""
    try:
        tag = (state / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        tag = ""
    if not tag or not (state / tag).is_dir():
        return f"a file `{LATEST}` that names a folder in it"
    return missing_pieces(state / tag)


def missing_pieces(folder: Path) -> str:
    """Names of files that must be there beside the others and are not: a piece of each process, numbered from 0. Empty where all are."""
    pieces = {path.name for path in folder.glob("*_states.pt")}
    optimizers = {name for name in pieces if name.endswith("_optim_states.pt")}
    whole = "mp_rank_00_model_states.pt"  # names and shapes; ZeRO-3 has a file of them for each process
    missing = [] if not pieces or whole in pieces else [name for name in _numbered(optimizers) if _model_of(name) not in pieces]
    missing = [_model_of(name) for name in missing] + [name for name in _numbered(optimizers) if name not in pieces]
    return ", ".join(missing) if optimizers else "the pieces of the optimizer (*_optim_states.pt)"


def _numbered(names: set[str]) -> list[str]:
    """The names with each number from 0 to the highest."""
    ranks = {int(name.split("pp_rank_")[1].split("_")[0]): name for name in names}
    if not ranks:
        return []
    last = ranks[max(ranks)]
    return [last.replace(f"pp_rank_{max(ranks)}_", f"pp_rank_{rank}_") for rank in range(max(ranks) + 1)]


def _model_of(name: str) -> str:
    return name.removeprefix("bf16_").replace("_optim_states", "_model_states")


def _sum_pieces(state: Path, rank: int) -> None:
    """Writes the sum of each piece that this process saved, as `sha256sum --check` reads it."""
    for piece in state.rglob(PIECES):
        writer = re.search(r"pp_rank_(\d+)_", piece.name)
        if (int(writer[1]) if writer else 0) == rank:
            _sum_of(piece).write_text(f"{sha256_file(piece)}  {piece.name}\n")


def save_state(trainer, checkpoints: Path, position: Position, recipe: dict[str, Any], share: dict[str, int]) -> None:
    """Saves the resume state. Called on every rank, behind the optimizer step that `position` counts."""
    last = checkpoints / "last"
    writing, final = last / f"writing_{position.step:08d}", last / f"step_{position.step:08d}"
    if trainer.is_global_zero:
        for leftover in last.glob("writing_*"):
            shutil.rmtree(leftover)
        writing.mkdir(parents=True)
    trainer.strategy.barrier("checkpoint folder")
    with _temporary_files_in(writing):
        trainer.save_checkpoint(writing / STATE)
    if (writing / STATE).is_dir():
        _sum_pieces(writing / STATE, trainer.global_rank)
        trainer.strategy.barrier("checkpoint summed")
    if trainer.is_global_zero:
        facts = {"position": asdict(position), "recipe": recipe, "share": share}
        (writing / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        _publish(writing, final)
    trainer.strategy.barrier("checkpoint renamed")


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Lightning writes a state in the system's folder for temporary files and moves it from there: that may be small, or of another disk, and a kill
    would leave gigabytes in it."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


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
    """Every leaf in which two recipes differ, as `drafter.init_args.depth: 5 before, 7 now`."""
    found = []
    chosen = prefix.startswith(CHOSEN) and "class" in before.keys() | now.keys()
    for key in sorted(before.keys() | now.keys()):
        a, b, name = before.get(key), now.get(key), prefix + key
        if chosen:  # as a recipe spells it
            name = prefix + ("class_path" if key == "class" else f"init_args.{key}")
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
