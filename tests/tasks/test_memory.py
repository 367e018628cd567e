"""The estimated peak of a step against what torch's own profiler counts of a real one, and what must move it."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tasks.test_speed import packed
from torch._C._profiler import _EventType

from drafttrain.divergences import HardCrossEntropy
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.layouts import one_chat
from drafttrain.losses import Distillation
from drafttrain.position_weights import Exponential
from drafttrain.tasks import memory
from drafttrain.tasks.memory import DIVIDED_FROM, DRAFTER, GRADIENTS, LIBRARIES, OPTIMIZER, OTHERS, TARGET, Step, peak_of
from drafttrain.tasks.optimizer import make_optimizer, token_sides
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.vocab import DraftVocabulary

CONFIGS = {
    "eagle3": (Eagle3(taps=[0, 2], depth=4, draft_vocab=160), Distillation()),
    "eagle3 in chunks": (Eagle3(taps=[0, 2], depth=4, draft_vocab=160), Distillation(chunk=200)),
    "eagle3 in one chunk": (Eagle3(taps=[0, 2], depth=4, draft_vocab=160), Distillation(chunk=4096)),
    "dflash": (
        DFlash(block=5, layers=2, taps=[0, 2], mask_token=319, anchors=None),
        Distillation([HardCrossEntropy()], Exponential(4.0), "weights"),
    ),
    "dflash in chunks": (  # whose gradients come by torch.func
        DFlash(block=5, layers=2, taps=[0, 2], mask_token=319, anchors=None),
        Distillation([HardCrossEntropy()], Exponential(4.0), "weights", chunk=100),
    ),
    "p-eagle": (PEagle(taps=[0, 1], depth=4, layers=2, mask_token=319, draft_vocab=160), Distillation()),
    "medusa": (Medusa(heads=3), Distillation()),
}


def made(target, name, **changes):
    drafter, objective = CONFIGS[name]
    vocabulary = DraftVocabulary(torch.arange(0, 320, 2), 320)
    step = Step(target, target.dtype, drafter, vocabulary, objective)
    torch.manual_seed(0)
    net = drafter.build(target, vocabulary).train()
    sequences = packed(0, rows=4, length=256)
    return replace(step, **changes), net, sequences, net.layout(sequences, numbers=[(0, row) for row in range(4)])


def counted(step, net, sequences, layout):
    """The highest sum of what a CPU allocated in two real steps, above what was there, by the profiler's events."""
    teacher, optimizer = TargetTeacher(step.target, net), make_optimizer(step.optimizer, net, True, token_sides(net))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(2):
            features = step.target.read_packed(sequences, net.needs.taps)
            with torch.autocast("cpu", torch.bfloat16) if "mixed" in step.precision else nullcontext():
                drafted = net.rows(sequences, features, layout)
                terms, _ = step.objective.terms(drafted, net.logits, teacher, net.needs.depth)
            loss = torch.stack([term.sum / term.count for term in terms.values()]).sum()
            del features, drafted, terms
            optimizer.zero_grad()
            loss.backward()
            del loss
            optimizer.step()
    waiting, sizes = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = peak = 0
    for _, size in sorted(sizes):
        now += size
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("name", "precision", "recomputes"),
    [*((name, precision, False) for name in CONFIGS for precision in ("32-true", "bf16-mixed")), ("p-eagle", "bf16-mixed", True)],
)
def test_the_estimate_is_what_a_real_step_allocates(tiny_llama, monkeypatch, name, precision, recomputes):
    """Both on a CPU, so nothing is stood in for; rounding to 512 bytes and what its bf16 kernels hold inside is the difference."""
    monkeypatch.setattr(memory, "_as_on_a_gpu", nullcontext)
    speed = SpeedConfig(checkpoint_activations=recomputes)
    step, net, sequences, layout = made(tiny_llama, name, precision=precision, speed=speed)
    net.recomputes = recomputes
    stays = sum(w.numel() * w.element_size() for w in [*net.parameters(), *tiny_llama.model.parameters()])
    found = peak_of(step, sequences, layout).bytes - LIBRARIES - stays
    assert found == pytest.approx(counted(step, net, sequences, layout), rel=0.03 if precision == "32-true" else 0.06)


def bytes_of(target, length, **changes):
    """Of a chat of this length, nothing but its rows growing with it."""
    step, net, _, _ = made(target, "eagle3", precision="bf16-mixed", objective=Distillation(chunk=4096), **changes)
    chat = one_chat(torch.zeros(length, dtype=torch.long), 1)
    peak = peak_of(step, chat, net.layout(chat))
    return peak.bytes - peak.parts[TARGET] - peak.parts[OTHERS]


def test_long_rows_hold_nothing_that_grows_with_their_square(tiny_llama):
    fused = SpeedConfig(fused_rows=True)
    dense, without = ([bytes_of(tiny_llama, length, speed=speed) for length in (4096, 8192)] for speed in (SpeedConfig(), fused))
    assert dense[1] > 3.5 * dense[0] and without[1] < 2.1 * without[0] < dense[0]
    assert bytes_of(tiny_llama, 8192, speed=replace(fused, checkpoint_activations=True)) < 0.8 * without[1]


@pytest.mark.parametrize("fused_rows", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_mixture_of_experts_is_told_and_holds_all_of_them(targets, name, fused_rows):
    """In fp32 a CPU without numbers refuses what such a target's experts are computed by; and a kernel that holds no scores is never run."""
    target = targets(name)
    step, net, sequences, layout = made(target, "eagle3", speed=SpeedConfig(fused_rows=fused_rows))
    weights = sum(w.numel() * w.element_size() for w in target.model.parameters())
    assert weights <= peak_of(step, sequences, layout).parts[TARGET] < 1.2 * weights


def test_double_precision_holds_twice_the_drafter(tiny_llama):
    single, double = (peak_of(*[made(tiny_llama, "eagle3", precision=f"{bits}-true")[i] for i in (0, 2, 3)]) for bits in (32, 64))
    assert double.parts[DRAFTER] == pytest.approx(2 * single.parts[DRAFTER], rel=0.1)


def test_what_is_alive_at_the_peak_is_named(tiny_llama):
    """The parts add up, and other processes, an optimizer in pieces or a small head each move the number as they must."""
    step, net, sequences, layout = made(tiny_llama, "medusa")
    peak = peak_of(step, sequences, layout)
    weights = sum(4 * w.numel() for w in net.parameters())
    assert sum(peak.parts.values()) == peak.bytes and peak.parts[TARGET] >= 4 * sum(
        w.numel() for w in tiny_llama.model.parameters()
    )
    assert peak_of(replace(step, world=2), sequences, layout).bytes - peak.bytes == weights
    assert peak_of(replace(step, online=False), sequences, layout).bytes <= peak.bytes


def test_zero_divides_what_stays_by_its_stage(tiny_llama):
    step, net, sequences, layout = made(tiny_llama, "medusa")
    whole = peak_of(step, sequences, layout)
    for stage in range(4):
        peak = peak_of(replace(step, world=2, zero=stage), sequences, layout)
        assert sum(peak.parts.values()) == peak.bytes
        for part, first in DIVIDED_FROM.items():
            share = 2 if stage >= first else 1
            assert peak.parts.get(part, 0) == pytest.approx(whole.parts.get(part, 0) / share, rel=0.02), (stage, part)
    assert peak.parts[GRADIENTS] and peak.parts[OPTIMIZER]  # they are there at the peak


def test_a_recorded_step_holds_what_it_reads_and_its_gradients_once_more(tiny_llama):
    step, net, sequences, layout = made(tiny_llama, "eagle3", speed=SpeedConfig(compile=True))
    plain = peak_of(step, sequences, layout).bytes
    recorded = peak_of(replace(step, speed=SpeedConfig(compile=True, graph_step=True)), sequences, layout).bytes
    gradients = 4 * sum(weight.numel() for weight in net.parameters())
    features = 4 * 4 * 256 * 3 * tiny_llama.hidden
    assert recorded - plain == gradients + features
