"""Which chats share a row: an endless, stateless plan that follows from the lengths, the seed and nothing else.

Every epoch shuffles the chats with its own generator (seed, epoch) and fills rows of `length` tokens: a chat goes into the first
of a few open rows that still has room, the fullest choice being left to chance, and the oldest open row is closed when there are
too many. The rows of all epochs form one stream, so "rows trained so far" says where a run stands, whatever the number of
processes, and the plan of row g can be worked out again at any time.

Letters: N chats that can be learnt from, g number of a row in the endless stream.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError

OPEN_ROWS = 16
"""Rows that wait for a chat that fits. 16 leave about 3% of padding where chats are a few to a row."""


@dataclass(frozen=True)
class Chats:
    """The chats of a store that can be learnt from, and what was left out of them."""

    which_N: np.ndarray
    """Index in the store, int64."""
    length_N: np.ndarray
    """Tokens used, int64: at most the limit."""
    left_out: int
    """Chats without two neighbouring supervised tokens (after the cut): no draft could be scored in them."""
    cut: int
    """Chats longer than the limit, cut at the end."""
    cut_tokens: int
    cut_supervised: int
    """Supervised tokens behind the cuts."""

    def __len__(self) -> int:
        return len(self.which_N)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return int(self.length_N.sum())


def read_chats(store: TokenStore, limit: int) -> Chats:
    """Looks at every chat once. `limit`: most tokens of a chat (a row, or what the target can read). UserError if none is left."""
    which, lengths = [], []
    cut = cut_tokens = cut_supervised = 0
    for index in range(len(store)):
        supervised_T = store.chat(index).supervised
        rest_T = supervised_T[limit:]
        supervised_T = supervised_T[:limit]
        cut += bool(len(rest_T))
        cut_tokens += len(rest_T)
        cut_supervised += int(rest_T.sum())
        if bool((supervised_T[:-1] & supervised_T[1:]).any()):
            which.append(index)
            lengths.append(len(supervised_T))
    if not len(store):
        store.require_chats()
    if not which:
        raise UserError(
            f"There are no supervised tokens to learn from: none of the {len(store)} chats has two neighbouring tokens "
            f"written by the target within its first {limit} tokens; check the answers of data_prep, or raise data.length."
        )
    return Chats(
        np.asarray(which, dtype=np.int64),
        np.asarray(lengths, dtype=np.int64),
        len(store) - len(which),
        cut,
        cut_tokens,
        cut_supervised,
    )


def pack(lengths: Sequence[int], room: int, open_rows: int = OPEN_ROWS) -> list[list[int]]:
    """Packs items, in the order given, into rows of `room` tokens: first fit over a few open rows.

    Returns rows of item numbers; every item is in exactly one row, and no row holds more than `room` (nor may any length exceed it).
    """
    closed: list[list[int]] = []
    rows: list[list[int]] = []
    free: list[int] = []
    for item, length in enumerate(lengths):
        place = next((i for i, left in enumerate(free) if left >= length), None)
        if place is None:
            if len(rows) == open_rows:
                closed.append(rows.pop(0))
                free.pop(0)
            rows.append([])
            free.append(room)
            place = len(rows) - 1
        rows[place].append(item)
        free[place] -= length
    return closed + rows


class RowPlan:
    """The endless stream of packed rows. The same (chats, length, seed) give the same stream in every process."""

    def __init__(self, chats: Chats, length: int, seed: int):
        self.chats, self.length, self.seed = chats, length, seed
        self._starts = [0]
        """Number of the first row of each epoch seen so far, and of the next one."""
        self._recent: dict[int, list[np.ndarray]] = {}

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """All rows of an epoch; a row is an array of positions in `chats`."""
        if epoch not in self._recent:
            order_N = np.random.default_rng([self.seed, epoch]).permutation(len(self.chats))
            rows = pack(self.chats.length_N[order_N].tolist(), self.length)
            self._recent = {e: r for e, r in self._recent.items() if e == epoch - 1}
            self._recent[epoch] = [order_N[row] for row in rows]
        return self._recent[epoch]

    @property
    def padding(self) -> float:
        """Share of the first epoch's rows that holds no token."""
        return 1 - self.chats.tokens / (len(self.epoch(0)) * self.length)

    def find(self, row: int) -> tuple[int, int]:
        """(epoch, row within it) of row g."""
        while self._starts[-1] <= row:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1)))
        epoch = bisect_right(self._starts, row) - 1
        return epoch, row - self._starts[epoch]

    def __getitem__(self, row: int) -> np.ndarray:
        """Positions in `chats` of the chats that share row g."""
        epoch, within = self.find(row)
        return self.epoch(epoch)[within]
