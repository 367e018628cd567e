"""The race against speculators: its count of operations against torch's own, its rows, and (slow) the whole script on shrunken targets."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks.flops import drafter_products, seen_pairs, target_products
from benchmarks.race import tables
from benchmarks.race_worker import packed_row
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.divergences import HardCrossEntropy, SoftCrossEntropy
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.layouts import one_chat
from drafttrain.losses import Distillation
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.vocab import DraftVocabulary

LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)
SCRIPT = Path(__file__).with_name("race.py")


def counted(compute) -> int:
    """Operations of matrix products in torch's own count; those of attention, which are batched, are not among them."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return sum(counter.get_flop_counts()["Global"].get(product, 0) for product in LINEAR)


def named(products, attention: bool) -> float:
    return sum(product.operations for product in products if ("pairs" in product.name) == attention)


CASES = {
    "eagle3": (Eagle3(taps=[0, 1, 3], depth=3), SoftCrossEntropy(), True, True),
    "eagle3 frozen head": (Eagle3(taps=[0, 2], depth=2), SoftCrossEntropy(), True, False),
    "eagle3 without a teacher": (Eagle3(taps=[0, 2], depth=2), HardCrossEntropy(), False, True),
    "dflash": (DFlash(block=4, layers=2, taps=[0, 2], mask_token=319), HardCrossEntropy(), False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_matrix_products_that_torch_counts(tiny_llama, name):
    config, divergence, teacher, head_trained = CASES[name]
    words = 100 if isinstance(config, Eagle3) else 320
    vocabulary = DraftVocabulary(torch.arange(words), 320)
    net = replace(config, draft_vocab=words if words < 320 else None).build(tiny_llama, vocabulary)
    if name == "eagle3 frozen head":
        net.lm_head.requires_grad_(False)
    g = torch.Generator().manual_seed(0)
    sequences = one_chat(torch.randint(3, words, (70,), generator=g), prompt_len=70 - 33)  # 32 drafting rows: none is filled up
    layout = net.layout(sequences)
    assert bool((layout.query_BQ >= 0).all())
    features = tiny_llama.read_packed(sequences, net.needs.taps)

    def step():
        drafted = net.rows(sequences, features, layout)
        terms, _ = Distillation([divergence]).terms(drafted, net.logits, TargetTeacher(tiny_llama, net), net.needs.depth)
        torch.stack([term.sum / term.count for term in terms.values()]).sum().backward()

    products = drafter_products(net, sequences, layout, teacher, head_trained)
    assert named(products, attention=False) == counted(step)
    # Every row sees those up to itself: what a loop over the drafting rows adds up.
    pairs = sum(int(row) + 1 for row in layout.query_BQ[0])
    assert seen_pairs(sequences, layout.query_BQ) == pairs
    heads = net.shape.heads * net.shape.head_dim
    if isinstance(config, Eagle3):  # and of its own later steps 0, 1, ...
        pairs = sum(pairs + 32 * step for step in range(net.needs.depth))
    else:
        pairs = config.layers * config.block * (pairs + 32 * config.block)
    assert named(products, attention=True) == 3 * 2 * 2 * pairs * heads


def test_the_target_has_the_matrix_products_that_torch_counts(tiny_llama):
    sequences = packed_row(96, 300, 0)
    products = target_products(tiny_llama.config, sequences)
    assert named(products, attention=False) == counted(lambda: tiny_llama.read_packed(sequences, (0,)))
    lengths = torch.bincount(sequences.document_BT[0]).tolist()
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    config = tiny_llama.config
    assert named(products, attention=True) == 2 * 2 * pairs * config.hidden_size * config.num_hidden_layers


def test_rows_are_full_of_chats_that_begin_unsupervised():
    for seed in range(8):
        row = packed_row(512, 100, seed)
        document, position, supervised = row.document_BT[0], row.position_BT[0], row.supervised_BT[0]
        assert (document >= 0).all() and int(row.ids_BT.max()) < 100
        for number in range(int(document.max()) + 1):
            (at,) = (document == number).nonzero(as_tuple=True)
            assert at.tolist() == list(range(int(at[0]), int(at[0]) + len(at))), "a chat is one piece"
            assert position[at].tolist() == list(range(len(at))) and not supervised[at[0]] and supervised[at[-1]]
            assert 8 <= len(at) <= 512 * 3 / 8 + 8


def test_the_table_divides_by_theirs_and_by_the_rate():
    def run(contender, cache, seconds, **more):
        case = {"shape": "s", "drafter": "eagle3", "size": 3, "contender": contender}
        speed = {"tokens_per_second": 100 / seconds, "seconds": seconds, "peak": 2**30, "parts": {}, "steady_at": 9.0}
        return speed | more | {"case": case, "cache": cache}

    rate = {"case": {"contender": "rate"}, "device": "card", "rate": 1e12, "cache": "cold"}
    runs = [
        rate,
        run("ours", "cold", 9.0),
        run("ours", "warm", 2.0, flop=5e11, work=["p"]),
        run("speculators", "cold", 3.0, peak=2**31),
    ]
    lines = tables(runs)
    ours, theirs = ([cell.strip() for cell in line.split("|")] for line in lines[4:6])
    assert ours[4:7] == ["50", "1.50", "2000.0"] and ours[10:15] == ["1.00", "0.50", "25.0%", "9.0", "9.0"]
    assert theirs[5] == "1.00" and theirs[12] == "16.7%" and theirs[14] == ""
    assert any("0.500 TFLOP a step / 2.00000 s / 1 TFLOP/s = 25.0%" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("way", [["--caches", "cold"], ["--together"]], ids=["one behind the other", "together"])
def test_the_script_runs_on_shrunken_targets(tmp_path, way):
    out, flags = tmp_path / "race.json", ["--targets", "smollm2-135m", "--drafters", "eagle3-2,dflash-4", *way]
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", *flags, "--contenders", "ours,online,ours-frozen-head"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {(run["case"]["drafter"], run["case"]["contender"]): run for run in json.loads(out.read_text())[1:]}
    assert len(runs) == 5, done.stdout
    assert all(run["tokens_per_second"] > 0 for run in runs.values())
    assert runs["eagle3", "online"]["flop"] > runs["eagle3", "ours"]["flop"] > runs["eagle3", "ours-frozen-head"]["flop"]
    assert "| smollm2-135m | dflash 4 | online |" in done.stdout
    together = way == ["--together"]
    spans = sorted(tuple(run["measured_at"]) for run in runs.values())
    assert not together or all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all((run["steady_at"] is None) == together for run in runs.values())
