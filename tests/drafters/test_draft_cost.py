"""What a round of drafts reads: as `draft_cost` counts it by module calls, against the operands and the FLOPs of the real proposer's round."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from drafters.test_dspark import admitted
from drafters.test_faces import DRAFTERS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.drafters.vocabulary import draft_cost
from drafttrain.types import Features
from drafttrain.vocab import DraftVocabulary

aten = torch.ops.aten
LOOKUPS = {aten.embedding.default, aten.t.default, aten.transpose.int, aten.view.default, aten.detach.default, aten.alias.default}
PRODUCTS = (aten.mm, aten.addmm)


class Operands(TorchDispatchMode):
    """Numbers of the watched tensors' storages that operations take, lookups and views left out."""

    def __init__(self, watched):
        super().__init__()
        self.names = {tensor.untyped_storage().data_ptr(): name for name, tensor in watched.items()}
        self.read = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in LOOKUPS:
            for part in args:
                if isinstance(part, torch.Tensor) and (name := self.names.get(part.untyped_storage().data_ptr())):
                    self.read[name] += part.numel()
        return func(*args, **(kwargs or {}))


def built(target, config, size):
    torch.manual_seed(0)
    return config.build(target, DraftVocabulary(torch.arange(size), target.vocab)).eval()


def round_of(target, net):
    """(proposer, a real round: it drafts, then reads two accepted rows)."""
    proposer = ChainProposer(net, net.needs.depth)
    propose, _ = admitted(proposer, target, rows=1)
    features = Features(torch.randn(1, 2, len(net.needs.taps), target.hidden), torch.randn(1, 2, target.hidden))

    def play():
        proposer.commit(features, torch.randint(3, 300, (1, 2)), torch.tensor([2]), 64)
        propose()

    return play


@torch.no_grad()
@pytest.mark.parametrize("size", [40, 320])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_cost_is_what_the_operations_of_a_real_round_read(tiny_llama, name, size):
    net = built(tiny_llama, DRAFTERS[name], size)
    shared = getattr(net, "head", None) or getattr(net, "target_head", None)
    watched = dict(net.named_parameters())
    if shared is not None:  # the rows that are said, as the head has cut them
        (head,) = [
            cell.cell_contents for cell in shared._score.__closure__ if getattr(cell.cell_contents, "shape", None) == (size, 32)
        ]
        watched["the target's head"] = head
    play = round_of(tiny_llama, net)
    with Operands(watched) as seen:
        play()
    seen.read.pop("mask_hidden", None)  # a row of numbers
    cost = draft_cost(DRAFTERS[name], tiny_llama)
    counted = cost.drafts * (cost.outside + cost.per_token * size)
    assert counted == pytest.approx(sum(seen.read.values())), seen.read


SEQUENTIAL = {
    "eagle3": Eagle3(taps=[0, 1, 3], depth=4, draft_vocab=None),
    "eagle3 low-rank": Eagle3(taps=[1, 2], depth=3, draft_vocab=None, head_rank=5),
    "medusa": Medusa(heads=4, layers=2),
    "hydra": Hydra(heads=3, own_heads=True),
}


@torch.no_grad()
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_a_row_costs_a_multiply_add_for_every_weight_read(tiny_llama, name):
    """FLOPs of the matrix products, where every pass is of one row; norms and biases are no products."""
    net = built(tiny_llama, SEQUENTIAL[name], tiny_llama.vocab)
    proposer = ChainProposer(net, net.needs.depth)
    propose, _ = admitted(proposer, tiny_llama, rows=1)
    one = Features(torch.randn(1, 1, len(net.needs.taps), 32), torch.randn(1, 1, 32))
    with FlopCounterMode(display=False) as flops:
        proposer.commit(one, torch.tensor([[5]]), torch.tensor([1]), 64)
        propose()
    products = sum(flops.get_flop_counts()["Global"].get(product, 0) for product in PRODUCTS) / 2
    cost = draft_cost(SEQUENTIAL[name], tiny_llama)
    counted = cost.drafts * (cost.outside + cost.per_token * tiny_llama.vocab)
    small = counted - products
    assert 0 <= small < 0.04 * counted
    vectors = sum(weight.numel() for weight in net.parameters() if weight.dim() == 1)
    assert small <= cost.drafts * vectors


def longer(name, drafts):
    return {
        "dflash": DFlash(block=drafts + 1, layers=2, taps=[0, 2], mask_token=319),
        "dspark": DSpark(block=drafts, layers=2, taps=[0, 2], mask_token=319, rank=6),
        "p-eagle": PEagle(taps=[0, 1, 3], depth=drafts, layers=3, mask_token=319),
        "eagle3": Eagle3(taps=[0, 1, 3], depth=drafts),
    }[name]


@pytest.mark.parametrize("name", ["dflash", "dspark", "p-eagle", "eagle3"])
def test_more_drafts_cost_a_parallel_drafter_nothing_but_their_small_heads(tiny_llama, name):
    few, many = (draft_cost(longer(name, drafts), tiny_llama) for drafts in (3, 12))
    body, word = (many.drafts * getattr(many, part) - few.drafts * getattr(few, part) for part in ("outside", "per_token"))
    layer = sum(
        w.numel() for key, w in built(tiny_llama, longer("eagle3", 3), 1).named_parameters() if key.startswith(("mid", "norm"))
    )
    wanted = {"dflash": (0, 0), "dspark": (0, 9 * 6), "p-eagle": (0, 0), "eagle3": (9 * layer, 9 * 32)}[name]
    assert (body, word) == pytest.approx(wanted)


@pytest.mark.parametrize("name", DRAFTERS)
def test_counting_leaves_a_net_and_the_stream_of_numbers_alone_and_needs_no_weights(tiny_llama, name):
    """On an outline of the target (meta), as `plan` has it, the cost is the same."""
    outline = type(tiny_llama).__new__(type(tiny_llama))
    outline.__dict__.update(tiny_llama.__dict__)
    with torch.device("meta"):
        outline.model = type(tiny_llama.model)(tiny_llama.config)
    outline.body, outline.head = outline.model.get_decoder(), outline.model.get_output_embeddings()
    assert outline.device.type == "meta"
    config = replace(DRAFTERS[name], draft_vocab="best")
    assert draft_cost(config, outline) == draft_cost(config, tiny_llama)
