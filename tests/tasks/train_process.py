"""Trains in a process of its own: `python train_process.py RUN TARGET '{"trainer": {...}}' [RANK MICRO_BATCH]`, alone or under torchrun.

With a rank and a micro-batch, that rank alone sends itself SIGTERM there. Gradient norms go to RUN/norms.json. With DS_ACCELERATOR=cpu in the
environment DeepSpeed runs on the CPU, over gloo, which Lightning's strategy would refuse. Without a GPU speed.graph_step is done by a stand-in (replayed.py).
"""

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import lightning.pytorch as pl  # noqa: E402
import lightning.pytorch.strategies.deepspeed as strategies  # noqa: E402
from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from tasks.replayed import stand_in, steps_are_recorded  # noqa: E402
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


class Seen(pl.Callback):
    """Which texts were trained, by the tokens that this process read: a line of RUN/seen_RANK.jsonl for each micro-batch of a step that was done."""

    def __init__(self, run: Path):
        self.run = run

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        texts = []
        for ids_T, document_T in zip(batch.sequences.ids_BT, batch.sequences.document_BT, strict=True):
            texts.append([ids_T[document_T == d].tolist() for d in range(int(document_T.max()) + 1)])
        step = task.position.step + (not batch.last)  # behind the last micro-batch of a step it is counted already
        with open(self.run / f"seen_{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "micro": batch.micro, "rank": trainer.global_rank, "rows": texts}) + "\n")


class StopAt(pl.Callback):
    """The rank with the highest number gets SIGTERM, so that this many steps are done."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        last = trainer.global_rank == trainer.world_size - 1
        if last and batch.micro == 0 and task.position.step == self.steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Trouble(pl.Callback):
    """What befalls one rank before its third step, where the launcher has not started it anew: it is `stopped`, `asleep` or `killed`
    for good, or it is `slow`, before training too."""

    def __init__(self, kind: str):
        self.kind = kind

    def setup(self, trainer, task, stage):
        if self.kind == "slow" and trainer.global_rank == 0:
            dawdle(3.0)

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if task.position.step != 2 or batch.micro or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return
        if self.kind == "slow":
            if trainer.global_rank == 0:
                dawdle(3.0)
        elif trainer.global_rank == 1:
            dawdle(2.0)  # until it has told of itself
            if self.kind == "asleep":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGSTOP if self.kind == "stopped" else signal.SIGKILL)


def dawdle(seconds: float) -> None:
    """Takes so long over many small things."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = json.dumps({str(number): number for number in range(300)})
        sorted(json.loads(text).items(), key=lambda item: -item[1])


def main(
    run: Path,
    target: Path,
    sections: dict,
    tell: tuple[int, int] | None = None,
    stop_at: int | None = None,
    trouble: str | None = None,
) -> None:
    """Trains in this process, with the sections of tiny_run."""
    torch.set_num_threads(1)
    told = [TellOne(*tell)] if tell else [StopAt(stop_at)] if stop_at else [Trouble(trouble)] if trouble else []
    sections["trainer"]["callbacks"] = [Norms(run / "norms.json"), Seen(run), *told]
    strategy, gpus = sections["trainer"].get("strategy"), 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else None
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        allow_deepspeed_on_cpu()
        strategy = None  # our own check would refuse it too
    with ExitStack() as stack:
        if sections.get("speed", {}).get("graph_step") and not torch.cuda.is_available():
            for patched in (stand_in([]), *steps_are_recorded()):
                stack.enter_context(patched)
        start(run, target, topology=read_topology(strategy, gpus=gpus), **sections)


if __name__ == "__main__":
    run, target, changes, *tell = sys.argv[1:]
    sections = json.loads(changes)
    trouble = sections.pop("trouble", None)
    main(Path(run), Path(target), sections, tuple(map(int, tell)) or None, trouble=trouble)  # type: ignore[arg-type]
