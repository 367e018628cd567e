"""What an on-policy run begins with, and what it is refused for: asked by training, and by `plan` before it.

Letters: K greatest depth that is drafted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from drafttrain.data.store import TokenStore
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.losses import Objective
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.types import Layout, Request


def drafts_of(config: OnPolicyConfig, net: DrafterNet) -> int:
    """K, draft tokens of a round while prompts are answered."""
    return config.drafts or net.needs.depth


def require_refreshes(config: OnPolicyConfig, steps: int) -> None:
    """UserError where a run of so many steps would never answer a second time."""
    if config.every > steps:
        raise UserError(
            f"on_policy.every is {config.every}, but the run ends after {steps} steps (trainer.max_steps); set every to that or less."
        )


def require_trained(config: OnPolicyConfig, start: str | None) -> None:
    """UserError where a run would begin with a drafter that has learnt nothing. `start`: checkpoint.start."""
    if start is None and not config.from_random:
        raise UserError(
            "task is on_policy, but checkpoint.start is null, and a drafter that has learnt nothing drafts nothing worth learning from; set "
            "checkpoint.start to a trained one (runs/<name>/checkpoints/best), or on_policy.from_random to true."
        )


def require_streams(config: OnPolicyConfig, objective: Objective) -> None:
    """UserError where nothing is scored of what is replayed."""
    if config.replay == "first_rejection" and not objective.streams[0]:
        raise UserError(
            "on_policy.replay is first_rejection, which learns the target's token in the place of a rejected draft, but "
            "objective.init_args.accepted_weight is 0; raise it, or set replay to rounds."
        )


def require_text(objective: Objective) -> None:
    """UserError of an objective that does not learn from texts without rounds, as at the first step."""
    nothing = Layout(*[torch.empty(0, dtype=torch.int64)] * len(fields(Layout)))
    objective.counts(nothing, 1)


@dataclass(frozen=True)
class FoundPrompts:
    """The prompts of the chats, each once."""

    answered: list[Request]
    """Those that the target has room to answer, and a row for a draft."""
    left_out: int
    """How many are not."""
    limit: int
    """Most tokens of an answer."""
    length: int
    """Tokens of a packed row."""

    def lines(self) -> Iterator[str]:
        """What is left out, for people."""
        if self.left_out:
            yield (
                f"{self.left_out:,} prompts leave no room for {self.limit} tokens, or for a draft within a row of {self.length}, and are left out"
            )


def find_prompts(store: TokenStore, config: OnPolicyConfig, length: int, positions: int | None, drafts: int) -> FoundPrompts:
    """What rollouts answer.

    Args:
        length: Tokens of a packed row (data.length).
        positions: Of the target; None where they are not known, and its room is not asked for.
        drafts: K.

    Raises:
        UserError: no prompt is left.
    """
    limit = config.max_tokens
    room = length - 2 if positions is None else min(length - 2, positions - limit - drafts - 1)
    every = {request.ids: request for request in store.requests(limit)}.values()
    answered = [request for request in every if 1 <= len(request.ids) <= room]
    if not answered:
        known = "" if positions is None else f" {positions}"
        raise UserError(
            f"{store.folder}/ has no prompt that leaves room for {limit} tokens within the target's{known} positions, and for a draft within a row "
            f"of {length}; lower on_policy.max_tokens, or raise data.length."
        )
    return FoundPrompts(answered, len(every) - len(answered), limit, length)
