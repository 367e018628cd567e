"""AdamW, or Muon for the matrices between tokens and tokens, and the learning rate.

Muon steps by the matrix that is nearest to the momentum among those with equal singular values (Jordan et al. 2024), scaled so that its entries are
as large as AdamW's steps (0.2 sqrt(larger side); Liu et al. 2025, arXiv 2502.16982). Tables of tokens, norms and biases stay with AdamW.

cosine    warm up, then half a cosine down to the final fraction at max_steps
wsd       warm up, stay, then a straight line down to the final fraction over the last `decay_fraction` of the steps
constant  warm up, then stay
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.tasks.muon import BatchedMuon
from drafttrain.tasks.strategy import uses_deepspeed

SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, or Muon beside it."""

    lr: float = 3e-4
    """Peak learning rate."""
    muon_lr: float | None = None
    """Peak learning rate of Muon, which then trains all matrices but those with a row or column for each token; null: AdamW trains everything.
    Not with DeepSpeed, which cuts matrices into pieces."""
    betas: list[float] = (0.9, 0.95)  # type: ignore[assignment]  # a list in YAML; a tuple here because defaults must not be mutable
    """AdamW's two averages."""
    weight_decay: float = 0.0
    """On matrices only: norms and biases are never decayed."""
    warmup_steps: int = 50
    """Optimizer steps of linear warm-up."""
    schedule: str = "cosine"
    """cosine, wsd (warm-up, stable, decay) or constant."""
    decay_fraction: float = 0.2
    """wsd: share of the steps at the end over which the learning rate falls."""
    final_lr_fraction: float = 0.1
    """Learning rate at the last step, as a share of `lr` (cosine and wsd)."""

    def __post_init__(self):
        if not all(math.isfinite(value) for value in (self.lr, self.weight_decay)):
            raise UserError(
                f"optimizer.lr is {self.lr} and optimizer.weight_decay is {self.weight_decay}, but both must be finite numbers."
            )
        if self.lr <= 0:
            raise UserError(f"optimizer.lr is {self.lr}, but must be above 0.")
        if self.muon_lr is not None and not (self.muon_lr > 0 and math.isfinite(self.muon_lr)):
            raise UserError(f"optimizer.muon_lr is {self.muon_lr}, but must be a finite number above 0, or null for AdamW alone.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas is {list(self.betas)}, but must be two numbers, each from 0 to below 1.")
        if self.weight_decay < 0:
            raise UserError(f"optimizer.weight_decay is {self.weight_decay}, but must be 0 or more.")
        if self.warmup_steps < 0:
            raise UserError(f"optimizer.warmup_steps is {self.warmup_steps}, but must be 0 or more.")
        if self.schedule not in SCHEDULES:
            raise UserError(f"optimizer.schedule is {self.schedule!r}, but must be one of {', '.join(SCHEDULES)}.")
        for name in ("decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}, but must be from 0 to 1.")

    def lr_fraction(self, step: int, max_steps: int) -> float:
        """Learning rate of a step (0, 1, ...) as a share of `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return 1.0
        span = max_steps - self.warmup_steps if self.schedule == "cosine" else round(self.decay_fraction * max_steps)
        progress = 1.0 - (max_steps - step) / max(span, 1)  # from 0 where the fall begins to 1 at max_steps
        progress = min(max(progress, 0.0), 1.0)
        fall = (1 - math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else progress
        return 1.0 - (1.0 - self.final_lr_fraction) * fall


class AdamWAndMuon(torch.optim.Optimizer):
    """AdamW for some weights and Muon for others, to be stepped, scheduled, saved and loaded as one."""

    def __init__(self, adamw: torch.optim.Optimizer, muon: torch.optim.Optimizer):
        self._parts = (adamw, muon)
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._join()

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict) -> None:
        super().load_state_dict(state_dict)
        self._join()

    def _join(self) -> None:
        """Both parts work on this one's state and groups, which loading replaces."""
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.state, part.param_groups, first = self.state, self.param_groups[first:last], last


def make_optimizer(config: OptimizerConfig, net: nn.Module, fused: bool, tokens: Collection[int] = ()) -> torch.optim.Optimizer:
    """AdamW over the trainable weights, those with one dimension (norms, biases) without decay; with `muon_lr` only over those that are no
    matrices, or are tables of tokens: one of their sides is among `tokens`. UserError if this torch has no Muon."""
    turned = turned_by_muon(config, net, tokens)
    elsewhere = {id(weight) for weight in turned}
    weights = [weight for weight in net.parameters() if weight.requires_grad and id(weight) not in elsewhere]
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.muon_lr is None or not turned:
        return _adamw(config, groups, fused)
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"optimizer.muon_lr is {config.muon_lr}, but torch {torch.__version__} has no Muon; install torch 2.9 or newer, or set it to null."
        )
    muon = BatchedMuon(turned, lr=config.muon_lr, weight_decay=config.weight_decay)
    return AdamWAndMuon(_adamw(config, groups, fused), muon) if groups else muon


def require_whole_matrices(config: OptimizerConfig, strategy: Any) -> None:
    """UserError where Muon is asked for together with DeepSpeed, whose optimizers see flat pieces of the weights. `strategy`: as written or built."""
    if config.muon_lr is not None and uses_deepspeed(strategy):
        raise UserError(
            f"optimizer.muon_lr is {config.muon_lr}, but trainer.strategy is DeepSpeed, which cuts matrices into pieces, and Muon needs them whole; "
            "use recipes/hardware/ddp.yaml or ddp-h100.yaml, or set optimizer.muon_lr to null."
        )


def turned_by_muon(config: OptimizerConfig, net: nn.Module, tokens: Collection[int]) -> list[nn.Parameter]:
    """Trainable matrices without a side as long as one of `tokens`; none where Muon is not asked for."""
    if config.muon_lr is None:
        return []
    return [w for w in net.parameters() if w.requires_grad and w.ndim == 2 and not set(w.shape) & set(tokens)]


def token_sides(net: DrafterNet) -> set[int]:
    """How long the side of a matrix is that has a row for each token of the target, or of the draft vocabulary."""
    return {net.vocabulary.t2d.numel(), len(net.vocabulary.ids)}


def _adamw(config: OptimizerConfig, groups: list[dict], fused: bool) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=fused)
    # Fused, it says that it divides by fp16's scale of the loss itself, and Lightning (2.6) clips no gradients of such a one in any mixed precision. Where
    # there is a scale, who made it divides by it before the step, as for any other optimizer.
    optimizer._step_supports_amp_scaling = False
    return optimizer
