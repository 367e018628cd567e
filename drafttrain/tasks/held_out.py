"""tau on held-out prompts while training: the number that a loss cannot give.

Every rank answers its share of the prompts with the drafter as it is, greedily, and the counts are added up. The random stream is
put back, so that measuring changes nothing in the training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.decoding.quick import held_out_tau
from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.window import all_reduce
from drafttrain.types import Request


@dataclass(frozen=True)
class HeldOut:
    """What a measurement gave, over all ranks."""

    tau: float
    acceptance_by_depth: list[float]
    """Accepted at depth k / rounds that reached k."""
    tokens: int

    def metrics(self) -> dict[str, float]:
        """For the logger."""
        depths = {f"held_out/acceptance_depth_{k}": value for k, value in enumerate(self.acceptance_by_depth, 1)}
        return {"held_out/tau": self.tau, **depths}


def measure(
    target: Target, net: DrafterNet, requests: Sequence[Request], config: CheckpointConfig, rank: int, world: int
) -> HeldOut:
    """Called on every rank with the same requests."""
    mine = list(requests[rank::world])
    K = config.drafts
    sums = torch.zeros(K + 2, dtype=torch.float64)  # rounds, tokens, accepted at depth 1..K
    cuda = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        if mine:
            counts = held_out_tau(target, net, mine, K, config.slots)
            sums[:2] = torch.tensor([counts.rounds, counts.tokens])
            sums[2:] = torch.tensor(counts.reach_by_depth, dtype=torch.float64) * counts.rounds
    rounds, tokens, *accepted = all_reduce(sums.to(target.device)).tolist()
    reached = [rounds, *accepted[:-1]]
    return HeldOut(
        tau=1.0 + sum(accepted) / max(rounds, 1.0),
        acceptance_by_depth=[a / max(r, 1.0) for a, r in zip(accepted, reached, strict=True)],
        tokens=int(tokens),
    )
