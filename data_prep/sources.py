"""Where prompts come from. Each source is a frozen dataclass that the recipe names by its class.

A prompt is what the target will answer: optional system messages and user turns. Answers in a file are not used: training text is
always the target's own. `dialects.py` says which forms of a chat are read, `rows.py` what becomes of broken rows.
"""

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from data_prep.dataset_rows import content_of, is_local, load, rows_of
from data_prep.dialects import FIELDS, Reader
from data_prep.ledger import Ledger, reasons
from data_prep.prompt import LONGEST_NAME, Ask, Prompt, PromptSource, Work, require, require_common
from data_prep.rows import EXAMPLE, Table, collect, json_lines
from data_prep.selfprompt import Attempts, Seeds, read_topics
from drafttrain.data.sealed import read_sealed
from drafttrain.data.store import Manifest
from drafttrain.errors import UserError
from drafttrain.files import sha256_file

__all__ = ["Ask", "DatasetPrompts", "JsonlPrompts", "Prompt", "PromptSource", "SelfPrompts", "StorePrompts", "Work", "require"]


@dataclass(frozen=True)
class SelfPrompts(PromptSource):
    """The target writes the user turns itself: an open user turn is sampled until end of turn, or it is asked for one."""

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
    topics: list[str] = field(default_factory=list)
    """What to ask about: the target is asked for a question about each topic in turn. Empty = it writes whatever it likes."""
    topics_file: str | None = None
    """A file with one topic a line, instead of `topics`."""
    examples: list[str] = field(default_factory=list)
    """Prompts of the wanted kind: the target is shown up to four of them as its own answers, and asked for another."""
    weight: float | None = None
    """Share in the mix, relative to the other sources' weights; null = all that there are."""

    def __post_init__(self) -> None:
        for name in ("count", "max_tokens", "min_words", "attempts_per_prompt"):
            require(getattr(self, name) >= 1, f"SelfPrompts.{name}", getattr(self, name), "at least 1")
        require_common(self)
        require(0 < self.temperature < inf, "SelfPrompts.temperature", self.temperature, "above 0")
        require(0 < self.top_p <= 1, "SelfPrompts.top_p", self.top_p, "above 0 and at most 1 (1 = off)")
        for name in ("topics", "examples"):
            require(
                all(text.strip() for text in getattr(self, name)), f"SelfPrompts.{name}", getattr(self, name), "texts with words"
            )
        if self.topics and self.topics_file is not None:
            raise UserError(f"SelfPrompts has both topics and topics_file ({self.topics_file}); leave one of them out.")

    def decides(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "topics_file"}

    def content(self) -> dict[str, str]:
        return {} if self.topics_file is None else {"topics (sha256)": _sha256(self.topics_file, "SelfPrompts.topics_file")}

    def require_there(self) -> None:
        if self.topics_file is not None:
            read_topics(self.topics_file)

    def attempts(self, work: Work) -> Attempts:
        """What the target writes, chunk by chunk. UserError if the topics cannot be read."""
        topics = self.topics if self.topics_file is None else read_topics(self.topics_file)
        return Attempts(self, work, Seeds(topics, self.examples))

    def collect(self, work: Work, ledger: Ledger) -> list[Prompt]:
        prompts: list[Prompt] = []
        attempts = self.attempts(work)
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
class RowPrompts(PromptSource):
    """Prompts from the rows of something that lies at a path."""

    path: str
    """Where the rows are."""
    count: int | None = None
    """Most prompts to take, from the beginning; null = all."""
    name: str = ""
    """Name of the source, and beginning of its prompts' keys; empty = the end of the path."""
    turns: int | None = None
    """Most user turns of a chat to keep; null = all."""
    weight: float | None = None
    """Share in the mix, relative to the other sources' weights; null = all that there are."""

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), f"{type(self).__name__}.path", repr(self.path), "where the prompts are")
        if not self.name:
            object.__setattr__(self, "name", _name_after(self.path))
        require_common(self)

    @abstractmethod
    def table(self, work: Work) -> Table:
        """The rows. UserError if they cannot be had."""

    def decides(self) -> dict[str, Any]:
        # Rows are known by their content, wherever they lie.
        return {name: value for name, value in vars(self).items() if name != "path"}

    def collect(self, work: Work, ledger: Ledger) -> list[Prompt]:
        return collect(self.table(work), Reader(self.name, self.turns), self.count, work, ledger)


@dataclass(frozen=True)
class JsonlPrompts(RowPrompts):
    """Prompts from a file with one JSON object a line: `messages`, ShareGPT `conversations`, `prompt`, or `turns`. May be gzipped."""

    def content(self) -> dict[str, str]:
        return {"content (sha256)": _sha256(self.path, "JsonlPrompts.path")}

    def require_there(self) -> None:
        next(json_lines(self.path, "JsonlPrompts.path"), None)

    def table(self, work: Work) -> Table:
        form = f"each line must look like {EXAMPLE} (DatasetPrompts reads a file that is one JSON array)"
        return Table(self.path, "line", json_lines(self.path, "JsonlPrompts.path"), form)


@dataclass(frozen=True)
class DatasetPrompts(RowPrompts):
    """Prompts from a data set that Hugging Face `datasets` loads: its path is owner/name on the Hub, or a folder or file here (JSON,
    Parquet, Arrow, CSV, or made by `save_to_disk`)."""

    config_name: str | None = None
    """Which of a data set's configurations; null = its only one."""
    split: str = "train"
    """Which split."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null = the newest. With a full commit hash a restart needs no network to know it."""
    streaming: bool = True
    """Read rows as they arrive; false = have `datasets` download and convert everything first, and keep it in its cache."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name -> the data set's column, for other names than ours: {prompt: question}. Then nothing else is read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [ours for ours, theirs in self.columns.items() if ours not in FIELDS or not isinstance(theirs, str)]
        require(not wrong, "DatasetPrompts.columns", self.columns, f"names of columns for some of {', '.join(FIELDS)}")

    def decides(self) -> dict[str, Any]:
        # How rows come here does not change what they are, and a branch is known by its commit.
        return {name: value for name, value in super().decides().items() if name not in ("streaming", "revision")}

    def content(self) -> dict[str, str]:
        return content_of(self.path, self.revision)

    def require_there(self) -> None:
        is_local(self.path)

    def table(self, work: Work) -> Table:
        dataset = load(self.path, self.config_name, self.split, self.revision, self.streaming)
        form = "say where its prompts are with DatasetPrompts.columns, such as {prompt: question}"
        return Table(self.path, "row", rows_of(dataset, self.path, self.columns), form)


@dataclass(frozen=True)
class StorePrompts(RowPrompts):
    """The prompts of a token store that another run made (runs/NAME/data/train or .../held_out), answered anew by this target.

    They are taken as text from the `prompts.jsonl` (`held_out.jsonl`) beside the store and rendered anew, so the target, tokenizer
    and template of that run do not matter: only where prompts would have to be read back from tokens would they.
    """

    name: str = "store"
    """Name of the source, and beginning of its prompts' keys."""

    @property
    def written(self) -> Path:
        """The file with the store's prompts. UserError if there is none, or no store."""
        store = Path(self.path)
        if not (store / "manifest.json").exists():
            raise UserError(
                f"StorePrompts.path is {self.path}, which is no finished token store (it has no manifest.json); name the folder "
                "train or held_out in the data folder of a finished run."
            )
        found = store.parent / ("held_out.jsonl" if store.name == "held_out" else "prompts.jsonl")
        if not found.exists():
            raise UserError(
                f"StorePrompts.path is {self.path}, but {found}, which holds its prompts as text, is missing, and tokens cannot be "
                "turned back into messages; copy that file from where the store was made, or use JsonlPrompts."
            )
        return found

    def content(self) -> dict[str, str]:
        return {"content (sha256)": _sha256(str(self.written), "StorePrompts.path")}

    def require_there(self) -> None:
        next(json_lines(str(self.written), "StorePrompts.path"), None)

    def table(self, work: Work) -> Table:
        written = self.written
        if not _as_written(written):
            work.say(f"{written}: not as data_prep wrote it (cut short, or changed since); its rows are taken as they are")
        made, here = Manifest.read(Path(self.path)).identity, work.target.identity
        if (made.tokenizer, made.template) != (here.tokenizer, here.template):
            work.say(
                f"{self.path}: made with another tokenizer or template ({made.path}); its prompts are rendered anew for this target"
            )
        form = "a data folder's own file has keys and messages"
        return Table(str(written), "line", json_lines(str(written), "StorePrompts.path"), form, stored=True)


def _as_written(file: Path) -> bool:
    """Whether the file is the one that `prompts.json` beside it speaks of; True where there is none to ask."""
    facts = file.parent / "prompts.json"
    if not facts.exists():
        return True
    digests = read_sealed(facts, "the list of prompts", "copy the data folder anew, or delete that file to go on without it")[
        "sha256"
    ]
    return digests.get(file.name) == sha256_file(file)


def _name_after(path: str) -> str:
    place = Path(path.removesuffix(".gz"))
    return re.sub(r"[^\w.-]+", "_", place.stem if place.suffix else place.name)[:LONGEST_NAME]


def _sha256(path: str, option: str) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise UserError(f"{option} is {path}, which cannot be read ({error.strerror}); name a file that can be.") from None
