"""One pass over the prompts by one method, and what separates it from plain decoding.

Every method (plain, the drafter, prompt lookup, the untrained drafter) goes through the same engine, cache and slots, so that
times and tokens can be compared; a greedy method must emit plain decoding's tokens exactly.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import Counts
from drafttrain.layouts import one_chat
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout

TIE = 1e-4
"""Two tokens closer than this, in logits or in probability, tie: fp32 may part them too."""


@dataclass(frozen=True)
class Pass:
    """All prompts answered by one method."""

    name: str
    rollouts: list[Rollout]
    """In the order of the requests."""
    seconds: float
    """Wall clock of the whole pass, prefills included."""
    counts: Counts

    @property
    def tokens(self) -> int:
        """Tokens emitted, all prompts."""
        return sum(len(r.answer) for r in self.rollouts)

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded per second. Tokens that plain decoding was asked to decode behind the end count too: they took time."""
        return (self.tokens + sum(len(r.beyond) for r in self.rollouts)) / self.seconds


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves plain decoding."""

    method: str
    key: str
    position: int
    """Index into the answer."""
    plain: int | None
    """Token of plain decoding; None where its answer had ended."""
    other: int | None
    gap: float | None = None
    """How far apart the target's logits for the two tokens are there; None if one of them is missing."""

    def __str__(self) -> str:
        gap = "" if self.gap is None else f" (their logits differ by {self.gap:.2g})"
        return (
            f"{self.method}, prompt {self.key}, answer position {self.position}: "
            f"plain decoding has {_token(self.plain)}, {self.method} has {_token(self.other)}{gap}"
        )


def run(engine: Engine, requests: Sequence[Request], overrun: int = 0) -> tuple[list[Rollout], float]:
    """Answer the requests; the rollouts in the requests' order, and the seconds it took. An engine that has answered the like before has
    its buffers and graphs ready.

    Raises:
        RuntimeError: if the engine did not answer each request exactly once.
    """
    synchronize(engine.target)
    start = time.perf_counter()
    rollouts = list(engine.generate(requests, overrun=overrun))
    synchronize(engine.target)
    seconds = time.perf_counter() - start
    by_key = {r.key: r for r in rollouts}
    if len(rollouts) != len(requests) or set(by_key) != {r.key for r in requests}:
        raise RuntimeError(f"the engine returned {len(rollouts)} answers ({len(by_key)} keys) for {len(requests)} prompts")
    return [by_key[r.key] for r in requests], seconds


def differences(name: str, plain: Sequence[Rollout], other: Sequence[Rollout]) -> list[Difference]:
    """The first difference of every answer that is not plain decoding's; [] if the method is lossless."""
    found = []
    for a, b in zip(plain, other, strict=True):
        left, right = a.answer.tolist(), b.answer.tolist()
        if left == right:
            continue
        position = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
        found.append(Difference(name, a.key, position, _at(left, position), _at(right, position)))
    return found


def tied(gap: float | None) -> bool:
    """Whether rounding explains a difference of this gap. It may point either way, and does not where an answer had ended (None)."""
    return gap is not None and abs(gap) <= TIE


@torch.no_grad()
def logit_gap(target: Target, rollout: Rollout, difference: Difference) -> float | None:
    """How much the target, reading the plain answer up to the difference in one plain pass, prefers plain decoding's token.

    A gap near the rounding of the target's dtype says that two tokens tie; a large one says that the engine is wrong.
    """
    if difference.plain is None or difference.other is None:
        return None
    logits_V = logits_before(target, rollout, difference.position)
    return float(logits_V[difference.plain] - logits_V[difference.other])


@torch.no_grad()
def logits_before(target: Target, rollout: Rollout, position: int) -> torch.Tensor:
    """The target's logits for token `position` of an answer, in fp32 [V], by one plain pass over the text before it."""
    ids_T = rollout.ids[: rollout.prompt_len + position].to(target.device)
    features = target.read_packed(one_chat(ids_T, rollout.prompt_len), ())
    return target.logits(features.final_BTD[0, -1:]).float()[0]


def _at(tokens: list[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _token(token: int | None) -> str:
    return "nothing (it had ended)" if token is None else f"token {token}"


def synchronize(target: Target) -> None:
    """Wait for the GPU, so that a clock read next tells the truth."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
