"""Every way of drafting says what plain decoding says, greedily and (where drafts are kept by matching) sampled, in ragged batches whose
slots are refilled; and its bad options are refused in one sentence."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from decoding.sampled_cases import PROMPT, small_drafter, small_target
from decoding.test_engine import _tie, overfit, plain_of, requests_for
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.decoding.batch import Batch
from drafttrain.decoding.calibrate import Acceptance
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import (
    Chain,
    DrawnPaths,
    DrawnTree,
    Experts,
    Graft,
    Lookup,
    Method,
    NGram,
    Recycling,
    StaticTree,
    Tree,
    _LoadedExperts,
)
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import save_drafter
from drafttrain.errors import UserError
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary

SAMPLED = Sampling(temperature=0.8, top_k=40, seed=4)
METHODS: dict[str, Method] = {
    "chain": Chain(3),
    "sure chain": Chain(4, least_confidence=0.02),
    "tree": Tree(4, 3, 10),
    "gaining tree": Tree(4, 3, 20, least_gain=0.05),
    "static": StaticTree(12, depth=3, ranks=4),
    "lookup": Lookup(4),
    "n-gram": NGram(5, 4),
    "recycling": Recycling(20, 4, 4),
    "graft": Graft(3, 3, 9, copied=5),
    "merged": Experts(3, 3, 8, drafters=["other"], by="merge"),
    "routed": Experts(3, 3, 8, drafters=["other"], by="route"),
}


def drafter(target, words=None, taps=(0, 1, 3)):
    vocabulary = (
        DraftVocabulary.full(target.vocab) if words is None else DraftVocabulary(torch.arange(3, 3 + words), target.vocab)
    )
    return Eagle3(taps=list(taps), draft_vocab=words).build(target, vocabulary).eval()


@pytest.fixture(scope="module")
def taught(targets):
    """name -> (target, requests, plain answers, two drafters that know the answers of half of the requests each)."""
    made = {}

    def teach(name):
        if name not in made:
            target = targets(name)
            requests = [replace(r, limit=8 + 5 * (i % 4)) for i, r in enumerate(requests_for(target))]
            requests.append(Request("again", tuple([7, 8, 9] * 4), 20))  # something to look up
            plain = plain_of(target, requests)
            torch.manual_seed(1)
            nets = drafter(target), drafter(target, words=target.vocab - 20, taps=(0, 2))
            for half, net in enumerate(nets):
                overfit(target, net, [plain[r.key] for r in requests[half::2]], steps=30)
            made[name] = target, requests, plain, nets
        return made[name]

    return teach


def prepared(method, target, nets, requests, folder):
    """Ready to draft; experts find their other drafter in a folder."""
    if isinstance(method, Experts):
        save_drafter(folder / "other", nets[1], nets[1].config, target.identity, {})
        method = replace(method, drafters=[str(folder / "other")])
    return method.prepare(target, nets[0], requests[:3])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mixtral", "qwen3"))]
)
def test_what_is_said_is_what_plain_decoding_says(taught, tmp_path, architecture, name):
    target, requests, plain, nets = taught(architecture)
    method = prepared(METHODS[name], target, nets, requests, tmp_path)
    for sampling in (Sampling(), SAMPLED):
        expected = plain if sampling == Sampling() else plain_of(target, requests, sampling=sampling)
        proposer = method.proposer(nets[0], sampling)
        engine = Engine(target, proposer=proposer, verify=method.verifier(sampling), sampling=sampling, slots=3, debug=True)
        for _ in range(2):  # the second call finds the buffers of the first
            rollouts = list(engine.generate(requests))
            assert {r.key: r.ids.tolist() for r in rollouts} == {key: r.ids.tolist() for key, r in expected.items()}
            counts = count(rollouts, proposer.drafts)
        if sampling == Sampling() and name not in ("lookup", "n-gram", "recycling"):
            assert counts.tau > 1.2


class AsksNothing(TorchDispatchMode):
    """Refuses what would make a GPU's host wait, or copy to the GPU: no CUDA graph could hold it."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = [x for x in args[1] if x is not None] if name in ("index", "index_put", "index_put_") else []
        if (
            any(word in name for word in self.ASKING[:-1])
            or name == self.ASKING[-1]
            or any(x.dtype == torch.bool for x in indices)
        ):
            raise AssertionError(f"a round calls {name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*METHODS, "drawn chain", "drawn tree", "paths"])
def test_a_round_asks_the_device_nothing(taught, tmp_path, monkeypatch, name):
    target, requests, _, nets = taught("llama")
    drawing = {
        "drawn chain": Chain(3, draw=True, least_confidence=0.01),
        "drawn tree": DrawnTree([3, 2]),
        "paths": DrawnPaths(3, 2),
    }
    sampling = SAMPLED if name in drawing else Sampling()
    method = prepared((METHODS | drawing)[name], target, nets, requests, tmp_path)
    rounds, stages = [], Batch.stages.fget

    def watched(batch):
        def run(stage, extent):
            with AsksNothing():
                stage(extent)
            rounds.append(stage)

        return {key: partial(run, stage) for key, stage in stages(batch).items()}

    monkeypatch.setattr(Batch, "stages", property(watched))
    parts = dict(proposer=method.proposer(nets[0], sampling), verify=method.verifier(sampling), sampling=sampling)
    list(Engine(target, **parts, slots=3).generate(requests[:3]))
    assert len(rounds) > 10


def test_asking_is_noticed():
    one, mask = torch.ones(2), torch.tensor([True, False])
    for ask in (lambda: one[0].item(), lambda: one[mask], lambda: one.nonzero(), lambda: torch.tensor([1]), lambda: bool(one[0])):
        with pytest.raises(AssertionError, match="a round calls"), AsksNothing():
            ask()


def test_experts_keep_more_together_than_alone(taught, tmp_path):
    """Each drafter knows half of the answers."""
    target, requests, _, nets = taught("llama")
    alone = [tau(target, net, Tree(3, 3, 8), requests) for net in nets]
    for by in ("merge", "route"):
        experts = prepared(Experts(3, 3, 8, drafters=["other"], by=by), target, nets, requests, tmp_path)
        assert isinstance(experts, _LoadedExperts)
        assert tau(target, nets[0], experts, requests) > max(alone), (by, alone)


def test_a_measured_tree_keeps_more_than_a_chain_of_its_depth(taught):
    """A static tree holds the greedy chain as one of its paths, if the best guess is the one most often right."""
    target, requests, _, nets = taught("llama")
    tree = StaticTree(16, depth=3, ranks=4).prepare(target, nets[0], requests)
    assert (0, 0, 0) in tree.paths
    assert tau(target, nets[0], tree, requests) >= tau(target, nets[0], Chain(3), requests) > 1.3


def test_what_stands_in_the_text_already_is_copied(tiny_llama):
    """A model of nine words soon repeats itself."""
    target = small_target(tiny_llama)
    net, requests = small_drafter(target), [Request(str(n), PROMPT[:n], 50) for n in range(1, 7)]
    plain = plain_of(target, requests)
    for method in (Lookup(4), NGram(6), Graft(2, 2, 5, copied=6), Recycling()):
        proposer = method.proposer(net, Sampling())
        rollouts = list(Engine(target, proposer=proposer, slots=4, debug=True).generate(requests))
        assert {r.key: r.ids.tolist() for r in rollouts} == {key: r.ids.tolist() for key, r in plain.items()}
        assert count(rollouts, proposer.drafts).tau > 1.5, method.label
        assert proposer.drafts in {accepted for r in rollouts for accepted in r.accepted}


def tau(target, net, method, requests):
    proposer = method.proposer(net, Sampling())
    return count(Engine(target, proposer=proposer, slots=4).generate(requests), proposer.drafts).tau


# ---- options and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Chain(0), "Chain.drafts is 0, but must be at least 1"),
        (lambda: Chain(least_confidence=1.0), "Chain.least_confidence is 1.0, but is a probability"),
        (lambda: Tree(nodes=0), "Tree.nodes is 0"),
        (lambda: Tree(least_gain=-0.1), "Tree.least_gain is -0.1"),
        (lambda: DrawnTree([]), "DrawnTree.widths is \\[\\], but must hold"),
        (lambda: DrawnTree([2, 0]), "DrawnTree.widths is \\[2, 0\\]"),
        (lambda: DrawnPaths(0), "DrawnPaths.paths is 0"),
        (lambda: DrawnPaths(drafts=0), "DrawnPaths.drafts is 0"),
        (lambda: StaticTree(0), "StaticTree.nodes is 0"),
        (lambda: StaticTree(ranks=0), "StaticTree.ranks is 0"),
        (lambda: Lookup(longest=0), "Lookup.longest is 0"),
        (lambda: NGram(trust=0.0), "NGram.trust is 0.0, but must be above 0"),
        (lambda: Recycling(top_k=0), "Recycling.top_k is 0"),
        (lambda: Graft(copied=0), "drafts is 0"),
        (lambda: Experts(), "Experts.drafters is empty"),
    ],
)
def test_options_out_of_range_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_labels_tell_methods_apart():
    methods = [
        *METHODS.values(),
        Chain(3, draw=True),
        Chain(3, draw=True, verify="token_wise"),
        DrawnTree(),
        DrawnPaths(),
        Tree(4, 3, 20),
        NGram(),
    ]
    assert len({method.label for method in methods}) == len(methods)


def test_a_tree_of_one_node_and_a_tree_too_large(taught, tmp_path):
    target, requests, plain, nets = taught("llama")
    for method in (Tree(3, 3, 1), StaticTree(1, depth=2, ranks=2), Recycling(1, 2, 2), DrawnTree([1])):
        sampling = SAMPLED if isinstance(method, DrawnTree) else Sampling()
        ready = prepared(method, target, nets, requests, tmp_path)
        proposer = ready.proposer(nets[0], sampling)
        assert proposer.nodes == proposer.drafts == 1
        engine = Engine(target, proposer=proposer, verify=ready.verifier(sampling), sampling=sampling, slots=3, debug=True)
        rollouts = list(engine.generate(requests))
        count(rollouts, 1)
        assert sampling == SAMPLED or {r.key: r.ids.tolist() for r in rollouts} == {k: r.ids.tolist() for k, r in plain.items()}
    with pytest.raises(UserError, match="cannot be built"):
        Graft(2, 2, 50).proposer(nets[0], Sampling())


def test_the_acceptance_behind_a_static_tree_is_kept(taught, tmp_path):
    target, requests, _, nets = taught("llama")
    file = tmp_path / "acceptance.json"
    with pytest.raises(UserError, match="StaticTree.file is null, and no acceptance was measured"):
        StaticTree().proposer(nets[0], Sampling())
    method = StaticTree(9, file=str(file), depth=3, ranks=3)
    with pytest.raises(UserError, match="acceptance.json is missing"):
        method.proposer(nets[0], Sampling())
    measured = method.prepare(target, nets[0], requests[:2])
    written = file.read_bytes()
    assert measured.paths == Acceptance.load(file, nets[0]).tree(9).paths and len(measured.paths) == 9
    assert method.prepare(target, nets[0], []) == measured and file.read_bytes() == written
    assert method.proposer(nets[0], Sampling()).shape.paths == measured.paths
    with pytest.raises(UserError, match="measured with another drafter"):
        method.prepare(target, nets[1], requests)


def test_experts_of_another_target_and_unprepared_ones_are_refused(taught, targets, tmp_path):
    target, requests, _, nets = taught("llama")
    save_drafter(tmp_path / "other", nets[1], nets[1].config, target.identity, {})
    experts = Experts(drafters=[str(tmp_path / "other")])
    with pytest.raises(UserError, match="made with another target"):
        experts.prepare(targets("gemma3"), nets[0], requests)
    with pytest.raises(UserError, match="holds no trained drafter"):
        Experts(drafters=[str(tmp_path / "none")]).prepare(target, nets[0], requests)
    with pytest.raises(ValueError, match="prepare first"):
        experts.proposer(nets[0], Sampling())


# ---- the long drill ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", METHODS)
def test_two_hundred_random_cases_equal_plain_decoding(any_target, tmp_path, kind):
    """Batch 1 to 16, ragged lengths, drafts of every quality. A difference counts unless the two best logits are closer than 1e-4."""
    g = torch.Generator().manual_seed(12)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    cases = 0
    while cases < 200:
        requests = [
            Request(f"{cases}.{i}", tuple(torch.randint(3, 3 + draw(2, 300), (draw(1, 40),), generator=g).tolist()), draw(1, 24))
            for i in range(draw(1, 16))
        ]
        cases += len(requests)
        plain = {r.key: r for r in Engine(any_target, slots=16).generate(requests)}
        nets = drafter(any_target), drafter(any_target, words=draw(20, 300), taps=(0, 2))
        if draw(0, 1):
            overfit(any_target, nets[draw(0, 1)], plain.values(), steps=5)
        method = METHODS[kind]
        if isinstance(method, StaticTree):  # an untaught drafter is right nowhere, which no tree can be measured on
            shares = torch.rand(3, 4, generator=g).softmax(-1).mul(100).long().tolist()
            method = method.of(Acceptance(shares, [100] * 3, ""))
        else:
            method = prepared(method, any_target, nets, requests, tmp_path)
        proposer = method.proposer(nets[0], Sampling())
        rollouts = list(Engine(any_target, proposer=proposer, slots=draw(1, 16), debug=True).generate(requests))
        count(rollouts, proposer.drafts)
        for rollout in rollouts:
            assert rollout.ids.tolist() == plain[rollout.key].ids.tolist() or _tie(any_target, plain[rollout.key], rollout)
