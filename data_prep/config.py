"""The recipe's `prepare:` section. Loads nothing heavy: help texts and errors are made from it."""

from dataclasses import dataclass, field
from math import inf

from data_prep.engines import Engine, LocalEngine
from data_prep.quality import QualityConfig
from data_prep.sources import PromptSource, require
from drafttrain.errors import UserError

MOST_SAMPLES = 10_000
"""All that is asked is listed before the first answer is made."""


@dataclass(frozen=True)
class PrepareConfig:
    """Which prompts the target answers, and how."""

    prompts: list[PromptSource]
    """Where prompts come from: SelfPrompts, JsonlPrompts, DatasetPrompts, StorePrompts. All have a `weight`, or none has."""
    count: int | None = None
    """Most training prompts, after the mix of the sources; null = as many as there are (with weights: as the weights allow)."""
    dedupe: str = "exact"
    """exact: drop prompts that differ in case, spacing and last punctuation only. near: those as alike as `near_duplicate` too."""
    held_out: int = 20
    """Prompts split off before answering, for measuring tau; answered greedily, never trained on."""
    held_out_source: str | None = None
    """Name of the source that held-out prompts come from; null = all."""
    near_duplicate: float = 0.7
    """Training prompts at least this similar to a held-out one are dropped (share of common three-word runs, Jaccard); with
    `dedupe: near` any prompt this similar to an earlier one."""
    samples: int = 1
    """Training answers sampled for each prompt, each from its own random stream; 0 with `greedy`: greedy answers alone."""
    greedy: bool = False
    """Answer every training prompt greedily too: text that a drafter meets when it is served at temperature 0."""
    temperature: float = 0.7
    """Temperature of the sampled training answers."""
    top_p: float = 1.0
    """Nucleus of the sampled training answers."""
    thoughts: str = "supervised"
    """supervised, or context: reasoning up to `</think>` stays in the text but is not trained on."""
    turns: str = "all"
    """Which answers of a chat of several turns are supervised: all or last."""
    quality: QualityConfig = field(default_factory=QualityConfig)
    """Which answers are dropped."""
    max_tokens: int = 256
    """Most tokens of a training answer."""
    max_prompt: int = 512
    """Most tokens of a prompt with its template; longer ones are dropped."""
    held_out_max_tokens: int = 256
    """Most tokens of a held-out answer."""
    engine: Engine = field(default_factory=LocalEngine)
    """Who speaks for the target: LocalEngine, OpenAIServer."""
    slots: int = 32
    """Chats answered at once by LocalEngine. May be changed between restarts."""
    chunk: int = 64
    """Prompts per shard: the unit of work that a killed run does again."""
    seed: int = 0
    """Seed of the split and of every prompt's own random stream."""

    def __post_init__(self) -> None:
        require(bool(self.prompts), "prepare.prompts", self.prompts, "a list with at least one source, such as SelfPrompts")
        names = [source.name for source in self.prompts]
        if len(set(names)) != len(names):
            raise UserError(f"prepare.prompts has two sources of one name ({', '.join(names)}); give each its own `name`.")
        if self.held_out_source is not None and self.held_out_source not in names:
            raise UserError(f"prepare.held_out_source is {self.held_out_source}, but the sources are {', '.join(names)}.")
        with_weight = [source.name for source in self.prompts if source.weight is not None]
        if with_weight and len(with_weight) < len(names):
            without = next(name for name in names if name not in with_weight)
            raise UserError(
                f"prepare.prompts gives {with_weight[0]} a weight, but {without} none; give every source a weight, or none of them."
            )
        require(self.count is None or self.count >= 1, "prepare.count", self.count, "at least 1, or null for all")
        for name in ("held_out", "max_tokens", "max_prompt", "held_out_max_tokens", "slots", "chunk"):
            require(getattr(self, name) >= 1, f"prepare.{name}", getattr(self, name), "at least 1")
        require(
            0 < self.near_duplicate <= 1,
            "prepare.near_duplicate",
            self.near_duplicate,
            "above 0 and at most 1 (1 = identical only)",
        )
        for name, choices in (("dedupe", ("exact", "near")), ("thoughts", ("supervised", "context")), ("turns", ("all", "last"))):
            require(getattr(self, name) in choices, f"prepare.{name}", getattr(self, name), " or ".join(choices))
        require(
            (not self.greedy) <= self.samples <= MOST_SAMPLES,
            "prepare.samples",
            self.samples,
            f"1 to {MOST_SAMPLES:,}, or 0 with prepare.greedy",
        )
        require(0 <= self.temperature < inf, "prepare.temperature", self.temperature, "0 (greedy) or more")
        if self.temperature == 0 and (self.samples > 1 or self.greedy):
            raise UserError(
                "prepare.temperature is 0, so every answer to a prompt would be the same greedy one; leave prepare.samples at 1 and "
                "prepare.greedy at false, or raise the temperature."
            )
        require(self.seed >= 0, "prepare.seed", self.seed, "0 or more")
        require(0 < self.top_p <= 1, "prepare.top_p", self.top_p, "above 0 and at most 1 (1 = off)")

    @property
    def weights(self) -> dict[str, float] | None:
        """Name of each source -> its weight; None if they have none."""
        found = {source.name: source.weight for source in self.prompts if source.weight is not None}
        return found or None


def require_window(config: PrepareConfig, positions: int) -> None:
    """UserError where the longest prompt with the longest answer has no place among the target's positions."""
    for name in ("max_tokens", "held_out_max_tokens"):
        limit = getattr(config, name)
        if config.max_prompt + limit > positions:
            raise UserError(
                f"prepare.max_prompt {config.max_prompt} + prepare.{name} {limit} is longer than the {positions} "
                "positions of the target; lower one of them."
            )
