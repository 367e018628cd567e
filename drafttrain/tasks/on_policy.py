"""On-policy distillation: the task that learns from its own drafter's rounds (Draft-OPD, arXiv 2605.29343), from the target's answers that they
gave (text; anchors: from where its rounds began), or from the places where a draft was first rejected (online speculative decoding, arXiv 2310.07177).

    before step s, every `every` steps      answer prompts with the weights of now
    step s                                  one rollout of every lane -> micro-batches -> the loss of supervised training

What is divided by what, how windows agree over ranks, and what is watched is `DistillTask`'s. Nothing is read by the target but the prompts:
features, and what teaches, are those that the rollouts recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.data.stream import MicroBatch
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.tasks.distill import DistillTask, Setup
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.rollout_buffer import RolloutPlan
from drafttrain.tasks.rollout_files import MadeWith, RolloutFiles, bytes_of
from drafttrain.tasks.rollouts import Replayer, Roller, Turn
from drafttrain.tasks.teacher import plainly
from drafttrain.tasks.weights import twin_of, whole_weights
from drafttrain.tasks.window import scored_elements
from drafttrain.types import Request


class OnPolicyTask(DistillTask):
    """Trains `net` on rollouts of itself."""

    def __init__(
        self,
        setup: Setup,
        config: OnPolicyConfig,
        prompts: Sequence[Request],
        build: Callable[[], DrafterNet],
        length: int,
        folder: Path,
    ):
        """`build`: makes a fresh net of the same shape. `length`: tokens of a packed row. `folder`: where a checkpoint's rollouts are kept."""
        # Every step has as many rows as its rollouts fill: the compiler would begin anew at each (ten steps in five minutes, seen with DFlash).
        super().__init__(replace(setup, speed=replace(setup.speed, compile=False)))
        net, target = setup.net, setup.target
        copy = twin_of(net, build, dict(net.named_parameters()))
        plan, roller = RolloutPlan(config, setup.seed), Roller(target, copy, config, setup.seed)
        self._replayer = Replayer(net, setup.objective, roller, plan, prompts, setup.share, length)
        way_out = f"restore it, or delete {folder.parent}/ to begin anew"
        drafts = roller.drafts if config.keeps_rounds else None
        self._files = RolloutFiles(folder, plan, MadeWith(target.identity, net.needs.taps, drafts), way_out)
        self._window: list[MicroBatch] = []
        self._idle = 0
        """Steps in a row that had nothing to learn."""

    @property
    def bytes_beside(self) -> int:
        """Most bytes of a checkpoint's rollouts, of one process or many."""
        replayer = self._replayer
        prompt_len = sum(len(prompt.ids) for prompt in replayer.prompts) / len(replayer.prompts)
        return bytes_of(replayer.plan.config, self._files.made_with, prompt_len, 1.0, self.target.dtype.itemsize)

    def restore(self) -> None:
        """The rollouts of the checkpoint that the run goes on from. UserError if they are damaged or missing."""
        refresh = self._replayer.plan.last_refresh(self.position.step)
        if refresh >= 0:
            self._files.restore(self._replayer.buffer, refresh)

    def training_step(self, batch: Turn, batch_idx: int) -> Tensor:  # type: ignore[override]
        if batch.micro == 0:
            self._open(self.position.step)
        return super().training_step(self._window[batch.micro].to(self.device), batch_idx)

    def transfer_batch_to_device(self, batch: Turn, device: torch.device, dataloader_idx: int) -> Turn:  # type: ignore[override]
        return batch

    def close_window(self) -> dict[str, float]:
        """As `DistillTask.close_window` says; but a step may have nothing to learn, where all its drafts were accepted or its answers ended at once.
        Its gradient is 0. UserError behind as many of them in a row as follow a refresh."""
        assert self.window is not None
        totals, config = self.window.totals(), self._replayer.plan.config
        self._idle = 0 if scored_elements(totals) else self._idle + 1
        if self._idle == config.every:
            step = self.position.step + 1
            raise UserError(
                f"Steps {step - config.every + 1} to {step} had nothing to learn from: the last one's {config.batch} rollouts have {totals['tokens']:.0f} "
                f"tokens within data.length {self._replayer.length}, and {totals['dropped']:.0f} labels outside the draft vocabulary; if no draft was "
                "rejected, or all answers ended at once, the drafter is done here; else raise data.length, drafter.init_args.draft_vocab or on_policy.batch."
            )
        return self._count(totals)

    def save_beside(self) -> None:
        refresh = self._replayer.plan.last_refresh(self.position.step)
        self._files.save(self._replayer.buffer, refresh)
        self.trainer.strategy.barrier("rollouts saved")
        if self.trainer.is_global_zero:
            self._files.finish(refresh)

    def saved(self) -> None:
        if self.trainer.is_global_zero:
            self._files.remove_others(self._replayer.plan.last_refresh(self.position.step))

    def watched(self) -> dict[str, float]:
        return self._replayer.log.read(self.device)

    def start_clock(self) -> None:
        super().start_clock()
        self._replayer.log.restart()

    def skip_time(self, seconds: float) -> None:
        super().skip_time(seconds)
        self._replayer.log.skip_time(seconds)

    def _open(self, step: int) -> None:
        """The micro-batches of a step, and before them the rollouts that are due."""
        if self._replayer.due(step):
            weights = whole_weights(self.trainer, self.net)
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), plainly(self.device), torch.no_grad():
                self._replayer.refresh(step, weights, self.device)
        self._window = self._replayer.window(step)
