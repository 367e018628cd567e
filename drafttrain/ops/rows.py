"""Attention to the rows of a text without holding scores: what one query sees of a packed row is one stretch of it, from a first row to a last, or
two: a text and what stands behind it.

Of T queries over T rows a dense mask holds T x T truths and a softmax B x H x T x T scores; here there are two numbers for each query and stretch, and
a table of which blocks of 128 queries look at which blocks of 128 rows (T x T / 16,384). The kernel is `flex_attention`.

Letters: B batch, H query heads, G key/value heads (grouped queries), Q queries, S rows of the text, D head width, N blocks of queries, M blocks of rows.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

BLOCK = 128
"""Queries, and rows, of a block: what the kernel takes in at once."""
SMALL_HEADS: dict[str, Any] = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_num_warps": 4,
} | {f"bwd_BLOCK_{side}": 64 for side in ("M1", "N1", "M2", "N2")}
"""What the kernel takes in at once where heads are at most 64 wide, in 16 bits. torch's own choice for an H100 (128 x 128) leaves such a rule no registers: on an H200
the kernels of DFlash's step take 79 and 359 us a layer so, and 239 and 489 us with that choice; those of a text's own rows 43 and 130 us, and 142 and 176."""
WIDE_HEADS: dict[str, Any] = {"bwd_num_warps": 4, "bwd_num_stages": 3} | {
    f"bwd_BLOCK_{side}": size for side, size in (("M1", 32), ("N1", 64), ("M2", 64), ("N2", 32))
}
"""The same for heads of 65 to 128, on the way back alone: 1.30 ms a layer of an 8B shape's DFlash on an H200, and 1.43 ms with torch's own choice; of a text's own
rows 0.55 and 0.60 ms."""
ONE_KERNEL: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
"""For fewer than 128 queries torch 2.11 takes its kernel for decoding, and of that it has none where they and the query heads of a group are more than 128."""
BEHIND_ALL = 2**30
"""First row of a stretch that holds none."""


def stretch_mask(stretches: Sequence[tuple[Tensor, Tensor]], rows: int) -> BlockMask:
    """Query q of a packed row sees, of `rows`, those of each stretch (one or two), `first_BQ` to `last_BQ`, both included; none where first is behind
    last. Nothing here is as large as queries times rows, and the host does not wait for the device.

    For every pair of a block that is seen in part the kernel asks the rule again, in each layer and on the way back too: two comparisons of 32-bit
    numbers for each stretch."""
    Q = stretches[0][0].shape[1]
    blocks_N, blocks_M = -(-Q // BLOCK), -(-rows // BLOCK)
    begin_M = torch.arange(blocks_M, device=stretches[0][0].device, dtype=torch.int32) * BLOCK
    touched, whole, seen = [], [], []
    for stretch in stretches:
        first_BQ, last_BQ = (x.to(torch.int32) for x in stretch)
        seen.append((first_BQ, last_BQ))
        empty_BQ = first_BQ > last_BQ
        first_BNX, last_BNX = (  # queries that fill up the last block see nothing
            pad(x.masked_fill(empty_BQ, absent), (0, blocks_N * BLOCK - Q), value=absent).unflatten(1, (blocks_N, BLOCK))
            for x, absent in ((first_BQ, BEHIND_ALL), (last_BQ, -1))
        )
        # The rows that any query of a block sees lie from the least first to the greatest last, and those that all see are between the other two.
        low, inner_low, inner_high, high = (
            x[..., None] for x in (first_BNX.amin(2), first_BNX.amax(2), last_BNX.amin(2), last_BNX.amax(2))
        )
        touched.append((begin_M + BLOCK > low) & (begin_M <= high))
        whole.append((begin_M >= inner_low) & (begin_M + BLOCK <= inner_high + 1))
    touched_BNM, whole_BNM = (torch.stack(found).any(0) for found in (touched, whole))
    return BlockMask.from_kv_blocks(
        *_listed(touched_BNM & ~whole_BNM),
        *_listed(whole_BNM),
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(*seen),
        seq_lengths=(Q, rows),
    )


def _rule(stretch: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor] | None = None) -> Callable[..., Tensor]:
    """One or two stretches, as the kernel asks for them: written out, since a kernel's rule may hold tensors but no list of rules, nor a number that
    depends on a symbolic size; and what it reads may not be padded (torch 2.11's compiler stops at either). It asks for no query behind the last."""
    first_BQ, last_BQ = stretch

    def sees(b: Tensor, h: Tensor, query: Tensor, row: Tensor) -> Tensor:
        return (row >= first_BQ[b, query]) & (row <= last_BQ[b, query])

    if other is None:
        return sees
    other_first_BQ, other_last_BQ = other

    def sees_either(b: Tensor, h: Tensor, query: Tensor, row: Tensor) -> Tensor:
        one = (row >= first_BQ[b, query]) & (row <= last_BQ[b, query])
        return one | ((row >= other_first_BQ[b, query]) & (row <= other_last_BQ[b, query]))

    return sees_either


def _listed(chosen_BNM: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of rows each block of queries has [B, 1, N], and which, those first [B, 1, N, M]."""
    order_BNM = chosen_BNM.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen_BNM.sum(-1, dtype=torch.int32)[:, None], order_BNM.to(torch.int32)[:, None]


@cache
def _kernel() -> Any:
    """`flex_attention` is a kernel only when compiled; inside a compiled step it is taken as it stands. Sizes that change are made symbolic at their
    second value."""
    return torch.compile(flex_attention)


def _tiles(query: Tensor) -> dict[str, Any]:
    if query.element_size() != 2 or query.shape[-1] > 128:
        return {}
    return SMALL_HEADS if query.shape[-1] <= 64 else WIDE_HEADS


def run_kernel(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """What is mixed [B, H, Q, D], and the logarithm of what its weights were divided by [B, H, Q] (-inf where nothing is seen). On a CPU there is no
    gradient."""
    # Norms of queries and keys give fp32 under autocast, which knows nothing of this kernel: as a dense product, in the values' type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    attend = _kernel() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
    grouped = query.shape[1] != key.shape[1]
    options = ONE_KERNEL | _tiles(query) if query.is_cuda else None
    mixed, aux = attend(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
        kernel_options=options,
    )
    return mixed, aux.lse


def attend_rows(query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: BlockMask, scale: float | None = None) -> Tensor:
    """`attend` of ops/attention.py under such a mask. Returns [B, H, Q, D]."""
    return run_kernel(query_BHQD, key_BGSD, value_BGSD, mask, scale)[0]


def attend_rows_with_sinks(
    query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: BlockMask, scale: float, sink_H: Tensor
) -> Tensor:
    """`attend_with_sinks` of ops/attention.py under such a mask. Returns [B, H, Q, D]."""
    return without_sinks(*run_kernel(query_BHQD, key_BGSD, value_BGSD, mask, scale), sink_H)


def without_sinks(mixed_BHQD: Tensor, sum_BHQ: Tensor, sink_H: Tensor) -> Tensor:
    """What is left of an attention whose softmax has one score more for each head, that of nobody: with L the logarithm of the softmax's sum without it,
    sigmoid(L - sink) of it."""
    return mixed_BHQD * torch.sigmoid(sum_BHQ - sink_H[:, None])[..., None].to(mixed_BHQD.dtype)


def attend_rows_and_own(
    query_BHQD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: BlockMask, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """`attend_chain` of ops/attention.py under such a mask. Returns [B, H, Q, D].

    The softmax over both parts is put together from their own: with L the logarithm of the text's sum, the text as a whole weighs as a key of score L,
    and its value is what was mixed of it.
    """
    mixed, sum_BHQ = run_kernel(query_BHQD, key_BGSD, value_BGSD, mask)
    if not own_keys:
        return mixed
    B, H, Q, D = query_BHQD.shape
    G = key_BGSD.shape[1]
    query = query_BHQD.reshape(B, G, H // G, Q, D) * D**-0.5
    own_key, own_value = torch.stack(own_keys, dim=-2), torch.stack(own_values, dim=-2)  # [B, G, Q, J, D]
    own_scores = torch.einsum("bghqd,bgqjd->bghqj", query, own_key).float()
    weights = torch.cat([sum_BHQ.float().unflatten(1, (G, H // G))[..., None], own_scores], dim=-1).softmax(-1).to(mixed.dtype)
    text = weights[..., :1] * mixed.unflatten(1, (G, H // G))
    return (text + torch.einsum("bghqj,bgqjd->bghqd", weights[..., 1:], own_value)).flatten(1, 2)
