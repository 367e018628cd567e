"""A target that processes share: the features of a whole one, and the training of processes that each have one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planning import EAGLE3, line, planner
from safetensors.torch import load_file
from tasks.test_processes import TORCHRUN, finish, launch
from tiny import ARCHITECTURES, COMMON, build_tokenizer
from tiny_run import logged, make_run, start
from transformers import GptOssConfig, LlamaConfig, LlamaForCausalLM

from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import _sharing
from drafttrain.topology import Topology

SCRIPT = Path(__file__).with_name("shared_target_process.py")
SHARED = {"speed": {"shard_target": True}}
SHAREABLE = [name for name in ARCHITECTURES if name != "gpt_oss"]
"""Kinds of targets that transformers has a plan for."""


def tied(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def read_together(folders: list[Path], gpu: bool) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, *TORCHRUN, "2", str(SCRIPT), *map(str, folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2 * len(folders)


def test_two_processes_read_what_one_with_the_whole_target_reads(tmp_path, target_folders):
    read_together([*map(target_folders, SHAREABLE), tied(tmp_path / "tied")], gpu=False)


@pytest.mark.gpu
def test_two_gpus_read_what_one_with_the_whole_target_reads(tmp_path, target_folders):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs")
    read_together([*map(target_folders, SHAREABLE), tied(tmp_path / "tied")], gpu=True)


def test_two_ranks_that_share_a_target_train_as_one_that_has_it_whole(tmp_path, tiny_llama, target_folders):
    target = target_folders("llama")
    alone, pair = (make_run(tmp_path / name, tiny_llama) for name in ("alone", "pair"))
    start(alone, target, trainer={"accumulate_grad_batches": 4})
    finish(launch(pair, target, torchrun=True, trainer={"accumulate_grad_batches": 2, "strategy": "ddp"}, **SHARED))
    assert logged(pair) == pytest.approx(logged(alone), rel=1e-5)
    mine, theirs = (load_file(run / "checkpoints/best/drafter.safetensors") for run in (alone, pair))
    assert all(torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-5) for name, value in mine.items())


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_2"])
def test_two_gpus_that_share_a_target_train_as_one_that_has_it_whole(tmp_path, tiny_llama, target_folders, strategy):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 NVIDIA GPUs")
    target = target_folders("llama")
    alone, pair = (make_run(tmp_path / name, tiny_llama) for name in ("alone", "pair"))
    finish(launch(alone, target, trainer={"accumulate_grad_batches": 4}))
    trainer = {"accumulate_grad_batches": 2, "strategy": strategy}
    finish(launch(pair, target, torchrun=True, gpu=True, trainer=trainer, **SHARED))
    assert logged(pair) == pytest.approx(logged(alone), rel=2e-3)


@pytest.mark.parametrize(
    ("topology", "changes", "sentence"),
    [
        (Topology(), {}, "shares the target among all processes of one machine, but there are 1 on 1"),
        (Topology(world=4, local=2), {}, "but there are 4 on 2"),
        (Topology(world=2, local=2), {"checkpoint": {"tau_prompts": 3}}, "checkpoint.tau_prompts is 3"),
        (Topology(world=2, local=2), {"on_policy": {}}, "task is on_policy"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_loads(tmp_path, tiny_llama, topology, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        start(make_run(tmp_path, tiny_llama), tmp_path / "nothing", topology, **SHARED, **changes)


def test_plan_refuses_answers_of_a_shared_target(tmp_path, target_folders, capsys):
    planned = planner(tmp_path, target_folders("llama"), capsys)
    _, lines = planned(EAGLE3, code=2, checkpoint={"tau_prompts": 2}, **SHARED)
    assert line(lines, "error: ").startswith("error: speed.shard_target is true and checkpoint.tau_prompts is 2")
    _, lines = planned(EAGLE3, checkpoint={"tau_prompts": 0}, **SHARED)  # though it is one process that plans
    assert line(lines, "processes: ")


def test_heads_and_files_that_cannot_be_shared_are_named():
    text = LlamaConfig(hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    with pytest.raises(UserError, match=r"2 processes cannot share the 9 heads \(3 of keys and values\)"):
        _sharing(text, TargetConfig(path="x").path, None, 2)
    with pytest.raises(UserError, match=r"a \.gguf file, which is read whole"):
        _sharing(text, "x.gguf", "x.gguf", 3)
    with pytest.raises(UserError, match="no plan for sharing out the layers of a gpt_oss such as target x"):
        _sharing(GptOssConfig(), "x", None, 2)
