"""Chains whose length follows acceptance and cost."""

import pytest
import torch
from decoding.test_engine import overfit, plain_of, requests_for

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count
from drafttrain.decoding.propose_adaptive import ASSUMED, EVERY, KNOWN_FOR, AdaptiveChainProposer
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.vocab import DraftVocabulary


def net_for(target):
    torch.manual_seed(1)
    return Eagle3(taps=[0, 1, 3], draft_vocab=None).build(target, DraftVocabulary.full(target.vocab))


def best_by_hand(acceptance, base, each):
    """Tokens a second of every length, summed out."""
    rates = {}
    for most in range(1, len(acceptance) + 1):
        tokens = 1 + sum(float(torch.tensor(acceptance[:k]).prod()) for k in range(1, most + 1))
        rates[most] = tokens / (base + each * most)
    return max(rates, key=lambda k: rates[k])


@pytest.mark.parametrize("each", [0.0, 0.03, 0.2, 5.0])
def test_the_length_is_the_one_that_gives_most_tokens_a_second(tiny_llama, each):
    """Rounds that are made up: 1 s and `each` s a draft; drafts are kept with probability 0.8, then 0.7, and so on."""
    proposer = AdaptiveChainProposer(net_for(tiny_llama), 6)
    chances = [0.8, 0.7, 0.7, 0.6, 0.6, 0.6]
    g = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(EVERY * 60):
        K = proposer.round_shape
        kept = int((torch.rand(K, generator=g) < torch.tensor(chances[:K])).long().cumprod(0).sum())
        proposer.heard([kept], K, 1.0 + each * K)
        lengths.append(proposer.active)
    wanted = best_by_hand(proposer.acceptance(), 1.0, each)
    assert proposer.active == wanted
    assert (each != 0.0 or wanted == 6) and (each != 5.0 or wanted == 1)
    assert {6, 1} <= set(lengths)  # both ends were tried, so that there is a line to fit


def test_a_cost_measured_in_a_bad_moment_is_measured_again(tiny_llama):
    """Long chains seem to cost a hundred times as much when they are tried first."""
    proposer = AdaptiveChainProposer(net_for(tiny_llama), 6)
    lengths = []
    for i in range(2 * KNOWN_FOR):
        K = proposer.round_shape
        proposer.heard([K], K, (1.0 + 0.03 * K) * (100 if i < EVERY else 1))
        lengths.append(K)
    assert set(lengths[2 * EVERY : KNOWN_FOR]) == {1} and proposer.active == 6


def test_nothing_is_learnt_from_rounds_that_were_not_timed(tiny_llama):
    proposer = AdaptiveChainProposer(net_for(tiny_llama), 5)
    assert proposer.acceptance() == pytest.approx([ASSUMED] * 5)
    for _ in range(3 * EVERY):
        proposer.heard([2, 0], proposer.round_shape, None)
    assert proposer.active == 5 and proposer.acceptance()[0] == pytest.approx(0.5, abs=0.05)


def test_output_is_plain_decodings_whatever_the_length(any_target):
    requests = requests_for(any_target, limit=60)
    plain = plain_of(any_target, requests)
    net = net_for(any_target)
    overfit(any_target, net, plain.values(), steps=15)
    proposer = AdaptiveChainProposer(net, 5)
    engine = Engine(any_target, proposer=proposer, slots=3, debug=True)
    used = set()
    propose = proposer.propose
    proposer.propose = lambda *given: (used.add(proposer.active), propose(*given))[1]
    for _ in range(2):
        rollouts = list(engine.generate(requests))
        assert {r.key: r.ids.tolist() for r in rollouts} == {key: r.ids.tolist() for key, r in plain.items()}
        count(rollouts, 5)
    assert len(used) >= 2
