"""Attention of many blocks of queries over one shared context, each block also over itself.

A block belongs to one drafting row: its queries see the context rows that the drafting row sees, and slots of their own block. Two blocks never
see each other, however much the stretches of text that they stand for overlap.

Letters: B batch, H query heads, G key/value heads (grouped queries), Q blocks, S slots of a block, T context rows, D head width. Masks are
boolean, True = visible.
"""

import torch
from torch import Tensor


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
