"""The attention switch: one place that decides how queries meet keys.

Letters: B batch, H query heads, G key/value heads (grouped queries: H is a multiple of G), Q queries, S keys, D head width,
J earlier steps of a chain, E elements. Masks are boolean, True = visible.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from drafttrain.ops.rows import attend_rows, attend_rows_and_own, attend_rows_with_sinks, without_sinks

FEW_QUERIES = 16
SCORES = 2**28
"""Scores that are held at once where no kernel of torch's will do: 1 GiB in fp32."""


def attend(
    query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, visible_B1QS: Tensor | None, scale: float | None = None
) -> Tensor:
    """Grouped-query attention under an explicit mask. Returns [B, H, Q, D].

    With few queries (decoding) the grouped heads are folded into the query length, so that keys and values are read once and
    never repeated; with many (training, prefill) repeating them is cheaper than repeating the mask.
    """
    B, H, Q, D = query_BHQD.shape
    G = key_BGSD.shape[1]
    if H == G:
        return scaled_dot_product_attention(query_BHQD, key_BGSD, value_BGSD, visible_B1QS, scale=scale)
    groups = H // G
    if Q > FEW_QUERIES:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key_BGSD, value_BGSD))
        return scaled_dot_product_attention(query_BHQD, key, value, visible_B1QS, scale=scale)
    folded = query_BHQD.reshape(B, G, groups * Q, D)
    if visible_B1QS is not None:
        visible_B1QS = visible_B1QS.expand(-1, -1, groups, -1) if Q == 1 else visible_B1QS.repeat(1, 1, groups, 1)
    if folded.is_cuda and folded.dtype == torch.float32 and not folded.requires_grad:
        return _by_products(folded, key_BGSD, value_BGSD, visible_B1QS, scale).reshape(B, H, Q, D)
    return scaled_dot_product_attention(folded, key_BGSD, value_BGSD, visible_B1QS, scale=scale).reshape(B, H, Q, D)


def _by_products(
    query_BGQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, visible_B1QS: Tensor | None, scale: float | None
) -> Tensor:
    """softmax(Q K' + mask) V as two batched products. Fused kernels work through blocks of 64 queries, which for a few queries and
    without tensor cores (fp32) is mostly wasted."""
    scores = query_BGQD * (query_BGQD.shape[-1] ** -0.5 if scale is None else scale) @ key_BGSD.transpose(2, 3)
    if visible_B1QS is not None:
        scores = scores.masked_fill(~visible_B1QS, float("-inf")) if visible_B1QS.dtype == torch.bool else scores + visible_B1QS
    return scores.softmax(-1) @ value_BGSD


def attend_chain(
    query_BHQD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    visible_BQS: Tensor | BlockMask,
    own_keys: list[Tensor],
    own_values: list[Tensor],
) -> Tensor:
    """Attention of an unrolled drafter: shared context keys under a mask, plus each row's own keys of steps 1..j.

    `own_keys[m]` is [B, G, Q, D]: row i of it is visible to row i alone, which is EAGLE-3's diagonal. One softmax runs over
    both parts, in fp32. A block mask has it done without holding scores. Returns [B, H, Q, D].
    """
    if isinstance(visible_BQS, BlockMask):
        return attend_rows_and_own(query_BHQD, key_BGSD, value_BGSD, visible_BQS, own_keys, own_values)
    B, H, Q, D = query_BHQD.shape
    G, S = key_BGSD.shape[1], key_BGSD.shape[2]
    query = query_BHQD.reshape(B, G, H // G, Q, D) * D**-0.5
    scores = torch.einsum("bghqd,bgsd->bghqs", query, key_BGSD).float()
    scores = scores.masked_fill(~visible_BQS[:, None, None], float("-inf"))
    if own_keys:
        own_key, own_value = torch.stack(own_keys, dim=-2), torch.stack(own_values, dim=-2)  # [B, G, Q, J, D]
        own_scores = torch.einsum("bghqd,bgqjd->bghqj", query, own_key).float()
        scores = torch.cat([scores, own_scores], dim=-1)
    weights = scores.softmax(-1).to(value_BGSD.dtype)
    mixed = torch.einsum("bghqs,bgsd->bghqd", weights[..., :S], value_BGSD)
    if own_keys:
        mixed = mixed + torch.einsum("bghqj,bgqjd->bghqd", weights[..., S:], own_value)
    return mixed.reshape(B, H, Q, D)


def attend_depths(
    queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    context_BSS: Tensor | BlockMask,
    visible: Callable[[int], Tensor | BlockMask],
) -> Tensor:
    """A text, and behind some of its rows the elements of further depths, each of which sees the text and the shallower ones of its own row.

    `queries[0]`, `keys[0]`, `values[0]` are the text's [B, heads, S, D], under `context_BSS`; those of a depth behind have [B, heads, Q, D], under
    `visible(Q)` [B, Q, S]. Block masks have it done without holding scores. Returns all of them, one behind the other: [B, H, E, D].
    """
    text = queries[0], keys[0], values[0]
    mixed = [attend_rows(*text, context_BSS) if isinstance(context_BSS, BlockMask) else attend(*text, context_BSS[:, None])]
    for k, query in enumerate(queries[1:], start=1):
        width = query.shape[2]
        own_keys, own_values = ([x[:, :, :width] for x in parts[1 : k + 1]] for parts in (keys, values))
        mixed.append(attend_chain(query, keys[0], values[0], visible(width), own_keys, own_values))
    return torch.cat(mixed, dim=2)


def attend_with_sinks(
    query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask_B1QS: Tensor | BlockMask, scale: float, sink_H: Tensor
) -> Tensor:
    """Attention in which each head has one score more, `sink_H`, whose share of the softmax goes to nobody (gpt-oss, arXiv 2508.10925).

    The mask is added to the scores, or a block mask, under which no scores are held. Returns [B, H, Q, D].
    """
    if isinstance(mask_B1QS, BlockMask):
        return attend_rows_with_sinks(query_BHQD, key_BGSD, value_BGSD, mask_B1QS, scale, sink_H)
    pieces = []
    for query, mask in _pieces(query_BHQD, mask_B1QS):
        query_BGhQD = query.unflatten(1, (key_BGSD.shape[1], -1))
        scores = (query_BGhQD @ key_BGSD[:, :, None].transpose(3, 4)).float() * scale + mask[:, :, None]
        mixed = scores.softmax(-1).to(value_BGSD.dtype) @ value_BGSD[:, :, None]
        pieces.append(without_sinks(mixed.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2), sink_H))
    return torch.cat(pieces, dim=2)


def _pieces(query_BHQD: Tensor, mask_B1QS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and their masks, so many at once that no more than `SCORES` are held."""
    B, H = query_BHQD.shape[:2]
    several = max(SCORES // (B * H * mask_B1QS.shape[-1]), 1)
    return zip(query_BHQD.split(several, dim=2), mask_B1QS.split(several, dim=2), strict=True)


def attend_softcapped(
    query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, visible_B1QS: Tensor, scale: float, cap: float
) -> Tensor:
    """Plain attention with scores squashed to cap * tanh(score / cap) before the mask (Gemma-2). Returns [B, H, Q, D]."""
    groups = query_BHQD.shape[1] // key_BGSD.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key_BGSD, value_BGSD))
    pieces = []
    for query, visible in _pieces(query_BHQD, visible_B1QS):
        scores = cap * torch.tanh(query @ key.transpose(2, 3) * scale / cap)
        pieces.append(scores.float().masked_fill(~visible, float("-inf")).softmax(-1).to(value.dtype) @ value)
    return torch.cat(pieces, dim=2)
