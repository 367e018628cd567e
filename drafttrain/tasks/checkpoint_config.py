"""What the recipe says about checkpoints and about measuring the drafter while it trains. The parser reads this: no heavy imports."""

from dataclasses import dataclass

from drafttrain.errors import UserError


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how to measure tau on held-out prompts during training."""

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

    def __post_init__(self):
        for name in ("every", "tau_every", "tau_tokens", "drafts", "slots"):
            if getattr(self, name) < 1:
                raise UserError(f"checkpoint.{name} is {getattr(self, name)}, but must be 1 or more.")
        if self.tau_prompts < 0:
            raise UserError(f"checkpoint.tau_prompts is {self.tau_prompts}, but must be 0 (measure nothing) or more.")
