"""The target reads the next micro-batch while the drafter learns from this one, and nothing else changes."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tasks.test_speed import TAPS, packed
from tiny_run import logged, make_run, start

from drafttrain.data.stream import LookAhead, MicroBatch
from drafttrain.layouts import chain_layout
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.distill import DistillTask
from drafttrain.tasks.speed import GraphedRead, ReadAhead, _Captured
from drafttrain.topology import read_topology


def batch_of(seed: int, length: int = 64) -> MicroBatch:
    sequences = packed(seed, length=length)
    return MicroBatch(sequences, None, chain_layout(sequences, 3, torch.ones(320, dtype=torch.bool)), 0, True, {})


def test_every_batch_knows_the_next():
    batches = [batch_of(seed) for seed in range(4)]
    found = list(LookAhead(batches))
    assert found == batches and [batch.following for batch in found] == [*batches[1:], None]
    assert found[1].to("cpu").following is batches[2]


class Streams:
    """CUDA's streams as a CPU can stand in for them: everything happens at once, in the order it is asked for, which is written down."""

    def __init__(self):
        self.order: list[str] = []
        self.current = self.main = SimpleNamespace(wait_stream=lambda side: self.order.append("main waits"))

    def make(self, device):
        return SimpleNamespace(wait_stream=lambda main: self.order.append("side waits"))

    @contextmanager
    def enter(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch):
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", made.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.enter)
    for module in ("train", "distill"):
        monkeypatch.setattr(f"drafttrain.tasks.{module}.reads_ahead", lambda speed, device: speed.overlap_target)
    return made


def test_a_run_that_reads_ahead_is_the_run_that_does_not(tmp_path, tiny_llama, target_folders, streams, monkeypatch):
    plain, ahead = (make_run(tmp_path / name, tiny_llama) for name in ("plain", "ahead"))
    read, score = DistillTask._read, DistillTask._watch

    def noted_read(task, sequences):
        assert (streams.current is not streams.main) == task._ahead_of_time
        streams.order.append("read")
        return read(task, sequences)

    monkeypatch.setattr(DistillTask, "_read", noted_read)
    monkeypatch.setattr(DistillTask, "_watch", lambda task, loss: (streams.order.append("drafted"), score(task, loss))[1])
    orders = []
    for run, flag in ((plain, False), (ahead, True)):
        streams.order = []
        monkeypatch.setattr(DistillTask, "_ahead_of_time", flag, raising=False)
        trainer = {"max_steps": 3, "accumulate_grad_batches": 2}
        start(run, target_folders("llama"), trainer=trainer, speed={"overlap_target": flag})
        orders.append(streams.order)
    assert orders[0] == ["read", "drafted"] * 6
    begun = ["side waits", "read"]
    # Nothing is read behind the last micro-batch of the last step.
    assert orders[1] == begun + ["main waits", *begun, "drafted"] * 5 + ["main waits", "drafted"]
    assert logged(ahead) == logged(plain)
    mine, theirs = (load_file(run / "checkpoints/last_drafter/drafter.safetensors") for run in (ahead, plain))
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_stored_features_are_not_read_ahead(tmp_path, tiny_llama, target_folders, streams):
    run = make_run(tmp_path, tiny_llama, features=(0, 2, 3))
    start(run, target_folders("llama"), data={"features": "stored"}, trainer={"max_steps": 2}, speed={"overlap_target": True})
    assert "side waits" not in streams.order and len(logged(run)) == 2


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_recorded_read_returned_outlives_the_next_one_where_it_copies(tiny_llama, monkeypatch, copies):
    """The graph is stood in for by a read into buffers."""

    def capture(self, sequences):
        own = type(sequences)(*(x.clone() for x in vars(sequences).values()))
        features = self.target.read_packed(own, self.taps)

        def replay():
            found = self.target.read_packed(own, self.taps)
            features.taps_BTAD.copy_(found.taps_BTAD)
            features.final_BTD.copy_(found.final_BTD)

        return _Captured(SimpleNamespace(replay=replay), own, features)

    monkeypatch.setattr(GraphedRead, "_capture", capture)
    read = GraphedRead(tiny_llama, TAPS, copies)
    first, second = packed(0), packed(1)
    found, wanted = read(first), tiny_llama.read_packed(first, TAPS)
    assert torch.equal(found.final_BTD, wanted.final_BTD)
    read(second)
    assert torch.equal(found.final_BTD, wanted.final_BTD) == torch.equal(found.taps_BTAD, wanted.taps_BTAD) == copies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("slow", ["main", "side"])
@pytest.mark.parametrize("graph", [False, True])
def test_neither_stream_reads_what_the_other_has_not_written_or_writes_what_it_still_reads(target_folders, graph, slow):
    """One of the streams is kept busy for milliseconds where it would do harm."""
    target = load_target(TargetConfig(path=str(target_folders("llama"))), device="cuda")
    plain = partial(target.read_packed, taps=TAPS)
    read = GraphedRead(target, TAPS, copies=True) if graph else plain
    batches = [batch_of(seed, length=256) for seed in range(6)]
    wanted = [plain(batch.sequences.to("cuda")) for batch in batches]
    read(batches[0].sequences.to("cuda"))

    def late(sequences):
        torch.cuda._sleep(10_000_000 if slow == "side" else 0)
        return read(sequences)

    ahead, found = ReadAhead(late, target.device), []
    torch.cuda.synchronize()
    for batch in LookAhead(batches):
        here = batch.to("cuda")
        batch.features = None  # as Lightning lets go of what it moved
        features = ahead.features(here)
        if here.following is not None:
            ahead.begin(here.following)
        torch.cuda._sleep(10_000_000 if slow == "main" else 0)
        found.append((features.taps_BTAD.double().sum(), features.final_BTD * 1))
        del features, here
    for (sum_, final), right in zip(found, wanted, strict=True):
        torch.testing.assert_close(final, right.final_BTD)
        torch.testing.assert_close(sum_, right.taps_BTAD.double().sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_that_reads_ahead_logs_the_same_losses(tmp_path, tiny_llama, target_folders, graph, precision):
    """In another order of addition at most (some sums on a GPU have none)."""
    plain, ahead = (make_run(tmp_path / name, tiny_llama) for name in ("plain", "ahead"))
    trainer = {"max_steps": 6, "accumulate_grad_batches": 2, "precision": precision}
    checkpoint = {"tau_prompts": 3, "tau_every": 2, "tau_tokens": 8}  # which uses the target while it reads
    for run, flag in ((plain, False), (ahead, True)):
        speed = {"graph_target": graph, "overlap_target": flag}
        start(run, target_folders("llama"), read_topology(), trainer=trainer, speed=speed, checkpoint=checkpoint)
    assert logged(ahead) == pytest.approx(logged(plain), rel=1e-4 if precision == "32-true" else 2e-2)
