"""Where prompts come from. Each source is a frozen dataclass that the recipe names by its class.

A prompt is what the target will answer: an optional system message and one user turn. Answers in a file are not used: training
text is always the target's own. A chat of several turns is cut after its first user turn, and that is counted.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from data_prep.ledger import Ledger, reasons
from data_prep.selfprompt import Attempts
from drafttrain.errors import UserError
from drafttrain.types import Request, Rollout

if TYPE_CHECKING:
    from drafttrain.target.target import Target

SHOWN = 10
"""Broken lines named on the console; all of them stand in dropped.jsonl."""
LEADING = ("system", "developer")
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]}'
NAME = re.compile(r"[\w.-]+")


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


@dataclass(frozen=True)
class Prompt:
    """A question to the target."""

    key: str
    """Stable name: source and number, or source and the row's own id. It also seeds the prompt's random stream."""
    source: str
    messages: list[dict]
    """Leading system messages, then user turns alone: the target answers each of them in order, with its own answers between."""
    tools: list[dict] | None = None
    """JSON schemas of functions that the template is given."""

    @property
    def user(self) -> str:
        """Text of the user turns."""
        return "\n".join(message["content"] for message in self.messages if message["role"] == "user")


class PromptSource(ABC):
    """A place that prompts come from."""

    name: str

    @abstractmethod
    def collect(self, work: Work, ledger: Ledger) -> list[Prompt]:
        """All prompts in a fixed order. Rows that are no prompt are counted in the ledger. UserError if there is none."""


@dataclass(frozen=True)
class SelfPrompts(PromptSource):
    """The target writes the user turns itself: an open user turn is sampled until end of turn."""

    count: int
    """Prompts to keep."""
    max_tokens: int = 80
    """Most tokens of a user turn; attempts that do not end by then are dropped."""
    temperature: float = 1.0
    """Sampling temperature; greedy would write one prompt for ever."""
    top_p: float = 1.0
    """Nucleus."""
    min_words: int = 3
    """Shorter turns are dropped."""
    attempts_per_prompt: int = 10
    """Give up after count times this many attempts."""
    name: str = "self"
    """Name of the source, and beginning of its prompts' keys."""

    def __post_init__(self) -> None:
        _require_name(self.name)
        for name in ("count", "max_tokens", "min_words", "attempts_per_prompt"):
            require(getattr(self, name) >= 1, f"SelfPrompts.{name}", getattr(self, name), "at least 1")
        require(self.temperature > 0, "SelfPrompts.temperature", self.temperature, "above 0")
        require(0 < self.top_p <= 1, "SelfPrompts.top_p", self.top_p, "above 0 and at most 1 (1 = off)")

    def collect(self, work: Work, ledger: Ledger) -> list[Prompt]:
        prompts: list[Prompt] = []
        attempts = Attempts(self, work)
        limit = self.count * self.attempts_per_prompt
        while len(prompts) < self.count:
            if ledger.read >= limit:
                raise UserError(
                    f"Self-prompting kept {len(prompts)} of {ledger.read:,} attempts ({reasons(ledger.dropped)}), fewer than "
                    f"the {self.count:,} asked for; lower SelfPrompts.count, raise max_tokens or attempts_per_prompt, "
                    "or use JsonlPrompts."
                )
            for key, text, why in attempts.next():
                ledger.read += 1
                if why is None and len(prompts) == self.count:
                    why = "not needed: enough were kept"
                if why is None:
                    prompts.append(Prompt(key, self.name, [{"role": "user", "content": text}]))
                else:
                    ledger.drop(why, key)
            work.say(f"{self.name}: {len(prompts):,} of {self.count:,} prompts from {ledger.read:,} attempts")
        return prompts


@dataclass(frozen=True)
class JsonlPrompts(PromptSource):
    """Prompts from a file with one {"messages": [...]} a line, an "id" if wanted."""

    path: str
    """The file."""
    count: int | None = None
    """Most prompts to take, from the beginning; null = all."""
    name: str = ""
    """Name of the source, and beginning of its prompts' keys; empty = the file's name."""

    def __post_init__(self) -> None:
        require(self.count is None or self.count >= 1, "JsonlPrompts.count", self.count, "at least 1, or null for all")
        if not self.name:
            object.__setattr__(self, "name", re.sub(r"[^\w.-]+", "_", Path(self.path).stem))
        _require_name(self.name)

    def collect(self, work: Work, ledger: Ledger) -> list[Prompt]:
        prompts: list[Prompt] = []
        broken: list[str] = []
        for number, line in self._lines():
            if self.count is not None and len(prompts) == self.count:
                break
            ledger.read += 1
            try:
                prompts.append(self._prompt(number, line, ledger))
            except _Broken as error:
                broken.append(f"{self.path} line {number}: {error}")
                ledger.drop(str(error), f"{self.path} line {number}")
        for text in broken[:SHOWN]:
            work.say(f"{text}; left out")
        if len(broken) > SHOWN:
            work.say(f"{self.path}: {len(broken) - SHOWN:,} more such lines, all named in dropped.jsonl")
        for note, count in ledger.notes.items():
            work.say(f"{self.path}: {count:,} chats {note}")
        if not prompts:
            raise UserError(
                f"{self.path} has no usable prompt among its {ledger.read:,} rows ({reasons(ledger.dropped) or 'it is empty'}); "
                f"each line must look like {EXAMPLE}."
            )
        if self.count is not None and len(prompts) < self.count:
            work.say(f"{self.path}: {len(prompts):,} prompts, although the recipe asks for {self.count:,}")
        return prompts

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise UserError(
                f"JsonlPrompts.path is {self.path}, which cannot be read ({error.strerror}); name an existing file."
            ) from None

    def _prompt(self, number: int, line: bytes, ledger: Ledger) -> Prompt:
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            raise _Broken("not UTF-8") from None
        except ValueError:
            raise _Broken("not JSON") from None
        messages = row.get("messages") if isinstance(row, dict) else None
        if not isinstance(messages, list) or not messages:
            raise _Broken("no list of messages")
        found = first_turn(messages, ledger)
        own = row.get("id")
        return Prompt(f"{self.name}-{number:06d}" if own is None else f"{self.name}-{own}", self.name, found)


def first_turn(messages: list, ledger: Ledger) -> list[dict]:
    """Leading system messages and the first user turn. Raises _Broken with the reason if there is none."""
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise _Broken("a message without a role")
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise _Broken("no user turn")
    kept = [message for message in messages[: users[0]] if message["role"] in LEADING] + [messages[users[0]]]
    if not all(isinstance(message.get("content"), str) for message in kept):
        raise _Broken("a message whose content is not text")
    if not kept[-1]["content"].strip():
        raise _Broken("an empty user turn")
    if len(users) > 1:
        ledger.notes["cut after their first user turn (the target answers single turns so far)"] += 1
    if len(kept) < users[0] + 1:
        ledger.notes["lost the turns before their first user turn, which are not the system's"] += 1
    return [{"role": message["role"], "content": message["content"]} for message in kept]


class _Broken(Exception):
    """Why a row of a file is no prompt."""


def require(good: bool, name: str, got, wanted: str) -> None:
    """UserError 'name is got; it must be wanted.' unless good."""
    if not good:
        raise UserError(f"{name} is {got}; it must be {wanted}.")


def _require_name(name: str) -> None:
    require(bool(NAME.fullmatch(name)), "A prompt source's name", repr(name), "made of letters, digits, '_', '-' and '.'")
