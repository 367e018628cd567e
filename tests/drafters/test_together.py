"""Layers that read the same rows compute in one product once a step is compiled, and give the same numbers and gradients; others by themselves."""

from dataclasses import replace

import pytest
import torch
from drafters.test_faces import DRAFTERS, shaken
from tasks.test_speed import packed
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.nn.functional import linear

from drafttrain.drafters.decoder import together
from drafttrain.tasks.lora import insert
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.vocab import DraftVocabulary

# Products of a pass, plainly and compiled. EAGLE-3 of 3 depths: the taps; keys and values of the text; three times queries, output and an MLP's three,
# twice own keys and values. DFlash: the taps; of 2 layers keys and values of the text, the own three, output, and an MLP's three.
PRODUCTS = {"eagle3": (1 + 2 + 3 * 5 + 2 * 2, 1 + 1 + 3 * 4), "dflash": (1 + 2 * 9, 1 + 2 * 5)}


def passed(net, target, rows):
    sequences = packed(0)
    layout = net.layout(sequences, 3, [(0, 0), (0, 1)])
    features = target.read_packed(sequences, net.needs.taps)
    hidden_NH = rows(sequences, features, layout).hidden_NH
    net.zero_grad()
    (hidden_NH * torch.randn(hidden_NH.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return [hidden_NH.detach(), *(w.grad.clone() for w in net.parameters() if w.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_compiled_pass_has_fewer_products_and_the_same_numbers(tiny_llama, name, lora):
    """Adapters are not laid together: each stands beside a matrix of its own."""
    config = replace(DRAFTERS[name], layers=2) if name == "dflash" else DRAFTERS[name]
    torch.manual_seed(0)
    net = shaken(config.build(tiny_llama, DraftVocabulary(torch.arange(0, 320, 2), 320)))
    if lora:
        insert(net, LoraConfig(rank=2))
    torch._dynamo.reset()
    graphs = AotEagerAndRecordGraphs()
    wanted, found = passed(net, tiny_llama, net.rows), passed(net, tiny_llama, torch.compile(net.rows, backend=graphs))
    assert len(wanted) == len(found) > 3
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    products = sum(node.target is linear for graph in graphs.graphs for node in graph.graph.nodes)
    plainly, compiled = PRODUCTS[name]
    assert products == (3 * plainly if lora else compiled)


def test_matrices_that_stand_alone_are_not_laid_together(monkeypatch):
    """One with a bias, one in pieces, one of another class."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "cat", lambda weights: pytest.fail("laid together"))
    plain, biased, divided, other = (
        nn.Linear(3, 2, False),
        nn.Linear(3, 2),
        nn.Linear(3, 2, False),
        nn.Sequential(nn.Linear(3, 2)),
    )
    divided.weight.ds_id = 0
    x = torch.randn(4, 3)
    for layer in (biased, divided, other):
        assert all(torch.equal(a, b) for a, b in zip(together(x, (plain, layer)), (plain(x), layer(x)), strict=True))
    with pytest.raises(pytest.fail.Exception):
        together(x, (plain, plain))
