"""What happens at the end of an optimizer step, in this order: count, log, measure tau, save, stop.

One callback rather than five, because the order matters: nothing is saved before the loss was seen to be finite, the step that
ends a run is measured before it is saved, and a stop that the ranks agreed on at the beginning of the window is obeyed behind its
save.

A drafter that was trained before is measured before the first step too: a curve of tau begins where it began, and where nothing better
comes of it, checkpoints/best is what it was. A measurement that was due when a stop was obeyed, whose time is short, is made when the run
goes on: so its curve of tau and its best drafter are those of a run that was never stopped. What is logged is listed in docs/metrics.md.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from drafttrain.data.stream import MicroBatch
from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.save import save_drafter
from drafttrain.files import explain_full_disk
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.checkpoints import save_state
from drafttrain.tasks.distill import DistillTask, Position
from drafttrain.tasks.held_out import HeldOut, measure
from drafttrain.tasks.progress import Reporter
from drafttrain.tasks.rollouts import Turn
from drafttrain.tasks.watch import Watch
from drafttrain.tasks.weights import adapter_files, whole_net
from drafttrain.types import Request

AS_THEY_ARE = "lr", "tokens_per_second", "tokens_seen", "seconds", "gpu_seconds"
"""Columns of the log that do not begin with train/."""


@dataclass(frozen=True)
class Run:
    """What a run's checkpoints need to know about it."""

    checkpoints: Path
    config: CheckpointConfig
    drafter: DrafterConfig
    build: Callable[[], DrafterNet]
    """Makes a fresh net of the run's shape."""
    held_out: list[Request]
    recipe: dict[str, Any]
    """The parts of the recipe that must not change when the run is resumed."""


class Conductor(pl.Callback):
    """Counts, logs, measures, saves and stops, at the end of optimizer steps."""

    def __init__(self, run: Run, reporter: Reporter, watch: Watch):
        self.run, self.reporter, self.watch = run, reporter, watch

    def on_train_start(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
        assert isinstance(task, DistillTask)
        config, position = self.run.config, task.position
        owed = position.measured < position.step and position.step % config.tau_every == 0
        if self.run.held_out and (owed if position.step else config.start is not None):
            self._measure(trainer, task)
        task.start_clock()

    def on_train_batch_start(
        self, trainer: pl.Trainer, task: pl.LightningModule, batch: MicroBatch | Turn, batch_idx: int
    ) -> None:
        assert isinstance(task, DistillTask)
        self._micro = f"step {task.position.step + 1}, micro-batch {batch.micro + 1}"
        self.watch.at(f"the forward pass of {self._micro}")

    def on_before_backward(self, trainer: pl.Trainer, task: pl.LightningModule, loss: torch.Tensor) -> None:
        self.watch.at(f"the backward pass of {self._micro}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, task: pl.LightningModule, outputs, batch: MicroBatch | Turn, batch_idx: int
    ) -> None:
        assert isinstance(task, DistillTask)
        self.watch.at(f"what follows {self._micro}")
        if not batch.last:
            return
        stopped = task.close_window()["stop"] > 0
        step, config = task.position.step, self.run.config
        self.reporter.step(step)
        ended = step >= trainer.max_steps
        measuring = bool(self.run.held_out) and (ended or (step % config.tau_every == 0 and not stopped))
        saving = ended or stopped or step % config.every == 0
        logging = ended or stopped or measuring or step % trainer.log_every_n_steps == 0  # a tau stands beside the time it took
        if logging or saving:
            task.check_finite()
        if logging:
            self._log(trainer, task)
        began = time.monotonic()
        if measuring:
            self._measure(trainer, task, announced=ended)  # the reporter announces what is done behind the last step
        if saving:
            self._save(trainer, task, ended)
        task.skip_time(time.monotonic() - began)
        if stopped:
            self.reporter.say(f"stopped at step {step} of {trainer.max_steps}; the same command goes on from there")
            trainer.should_stop = True

    def _log(self, trainer: pl.Trainer, task: DistillTask) -> None:
        step = task.position.step
        means = task.meter.read()
        task.position.seconds += means["seconds"]
        means |= {"lr": task.lr(step - 1)} | spent(task.position, trainer.world_size, task.device) | task.watched()
        names = {name: name if name in AS_THEY_ARE or "/" in name else f"train/{name}" for name in means}
        _to_loggers(trainer, {names[name]: value for name, value in means.items()}, step)
        self.reporter.metrics(step, means)

    def _measure(self, trainer: pl.Trainer, task: DistillTask, announced: bool = False) -> None:
        """tau on the held-out prompts; the drafter is kept as checkpoints/best if none was better."""
        if not announced:
            self.reporter.say(f"step {task.position.step}: measuring tau on {len(self.run.held_out)} held-out prompts")
        self.watch.at(f"measuring tau behind step {task.position.step}")
        task.position.measured = task.position.step
        net = whole_net(trainer, task.net, self.run.build)
        found = measure(task.target, net, self.run.held_out, self.run.config, trainer.global_rank, trainer.world_size)
        beside = spent(task.position, trainer.world_size, task.device)  # in one row, so that tau can be drawn over them
        _to_loggers(trainer, found.metrics() | beside, task.position.step)
        best = task.position.best_tau is None or found.tau > task.position.best_tau
        depths = " ".join(f"{value:.2f}" for value in found.acceptance_by_depth)
        self.reporter.say(
            f"step {task.position.step}: held-out tau {found.tau:.3f}, acceptance {depths}{', the best so far' if best else ''}"
        )
        if best:
            task.position.best_tau = found.tau
            self._save_drafter(trainer, task, net, "best", found)

    def _save(self, trainer: pl.Trainer, task: DistillTask, ended: bool) -> None:
        """The drafters first: a run whose state says that it has ended is not trained again, so a drafter that a kill or a full disk had kept from
        being written then would stay missing, or be an older one."""
        self.watch.at(f"saving step {task.position.step}")
        net = whole_net(trainer, task.net, self.run.build)
        self._save_drafter(trainer, task, net, "last_drafter", None)
        if ended and not self.run.held_out:
            self._save_drafter(trainer, task, net, "best", None)
        share = {"world": task.share.world, "accumulate": task.share.accumulate, "rows": task.share.rows}
        with explain_full_disk(self.run.checkpoints, "the checkpoint before this one is whole and kept."):
            task.save_beside()
            save_state(trainer, self.run.checkpoints, task.position, self.run.recipe, share)
        task.saved()

    def _save_drafter(self, trainer: pl.Trainer, task: DistillTask, net: DrafterNet, name: str, found: HeldOut | None) -> None:
        beside = adapter_files(trainer, task.net)
        if trainer.is_global_zero:
            facts = {"position": asdict(task.position), "held_out": None if found is None else asdict(found)}
            with explain_full_disk(self.run.checkpoints, "the drafter before this one is whole and kept."):
                save_drafter(self.run.checkpoints / name, net, self.run.drafter, task.target.identity, facts, beside=beside)
        trainer.strategy.barrier(f"checkpoints/{name}")


def spent(position: Position, world: int, device: torch.device) -> dict[str, float]:
    """What training took up to the last log. On GPUs `gpu_seconds` is the wall time times the processes, each of which has one."""
    found = {"tokens_seen": float(position.tokens), "seconds": position.seconds}
    return found | ({"gpu_seconds": world * position.seconds} if device.type == "cuda" else {})


def _to_loggers(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:  # on ranks other than 0 they do nothing
        logger.log_metrics(metrics, step)
        logger.save()
