"""What the recipe says about training adapters beside a trained drafter in place of its weights. The parser reads this: no heavy imports."""

import math
from dataclasses import dataclass, field

from drafttrain.errors import UserError


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank, of `train` (LoRA, Hu et al. 2021, arXiv 2106.09685); `adapt` trains whole weights."""

    rank: int | None = None
    """Rank of what is added to each matrix; null trains the drafter's own weights. Needs `checkpoint.start`, whose weights stay as they are."""
    alpha: float = 16.0
    """What is added counts alpha / rank times."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is zeroed while training."""
    layers: list[str] = field(default_factory=list)
    """Which matrices, by the ends of their names (q_proj, mlp.down_proj); empty: all but those with a row or column for each token."""

    def __post_init__(self):
        if self.rank is not None and self.rank < 1:
            raise UserError(f"lora.rank is {self.rank}, but must be 1 or more, or null to train the drafter's own weights.")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UserError(f"lora.alpha is {self.alpha}, but must be a finite number above 0.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout is {self.dropout}, but is a share from 0 to below 1.")

    def require_start(self, start: str | None) -> None:
        """UserError where adapters would be trained beside random weights."""
        if self.rank is not None and start is None:
            raise UserError(
                f"lora.rank is {self.rank}, but checkpoint.start is null, and adapters of random weights teach nothing, since all else stays random; "
                "name a trained drafter in checkpoint.start, or set lora.rank to null."
            )
