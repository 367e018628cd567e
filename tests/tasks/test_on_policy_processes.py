"""On-policy training in several processes: the numbers of one, in step however long answers are, and resumed by any number of processes."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from on_policy_forms import FORMS, Stop, build_easy_target, form_of, make_run, trouble
from safetensors.torch import load_file
from tiny_run import logged, start

from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.checkpoints import find_last

SCRIPT = Path(__file__).with_name("on_policy_process.py")
WATCHED = "train/loss", "train/top1_depth_1", "rollout/tau", "rollout/staleness", "rollout/acceptance_depth_1", "tokens_seen"


def run_of(folder, form, trouble_of, changes) -> dict:
    """What on_policy_process.py does once."""
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    return {"folder": str(folder), "form": form, "port": port, "changes": changes, "trouble": trouble_of}


def launch(
    runs: list[dict], target, place: Path, ranks: int = 2, deepspeed_on_cpu: bool = False, gpu: bool = False
) -> subprocess.Popen:
    """Starts processes that train these runs one after the other. They are ended after a while: a deadlock fails a test and does not hang it."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "runs.json").write_text(json.dumps(runs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    environment |= {"DS_ACCELERATOR": "cpu"} if deepspeed_on_cpu else {}
    process = subprocess.Popen(
        [*torchrun, str(SCRIPT), str(target), str(place / "runs.json")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    watchdog = threading.Timer(300, process.terminate)
    watchdog.daemon = True
    watchdog.start()
    return process


def finish(process: subprocess.Popen) -> str:
    said = process.stdout.read()
    assert process.wait(60) == 0, said
    return said


def weights(run) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last_drafter" / "drafter.safetensors")


def require_equal(found, wanted) -> None:
    """Every number that is watched, at every step, and the weights. (float32 sums in another order, hence the tolerance.)"""
    for name in WATCHED:
        assert logged(found, name) == pytest.approx(logged(wanted, name), rel=1e-5, abs=1e-7), name
    theirs = weights(wanted)
    assert all(torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5) for name, value in weights(found).items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_easy_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return load_target(TargetConfig(path=str(folder)), device="cpu")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, target, folder):
    """(form, trouble) -> the run of one process, made when first asked for."""
    made = {}

    def run(form: str, **trouble_of):
        name = json.dumps([form, trouble_of])
        if name not in made:
            made[name] = make_run(tmp_path_factory.mktemp("alone"), target)
            with trouble(0, **trouble_of):
                start(made[name], folder, **form_of(form))
        return made[name]

    return run


SHARED = "eagle3, rounds"
LATE = {"uneven": [2], "slow": [1, 9.0]}
HANDED_OVER = {1: "eagle3, rounds", 2: "dflash, rounds", 3: "eagle3, text"}
"""Step behind which one process stopped, to be taken over by two: within, before and behind a refresh."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, target, folder):
    """Whatever two processes train, in one go, the one that is killed last: name -> folder, and what they said."""
    place = tmp_path_factory.mktemp("pairs")
    ddp = {"strategy": "ddp"}
    troubles = {
        "late": (SHARED, LATE, {"time_limit": 6, "trainer": {}}),
        "told": (SHARED, {"told": [1, 1]}, {"trainer": ddp}),
        **{step: (form, {}, {"trainer": ddp}) for step, form in HANDED_OVER.items()},
        "killed": (SHARED, {"killed": [1, 1, 1]}, {"trainer": ddp, "checkpoint": {"every": 1}}),
    }
    equals = {
        (form, accumulate): (form, {}, {"trainer": ddp | {"accumulate_grad_batches": accumulate}})
        for form in FORMS
        for accumulate in (1, 2)
    }
    runs = equals | troubles
    folders = {name: make_run(place / str(number), target) for number, name in enumerate(runs)}
    for step, form in HANDED_OVER.items():
        start(folders[step], folder, trainer={"callbacks": [Stop(step - 1)]}, **form_of(form))
    process = launch([run_of(folders[name], *run) for name, run in runs.items()], folder, place)
    folders["said"] = process.stdout.read()
    assert process.wait(60) == 1, folders["said"]
    return folders


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_equal_one(pairs, alone, form, accumulate):
    require_equal(pairs[form, accumulate], alone(form))


def test_a_rank_may_be_later_than_processes_wait_for_each_other(pairs, alone):
    """Rank 1 has the longer answers, and takes 9 seconds more to give them, where the trainer's processes give up after 6."""
    require_equal(pairs["late"], alone(SHARED, uneven=LATE["uneven"]))
    assert logged(pairs["late"], "train/loss") != pytest.approx(logged(alone(SHARED), "train/loss"), rel=1e-5)


@pytest.mark.parametrize("step", HANDED_OVER)
def test_two_processes_go_on_from_one(pairs, alone, step):
    require_equal(pairs[step], alone(HANDED_OVER[step]))
    assert f"resuming from {pairs[step]}/checkpoints/last/step_{step:08d}" in pairs["said"]


def test_a_signal_while_rank_1_answers_stops_both_behind_the_step_and_one_goes_on(pairs, alone, folder):
    saved = find_last(pairs["told"] / "checkpoints")
    assert saved.position.step == 3 and saved.share["world"] == 2, "the second refresh stands before the third step"
    assert "stopped at step 3 of 4" in pairs["said"]
    start(pairs["told"], folder, **form_of(SHARED))
    require_equal(pairs["told"], alone(SHARED))


def test_a_run_killed_while_rollouts_are_written_goes_on_from_the_checkpoint_before(pairs, alone, folder):
    run = pairs["killed"]
    assert "Signal 9 (SIGKILL)" in pairs["said"]
    assert find_last(run / "checkpoints").position.step == 2, (
        "the third step's checkpoint needs the second refresh, which was being written"
    )
    rollouts = run / "checkpoints" / "rollouts"
    newer = {path.name for path in (rollouts / "refresh_00000001").iterdir()}
    assert "lane_00001.json" in newer and "lane_00003.safetensors" in newer and not newer & {"lane_00003.json", "manifest.json"}
    start(run, folder, **form_of(SHARED))
    require_equal(run, alone(SHARED))
    assert [path.name for path in rollouts.iterdir()] == ["refresh_00000001"]


SPARSE = "eagle3, rounds", "dflash, rounds", "eagle3, text"


@pytest.fixture(scope="module")
def fours(tmp_path_factory, target, folder):
    place = tmp_path_factory.mktemp("fours")
    folders = {form: make_run(place / str(number), target) for number, form in enumerate(SPARSE)}
    trainer = {"accumulate_grad_batches": 2, "strategy": "ddp"}
    finish(launch([run_of(run, form, {}, {"trainer": trainer}) for form, run in folders.items()], folder, place, ranks=4))
    return folders


@pytest.mark.parametrize("form", SPARSE)
def test_micro_batches_without_a_rollout_change_nothing(fours, alone, form):
    """Four rollouts a step for eight micro-batches: every rank's second one is empty."""
    require_equal(fours[form], alone(form))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_gives_the_numbers_of_one_process(tmp_path, target, folder, alone, stage, precision):
    """On the CPU; stopped while rank 1 answers, and gone on with. Weights are gathered for the rollouts wherever they lie."""
    pytest.importorskip("deepspeed")
    run = make_run(tmp_path / "run", target)
    trainer = {"strategy": f"deepspeed_stage_{stage}", "precision": precision, "accumulate_grad_batches": 2}
    for trouble_of, wanted in (({"told": [1, 1]}, "stopped at step 3 of 4"), ({}, "resuming from")):
        assert wanted in finish(
            launch([run_of(run, SHARED, trouble_of, {"trainer": trainer})], folder, tmp_path, deepspeed_on_cpu=True)
        )
    exact, wanted = precision == "32-true", alone(SHARED)
    assert logged(run) == pytest.approx(logged(wanted), rel=1e-5 if exact else 3e-2)
    assert logged(run, "rollout/staleness") == logged(wanted, "rollout/staleness")
    theirs = weights(wanted)
    difference = torch.cat([(value.float() - theirs[name].float()).flatten() for name, value in weights(run).items()])
    assert difference.abs().mean() < (1e-6 if exact else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("form", SPARSE)
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_two_gpus_equal_one(tmp_path, target, folder, form, strategy):
    """The second one 9 seconds late; NCCL between them, and other kernels for other numbers of rows, hence the tolerance."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs")
    one, two = (make_run(tmp_path / name, target) for name in ("one", "two"))
    finish(launch([run_of(one, form, {}, {"trainer": {}})], folder, tmp_path, ranks=1, gpu=True))
    finish(launch([run_of(two, form, {"slow": [1, 9.0]}, {"trainer": {"strategy": strategy}})], folder, tmp_path, gpu=True))
    for name in ("train/loss", "rollout/tau", "rollout/staleness"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=2e-3), name
