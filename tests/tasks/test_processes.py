"""Training in processes of its own: two ranks equal one, and a process that is told to stop, or killed, is resumed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import logged, make_run, start

from drafttrain.tasks.checkpoints import find_last

SCRIPT = Path(__file__).with_name("train_process.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(
    run, target, *tell: int, torchrun=False, ranks=2, gpu=False, deepspeed_on_cpu=False, restarts=0, patience_s=60, **changes
) -> subprocess.Popen:
    """Starts training. It is ended after a while, so that a deadlock fails a test and does not hang it."""
    command = [
        sys.executable,
        *([*TORCHRUN, str(ranks), "--max-restarts", str(restarts)] if torchrun else []),
        str(SCRIPT),
        str(run),
        str(target),
        json.dumps(changes),
        *map(str, tell),
    ]
    # Ranks that torchrun starts anew would else read, in the store of its own, where those before them were (pytorch#135712).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    environment |= {"DS_ACCELERATOR": "cpu"} if deepspeed_on_cpu else {}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    watchdog = threading.Timer(180 if gpu or deepspeed_on_cpu else patience_s, process.terminate)
    watchdog.daemon = True
    watchdog.start()
    return process


def wait_for(process: subprocess.Popen, text: str) -> str:
    """Reads until a line that contains the text."""
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without saying {text!r}:\n{seen}")


def finish(process: subprocess.Popen) -> str:
    seen = process.stdout.read()
    assert process.wait(180) == 0, seen
    return seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_to_the_whole_job_is_obeyed_behind_a_save(tmp_path, tiny_llama, target_folders, number):
    """Schedulers signal every process of a job, the one that reads ahead too, and a terminal does."""
    run, target = make_run(tmp_path / "run", tiny_llama), target_folders("llama")
    process = launch(run, target, trainer={"max_steps": 4000, "log_every_n_steps": 1}, data={"workers": 1})
    wait_for(process, "step 5/4000")
    os.killpg(process.pid, number)
    rest = process.stdout.read()
    assert process.wait(60) == 0, rest
    stopped = find_last(run / "checkpoints").position.step
    assert 5 <= stopped < 4000 and f"stopped at step {stopped} of 4000" in rest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_a_process_that_was_stopped_goes_on_bit_for_bit(tmp_path, tiny_llama, target_folders, number):
    target = target_folders("llama")
    whole, broken = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "broken"))
    settings = {"trainer": {"max_steps": 400, "accumulate_grad_batches": 2, "log_every_n_steps": 1}, "checkpoint": {"every": 3}}
    settings["optimizer"] = {"schedule": "constant"}
    process = launch(broken, target, **settings)
    wait_for(process, "step 8/400")
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(180) == (0 if number == signal.SIGTERM else -signal.SIGKILL), rest
    stopped = find_last(broken / "checkpoints").position.step
    assert 6 <= stopped < 400
    assert (f"stopped at step {stopped} of 400" in rest) == (number == signal.SIGTERM)

    # A constant learning rate does not depend on max_steps, so a few more steps are enough to compare.
    settings["trainer"]["max_steps"] = stopped + 4
    start(broken, target, **settings)
    start(whole, target, **settings)
    wanted, found = logged(whole), logged(broken)
    assert [found[step] for step in range(stopped + 1, stopped + 5)] == [wanted[step] for step in range(stopped + 1, stopped + 5)]


def test_two_ranks_equal_two_accumulations(tmp_path, tiny_llama, target_folders):
    """Losses, weights, metrics and tau. (float32 sums in another order, hence the tolerance.)"""
    target = target_folders("llama")
    alone, pair = (make_run(tmp_path / name, tiny_llama) for name in ("alone", "pair"))
    settings = {"checkpoint": {"tau_prompts": 3, "tau_every": 2, "tau_tokens": 8}}
    start(alone, target, **settings, trainer={"accumulate_grad_batches": 4})
    finish(launch(pair, target, torchrun=True, **settings, trainer={"accumulate_grad_batches": 2, "strategy": "ddp"}))
    for name in ("train/loss", "train/loss_depth_2", "train/top1_depth_1", "tokens_seen", "held_out/tau"):
        assert logged(pair, name) == pytest.approx(logged(alone, name), rel=1e-5)
    mine, theirs = (load_file(run / "checkpoints/last_drafter/drafter.safetensors") for run in (alone, pair))
    assert all(torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5) for name, value in mine.items())
    assert find_last(pair / "checkpoints").position == find_last(alone / "checkpoints").position


def test_a_signal_that_one_rank_gets_stops_both_behind_the_same_step(tmp_path, tiny_llama, target_folders):
    target = target_folders("llama")
    whole, pair = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "pair"))
    settings = {"trainer": {"max_steps": 6, "accumulate_grad_batches": 2, "strategy": "ddp"}}
    said = finish(launch(pair, target, 1, 3, torchrun=True, **settings))
    assert "stopped at step 3 of 6" in said
    assert find_last(pair / "checkpoints").position.rows == 12
    start(pair, target, trainer={"max_steps": 6, "accumulate_grad_batches": 4})  # goes on with one process
    start(whole, target, trainer={"max_steps": 6, "accumulate_grad_batches": 4})
    assert logged(pair) == pytest.approx(logged(whole), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gpus_give_the_numbers_of_the_cpu_and_resume(tmp_path, tiny_llama, target_folders, strategy, precision, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} NVIDIA GPUs")
    compare_with_one_process(tmp_path, tiny_llama, target_folders("llama"), strategy, precision, ranks, gpu=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_deepspeed_gives_the_numbers_of_one_process_on_a_cpu_too(tmp_path, tiny_llama, target_folders, stage, precision, ranks):
    pytest.importorskip("deepspeed")
    compare_with_one_process(
        tmp_path, tiny_llama, target_folders("llama"), f"deepspeed_stage_{stage}", precision, ranks, gpu=False
    )


@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "32-true"), ("deepspeed_stage_1", "bf16-mixed"), ("deepspeed_stage_2", "32-true")]
)
def test_replayed_steps_give_those_numbers_too(tmp_path, tiny_llama, target_folders, strategy, precision):
    """Gradients that are there before the way back begins are averaged, divided and accumulated as others are."""
    if "deepspeed" in strategy:
        pytest.importorskip("deepspeed")
    speed = {"compile": True, "graph_step": True}
    compare_with_one_process(tmp_path, tiny_llama, target_folders("llama"), strategy, precision, 2, gpu=False, speed=speed)


def compare_with_one_process(folder, tiny, target, strategy, precision, ranks, gpu, **changes) -> None:
    """Losses, gradient norms (so that no strategy divides once too often) and the saved fp32 weights; stopped and resumed."""
    alone, other = (make_run(folder / name, tiny) for name in ("alone", "other"))
    trainer = {"max_steps": 6, "accumulate_grad_batches": 4}
    finish(launch(alone, target, trainer=trainer))
    changed = trainer | {"strategy": strategy, "precision": precision, "accumulate_grad_batches": 4 // ranks}
    third_window = 8 // ranks + 1
    how = dict(torchrun=ranks > 1, ranks=ranks, gpu=gpu, deepspeed_on_cpu=not gpu and "deepspeed" in strategy)
    said = finish(launch(other, target, ranks - 1, third_window, **how, trainer=changed, **changes))
    assert "stopped at step 4 of 6" in said
    norms = json.loads((other / "norms.json").read_text())
    finish(launch(other, target, **how, trainer=changed, **changes))
    norms += json.loads((other / "norms.json").read_text())
    exact = precision == "32-true"
    assert logged(other) == pytest.approx(logged(alone), rel=2e-3 if exact else 3e-2)
    assert norms == pytest.approx(json.loads((alone / "norms.json").read_text()), rel=1e-2 if exact else 1e-1)
    mine, theirs = (load_file(run / "checkpoints/best/drafter.safetensors") for run in (alone, other))
    assert mine.keys() == theirs.keys() and all(value.dtype == mine[name].dtype for name, value in theirs.items())
    assert all(torch.allclose(value.float(), theirs[name].float(), atol=5e-3) for name, value in mine.items())
