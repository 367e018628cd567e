"""Trains in a process of its own: `python train_process.py RUN TARGET '{"trainer": {...}}' [RANK MICRO_BATCH]`, alone or under torchrun.

With a rank and a micro-batch, that rank alone sends itself SIGTERM there. Gradient norms go to RUN/norms.json. With DS_ACCELERATOR=cpu in the
environment DeepSpeed runs on the CPU, over gloo, which Lightning's strategy would refuse.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import lightning.pytorch as pl  # noqa: E402
import lightning.pytorch.strategies.deepspeed as strategies  # noqa: E402
from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from tiny_run import start  # noqa: E402

from drafttrain.topology import read_topology  # noqa: E402


class TellOne(pl.Callback):
    """One rank alone gets a signal."""

    def __init__(self, rank: int, micro_batch: int):
        self.rank, self.micro_batch = rank, micro_batch

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == self.micro_batch:
            os.kill(os.getpid(), signal.SIGTERM)


class Norms(pl.Callback):
    """The norm of every step's gradient, as the optimizer gets it."""

    def __init__(self, file: Path):
        self.file, self.norms = file, []

    def on_before_optimizer_step(self, trainer, task, optimizer):
        if not trainer.strategy.handles_gradient_accumulation:  # DeepSpeed is asked for a step after every micro-batch
            grads = [weight.grad for weight in task.parameters() if weight.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if batch.last and trainer.strategy.handles_gradient_accumulation:
            self.norms.append(float(trainer.strategy.deepspeed_engine.get_global_grad_norm()))

    def on_train_end(self, trainer, task):
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(self.norms))


def allow_deepspeed_on_cpu() -> None:
    """DeepSpeed itself can; Lightning looks for a CUDA device and its index."""
    strategies.CUDAAccelerator = CPUAccelerator
    strategies._validate_device_index_selection = lambda devices: None
    strategies.DeepSpeedStrategy.root_device = property(lambda self: torch.device("cpu", 0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run, target, changes, *tell = sys.argv[1:]
    sections = json.loads(changes)
    told = [TellOne(*map(int, tell))] if tell else []
    sections["trainer"]["callbacks"] = [Norms(Path(run) / "norms.json"), *told]
    strategy, gpus = sections["trainer"].get("strategy"), 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else None
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        allow_deepspeed_on_cpu()
        strategy = None  # our own check would refuse it too
    start(Path(run), Path(target), topology=read_topology(strategy, gpus=gpus), **sections)
