"""How drafting is benchmarked: the `bench` section of a recipe."""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from drafttrain.decoding.methods import Chain, Lookup, Method, Tree
from drafttrain.errors import UserError

PLAIN = "plain"
"""How tables call plain decoding, the baseline."""


@dataclass(frozen=True)
class BenchConfig:
    """What `drafttrain bench` measures, and on which questions (the Spec-Bench protocol)."""

    prompts: str | None = None
    """File of questions, one JSON object a line: `turns` and `category` as in Spec-Bench, `messages`, or `prompt`; null = the
    run's held-out prompts."""
    count: int | None = None
    """Use the first N questions of each category; all of them if null."""
    max_tokens: int = 256
    """Most tokens of an answer; Spec-Bench allows 1024."""
    methods: list[Method] = field(default_factory=lambda: [Chain(), Tree(), Lookup()])
    """Ways of drafting, each timed against plain decoding."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy. Stages, batches and draft lengths are measured at the first of them."""
    warm_up: int = 3
    """Questions answered untimed before each method; on a GPU the CUDA graphs of all rounds are recorded before."""
    repeats: int = 3
    """Timed runs over all questions."""
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    """Answers at the same time, for throughput."""
    longest: int | None = 8
    """The first Chain of `methods` is also measured with 1, 2, ... up to this many drafts; null = not."""
    probe: int = 16
    """Questions, taken from every category in turn, that stages, batches and draft lengths are measured on."""

    def __post_init__(self) -> None:
        for name in ("count", "max_tokens", "warm_up", "repeats", "longest", "probe"):
            _at_least_one(name, getattr(self, name))
        for number in self.batches:
            _at_least_one("batches", number)
        if not self.methods:
            raise UserError(
                "bench.methods is empty, so there is nothing to compare with plain decoding: name one, such as Chain."
            )
        if not self.temperatures or not all(0 <= t < inf for t in self.temperatures):
            raise UserError(
                f"bench.temperatures is {self.temperatures}, but must hold numbers of at least 0: 0 is greedy, 1 the target's own distribution."
            )
        for name, values in (("methods", [m.label for m in self.methods]), ("temperatures", self.temperatures)):
            twice = next((value for value, number in Counter(values).items() if number > 1), None)
            if twice is not None:
                raise UserError(f"bench.{name} has {twice} twice: leave one of them out.")


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"bench.{name} is {value}, but must be at least 1: set it to 1 or more.")
