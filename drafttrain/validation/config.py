"""How a drafter is validated: the `validate` section of a recipe."""

from dataclasses import dataclass

from drafttrain.errors import UserError


@dataclass(frozen=True)
class ValidateConfig:
    """What `drafttrain validate` measures, and on how much."""

    drafts: int = 3
    """Draft tokens proposed in every round."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    slots: int = 8
    """Prompts that decode at the same time."""
    prompts: int | None = None
    """Use the first N held-out prompts; all of them if null."""

    def __post_init__(self) -> None:
        for name in ("drafts", "max_tokens", "slots", "prompts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"validate.{name} is {value}, but must be at least 1: set it to 1 or more.")
