"""How a trained drafter leaves the house: the `export` section of a recipe."""

from dataclasses import dataclass

from drafttrain.errors import UserError

DTYPES = ("bfloat16", "float32")
FORMATS = ("vllm", "sglang", "speculators", "native")


@dataclass(frozen=True)
class ExportConfig:
    """What `drafttrain export` writes, and where it may push it."""

    dtype: str = "bfloat16"
    """Type of the weights on disk: bfloat16 or float32."""
    format: str | None = None
    """Who is to load it: vllm, sglang, speculators, or native (drafttrain itself); null for an engine that can, else native."""
    push: str | None = None
    """Hub repository (owner/name) to push to; null keeps the export on this machine. Put the method (`eagle3`) in the name."""
    private: bool = True
    """Whether a repository that the push creates is private."""
    base_model: str | None = None
    """Hub id of the target, for the model card, the serving commands and speculators, where target.path is a folder or a file."""
    license: str | None = None
    """Licence named in the model card, as the Hub spells it (apache-2.0, mit, llama3.1, ...)."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"export.dtype is {self.dtype!r}, but the weights can be written as bfloat16 or float32 only.")
        if self.format is not None and self.format not in FORMATS:
            raise UserError(
                f"export.format is {self.format!r}, but a drafter is written for vllm, sglang, speculators or native, or null for the first that fits."
            )
        for name in ("push", "base_model"):
            value = getattr(self, name)
            if value is not None and (value.count("/") != 1 or value != value.strip()):
                raise UserError(f"export.{name} is {value!r}, but a Hub repository is named owner/name.")
