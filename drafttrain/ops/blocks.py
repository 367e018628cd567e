"""Attention of many blocks of queries over one shared context, each block also over itself.

A block belongs to one drafting row: its queries see the context rows that the drafting row sees, and slots of their own block. Two blocks never
see each other, however much the stretches of text that they stand for overlap.

Who sees whom is data (`BlockRule` of layouts.py): a dense mask, for any device and as the oracle of tests, or the block mask of a fused kernel
(`flex_attention`), which never holds scores of all pairs: of 512 blocks of 16 slots over 3,072 rows the dense way holds 32 x 8,192 x 3,072 of them.

Letters: B batch, H query heads, G key/value heads (grouped queries), Q blocks, S slots of a block, T context rows, D head width. Masks are
boolean, True = visible.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from drafttrain.ops.rows import attend_rows


def attend_blocks_fused(
    query_BHQSD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, own_key_BGQSD: Tensor, own_value_BGQSD: Tensor, mask: BlockMask
) -> Tensor:
    """The same as `attend_blocks`, without holding the scores. On a CPU it has no gradient. Returns [B, H, Q, S, D]."""
    key_BGTD, own_key_BGQSD = (x.to(value_BGTD.dtype) for x in (key_BGTD, own_key_BGQSD))  # as the kernel will have them
    key = torch.cat([key_BGTD, own_key_BGQSD.flatten(2, 3)], dim=2)
    value = torch.cat([value_BGTD, own_value_BGQSD.flatten(2, 3)], dim=2)
    return attend_rows(query_BHQSD.flatten(2, 3), key, value, mask).unflatten(2, query_BHQSD.shape[2:4])


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
