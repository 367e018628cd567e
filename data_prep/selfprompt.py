"""Self-prompting: the target writes the questions itself.

Unseeded, it is given an open user turn and continues it. Seeded by topics or examples, it is asked in an ordinary chat for a
question, and its answer is the prompt. Two ways because they differ in what they sample: an open user turn
gives what the target takes for a typical user, a seed leads it where the drafter will be used.

Attempts are numbered and sampled in chunks of a fixed size, each kept in `attempts/<source>-00000.json`, and attempt 123 has
the random stream of its key "self-000123". So a killed run goes on with the chunk that was not finished and ends with the same
prompts. Several processes take turns at the chunks; the others run at most one round ahead of the leader, who judges them.
Where fewer prompts are asked for than a chunk has, it is sampled in pieces of that many, and its file grows.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.progress import Watched
from data_prep.prompt import Work
from data_prep.team import Team
from data_prep.text import fault, fingerprint, tokens_through_thought
from drafttrain.data.sealed import read_sealed, write_sealed
from drafttrain.errors import UserError
from drafttrain.types import Request, Rollout

if TYPE_CHECKING:
    from data_prep.sources import SelfPrompts

SHOWN_EXAMPLES = 4
"""Examples shown at once: enough to see a kind, few enough that the next attempt sees others."""
CHATTY = re.compile(r"(?:sure|certainly|of course|absolutely)\b[,!.:]|here(?:'s|’s| is| are)\b[^\n]*:", re.IGNORECASE)
"""How an answer begins that announces a question instead of being one."""
LABEL = re.compile(
    r"\A(?:q|(?:(?:sure|certainly|here(?:'s|’s| is)|this is|the|an?)\b[^\n:]{0,40})?\bquestion\b[^\n:]{0,20}):\s*", re.IGNORECASE
)
"""A name that it gives to the question: "Question:", "Here is a question about bees:"."""
QUOTES = {'"': '"', "“": "”", "«": "»", "「": "」"}


@dataclass(frozen=True)
class Seeds:
    """What leads the target; nothing at all is a seed too."""

    topics: list[str]
    examples: list[str]

    def __bool__(self) -> bool:
        return bool(self.topics or self.examples)

    def chat(self, number: int, key: str) -> list[dict]:
        """What attempt `number` asks the target. Topics take turns; which examples are shown depends on the key alone.

        Examples are shown as answers that the target gave before: a small target copies their kind far better than from a list.
        """
        about = self.topics[number % len(self.topics)] if self.topics else None
        if not self.examples:
            return [{"role": "user", "content": f"Write a question about {about}. Write only the question."}]
        again = "Write another question like that"
        messages: list[dict] = []
        for example in random.Random(key).sample(self.examples, min(SHOWN_EXAMPLES, len(self.examples))):
            messages.append({"role": "user", "content": f"{again}." if messages else "Write a question."})
            messages.append({"role": "assistant", "content": example.strip()})
        return [*messages, {"role": "user", "content": f"{again}, about {about}." if about else f"{again}."}]


UNSEEDED = Seeds([], [])


class Attempts:
    """Judged attempts, one piece of a chunk after the other."""

    def __init__(self, source: "SelfPrompts", work: Work, seeds: Seeds = UNSEEDED):
        self.source = source
        self.work = work
        self.seeds = seeds
        self.prefix, self.closing = ([], ()) if seeds else work.target.user_prefix()
        self.piece = min(source.count, work.chunk)
        self.judged = 0
        self._own = work.team.rank
        """The next chunk that this process makes where it does not lead."""
        self._seen = {fingerprint(example) for example in seeds.examples}

    def next(self) -> list[tuple[str, str, str | None]]:
        """(key, text, None or why it is dropped) of the next piece, in order of the attempts' numbers."""
        chunk, first = divmod(self.judged, self.work.chunk)
        end = min(first + self.piece, self.work.chunk)
        if self.work.team.mine(chunk):
            self._make(chunk, end)
        else:
            self.work.team.wait_until(lambda: len(self._rows(chunk)) >= end)
        rows = self._rows(chunk)[first:end]
        self.judged += len(rows)
        return [(row["key"], *self._judge(row)) for row in rows]

    @property
    def needed(self) -> bool:
        """Whether a process that does not lead makes its next chunk yet. Nobody runs ahead where even the first may be too much."""
        team, chunk = self.work.team, self._own
        if self.piece < self.work.chunk:
            return len(self._rows(chunk - 1)) == self.work.chunk
        return chunk < team.world or self._path(chunk - team.rank - team.world).exists()

    def help(self) -> None:
        """What a process that does not lead does: its next chunk."""
        self._make(self._own, self.work.chunk)
        self._own += self.work.team.world

    @property
    def begun(self) -> bool:
        """Whether the first chunk is there."""
        return self._path(0).exists()

    def _path(self, chunk: int) -> Path:
        return self.work.folder / "attempts" / f"{self.source.name}-{chunk:05d}.json"

    def _rows(self, chunk: int) -> list[dict]:
        """What is there of a chunk. UserError if it is damaged."""
        path = self._path(chunk)
        again = "delete it and run data_prep again: it samples these prompts anew"
        return read_sealed(path, "the sampled prompts", again, keys=["rows"])["rows"] if path.exists() else []

    def _make(self, chunk: int, end: int) -> None:
        """The chunk's attempts up to this one; those that an earlier process made stay."""
        rows, start = self._rows(chunk), chunk * self.work.chunk
        if len(rows) < end:
            write_sealed(self._path(chunk), {"rows": [*rows, *self._sample(range(start + len(rows), start + end))]})

    def _sample(self, numbers: range) -> list[dict]:
        requests = [self._request(number) for number in numbers]
        ask = Watched(self.work.ask, f"{self.source.name}: attempts from number {numbers[0] + 1:,} on", self.work.say)
        rollouts = ask(requests, self.source.temperature, self.source.top_p, None)
        said = {rollout.key: rollout for rollout in rollouts}
        return [_row(said[request.key]) for request in requests]

    def _request(self, number: int) -> Request:
        key = f"{self.source.name}-{number:06d}"
        messages = self.seeds.chat(number, key) if self.seeds else None
        opening = tuple(self.work.target.render(messages) if messages else self.prefix)
        if not opening:
            raise UserError(
                f"the chat template of {self.work.target.identity.path} writes nothing before what "
                f"{'it is asked' if messages else 'a user says'}, so the target cannot write prompts for itself; use prompts from a file."
            )
        if len(opening) + self.source.max_tokens > self.work.target.max_positions:
            raise UserError(
                f"SelfPrompts.max_tokens is {self.source.max_tokens} after an opening of {len(opening)} tokens, but the target "
                f"reads at most {self.work.target.max_positions}; lower it{', or give shorter topics and examples' if messages else ''}."
            )
        chat = tuple(messages) if messages else None
        return Request(key, opening, self.source.max_tokens, ends=self.closing, messages=chat)

    def _judge(self, row: dict) -> tuple[str, str | None]:
        if "failed" in row:
            return "", row["failed"]
        ended = bool(row["ids"]) and row["ids"][-1] in (*self.work.target.end_ids, *self.closing)
        body = row["ids"][:-1] if ended else row["ids"]
        decode = self.work.target.tokenizer.decode
        if self.seeds:
            body = body[tokens_through_thought(body, self.work.target.tokenizer) :]  # reasoning is no part of the question
        text = decode(body, skip_special_tokens=True)
        if not ended:
            return text, f"did not end within {self.source.max_tokens} tokens"
        if text != decode(body, skip_special_tokens=False):
            return text, "special token inside"
        text = self._unwrapped(text) if self.seeds else text.strip()
        why = fault(text, self.source.min_words)
        if why is None and self.seeds and CHATTY.match(text):
            why = "announces a question instead of asking it"
        if why is None and fingerprint(text) in self._seen:
            why = "duplicate"
        if why is None:
            self._seen.add(fingerprint(text))
        return text, why

    @staticmethod
    def _unwrapped(text: str) -> str:
        """Without the label before, and the quotes around, that a model gives to what it was asked to write."""
        text = LABEL.sub("", text.strip())
        if "\n" not in text:
            text = re.sub(r"^\d{1,2}[.)]\s+", "", text)
        closing = QUOTES.get(text[:1])
        inner = text[1:-1]
        return inner.strip() if closing and len(text) > 2 and text.endswith(closing) and text[0] not in inner else text


def help_sampling(team: Team, sources: Sequence[Attempts], over: Callable[[], bool]) -> None:
    """What a process that does not lead does: its chunks of these, until they are not needed any more."""

    def waiting() -> list[Attempts]:
        """The one begun last goes first. But an earlier start may have begun it, and the leader be at another one again, so all are looked at."""
        return [each for each in reversed(sources) if (each is sources[0] or each.begun) and each.needed]

    while True:
        team.wait_until(lambda: bool(waiting()) or over())
        if over():
            return
        waiting()[0].help()


def read_topics(path: str) -> list[str]:
    """One topic a line; blank lines are none. UserError if the file cannot be read or has none."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            topics = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise UserError(
            f"SelfPrompts.topics_file is {path}, which cannot be read ({error.strerror}); name a file that can be."
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"SelfPrompts.topics_file is {path}, which is not UTF-8; save it as UTF-8, one topic a line.") from None
    if not topics:
        raise UserError(f"SelfPrompts.topics_file is {path}, which has no topic; write one a line, or leave the option out.")
    return topics


def _row(rollout: Rollout) -> dict:
    """An attempt as it is kept; with the reason where a server never answered."""
    row = {"key": rollout.key, "ids": rollout.answer.tolist()}
    return row if rollout.failed is None else row | {"failed": rollout.failed}
