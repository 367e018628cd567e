"""What speed a measured acceptance length buys.

    c = seconds of one speculative round / seconds of one plain step      (the same batch, prefill taken off)
    speed-up = tau / c

A round drafts K tokens and verifies K + 1 of them in one pass. On a GPU that decodes a few sequences, the pass waits for the
weights to arrive, so K + 1 tokens cost hardly more than one and c is little above 1. A CPU is busy computing already: there
K + 1 tokens cost about twice one token, and speculative decoding pays only where tau exceeds that.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.proposer import Proposer
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout
from drafttrain.validation.passes import run

ASSUMED_RATIOS = (1.1, 1.2)
"""Cost ratios c assumed of a GPU at small batch; the report calls them assumed."""
REPEATS = 3
Make = Callable[[], Proposer | None]


@dataclass(frozen=True)
class Cost:
    """Seconds of one plain step and one speculative round, at the same batch."""

    batch: int
    """Rows in the batch, all full all the time."""
    tokens: int
    """Length of the answers that were timed."""
    plain_step_seconds: float
    round_seconds: float

    @property
    def ratio(self) -> float:
        """c, the cost of a round in plain steps."""
        return self.round_seconds / self.plain_step_seconds

    def facts(self, tau: float) -> dict:
        """For validation.json: the times, c, and the speed-up that tau and c imply, measured and assumed."""
        return asdict(self) | {
            "ratio": self.ratio,
            "implied_speedup": tau / self.ratio,
            "assumed": [{"ratio": c, "implied_speedup": tau / c} for c in ASSUMED_RATIOS],
        }


def measure_cost(target: Target, request: Request, make_proposer: Make, slots: int, tokens: int) -> Cost | None:
    """Time a plain step and a speculative round on one prompt, copied into every slot.

    Copies of one prompt finish in the same round, so that the batch stays full, and the number of engine steps is the number of
    rounds of one row. The same call with a limit of one token is the prefill, which is taken off. Medians of 3.

    Args:
        request: a prompt whose plain answer has at least `tokens` tokens.
        make_proposer: makes a fresh proposer.
        tokens: emitted tokens to time over; needs at least 2, since the first one comes from the prefill.

    Returns:
        None where there is nothing to time (fewer than 2 tokens), or the clock was too coarse for this small a target.
    """
    if tokens < 2:
        return None
    timed = [_seconds_per_round(target, _copies(request, slots, tokens), make, slots) for make in (lambda: None, make_proposer)]
    if any(seconds <= 0 for seconds in timed):
        return None
    return Cost(slots, tokens, *timed)


def _seconds_per_round(target: Target, requests: Sequence[Request], make_proposer: Make, slots: int) -> float:
    """Seconds of one round of the whole batch: (all - prefill) / rounds."""
    prefill_only = [replace(r, limit=1) for r in requests]
    engine = Engine(target, proposer=make_proposer(), slots=slots)
    samples = []
    for _ in range(REPEATS):  # on a GPU the first one records graphs: a slow sample, which a median leaves out
        _, prefill = run(engine, prefill_only)
        rollouts, seconds = run(engine, requests)
        samples.append((seconds - prefill) / max(_rounds(r) for r in rollouts))
    return median(samples)


def _rounds(rollout: Rollout) -> int:
    """Rounds of one row; a plain step is a round that accepts nothing, whether or not the engine lists it."""
    return len(rollout.accepted) or len(rollout.answer) - 1


def _copies(request: Request, slots: int, tokens: int) -> list[Request]:
    return [replace(request, key=f"{request.key}#{i}", limit=tokens) for i in range(slots)]
