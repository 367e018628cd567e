"""How deep drafts were tried in every round, which acceptance by depth is counted from."""

import pytest
import torch
from decoding.test_engine import overfit, plain_of, requests_for
from decoding.test_methods import drafter

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import Decoded, acceptance, check_counts, count, tried_of
from drafttrain.decoding.methods import AdaptiveChain, Chain, Graft, Lookup, NGram, Tree
from drafttrain.decoding.sampling import Sampling
from drafttrain.types import Rollout

METHODS = [
    Chain(3),
    Chain(5, least_confidence=0.2),
    AdaptiveChain(4),
    Tree(4, 3, 10),
    Tree(4, 3, 20, least_gain=0.05),
    Lookup(4),
    NGram(5, 4),
    Graft(3, 3, 9, copied=5),
]


@pytest.fixture(scope="module")
def taught(tiny_llama):
    requests = requests_for(tiny_llama, limit=40)
    plain = plain_of(tiny_llama, requests, overrun=8)
    torch.manual_seed(1)
    net = drafter(tiny_llama)
    overfit(tiny_llama, net, list(plain.values())[::2], steps=20)
    return requests, plain, net


def tried_by_hand(proposals, text, start, accepted) -> list[int]:
    """Down every proposal by what plain decoding says."""
    found = []
    for proposal, kept in zip(proposals, accepted, strict=True):
        tokens, parents = proposal.tokens_BN[0].tolist(), proposal.parents_BN[0].tolist()
        there = [True] * len(tokens) if proposal.valid_BN is None else proposal.valid_BN[0].tolist()
        node, depth = -1, 0
        while True:
            children = [n for n in range(len(tokens)) if there[n] and parents[n] == node]
            agreeing = [n for n in children if tokens[n] == text[start + depth]]
            if not agreeing:
                break
            node, depth = agreeing[0], depth + 1
        assert depth == kept
        found.append(depth + bool(children))
        start += depth + 1
    return found


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_a_depth_is_tried_where_a_draft_stood_there(tiny_llama, taught, method):
    requests, plain, net = taught
    proposer, proposals, less = method.proposer(net, Sampling()), [], 0
    honest = proposer.propose
    proposer.propose = lambda *given: (proposals.append(honest(*given)), proposals[-1])[1]
    engine, rollouts = Engine(tiny_llama, proposer=proposer, slots=1), []
    for request in requests:
        proposals.clear()
        (rollout,) = engine.generate([request])
        text = [*plain[request.key].ids.tolist(), *plain[request.key].beyond.tolist()]
        assert rollout.tried == tried_by_hand(proposals, text, len(request.ids) + 1, rollout.accepted)
        less += rollout.tried != [min(a + 1, proposer.drafts) for a in rollout.accepted]
        rollouts.append(rollout)
    assert (less > 0) == (method not in (METHODS[0], METHODS[5])), "chains and lookups always propose all"
    counts = count(rollouts, proposer.drafts)
    for k in range(1, proposer.drafts + 1):
        tried = sum(t >= k for r in rollouts for t in r.tried)
        kept = sum(a >= k for r in rollouts for a in r.accepted)
        assert counts.acceptance_by_depth[k - 1] == pytest.approx(kept / max(tried, 1))


def test_what_was_not_proposed_was_not_refused():
    """Two rounds: all of one draft kept, and one of three."""
    assert acceptance([1, 1], 3, [1, 2]) == (2.0, [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert acceptance([2, 1, 1], 3, [2, 1, 2])[1] == [1.0, 0.5, 0.0]
    assert acceptance([1, 1], 3) == acceptance([1, 1], 3, [2, 2])


def test_books_that_tell_of_drafts_nobody_tried_are_refused():
    answer = dict(ids=torch.arange(6), prompt_len=1, accepted=[1, 1], cut=0, stopped=True, beyond=torch.tensor([]))
    assert tried_of(Rollout("a", **answer), 1) == [1, 1]
    for tried in ([0, 1], [1, 3], [1]):
        with pytest.raises(RuntimeError, match="but tried"):
            check_counts("m", [Decoded("a", **answer, tried=tried)], 3)
    check_counts("m", [Decoded("a", **answer, tried=[2, 1])], 3)
