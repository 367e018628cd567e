"""What the recipe says about learning from the target's answers to prompts, given with the drafter as it is. The parser reads this: no
heavy imports."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.errors import UserError

REPLAYS = ("rounds", "text", "anchors", "first_rejection")


def scored_streams(streams: tuple[bool, bool], replay: str) -> tuple[bool, bool]:
    """Of what an objective scores (`Objective.streams`), what is scored of replayed rounds: places of a first rejection are in the accepted stream."""
    accepted, rejected = streams
    return accepted, rejected and replay == "rounds"


def require_answering(section: str, config: Any, positive: Sequence[str], replays: Sequence[str]) -> None:
    """UserError, naming the recipe's section, where prompts cannot be answered or replayed so. `positive`: keys that must be 1 or more."""
    for name in positive:
        if getattr(config, name) < 1:
            raise UserError(f"{section}.{name} is {getattr(config, name)}, but must be 1 or more.")
    if config.max_tokens < 2:
        raise UserError(
            f"{section}.max_tokens is {config.max_tokens}, but must be 2 or more: the first token of an answer is not drafted, so there would be "
            "nothing to learn."
        )
    if config.drafts is not None and config.drafts < 1:
        raise UserError(
            f"{section}.drafts is {config.drafts}, but must be 1 or more, or null to draft as deep as the drafter goes."
        )
    if not 0 <= config.temperature < math.inf:
        raise UserError(f"{section}.temperature is {config.temperature}, but must be 0 (greedy) or more.")
    if config.replay not in replays:
        raise UserError(f"{section}.replay is {config.replay!r}, but must be one of {', '.join(replays)}.")


@dataclass(frozen=True)
class OnPolicyConfig:
    """How often prompts are answered with the drafter as it is, and what is learnt from the answers. An answered prompt is a rollout.

    Counts are over all processes: an optimizer step learns from the same rollouts however many share it.
    """

    rollouts: int = 256
    """Prompts answered at each refresh."""
    every: int = 8
    """Optimizer steps between two refreshes."""
    batch: int = 32
    """Rollouts of an optimizer step."""
    buffer: int = 1024
    """Rollouts kept; the oldest make room for new ones."""
    fresh: float = 0.5
    """Share of a step's rollouts that come from the newest refresh, 0 to 1, as far as it has enough of them to use none twice before the
    next one; the others are drawn from older refreshes. All are of the newest one where the buffer keeps no other."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    drafts: int | None = None
    """Draft tokens a round while prompts are answered; null drafts as deep as the drafter goes."""
    temperature: float = 0.0
    """At which the target answers; 0 is greedy."""
    slots: int = 64
    """Prompts answered at once by one process."""
    replay: str = "rounds"
    """rounds: the drafts of every round, rejected ones too, behind the anchors from which they were drafted (Draft-OPD). text: the answers
    as any other text. anchors: as text too, but drafts begin where those of the rounds did. first_rejection: of every round only the place of the first rejected draft (online speculative decoding)."""
    from_random: bool = False
    """Begin also with a drafter that has learnt nothing: its drafts are rejected at once, so its rounds teach little."""

    def __post_init__(self):
        require_answering("on_policy", self, ("rollouts", "every", "batch", "buffer", "max_tokens", "slots"), REPLAYS)
        if not 0 <= self.fresh <= 1:
            raise UserError(f"on_policy.fresh is {self.fresh}, but is a share: it must lie between 0 and 1.")
        for name in ("rollouts", "buffer"):
            if getattr(self, name) % self.batch:
                raise UserError(
                    f"on_policy.{name} is {getattr(self, name)}, but must be a multiple of on_policy.batch {self.batch}; "
                    f"set it to {self._nearest(getattr(self, name))}."
                )
        if self.buffer < self.rollouts:
            raise UserError(
                f"on_policy.buffer is {self.buffer}, but must hold at least the {self.rollouts} rollouts of a refresh; "
                f"raise it to {self.rollouts} or more, or lower on_policy.rollouts."
            )

    @property
    def keeps_rounds(self) -> bool:
        """Whether what is learnt depends on how the answers were drafted."""
        return self.replay != "text"

    @property
    def as_text(self) -> bool:
        """Whether the labels are the answers' own tokens at every depth, as in supervised training."""
        return self.replay in ("text", "anchors")

    def _nearest(self, count: int) -> str:
        below = count - count % self.batch
        return f"{below} or {below + self.batch}" if below else f"{self.batch}"
