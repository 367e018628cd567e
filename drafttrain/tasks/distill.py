"""Supervised distillation of any drafter: the one LightningModule that trains from stored chats.

    features = what the target computed while reading the rows (online), or kept on disk (stored)
    drafted  = net.rows(sequences, features, layout)                       the drafter's side
    terms    = objective.terms(drafted, student, teacher)                  sums, and what each is divided by
    loss     = sum_terms sum * world * accumulate / count of the whole window over all ranks

Trainers divide by the accumulation and average over ranks; the two factors undo that, so the gradient of a window is that of
sum_terms (sum over the window) / (count over the window), however the window is shared out.

Every trained weight must be taught: one that no divergence reaches would stay as it began, be served so, and under DDP the processes would
wait for its gradient in vain. Which are reached is read off the graph of a short text's loss, before anything is trained.

Shapes: B rows, T tokens.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from drafttrain.data.features import rounded
from drafttrain.data.stream import MicroBatch, Share
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.losses import Objective
from drafttrain.target.target import Target
from drafttrain.tasks.optimizer import OptimizerConfig, make_optimizer, token_sides
from drafttrain.tasks.shared_target import SharedRead
from drafttrain.tasks.speed import GraphedRead, GraphedStep, ReadAhead, make_score, reads_ahead, records_steps
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.stop import StopSignal
from drafttrain.tasks.teacher import TargetTeacher, plainly
from drafttrain.tasks.weights import keep_buffers, restore_buffers
from drafttrain.tasks.window import Meter, Window, all_reduce, scored_elements
from drafttrain.types import Features, Layout, Sequences


@dataclass
class Position:
    """Where a run stands. Saved with every checkpoint; what a loader read ahead does not count."""

    step: int = 0
    """Optimizer steps done."""
    rows: int = 0
    """Packed rows trained, over all ranks."""
    tokens: int = 0
    """Tokens trained, padding excluded."""
    best_tau: float | None = None
    """Highest tau measured on held-out prompts."""
    measured: int = 0
    """Step behind which tau was measured last."""
    seconds: float = field(default=0.0, compare=False)
    """Wall time trained up to the last log, without measuring and saving."""


@dataclass(frozen=True)
class Setup:
    """What a task trains, and how."""

    target: Target
    net: DrafterNet
    objective: Objective
    optimizer: OptimizerConfig
    share: Share
    seed: int
    position: Position
    """Where the run stands; the task moves it on."""
    stop: StopSignal
    speed: SpeedConfig
    feature_dtype: str
    """What features are rounded to in the step."""


class DistillTask(pl.LightningModule):
    """Trains `net` to say what `target` says.

    The target is kept in a tuple, out of sight of `nn.Module`: DDP and DeepSpeed would otherwise broadcast, cast and save it.
    """

    def __init__(self, setup: Setup):
        super().__init__()
        target, net, objective, speed = setup.target, setup.net, setup.objective, setup.speed
        self._frozen = (target,)
        self.net, self.objective, self.optimizer_config = net, objective, setup.optimizer
        self.share, self.seed, self.position, self.stop = setup.share, setup.seed, setup.position, setup.stop
        self.depth: int = net.needs.depth
        self.feature_dtype = setup.feature_dtype
        self.meter = Meter()
        self.window: Window | None = None
        self._first_bad: Tensor | None = None
        require_taught(target, net, objective)
        self._score = make_score(net, objective, TargetTeacher(target, net), self.depth, speed.compile, speed.cpp_wrapper)
        cuda = target.device.type == "cuda"
        self._learn = GraphedStep(self._loss, net) if records_steps(speed, target.device) else self._loss
        net.fused, net.fused_rows = speed.fused_blocks and cuda, speed.fused_rows and cuda
        net.recomputes = speed.checkpoint_activations
        target.fused_rows = net.fused_rows
        graphed = speed.graph_target and cuda and not speed.shard_target
        ahead = reads_ahead(speed, target.device)
        self._graphed = GraphedRead(target, net.needs.taps, copies=ahead) if graphed else None
        self._ahead = ReadAhead(self._read, target.device) if ahead else None
        read = self._graphed or partial(target.read_packed, taps=net.needs.taps)
        self._read_target = SharedRead(read) if speed.shard_target else read
        # Checkpoints leave frozen weights out, DeepSpeed's too (exclude_frozen_parameters); without any, nothing may be missing.
        self.strict_loading = all(weight.requires_grad for weight in net.parameters())

    @property
    def target(self) -> Target:
        return self._frozen[0]

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the window's gradient is right after the trainer's own divisions."""
        if batch.window is not None:
            self._open_window(batch.window)
        assert self.window is not None, "a window begins with the micro-batch that carries its counts"
        features = self._features(batch)
        if self._ahead is not None and batch.following is not None and not self._ends_with(batch):
            self._ahead.begin(batch.following)
        loss, metrics = self._learn(batch.sequences, features, batch.layout, self.window.divisors)
        self._watch(loss.detach())
        self.meter.add({"loss": loss} | metrics)
        return loss * self._undo()

    def _loss(
        self, sequences: Sequences, features: Features, layout: Layout, divisors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's part of the window's loss, and its metric sums."""
        assert self.window is not None
        terms, metrics = self._score(sequences, features, layout)
        return torch.stack([term.sum / divisors[self.window.place[name]] for name, term in terms.items()]).sum(), metrics

    def close_window(self) -> dict[str, float]:
        """Counts a finished optimizer step. Returns the window's totals over all ranks. UserError if it had nothing to learn."""
        assert self.window is not None
        totals = self.window.totals()
        if not scored_elements(totals):
            raise UserError(
                f"Step {self.position.step + 1} had no supervised tokens to learn from ({totals['tokens']:.0f} tokens, "
                f"{totals['dropped']:.0f} labels outside the draft vocabulary); raise drafter.init_args.draft_vocab, data.length or "
                "trainer.accumulate_grad_batches."
            )
        return self._count(totals)

    def _count(self, totals: dict[str, float]) -> dict[str, float]:
        """The step behind a window with these totals is done."""
        self.position.step += 1
        self.position.rows += self.share.window_rows
        self.position.tokens += int(totals["tokens"])
        self.meter.close_window(totals)
        return totals

    def check_finite(self) -> None:
        """UserError naming the first step whose loss was not finite on any rank. Waits for the device; the same on every rank."""
        assert self._first_bad is not None
        first = int(all_reduce(self._first_bad.clone(), torch.distributed.ReduceOp.MIN))
        if first < 2**31:
            raise UserError(
                f"The loss was not finite at step {first}, so training stopped, and nothing was saved from that step on; "
                "lower optimizer.lr, raise optimizer.warmup_steps or set trainer.gradient_clip_val to 0.5, and start again."
            )

    # ---- what a task that keeps more than weights adds to a checkpoint and a log ----------------------------------------------

    def save_beside(self) -> None:
        """Writes what a checkpoint of this step needs besides the trainer's state. Called on every rank, before that is saved."""

    def saved(self) -> None:
        """Deletes what older checkpoints needed. Called on every rank, behind the save."""

    def watched(self) -> dict[str, float]:
        """More numbers for the log, the same on every rank, since the last call."""
        return {}

    def start_clock(self) -> None:
        """What came before was not training."""
        self.meter.start()

    def skip_time(self, seconds: float) -> None:
        """Leaves time out that was not spent training (measuring tau, saving)."""
        self.meter.skip_time(seconds)

    # ---- Lightning's hooks -----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        self._kept_buffers = keep_buffers(self.net)

    def on_train_start(self) -> None:
        restore_buffers(self.net, self._kept_buffers)
        # A checkpoint's rates are those of its own max_steps, which may have been raised since.
        for config in self.trainer.lr_scheduler_configs:
            schedule: Any = config.scheduler
            for group, base, fraction in zip(
                schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
            ):
                group["lr"] = base * fraction(schedule.last_epoch)

    def lr(self, step: int) -> float:
        """Learning rate of a step (0, 1, ...)."""
        return self.optimizer_config.lr * self.optimizer_config.lr_fraction(step, self.trainer.max_steps)

    def configure_optimizers(self):
        config, max_steps = self.optimizer_config, self.trainer.max_steps
        optimizer = make_optimizer(config, self.net, fused=True, tokens=token_sides(self.net))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr_fraction(step, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def transfer_batch_to_device(self, batch: MicroBatch, device: torch.device, dataloader_idx: int) -> MicroBatch:
        return batch.to(device)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Frozen weights are not saved again and again: a run that goes on has them from elsewhere (lora.py)."""
        frozen = {f"net.{name}" for name, weight in self.net.named_parameters() if not weight.requires_grad}
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name not in frozen}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Lightning counts micro-batches to know where a window ends; say it in windows of *this* run's accumulation."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        done = self.position.step * self.share.accumulate
        for counter in (progress["total"], progress["current"]):
            counter.update(ready=done, started=done, processed=done, completed=done - 1)

    def _undo(self) -> int:
        """What the trainer divides a micro-step's loss by. With DeepSpeed (0.19) that is the accumulation twice: Lightning (2.6)
        divides by it for every strategy, and the engine's backward divides once more."""
        accumulate = self.share.accumulate
        engine = accumulate if self.trainer.strategy.handles_gradient_accumulation else 1
        return self.share.world * accumulate * engine

    def _open_window(self, local: dict[str, float]) -> None:
        """The window's all-reduce, and its random stream: a function of (seed, step, rank), so there is no state to save."""
        self.window = Window(local, self.stop.requested, self.device)
        stream = np.random.SeedSequence([self.seed, self.position.step, self.share.rank])
        torch.manual_seed(int(stream.generate_state(1, np.uint64)[0] >> 1))

    def _features(self, batch: MicroBatch) -> Features:
        """As stored, or as the target computes them, rounded alike; the net casts what it reads to its own type."""
        if self._ahead is not None:
            return self._ahead.features(batch)
        return self._read(batch.sequences) if batch.features is None else batch.features

    def _read(self, sequences: Sequences) -> Features:
        with torch.no_grad(), plainly(self.device):
            return rounded(self._read_target(sequences), self.feature_dtype)

    def _ends_with(self, batch: MicroBatch) -> bool:
        return batch.last and self.position.step + 1 >= self.trainer.max_steps

    def _watch(self, loss: Tensor) -> None:
        """Remembers the first step with a loss that is not finite, without waiting for it."""
        if self._first_bad is None:
            self._first_bad = torch.full((), 2**31, dtype=torch.int64, device=loss.device)
        bad = torch.where(torch.isfinite(loss), 2**31, self.position.step + 1)
        self._first_bad = torch.minimum(self._first_bad, bad)


def require_taught(target: Target, net: DrafterNet, objective: Objective) -> None:
    """UserError naming the parts of the net with weights that no divergence of the objective reaches."""
    untaught = {name.split(".")[0]: None for name in unreached(target, net, objective)}
    if untaught:
        raise UserError(
            f"the divergences of objective.init_args teach nothing to {' and '.join(untaught)} of this {type(net.config).__name__}, which would be served "
            "as it began; name what teaches it (Confidence a confidence_head, Selection a candidate_selector, SoftCrossEntropy any head of "
            "logits), or leave the part out where drafter.init_args can (confidence: false)."
        )


def unreached(target: Target, net: DrafterNet, objective: Objective) -> list[str]:
    """Names of the trained weights that the loss does not depend on, for a text with a draft of full depth. Computes no gradient."""
    depth, taps, device = net.needs.depth, len(net.needs.taps), target.device
    sequences = one_chat(net.vocabulary.ids[:1].cpu().repeat(depth + 2), prompt_len=1)
    shape = (1, depth + 2, taps + 1, target.hidden)
    rows = torch.zeros(shape, dtype=target.dtype, device=device)
    features = Features(rows[:, :, :taps], rows[:, :, taps])
    score = make_score(net, objective, TargetTeacher(target, net), depth, compile=False)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        terms, _ = score(sequences.to(device), features, net.layout(sequences).to(device))
    waiting, seen, reached = [term.sum.grad_fn for term in terms.values()], set(), set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))  # a leaf: what gradients are added up for
            waiting += [behind for behind, _ in node.next_functions]
    return [name for name, weight in net.named_parameters() if weight.requires_grad and id(weight) not in reached]
