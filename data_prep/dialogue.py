"""Chats of several turns: the target answers each user turn in order, and its own answer is the context of the next.

Every turn is rendered with the target's template just as a server would render it: history as text, in messages. Where that
rendering begins with the very tokens that the target has read and said so far, the turn is appended to the same row of training
text. Where it does not (the template drops earlier reasoning or trims white space, or the answer's text is tokenised differently
from how it was generated), the turn begins a row of its own, with the rewritten history as its prompt. So a supervised token
always stands behind exactly the tokens that the target had read when it said it.

    chat-7          system user [answer 1] user [answer 2]          one row, two supervised stretches
    chat-7@turn3    system user answer 1 user answer 2 user [answer 3]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from data_prep.dialects import LATER_TURN
from data_prep.featurize import Stored
from data_prep.ledger import Ledger
from data_prep.quality import QualityConfig, fault_of_answer
from data_prep.sources import Prompt, Work
from data_prep.text import THOUGHT_ENDS, tokens_through_thought
from drafttrain.data.shards import Chat
from drafttrain.errors import UserError
from drafttrain.types import Features, Request, Rollout

ANSWER = "/answer"


@dataclass(frozen=True)
class Speech:
    """How the target answers."""

    temperature: float
    top_p: float
    stored: Stored | None
    """What is kept of the target's states meanwhile; None for nothing."""


@dataclass(frozen=True)
class Rules:
    """What becomes of an answer."""

    max_prompt: int
    """Most tokens of a prompt, history included; a chat ends before a turn that is longer."""
    limit: int
    """Most tokens of an answer."""
    thoughts: bool
    """Whether reasoning is supervised."""
    last_turn: bool
    """Whether the last answer alone is supervised."""
    quality: QualityConfig


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to be answered, with its first turn rendered."""

    key: str
    prompt: Prompt
    ids: Sequence[int]
    """An `array` where there are millions: a tuple of ids takes ten times as much."""

    @property
    def turns(self) -> list[dict]:
        return [message for message in self.prompt.messages if message["role"] == "user"]


@dataclass
class _Row:
    """Training text being made: tokens up to the last answer, and which of them the target said."""

    key: str
    ids: list[int]
    said: list[bool]
    features: Features | None = None


@dataclass
class _Dialogue:
    question: Question
    messages: list[dict]
    """Rendered so far: system, user, assistant, user, ..."""
    next_ids: tuple[int, ...]
    turn: int = 0
    rows: list[_Row] = field(default_factory=list)
    open: bool = True


class Answering:
    """Answers a chunk of questions turn by turn. `ledger` counts rows of training text: in = kept + dropped."""

    def __init__(self, work: Work, rules: Rules, speech: Speech):
        self.work, self.rules, self.speech = work, rules, speech
        self.ends = set(work.target.end_ids)
        self.ledger = Ledger()

    def run(self, questions: Sequence[Question]) -> list[Chat]:
        """The chats in the order of the questions, whatever order they were finished in."""
        dialogues = {question.key: _begin(question) for question in questions}
        self.ledger.read += len(dialogues)
        while active := [dialogue for dialogue in dialogues.values() if dialogue.open]:
            for dialogue, rollout in self._ask(active):
                self._take(dialogue, rollout)
        return [chat for dialogue in dialogues.values() for chat in self._chats(dialogue)]

    def _ask(self, active: list[_Dialogue]) -> Iterator[tuple[_Dialogue, Rollout]]:
        # A stream of its own for each answer: it must not repeat the random numbers with which its question was sampled.
        by_key = {
            d.question.key + ANSWER + (f"/{d.turn + 1}" if d.turn else ""): d
            for d in sorted(active, key=lambda d: (len(d.next_ids), d.question.key))
        }
        requests = [
            Request(
                key,
                dialogue.next_ids,
                self.rules.limit,
                messages=tuple(dialogue.messages),
                tools=tuple(dialogue.question.prompt.tools or ()) or None,
            )
            for key, dialogue in by_key.items()
        ]
        speech = self.speech
        taps = None if speech.stored is None else speech.stored.taps
        for rollout in self.work.ask(requests, speech.temperature, speech.top_p, taps):
            yield by_key[rollout.key], rollout

    def _take(self, dialogue: _Dialogue, rollout: Rollout) -> None:
        """Append the answer to the chat's text and make the next turn's prompt, or end the chat."""
        reason, text = self._judge(dialogue, rollout)
        if reason is not None:
            self._end(dialogue, reason)
            return
        self._append(dialogue, rollout)
        dialogue.turn += 1
        turns = dialogue.question.turns
        if dialogue.turn == len(turns):
            dialogue.open = False
        elif not rollout.stopped:
            self._note(dialogue, "ended early: an answer was cut at max_tokens")
        else:
            dialogue.messages += [{"role": "assistant", "content": text}, turns[dialogue.turn]]
            self._render(dialogue)

    def _judge(self, dialogue: _Dialogue, rollout: Rollout) -> tuple[str | None, str]:
        """(why the answer is dropped or None, its text without the end of turn)."""
        if rollout.failed is not None:
            return rollout.failed, ""
        ids = rollout.answer.tolist()
        body = ids[:-1] if ids and ids[-1] in self.ends else ids
        if not ids:
            return "no supervised token", ""
        if not body:
            return "empty answer", ""
        tokenizer = self.work.target.tokenizer
        text = tokenizer.decode(body, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False) != body:
            self.ledger.notes["answers are other tokens than their text gives: kept as they were generated"] += 1
        question = dialogue.question.turns[dialogue.turn]["content"]
        return fault_of_answer(self.rules.quality, body, text, question, rollout.stopped), text

    def _append(self, dialogue: _Dialogue, rollout: Rollout) -> None:
        prompt, answer = rollout.ids[: rollout.prompt_len].tolist(), rollout.answer.tolist()
        row = dialogue.rows[-1] if dialogue.rows else None
        if row is None or prompt[: len(row.ids)] != row.ids:
            key = dialogue.question.key
            if row is not None:
                key = f"{key}@turn{dialogue.turn + 1}"
                self.ledger.read += 1  # one more row of training text than there are prompts
                self.ledger.notes["turns began a row of their own: the history is rendered in other tokens than were said"] += 1
            row = _Row(key, [], [])
            dialogue.rows.append(row)
        if self.rules.last_turn:
            row.said = [False] * len(row.said)
        said = [False] * (len(prompt) - len(row.ids))
        thought = 0 if self.rules.thoughts else thought_tokens(answer, prompt, self.work.target.tokenizer)
        row.said += said + [False] * thought + [True] * (len(answer) - thought)
        row.ids = prompt + answer
        row.features = _features(rollout)

    def _render(self, dialogue: _Dialogue) -> None:
        """The next prompt, or the end of the chat where there is none."""
        try:
            ids = self.work.target.render(dialogue.messages, dialogue.question.prompt.tools)
        except UserError:
            self._note(dialogue, "ended early: the chat template refused the next turn")
            return
        if len(ids) > self.rules.max_prompt:
            self._note(dialogue, f"ended early: the next prompt is longer than {self.rules.max_prompt} tokens")
        else:
            dialogue.next_ids = tuple(ids)

    def _end(self, dialogue: _Dialogue, reason: str) -> None:
        """An answer was dropped: the chat is lost if it was the first, else it ends before it."""
        dialogue.open = False
        if dialogue.turn == 0:
            self.ledger.drop(reason, dialogue.question.key)
        else:
            self._note(dialogue, f"ended early: {reason}")

    def _note(self, dialogue: _Dialogue, what: str) -> None:
        dialogue.open = False
        self.ledger.notes[f"chats {what}"] += 1

    def _chats(self, dialogue: _Dialogue) -> Iterator[Chat]:
        rows = dialogue.rows
        if self.rules.last_turn and len(rows) > 1:
            for row in rows[:-1]:
                self.ledger.drop("not the last turn", row.key)
            rows = rows[-1:]
        for row in rows:
            if any(row.said):
                # By way of numpy: torch takes seven times as long over a list, and there are millions.
                ids, said = np.array(row.ids, np.int64), np.array(row.said, bool)
                yield Chat(row.key, torch.from_numpy(ids), torch.from_numpy(said), row.features)
            else:
                self.ledger.drop("no supervised token", row.key)


def question_key(chat_key: str) -> str:
    """Key of the question that a chat of training text came from."""
    return LATER_TURN.sub("", chat_key)


def thought_tokens(answer: list[int], prompt: list[int], tokenizer) -> int:
    """Leading tokens of an answer that are reasoning: all up to and including the one that completes `</think>`.

    All of them where reasoning was begun (by the answer, or by a prompt that ends in an open `<think>`) and never closed.
    """
    text = tokenizer.decode(answer, skip_special_tokens=False)
    before = tokenizer.decode(prompt[-8:], skip_special_tokens=False)
    begun = text.lstrip().startswith("<think>") or before.rfind("<think>") > before.rfind(THOUGHT_ENDS)
    if THOUGHT_ENDS not in text:
        return len(answer) if begun else 0
    return tokens_through_thought(answer, tokenizer)


def _begin(question: Question) -> _Dialogue:
    return _Dialogue(question, first_turn(question.prompt), tuple(question.ids))


def first_turn(prompt: Prompt) -> list[dict]:
    """The messages of the first question."""
    first = next(index for index, message in enumerate(prompt.messages) if message["role"] == "user")
    return list(prompt.messages[: first + 1])


def _features(rollout: Rollout) -> Features | None:
    if rollout.taps_TAD is None or rollout.final_TD is None:
        return None
    return Features(rollout.taps_TAD.to("cpu", torch.bfloat16), rollout.final_TD.to("cpu", torch.bfloat16))
