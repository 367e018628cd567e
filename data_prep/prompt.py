"""What a prompt is, and what a source of prompts is: the words that every file here shares."""

import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data_prep.ledger import Ledger
from data_prep.team import ALONE, Team
from drafttrain.errors import UserError
from drafttrain.types import Request, Rollout

if TYPE_CHECKING:
    from drafttrain.target.target import Target

LONGEST_NAME = 60
"""Letters of a source's name: files are named after it, and 60 letters of 4 bytes are as long as a file system takes."""
NAME = re.compile(rf"[\w.-]{{1,{LONGEST_NAME}}}")


class Ask(Protocol):
    """Has the target speak. The result depends on each request's key, the seed and the batch, and on nothing that ran before."""

    def __call__(
        self, requests: Sequence[Request], temperature: float, top_p: float, taps: tuple[int, ...] | None
    ) -> Iterator[Rollout]:
        """Rollouts in order of completion; with features of these layers (and the final state) unless `taps` is None."""
        ...


@dataclass(frozen=True)
class Work:
    """What a source may use."""

    target: "Target"
    ask: Ask
    folder: Path
    """The run's data folder."""
    chunk: int
    """Requests of one unit of work."""
    say: Callable[[str], None]
    team: Team = ALONE
    """Which of how many processes this is."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question to the target. A million of them are held at once: hence the slots."""

    key: str
    """Stable name: source and number, or source and the row's own id. It also seeds the prompt's random stream."""
    source: str
    messages: list[dict]
    """Leading system messages, then user turns alone: the target answers each of them in order, with its own answers between."""
    tools: list[dict] | None = None
    """JSON schemas of functions that the template is given."""
    ids: Sequence[int] | None = field(default=None, compare=False, repr=False)
    """The first turn rendered, once it was; not written down."""

    @property
    def turns(self) -> list[str]:
        """Text of each user turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def user(self) -> str:
        """Text of the user turns."""
        return "\n".join(self.turns)


class PromptSource(ABC):
    """A place that prompts come from."""

    name: str
    """Unique among the sources of a recipe."""
    weight: float | None
    """Share in the mix, relative to the other sources' weights."""

    @abstractmethod
    def collect(self, work: Work, ledger: Ledger) -> list[Prompt]:
        """All prompts in a fixed order. Rows that are no prompt are counted in the ledger. UserError if there is none."""

    def decides(self) -> dict[str, Any]:
        """Options that decide which prompts these are: all, unless `content` says it better."""
        return dict(vars(self))

    def content(self) -> dict[str, str]:
        """What stands behind a name that the recipe gives (a file's hash, a commit). UserError if it cannot be read."""
        return {}

    def require_there(self) -> None:  # noqa: B027 - a source without files has none to miss
        """UserError, in the words of `content` or `collect`, where a file that the recipe names is not on this machine. Quick: asks no network, and of
        prompts reads no more than the first."""


def compact(ids: Sequence[int], vocab: int) -> array:
    """Token ids in 2 or 4 bytes each, where a million prompts are held at once."""
    return array("H" if vocab <= 1 << 16 else "i", ids)


def require(good: bool, name: str, got, wanted: str) -> None:
    """UserError 'name is got; it must be wanted.' unless good."""
    if not good:
        raise UserError(f"{name} is {got}; it must be {wanted}.")


def require_common(source: PromptSource) -> None:
    """Checks what every source has: its name, its weight, and its limits where it has them."""
    kind = type(source).__name__
    require(
        bool(NAME.fullmatch(source.name)),
        "A prompt source's name",
        repr(source.name),
        f"made of letters, digits, '_', '-' and '.', {LONGEST_NAME} at most",
    )
    require(
        source.weight is None or 0 < source.weight < float("inf"),
        f"{kind}.weight",
        source.weight,
        "above 0, or null where no source has one",
    )
    for name in ("count", "turns"):
        limit = getattr(source, name, None)
        require(limit is None or limit >= 1, f"{kind}.{name}", limit, "at least 1, or null for all")
