"""How a trained drafter leaves the house: the `export` section of a recipe."""

import re
from dataclasses import dataclass

from drafttrain.errors import UserError

DTYPES = ("bfloat16", "float32")
PLAIN_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
FORMATS = ("vllm", "sglang", "speculators", "transformers", "native")


@dataclass(frozen=True)
class ExportConfig:
    """What `drafttrain export` writes, and where it may push it."""

    checkpoint: str = "best"
    """Which drafter: best (checkpoints/best), last (the newest training state, plain or DeepSpeed's of any ZeRO stage), or a path: a saved drafter, a step
    of training, a Lightning checkpoint, a DeepSpeed folder."""
    pickle: bool = False
    """Read a training state at `checkpoint` also where it lies outside of this run: it is a pickle, which can run code when it is read."""
    dtype: str = "bfloat16"
    """Type of the weights on disk: bfloat16 or float32."""
    format: str | None = None
    """Who is to load it: vllm, sglang, speculators, transformers, or native (drafttrain itself); null for an engine that can, else native."""
    push: str | None = None
    """Hub repository (owner/name) to push to; null keeps the export on this machine. Put the method (`eagle3`) in the name."""
    private: bool = True
    """Whether a repository that the push creates is private."""
    revision: str | None = None
    """Branch of that repository to push to, made where there is none; null for its main one."""
    tag: str | None = None
    """Name that the pushed commit gets, such as v1; null for none."""
    dry_run: bool = False
    """Whether to say only what a push would send, and where, without sending anything."""
    base_model: str | None = None
    """Hub id of the target, for the model card, the serving commands and speculators, where target.path is a folder or a file; null: as a GGUF names
    what it was made from, else none."""
    license: str | None = None
    """Licence named in the model card, as the Hub spells it (apache-2.0, mit, llama3.1, ...); null: the target's own, where its files name one."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"export.dtype is {self.dtype!r}, but the weights can be written as bfloat16 or float32 only.")
        if self.format is not None and self.format not in FORMATS:
            raise UserError(
                f"export.format is {self.format!r}, but a drafter is written for vllm, sglang, speculators, transformers or native, or null for the first that fits."
            )
        if not self.checkpoint.strip():
            raise UserError("export.checkpoint is empty; set it to best, last or a path.")
        for name in ("revision", "tag"):
            value = getattr(self, name)
            if value is not None and not PLAIN_NAME.fullmatch(value):
                raise UserError(
                    f"export.{name} is {value!r}, but a name on the Hub has letters and digits, and '-', '_' and '.' between them only."
                )
        if self.push is None and (asked := [name for name in ("revision", "tag", "dry_run") if getattr(self, name)]):
            raise UserError(
                f"export.{asked[0]} is about a push, but export.push names no repository; set it to owner/name (--push owner/name)."
            )
        for name in ("push", "base_model"):
            value = getattr(self, name)
            if value is not None and (value.count("/") != 1 or value != value.strip()):
                raise UserError(f"export.{name} is {value!r}, but a Hub repository is named owner/name.")
