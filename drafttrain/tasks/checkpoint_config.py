"""What the recipe says about where training begins, about checkpoints, and about measuring the drafter while it trains. The parser reads this: no heavy imports."""

import math
from dataclasses import dataclass

from drafttrain.errors import UserError


@dataclass(frozen=True)
class CheckpointConfig:
    """What to begin from, when to save, and how to measure tau on held-out prompts during training."""

    every: int = 200
    """Optimizer steps between two saves of the resume state. The end and a stop signal save anyway."""
    tau_every: int = 200
    """Optimizer steps between two measurements of tau on held-out prompts; the end measures anyway."""
    tau_prompts: int = 16
    """Held-out prompts answered in a measurement; 0 measures nothing, and the newest drafter counts as the best."""
    tau_tokens: int = 128
    """Most tokens of each of those answers."""
    drafts: int = 3
    """Draft tokens a round in those answers."""
    slots: int = 16
    """Prompts answered at once in them."""
    hung_s: float = 1800.0
    """Seconds after which processes of which none moves any more are ended, with the hung one named, so that torchrun can start them again from the
    last checkpoint. A process that moves, however slowly, is waited for."""
    start: str | None = None
    """A trained drafter to begin from, as a folder or a Hub id: a `checkpoints/best` or an export of ours, or a published EAGLE-1/2, EAGLE-3,
    P-EAGLE, DFlash, DFlash 2 or DSpark (original, z-lab, SpecForge, speculators), Medusa or Hydra checkpoint; null begins anew. A run that goes on does not read it again."""
    start_pickle: bool = False
    """Read `start`, or what --draft names, also where it is a pickle (pytorch_model.bin); only tensors are unpacked."""

    def __post_init__(self):
        for name in ("every", "tau_every", "tau_tokens", "drafts", "slots"):
            if getattr(self, name) < 1:
                raise UserError(f"checkpoint.{name} is {getattr(self, name)}, but must be 1 or more.")
        if self.start is not None and not self.start.strip():
            raise UserError(
                "checkpoint.start is empty; name a trained drafter (a folder or a Hub id), or set it to null to begin anew."
            )
        if not 0 < self.hung_s < math.inf:
            raise UserError(f"checkpoint.hung_s is {self.hung_s}, but must be a number of seconds, above 0.")
        if self.tau_prompts < 0:
            raise UserError(f"checkpoint.tau_prompts is {self.tau_prompts}, but must be 0 (measure nothing) or more.")
