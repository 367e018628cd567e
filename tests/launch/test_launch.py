"""The scripts that start a training on one machine, on several, under Slurm and on Kubernetes, with stand-ins for what they call."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny_run import make_run

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
ARGUMENTS = ["--config", "r.yaml", "--config", "hw.yaml", "--data.rows", "2"]


def stand_in(folder: Path, name: str, body: str) -> Path:
    """A program that is found before the real one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)
    return folder / name


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NPROC", "NODES", "HEAD", "CUDA_VISIBLE_DEVICES")}
    return kept | {"PATH": f"{folder}:{os.environ['PATH']}"} | more


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash_and_can_be_run(script):
    assert script.read_text().startswith("#!/usr/bin/env bash\n") and os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "--standalone --nproc-per-node 1 --max-restarts 0"),
        ({}, "--standalone --nproc-per-node 2 --max-restarts 0"),
        ({"CUDA_VISIBLE_DEVICES": "0,2,5"}, "--standalone --nproc-per-node 3 --max-restarts 0"),
        ({"NPROC": "4", "RESTARTS": "2"}, "--standalone --nproc-per-node 4 --max-restarts 2"),
        ({"NODES": "1", "HEAD": "a:1"}, "--standalone --nproc-per-node 2 --max-restarts 0"),
        (
            {"NODES": "8", "HEAD": "node0:29400", "NPROC": "8", "JOB": "17"},
            "--nnodes 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id 17 --nproc-per-node 8 --max-restarts 0",
        ),
    ],
)
def test_torchrun_is_told_of_machines_and_processes(tmp_path, given, wanted):
    python = stand_in(tmp_path / "bin", "python", 'echo "$@"; env | grep TORCH_')
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 'GPU 0: x'; echo 'GPU 1: x'")
    done = subprocess.run(
        [LAUNCH / "torchrun.sh", *ARGUMENTS], env=environment(python.parent, **given), capture_output=True, text=True, check=True
    )
    command, *told = done.stdout.splitlines()
    assert command == f"-m torch.distributed.run {wanted} -m drafttrain train {' '.join(ARGUMENTS)}"
    assert {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120"} <= set(told)


def test_a_machine_without_gpus_or_their_tool_gets_one_process(tmp_path):
    python = stand_in(tmp_path / "bin", "python", 'echo "$@"')
    stand_in(tmp_path / "bin", "nvidia-smi", "exit 9")
    done = subprocess.run([LAUNCH / "torchrun.sh"], env=environment(python.parent), capture_output=True, text=True, check=True)
    assert "--nproc-per-node 1 " in done.stdout


def test_machines_need_a_place_to_meet(tmp_path):
    done = subprocess.run([LAUNCH / "torchrun.sh"], env=environment(tmp_path, NODES="2"), capture_output=True, text=True)
    assert done.returncode != 0 and "HEAD=host:port says where 2 machines meet" in done.stderr


# ---- Slurm -----------------------------------------------------------------------------------------------------------------


def slurm(tmp_path: Path, srun: str) -> subprocess.Popen:
    """The batch script as Slurm starts it, with a step that does `srun`."""
    stand_in(tmp_path / "bin", "srun", f'env > {tmp_path}/environment; echo "$@" > {tmp_path}/step\n{srun}')
    stand_in(tmp_path / "bin", "scontrol", f'[ "$1" = show ] && printf "node3\\nnode4\\n" && exit; echo "$@" > {tmp_path}/queued')
    given = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "54321",
        "SLURM_JOB_NODELIST": "node[3-4]",
    }
    return subprocess.Popen([LAUNCH / "slurm.sh", *ARGUMENTS], env=environment(tmp_path / "bin", **given), cwd=tmp_path)


@pytest.mark.parametrize("code", [0, 7])
def test_every_machine_of_slurm_gets_one_launcher_and_its_code_is_the_jobs(tmp_path, code):
    assert slurm(tmp_path, f"exit {code}").wait(20) == code
    assert (tmp_path / "step").read_text().split() == ["--kill-on-bad-exit=1", "launch/torchrun.sh", *ARGUMENTS]
    told = (tmp_path / "environment").read_text().splitlines()
    assert {"NODES=2", "HEAD=node3:29721", "JOB=54321", "RESTARTS=3"} <= set(told)
    assert not (tmp_path / "queued").exists()


@pytest.mark.parametrize(("number", "queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_run_saves_before_its_time_is_up_and_is_queued_again_unless_it_was_cancelled(tmp_path, number, queued):
    saves = f"trap 'sleep 0.5; touch {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    process = slurm(tmp_path, saves)
    end = time.monotonic() + 20
    while not (tmp_path / "begun").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(20) == 0 and (tmp_path / "saved").exists()
    assert (tmp_path / "queued").exists() == queued
    if queued:
        assert (tmp_path / "queued").read_text().split() == ["requeue", "54321"]


# ---- Kubernetes ------------------------------------------------------------------------------------------------------------


def test_the_kubernetes_job_agrees_with_itself_and_with_the_repository():
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert job["kind"] == "PyTorchJob" and replicas["Master"]["replicas"] == 1
    for machine in replicas.values():
        pod = machine["template"]["spec"]
        [container] = pod["containers"]
        told = {each["name"]: each["value"] for each in container["env"]}
        assert int(told["NODES"]) == sum(machine["replicas"] for machine in replicas.values())
        assert int(told["NPROC"]) == container["resources"]["limits"]["nvidia.com/gpu"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        [line] = container["args"]
        words = line.split()
        assert words[:3] == ["HEAD=$MASTER_ADDR:$MASTER_PORT", "exec", "launch/torchrun.sh"]
        for word in words[2:]:
            if "/" in word and not word.startswith("/"):
                assert (ROOT / word).is_file(), word
    assert len((LAUNCH / "pytorchjob.yaml").read_text().splitlines()) < 60  # one page


# ---- for real --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchruns_last_lines_name_a_mistake_in_the_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("name: x\noptimzer: {lr: 1}\n")
    given = environment(tmp_path, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", NPROC="2")
    done = subprocess.run(
        [LAUNCH / "torchrun.sh", "--config", tmp_path / "r.yaml"], env=given, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    root_cause = done.stderr.partition("Root Cause")[2]
    assert f"error: unknown key 'optimzer' ({tmp_path}/r.yaml line 2): did you mean 'optimizer'?" in root_cause


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_two_processes_on_one_machine_or_on_two_train(tmp_path, tiny_llama, target_folders, nodes):
    make_run(tmp_path / "runs" / "tiny", tiny_llama)
    recipe = {
        "name": "tiny",
        "target": {"path": str(target_folders("llama"))},
        "prepare": {"prompts": [{"class_path": "JsonlPrompts", "init_args": {"path": "prompts.jsonl"}}]},
        "drafter": {"class_path": "Eagle3", "init_args": {"taps": [0, 1, 3], "depth": 2, "draft_vocab": 200}},
        "objective": {"class_path": "Distillation"},
        "data": {"length": 48},
        "checkpoint": {"tau_prompts": 0},
        "trainer": {"max_steps": 3},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    given = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NPROC": str(2 // nodes)}
    given |= {"NODES": "2", "HEAD": "localhost:29417"} if nodes == 2 else {}
    command = [LAUNCH / "torchrun.sh", "--config", tmp_path / "recipe.yaml", "--config", "recipes/hardware/ddp.yaml"]
    machines = [
        subprocess.Popen(
            [*command, "--runs", tmp_path / "runs"],
            env=environment(tmp_path, **given), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(nodes)
    ]  # fmt: skip
    said = "".join(machine.communicate(timeout=180)[0] for machine in machines)
    assert [machine.returncode for machine in machines] == [0] * nodes, said
    assert f"training in 2 process(es) on {nodes} machine(s), cpu" in said and "step 3/3" in said
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "best" / "drafter.json").exists()
