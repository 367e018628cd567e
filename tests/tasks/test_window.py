"""Numbers of a window and of a log interval; the stop signal; measuring tau leaves no trace."""

import os
import signal

import pytest
import torch

from drafttrain.decoding.quick import held_out_tau
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.held_out import measure
from drafttrain.tasks.stop import StopSignal, take_over_signals
from drafttrain.tasks.weights import keep_buffers, restore_buffers
from drafttrain.tasks.window import Meter, Window
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary

CPU = torch.device("cpu")


def test_a_window_knows_its_divisors_and_totals():
    local = {"depth_1": 6.0, "depth_2": 0.0, "weights": 0.25, "tokens": 20.0, "dropped": 1.0}
    window = Window(local, stop=True, device=CPU)
    divisor = {name: float(window.divisors[place]) for name, place in window.place.items()}
    assert divisor == local | {"depth_2": 1.0, "stop": 1.0}  # of depth_2 nothing counts: its sum is 0 and must stay 0
    assert window.totals() == local | {"stop": 1.0}


def test_means_are_sums_over_counts_of_all_windows_since_the_last_log():
    meter = Meter()
    for loss, hits, count in ((2.0, 1.0, 4.0), (4.0, 3.0, 12.0)):
        for _ in range(2):  # two micro-steps
            meter.add({"loss": torch.tensor(loss / 2), "loss_depth_1": torch.tensor(8.0), "top1_depth_1": torch.tensor(hits / 2)})
        meter.close_window({"depth_1": count, "tokens": 10.0, "dropped": 4.0, "stop": 0.0})
    means = meter.read()
    assert means["loss"] == pytest.approx(3.0)
    assert means["loss_depth_1"] == pytest.approx(32 / 16)
    assert means["top1_depth_1"] == pytest.approx(4 / 16)
    assert means["dropped_labels"] == pytest.approx(8 / 24)
    meter.add({"loss": torch.tensor(7.0)})
    meter.close_window({"depth_1": 1.0, "tokens": 1.0, "dropped": 0.0, "stop": 0.0})
    assert meter.read()["loss"] == pytest.approx(7.0)


def test_time_that_was_not_spent_training_is_left_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("drafttrain.tasks.window.time.monotonic", lambda: now[0])
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0)})
    meter.close_window({"tokens": 60.0})
    now[0] = 105.0
    meter.skip_time(3.0)
    assert meter.read()["tokens_per_second"] == pytest.approx(30.0)


def test_a_signal_is_remembered_and_handlers_are_put_back():
    before = [signal.getsignal(number) for number in StopSignal.SIGNALS]
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert [signal.getsignal(number) for number in StopSignal.SIGNALS] == before


def test_a_second_interrupt_by_hand_ends_at_once_but_not_one_that_torchrun_passes_on(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("drafttrain.tasks.stop.time.monotonic", lambda: now[0])
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.01
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        now[0] += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.getsignal(signal.SIGINT)  # the handler runs before this returns


def test_a_lightning_that_handles_signals_otherwise_is_noticed():
    import lightning.pytorch as pl

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    take_over_signals(trainer)
    before = signal.getsignal(signal.SIGTERM)
    trainer._signal_connector.register_signal_handlers()
    assert signal.getsignal(signal.SIGTERM) is before

    class Renamed:
        _signal_connector = object()
        fit_loop = trainer.fit_loop

    with pytest.raises(RuntimeError, match="register_signal_handlers"):
        take_over_signals(Renamed())


def test_a_cast_of_buffers_is_undone_exactly():
    net = torch.nn.Module()
    net.register_buffer("frequencies", torch.linspace(0.1, 1.0, 7))
    net.register_buffer("loaded", torch.linspace(0.1, 1.0, 7))
    wanted, kept = net.frequencies.clone(), keep_buffers(net)
    net.bfloat16()
    assert not torch.equal(net.frequencies.float(), wanted)
    net.loaded.add_(1)  # a checkpoint brought something else
    restore_buffers(net, kept)
    assert net.frequencies.dtype == torch.float32 and torch.equal(net.frequencies, wanted)
    assert net.loaded.dtype == torch.bfloat16


def test_measuring_gives_the_engines_counts_and_leaves_no_trace(tiny_llama):
    net = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=None).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    requests = [Request(f"r{n}", tuple(range(3, 9 + n)), 12) for n in range(5)]
    net.train()
    state = torch.random.get_rng_state()
    found = measure(tiny_llama, net, requests, CheckpointConfig(drafts=3), rank=0, world=1)
    assert torch.equal(torch.random.get_rng_state(), state) and net.training
    wanted = held_out_tau(tiny_llama, net, requests, 3)
    assert found.tau == pytest.approx(wanted.tau) and found.tokens == wanted.tokens
    assert found.acceptance_by_depth == pytest.approx(wanted.acceptance_by_depth)


def test_shares_of_the_ranks_add_up_to_the_whole(tiny_llama, monkeypatch):
    """Two ranks' sums, exchanged by hand, against one rank that answers everything, with a drafter that is right by chance."""
    net = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=None).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    requests = [Request(f"r{n}", tuple(range(3, 9 + n)), 20) for n in range(5)]
    monkeypatch.setattr("drafttrain.tasks.held_out.held_out_tau", lambda target, net, mine, drafts, slots: _counts(mine, drafts))
    whole = measure(tiny_llama, net, requests, CheckpointConfig(drafts=2), rank=0, world=1)
    sums: list[torch.Tensor] = []
    monkeypatch.setattr("drafttrain.tasks.held_out.all_reduce", lambda vector: sums.append(vector) or vector)
    for rank in (0, 1):
        measure(tiny_llama, net, requests, CheckpointConfig(drafts=2), rank, world=2)
    monkeypatch.setattr("drafttrain.tasks.held_out.all_reduce", lambda vector: sums[0] + sums[1])
    assert measure(tiny_llama, net, requests, CheckpointConfig(drafts=2), 0, 2) == whole
    assert whole.tau > 1.0


def _counts(requests, drafts):
    """Made-up rounds that depend on the prompt: accepted = its length modulo 3."""
    from drafttrain.decoding.measure import Counts, acceptance

    accepted = [len(request.ids) % 3 for request in requests for _ in range(len(request.ids))]
    return Counts(len(requests), 2 * len(accepted), len(accepted), *acceptance(accepted, drafts))
