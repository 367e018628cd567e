"""Blocks over a packed text without holding scores: the kernel's mask against a loop over pairs, its tables, and one graph for any number of blocks."""

import pytest
import torch
from ops.test_rows import B, T, packed, spelt_out
from torch._dynamo.utils import counters

from drafttrain.layouts import BlockRule
from drafttrain.ops.blocks import attend_blocks, attend_blocks_fused
from drafttrain.types import Sequences


def loop(sequences, query, slots, causal, window):
    """[B, Q * S, T + Q * S], a pair at a time."""
    Q = query.shape[1]
    seen = torch.zeros(B, Q * slots, T + Q * slots, dtype=torch.bool)
    document, position = sequences.document_BT.tolist(), sequences.position_BT.tolist()
    for b in range(B):
        for q, row in enumerate(query[b].clamp(min=0).tolist()):
            for s in range(slots):
                for t in range(row + 1):
                    near = window is None or position[b][t] > position[b][row] + 1 + s - window
                    seen[b, q * slots + s, t] = document[b][t] == document[b][row] and near
                for r in range(s + 1 if causal else slots):
                    seen[b, q * slots + s, T + q * slots + r] = True
    return seen


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 40), (True, 3), (False, 2)])
@pytest.mark.parametrize("slots", [1, 7, 16])
def test_the_rule_in_blocks_is_a_loop_over_pairs(causal, window, slots):
    """Padding too: it sees row 0 and its own block, as the dense mask has it."""
    sequences, query = packed()
    query = query[:, ::5]  # of all documents; the last ones pad
    assert (query < 0).any(1).all() and not (query < 0).all()
    mask = BlockRule(sequences, query, slots, causal, window).block_mask()
    queries = query.shape[1] * slots
    assert torch.equal(spelt_out(mask, queries, T + queries), loop(sequences, query, slots, causal, window))


def test_blocks_that_all_see_are_listed_whole_and_those_that_none_sees_not_at_all():
    """8 blocks of 16 slots are a block of queries: those behind rows 640 to 752 see 5 blocks of rows whole, part of the sixth, and part of their own."""
    every = torch.arange(1024).expand(1, -1)
    text = Sequences(*(torch.zeros(1, 1024, dtype=torch.long) for _ in range(2)), every, torch.zeros(1, 1024, dtype=torch.long))
    query = torch.arange(512, 1024, 16)[None]
    mask = BlockRule(text, query, 16).block_mask()
    assert mask.full_kv_num_blocks[0, 0].tolist() == [4, 5, 6, 7] and mask.kv_num_blocks[0, 0].tolist() == [2] * 4
    assert mask.kv_indices[0, 0, 1, :2].tolist() == [5, 9]
    assert BlockRule(text, query, 128).block_mask().full_kv_num_blocks[0, 0, 1] == 5  # 4 of the text, and its own


@pytest.mark.slow
@torch.no_grad()
def test_any_number_of_blocks_is_one_graph_and_gives_the_dense_numbers():
    """As a compiled step has it: the number of blocks is a symbol."""
    g, (H, G, S, D) = torch.Generator().manual_seed(1), (4, 2, 5, 16)
    sequences, every = packed()

    def fused(query_BQ, *parts):
        return attend_blocks_fused(*parts, BlockRule(sequences, query_BQ, S, True, 40).block_mask())

    compiled = torch.compile(fused, backend="aot_eager")
    counters.clear()
    torch._dynamo.reset()
    for Q in (32, 64, 96):
        query_BQ = every[:, -Q:].clone()
        query, own_key, own_value = (torch.randn(B, n, Q, S, D, generator=g) for n in (H, G, G))
        key, value = (torch.randn(B, G, T, D, generator=g) for _ in range(2))
        for x, dim in ((query_BQ, 1), *((x, 2) for x in (query, own_key, own_value))):
            torch._dynamo.mark_dynamic(x, dim)
        rule = BlockRule(sequences, query_BQ, S, True, 40)
        wanted = attend_blocks(query, key, value, rule.context(), own_key, own_value, rule.own())
        torch.testing.assert_close(compiled(query_BQ, query, key, value, own_key, own_value), wanted, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
