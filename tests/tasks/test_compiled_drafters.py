"""Every drafter's compiled step: recipes for GPUs compile, and what is compiled may not compute something else, nor be compiled again and again."""

from dataclasses import replace

import pytest
import torch
from drafters.test_faces import DRAFTERS, shaken
from tasks.test_speed import packed
from torch._dynamo.utils import counters

from drafttrain.divergences import Confidence, HardCrossEntropy, Selection, SoftCrossEntropy
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.losses import Distillation
from drafttrain.position_weights import Exponential
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.vocab import DraftVocabulary

COMPILED = DRAFTERS | {"dflash prefix": replace(DRAFTERS["dflash"], prefix_base=0.7)}


def objective_for(config):
    """As its recipe has it: block drafters by weights, in chunks: these batches score 25 to 40 elements, so two, and with prefixes 16 to 25, in one."""
    extra = {DFlash2: [HardCrossEntropy(), Selection()], DSpark: [HardCrossEntropy(), Confidence()]}.get(type(config))
    if extra or hasattr(config, "block"):
        chunk = 22 if config.prefix_base is None else 400
        return Distillation(extra or [HardCrossEntropy()], Exponential(4.0), "weights", chunk=chunk)
    return Distillation([SoftCrossEntropy()])


def step(net, score, target, seed, depth):
    sequences = packed(seed)
    torch.manual_seed(seed)
    layout = net.layout(sequences, depth, [(0, 2 * seed), (0, 2 * seed + 1)])
    features = target.read_packed(sequences, net.needs.taps)
    net.zero_grad()
    torch.manual_seed(seed)
    terms, metrics = score(sequences, features, layout)
    loss = torch.stack([term.sum / term.count for term in terms.values()]).sum()
    loss.backward()
    gradients = {name: w.grad.clone() for name, w in net.named_parameters() if w.grad is not None}
    return {"loss": loss.detach(), **metrics} | gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_drafter_gives_the_same_loss_and_gradients_and_is_compiled_once(tiny_llama, name):
    config = COMPILED[name]
    config = replace(config, anchors=9) if hasattr(config, "anchors") else config
    torch.manual_seed(0)
    net = shaken(config.build(tiny_llama, DraftVocabulary(torch.arange(0, 320, 2), 320)))
    objective, teacher, depth = objective_for(config), TargetTeacher(tiny_llama, net), net.needs.depth
    plain, compiled = (make_score(net, objective, teacher, depth, compile=flag) for flag in (False, True))
    counters.clear()
    torch._dynamo.reset()
    for seed in range(4):
        wanted, found = (step(net, score, tiny_llama, seed, depth) for score in (plain, compiled))
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert not counters["graph_break"], counters["graph_break"]
