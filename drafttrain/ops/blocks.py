"""Attention of many blocks of queries over one shared context, each block also over itself.

A block belongs to one drafting row: its queries see the context rows that the drafting row sees, and slots of their own block. Two blocks never
see each other, however much the stretches of text that they stand for overlap.

Who sees whom is data (`BlockRule`). Of it are made a dense mask, for any device and as the oracle of tests, and the block mask of a fused kernel
(`flex_attention`), which never holds scores of all pairs: of 512 blocks of 16 slots over 3,072 rows the dense way holds 32 x 8,192 x 3,072 of them.

Letters: B batch, H query heads, G key/value heads (grouped queries), Q blocks, S slots of a block, T context rows, D head width. Masks are
boolean, True = visible.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(frozen=True)
class BlockRule:
    """Slot s of the block behind feature row i sees the rows up to i of its document that are within the window of its own position, and of its
    own block all slots (`causal`: those up to s)."""

    document_BT: Tensor
    position_BT: Tensor
    row_BQ: Tensor
    """Feature row of each block, A-1; padding blocks name any row."""
    slots: int
    causal: bool = False
    window: int | None = None
    """Positions that a slot sees, its own counted; None: all."""

    @property
    def position_BQS(self) -> Tensor:
        """Position of every slot: the anchor stands behind its row, at slot 0."""
        slot_S = torch.arange(self.slots, device=self.row_BQ.device)
        return self.position_BT.gather(1, self.row_BQ)[..., None] + 1 + slot_S

    def context(self) -> Tensor:
        """[B, Q, S, T] (or one slot for all of a block, where there is no window): which rows a slot sees."""
        row_T = torch.arange(self.document_BT.shape[1], device=self.row_BQ.device)
        document_BQ = self.document_BT.gather(1, self.row_BQ)
        seen_BQT = (row_T <= self.row_BQ[..., None]) & (self.document_BT[:, None] == document_BQ[..., None])
        if self.window is None:
            return seen_BQT[:, :, None]
        return seen_BQT[:, :, None] & (self.position_BT[:, None, None] > self.position_BQS[..., None] - self.window)

    def own(self) -> Tensor:
        """[S, S]: which slots of its block a slot sees."""
        all_SS = torch.ones(self.slots, self.slots, dtype=torch.bool, device=self.row_BQ.device)
        return all_SS.tril() if self.causal else all_SS

    def block_mask(self) -> BlockMask:
        """For `attend_blocks_fused`: queries are slots, block after block; keys the context, then all slots."""
        T, S = self.document_BT.shape[1], self.slots
        B, Q = self.row_BQ.shape
        document_BQ, position_BN = self.document_BT.gather(1, self.row_BQ), self.position_BQS.flatten(1)

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, row, other = query // S, key.clamp(max=T - 1), (key - T).clamp(min=0)
            context = (key < T) & (row <= self.row_BQ[b, block]) & (self.document_BT[b, row] == document_BQ[b, block])
            if self.window is not None:
                context = context & (self.position_BT[b, row] > position_BN[b, query] - self.window)
            own = (key >= T) & (other // S == block)
            if self.causal:
                own = own & (other <= query)
            return context | own

        return create_block_mask(sees, B, None, Q * S, T + Q * S, device=self.row_BQ.device)


@cache
def _kernel() -> Any:
    """`flex_attention` is a kernel only when compiled; inside a compiled step it is taken as it stands."""
    return torch.compile(flex_attention, dynamic=False)


def attend_blocks_fused(
    query_BHQSD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, own_key_BGQSD: Tensor, own_value_BGQSD: Tensor, mask: BlockMask
) -> Tensor:
    """The same as `attend_blocks`, without holding the scores. On a CPU it has no gradient. Returns [B, H, Q, S, D]."""
    key = torch.cat([key_BGTD, own_key_BGQSD.flatten(2, 3)], dim=2)
    value = torch.cat([value_BGTD, own_value_BGQSD.flatten(2, 3)], dim=2)
    attend = _kernel() if query_BHQSD.is_cuda and not torch.compiler.is_compiling() else flex_attention
    mixed = attend(query_BHQSD.flatten(2, 3), key, value, block_mask=mask, enable_gqa=query_BHQSD.shape[1] != key.shape[1])
    return mixed.unflatten(2, query_BHQSD.shape[2:4])


def attend_blocks(
    query_BHQSD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, visible_BQST: Tensor, own_key_BGQSD: Tensor, own_value_BGQSD: Tensor,
    own_visible_SS: Tensor,
) -> Tensor:  # fmt: skip
    """One softmax, in fp32, over the context and the own block. `visible_BQST` may have one slot for all. Returns [B, H, Q, S, D]."""
    B, H, Q, S, D = query_BHQSD.shape
    G, T = key_BGTD.shape[1], key_BGTD.shape[2]
    query = query_BHQSD.reshape(B, G, H // G, Q, S, D) * D**-0.5
    scores = torch.einsum("bghqsd,bgtd->bghqst", query, key_BGTD).float()
    scores = scores.masked_fill(~visible_BQST[:, None, None], float("-inf"))
    own_scores = torch.einsum("bghqsd,bgqrd->bghqsr", query, own_key_BGQSD).float()
    own_scores = own_scores.masked_fill(~own_visible_SS, float("-inf"))
    weights = torch.cat([scores, own_scores], dim=-1).softmax(-1).to(value_BGTD.dtype)
    mixed = torch.einsum("bghqst,bgtd->bghqsd", weights[..., :T], value_BGTD)
    mixed = mixed + torch.einsum("bghqsr,bgqrd->bghqsd", weights[..., T:], own_value_BGQSD)
    return mixed.reshape(B, H, Q, S, D)
