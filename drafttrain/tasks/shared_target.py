"""A target whose weights are shared out among the processes of a job, because they do not fit on one GPU.

Every process holds a part of each layer (tensor parallelism, by transformers' own plan), so all of them take part in every read, of the same rows at the
same time. Their micro-batches differ. So each read is of everybody's, in turn, and everybody keeps the features of its own:

    for r in ranks:  all read the rows of r;  r keeps what was found

That is as much work for each GPU as reading its own rows with a whole target. What a process would ask of the target on its own, whenever it likes
(answers: tau on held-out prompts, rollouts), it cannot ask here.

Shapes: B rows, T tokens, W processes.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from drafttrain.errors import UserError
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.types import Features, Sequences

FIELDS = tuple(Sequences.__dataclass_fields__)


class Processes(Protocol):
    """What is asked of a topology."""

    @property
    def world(self) -> int: ...
    @property
    def nodes(self) -> int: ...


class SharedRead:
    """Features of this process's rows, from a target that all processes read with. Called by all of them, with rows of one shape."""

    def __init__(self, read: Callable[[Sequences], Features]):
        self._read = read

    def __call__(self, sequences: Sequences) -> Features:
        mine_4BT = torch.stack([getattr(sequences, name).long() for name in FIELDS])
        everybody = [torch.empty_like(mine_4BT) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine_4BT)
        kept = None
        for rank, rows_4BT in enumerate(everybody):
            values = dict(zip(FIELDS, rows_4BT, strict=True))
            found = self._read(Sequences(**values | {"supervised_BT": values["supervised_BT"].bool()}))
            kept = found if rank == dist.get_rank() else kept
        assert kept is not None
        return kept


def require_sharers(speed: SpeedConfig, topology: Processes) -> None:
    """UserError where `speed.shard_target` finds one process, or several machines."""
    if speed.shard_target and (topology.world == 1 or topology.nodes > 1):
        raise UserError(
            f"speed.shard_target is true, which shares the target among all processes of one machine, but there are {topology.world} on {topology.nodes}; "
            "start 2 or more on one machine with torchrun, or set it to false."
        )


def require_no_answers(speed: SpeedConfig, checkpoint: CheckpointConfig, on_policy: bool, weights: str | None = None) -> None:
    """UserError where processes that share a target would each ask it for answers, or hold it rounded."""
    if not speed.shard_target:
        return
    if weights is not None:
        raise UserError(
            f"speed.shard_target is true and target.weights is {weights}, but rounded weights cannot be shared out; set one of them to false or null."
        )
    if on_policy:
        raise UserError(
            "speed.shard_target is true, but task is on_policy, where every process answers prompts of its own; set it to false, or train from stored chats."
        )
    if checkpoint.tau_prompts:
        raise UserError(
            f"speed.shard_target is true and checkpoint.tau_prompts is {checkpoint.tau_prompts}, but processes that share a target cannot each answer "
            "prompts of their own; set checkpoint.tau_prompts to 0 and measure tau where the drafter is served."
        )
