"""Drafters that know their states of all depths before anything is drafted: what blocks in one pass and P-EAGLE share of decoding.

A commit works out the whole draft behind the anchor. `step` then hands out the next depth's state, whatever was said before it, so trees come
from the marginals of the depths.

Shapes: B batch rows in play, R rows of a call, T context rows of a call, W tokens of a step, K depths, L layers, G key/value heads, M slots,
S slots looked at, D head width, H width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.tree_state import ContextState


@dataclass(kw_only=True)
class DraftState(ContextState):
    """Keys of the context in every layer (L * G heads), and the states of the draft made last."""

    drafts_BKH: Tensor
    level: int = 0
    """Depth of the tokens stepped last."""

    def forget(self, extent: int) -> None:
        super().forget(extent)
        self.level = 0

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), self.drafts_BKH]

    def append(
        self, heads: slice, rows_R: Tensor | None, slots_RT: Tensor, key_RGTD: Tensor, value_RGTD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Append context rows in one layer, whose heads these are. Returns the keys and values [R, G, S, D] of all slots looked at."""
        rows, found = self.rows if rows_R is None else rows_R, []
        for buffer, new_RGTD in ((self.keys, key_RGTD), (self.values, value_RGTD)):
            buffer[rows[:, None], heads, slots_RT] = new_RGTD.transpose(1, 2)
            seen = buffer[: self.width, heads, : self.extent]
            found.append(seen if rows_R is None else seen[rows_R])
        return found[0], found[1]


class ParallelNet(DrafterNet):
    """Base of such drafters; `layers` are those that keep keys of the context."""

    parallel = True
    layers: Any

    def begin(self, batch: int, capacity: int, nodes: int) -> DraftState:
        shape, like = self.shape, next(self.parameters())
        keys = like.new_zeros(batch, len(self.layers) * shape.kv_heads, capacity, shape.head_dim)
        assert self.deepest is not None
        return DraftState(
            keys=keys, values=torch.zeros_like(keys), length_B=torch.zeros(batch, dtype=torch.long, device=like.device), width=batch,
            drafts_BKH=like.new_zeros(batch, self.deepest, shape.hidden),
        )  # fmt: skip

    @torch.no_grad()
    def step(self, state: DraftState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        state.level += 1
        return state.drafts_BKH[: state.width, state.level, None].expand(-1, tokens_BW.shape[1], -1)

    def ahead(self, state: DraftState) -> Tensor:
        return state.drafts_BKH[: state.width]
