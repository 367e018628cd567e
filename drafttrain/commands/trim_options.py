"""The flags of `drafttrain trim` that are no keys of the recipe."""

from dataclasses import dataclass
from pathlib import Path

from drafttrain.options import Options


@dataclass(frozen=True)
class TrimOptions(Options):
    """`draft` (a drafter or an export) is what is trimmed; the run's best checkpoint unless given."""

    counts: Path | None = None
    """Token store whose answers say which tokens to keep; the run's own unless given."""
    out: Path | None = None
    """Run folder to make; runs/<name>-<size>/ unless given."""
