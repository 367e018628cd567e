"""What a serving drafter learns from the answers that it helped to give, and how all that it learnt is kept and put back.

    update u:  loss = sum over terms of  sum / count     of the newest answers, replayed (replay.py) or read as text

With `first_rejection` an element is the place of a round where a draft was first rejected: its teacher is the row of the target that rejected
it, its label the token that the target said instead (Online Speculative Decoding, Liu et al. 2023, arXiv 2310.07177). No pass of the target is
made for learning. Random numbers (dropout, noise, anchors) follow from the seed and the number of the update.

Shapes: B packed rows, T tokens.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.losses import Objective
from drafttrain.replay import pack_rollouts
from drafttrain.target.target import Target
from drafttrain.tasks.adapt_config import AdaptConfig
from drafttrain.tasks.on_policy_config import scored_streams
from drafttrain.tasks.on_policy_start import require_text
from drafttrain.tasks.optimizer import OptimizerConfig, make_optimizer, token_sides
from drafttrain.tasks.rollouts import taught_by
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.tasks.window import scored_elements
from drafttrain.types import Features, Layout, Rollout, Sequences


@dataclass(frozen=True)
class AdaptSections:
    """What the recipe says that adapting reads."""

    adapt: AdaptConfig
    objective: Objective
    optimizer: OptimizerConfig
    length: int
    """Tokens of a packed row; what an answer has beyond is not learnt from (data.length)."""
    seed: int
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    clip: float | None = None
    """Largest norm of a step's gradient (trainer.gradient_clip_val)."""

    def __post_init__(self):
        if self.optimizer.schedule != "constant":
            raise UserError(
                f"optimizer.schedule is {self.optimizer.schedule}, which ends at a last step, but a stream of prompts has none; set it to constant."
            )
        if self.clip is not None and not (isinstance(self.clip, int | float) and 0 <= self.clip < math.inf):
            raise UserError(
                f"trainer.gradient_clip_val is {self.clip!r}, but must be a number, or 0 or null to leave gradients as they are."
            )
        if self.adapt.as_text:
            try:
                require_text(self.objective)
            except UserError:  # its sentence is about the texts that training reads
                raise UserError(
                    f"adapt.replay is {self.adapt.replay}, which reads answers as texts, but objective.class_path is {type(self.objective).__name__}, which "
                    "learns from rounds; choose Distillation, or set adapt.replay to rounds."
                ) from None
        if not any(self.streams):
            raise UserError(
                "adapt.replay is first_rejection, which learns from the target's tokens alone, but objective.init_args.accepted_weight 0 leaves those "
                "out; raise it, or set adapt.replay to rounds."
            )

    @property
    def streams(self) -> tuple[bool, bool]:
        """Whether what was accepted is learnt from, with the target's token behind it, and what was rejected."""
        return scored_streams(self.objective.streams, self.adapt.replay)


@dataclass(frozen=True)
class Learnt:
    """A learner's whole state, copied to the CPU."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    steps: int
    """Optimizer steps that made it."""


class Learner:
    """A drafter, its optimizer, and the steps they made."""

    def __init__(self, target: Target, net: DrafterNet, sections: AdaptSections):
        self.net, self.sections, self.device = net, sections, target.device
        self.depth: int = net.needs.depth
        self._score = make_score(
            net, sections.objective, TargetTeacher(target, net), self.depth, sections.speed.compile, sections.speed.cpp_wrapper
        )
        self.optimizer = make_optimizer(sections.optimizer, net, self.device.type == "cuda", token_sides(net))
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.steps = 0
        self._kept: deque[Rollout] = deque(maxlen=sections.adapt.buffer)

    @property
    def lr(self) -> float:
        """Of the newest step."""
        return self.optimizer.param_groups[0]["lr"]

    def learn(self, rollouts: Sequence[Rollout], update: int) -> float | None:
        """The optimizer steps of update number `update` (0, 1, ...), on answers with features and rounds.

        Returns:
            The mean loss; None where there was nothing to learn, and no step was made. Not finite: then learning broke off at that step.
        """
        config = self.sections.adapt
        batch = newest = self._batch(rollouts, (self.sections.seed, update, 0))
        if config.buffer is not None:
            self._kept.extend(rollouts)
        if newest is None:
            return None
        stream = np.random.SeedSequence([self.sections.seed, update])
        draws = np.random.default_rng(stream.spawn(1)[0])
        losses: list[float] = []
        self.net.train()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))
            for step in range(config.steps):
                if step and config.buffer is not None:
                    chosen = draws.choice(len(self._kept), size=min(len(rollouts), len(self._kept)), replace=False)
                    batch = self._batch([self._kept[i] for i in sorted(chosen)], (self.sections.seed, update, step))
                if batch is not None:
                    losses.append(self._step(*batch))
                    if not math.isfinite(losses[-1]):
                        break
        self.net.eval()
        return sum(losses) / len(losses)

    def _batch(
        self, rollouts: Sequence[Rollout], seed: tuple[int, ...]
    ) -> tuple[tuple[Sequences, Features, Layout], dict[str, float]] | None:
        """What the answers teach, on the device, and what it is divided by; None if they teach nothing."""
        sequences, features, layout = self._replayed(rollouts, seed)
        counts = self.sections.objective.counts(layout, self.depth)
        if not scored_elements(counts):
            return None
        return (sequences.to(self.device), features.to(self.device), layout.to(self.device)), counts

    def _replayed(self, rollouts: Sequence[Rollout], seed: tuple[int, ...]) -> tuple[Sequences, Features, Layout]:
        """What the answers teach, on the CPU."""
        masks = torch.tensor(self.net.unsaid, dtype=torch.int64)
        learnt = [rollout for rollout in rollouts if not torch.isin(rollout.ids, masks).any()]  # it would be read as no text
        packed = pack_rollouts(learnt, self.sections.length)
        layout = taught_by(self.net, packed, learnt, self.sections.adapt.replay, self.sections.streams, seed)
        return packed.sequences, packed.features, layout

    def _step(self, batch: tuple[Sequences, Features, Layout], counts: dict[str, float]) -> float:
        """One optimizer step; none where the loss is not finite. Returns the loss."""
        config = self.sections.optimizer
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * config.lr_fraction(
                self.steps, max_steps=0
            )  # constant behind the warm-up: no last step is asked for
        terms, _ = self._score(*batch)
        loss = torch.stack([term.sum / (counts[name] or 1.0) for name, term in terms.items()]).sum()
        found = loss.item()
        if math.isfinite(found):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if self.sections.clip:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.sections.clip)
            self.optimizer.step()
            self.steps += 1
        return found

    def learnt(self) -> Learnt:
        """All that was learnt so far."""
        return Learnt(_copied(self.net.state_dict()), _copied(self.optimizer.state_dict()), self.steps)

    def go_back(self, learnt: Learnt) -> None:
        """Put weights, the optimizer's averages and its warm-up back, bit for bit."""
        self.net.load_state_dict(learnt.weights)
        self.optimizer.load_state_dict(_copied(learnt.optimizer))  # torch keeps the tensors it is given, and would step in them
        self.steps = learnt.steps


def _copied(value: Any) -> Any:
    """The same, its tensors copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
