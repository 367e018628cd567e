"""Trains in a process of its own: `python train_process.py RUN TARGET '{"trainer": {...}}' [RANK MICRO_BATCH]`, alone or under torchrun.

With a rank and a micro-batch, that rank alone sends itself SIGTERM there.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import lightning.pytorch as pl  # noqa: E402
from tiny_run import start  # noqa: E402

from drafttrain.topology import read_topology  # noqa: E402


class TellOne(pl.Callback):
    """One rank alone gets a signal."""

    def __init__(self, rank: int, micro_batch: int):
        self.rank, self.micro_batch = rank, micro_batch

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx == self.micro_batch:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run, target, changes, *tell = sys.argv[1:]
    sections = json.loads(changes)
    if tell:
        sections["trainer"]["callbacks"] = [TellOne(*map(int, tell))]
    start(Path(run), Path(target), topology=read_topology(gpus=0), **sections)
