"""Two drafters on the same prompts: tau of each, and how the two relate, with intervals.

Prompts are drawn again with replacement, as many as there are, DRAWS times (bootstrap; Efron 1979). For the ratio both drafters are given the
same draw, so that what makes a prompt easy or hard for both does not widen the interval.

    tau = 1 + accepted / rounds, pooled over the prompts of a draw;      ratio = tau of B / tau of A

Shapes: D draws, P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import check_counts
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout
from drafttrain.validation.passes import run

DRAWS = 10_000
INTERVAL = (0.025, 0.975)
AT_ONCE = 500
"""Draws that are held in memory."""


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Compared:
    """What was measured."""

    prompts: int
    drafts: int
    a: Estimate
    b: Estimate
    ratio: Estimate
    """tau of B / tau of A, draws paired."""
    unequal: tuple[str, ...]
    """Prompts whose answers differ, which greedy decoding of one target must not give; rounding in half precision may."""


def compare_tau(target: Target, a: DrafterNet, b: DrafterNet, requests: Sequence[Request], drafts: int, slots: int) -> Compared:
    """Answer the requests greedily with both drafters, `drafts` a round and `slots` prompts at once.

    Raises:
        UserError: a drafter that cannot propose so many drafts.
        RuntimeError: if the engine's records contradict themselves.
    """
    for net in (a, b):
        net.require_drafts(drafts, "validate.drafts")
    first, second = (_answers(target, net, requests, drafts, slots) for net in (a, b))
    unequal = tuple(x.key for x, y in zip(first, second, strict=True) if not torch.equal(x.ids, y.ids))
    tau_a, tau_b, ratio = estimates(_counts(first), _counts(second))
    return Compared(len(first), drafts, tau_a, tau_b, ratio, unequal)


def _answers(target: Target, net: DrafterNet, requests: Sequence[Request], drafts: int, slots: int) -> list[Rollout]:
    rollouts, _ = run(Engine(target, proposer=ChainProposer(net.eval(), drafts), slots=slots), requests)
    check_counts(type(net.config).__name__, rollouts, drafts)
    return rollouts


def _counts(rollouts: Sequence[Rollout]) -> Tensor:
    """Accepted drafts and rounds of every prompt [P, 2]."""
    return torch.tensor([[sum(r.accepted), len(r.accepted)] for r in rollouts], dtype=torch.float64)


def estimates(a_P2: Tensor, b_P2: Tensor) -> tuple[Estimate, Estimate, Estimate]:
    """tau of both and their ratio, from accepted drafts and rounds of the same prompts."""
    prompts, g = len(a_P2), torch.Generator().manual_seed(0)
    drawn_D2 = []
    for _ in range(DRAWS // AT_ONCE):
        chosen_DP = torch.randint(prompts, (AT_ONCE, prompts), generator=g)
        drawn_D2.append(torch.stack([tau(x_P2[chosen_DP]) for x_P2 in (a_P2, b_P2)], dim=1))
    a_D, b_D = torch.cat(drawn_D2).unbind(1)
    a, b = float(tau(a_P2)), float(tau(b_P2))
    return _estimate(a, a_D), _estimate(b, b_D), _estimate(b / a, b_D / a_D)


def tau(counts: Tensor) -> Tensor:
    """Pooled over the prompts: [..., P, 2] -> [...]. 1 where no round was needed."""
    accepted, rounds = counts.sum(-2).unbind(-1)
    return 1 + accepted / rounds.clamp(min=1)


def _estimate(value: float, drawn_D: Tensor) -> Estimate:
    low, high = drawn_D.quantile(torch.tensor(INTERVAL, dtype=drawn_D.dtype)).tolist()
    return Estimate(value, low, high)
