"""What a drafter that learns while it serves leaves in its run folder.

checkpoints/best/            the last drafter that passed the guard: what export, validate and generate find
            last_drafter/    the newest one, with what it learnt since
            adapted.pt       all that starting again goes on from: both with their optimizers, held-out prompts, counts
logs/version_N/metrics.csv   a row for each update and each measurement of the guard; N is new at every start
"""

import csv
import hashlib
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.save import save_drafter
from drafttrain.errors import UserError
from drafttrain.files import explain_full_disk, write_atomic
from drafttrain.tasks.adapt_learner import Learnt
from drafttrain.types import Identity, Request

STATE = "adapted.pt"
SEAL_BYTES = 32
"""Of the sha256 behind it."""
COLUMNS = (
    "step", "prompts", "tokens_seen", "lr", "train/loss", "serve/tau", "held_out/tau", "held_out/tau_passed", "rollbacks",
)  # fmt: skip
"""serve/tau: of the prompts answered since the row before; held_out/tau: of the newest drafter; held_out/tau_passed: of the last one that passed before."""


@dataclass
class Progress:
    """Counts over all starts."""

    prompts: int = 0
    """Answered."""
    updates: int = 0
    checked: int = 0
    """Updates done when the guard last measured."""
    rollbacks: int = 0
    tokens: int = 0
    """Of the answers learnt from, with their prompts."""
    tau: float | None = None
    """Of the last drafter that passed, on the prompts held out then."""


@dataclass(frozen=True)
class AdaptState:
    """What starting again goes on from."""

    progress: Progress
    now: Learnt
    passed: Learnt
    held_out: list[Request]


class AdaptFiles:
    """The files of one run folder."""

    def __init__(self, checkpoints: Path, logs: Path, facts: dict[str, Any]):
        """`facts`: what may not change between two starts, since the optimizer's state would not fit or would mean something else."""
        self.best, self.last_drafter, self.state = checkpoints / "best", checkpoints / "last_drafter", checkpoints / STATE
        self.logs, self.facts = logs, facts

    def read(self) -> AdaptState | None:
        """What an earlier start saved; None if there was none. UserError if it is damaged, or was made with another recipe."""
        if not self.state.exists():
            return None
        way_out = f"delete {self.state} to begin anew from {self.best}/ with a fresh optimizer"
        try:
            found = torch.load(io.BytesIO(self._unsealed()), map_location="cpu", weights_only=True)
            changed = [name for name, value in self.facts.items() if found["facts"].get(name) != value]
            held_out = [Request(key, ids, limit) for key, ids, limit in found["held_out"]]
            state = AdaptState(Progress(**found["progress"]), Learnt(**found["now"]), Learnt(**found["passed"]), held_out)
        except Exception as error:  # a damaged file may raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self.state} cannot be read ({reason}); restore it, or {way_out}.") from None
        if changed:
            before = "; ".join(f"{name}: {found['facts'].get(name)} before, {self.facts[name]} now" for name in changed)
            raise UserError(f"{self.state} was made with other settings ({before}); undo the change, or {way_out}.")
        return state

    def save(self, state: AdaptState) -> None:
        """All that starting again needs, whole or not at all."""
        held_out = [(request.key, request.ids, request.limit) for request in state.held_out]
        content = {"progress": vars(state.progress), "now": vars(state.now), "passed": vars(state.passed), "held_out": held_out}
        buffer = io.BytesIO()
        torch.save({"facts": self.facts} | content, buffer)
        with explain_full_disk(self.state, "what was saved before is whole and kept."):
            write_atomic(self.state, [data := buffer.getvalue(), hashlib.sha256(data).digest()])

    def _unsealed(self) -> bytes:
        """What was saved. ValueError if another hash stands behind it: torch would take a flipped bit for a weight."""
        data = self.state.read_bytes()
        content, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if hashlib.sha256(content).digest() != seal:
            raise ValueError("its content is not what was written there")
        return content

    def save_drafter(self, folder: Path, net: DrafterNet, learnt: Learnt, identity: Identity, progress: Progress) -> None:
        """A drafter of these weights, as training saves one."""
        position = {"step": progress.updates, "tokens": progress.tokens, "best_tau": progress.tau}
        facts = {"position": position, "held_out": None, "adapted": asdict(progress)}
        with explain_full_disk(folder, "the drafter before this one is whole and kept."):
            save_drafter(folder, net, net.config, identity, facts, learnt.weights)


class AdaptLog:
    """A table of metrics as training writes it: cells of what was not measured are empty."""

    def __init__(self, logs: Path):
        number = 0
        while (logs / f"version_{number}").exists():
            number += 1
        self.path = logs / f"version_{number}" / "metrics.csv"

    def write(self, row: dict[str, float]) -> None:
        """Add a row, at once."""
        began = self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (
            explain_full_disk(self.path, "what was saved before is whole and kept."),
            self.path.open("a", newline="", encoding="utf-8") as file,
        ):
            table = csv.DictWriter(file, COLUMNS)
            if not began:
                table.writeheader()
            table.writerow(row)
