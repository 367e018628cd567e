"""A training step enqueues its work and goes on: between two logged steps the host never waits for the device.

On a CPU nothing waits, so there the operations are refused that would on a GPU: those that hand a number of a tensor to Python, or whose result is as
large as its content says. On a GPU torch itself refuses them, through whole steps of Lightning's loop.
"""

from contextlib import contextmanager
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from drafters.test_dflash import wide_heads
from drafters.test_faces import DRAFTERS
from tasks.test_accumulation import small
from tasks.test_compiled_drafters import objective_for
from tiny_run import logged, make_run, start
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.losses import Distillation
from drafttrain.position_weights import DPace
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.topology import read_topology

aten = torch.ops.aten
NO_CHAT_HOLDS = 312


def case(name: str):
    """A drafter of the table for chats of `tiny_run`, and an objective that teaches it."""
    config = small(name)
    config = replace(config, mask_token=NO_CHAT_HOLDS) if hasattr(config, "mask_token") else config
    return config, objective_for(config)


SIZED_BY_CONTENT = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount}
READ = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}


class _Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        packet = operation.overloadpacket
        by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        by_count = operation is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        if packet in SIZED_BY_CONTENT | READ or by_mask or by_count:
            raise RuntimeError(f"the host would wait for {operation}")
        return operation(*args, **(kwargs or {}))


@contextmanager
def waiting_refused(monkeypatch):
    """On a CPU: what would make the host wait for a GPU raises."""

    def refuse(*_):
        raise RuntimeError("the host would wait for a copy")

    with monkeypatch.context() as patch, _Refuse():
        for name in ("tolist", "cpu", "numpy"):  # on a CPU these pass by the dispatcher
            patch.setattr(torch.Tensor, name, refuse)
        yield


class RefusedInSteps(pl.Callback):
    """Refuses waiting in forward and backward passes. (AdamW keeps its count of steps on the CPU, where reading it costs nothing.)"""

    def __init__(self, monkeypatch):
        self.patch, self.steps = monkeypatch, 0

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.refused = waiting_refused(self.patch)
        self.refused.__enter__()

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.refused.__exit__(None, None, None)
        self.steps += 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_step_asks_for_a_number(tmp_path, tiny_llama, target_folders, monkeypatch, name):
    drafter, objective = case(name)
    refused = RefusedInSteps(monkeypatch)
    trainer = {"max_steps": 2, "callbacks": [refused], "gradient_clip_val": 0.5}
    start(make_run(tmp_path, tiny_llama), target_folders("llama"), drafter=drafter, objective=objective, trainer=trainer)
    assert refused.steps == 2


@pytest.mark.parametrize("operation", [
    lambda x: x.sum().item(), lambda x: bool(x[0] > 0), lambda x: x[x > 0], lambda x: x.tolist(), lambda x: x.cpu(),
    lambda x: x.nonzero(), lambda x: x.unique(), lambda x: x.repeat_interleave(x.long()),
])  # fmt: skip
def test_what_would_wait_is_refused(monkeypatch, operation):
    x = torch.arange(4.0)
    with waiting_refused(monkeypatch), pytest.raises(RuntimeError, match="the host would wait"):
        operation(x)
    operation(x)


class ForbiddenBetweenLogs(pl.Callback):
    """From the start of the third step to that of the last but one torch refuses every wait, whoever asks for it."""

    def __init__(self, steps: int):
        self.steps, self.seen = steps, 0

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        between = 2 <= task.position.step < self.steps - 1  # libraries choose kernels and workspaces in the first two
        torch.cuda.set_sync_debug_mode("error" if between else "default")
        self.seen += between

    def on_exception(self, trainer, task, exception):
        torch.cuda.set_sync_debug_mode("default")


FAST = {"graph_target": True, "fused_blocks": True}
ON_GPU = {
    "eagle3": (Eagle3(taps=[0, 1, 3], depth=4, draft_vocab=200), Distillation(positions=DPace(), reduction="drafts", chunk=80)),
    **{name: case(name) for name in ("dflash", "hydra", "p-eagle")},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("speed", [{}, FAST, FAST | {"overlap_target": True}], ids=["plain", "graph", "overlap"])
@pytest.mark.parametrize("muon_lr", [None, 1e-3], ids=["adamw", "muon"])
@pytest.mark.parametrize("name", ON_GPU)
def test_the_host_never_waits_between_two_logged_steps(tmp_path, name, muon_lr, speed):
    drafter, objective = ON_GPU[name]
    folder = wide_heads(tmp_path / "target")
    run = make_run(tmp_path / "run", load_target(TargetConfig(path=str(folder)), device="cpu"))
    forbidden = ForbiddenBetweenLogs(steps=9)
    trainer = {"max_steps": 9, "log_every_n_steps": 9, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    trainer |= {"gradient_clip_val": 1.0, "callbacks": [forbidden]}
    changes = {"trainer": trainer, "speed": speed, "optimizer": {"muon_lr": muon_lr}}
    start(run, folder, read_topology(), drafter=drafter, objective=objective, **changes)
    assert forbidden.seen == 12 and list(logged(run)) == [9]
