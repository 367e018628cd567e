"""AdamW and its learning rate.

cosine    warm up, then half a cosine down to the final fraction at max_steps
wsd       warm up, stay, then a straight line down to the final fraction over the last `decay_fraction` of the steps
constant  warm up, then stay
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from drafttrain.errors import UserError

SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up."""

    lr: float = 3e-4
    """Peak learning rate."""
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


def make_optimizer(config: OptimizerConfig, net: nn.Module, fused: bool) -> torch.optim.AdamW:
    """AdamW over the trainable weights; those with one dimension (norms, biases) without decay."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    groups = [
        {"params": [w for w in weights if w.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=fused)
