"""Rows that look back at their text without holding scores: masks against a loop over pairs, the kernel's numbers and gradients against dense ones."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from drafttrain.layouts import RowRule
from drafttrain.ops import rows
from drafttrain.ops.attention import attend, attend_chain
from drafttrain.types import Sequences

B, H, G, D, T = 2, 4, 2, 16, 300


def packed(seed=0):
    """Two packed rows of three documents and padding, and drafting rows in ascending order, padded."""
    g = torch.Generator().manual_seed(seed)
    document, position = torch.full((B, T), -1), torch.zeros(B, T, dtype=torch.long)
    for b in range(B):
        cuts = [0, *sorted(torch.randperm(T - 20, generator=g)[:2].tolist()), T - 12 * (b + 1)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            document[b, begin:end], position[b, begin:end] = number, torch.arange(end - begin)
    query = torch.full((B, 160), -1)
    for b in range(B):
        chosen = torch.randperm(T - 30, generator=g)[: 150 - b].sort().values
        query[b, : len(chosen)] = chosen
    return Sequences(torch.zeros(B, T, dtype=torch.long), torch.ones(B, T, dtype=torch.bool), position, document), query


def loop(sequences, query, window, step):
    """[B, Q, T], a pair at a time."""
    seen = torch.zeros(B, query.shape[1], T, dtype=torch.bool)
    document, position = sequences.document_BT.tolist(), sequences.position_BT.tolist()
    for b in range(B):
        for q, row in enumerate(query[b].clamp(min=0).tolist()):
            for t in range(row + 1):
                near = window is None or position[b][t] > position[b][row] + step - window
                seen[b, q, t] = document[b][t] == document[b][row] and near
    return seen


def spelt_out(mask: BlockMask, queries: int, keys: int = T) -> torch.Tensor:
    """[B, Q, T], or as many keys, as a kernel reads it: what whole blocks hold, and what the rule says within the other blocks that are listed."""
    seen = torch.zeros(B, queries, keys, dtype=torch.bool)
    b, q, t = (torch.arange(n).view(shape) for n, shape in ((B, (B, 1, 1)), (queries, (1, queries, 1)), (keys, (1, 1, keys))))
    rule = mask.mask_mod(b, torch.tensor(0), q, t)
    for counts, listed, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for n, i in ((n, i) for n in range(B) for i in range(counts.shape[2])):
            for block in listed[n, 0, i, : counts[n, 0, i]].tolist():
                part = n, slice(i * rows.BLOCK, (i + 1) * rows.BLOCK), slice(block * rows.BLOCK, (block + 1) * rows.BLOCK)
                seen[part] = True if whole else rule[part]
    return seen


@pytest.mark.parametrize(("window", "step"), [(None, 0), (None, 3), (40, 0), (40, 2), (2, 4), (290, 1)])
def test_the_rule_dense_and_in_blocks_is_a_loop_over_pairs(window, step):
    sequences, query = packed()
    rule = RowRule(sequences, query, window)
    wanted = loop(sequences, query, window, step)
    assert torch.equal(rule.dense(step), wanted)
    assert torch.equal(spelt_out(rule.block_mask(step), query.shape[1])[query >= 0], wanted[query >= 0])


def test_whole_blocks_are_listed_as_such_and_far_ones_not_at_all():
    """Without the first the kernel asks the rule everywhere, without the second it is as slow as all pairs."""
    every = torch.arange(1024).expand(1, -1)
    text = Sequences(*(torch.zeros(1, 1024, dtype=torch.long) for _ in range(2)), every, torch.zeros(1, 1024, dtype=torch.long))
    causal, near = (RowRule(text, every, window).block_mask() for window in (None, 200))
    assert causal.full_kv_num_blocks[0, 0].tolist() == list(range(8)) and causal.kv_num_blocks[0, 0].tolist() == [1] * 8
    assert near.full_kv_num_blocks[0, 0].tolist() == [0] * 8 and near.kv_num_blocks[0, 0].tolist() == [1, 2, *[3] * 6]


def test_stretches_that_end_where_blocks_do():
    """Two for each query, their ends at and beside the ends of blocks; blocks of queries that agree, so that some rows are whole, and some empty."""
    g, ends = torch.Generator().manual_seed(3), torch.tensor([0, 1, 126, 127, 128, 129, 254, 255, 256, 257, 299])
    for _ in range(40):
        firsts, lasts = (
            ends[torch.randint(len(ends), (2, B, 2), generator=g)].repeat_interleave(rows.BLOCK, 2) for _ in range(2)
        )
        stretches = [(firsts[i, :, :160], lasts[i, :, :160]) for i in range(2)]
        row_T = torch.arange(T)
        wanted = sum((row_T >= first[..., None]) & (row_T <= last[..., None]) for first, last in stretches).bool()
        assert torch.equal(spelt_out(rows.stretch_mask(stretches, T), 160), wanted)


def made(queries, own=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(B, n, m, D, generator=g) for n, m in ((H, queries), (G, T), (G, T)))
    keys, values = ([torch.randn(B, G, queries, D, generator=g) for _ in range(own)] for _ in range(2))
    return query, key, value, keys, values


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 2, 40])
def test_the_kernel_gives_the_dense_numbers(own, window):
    """With a window of 2 the third step sees its own keys alone."""
    sequences, query_BQ = packed()
    rule = RowRule(sequences, query_BQ, window)
    query, key, value, keys, values = made(query_BQ.shape[1], own)
    with torch.no_grad():
        wanted = attend_chain(query, key, value, rule.dense(own), keys, values)
        found = attend_chain(query, key, value, rule.block_mask(own), keys, values)
    used = (query_BQ >= 0)[:, None, :, None].expand_as(found) & (rule.dense(own).any(-1)[:, None, :, None] | bool(own))
    torch.testing.assert_close(found[used], wanted[used], atol=1e-5, rtol=1e-4)
    assert not found.isnan().any()


def dense_kernel(query, key, value, mask, scale=None):
    """What the kernel returns, by products of all pairs."""
    b, q, t = (torch.arange(n).view(shape) for n, shape in ((B, (B, 1, 1)), (query.shape[2], (1, -1, 1)), (T, (1, 1, T))))
    visible = mask.mask_mod(b, torch.tensor(0), q, t)[:, None]
    scores = query @ key.repeat_interleave(H // G, 1).transpose(2, 3) * (scale or D**-0.5)
    return attend(query, key, value, visible, scale), scores.masked_fill(~visible, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("own", [1, 3])
def test_gradients_of_what_is_put_together(own, monkeypatch):
    """The kernel has no gradient on a CPU; here its numbers come from dense products, and the gradient of the rest is ours."""
    monkeypatch.setattr(rows, "run_kernel", dense_kernel)
    sequences, query_BQ = packed()
    rule = RowRule(sequences, query_BQ)
    query, key, value, keys, values = made(query_BQ.shape[1], own)
    leaves = [x.requires_grad_() for x in (query, key, value, *keys, *values)]
    direction = torch.randn(B, H, query_BQ.shape[1], D, generator=torch.Generator().manual_seed(2))
    wanted, found = (
        torch.autograd.grad((attend_chain(query, key, value, mask, keys, values) * direction).sum(), leaves)
        for mask in (rule.dense(), rule.block_mask())
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
