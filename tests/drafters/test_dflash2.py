"""DFlash 2: convolutions against loops, the walk through candidates by hand, what its two heads learn, and answers drawn with its drafts."""

from types import SimpleNamespace

import pytest
import torch
from decoding.sampled_cases import WORDS, answers, enumerated, p_values, small_target
from drafters.test_dspark import PROPOSERS, TEXT, admitted
from drafters.test_eagle3 import chat
from drafters.test_faces import drafted_of, net_for, shaken

from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import Chain, DrawnPaths, DrawnTree
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.proposer import DrafterProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.divergences import Confidence, HardCrossEntropy, Selection
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import BELOW, DFlash2, DynamicConv
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.position_weights import Exponential
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.vocab import DraftVocabulary

CONFIG = DFlash2(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6, candidates=4)


def full(target):
    torch.manual_seed(0)
    return shaken(CONFIG.build(target, DraftVocabulary.full(target.vocab)))


@torch.no_grad()
def test_a_convolution_equals_a_loop_and_stays_in_its_block():
    """Two blocks of three slots, two groups of channels: every number of the output by hand."""
    S, H, N, GROUP = 3, 8, 6, 4
    conv, g = DynamicConv(H, S, GROUP), torch.Generator().manual_seed(0)
    for weight in conv.parameters():
        weight.add_(torch.randn(weight.shape, generator=g) * 0.2)
    x_NH, mix_HH = torch.randn(N, H, generator=g), torch.randn(H, H, generator=g)

    def convolved(signal_NH, side):
        found = torch.zeros(N, H)
        for n in range(N):
            moved = (conv.kernel_projection.weight @ x_NH[n]).view(2, 2, H // GROUP)
            for c in range(H):
                kernel = [float(conv.base_kernel[side, t, c] + moved[side, t, c // GROUP]) for t in range(2)]
                found[n, c] = kernel[0] * signal_NH[n, c] + (kernel[1] * signal_NH[n - 1, c] if n % S else 0.0)
        return found

    wanted = convolved(torch.tanh(convolved(x_NH, 0) @ mix_HH), 1)
    torch.testing.assert_close(conv(x_NH[None], lambda u: torch.tanh(u @ mix_HH))[0], wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_fresh_net_is_dflash(tiny_llama):
    """The same states, and on its candidates the same logits; and every convolution matters once it has moved."""
    vocabulary = DraftVocabulary.full(tiny_llama.vocab)
    net = CONFIG.build(tiny_llama, vocabulary).eval()
    plain = DFlash(block=5, layers=2, taps=[0, 2], mask_token=319).build(tiny_llama, vocabulary).eval()
    assert not plain.load_state_dict(net.state_dict(), strict=False).missing_keys
    (_, _, ours), (_, _, theirs) = (drafted_of(each, tiny_llama, chat(TEXT)) for each in (net, plain))
    assert torch.equal(ours.hidden_NH, theirs.hidden_NH)
    best = plain.logits(theirs.hidden_NH, theirs.prev_N).topk(4)
    torch.testing.assert_close(net.logits(ours.hidden_NH, ours.prev_N).topk(4).values, best.values)
    convs = [module for module in net.modules() if isinstance(module, DynamicConv)]
    assert len(convs) == 4
    for conv in convs:
        for weight in conv.parameters():
            kept = weight.clone()
            weight.add_(0.1)
            assert not torch.allclose(drafted_of(net, tiny_llama, chat(TEXT))[2].hidden_NH, ours.hidden_NH, atol=1e-3)
            weight.copy_(kept)


@torch.no_grad()
def test_logits_choose_among_candidates(any_target):
    """S on the likeliest tokens of the first head, whose softmax is q; all others below, in the first head's order."""
    net = net_for(any_target, CONFIG)
    g = torch.Generator().manual_seed(0)
    hidden_NH, prev_N = torch.randn(7, any_target.hidden, generator=g), torch.randint(0, any_target.vocab, (7,), generator=g)
    selector, said_NV = net.candidate_selector, net.logits(hidden_NH, prev_N)
    moved = 0
    for n in range(7):
        first_V = any_target.logits(hidden_NH[n, None])[0, net.vocabulary.ids]
        best = first_V.argsort(descending=True)[:4]
        path = selector.predecessor_codebook.weight[prev_N[n]] * (selector.hidden_projection.weight @ hidden_NH[n])
        wanted = torch.stack([first_V[b] + path @ selector.successor_codebook.weight[b] for b in best])
        torch.testing.assert_close(said_NV[n, best], wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(said_NV[n].softmax(-1)[best], wanted.softmax(-1), atol=1e-5, rtol=1e-4)
        others = [v for v in range(len(first_V)) if v not in best]
        assert float(said_NV[n, others].max()) <= float(wanted.min()) - BELOW + 1e-3
        assert said_NV[n, others].argsort(descending=True).tolist() == first_V[others].argsort(descending=True).tolist()
        moved += wanted.argsort(descending=True).tolist() != [0, 1, 2, 3]
    assert moved > 0


@torch.no_grad()
def test_a_chain_is_a_walk_through_the_candidates(tiny_llama):
    net = net_for(tiny_llama, CONFIG)
    proposer = ChainProposer(net, 4)
    propose, anchor_B1 = admitted(proposer, tiny_llama, rows=6)
    proposal, greedy = propose(), 0
    for b in range(6):
        token = anchor_B1[b]
        for k, state in enumerate(net.ahead(proposer.state)[b]):
            first_V = tiny_llama.logits(state[None])[0, net.vocabulary.ids]
            best = first_V.topk(4).indices
            path = net.candidate_selector.predecessor_codebook(token)[0] * net.candidate_selector.hidden_projection(state)
            score = first_V[best] + net.candidate_selector.successor_codebook(best) @ path
            token = net.vocabulary.ids[best[score.argmax()], None]
            assert int(proposal.tokens_BN[b, k]) == int(token)
            greedy += int(score.argmax()) == 0
    assert 0 < greedy < 24  # the selector changes some, not all


@torch.no_grad()
@pytest.mark.parametrize("name", PROPOSERS)
def test_one_product_with_the_head_says_the_same_as_one_for_every_step(tiny_llama, monkeypatch, name):
    net = net_for(tiny_llama, CONFIG)
    products, head = [], net.head
    net.head = lambda hidden_NH: products.append(len(hidden_NH)) or head(hidden_NH)
    propose, _ = admitted(PROPOSERS[name](net), tiny_llama)
    at_once = propose()
    assert len(products) == 1
    monkeypatch.setattr(DrafterProposer, "_known", lambda self, count: None)
    step_by_step = propose()
    assert len(products) > 3
    assert torch.equal(at_once.tokens_BN, step_by_step.tokens_BN) and torch.equal(at_once.parents_BN, step_by_step.parents_BN)
    if at_once.q_BPV is not None:
        torch.testing.assert_close(at_once.q_BPV, step_by_step.q_BPV)


@pytest.mark.parametrize("chunk", [0, 5])
def test_the_first_head_learns_alone_and_the_selector_among_candidates(tiny_llama, chunk):
    """Hard cross-entropy over all tokens for the first head, and over the candidates with the label put in for both, by hand."""
    net = full(tiny_llama)
    features, layout, drafted = drafted_of(net, tiny_llama, chat(TEXT), 4)
    objective = Distillation([HardCrossEntropy(), Selection(weight=0.5)], Exponential(4.0), "weights", chunk)
    terms, metrics = objective.terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 4)
    loss = terms["weights"].sum / terms["weights"].count
    grads = torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True, allow_unused=True)
    total, weights, right, inserted = torch.zeros(()), 0.0, 0, 0
    hidden_NH, selector = net.rows(chat(TEXT), features, layout).hidden_NH, net.candidate_selector
    for n in range(len(layout.depth_N)):
        label = int(layout.label_N[n])
        first_V = net.head(hidden_NH[n])
        best = first_V.topk(4).indices.tolist()
        right += best[0] == label
        inserted += label not in best
        best = best if label in best else [*best[:3], label]
        path = selector.predecessor_codebook.weight[drafted.prev_N[n]] * (selector.hidden_projection.weight @ hidden_NH[n])
        score = torch.stack([first_V[b] + selector.successor_codebook.weight[b] @ path for b in best])
        weight = 2.718281828459045 ** (-(int(layout.depth_N[n]) - 1) / 4)
        total = total - weight * (first_V.log_softmax(-1)[label] + 0.5 * score.log_softmax(-1)[best.index(label)])
        weights += weight
    wanted = total / weights
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-4)
    assert sum(float(metrics[f"top1_depth_{k}"]) for k in range(1, 5)) == right and inserted > 5
    by_hand = torch.autograd.grad(wanted, list(net.parameters()))
    for (name, _), got, expected in zip(net.named_parameters(), grads, by_hand, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3, msg=name)
        assert float(got.abs().max()) > 0, name


def test_what_it_cannot_learn_is_refused(tiny_llama):
    net = full(tiny_llama)
    _, _, drafted = drafted_of(net, tiny_llama, chat(TEXT))
    with pytest.raises(UserError, match="names Confidence, but this drafter"):
        Distillation([Confidence()]).terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 4)
    plain = net_for(tiny_llama, DFlash(block=5, layers=2, taps=[0, 2], mask_token=319))
    _, _, drafted = drafted_of(plain, tiny_llama, chat(TEXT))
    with pytest.raises(UserError, match="names Selection, but this drafter has no selector"):
        Distillation([Selection()]).terms(drafted, plain.logits, TargetTeacher(tiny_llama, plain), 4)


@pytest.fixture(scope="module")
def nine_words(tiny_llama):
    """The target whose answers can be enumerated, and a drafter whose drafts depend on what it read and on the token before."""
    target = small_target(tiny_llama)
    torch.manual_seed(6)
    config = DFlash2(block=5, layers=2, taps=[0, 2], mask_token=8, rank=4, candidates=4)
    net = config.build(target, DraftVocabulary.full(WORDS))
    with torch.no_grad():
        net.candidate_selector.successor_codebook.weight.normal_()
    return target, net.eval()


@pytest.mark.parametrize(
    "method",
    [Chain(4, draw=True), Chain(4, draw=True, verify="token_wise"), DrawnTree([3, 2, 1]), DrawnTree([6, 2]), DrawnPaths(3, 3)],
    ids=lambda method: method.label,
)
def test_answers_follow_the_target(nine_words, method):
    """Also where a node has more children than there are candidates."""
    target, net = nine_words
    sampling = Sampling(temperature=1.0, top_p=0.9)
    found = answers(target, net, method, sampling, 4000)
    values, tau = p_values(found, enumerated(target, sampling)), count(found, 4).tau
    print(f"{method.label}: p {values[0]:.3f}, {values[1]:.3f}; tau {tau:.2f}")
    assert min(values) > 0.001 and tau > 1.2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"block": 1}, "block is 1, but must be at least 2"),
        ({"candidates": 1}, "candidates is 1"),
        ({"rank": 0}, "rank is 0"),
        ({"group": 0}, "group is 0"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        DFlash2(**arguments)


def test_a_width_that_groups_do_not_divide_is_refused():
    with pytest.raises(UserError, match="group is 16, but must divide this target's width of 40; try 8"):
        DFlash2().build(SimpleNamespace(hidden=40), None)
