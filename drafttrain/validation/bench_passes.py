"""Passes of a benchmark over its questions: timed, by stage, and many answers at a time.

Questions are answered one at a time with the device waited for before and after each, so that a question's seconds are its own;
reading its prompts is among them. Stages are timed in a pass of their own, since timing them costs a little.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from time import perf_counter

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.graphs import StageClock
from drafttrain.decoding.measure import Decoded, check_counts, tried_of
from drafttrain.decoding.methods import Method
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout
from drafttrain.validation.bench_questions import Asked
from drafttrain.validation.passes import synchronize

WARM_TOKENS = 8
"""Length of the answers that warm a CPU up for a batch."""
MOST_WARM_UPS = 3
"""Times that a GPU answers a batch before it is timed, unless it meets no new round before."""


@dataclass(frozen=True)
class Contender:
    """Plain decoding, or a method."""

    label: str
    target: Target
    net: DrafterNet
    method: Method | None = None
    """With all that it needs."""

    def exact(self, sampling: Sampling) -> bool:
        """Whether it must say plain decoding's very tokens; else its verifier keeps their distribution alone."""
        return self.method is None or self.method.verifier(sampling) is None

    def can(self, sampling: Sampling) -> bool:
        """Whether it works at this temperature: a verifier that weighs probabilities has none to weigh at 0."""
        return sampling.temperature > 0 or self.exact(sampling)

    def engine(self, sampling: Sampling, slots: int = 1) -> Engine:
        """An engine of its own. UserError if the method cannot be had with this drafter."""
        if self.method is None:
            return Engine(self.target, sampling=sampling, slots=slots)
        proposer, verify = self.method.proposer(self.net, sampling), self.method.verifier(sampling)
        return Engine(self.target, proposer=proposer, verify=verify, sampling=sampling, slots=slots)


@dataclass(frozen=True)
class Row:
    """One question answered once by one method."""

    part: str
    """questions, or draft length."""
    temperature: float
    method: str
    run: int
    """1, 2, ..."""
    question: str
    category: str
    seconds: float
    """Of all turns, prefill included."""
    rollouts: tuple[Rollout, ...]
    """One a turn."""

    @property
    def tokens(self) -> int:
        return sum(len(rollout.answer) for rollout in self.rollouts)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def accepted(self) -> list[int]:
        """Of the rounds of all turns."""
        return [count for rollout in self.rollouts for count in rollout.accepted]

    def tried(self, drafts: int) -> list[int]:
        """Depths at which drafts were tried in the rounds of all turns, where a round may try `drafts`."""
        return [depth for rollout in self.rollouts for depth in tried_of(rollout, drafts)]

    def facts(self) -> dict:
        """A line of bench.jsonl; lists have one entry a turn. Token ids stand in the first run's lines."""
        line = {name: getattr(self, name) for name in ("part", "temperature", "method", "run", "question", "category", "seconds")}
        line |= {
            "tokens": [len(rollout.answer) for rollout in self.rollouts],
            "prompt_tokens": [rollout.prompt_len for rollout in self.rollouts],
            "accepted": [rollout.accepted for rollout in self.rollouts],
            "tried": [rollout.tried for rollout in self.rollouts if isinstance(rollout, Decoded)],
            "cut": [rollout.cut for rollout in self.rollouts],
        }
        return line | ({"ids": [rollout.answer.tolist() for rollout in self.rollouts]} if self.run == 1 else {})


@dataclass(frozen=True)
class Stages:
    """Where the seconds of answering some questions, one at a time, went."""

    tokens: int
    rounds: int
    prefill: float
    draft: float
    check: float
    commit: float
    rest: float
    """Of the rounds, outside the three stages: the host's part."""


def answer(engine: Engine, asked: Asked) -> tuple[tuple[Rollout, ...], float]:
    """All turns of a question, and the seconds they took."""
    synchronize(engine.target)
    start = perf_counter()
    rollouts = tuple(rollout for request in asked.requests for rollout in engine.generate([request]))
    synchronize(engine.target)
    return rollouts, perf_counter() - start


def warm_up(engine: Engine, asked: Sequence[Asked], least: int) -> None:
    """Answer the first `least` questions untimed; on a GPU with the rounds of all questions recorded as graphs before."""
    engine.record([request for each in asked for request in each.requests])
    for each in asked[:least]:
        answer(engine, each)


def time_questions(engines: Mapping[str, Engine], asked: Sequence[Asked], run: int, part: str) -> list[Row]:
    """Have every method answer every question once. Question by question, one method after another: a machine that slows down for a
    while slows all of them.

    Args:
        engines: by method.
        run, part: what the rows are called by.

    Raises:
        RuntimeError: if an engine's records contradict themselves.
    """
    rows = []
    for engine in engines.values():
        _forget_texts(engine)
    for each in asked:
        for method, engine in engines.items():
            rollouts, seconds = answer(engine, each)
            check_counts(method, rollouts, drafts_of(engine))
            rows.append(Row(part, engine.sampling.temperature, method, run, each.key, each.category, seconds, rollouts))
    return rows


def drafts_of(engine: Engine) -> int:
    """Greatest depth of its drafts."""
    return engine.proposer.drafts if engine.proposer else 0


@dataclass
class _Clock(StageClock):
    """Notes also when a prompt's first round began. The host knows the answer's first token then, so a GPU has read the prompt."""

    first_round: float | None = None

    def time(self, name: str, stage: Callable[[], None], cuda: bool) -> None:
        if self.first_round is None:
            self.first_round = perf_counter()
        super().time(name, stage, cuda)


class StageTimer:
    """Times the stages of one engine's rounds."""

    def __init__(self, engine: Engine):
        self.engine, self.clock = engine, _Clock()
        self.tokens, self.prefill, self.rounds = 0, 0.0, 0.0

    def answer(self, request: Request) -> None:
        """Answer a prompt with a clock on every stage."""
        self.engine.clock, self.clock.first_round = self.clock, None
        synchronize(self.engine.target)
        start = perf_counter()
        self.tokens += sum(len(rollout.answer) for rollout in self.engine.generate([request]))
        synchronize(self.engine.target)
        end = perf_counter()
        begun = end if self.clock.first_round is None else self.clock.first_round
        self.prefill, self.rounds = self.prefill + begun - start, self.rounds + end - begun
        self.engine.clock = None

    def stages(self) -> Stages:
        """What came of it so far."""
        self.clock.settle()
        draft, check, commit = (self.clock.seconds.get(stage, 0.0) for stage in ("draft", "check", "commit"))
        rest = self.rounds - draft - check - commit
        return Stages(self.tokens, self.clock.rounds, self.prefill, draft, check, commit, rest)


def time_stages(engines: Mapping[str, Engine], asked: Sequence[Asked]) -> dict[str, Stages]:
    """Where each method's time goes, question by question like `time_questions`."""
    timers = {method: StageTimer(engine) for method, engine in engines.items()}
    for request in (request for each in asked for request in each.requests):
        for timer in timers.values():
            timer.answer(request)
    return {method: timer.stages() for method, timer in timers.items()}


def throughput(engine: Engine, asked: Sequence[Asked], batch: int, repeats: int) -> list[float]:
    """Tokens a second with `batch` answers at a time, in each run: the first turns of the questions, copied as needed.

    Args:
        engine: with as many slots, or more. Of several batches the largest should come first, since graphs are lost when buffers grow.
    """
    firsts = islice(cycle(each.requests[0] for each in asked), batch)
    requests = [replace(request, key=f"{request.key}#{i}") for i, request in enumerate(firsts)]
    if engine.graphed:
        for _ in range(MOST_WARM_UPS):  # the same rounds as will be timed, met and then recorded
            known = engine.rounds_known
            list(engine.generate(requests))
            if engine.rounds_known == known:
                break
    else:
        list(engine.generate([replace(request, limit=min(request.limit, WARM_TOKENS)) for request in requests]))
    found = []
    for _ in range(repeats):
        _forget_texts(engine)
        synchronize(engine.target)
        start = perf_counter()
        rollouts = list(engine.generate(requests))
        synchronize(engine.target)
        found.append(sum(len(rollout.answer) for rollout in rollouts) / (perf_counter() - start))
    return found


def _forget_texts(engine: Engine) -> None:
    """What was learnt from an answer must not help to say it again."""
    if engine.proposer is not None:
        engine.proposer.forget_texts()
