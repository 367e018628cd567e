"""The flags of the commands that look at folders of drafters: `inspect` and `compare`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class InspectOptions:
    """`drafttrain inspect PATH`."""

    path: str
    """Folder or Hub id."""
    target: str | None = None
    """Folder, Hub id or .gguf file of the target, of which the config alone is read."""


@dataclass(frozen=True)
class CompareOptions:
    """`drafttrain compare A B`."""

    a: str
    b: str
    """Folders or Hub ids."""
    runs: Path
    """Where run folders are: the recipe's held-out prompts lie in one."""
    json: Path | None = None
    """File for the same as JSON."""
