"""Every drafter in the engine, after it was taught the very answers: what is said is what plain decoding says, and what is accepted is what the
training forward predicts, round by round."""

import pytest
import torch
from decoding.test_engine import overfit, plain_of, requests_for
from drafters.test_faces import DRAFTERS

from drafttrain.decoding.calibrate import calibrate
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count, simulate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_static import StaticTreeProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.vocab import DraftVocabulary


@pytest.fixture(params=sorted(DRAFTERS))
def config(request):
    return DRAFTERS[request.param]


def test_what_is_said_is_plain_decoding_and_what_is_accepted_was_predicted(tiny_llama, config):
    torch.manual_seed(0)
    requests = requests_for(tiny_llama, limit=24)
    plain = plain_of(tiny_llama, requests, overrun=3)
    said = {key: rollout.ids.tolist() for key, rollout in plain.items()}
    net = config.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    overfit(tiny_llama, net, plain.values(), steps=40)
    acceptance = calibrate(tiny_llama, net, requests, 3, 4)
    proposers = {
        "chain": ChainProposer(net, 3),
        "tree": TreeProposer(net, 3, 3, 9),
        "static": StaticTreeProposer(net, acceptance.tree(8)),
    }
    taus = {}
    for name, proposer in proposers.items():
        engine = Engine(tiny_llama, proposer=proposer, slots=3, debug=True)
        for _ in range(2):  # a second call finds the buffers of the first
            rollouts = {r.key: r for r in engine.generate(requests)}
            assert {key: r.ids.tolist() for key, r in rollouts.items()} == said, name
        taus[name] = count(rollouts.values(), proposer.drafts).tau
        if name == "chain":
            predicted = dict(zip(plain, simulate(tiny_llama, net, plain.values(), 3), strict=True))
            assert predicted == {key: rollouts[key].accepted for key in plain}
    assert taus["chain"] > 1.3 and taus["tree"] > 1.3 and taus["static"] > 1.3
