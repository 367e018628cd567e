"""What the recipe says about a drafter that learns while it serves (`drafttrain adapt`). The parser reads this: no heavy imports."""

from dataclasses import dataclass

from drafttrain.errors import UserError
from drafttrain.tasks.on_policy_config import REPLAYS, OnPolicyConfig, require_answering


@dataclass(frozen=True)
class AdaptConfig:
    """Online Speculative Decoding (arXiv 2310.07177): how often the drafter learns from the prompts that it helps to answer, and what guards it.

    Weights are kept and trained in fp32, and served in the type of the target. Of `trainer` only gradient_clip_val is used.
    """

    every: int = 8
    """Answered prompts that an update learns from."""
    steps: int = 1
    """Optimizer steps of an update."""
    buffer: int | None = None
    """Newest answers that an update may learn from: its first step learns from the `every` new ones, each further step from as many drawn from these.
    null: all steps learn from the new ones (as published). They are kept in memory alone, so a run that is started again begins with none."""
    replay: str = "first_rejection"
    """As on_policy.replay. first_rejection (as published): of every round only the place of the first rejected draft, where the target put its own token.
    rounds: all that the objective scores of a round; with OnPolicyDistillation that is what was rejected too. text: the answers as supervised training
    reads them. anchors: as text, but drafts begin where those of the rounds did."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    drafts: int | None = None
    """Draft tokens a round; null drafts as deep as the drafter was trained."""
    temperature: float = 0.0
    """At which the target answers; 0 is greedy."""
    slots: int = 1
    """Prompts answered at once, of those that have come; never more than the next update waits for."""
    hold_out_every: int = 8
    """Each so many-th prompt is answered, but never learnt from: held out for the guard."""
    guard_prompts: int = 32
    """The newest held-out prompts, on which the guard measures tau, greedily. A change of domain reaches all of them within
    guard_prompts * hold_out_every prompts; until then the guard also keeps what was learnt of the domain before."""
    guard_every: int = 16
    """Updates between two measurements by the guard."""
    fall: float = 0.05
    """Share of tau, from 0 to below 1, that an update may lose against the last drafter that passed, on the same prompts; if it loses more,
    weights and optimizer go back to that one."""

    def __post_init__(self):
        require_answering("adapt", self, ("every", "steps", "max_tokens", "slots", "guard_prompts", "guard_every"), REPLAYS)
        if self.buffer is not None and (
            isinstance(self.buffer, bool) or not isinstance(self.buffer, int) or self.buffer < self.every
        ):
            raise UserError(
                f"adapt.buffer is {self.buffer!r}, but must be a number of answers, at least the {self.every} of an update (adapt.every), or null."
            )
        if self.hold_out_every < 2:
            raise UserError(f"adapt.hold_out_every is {self.hold_out_every}, but must be 2 or more: the others are learnt from.")
        if not 0 <= self.fall < 1:
            raise UserError(f"adapt.fall is {self.fall}, but is a share of tau: it must be 0 or more, and below 1.")

    @property
    def rolling(self) -> OnPolicyConfig:
        """How answers are made, in the words of on-policy training."""
        return OnPolicyConfig(
            max_tokens=self.max_tokens, drafts=self.drafts, temperature=self.temperature, slots=self.slots, replay=self.replay
        )

    @property
    def as_text(self) -> bool:
        """Whether the labels are the answers' own tokens at every depth, as in supervised training."""
        return self.rolling.as_text
