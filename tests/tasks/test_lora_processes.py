"""Adapters trained in several processes, under DeepSpeed, and planned: the numbers of one process, and the bytes that a plan has counted."""

import pytest
import torch
from planning import EAGLE3, QUIET, planner
from safetensors.torch import load_file
from tasks.test_lora import adapters, again, summed
from tasks.test_processes import finish, launch
from tasks.test_train import weights
from tiny_run import logged, make_run, start

from drafttrain.files import human_bytes
from drafttrain.tasks.checkpoints import find_last
from drafttrain.tasks.lora import BASE
from drafttrain.tasks.lora_config import LoraConfig

pytest.importorskip("peft")
LORA = {"rank": 3}


@pytest.fixture(scope="module")
def llama(target_folders):
    return target_folders("llama")


@pytest.fixture(scope="module")
def began(tmp_path_factory, tiny_llama, llama):
    """checkpoints/best of a run."""
    return start(make_run(tmp_path_factory.mktemp("began"), tiny_llama), llama)


def test_two_ranks_equal_two_accumulations(tmp_path, tiny_llama, llama, began):
    """Losses, tau, merged weights and adapters. (float32 sums in another order, hence the tolerance.)"""
    alone, pair = (make_run(tmp_path / name, tiny_llama) for name in ("alone", "pair"))
    checkpoint = {"start": str(began), "tau_prompts": 3, "tau_every": 2, "tau_tokens": 8}
    settings = {"lora": LORA, "optimizer": {"lr": 1e-2, "warmup_steps": 0}, "checkpoint": checkpoint}
    start(alone, llama, **settings, trainer={"accumulate_grad_batches": 4})
    finish(launch(pair, llama, torchrun=True, **settings, trainer={"accumulate_grad_batches": 2, "strategy": "ddp"}))
    for name in ("train/loss", "tokens_seen", "held_out/tau"):
        assert logged(pair, name) == pytest.approx(logged(alone, name), rel=1e-5)
    for found in (weights, adapters):
        mine, theirs = found(alone), found(pair)
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(value, theirs[name], rtol=1e-4, atol=1e-4) for name, value in mine.items())
    assert find_last(pair / "checkpoints").position == find_last(alone / "checkpoints").position


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_deepspeed_merges_from_fp32_and_resumes(tmp_path, tiny_llama, llama, began, stage, precision):
    """As its recipes have it, without frozen weights in its states; a drafter of bf16 copies would be off by 1/256 everywhere."""
    pytest.importorskip("deepspeed")
    alone, other = (make_run(tmp_path / name, tiny_llama) for name in ("alone", "other"))
    settings = {"lora": LORA, "optimizer": {"lr": 1e-2, "warmup_steps": 0}, "checkpoint": {"start": str(began)}}
    trainer = {"max_steps": 6, "accumulate_grad_batches": 4}
    start(alone, llama, **settings, trainer=trainer)
    changed = trainer | {"precision": precision, "accumulate_grad_batches": 2, "strategy": f"deepspeed_stage_{stage}"}
    how = dict(torchrun=True, deepspeed_on_cpu=True)
    assert "stopped at step 4 of 6" in finish(launch(other, llama, 1, 5, **how, **settings, trainer=changed))
    finish(launch(other, llama, **how, **settings, trainer=changed))
    exact = precision == "32-true"
    assert logged(other) == pytest.approx(logged(alone), rel=2e-3 if exact else 3e-2)
    base, found, wanted = (
        load_file(other / "checkpoints" / BASE / "drafter.safetensors"),
        weights(other),
        summed(other, LoraConfig(rank=3)),
    )
    assert all(torch.allclose(value, wanted[name], rtol=0, atol=1e-6) for name, value in found.items())
    assert all(torch.equal(found[name], base[name]) for name in base if "norm" in name or "lm_head" in name)
    assert all(value.dtype == torch.float32 for value in adapters(other).values())
    if exact:
        assert all(torch.allclose(value, found[name], atol=5e-3) for name, value in weights(alone).items())


def test_a_plan_counts_what_training_trains_and_keeps(tmp_path, tiny_llama, llama, capsys):
    """By the formula r (in + out) of every matrix, and by what a run says and writes."""
    drafter = {"taps": [0, 1, 3], "depth": 2}
    began = start(make_run(tmp_path / "began", tiny_llama), llama, drafter=drafter)
    plan = planner(tmp_path, llama, capsys)
    capsys.readouterr()
    optimizer, checkpoint = {"warmup_steps": 0}, {"start": str(began)}
    sections = QUIET | {"lora": LORA, "checkpoint": {"drafts": 2, "start": str(began)}}
    _, lines = plan(EAGLE3, **sections)
    D, Q, K, I, V = 32, 32, 16, 48, 200  # noqa: E741
    trained = 3 * ((3 * D + D) + (2 * D + Q) + 2 * (2 * D + K) + (Q + D) + 3 * (D + I))
    frozen = 3 * D * D + 2 * D * Q + 2 * 2 * D * K + Q * D + 3 * D * I + D * V + 4 * D
    [parameters] = [line for line in lines if line.startswith("parameters: ")]
    assert parameters.startswith(f"parameters: {trained:,} trained, {frozen:,} frozen in the drafter, ")
    assert "LoRA: adapters of rank 3 beside 8 matrices, scaled by 5.33333" in lines
    [disk] = [line for line in lines if line.startswith("disk, checkpoints: ")]
    of_disk = [human_bytes(each * number) for each, number in ((12, trained), (4, frozen), (4, trained))]
    assert disk.startswith("disk, checkpoints: {} to resume, {} a drafter and {} of adapters beside it".format(*of_disk))
    [device] = [line for line in lines if line.startswith("device (")]
    of_device = [human_bytes(each * number) for each, number in ((4, trained + frozen), (4, trained), (8, trained))]
    assert "drafter {} + gradients {} + Adam {} = ".format(*of_device) in device

    run = make_run(tmp_path / "run", tiny_llama)
    again(run, tiny_llama, llama, began, drafter=drafter, optimizer=optimizer, checkpoint=checkpoint, lora=LORA)
    assert parameters in capsys.readouterr().out
    state = torch.load(find_last(run / "checkpoints").state, weights_only=True)
    kept = [value.numel() for value in state["state_dict"].values()]
    moments = [value.numel() for each in state["optimizer_states"][0]["state"].values() for value in each.values() if value.ndim]
    assert (sum(kept), sum(moments)) == (trained, 2 * trained)

    _, lines = plan(EAGLE3, code=2, **sections | {"lora": {"rank": 3, "layers": ["nothing"]}})
    assert lines[-1].startswith("error: lora.layers names nothing, but no matrix of this drafter is called so; it has fc, ")
    _, lines = plan(EAGLE3, code=2, **QUIET, lora=LORA)
    assert lines[-1].startswith("error: lora.rank is 3, but checkpoint.start is null")
