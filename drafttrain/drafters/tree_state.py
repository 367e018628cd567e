"""What a drafter remembers while it drafts: the keys of its context, and the tree of tokens stepped behind it.

The context of a row fills slots 0 to length-1. A stepped token, number n since the last commit, takes slot length + n and sees the context, its
ancestors and itself. The next commit writes over them. Buffers keep their addresses, so that a CUDA graph may hold them; fewer
rows are a prefix of the batch.

Letters: B rows in play, R rows of a call, W tokens of a step, P places (0: the anchor, n+1: stepped token n), N stepped tokens,
G key/value heads, M slots, S slots looked at, D head width, H width, T rows of a call.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(kw_only=True)
class ContextState:
    """Keys and values of the context of a batch; `rows` are those in play."""

    keys: Tensor
    """[B, G, M, D]"""
    values: Tensor
    length_B: Tensor
    """Context rows stored; the anchor is token number `length`."""
    width: int
    extent: int = 0
    """Slots that queries look at: no row is longer than this within the round, known without asking the device."""

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.width, device=self.length_B.device)

    def slots(self) -> Tensor:
        """[S]"""
        return torch.arange(self.extent, device=self.length_B.device)

    def forget(self, extent: int) -> None:
        """What was stepped is gone; queries look at `extent` slots from now on."""
        self.extent = min(extent, self.keys.shape[2])

    def write(self, rows_R: Tensor, slots_RT: Tensor, key_RGTD: Tensor, value_RGTD: Tensor) -> None:
        self.keys[rows_R[:, None], :, slots_RT] = key_RGTD.transpose(1, 2)
        self.values[rows_R[:, None], :, slots_RT] = value_RGTD.transpose(1, 2)

    def context(self, rows_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots looked at, of these rows (all in play if None)."""
        keys, values = self.keys[: self.width, :, : self.extent], self.values[: self.width, :, : self.extent]
        return (keys, values) if rows_R is None else (keys[rows_R], values[rows_R])

    def ahead(self, rows_R: Tensor, count: int) -> Tensor:
        """The next `count` slots of these rows [R, T]."""
        return self.length_B[rows_R][:, None] + torch.arange(count, device=rows_R.device)

    def buffers(self) -> list[Tensor]:
        """All that has one entry for each row."""
        return [self.keys, self.values, self.length_B]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order: they become the first of the batch."""
        for buffer in self.buffers():
            buffer[: len(rows)] = buffer[rows]
        self.width = len(rows)

    def widen(self) -> None:
        """All rows of the batch are in play again."""
        self.width = len(self.length_B)


def last_of(counts_R: Tensor, *rows_RTX: Tensor) -> list[Tensor]:
    """The last row that counts of each [R, 1, X]; the first where none does."""
    last_R11 = (counts_R - 1).clamp(min=0)[:, None, None]
    return [x.gather(1, last_R11.expand(-1, -1, x.shape[-1])) for x in rows_RTX]


@dataclass(frozen=True)
class Level:
    """Tokens of one step."""

    places: slice
    slots_BW: Tensor
    depth_BW: Tensor
    """1 for the children of the anchor."""
    ancestors_BWN: Tensor
    """Which stepped tokens each one sees, itself among them."""


@dataclass(kw_only=True)
class TreeState(ContextState):
    """A context, and the tree of tokens stepped behind it."""

    hidden_BPH: Tensor
    """State that is fed back, of the anchor's question and of every stepped token."""
    depth_BP: Tensor
    ancestors_BPN: Tensor
    stepped: int = 0
    """Tokens stepped behind the context."""

    @staticmethod
    def empty(batch: int, capacity: int, nodes: int, heads: int, head_dim: int, hidden: int, like: Tensor) -> "TreeState":
        """Buffers with the type and device of `like`."""
        keys = like.new_zeros(batch, heads, capacity, head_dim)
        whole: Any = dict(dtype=torch.long, device=like.device)
        return TreeState(
            keys=keys, values=torch.zeros_like(keys), length_B=torch.zeros(batch, **whole), width=batch,
            hidden_BPH=like.new_zeros(batch, nodes + 1, hidden), depth_BP=torch.zeros(batch, nodes + 1, **whole),
            ancestors_BPN=torch.zeros(batch, nodes + 1, nodes, dtype=torch.bool, device=like.device),
        )  # fmt: skip

    def forget(self, extent: int) -> None:
        super().forget(extent)
        self.stepped = 0

    def grow(self, parents_BW: Tensor) -> Level:
        """Take slots for W more tokens behind these parents."""
        first, count, width = self.stepped, parents_BW.shape[1], self.width
        self.stepped += count
        place_BW, number_W = parents_BW + 1, torch.arange(first, first + count, device=parents_BW.device)
        depth_BW = self.depth_BP[:width].gather(1, place_BW) + 1
        N = self.ancestors_BPN.shape[2]
        of_parent = self.ancestors_BPN[:width].gather(1, place_BW[:, :, None].expand(-1, -1, N))
        own_WN = number_W[:, None] == torch.arange(N, device=parents_BW.device)
        ancestors_BWN = of_parent | own_WN
        places = slice(first + 1, first + count + 1)
        self.depth_BP[:width, places], self.ancestors_BPN[:width, places] = depth_BW, ancestors_BWN
        return Level(places, self.length_B[:width, None] + number_W, depth_BW, ancestors_BWN)

    def hidden_of(self, parents_BW: Tensor) -> Tensor:
        """[B, W, H]"""
        place_BW1 = (parents_BW + 1)[:, :, None]
        return self.hidden_BPH[: self.width].gather(1, place_BW1.expand(-1, -1, self.hidden_BPH.shape[2]))

    def positions(self) -> Tensor:
        """[B, S]: the position of what each slot holds; a stepped token stands behind the last row by its depth, whatever its slot."""
        length_B1, slots = self.length_B[: self.width, None], self.slots()
        number_BS = (slots - length_B1).clamp(0, self.depth_BP.shape[1] - 2)
        depth_BS = self.depth_BP[: self.width, 1:].gather(1, number_BS)
        return torch.where(slots < length_B1, slots, length_B1 - 1 + depth_BS)

    def visible(self, level: Level) -> Tensor:
        """[B, W, S]: the context, and the tokens before each one on its own branch."""
        behind_BS = self.slots() - self.length_B[: self.width, None]
        N = level.ancestors_BWN.shape[2]
        index = behind_BS.clamp(0, N - 1)[:, None].expand(-1, level.ancestors_BWN.shape[1], -1)
        on_branch = level.ancestors_BWN.gather(2, index) & ((behind_BS >= 0) & (behind_BS < N))[:, None]
        return (behind_BS < 0)[:, None] | on_branch

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), self.hidden_BPH]
