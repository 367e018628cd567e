"""The rollouts of an on-policy run on disk: each lane on its own, so that any number of processes can go on from them.

    rollouts/refresh_00000012/              the lanes as they stood behind a refresh
        lane_00003.safetensors              `NUMBER.ids`, `NUMBER.taps_TAD`, `NUMBER.rounds.drafted_RK`, ...: tensors of a rollout, in their types
        lane_00003.json                     written behind it: bytes and sha256 of that file, and what else the rollouts say; with its own hash
        manifest.json                       written last of all: what the rollouts were made with; with its own hash
    rollouts/refresh_00000004/              the older state, until a checkpoint stands that needs the newer one

A lane exists if and only if its JSON does, and a folder without a manifest is not finished. Nothing of an older folder is written again, so
a process killed at any moment leaves it whole.

Shapes: T tokens of a rollout, R rounds, K drafts at most, P = K+1 places, A taps, D target width.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from drafttrain.data.sealed import read_sealed, unreadable, write_sealed
from drafttrain.errors import UserError
from drafttrain.files import write_tensors_atomic
from drafttrain.target.identity import differences
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.rollout_buffer import RolloutBuffer, RolloutPlan
from drafttrain.types import DraftRounds, Identity, Rollout

FORMAT = 1
MANIFEST = "manifest.json"
ID_BYTES = 8
ROUND_NUMBERS = 6
"""Numbers of a round besides those of its drafts: anchor, proposed, accepted, said, kept, within."""


@dataclass(frozen=True)
class MadeWith:
    """What makes rollouts of one run unfit for another."""

    identity: Identity
    taps: tuple[int, ...]
    """Layers whose outputs the rollouts carry (0-based, ascending)."""
    drafts: int | None
    """Deepest draft that their rounds keep, K; None where they keep no rounds."""

    def unlike(self, found: dict[str, Any]) -> list[str]:
        """One clause for each difference to what is written in a manifest."""
        clauses = differences(found["identity"], self.identity)
        for name, here, words in (
            ("taps", list(self.taps), "the tapped layers"),
            ("drafts", self.drafts, "the depth of the rounds"),
        ):
            if found[name] != here:
                clauses.append(f"{words} ({found[name]} there, {here} in the recipe)")
        return clauses


class RolloutFiles:
    """A folder of saved rollouts. Every process has one, for the same folder, and all of them see the same disk."""

    def __init__(self, folder: Path, plan: RolloutPlan, made_with: MadeWith, way_out: str):
        """`way_out`: what a user can do where rollouts are damaged, as the end of a sentence."""
        self.folder, self.plan, self.made_with, self.way_out = folder, plan, made_with, way_out
        self._whole: int | None = None
        """The refresh that this process knows to be on disk: it is not written twice."""

    def save(self, buffer: RolloutBuffer, refresh: int) -> None:
        """Writes the lanes of this process as they stand behind a refresh. On every process; raises OSError (a full disk), and ValueError
        if a rollout of the refresh is not in the buffer yet."""
        if refresh == self._whole:
            return
        place = self._place(refresh)
        (place / MANIFEST).unlink(missing_ok=True)  # of a process that was killed before a checkpoint named this folder
        for lane in buffer.lanes:
            numbers = self.plan.kept(lane, refresh)
            if missing := [number for number in numbers if number not in buffer]:
                raise ValueError(
                    f"rollout {missing[0]} of lane {lane} is not in the buffer, so refresh {refresh} cannot be saved"
                )
            _write_lane(_lane_path(place, lane), {number: buffer[number] for number in numbers})
        self._whole = refresh

    def finish(self, refresh: int) -> None:
        """Writes the manifest. On one process, when all have saved; ValueError if a lane is missing: not all have."""
        place = self._place(refresh)
        for lane in range(self.plan.config.batch):
            if not _record_of(_lane_path(place, lane)).exists():
                raise ValueError(f"{place}/ cannot be finished: lane {lane} is not saved yet")
        if not (place / MANIFEST).exists():
            write_sealed(place / MANIFEST, {"format": FORMAT, **self._numbers(refresh), **asdict(self.made_with)})

    def remove_others(self, refresh: int) -> None:
        """Deletes what no checkpoint needs any more. On one process, behind the checkpoint that needs `refresh`."""
        for path in self.folder.glob("refresh_*"):
            if path.is_dir() and path != self._place(refresh):
                shutil.rmtree(path)

    def restore(self, buffer: RolloutBuffer, refresh: int) -> None:
        """Fills an empty buffer with its lanes, whichever processes saved them.

        UserError that names the file if a lane is missing, cut short or damaged, or was made with something else.
        """
        self._require_same(refresh)
        for lane in buffer.lanes:
            for number, rollout in self._read_lane(lane, refresh).items():
                buffer.add(number, rollout)
        self._whole = refresh

    def _place(self, refresh: int) -> Path:
        return self.folder / f"refresh_{refresh:08d}"

    def _numbers(self, refresh: int) -> dict[str, int]:
        config = self.plan.config
        return {"refresh": refresh, "rollouts": config.rollouts, "batch": config.batch, "buffer": config.buffer}

    def _require_same(self, refresh: int) -> None:
        """UserError unless these rollouts are finished, and those that this run would have made."""
        path, wanted = self._place(refresh) / MANIFEST, self._numbers(refresh)
        keys = ("format", *wanted, "identity", "taps", "drafts")
        found = self._sealed(path, keys)
        if found["format"] != FORMAT:
            raise UserError(f"{path} is of format {found['format']}, but this version reads {FORMAT}; {self.way_out}.")
        if found["refresh"] != refresh:
            raise unreadable(path, f"it is of refresh {found['refresh']}", self.way_out)
        unlike = [
            f"on_policy.{name} ({found[name]} there, {value} in the recipe)"
            for name, value in wanted.items()
            if found[name] != value
        ]
        unlike += self.made_with.unlike(found)
        if unlike:
            raise UserError(
                f"{path.parent}/ holds rollouts that were made otherwise: {'; '.join(unlike)}. Undo the change, or give the run "
                "another `name`."
            )

    def _read_lane(self, lane: int, refresh: int) -> dict[int, Rollout]:
        """Number -> rollout."""
        path = _lane_path(self._place(refresh), lane)
        record = self._sealed(_record_of(path), ("bytes", "sha256", "rollouts"))
        numbers = self.plan.kept(lane, refresh)
        if list(record["rollouts"]) != [str(number) for number in numbers]:
            raise unreadable(_record_of(path), "its rollouts are not those of its lane", self.way_out)
        data = self._whole_file(path, record)
        tensors = safetensors.torch.load(data)
        return {number: _rollout(str(number), record["rollouts"][str(number)], tensors) for number in numbers}

    def _whole_file(self, path: Path, record: dict[str, Any]) -> bytes:
        """What was written there. UserError if anything else is."""
        if not path.exists():
            raise UserError(f"{path} is missing, but the checkpoint needs it; {self.way_out}.")
        data = path.read_bytes()
        if len(data) != record["bytes"]:
            raise unreadable(path, f"{len(data):,} bytes instead of {record['bytes']:,}", self.way_out)
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise unreadable(path, f"its sha256 is not the one in {_record_of(path).name}", self.way_out)
        return data

    def _sealed(self, path: Path, keys: Sequence[str]) -> dict[str, Any]:
        if not path.exists():
            raise UserError(f"{path} is missing, but the checkpoint needs it; {self.way_out}.")
        return read_sealed(path, "the rollouts", self.way_out, keys)


def bytes_of(config: OnPolicyConfig, made_with: MadeWith, prompt_len: float, tau: float, element_bytes: int) -> int:
    """About how many bytes a full buffer takes, in memory as on disk, where every answer is as long as it may be.

    `prompt_len`: mean tokens of a prompt. `tau`: mean tokens of a round; 1 gives the upper bound. `element_bytes`: of one number of the features.
    """
    vector = made_with.identity.hidden * element_bytes
    tokens = prompt_len + config.max_tokens
    read = tokens * (ID_BYTES + (len(made_with.taps) + 1) * vector)
    rounds = 0.0
    if made_with.drafts is not None:
        places = made_with.drafts + 1
        rounds = (config.max_tokens - 1) / tau * (places * vector + (made_with.drafts + ROUND_NUMBERS) * ID_BYTES)
    return round(config.buffer * (read + rounds))


def _lane_path(place: Path, lane: int) -> Path:
    return place / f"lane_{lane:05d}.safetensors"


def _record_of(lane_path: Path) -> Path:
    return lane_path.with_suffix(".json")


def _write_lane(path: Path, rollouts: dict[int, Rollout]) -> None:
    """The lane's tensors, then its record."""
    _record_of(path).unlink(missing_ok=True)
    facts: dict[str, dict] = {}
    tensors: dict[str, Tensor] = {}
    for number, rollout in rollouts.items():
        parts = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
        rounds = parts.pop("rounds")
        if rounds is not None:
            parts |= {f"rounds.{field.name}": getattr(rounds, field.name) for field in fields(DraftRounds)}
        # copies: safetensors refuses tensors that share memory
        tensors |= {f"{number}.{name}": part.clone() for name, part in parts.items() if isinstance(part, Tensor)}
        facts[str(number)] = {name: part for name, part in parts.items() if not isinstance(part, Tensor)}
    written = write_tensors_atomic(path, tensors)
    write_sealed(_record_of(path), {**written, "rollouts": facts})


def _rollout(number: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Rollout:
    """What `_write_lane` took apart."""
    own: dict[str, Any] = {
        name.removeprefix(f"{number}."): tensor for name, tensor in tensors.items() if name.startswith(f"{number}.")
    }
    rounds = {name.removeprefix("rounds."): own.pop(name) for name in list(own) if name.startswith("rounds.")}
    return Rollout(**facts, **own, rounds=DraftRounds(**rounds) if rounds else None)
