"""DSpark: which slot drafts what, what the Markov head adds, confidence in training and in drafting, one product with the head for all depths,
and answers drawn with its drafts."""

from dataclasses import replace

import pytest
import torch
from decoding.sampled_cases import PROMPT, WORDS, answers, enumerated, p_values, small_target
from drafters.test_eagle3 import chat
from drafters.test_faces import drafted_of, net_for, shaken

from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import Chain, DrawnTree, Tree
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_drawn import DrawnProposer
from drafttrain.decoding.propose_static import StaticTreeProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.proposer import DrafterProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.tree_shape import TreeShape
from drafttrain.divergences import Confidence, HardCrossEntropy, TotalVariation
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dspark import DSpark
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.position_weights import Exponential
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Features
from drafttrain.vocab import DraftVocabulary

CONFIG = DSpark(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6)
PUBLISHED = [HardCrossEntropy(weight=0.1), TotalVariation(weight=1.8), Confidence()]
TEXT = "00011111111111100111"


def admitted(proposer, target, rows=2):
    """The proposer with some rows of different lengths; and how to ask it."""
    g = torch.Generator().manual_seed(1)
    ids, length = torch.randint(3, 300, (rows, 40), generator=g), torch.arange(7, 7 + rows)
    features = target.read_packed(chat("0" * 2 + "1" * 18, ids=ids[0, :20].tolist()), proposer.taps)
    width = int(length.max())
    every = Features(features.taps_BTAD[:, :width].repeat(rows, 1, 1, 1), features.final_BTD[:, :width].repeat(rows, 1, 1))
    proposer.begin(rows, 64)
    proposer.admit(torch.arange(rows), ids, length, every, 64)
    return lambda: proposer.propose(ids, length, torch.arange(rows), 64), ids.gather(1, length[:, None])


@torch.no_grad()
def test_every_slot_drafts_the_token_behind_it(tiny_llama):
    """Depth k of DSpark is the slot that drafts depth k-1 in DFlash with the same weights: slot k-1, the anchor's own among them."""
    ours = net_for(tiny_llama, CONFIG)
    theirs = net_for(tiny_llama, DFlash(block=5, layers=2, taps=[0, 2], mask_token=319))
    assert not theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert (ours.deepest, theirs.deepest) == (5, 4)
    sequences = chat(TEXT)
    (_, layout, drafted), (_, before, other) = (drafted_of(net, tiny_llama, sequences, 4) for net in (ours, theirs))
    where = {pair: n for n, pair in enumerate(zip(before.anchor_N.tolist(), before.depth_N.tolist(), strict=True))}
    compared = 0
    for n, (anchor, depth) in enumerate(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), strict=True)):
        if (anchor, depth - 1) in where:
            torch.testing.assert_close(drafted.hidden_NH[n], other.hidden_NH[where[anchor, depth - 1]], atol=1e-5, rtol=1e-4)
            compared += 1
    assert compared > 10


@torch.no_grad()
def test_slots_see_those_behind_them(tiny_llama):
    """A block is not causal: the first draft's state is another one where more masked slots follow."""
    longer, shorter = (net_for(tiny_llama, replace(CONFIG, block=block)) for block in (5, 4))
    (_, _, five), (_, _, four) = (drafted_of(net, tiny_llama, chat(TEXT), 1) for net in (longer, shorter))
    assert not torch.allclose(five.hidden_NH, four.hidden_NH, atol=1e-3)
    longer.causal = shorter.causal = True
    (_, _, five), (_, _, four) = (drafted_of(net, tiny_llama, chat(TEXT), 1) for net in (longer, shorter))
    torch.testing.assert_close(five.hidden_NH, four.hidden_NH, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_logits_are_the_heads_and_what_the_token_before_adds(any_target):
    net = net_for(any_target, CONFIG)
    g = torch.Generator().manual_seed(0)
    hidden_NH, prev_N = torch.randn(7, any_target.hidden, generator=g), torch.randint(0, any_target.vocab, (7,), generator=g)
    w1, w2 = net.markov_head.markov_w1.weight, net.markov_head.markov_w2.weight
    whole = any_target.logits(hidden_NH)
    for n in range(7):
        wanted = whole[n, net.vocabulary.ids] + torch.stack([row @ w1[prev_N[n]] for row in w2])
        torch.testing.assert_close(net.logits(hidden_NH, prev_N)[n], wanted, atol=1e-4, rtol=1e-4)
        told = torch.cat([hidden_NH[n], w1[prev_N[n]]]) @ net.confidence_head.proj.weight[0] + net.confidence_head.proj.bias[0]
        torch.testing.assert_close(net.confidence(hidden_NH, prev_N)[n], told, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(
        net.logits(hidden_NH, prev_N), net.logits(hidden_NH, prev_N + 1 - 2 * (prev_N > 0).long()), atol=1e-2
    )


@torch.no_grad()
def test_a_fresh_net_is_a_plain_block_drafter(tiny_llama):
    net = CONFIG.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    hidden_NH = torch.randn(4, tiny_llama.hidden)
    torch.testing.assert_close(net.logits(hidden_NH, torch.arange(4)), tiny_llama.logits(hidden_NH), atol=1e-5, rtol=1e-5)


def test_drafts_that_count_have_no_gap(tiny_llama):
    """The published mask drops all behind the first token that does not count: layouts hold nothing else."""
    layout = CONFIG.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)).layout(
        chat("0011101111111000110111111", documents="0" * 18 + "1" * 7)
    )
    assert len(layout.anchor_N.unique()) > 8
    for anchor in layout.anchor_N.unique():
        depths = layout.depth_N[layout.anchor_N == anchor].tolist()
        assert sorted(depths) == list(range(1, len(depths) + 1))


@pytest.mark.parametrize("chunk", [0, 5])
def test_the_published_objective_equals_a_loop(tiny_llama, chunk):
    """0.1 CE + 0.9 L1 + BCE, each by hand; the confidence head learns from the last alone, and the rest learns nothing from alpha."""
    net = shaken(CONFIG.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)))
    features, layout, drafted = drafted_of(net, tiny_llama, chat(TEXT), 5)
    objective = Distillation(PUBLISHED, Exponential(4.0), "weights", chunk)
    terms, _ = objective.terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 5)
    loss = terms["weights"].sum / terms["weights"].count
    grads = torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True, allow_unused=True)
    total, weights = torch.zeros(()), 0.0
    hidden_NH, told_N = net.rows(chat(TEXT), features, layout).hidden_NH, []
    for n in range(len(layout.depth_N)):
        prev = drafted.prev_N[n, None]
        q = net.logits(hidden_NH[n, None], prev)[0].softmax(-1)
        p = tiny_llama.logits(features.final_BTD[0, layout.anchor_N[n] + layout.depth_N[n] - 1]).softmax(-1)
        gap = (p - q).abs().sum()
        told_N.append(net.confidence(hidden_NH[n, None], prev)[0].sigmoid())
        kept = 1 - gap.detach() / 2
        bce = -(kept * told_N[-1].log() + (1 - kept) * (1 - told_N[-1]).log())
        weight = 2.718281828459045 ** (-(int(layout.depth_N[n]) - 1) / 4)
        total, weights = total + weight * (0.1 * -q[layout.label_N[n]].log() + 0.9 * gap + bce), weights + weight
    wanted = total / weights
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-4)
    by_hand = torch.autograd.grad(wanted, list(net.parameters()), materialize_grads=True, allow_unused=True)
    for (name, _), got, expected in zip(net.named_parameters(), grads, by_hand, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3, msg=name)
        assert float(got.abs().max()) > 0, name


def test_confidence_is_refused_without_a_head(tiny_llama):
    net = net_for(tiny_llama, DFlash(block=5, layers=2, taps=[0, 2], mask_token=319))
    _, _, drafted = drafted_of(net, tiny_llama, chat(TEXT))
    with pytest.raises(UserError, match="names Confidence, but this drafter has no head that could learn it"):
        Distillation(PUBLISHED).terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 4)


PROPOSERS = {
    "chain": lambda net: ChainProposer(net, 4),
    "sure chain": lambda net: ChainProposer(net, 4, 0.05),
    "tree": lambda net: TreeProposer(net, 4, 3, 12),
    "static": lambda net: StaticTreeProposer(net, TreeShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))),
    "drawn": lambda net: DrawnProposer(net, (3, 2, 1), Sampling(temperature=1.0)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PROPOSERS)
def test_one_product_with_the_head_says_the_same_as_one_for_every_step(tiny_llama, monkeypatch, name):
    net = net_for(tiny_llama, CONFIG)
    products, head = [], net.head
    net.head = lambda hidden_NH: products.append(len(hidden_NH)) or head(hidden_NH)
    propose, _ = admitted(PROPOSERS[name](net), tiny_llama)
    at_once = propose()
    assert products == [2 * (3 if name in ("static", "drawn") else 4)]  # rows times depths
    monkeypatch.setattr(DrafterProposer, "_known", lambda self, count: None)
    step_by_step = propose()
    assert len(products) > 3
    assert torch.equal(at_once.tokens_BN, step_by_step.tokens_BN) and torch.equal(at_once.parents_BN, step_by_step.parents_BN)
    for a, b in ((at_once.valid_BN, step_by_step.valid_BN), (at_once.q_BPV, step_by_step.q_BPV)):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@torch.no_grad()
@pytest.mark.parametrize("draw", [False, True])
def test_a_chain_ends_where_the_learnt_confidence_does(tiny_llama, draw):
    """The product of what the confidence head says along the chain, by hand; and it is not that of the likeliest tokens' probabilities."""
    net = net_for(tiny_llama, CONFIG)
    net.confidence_head.proj.bias.sub_(1.5)
    method = Chain(5, draw=draw, least_confidence=0.2)
    proposer = method.proposer(net, Sampling(temperature=1.0 if draw else 0.0))
    propose, anchor_B1 = admitted(proposer, tiny_llama, rows=8)
    proposal = propose()
    assert not draw or proposal.q_BPV is not None
    ends, others = set(), set()
    for b in range(8):
        sure, likely, prev, states = 1.0, 1.0, anchor_B1[b], net.ahead(proposer.state)[b]
        for k in range(5):
            sure *= float(net.confidence(states[k, None], prev).sigmoid())
            likely *= float(net.logits(states[k, None], prev).softmax(-1).max())
            assert bool(proposal.valid_BN[b, k]) == (sure >= 0.2)
            ends.add(sure >= 0.2)
            others.add((sure >= 0.2) == (likely >= 0.2))
            prev = proposal.tokens_BN[b, k, None]
    assert ends == others == {True, False}


@pytest.fixture(scope="module")
def nine_words(tiny_llama):
    """The target whose answers can be enumerated, and a drafter whose drafts depend on what it read."""
    target = small_target(tiny_llama)
    torch.manual_seed(6)
    net = DSpark(block=4, layers=2, taps=[0, 2], mask_token=8, rank=4).build(target, DraftVocabulary.full(WORDS))
    with torch.no_grad():
        net.markov_head.markov_w2.weight.normal_()
        net.confidence_head.proj.weight.mul_(3)
    return target, net.eval()


@pytest.mark.parametrize(
    "method",
    [Chain(4, draw=True), Chain(4, draw=True, verify="token_wise"), Chain(4, draw=True, least_confidence=0.3), DrawnTree([3, 2, 1]),
     Tree(3, 3, 8)],
    ids=lambda method: method.label,
)  # fmt: skip
def test_answers_follow_the_target(nine_words, method):
    target, net = nine_words
    sampling = Sampling(temperature=1.0, top_p=0.9)
    found = answers(target, net, method, sampling, 4000)
    values = p_values(found, enumerated(target, sampling))
    tau = count(found, 4).tau
    print(f"{method.label}: p {values[0]:.3f}, {values[1]:.3f}; tau {tau:.2f}")
    assert min(values) > 0.001 and tau > 1.2
    assert len(PROMPT) + 4 == len(found[0].ids)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"block": 0}, "block is 0, but must be at least 1"), ({"rank": 0}, "rank is 0"), ({"layers": 0}, "layers is 0"),
     ({"anchors": 0}, "anchors is 0"), ({"window": 0}, "window is 0"), ({"taps": [3, 1]}, "ascending")],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        DSpark(**arguments)
