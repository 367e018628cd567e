"""What was asked for on the command line, beside the recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drafttrain.run import Run


@dataclass(frozen=True)
class Options:
    """The flags that are no keys of the recipe."""

    run: Run
    """The run folder, runs/<name>/."""
    prompt: str | None = None
    """generate: the user's words."""
    draft: Path | None = None
    """generate, validate, bench: folder or Hub id of a drafter, ours or as others publish theirs; adapt: folder of ours; None takes the run's own."""
    prompts: str | None = None
    """adapt: file of prompts, or - for stdin."""
    out: Path | None = None
    """adapt: file that answers are added to; None is stdout. (trim: see TrimOptions.)"""
    finished: bool = False
    """export: whether to refuse while training has steps to do."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """Key of the recipe -> the flag that set it on the command line."""
