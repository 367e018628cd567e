"""A chain as long as pays: the number of drafts of a round follows what is accepted and what rounds cost, both as measured on the way.

    tokens of a round with K drafts     E(K) = 1 + sum_{k=1..K} a_1 ... a_k      a_k: accepted at depth k / rounds that reached k
    seconds of it                       C(K) = c_0 + c_1 K                       fitted to the medians of what was timed
    drafts of the next rounds           the K with the largest E(K) / C(K)

A further draft is worth it as long as what it adds to E pays for what it adds to C. The number is one for all rows of a batch, since a
round has one shape (and, on a GPU, one graph for each).
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from torch import Tensor

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.base import DrafterNet
from drafttrain.types import Proposal

EVERY = 8
"""Rounds between two choices."""
FORGET = 0.99
"""What an observation is worth when the next one comes: some hundred are remembered."""
ASSUMED, WEIGHT = 0.7, 8.0
"""Acceptance assumed of the first depth, and how many observations that is worth; a deeper one is assumed to be like the one before it, lest a
few failures deep in a chain rule that depth out for good."""
TIMED = 9
"""Rounds whose median is the cost of a number of drafts."""
KNOWN_FOR = 512
"""Rounds until a cost is forgotten: a machine may have been slow for a while, and texts grow."""


class AdaptiveChainProposer(ChainProposer):
    """A greedy chain of 1 to `most` drafts."""

    def __init__(self, net: DrafterNet, most: int):
        super().__init__(net, most)
        self.active = most
        """Drafts of the coming round."""
        self.reached, self.kept = [0.0] * most, [0.0] * most
        self._seconds: dict[int, deque[float]] = {}
        self._timed_at: dict[int, int] = {}
        """The round in which each number of drafts was timed last."""
        self._rounds = 0

    @property
    def round_shape(self) -> int:
        return self.active

    @property
    def round_shapes(self) -> Sequence[int]:
        return range(1, self.drafts + 1)

    def take_round_shape(self, shape: int) -> None:
        self.active = shape

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        return self._chain(self.active, tokens_BM, length_B, extent)

    def heard(self, accepted: Sequence[int], shape: int, seconds: float | None) -> None:
        for count in accepted:
            for k in range(min(count + 1, shape)):
                self.reached[k] = FORGET * self.reached[k] + 1
                self.kept[k] = FORGET * self.kept[k] + (count > k)
        if seconds is not None:
            self._seconds.setdefault(shape, deque(maxlen=TIMED)).append(seconds)
            self._timed_at[shape] = self._rounds
        self._rounds += 1
        if self._rounds % EVERY == 0:
            self.active = self._choose()

    def acceptance(self) -> list[float]:
        """a_1, a_2, ..., each drawn towards the one before it while little is known."""
        found, before = [], ASSUMED
        for reached, kept in zip(self.reached, self.kept, strict=True):
            before = (kept + WEIGHT * before) / (reached + WEIGHT)
            found.append(before)
        return found

    def _choose(self) -> int:
        for number in [number for number, at in self._timed_at.items() if self._rounds - at > KNOWN_FOR]:
            del self._seconds[number], self._timed_at[number]
        costs = {number: median(seconds) for number, seconds in self._seconds.items()}
        if len(costs) < 2:  # a line needs two points: the longest chain is tried first, then the shortest
            return 1 if self.drafts in costs else self.drafts
        base, each = _line(costs)
        best, most, expected, path = 1, 0.0, 1.0, 1.0
        for k, a in enumerate(self.acceptance(), start=1):
            path *= a
            expected += path
            rate = expected / (base + each * k)
            if rate > most:
                best, most = k, rate
        return best


def _line(points: dict[int, float]) -> tuple[float, float]:
    """Least squares through (drafts, seconds): what a round costs without drafts, and each draft. Neither is below zero."""
    n, mean_x = len(points), sum(points) / len(points)
    mean_y = sum(points.values()) / n
    spread = sum((x - mean_x) ** 2 for x in points)
    each = max(sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / spread, 0.0)
    return max(mean_y - each * mean_x, 1e-9), each
