"""On a GPU: every way of drafting is recorded as CUDA graphs, and replaying them says the same."""

from itertools import cycle

import pytest
import torch
from decoding.test_engine import overfit, plain_of, requests_for
from decoding.test_methods import METHODS, SAMPLED, drafter, prepared

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import AdaptiveChain, Chain, DrawnPaths, DrawnTree
from drafttrain.decoding.sampling import Sampling
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DRAWING = {
    "token-wise": Chain(3, draw=True, verify="token_wise"),
    "block": Chain(3, draw=True, least_confidence=0.01),
    "drawn tree": DrawnTree([3, 2, 1]),
    "drawn paths": DrawnPaths(3, 3),
}


@pytest.fixture(scope="module")
def taught(target_folders):
    target = load_target(TargetConfig(path=str(target_folders("llama"))), device="cuda")
    requests = requests_for(target)
    plain = plain_of(target, requests)
    nets = drafter(target), drafter(target, words=target.vocab - 20, taps=(0, 2))
    for half, net in enumerate(nets):
        overfit(target, net, [plain[r.key] for r in requests[half::2]])
    return target, requests, plain, nets


def test_a_chain_of_any_length_is_recorded_before(taught):
    target, requests, plain, nets = taught
    proposer = AdaptiveChain(4).proposer(nets[0], Sampling())
    engine = Engine(target, proposer=proposer, slots=1, debug=True)
    engine.record(requests)
    known, used = engine.rounds_known, set()
    honest, lengths = proposer.heard, cycle((1, 4, 2, 3))
    proposer._choose = lambda: next(lengths)  # what it would choose depends on how fast the device is
    proposer.heard = lambda accepted, shape, seconds: (used.add(shape), honest(accepted, shape, seconds))
    for request in requests * 2:
        (rollout,) = engine.generate([request])
        assert rollout.ids.tolist() == plain[request.key].ids.tolist()
    assert used == {1, 2, 3, 4} and engine.rounds_known == known and engine.graphs_refused is None


@pytest.mark.parametrize("name", [*METHODS, *DRAWING])
def test_rounds_are_recorded_and_say_the_same(taught, tmp_path, name):
    target, requests, plain, nets = taught
    sampling = SAMPLED if name in DRAWING else Sampling()
    method = prepared((METHODS | DRAWING)[name], target, nets, requests, tmp_path)
    answers = {}
    for graphs in (True, False):
        proposer = method.proposer(nets[0], sampling)
        parts = dict(proposer=proposer, verify=method.verifier(sampling), sampling=sampling, graphs=graphs)
        engine = Engine(target, **parts, slots=4, debug=True)
        for _ in range(2):
            rollouts = list(engine.generate(requests))
            count(rollouts, proposer.drafts)
        answers[graphs] = {r.key: r.ids.tolist() for r in rollouts}
        assert engine.graphs_refused is None and bool(engine._rounds._recorded) == graphs
    assert answers[True] == answers[False]
    assert name in DRAWING or answers[True] == {key: r.ids.tolist() for key, r in plain.items()}
