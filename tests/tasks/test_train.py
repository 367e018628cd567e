"""The training stage with the real target, drafter and objective: what must not change the numbers does not, and what cannot work is refused."""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import logged, make_run, ragged_chats, start, write_store

from drafttrain.data.features import FEATURE_DTYPES
from drafttrain.divergences import HardCrossEntropy, LKLambda, ReverseKL, SoftCrossEntropy
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.errors import UserError
from drafttrain.position_weights import Decay, DPace, Exponential, Uniform, ValidPrefix
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.tasks import conductor
from drafttrain.tasks.checkpoints import find_last


@pytest.fixture
def llama(target_folders):
    return target_folders("llama")


@pytest.fixture
def run(tmp_path, tiny_llama):
    return make_run(tmp_path / "run", tiny_llama)


def weights(run_folder, name="last_drafter"):
    return load_file(run_folder / "checkpoints" / name / "drafter.safetensors")


class Tell(pl.Callback):
    """Sends this process a signal in the middle of a window."""

    def __init__(self, micro_batch: int, number: int = signal.SIGTERM):
        self.micro_batch, self.number = micro_batch, number

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if batch_idx == self.micro_batch:
            os.kill(os.getpid(), self.number)


# ---- what must not change the numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"divergences": [SoftCrossEntropy(), LKLambda()], "positions": DPace(), "reduction": "drafts"},
        {"positions": ValidPrefix(0.9), "chunk": 16},
        {"divergences": [HardCrossEntropy()], "positions": Exponential(2.0), "reduction": "weights"},
    ],
    ids=["depths", "drafts", "chunks", "weights"],
)
def test_eight_accumulations_equal_one_batch_of_eight(tmp_path, tiny_llama, llama, objective):
    narrow, wide = (make_run(tmp_path / name, tiny_llama) for name in ("narrow", "wide"))
    start(narrow, llama, trainer={"accumulate_grad_batches": 8}, objective=objective)
    start(wide, llama, data={"rows": 8}, objective=objective)
    for depth in ("", "_depth_1", "_depth_3"):
        a, b = logged(narrow, f"train/loss{depth}"), logged(wide, f"train/loss{depth}")
        assert a.keys() == b.keys() == {1, 2, 3, 4}
        assert a == pytest.approx(b, rel=1e-5)
    fresh = weights(narrow)
    assert all(torch.allclose(value, weights(wide)[name], rtol=1e-4, atol=1e-5) for name, value in fresh.items())


@pytest.mark.parametrize(("accumulate", "told_at", "stopped_at"), [(1, 2, 3), (3, 6, 3), (3, 7, 4)])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, tiny_llama, llama, accumulate, told_at, stopped_at):
    """Told in the middle of a window, it finishes that one and the next, at whose beginning all ranks agree."""
    settings = {"max_steps": 6, "accumulate_grad_batches": accumulate}
    whole, broken = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "broken"))
    start(whole, llama, trainer=settings)
    start(broken, llama, trainer=settings | {"callbacks": [Tell(told_at)]})
    assert find_last(broken / "checkpoints").position.step == stopped_at
    assert set(logged(broken)) == set(range(1, stopped_at + 1))
    start(broken, llama, trainer=settings)
    assert logged(broken) == logged(whole)
    assert all(torch.equal(value, weights(broken)[name]) for name, value in weights(whole).items())
    assert find_last(broken / "checkpoints").position == find_last(whole / "checkpoints").position


def test_a_run_goes_on_from_a_checkpoint_made_on_the_way(tmp_path, tiny_llama, llama):
    """What a killed process leaves: a checkpoint of an earlier step, behind which more steps were done."""
    whole, killed = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "killed"))
    settings = {"trainer": {"max_steps": 6, "accumulate_grad_batches": 2}, "checkpoint": {"every": 3}}
    start(whole, llama, **settings)

    class Die(pl.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            if batch_idx == 9:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start(killed, llama, **settings | {"trainer": settings["trainer"] | {"callbacks": [Die()]}})
    assert find_last(killed / "checkpoints").position.step == 3
    start(killed, llama, **settings)
    assert logged(killed) == logged(whole)


@pytest.mark.parametrize(("before", "after"), [((4, 1), (1, 4)), ((1, 4), (4, 1))], ids=["4 to 1", "1 to 4"])
def test_another_accumulation_goes_on_with_the_next_rows(tmp_path, tiny_llama, llama, before, after):
    whole, moved = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "moved"))
    (accumulate, rows), (new_accumulate, new_rows) = before, after
    settings = {"max_steps": 7, "accumulate_grad_batches": accumulate}
    start(whole, llama, trainer=settings, data={"rows": rows})
    start(moved, llama, trainer=settings | {"callbacks": [Tell(micro_batch=2 * accumulate)]}, data={"rows": rows})
    stopped = find_last(moved / "checkpoints").position
    assert stopped.step == 3 and stopped.rows == 12
    start(moved, llama, trainer={"max_steps": 7, "accumulate_grad_batches": new_accumulate}, data={"rows": new_rows})
    assert logged(moved) == pytest.approx(logged(whole), rel=1e-5)


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_stored_features_give_the_loss_of_online_ones(tmp_path, tiny_llama, llama, dtype):
    """Both are rounded alike, so what is left is the order of sums in the target (a chat read alone, or packed)."""
    online, stored = (make_run(tmp_path / name, tiny_llama, features=[0, 2, 3], dtype=dtype) for name in ("online", "stored"))
    start(online, llama, data={"feature_dtype": dtype})
    start(stored, llama, data={"features": "stored", "feature_dtype": dtype})
    assert logged(stored) == pytest.approx(logged(online), rel=1e-5)


@pytest.mark.parametrize(
    "drafter", [Eagle(noise=0.0), Medusa(heads=2), Hydra(heads=2, prefix=True)], ids=lambda d: type(d).__name__
)
def test_drafters_of_final_states_learn_from_stored_ones(tmp_path, tiny_llama, llama, drafter):
    """The same losses as online; a store that keeps final states only where they teach is refused before the first step."""
    online, stored, poor = (
        make_run(tmp_path / name, tiny_llama, [], final=final)
        for name, final in (("online", "all"), ("stored", "all"), ("poor", "taught"))
    )
    start(online, llama, drafter=drafter)
    start(stored, llama, drafter=drafter, data={"features": "stored"})
    assert logged(stored) == pytest.approx(logged(online), rel=1e-5)
    with pytest.raises(UserError, match="final states only where they teach, but this drafter reads them in every row"):
        start(poor, llama, drafter=drafter, data={"features": "stored"})


def test_more_drafts_than_heads_are_refused_before_training(tmp_path, tiny_llama, llama):
    run = make_run(tmp_path, tiny_llama)
    with pytest.raises(UserError, match=r"checkpoint.drafts asks for 3 drafts in a row, but this Hydra drafts at most 2"):
        start(run, llama, drafter=Hydra(heads=2), checkpoint={"tau_prompts": 2, "drafts": 3})
    assert not (run / "checkpoints").exists()


def test_a_depth_that_no_row_has_room_for_is_refused(tmp_path, tiny_llama, llama):
    run = make_run(tmp_path, tiny_llama)
    with pytest.raises(UserError, match=r"depth is 7, but a row of data.length 8 tokens has room for at most 6 drafts"):
        start(run, llama, drafter={"depth": 7}, data={"length": 8})


def test_features_stored_in_another_type_are_refused(tmp_path, tiny_llama, llama):
    run = make_run(tmp_path, tiny_llama, features=[0, 2, 3])
    with pytest.raises(UserError, match=r"holds features in bfloat16, but the recipe says data.feature_dtype: float8_e4m3fn"):
        start(run, llama, data={"features": "stored", "feature_dtype": "float8_e4m3fn"})


def test_measuring_tau_changes_nothing_in_the_training(tmp_path, tiny_llama, llama):
    watched, alone = (make_run(tmp_path / name, tiny_llama) for name in ("watched", "alone"))
    start(watched, llama, checkpoint={"tau_prompts": 3, "tau_every": 1, "tau_tokens": 8})
    start(alone, llama)
    assert logged(watched) == logged(alone)
    assert set(logged(watched, "held_out/tau")) == {1, 2, 3, 4}


# ---- what is kept ------------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_keeps_the_best_by_tau(run, llama):
    best = start(
        run,
        llama,
        optimizer={"lr": 1e-2},
        trainer={"max_steps": 30, "accumulate_grad_batches": 1},
        data={"rows": 4},
        checkpoint={"tau_prompts": 4, "tau_every": 5, "tau_tokens": 16},
    )
    losses, taus = logged(run), logged(run, "held_out/tau")
    assert losses[30] < 0.9 * losses[1]
    facts = json.loads((best / "drafter.json").read_text())["facts"]
    assert facts["held_out"]["tau"] == pytest.approx(max(taus.values()))
    assert facts["position"]["step"] == min(step for step, tau in taus.items() if tau == max(taus.values()))
    assert find_last(run / "checkpoints").position.best_tau == pytest.approx(max(taus.values()))


def test_the_state_is_plain_tensors_and_the_target_is_not_in_it(run, llama):
    start(run, llama, trainer={"max_steps": 1})
    state = torch.load(find_last(run / "checkpoints").state, weights_only=True)
    assert {name.split(".")[0] for name in state["state_dict"]} == {"net"}
    assert not any("embed" in name for name in state["state_dict"])


def test_max_steps_ends_a_run_at_once_and_a_finished_run_says_so(run, llama, capsys):
    start(run, llama, trainer={"max_steps": 3})
    assert set(logged(run)) == {1, 2, 3}
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}
    capsys.readouterr()
    best = start(run, llama, trainer={"max_steps": 3})
    assert "is finished: 3 of 3 steps" in capsys.readouterr().out
    assert best.is_dir() and before == {path: path.stat().st_mtime_ns for path in (run / "checkpoints").rglob("*")}


def test_a_finished_run_goes_on_when_it_gets_more_steps(run, llama):
    start(run, llama, optimizer={"schedule": "constant"})
    start(run, llama, optimizer={"schedule": "constant"}, trainer={"max_steps": 6})
    assert set(logged(run)) == {1, 2, 3, 4, 5, 6}


def test_a_disk_that_fills_at_the_last_save_costs_no_drafter(run, llama, monkeypatch):
    """Where tau is not measured, checkpoints/best is written at the end alone."""
    real, best = conductor.save_drafter, run / "checkpoints" / "best" / "drafter.json"

    def full(folder, *arguments, **named):
        if folder.name == "best":
            raise OSError(28, "No space left on device")
        real(folder, *arguments, **named)

    for steps in (3, 5):  # the first drafter, and one that replaces it
        monkeypatch.setattr(conductor, "save_drafter", full)
        with pytest.raises(UserError, match="disk is full"):
            start(run, llama, trainer={"max_steps": steps})
        monkeypatch.setattr(conductor, "save_drafter", real)
        start(run, llama, trainer={"max_steps": steps})
        assert json.loads(best.read_text())["facts"]["position"]["step"] == steps


def test_a_state_is_written_where_it_stays(run, llama, monkeypatch):
    """The system's folder for temporary files may be small, or of another disk."""
    made, real = [], tempfile.mkstemp
    monkeypatch.setattr(
        tempfile, "mkstemp", lambda *given, **named: made.append((tempfile.gettempdir(), real(*given, **named))) or made[-1][1]
    )
    before = tempfile.gettempdir()
    start(run, llama)
    assert made and all(Path(place).parent == run / "checkpoints" / "last" for place, _ in made)
    assert tempfile.gettempdir() == before and len(list((run / "checkpoints" / "last").glob("*/*"))) == 2


def test_the_arithmetic_is_said_before_training(run, llama, capsys):
    start(run, llama, trainer={"max_steps": 1, "accumulate_grad_batches": 2}, data={"length": 32, "rows": 3})
    out = capsys.readouterr().out
    assert "1 process x 2 accumulations x 3 rows x 32 tokens = 192" in out
    assert "draft vocabulary: 200 of 320 tokens" in out and "trained" in out
    assert "longer than a row and were cut" in out


# ---- what is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"drafter": {"depth": 2}}, "drafter.init_args.depth: 3 before, 2 now"),
        ({"objective": {"positions": Decay(0.5)}}, "objective.init_args.positions.init_args.base: 0.8 before, 0.5 now"),
        ({"objective": {"positions": Uniform()}}, "objective.init_args.positions.class_path: Decay before, Uniform now"),
        (
            {"objective": {"divergences": [ReverseKL()]}},
            "objective.init_args.divergences.0.class_path: SoftCrossEntropy before, ReverseKL now",
        ),
        ({"data": {"seed": 8}}, "data.seed: 7 before, 8 now"),
        ({"optimizer": {"lr": 2e-3}}, "optimizer.lr: 0.001 before, 0.002 now"),
    ],
)
def test_another_recipe_is_not_resumed(run, llama, change, sentence):
    start(run, llama, trainer={"max_steps": 1})
    with pytest.raises(UserError, match=sentence):
        start(run, llama, **change)


def test_a_step_that_is_to_be_cpp_is_refused_where_nothing_compiles_it(run, tmp_path, monkeypatch):
    """Before the target is loaded; a compiled step alone, or the option alone, needs none."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"no-such-compiler is not on this machine.*speed.cpp_wrapper to false"):
        start(run, tmp_path / "nothing", speed={"compile": True, "cpp_wrapper": True})
    for speed in ({"compile": True}, {"cpp_wrapper": True}):
        with pytest.raises(UserError, match="nothing"):  # the target is not there
            start(run, tmp_path / "nothing", speed=speed)


def test_other_chats_are_not_resumed(run, llama, tiny_llama):
    start(run, llama, trainer={"max_steps": 1})
    (run / "data" / "train").rename(run / "data" / "old")
    write_store(run / "data" / "train", ragged_chats(24, tiny_llama.vocab), tiny_llama.identity)
    with pytest.raises(UserError, match=r"chats.count: 23 before, 24 now"):
        start(run, llama)


def test_features_of_other_layers_are_refused(tmp_path, tiny_llama, llama):
    run = make_run(tmp_path / "run", tiny_llama, features=[0, 1, 2])
    with pytest.raises(UserError, match=r"layers \[0, 1, 2\], but the recipe taps \[0, 2, 3\]"):
        start(run, llama, data={"features": "stored"})


def test_features_that_were_not_kept_are_refused(run, llama):
    with pytest.raises(UserError, match="holds no features"):
        start(run, llama, data={"features": "stored"})


def test_another_target_is_refused(run, target_folders):
    with pytest.raises(UserError, match="made with another target"):
        start(run, target_folders("qwen3"))


def test_a_state_of_deepspeed_is_not_read_by_another_strategy(run, llama):
    start(run, llama, trainer={"max_steps": 1})
    state = find_last(run / "checkpoints").state
    state.unlink()
    state.mkdir()  # DeepSpeed's is a folder
    with pytest.raises(UserError, match=r"saved with DeepSpeed, but trainer.strategy is now a strategy other than DeepSpeed"):
        start(run, llama)


def test_a_loss_that_is_not_finite_stops_the_run_before_anything_is_saved(run, llama):
    start(run, llama, optimizer={"schedule": "constant", "lr": 1e30, "warmup_steps": 0}, trainer={"max_steps": 1})
    kept = find_last(run / "checkpoints")
    with pytest.raises(UserError, match="not finite at step 2"):
        start(
            run,
            llama,
            optimizer={"schedule": "constant", "lr": 1e30, "warmup_steps": 0},
            trainer={"max_steps": 6, "log_every_n_steps": 4},
            checkpoint={"every": 3},
        )
    assert find_last(run / "checkpoints") == kept


def test_a_window_without_labels_stops_the_run(run, llama):
    with pytest.raises(UserError, match="had no supervised tokens to learn from"):
        start(run, llama, drafter={"draft_vocab": 2})


def test_a_damaged_state_is_refused_before_the_target_is_loaded(run, llama, monkeypatch):
    start(run, llama)
    [state] = (run / "checkpoints" / "last").glob("step_*/state")
    state.write_bytes(state.read_bytes()[:1000])
    monkeypatch.setattr("drafttrain.tasks.train.load_target", None)
    with pytest.raises(UserError, match="state is damaged or cut short"):
        start(run, llama, trainer={"max_steps": 8})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"checkpoint": {"start": "/no/such/folder"}}, "checkpoint.start is /no/such/folder, but there is no such folder"),
        (
            {"objective": OnPolicyDistillation()},
            "objective.class_path is OnPolicyDistillation, but the training texts have no record",
        ),
        ({"target": {"weights": "int8"}}, "target.weights is int8, but torchao"),
    ],
)
def test_what_needs_no_target_is_refused_before_it_is_loaded(tmp_path, tiny_llama, llama, monkeypatch, changes, sentence):
    monkeypatch.setattr("drafttrain.tasks.train.load_target", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match=sentence):
        start(make_run(tmp_path / "run", tiny_llama), llama, **changes)


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_a_store_without_chats_says_so(tmp_path, tiny_llama, llama, part):
    run = make_run(tmp_path / "run", tiny_llama)
    shutil.rmtree(run / "data" / part)
    write_store(run / "data" / part, [], tiny_llama.identity)
    words = {"train": "data/train/ holds no chats", "held_out": "data/held_out/ holds no prompts; raise prepare.held_out"}
    with pytest.raises(UserError, match=words[part]):
        start(run, llama, checkpoint={"tau_prompts": 2})


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"max_steps": -1}, "trainer.max_steps is -1"),
        ({"accumulate_grad_batches": None}, "trainer.accumulate_grad_batches is null"),
        ({"max_epochs": 3}, "trainer.max_epochs cannot be set"),
    ],
)
def test_a_run_ends_by_steps(run, llama, trainer, sentence):
    with pytest.raises(UserError, match=sentence):
        start(run, llama, trainer=trainer)


def test_a_run_that_is_made_longer_goes_on_at_the_longer_schedules_rate(tmp_path, tiny_llama, target_folders):
    """What the optimizer steps with, and not only what the log says."""
    run, rates = make_run(tmp_path, tiny_llama), []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer, task, optimizer):
            rates.append((optimizer.param_groups[0]["lr"], task.lr(task.position.step)))

    for steps in (3, 6):
        trainer = {"max_steps": steps, "callbacks": [Rates()]}
        start(run, target_folders("llama"), trainer=trainer, optimizer={"warmup_steps": 0})
    assert len(rates) == 6 and all(used == pytest.approx(told) for used, told in rates), rates
