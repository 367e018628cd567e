"""A drafter that keeps learning while it serves: Online Speculative Decoding (Liu et al. 2023, arXiv 2310.07177), in one process.

    prompts -> answers of the target, with the drafter as it is -> `every` answers make an update -> the drafter that drafts next

The answers are the target's own whatever the drafter does, so learning can cost speed, never text. What guards the speed: each n-th prompt is
held out, answered but never learnt from, and the newest of these measure the drafter that is and the last one that passed, side by side on the
same prompts. Since they come from the stream, they follow its domain. A drafter that lost more than `fall` of that one's tau is given up:
weights and optimizer go back.

tau = 1 + accepted drafts / rounds.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import acceptance, count
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.tasks.adapt_config import AdaptConfig
from drafttrain.tasks.adapt_files import AdaptFiles, AdaptLog, AdaptState, Progress
from drafttrain.tasks.adapt_learner import AdaptSections, Learner, Learnt
from drafttrain.tasks.rollouts import Roller
from drafttrain.tasks.stop import StopSignal
from drafttrain.tasks.weights import twin_of
from drafttrain.types import Request, Rollout


class Prompts(Protocol):
    """Where prompts come from."""

    def take(self, most: int) -> Sequence[Request]:
        """The next prompts: waits for one, then takes those that have come. [] behind the last one, or where a stop is wanted."""
        ...


@dataclass(frozen=True)
class Answer:
    """A line of the output."""

    id: str
    """Of the prompt."""
    text: str
    tokens: list[int]
    """Of the answer, its end of turn included."""
    tau: float
    """Of this answer; 1 where it had no round."""
    update: int
    """Updates made before it."""


@dataclass(frozen=True)
class Checked:
    """What the guard found."""

    tau: float
    tau_passed: float
    """Of the last drafter that had passed, on the same prompts."""
    fell: bool


class Guard:
    """Keeps the newest held-out prompts and the last drafter that passed, and measures against it."""

    def __init__(self, target: Target, roller: Roller, learner: Learner, config: AdaptConfig):
        self.roller, self.learner, self.fall = roller, learner, config.fall
        self.held_out: deque[Request] = deque(maxlen=config.guard_prompts)
        self.passed = learner.learnt()
        self.engine = Engine(target, proposer=ChainProposer(roller.copy, roller.drafts), slots=config.guard_prompts)

    def check(self) -> Checked:
        """Measures both drafters on the held-out prompts, of which there must be one. The better behaved serves behind it."""
        self.roller.take(self.passed.weights)
        tau_passed = self._tau()
        now = self.learner.learnt()
        self.roller.take(now.weights)
        tau = self._tau()
        fell = tau < (1 - self.fall) * tau_passed
        if fell:
            self.go_back()
        else:
            self.passed = now
        return Checked(tau, tau_passed, fell)

    def go_back(self) -> None:
        """The last drafter that passed learns and serves again."""
        self.learner.go_back(self.passed)
        self.roller.take(self.passed.weights)

    def _tau(self) -> float:
        return count(self.engine.generate(list(self.held_out)), self.roller.drafts, "guard").tau


class Adapter:
    """Serves prompts and learns from them."""

    def __init__(
        self,
        target: Target,
        net: DrafterNet,
        sections: AdaptSections,
        files: AdaptFiles,
        stop: StopSignal,
        say: Callable[[str], None],
    ):
        """`net`: a trained drafter. What an earlier start saved among the `files` is gone on from."""
        self.target, self.config = target, sections.adapt
        self.files, self.stop, self.say = files, stop, say
        if self.config.drafts is not None:
            net.require_drafts(self.config.drafts, "adapt.drafts")
        self.learner = Learner(target, net, sections)
        copy = twin_of(net, lambda: net.config.rebuild(target, net.vocabulary, net.own_sizes()), net.state_dict())
        self.roller = Roller(target, copy, self.config.rolling, sections.seed)
        self.guard = Guard(target, self.roller, self.learner, self.config)
        self.progress, self.log = Progress(), AdaptLog(files.logs)
        self._pending: list[Rollout] = []
        self._said_nothing = False
        self._accepted: list[int] = []
        """Of every round since the last row of the log."""
        if (saved := files.read()) is not None:
            self._resume(saved)

    def _resume(self, saved: AdaptState) -> None:
        self.progress = saved.progress
        self.learner.go_back(saved.now)
        self.guard.passed = saved.passed
        self.guard.held_out.extend(saved.held_out)
        self.roller.take(saved.now.weights)

    def serve(self, prompts: Prompts, write: Callable[[Answer], None]) -> None:
        """Answers prompts in their order until there are no more, or a stop is wanted; then saves."""
        before = self.progress.prompts
        while requests := prompts.take(min(self.config.slots, self.config.every - len(self._pending))):
            for request, rollout in self._answered(requests):
                self._note(request, rollout)
                try:
                    write(self._answer(rollout))
                except (OSError, UserError):  # nobody reads any more, or the disk is full: what was learnt need not go with it
                    self._save()
                    raise
            if len(self._pending) == self.config.every:
                self._update()
        if self.progress.updates > self.progress.checked and self.guard.held_out and not self.stop.requested:
            self._check({})
        if self.progress.prompts > before:
            self._save()
            if not self.files.best.exists():
                self._save_best()

    # ---- answers ---------------------------------------------------------------------------------------------------------------

    def _answered(self, requests: Sequence[Request]) -> list[tuple[Request, Rollout]]:
        """In the order of the prompts. The number before a key makes it unique, also where a prompt comes again."""
        first = self.progress.prompts + 1
        numbered = [replace(request, key=f"{first + i}/{request.key}") for i, request in enumerate(requests)]
        rollouts = {rollout.key: rollout for rollout in self.roller.answer(numbered)}
        return [(request, rollouts[request.key]) for request in numbered]

    def _note(self, request: Request, rollout: Rollout) -> None:
        """Counts an answer, and holds its prompt out or keeps it to be learnt from."""
        self.progress.prompts += 1
        self._accepted += rollout.accepted
        if not self.progress.prompts % self.config.hold_out_every:
            self.guard.held_out.append(request)
        elif all(request.ids != held.ids for held in self.guard.held_out):  # a stream may bring again what the guard measures on
            self._pending.append(rollout)

    def _answer(self, rollout: Rollout) -> Answer:
        tokens = rollout.answer.tolist()
        return Answer(
            id=rollout.key.partition("/")[2],
            text=self.target.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            tau=acceptance(rollout.accepted, self.roller.drafts)[0],
            update=self.progress.updates,
        )

    # ---- updates ---------------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Learns from the answers kept, and has the guard measure where that is due."""
        loss = self.learner.learn(self._pending, self.progress.updates)
        learnt, self._pending = sum(len(rollout.ids) for rollout in self._pending), []
        if loss is None:
            if not self._said_nothing:
                self.say(
                    f"note: {self.config.every} answers had nothing to learn from (no rejected draft, or none within data.length "
                    f"{self.learner.sections.length} of prompt and answer, or none of the draft vocabulary); this is said once"
                )
            self._said_nothing = True
            return
        self.progress.updates += 1
        self.progress.tokens += learnt
        row = {"lr": self.learner.lr, "serve/tau": acceptance(self._accepted, self.roller.drafts)[0]}
        self._accepted = []
        if not math.isfinite(loss):
            self.guard.go_back()
            self._rolled_back("the loss is not finite")
            self._write(row)
            return
        self.roller.take(dict(self.learner.net.named_parameters()))
        row["train/loss"] = loss
        if self.progress.updates - self.progress.checked >= self.config.guard_every and self.guard.held_out:
            self._check(row)
        else:
            self._write(row)

    def _check(self, row: dict[str, float]) -> None:
        """Has the guard measure; writes the row with what it found."""
        found = self.guard.check()
        self.progress.checked = self.progress.updates
        prompts = f"{len(self.guard.held_out)} held-out prompts"
        if found.fell:
            self._rolled_back(f"tau {found.tau:.3f} on {prompts} is below {1 - self.config.fall:g} times {found.tau_passed:.3f}")
        else:
            self.progress.tau = found.tau
            self.say(
                f"update {self.progress.updates}: tau {found.tau:.3f} on {prompts}, {found.tau_passed:.3f} by the last drafter that passed; saved"
            )
            self._save()
            self._save_best()
        self._write(row | {"held_out/tau": found.tau, "held_out/tau_passed": found.tau_passed})

    def _rolled_back(self, why: str) -> None:
        self.progress.rollbacks += 1
        self.say(
            f"update {self.progress.updates}: {why}; went back to the last drafter that passed (rollback {self.progress.rollbacks})"
        )

    def _write(self, row: dict[str, float]) -> None:
        done = self.progress
        counts = {"step": done.updates, "prompts": done.prompts, "tokens_seen": done.tokens, "rollbacks": done.rollbacks}
        self.log.write(row | counts)

    def _save(self) -> None:
        """All that starting again needs, and the drafter as it is."""
        passed = self.guard.passed
        now = passed if self.progress.checked == self.progress.updates else self.learner.learnt()
        self._save_drafter(self.files.last_drafter, now)  # first, since the state is of no use without a drafter of its shape
        self.files.save(AdaptState(self.progress, now, passed, list(self.guard.held_out)))

    def _save_best(self) -> None:
        """The drafter that passed, where other commands look for one."""
        self._save_drafter(self.files.best, self.guard.passed)

    def _save_drafter(self, folder: Path, learnt: Learnt) -> None:
        self.files.save_drafter(folder, self.learner.net, learnt, self.target.identity, self.progress)
