"""Questions of a benchmark, and the prompts that every method answers.

A later turn's prompt holds the target's own answers to the turns before, made once by plain decoding: so all methods read the same
prompts, whatever they say, and their times can be compared question by question.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.sampling import Sampling
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout

MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
"""Categories of MT-bench's questions, which Spec-Bench reports as one."""


@dataclass(frozen=True)
class Question:
    """What is asked, in one turn or several."""

    key: str
    category: str
    messages: tuple[dict, ...] = ()
    """Leading system messages, then user turns alone."""
    tools: tuple[dict, ...] = ()
    """JSON schemas of functions."""
    ids: tuple[int, ...] = ()
    """A rendered prompt, in place of messages."""

    @property
    def turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages) or 1


@dataclass(frozen=True)
class Asked:
    """A question as it is put to every method: one prompt a turn."""

    key: str
    category: str
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Skipped:
    """A question that was not asked."""

    question: str
    why: str


def choose(questions: Sequence[Question], count: int | None) -> list[Question]:
    """The first `count` of each category; MT-bench's eight as one category where all are there. UserError for doubled names."""
    keys = Counter(question.key for question in questions)
    twice = next((key for key, number in keys.items() if number > 1), None)
    if twice is not None:
        raise UserError(f"Two questions have the id {twice}, but ids must be unique: rename one of them.")
    as_one = {question.category for question in questions} >= MT_BENCH
    seen: Counter[str] = Counter()
    chosen = []
    for question in questions:
        seen[question.category] += 1
        if count is None or seen[question.category] <= count:
            grouped = as_one and question.category in MT_BENCH
            chosen.append(replace(question, category="mt_bench") if grouped else question)
    return chosen


def ask(target: Target, questions: Sequence[Question], sampling: Sampling, max_tokens: int) -> tuple[list[Asked], list[Skipped]]:
    """The prompts of all turns; questions with a prompt that leaves no room for an answer are skipped.

    Raises:
        UserError: if no question is left.
    """
    engine = Engine(target, sampling=sampling, slots=1)
    asked, skipped = [], []
    for question in questions:
        found = _turns(target, engine, question, max_tokens)
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            asked.append(Asked(question.key, question.category, found))
    if not asked:
        first = f"; the first: {skipped[0].question}, {skipped[0].why}" if skipped else ""
        raise UserError(f"none of {len(questions)} questions can be asked{first}. Shorten them, or lower bench.max_tokens.")
    return asked, skipped


def _turns(target: Target, engine: Engine, question: Question, max_tokens: int) -> tuple[Request, ...] | Skipped:
    users = [i for i, message in enumerate(question.messages) if message["role"] == "user"]
    history, requests = list(question.messages[: users[0]]) if users else [], []
    for turn in range(question.turns):
        if users:
            history.append(question.messages[users[turn]])
        ids = tuple(target.render(history, list(question.tools) or None)) if users else question.ids
        if len(ids) + max_tokens > target.max_positions:
            where = f" of turn {turn + 1}" if question.turns > 1 else ""
            return Skipped(
                question.key,
                f"the prompt{where} has {len(ids):,} tokens, and with {max_tokens:,} of an answer it does not fit the target's "
                f"{target.max_positions:,} positions",
            )
        requests.append(Request(f"{question.key}/{turn + 1}", ids, max_tokens))
        if turn + 1 < question.turns:
            (rollout,) = engine.generate(requests[-1:])
            history.append({"role": "assistant", "content": said(target, rollout)})
    return tuple(requests)


def said(target: Target, rollout: Rollout) -> str:
    """The text of an answer, as a chat's history holds it."""
    return target.tokenizer.decode(rollout.answer.tolist(), skip_special_tokens=True)


def probe_of(asked: Sequence[Asked], count: int) -> list[Asked]:
    """`count` questions, the first of every category, then the second of every category, and so on."""
    place: Counter[str] = Counter()
    order = []
    for index, each in enumerate(asked):
        order.append((place[each.category], index))
        place[each.category] += 1
    return [asked[index] for _, index in sorted(order)[:count]]
