"""A step that is recorded for its sizes and replayed computes what a plain one does, of layouts that are filled up so that few sizes recur.

On a CPU nothing can be recorded: there a stand-in computes anew what a graph would replay (replayed.py).
"""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from drafters.test_dflash import wide_heads
from tasks.replayed import stand_in, steps_are_recorded
from tasks.test_accumulation import TEXT, Case
from tasks.test_no_waits import case
from tasks.test_speed import packed
from tiny_run import logged, make_run, start

from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.layouts import FILLS, filled
from drafttrain.losses import Distillation
from drafttrain.position_weights import Exponential
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.speed import GraphedStep, make_score
from drafttrain.tasks.speed_config import SpeedConfig, require_recordable
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.topology import read_topology
from drafttrain.vocab import DraftVocabulary

LENGTH = 256


@pytest.fixture
def recorded():
    """What is recorded, by a stand-in."""
    found: list[str] = []
    with stand_in(found):
        yield found


def make(target, case: Case):
    torch.manual_seed(0)
    size = case.drafter.draft_vocab
    vocabulary = DraftVocabulary.full(target.vocab) if size is None else DraftVocabulary(torch.arange(size), target.vocab)
    net, objective = case.drafter.build(target, vocabulary), case.objective
    score = make_score(net, objective, TargetTeacher(target, net), net.needs.depth, compile=False)

    def loss(sequences, features, layout, divisors):
        terms, metrics = score(sequences, features, layout)
        return torch.stack([term.sum / divisors[place] for place, term in enumerate(terms.values())]).sum(), metrics

    return net, objective, loss


def inputs(target, net, objective, seed: int, fill: bool):
    """What a step reads; divisors as the objective counts them, of the layout before it is filled up."""
    sequences = packed(seed, length=LENGTH)
    layout = net.layout(sequences, numbers=[(0, 2 * seed), (0, 2 * seed + 1)])
    counts = objective.counts(layout, net.needs.depth)
    names = {"weights": ["weights"], "drafts": ["drafts"]}.get(objective.reduction, [n for n in counts if n.startswith("depth_")])
    divisors = torch.tensor([max(counts[name], 1.0) for name in names])
    layout = filled(layout, LENGTH, net.fixed_queries) if fill else layout
    return sequences, target.read_packed(sequences, net.needs.taps), layout, divisors


def step(net, compute, given):
    net.zero_grad()
    loss, metrics = compute(*given)
    (3 * loss).backward()
    return {"loss": loss.detach(), **metrics} | {name: weight.grad.clone() for name, weight in net.named_parameters()}


def assert_same(found, wanted, rtol=1e-5):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=rtol * max(scale, 1e-3), msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", TEXT, ids=str)
def test_what_fills_a_layout_counts_nothing(tiny_llama, case):
    net, objective, loss = make(tiny_llama, case)
    plain, full = (inputs(tiny_llama, net, objective, 1, fill) for fill in (False, True))
    assert len(full[2].label_N) > len(plain[2].label_N)
    assert_same(step(net, loss, full), step(net, loss, plain))


@pytest.mark.parametrize("name", ["eagle3", "dflash", "p-eagle", "dflash prefixes"])
def test_few_sizes_recur(tiny_llama, name):
    """Of many packed rows, each of which has its own number of elements."""
    config, objective = case(name) if name != "dflash prefixes" else case("dflash")
    if name == "dflash prefixes":
        config = replace(config, prefix_base=0.9)
    net, objective, _ = make(tiny_llama, Case(config, objective))
    sizes: dict[bool, set] = {False: set(), True: set()}
    for seed in range(40):
        for fill, found in sizes.items():
            _, _, layout, _ = inputs(tiny_llama, net, objective, seed, fill)
            found.add(tuple(x.shape for x in vars(layout).values()))
    assert len(sizes[False]) > 15 and len(sizes[True]) <= FILLS // 2, sizes


def test_a_layout_without_elements_stays_as_it_is(tiny_llama):
    net, _, _ = make(tiny_llama, TEXT[0])
    sequences = packed(0)
    empty = net.layout(replace(sequences, supervised_BT=torch.zeros_like(sequences.supervised_BT)))
    assert filled(empty, 64) is empty


@pytest.mark.parametrize("case", [TEXT[0], TEXT[5], TEXT[7]], ids=str)
def test_replayed_steps_give_the_same_loss_and_gradients(tiny_llama, recorded, case):
    """One behind the other, of different sizes, and then the first again: nothing of one is left in another."""
    net, objective, loss = make(tiny_llama, case)
    graphed = GraphedStep(loss, net)
    for seed in (1, 2, 1, 3, 2):
        given = inputs(tiny_llama, net, objective, seed, True)
        assert_same(step(net, graphed, given), step(net, loss, given), rtol=1e-6)
    sizes = {tuple(x.shape for x in vars(inputs(tiny_llama, net, objective, seed, True)[2]).values()) for seed in (1, 2, 3)}
    assert len(recorded) == len(sizes)


def test_what_a_step_said_outlives_the_next(tiny_llama, recorded):
    """Gradients add up over micro-batches, and metrics are summed: neither may lie where the next replay writes."""
    net, objective, loss = make(tiny_llama, TEXT[0])
    graphed = GraphedStep(loss, net)
    given = [inputs(tiny_llama, net, objective, seed, True) for seed in (1, 2)]
    wanted = [step(net, loss, one) for one in given]
    net.zero_grad()
    said = []
    for one in given:
        found, metrics = graphed(*one)
        (3 * found).backward()
        said.append({"loss": found.detach()} | metrics)
    gradients = {name: weight.grad for name, weight in net.named_parameters()}
    for found, alone in zip(said, wanted, strict=True):
        assert_same(found, {name: alone[name] for name in found}, rtol=1e-6)
    assert_same(gradients, {name: wanted[0][name] + wanted[1][name] for name in gradients}, rtol=1e-6)


def test_weights_that_moved_are_recorded_anew(tiny_llama, recorded):
    """A graph would go on reading where they were."""
    net, objective, loss = make(tiny_llama, TEXT[0])
    graphed, given = GraphedStep(loss, net), inputs(tiny_llama, net, objective, 1, True)
    for times in (1, 2):
        assert_same(step(net, graphed, given), step(net, loss, given), rtol=1e-6)
        assert_same(step(net, graphed, given), step(net, loss, given), rtol=1e-6)
        assert len(recorded) == times
        for weight in net.parameters():
            weight.data = weight.data * 1.5
    assert_same(step(net, graphed, given), step(net, loss, given), rtol=1e-6)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_run_of_replayed_steps_logs_the_same(tmp_path, tiny_llama, target_folders, recorded, name):
    drafter, objective = case(name)
    plain, graphed = (make_run(tmp_path / name, tiny_llama) for name in ("plain", "graphed"))
    trainer = {"max_steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    for run, flag in ((plain, False), (graphed, True)):
        settings = {"compile": flag, "graph_step": flag}
        with ExitStack() as stack:
            for patched in steps_are_recorded():
                stack.enter_context(patched)
            start(run, target_folders("llama"), drafter=drafter, objective=objective, trainer=trainer, speed=settings)
    assert recorded
    for column in ("train/loss", "train/top1_depth_1", "train/loss_depth_2"):
        assert logged(graphed, column) == pytest.approx(logged(plain, column), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("settings", "trainer", "said"), [
    ({"compile": False}, {}, "speed.compile is false; set it to true"),
    ({}, {"precision": "16-mixed"}, "16-mixed.*use bf16-mixed"),
    ({}, {"strategy": "deepspeed_stage_3_offload"}, "ZeRO-3.*zero2.yaml"),
    ({}, {"strategy": {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"stage": 3}}}, "ZeRO-3"),
])  # fmt: skip
def test_what_cannot_be_recorded_is_refused(settings, trainer, said):
    with pytest.raises(UserError, match=said):
        require_recordable(SpeedConfig(**{"compile": True, "graph_step": True} | settings), trainer)
    require_recordable(SpeedConfig(), trainer)


def test_what_can_be_is_not(tmp_path):
    config = SpeedConfig(compile=True, graph_step=True)
    stage_2 = {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"stage": 2}}
    for strategy in ("auto", "ddp", "deepspeed_stage_2", stage_2):
        require_recordable(config, {"precision": "bf16-mixed", "strategy": strategy})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["dflash", "eagle3", "hass"])
def test_on_a_gpu_a_run_of_recorded_steps_logs_the_same(tmp_path, name, precision):
    """HASS without its noise, which is drawn for places that a filled layout has more of."""
    drafter, objective = (Eagle3(taps=[0, 1, 3], depth=4, draft_vocab=200), Distillation()) if name == "eagle3" else case(name)
    if name == "hass":
        drafter = replace(drafter, noise=0.0)
    folder = wide_heads(tmp_path / "target")
    target = load_target(TargetConfig(path=str(folder)), device="cpu")
    plain, recorded = (make_run(tmp_path / kind, target) for kind in ("plain", "recorded"))
    trainer = {"max_steps": 8, "accumulate_grad_batches": 2, "precision": precision, "gradient_clip_val": 1.0}
    for run, flag in ((plain, False), (recorded, True)):
        settings = {"compile": True, "graph_step": flag, "graph_target": True, "fused_blocks": precision != "32-true"}
        start(run, folder, read_topology(), drafter=drafter, objective=objective, trainer=trainer, speed=settings)
    near = 1e-4 if precision == "32-true" else 2e-2
    for column in ("train/loss", "train/top1_depth_1"):
        assert logged(recorded, column) == pytest.approx(logged(plain, column), rel=near, abs=2e-2)


def test_a_weight_that_is_infinite_at_depth_0_counts_nothing(tiny_llama):
    net, objective, loss = make(tiny_llama, replace(TEXT[0], objective=Distillation(positions=Exponential(0.01))))
    plain, full = (inputs(tiny_llama, net, objective, 1, fill) for fill in (False, True))
    assert_same(step(net, loss, full), step(net, loss, plain))


def test_recording_draws_nothing(tmp_path, tiny_llama, target_folders, recorded):
    """A run that goes on records anew where one that was not stopped does not; its noise is that one's all the same."""
    whole, parts = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "parts"))
    shared = {"drafter": Eagle(depth=2), "speed": {"compile": True, "graph_step": True}, "optimizer": {"schedule": "constant"}}
    with ExitStack() as stack:
        for patched in steps_are_recorded():
            stack.enter_context(patched)
        for run, steps in ((whole, 6), (parts, 3), (parts, 6)):
            start(run, target_folders("llama"), **shared, trainer={"max_steps": steps})
    assert logged(parts) == logged(whole)
