"""Sampled decoding by the whole engine says what the target would: the first tokens of thousands of answers to one prompt, against the
exact probability of each text. And it notices a verifier that is broken."""

import pytest
import torch
from decoding.sampled_cases import PROMPT, WORDS, answers, enumerated, p_values, small_drafter, small_target
from tiny import first, rows_of

from drafttrain.decoding import verify_chain, verify_tree
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import Chain, DrawnPaths, DrawnTree, Method, Tree
from drafttrain.decoding.propose_drawn import DrawnProposer
from drafttrain.decoding.sampling import Sampling, probabilities
from drafttrain.decoding.tree import check
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.types import Features, Request

SAMPLINGS = [Sampling(temperature=t, top_p=p) for t in (0.7, 1.0) for p in (1.0, 0.9)]
METHODS: list[Method] = [
    Chain(3, draw=True, verify="token_wise"),
    Chain(3, draw=True, verify="block"),
    Chain(4, draw=True, verify="block", least_confidence=0.12),
    DrawnTree([3, 2, 1]),
    DrawnPaths(3, 3),
    DrawnTree([2, 2]),
    Tree(3, 3, 8),
]


@pytest.fixture(scope="module")
def target(tiny_llama):
    return small_target(tiny_llama)


@pytest.fixture(scope="module")
def expected(target):
    return {sampling: enumerated(target, sampling) for sampling in SAMPLINGS}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.temperature}-{s.top_p}")
@pytest.mark.parametrize("method", METHODS[:5], ids=lambda m: m.label)
def test_answers_follow_the_target(target, expected, method, sampling):
    found = answers(target, small_drafter(target), method, sampling, 4000)
    assert min(p_values(found, expected[sampling])) > 0.001
    assert count(found, 4).tau > 1.2  # or little was put to the test


@pytest.mark.slow
@pytest.mark.parametrize("words", [WORDS, WORDS - 2], ids=["full", "reduced"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.temperature}-{s.top_p}")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_many_answers_follow_the_target(target, expected, method, sampling, words):
    found = answers(target, small_drafter(target, words), method, sampling, 24_000)
    assert min(p_values(found, expected[sampling])) > 0.001


@pytest.mark.parametrize("method", [METHODS[0], METHODS[1], METHODS[3], METHODS[4]], ids=lambda m: m.label)
def test_a_residual_that_forgets_the_drafter_is_noticed(target, expected, method, monkeypatch):
    for module in (verify_chain, verify_tree):
        monkeypatch.setattr(module, "residual", lambda p_BV, q_BV: p_BV)
    found = answers(target, small_drafter(target), method, SAMPLINGS[2], 4000)
    assert min(p_values(found, expected[SAMPLINGS[2]])) < 1e-6


def test_a_wrong_q_is_noticed(target, expected, monkeypatch):
    """Draws that are not those of the q that is handed on: here q is flattened behind the drafter's back."""
    true = DrawnProposer._over_target
    monkeypatch.setattr(DrawnProposer, "_over_target", lambda self, q: 0.5 * true(self, q) + 0.5 / WORDS)
    found = answers(target, small_drafter(target), METHODS[0], SAMPLINGS[2], 4000)
    assert min(p_values(found, expected[SAMPLINGS[2]])) < 1e-6


def test_block_keeps_at_least_as_much_as_token_wise(target):
    """Answers of 30 tokens; the difference of tau over prompts has a 95% interval that is not below zero."""
    net, sampling, taus = small_drafter(target), Sampling(temperature=1.0), []
    for verify in ("block", "token_wise"):
        found = {r.key: r.accepted for r in answers(target, net, Chain(4, draw=True, verify=verify), sampling, 1000, limit=30)}
        taus.append(torch.tensor([sum(found[str(i)]) / len(found[str(i)]) for i in range(1000)]))
    gain = taus[0] - taus[1]
    interval = 1.96 * float(gain.std()) / 1000**0.5
    print(f"block - token-wise: {float(gain.mean()):.4f} +- {interval:.4f} of {float(taus[1].mean()):.3f}")
    assert float(gain.mean()) > interval


@pytest.mark.parametrize(
    ("widths", "replacement"),
    [((1, 1, 1), False), ((3, 2, 1), False), ((2, 9), False), ((12,), False), ((12, 1, 1), True), ((3, 4), True)],
)
@pytest.mark.parametrize("words", [WORDS, WORDS - 2])
@torch.no_grad()
def test_drafts_are_drawn_from_the_drafter_itself(target, widths, replacement, words):
    """q against a fresh drafter that steps each path alone; the proposal is well-formed, and the same whoever shares the batch."""
    net, sampling = small_drafter(target, words), Sampling(temperature=0.8, top_p=0.95)
    proposer = DrawnProposer(net, widths, sampling, replacement=replacement)
    ids = torch.tensor([[*PROMPT, 8], [*PROMPT[::-1], 4]])
    read = [target.read_packed(one_chat(row, 5), proposer.taps) for row in ids]
    features = first(Features(torch.cat([f.taps_BTAD for f in read]), torch.cat([f.final_BTD for f in read])), 7)
    length, padded = torch.tensor([7, 7]), torch.nn.functional.pad(ids, (0, 56))

    def propose(rows, streams):
        proposer.begin(len(rows), 64)
        proposer.admit(torch.arange(len(rows)), padded[rows], length[rows], rows_of(features, rows), 64)
        return proposer.propose(padded[rows], length[rows], torch.tensor(streams), 64)

    proposal = propose([0, 1], [11, 12])
    check(proposal, replacement=replacement)
    assert not replacement or proposal.valid_BN.all()
    alone = propose([1], [12])
    assert torch.equal(alone.tokens_BN[0], proposal.tokens_BN[1]) and torch.equal(alone.valid_BN[0], proposal.valid_BN[1])
    assert len({str(propose([1], [stream]).tokens_BN.tolist()) for stream in range(20)}) > 1
    for b in range(2):
        for place in range(1 + proposer.nodes - proposer.sizes[-1]):
            path, node = [], place - 1
            while node >= 0:
                path, node = [int(proposal.tokens_BN[b, node]), *path], int(proposal.parents_BN[b, node])
            state = net.begin(1, 64, 4)
            hidden = net.commit(state, None, rows_of(features, [b]), ids[b, None, 1:], torch.tensor([7]), 64)
            for number, token in enumerate(path):
                hidden = net.step(state, torch.tensor([[token]]), torch.tensor([[number - 1]]))[:, 0]
            wanted = torch.zeros(WORDS)
            wanted[net.speakable_V] = probabilities(net.logits(hidden, ids[:1, -1])[0], sampling)
            torch.testing.assert_close(proposal.q_BPV[b, place], wanted, atol=1e-5, rtol=1e-4)


def test_more_paths_keep_more_and_one_is_a_chain(target):
    """One path is token-wise verification, answer for answer; of four, some path agrees more often."""
    net, sampling = small_drafter(target), Sampling(temperature=1.0)
    methods = (Chain(3, draw=True, verify="token_wise"), DrawnPaths(1, 3), DrawnPaths(4, 3))
    chain, one, four = (
        {r.key: (r.ids.tolist(), r.accepted) for r in answers(target, net, method, sampling, 400, limit=20)} for method in methods
    )
    assert one == chain
    kept = [sum(sum(accepted) / len(accepted) for _, accepted in found.values()) for found in (one, four)]
    assert kept[1] > 1.2 * kept[0]


@torch.no_grad()
def test_confidence_ends_a_drawn_chain_before_the_token_is_drawn(target):
    """A draft exists where the product of the largest probabilities of q down to its place is large enough, whatever was drawn there."""
    proposer = Chain(4, draw=True, least_confidence=0.12).proposer(small_drafter(target), Sampling(temperature=1.0))
    ids = torch.nn.functional.pad(torch.tensor([[*PROMPT, 8]]), (0, 56)).expand(200, -1)
    features = rows_of(first(target.read_packed(one_chat(ids[0, :8], 5), proposer.taps), 7), [0] * 200)
    proposer.begin(200, 64)
    proposer.admit(torch.arange(200), ids, torch.full((200,), 7), features, 64)
    proposal = proposer.propose(ids, torch.full((200,), 7), torch.arange(200), 64)
    sure = proposal.q_BPV[:, :-1].amax(-1).cumprod(1)
    assert torch.equal(proposal.valid_BN, sure >= 0.12)
    assert len(proposal.valid_BN.sum(1).unique()) > 1


def test_drawing_at_temperature_zero_is_refused(target):
    for method in (Chain(3, draw=True), DrawnTree([2, 1]), DrawnPaths()):
        with pytest.raises(UserError, match="temperature is 0, where nothing is drawn"):
            method.proposer(small_drafter(target), Sampling())


@pytest.mark.parametrize("method", METHODS[:-1], ids=lambda m: m.label)
def test_books_balance_when_drawn_drafts_are_cut_and_rows_refilled(target, method):
    sampling = Sampling(temperature=0.9)
    requests = [Request(str(i), PROMPT[: 2 + i % 6], 1 + i % 13, ends=(i % WORDS,) if i % 3 else ()) for i in range(40)]
    net = small_drafter(target)
    parts = dict(proposer=method.proposer(net, sampling), verify=method.verifier(sampling), sampling=sampling)
    together = {r.key: r for r in Engine(target, **parts, slots=7, debug=True).generate(requests)}
    count(together.values(), 4)
    alone = [r for request in requests for r in Engine(target, **parts, slots=1, debug=True).generate([request])]
    for rollout in alone:  # random numbers are a row's own, so company changes nothing
        assert rollout.ids.tolist() == together[rollout.key].ids.tolist()
        assert rollout.accepted == together[rollout.key].accepted
