"""What makes a step faster may not change what it computes."""

from contextlib import contextmanager

import pytest
import torch
from tiny_run import logged, make_run, start
from torch._dynamo.utils import counters

from drafttrain.divergences import Confidence, Divergence, Selection, TopKCrossEntropy
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.layouts import one_chat
from drafttrain.losses import Distillation
from drafttrain.position_weights import DPace, Exponential, ValidPrefix
from drafttrain.recipe_build import choices
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.speed import GraphedRead, make_score, own_stream
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Sequences
from drafttrain.vocab import DraftVocabulary

TAPS = (0, 2)


def packed(seed: int, rows: int = 2, length: int = 64) -> Sequences:
    """Two chats in a row, their answers of random lengths, so that every seed scores another number of elements."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 320, (rows, length), generator=g)
    document, position, supervised = (torch.zeros(rows, length, dtype=torch.long) for _ in range(3))
    for row in range(rows):
        cut, end, first, second = (int(torch.randint(*span, (1,), generator=g)) for span in ((20, 30), (50, 64), (3, 9), (3, 9)))
        document[row, cut:end], document[row, end:] = 1, -1
        position[row, :cut], position[row, cut:end] = torch.arange(cut), torch.arange(end - cut)
        supervised[row, first:cut] = supervised[row, cut + second : end] = 1
    return Sequences(ids, supervised.bool(), position, document)


def make_net(target):
    torch.manual_seed(0)
    vocabulary = DraftVocabulary(torch.arange(0, 320, 2), 320)
    return Eagle3(taps=list(TAPS), depth=3, draft_vocab=160).build(target, vocabulary)


def loss_and_gradients(net, score, target, seed):
    sequences = packed(seed)
    layout = net.layout(sequences)
    device = target.device
    sequences, layout = sequences.to(device), layout.to(device)
    features = target.read_packed(sequences, TAPS)
    net.zero_grad()
    terms, metrics = score(sequences, features, layout)
    loss = torch.stack([term.sum / term.count for term in terms.values()]).sum()
    loss.backward()
    return {"loss": loss.detach(), **metrics} | {name: weight.grad.clone() for name, weight in net.named_parameters()}


EVERY = [
    cls() for cls in choices(Divergence).values() if cls not in (Confidence, Selection)
]  # which teach heads that EAGLE-3 lacks
OBJECTIVES = {
    "EAGLE-3": Distillation(),
    "all in chunks": Distillation(EVERY, DPace(), "drafts", chunk=80),
    "all at once": Distillation(EVERY, ValidPrefix(), "depths"),
    "weights": Distillation([TopKCrossEntropy()], Exponential(3.0), "weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cpp_wrapper"), [*((name, False) for name in OBJECTIVES), ("all in chunks", True)])
def test_a_compiled_step_gives_the_same_loss_and_gradients_and_is_compiled_once(tiny_llama, name, cpp_wrapper):
    """In chunks, once for each number of chunks: these batches score 94 to 141 elements, so two."""
    net = make_net(tiny_llama)
    objective, teacher = OBJECTIVES[name], TargetTeacher(tiny_llama, net)
    plain, compiled = (make_score(net, objective, teacher, 3, compile=flag, cpp_wrapper=cpp_wrapper) for flag in (False, True))
    torch._dynamo.reset()
    counters.clear()
    for seed in range(4):
        wanted, found = (loss_and_gradients(net, score, tiny_llama, seed) for score in (plain, compiled))
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert not counters["graph_break"], counters["graph_break"]


def test_a_step_is_compiled_for_few_numbers_of_drafting_rows(tiny_llama, monkeypatch):
    """torch makes a plain number of that one, whatever it is told, and would compile each anew, minutes long, and none behind the eighth."""
    net, T, before, seen = make_net(tiny_llama), 512, set(), set()

    def compile_nothing(score, options=None):
        def compiled(sequences, features, layout):
            seen.add(layout.query_BQ.shape[1])
            assert 1 in layout.query_BQ._dynamo_static_indices
            return score(sequences, features, layout)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_nothing)
    objective, teacher = Distillation(), TargetTeacher(tiny_llama, net)
    plain, compiled = (make_score(net, objective, teacher, 3, compile=flag) for flag in (False, True))
    for answer in range(20, T - 8, 40):
        g = torch.Generator().manual_seed(answer)
        sequences = one_chat(torch.randint(3, 320, (T,), generator=g), prompt_len=T - answer)
        layout, features = net.layout(sequences), tiny_llama.read_packed(sequences, TAPS)
        before.add(layout.query_BQ.shape[1])
        found, wanted = (score(sequences, features, layout) for score in (compiled, plain))
        for name, term in wanted[0].items():
            torch.testing.assert_close(found[0][name].sum, term.sum)
            assert found[0][name].count == term.count
        torch.testing.assert_close(found[1], wanted[1])
    assert len(before) > 10 and seen == {128, 256, 384, 512}


def test_the_stream_of_a_recorded_training_begins_behind_what_was_queued_before_and_is_waited_for(monkeypatch):
    """torch's own streams wait for no other, and weights are put on the device just before."""
    waits = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            waits.append((self.name, other.name))

    @contextmanager
    def use(stream):
        waits.append(("on", stream.name))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("own"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("before"))
    monkeypatch.setattr(torch.cuda, "stream", use)
    with pytest.raises(KeyError), own_stream(SpeedConfig(compile=True, graph_step=True), torch.device("cuda")):
        raise KeyError
    assert waits == [("own", "before"), ("on", "own"), ("before", "own")]
    with own_stream(SpeedConfig(compile=True), torch.device("cuda")):
        assert len(waits) == 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_compiled_training_run_logs_the_same_losses(tmp_path, tiny_llama, target_folders, precision):
    plain, compiled = (make_run(tmp_path / name, tiny_llama) for name in ("plain", "compiled"))
    trainer = {"max_steps": 6, "accumulate_grad_batches": 2, "precision": precision}
    for run, flag in ((plain, False), (compiled, True)):
        start(run, target_folders("llama"), trainer=trainer, speed={"compile": flag, "graph_target": True})
    assert logged(compiled) == pytest.approx(logged(plain), rel=1e-4 if precision == "32-true" else 2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_recorded_target_gives_the_same_features(target_folders):
    target = load_target(TargetConfig(path=str(target_folders("llama"))), device="cuda")
    read = GraphedRead(target, TAPS)
    for seed in range(3):
        sequences = packed(seed).to("cuda")
        wanted, found = target.read_packed(sequences, TAPS), read(sequences)
        torch.testing.assert_close(found.taps_BTAD, wanted.taps_BTAD)
        torch.testing.assert_close(found.final_BTD, wanted.final_BTD)
