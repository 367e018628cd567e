"""Every trained weight is taught by something: read off the graph, by gradients, and by processes that wait for each other's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafters.test_faces import DRAFTERS, shaken
from recipe_targets import REAL, RECIPES, save_target, shrunken
from safetensors.torch import load_file
from tasks.test_speed import packed
from tasks.train_block_process import BLOCK, CASES
from test_recipes_shrunken import smaller
from tiny_run import logged, make_run, start

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.divergences import (
    Confidence,
    HardCrossEntropy,
    LKAlpha,
    Selection,
    SmoothL1,
    SoftCrossEntropy,
    TopKCrossEntropy,
    TotalVariation,
)
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.save import load_drafter
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.losses import Distillation
from drafttrain.recipe import load_recipe
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.distill import require_taught, unreached
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.vocab import DraftVocabulary

SCRIPT = Path(__file__).with_name("train_block_process.py")
OBJECTIVES = {
    "soft": [SoftCrossEntropy()],
    "hard": [HardCrossEntropy()],
    "states": [SmoothL1()],
    "alpha": [LKAlpha()],
    "top": [TopKCrossEntropy()],
    "sure": [TotalVariation(), Confidence()],
    "confidence alone": [Confidence()],
    "selecting": [HardCrossEntropy(), Selection()],
}


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """(folder, loaded) of a target whose embedding has rows that no text uses, as a block's mask needs one."""
    folder = save_target(shrunken(REAL["smollm2-135m"]()), tmp_path_factory.mktemp("padded"))
    return folder, load_target(TargetConfig(path=str(folder)), device="cpu")


PAIRS = [
    (name, taught)
    for name in DRAFTERS
    for taught in OBJECTIVES
    if (taught != "selecting" or name == "dflash2")
    and (name == "dspark" or "onfidence" not in str(OBJECTIVES[taught]))
    and not ("own heads" in name and taught == "states")
]
"""Drafters, and what can be asked of them."""


def without_gradient(target, net, objective) -> list[str]:
    """By a real backward pass over real texts."""
    sequences = packed(5)
    layout = net.layout(sequences, net.needs.depth)
    drafted = net.rows(sequences, target.read_packed(sequences, net.needs.taps), layout)
    terms, _ = objective.terms(drafted, net.logits, TargetTeacher(target, net), net.needs.depth)
    net.zero_grad()
    torch.stack([term.sum for term in terms.values()]).sum().backward()
    return [name for name, weight in net.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize(("name", "taught"), PAIRS)
def test_the_graph_and_a_backward_pass_name_the_same_weights(tiny_llama, name, taught, chunk):
    objective, config = Distillation(OBJECTIVES[taught], chunk=chunk), DRAFTERS[name]
    torch.manual_seed(0)
    net = shaken(config.build(tiny_llama, DraftVocabulary(torch.arange(0, 320, 2), 320)))
    drawn = torch.get_rng_state()
    found = unreached(tiny_llama, net, objective)
    assert torch.equal(drawn, torch.get_rng_state()) and all(weight.grad is None for weight in net.parameters())
    assert found == without_gradient(tiny_llama, net, objective)


@pytest.mark.parametrize("path", [p for p in RECIPES if p.parent.name == "smollm2-135m"], ids=lambda path: path.stem)
def test_a_recipe_teaches_every_weight(padded, path):
    folder, target = padded
    recipe, _ = load_recipe([path], smaller(load_recipe([path])[0], folder))
    words = recipe.drafter.draft_vocab
    vocabulary = DraftVocabulary.full(target.vocab) if words is None else DraftVocabulary(torch.arange(words), target.vocab)
    net = recipe.drafter.build(target, vocabulary)
    assert len(list(net.parameters())) > 5
    assert without_gradient(target, net, recipe.objective) == unreached(target, net, recipe.objective) == []


@pytest.mark.parametrize(
    ("name", "taught", "part"),
    [
        ("dspark", [HardCrossEntropy(), TotalVariation()], "confidence_head of this DSpark"),
        ("dflash2", [HardCrossEntropy()], "candidate_selector of this DFlash2"),
        ("eagle3", [SmoothL1()], "lm_head of this Eagle3"),
    ],
)
def test_what_is_not_taught_is_named(tiny_llama, name, taught, part):
    net = DRAFTERS[name].build(tiny_llama, DraftVocabulary.full(320))
    with pytest.raises(UserError, match=part):
        require_taught(tiny_llama, net, Distillation(taught))


def test_frozen_weights_need_no_teacher(tiny_llama):
    net = DRAFTERS["dspark"].build(tiny_llama, DraftVocabulary.full(320))
    net.confidence_head.requires_grad_(False)
    require_taught(tiny_llama, net, Distillation([HardCrossEntropy()]))


def test_a_drafter_without_confidence_is_one_from_training_to_export(tmp_path, padded):
    """Nothing untrained is saved, exported or asked: a chain that ends by confidence ends by the probabilities of its tokens."""
    folder, target = padded
    run = make_run(tmp_path / "run", target)
    drafter, divergences = CASES["dspark without confidence"]
    start(run, folder, drafter=drafter, objective={"divergences": divergences})
    net, record = load_drafter(run / "checkpoints" / "best", target)
    assert record["init_args"]["confidence"] is False and not [name for name in net.state_dict() if "confidence" in name]
    export_drafter(net, target, tmp_path / "export", ExportConfig(dtype="float32", format="native"), None)
    reloaded = load_export(tmp_path / "export", target)
    hidden_B1H, prev_B1 = torch.randn(3, 1, target.hidden), torch.tensor([[5], [6], [7]])
    for each in (net, reloaded):
        assert each.confidence(hidden_B1H[:, 0], prev_B1[:, 0]) is None
        logits_B1V = each.logits(hidden_B1H[:, 0], prev_B1[:, 0])[:, None]
        sure_B1 = ChainProposer(each, 3, 0.5)._log_sure(hidden_B1H, prev_B1, logits_B1V)
        torch.testing.assert_close(sure_B1.exp(), logits_B1V.softmax(-1).amax(-1))
    with pytest.raises(UserError, match="names Confidence, but this drafter has no head"):
        unreached(target, net, Distillation([HardCrossEntropy(), Confidence()]))


def test_a_fresh_net_is_the_same_with_and_without_confidence(padded):
    target, nets = padded[1], []
    for confidence in (True, False):
        torch.manual_seed(0)
        nets.append(DSpark(**BLOCK, confidence=confidence).build(target, DraftVocabulary.full(target.vocab)))
    more, less = (net.state_dict() for net in nets)
    assert more.keys() - less.keys() == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert all(torch.equal(weight, more[name]) for name, weight in less.items())


def launch(run, target, case, ranks, **trainer) -> subprocess.CompletedProcess:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(SCRIPT), str(run), str(target), case, json.dumps({"trainer": trainer})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("case", ["dspark without confidence", "dflash2"])
def test_two_processes_train_what_one_does(tmp_path, padded, case):
    folder, target = padded
    alone, pair = (make_run(tmp_path / name, target) for name in ("alone", "pair"))
    settings = {"max_steps": 3, "log_every_n_steps": 1}
    for run, ranks, more in ((alone, 1, {"accumulate_grad_batches": 2}), (pair, 2, {"strategy": "ddp"})):
        done = launch(run, folder, case, ranks, **settings, **more)
        assert done.returncode == 0, done.stdout + done.stderr
    assert logged(pair).keys() == {1, 2, 3} and logged(pair) == pytest.approx(logged(alone), rel=1e-5)
    mine, theirs = (load_file(run / "checkpoints/last_drafter/drafter.safetensors") for run in (alone, pair))
    assert all(torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5) for name, value in mine.items())


def test_two_processes_refuse_what_is_not_taught_before_they_wait(tmp_path, padded):
    folder, target = padded
    run = make_run(tmp_path / "run", target)
    done = launch(run, folder, "dspark untaught", 2, max_steps=3, strategy="ddp")
    assert done.returncode != 0 and "teach nothing to confidence_head of this DSpark" in done.stdout + done.stderr
    assert not (run / "checkpoints").exists()
