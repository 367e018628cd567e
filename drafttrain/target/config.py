"""What the recipe says about the target. No heavy imports: the parser reads this file."""

from dataclasses import dataclass, field
from typing import Any

from drafttrain.errors import UserError

DTYPES = ("float32", "bfloat16")
ROUNDED = ("int8", "fp8")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model that a drafter is made for."""

    path: str
    """Hub id, local folder, `.gguf` file, or `package:module/file.gguf` for a file inside an installed Python package."""
    revision: str | None = None
    """Hub revision; the commit it resolves to is what stores and checkpoints carry."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    weights: str | None = None
    """int8 or fp8: the matrices of the layers rounded to a byte a number (by torchao), for half the memory of bfloat16; null: as they are. Embedding, head
    and experts are not rounded. It is another target then: data, checkpoints and exports say so, and refuse one in another precision."""
    trust_remote_code: bool = False
    """Allow the target's own modelling code to run."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Given to the chat template at every rendering, e.g. {enable_thinking: false}."""

    def __post_init__(self):
        if not self.path:
            raise UserError("target.path is empty; give a Hub id, a local folder or a .gguf file.")
        if self.dtype not in DTYPES:
            raise UserError(f"target.dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}.")
        if self.weights is not None and self.weights not in ROUNDED:
            raise UserError(
                f"target.weights is {self.weights!r}, but must be {' or '.join(ROUNDED)}, or null for weights as they are."
            )
