"""Every path of the attention switch against a loop over queries and keys."""

import math

import pytest
import torch

from drafttrain.ops import attention
from drafttrain.ops.attention import _by_products, attend, attend_chain, attend_softcapped, attend_with_sinks

B, G, D, S = 2, 2, 8, 12


def loop(query, key, value, visible, scale=None, cap=None, sinks=None):
    """[B, H, Q, D], one query and one key at a time, in double precision; a sink is one score more."""
    heads, queries = query.shape[1], query.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(B):
        for h in range(heads):
            g = h // (heads // G)
            for q in range(queries):
                scores = []
                for s in range(S):
                    score = float((query[b, h, q].double() * key[b, g, s].double()).sum()) * (D**-0.5 if scale is None else scale)
                    score = score if cap is None else cap * math.tanh(score / cap)
                    scores.append(score if visible[b, 0, q, s] else -math.inf)
                scores += [] if sinks is None else [float(sinks[h])]
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)[:S]
                out[b, h, q] = weights @ value[b, g].double()
    return out.float()


def made(heads, queries, seed=0):
    g = torch.Generator().manual_seed(seed)
    visible = torch.rand(B, 1, queries, S, generator=g) > 0.4
    visible[..., 0] = True
    return *(torch.randn(B, n, m, D, generator=g) for n, m in ((heads, queries), (G, S), (G, S))), visible


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_attend(heads, queries, added, scale):
    query, key, value, visible = made(heads, queries)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -math.inf) if added else visible
    torch.testing.assert_close(
        attend(query, key, value, mask, scale), loop(query, key, value, visible, scale), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_products_of_a_few_queries(added, scale):
    """The path that a GPU takes in fp32."""
    query, key, value, visible = made(2, 5)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -math.inf) if added else visible
    torch.testing.assert_close(
        _by_products(query, key, value, mask, scale), loop(query, key, value, visible, scale), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("held", [2**28, 2 * B * 6 * S, 1])
def test_softcapped_scores(monkeypatch, held):
    """All queries at once, two at a time, and one by one, however little may be held."""
    monkeypatch.setattr(attention, "SCORES", held)
    query, key, value, visible = made(6, 3)
    found = attend_softcapped(query, key, value, visible, 0.9, 2.0)
    torch.testing.assert_close(found, loop(query, key, value, visible, 0.9, 2.0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("held", [2**28, 2 * B * 6 * S, 1])
@pytest.mark.parametrize("heads", [2, 6])
def test_sinks(monkeypatch, heads, held):
    monkeypatch.setattr(attention, "SCORES", held)
    query, key, value, visible = made(heads, 3)
    sinks = torch.linspace(-2, 3, heads)
    mask = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    found = attend_with_sinks(query, key, value, mask, 0.9, sinks)
    torch.testing.assert_close(found, loop(query, key, value, visible, 0.9, sinks=sinks), atol=1e-5, rtol=1e-4)


def test_a_chain_sees_its_context_and_its_own_earlier_steps_alone():
    query, key, value, visible = made(6, 4)
    g = torch.Generator().manual_seed(5)
    own_keys, own_values = ([torch.randn(B, G, 4, D, generator=g) for _ in range(3)] for _ in range(2))
    found = attend_chain(query, key, value, visible[:, 0], own_keys, own_values)
    for q in range(4):
        keys = torch.cat([key, *(own[:, :, q : q + 1] for own in own_keys)], dim=2)
        values = torch.cat([value, *(own[:, :, q : q + 1] for own in own_values)], dim=2)
        seen = torch.cat([visible[:, :, q : q + 1], torch.ones(B, 1, 1, 3, dtype=torch.bool)], dim=-1)
        wanted = attend(query[:, :, q : q + 1], keys, values, seen)
        torch.testing.assert_close(found[:, :, q : q + 1], wanted, atol=1e-5, rtol=1e-4)
