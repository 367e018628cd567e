"""Prompts answered with the drafter as it is, and micro-batches made of the answers.

A step of an on-policy run learns from one rollout of every lane (rollout_buffer.py). Where a refresh is due, each process first answers the
prompts of its own lanes with its own copy of the drafter, by the engine that also validates it. Processes then wait for each other, so that
they stay in step however long their answers are.

The gradient of a step is that of its rollouts, however they are shared over processes, micro-batches and rows. What is drawn for a row is not:
anchors of answers that are read as text (DFlash's `anchors`), and EAGLE's noise, are then other ones of the same distribution.

Shapes: B packed rows, T tokens, N scored elements.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from drafttrain.data.stream import MicroBatch, Share, window_counts
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import tried_of
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.base import DrafterNet
from drafttrain.layouts import chain_layout
from drafttrain.losses import Objective
from drafttrain.replay import Packed, pack_rollouts, replay_layout, round_anchors
from drafttrain.target.target import Target
from drafttrain.tasks.on_policy_config import OnPolicyConfig, scored_streams
from drafttrain.tasks.on_policy_start import drafts_of, require_streams
from drafttrain.tasks.rollout_buffer import PromptOrder, RolloutBuffer, RolloutPlan, number_of, requests
from drafttrain.tasks.window import all_reduce
from drafttrain.types import Features, Layout, Request, Rollout, Sequences


class Turn:
    """What the loader says of a micro-batch: its number in the window, and whether the optimizer steps behind it. Its content is made when it is
    trained, because rollouts need the weights of that very step. (Not a dataclass: Lightning would take it apart.)"""

    def __init__(self, micro: int, last: bool):
        self.micro, self.last = micro, last


class Turns(IterableDataset):
    """Endless turns, `accumulate` in a window."""

    def __init__(self, accumulate: int):
        self.accumulate = accumulate

    def __iter__(self) -> Iterator[Turn]:
        while True:
            for micro in range(self.accumulate):
                yield Turn(micro, micro == self.accumulate - 1)


class Roller:
    """Answers prompts with a copy of the drafter, in the type of the target: as it is served. Engine and CUDA graphs are kept."""

    def __init__(self, target: Target, copy: DrafterNet, config: OnPolicyConfig, seed: int):
        """`copy`: a net of the trained one's shape, which nobody else uses."""
        self.drafts = drafts_of(config, copy)
        self.copy = copy.eval().requires_grad_(False)
        for weight in self.copy.parameters():  # not its buffers: rotary frequencies of 8 bits would put far tokens elsewhere
            weight.data = weight.data.to(target.dtype)
        sampling = Sampling(temperature=config.temperature, seed=seed)
        self.engine = Engine(
            target, proposer=ChainProposer(copy, self.drafts), sampling=sampling, slots=config.slots, taps=copy.needs.taps,
            keep_features=True, keep_rounds=config.keeps_rounds,
        )  # fmt: skip

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """The drafter's weights as they are now, to where the recorded graphs look for them."""
        with torch.no_grad():
            for name, weight in self.copy.named_parameters():
                weight.copy_(weights[name])

    def answer(self, prompts: Sequence[Request]) -> list[Rollout]:
        return list(self.engine.generate(prompts))


PATIENCE = timedelta(days=30)


class Meeting:
    """Where ranks wait for the last one. The trainer's own groups would give up after half an hour, and NCCL would keep a GPU busy with waiting."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def prepare(self) -> None:
        """Called on every rank while they are in step."""
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def wait(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


class RolloutLog:
    """What is watched of rollouts since the last log, summed over all ranks when read."""

    def __init__(self, drafts: int):
        self.drafts = drafts
        self._start()

    def _start(self) -> None:
        self._rounds: list[tuple[int, int]] = []
        self._ages: list[float] = []
        self._tokens, self._rolling, self._waiting, self._began = 0, 0.0, 0.0, time.monotonic()

    def restart(self) -> None:
        """What came before was not training."""
        self._start()

    def skip_time(self, seconds: float) -> None:
        self._began += seconds

    def rolled(self, rollouts: Sequence[Rollout], seconds: float, waited: float) -> None:
        """A refresh: what came of it, how long it took, and how long this rank waited for the others."""
        for r in rollouts:
            self._rounds += zip(r.accepted, tried_of(r, self.drafts), strict=True)
        self._tokens += sum(len(r.answer) for r in rollouts)
        self._rolling += seconds
        self._waiting += waited

    def learnt(self, staleness: float) -> None:
        """A step: the mean age of all its rollouts, which every rank knows."""
        self._ages.append(staleness)

    def read(self, device: torch.device) -> dict[str, float]:
        """Called on every rank. `rollout/tau` and acceptance are of the newest rollouts; shares of time are means over ranks."""
        K, spent = self.drafts, max(time.monotonic() - self._began, 1e-9)
        sums = torch.zeros(2 * K + 4, dtype=torch.float64)
        for count, asked in self._rounds:
            sums[:asked] += 1
            sums[K : K + count] += 1
        sums[2 * K :] = torch.tensor([self._tokens, self._rolling / spent, self._waiting / spent, 1.0])
        *places, tokens, rolling, waiting, world = all_reduce(sums.to(device, torch.float32)).tolist()
        tried, accepted = places[:K], places[K:]
        found = {
            "time/rollout": rolling / world,
            "time/sync": waiting / world,
            "time/train": 1 - (rolling + waiting) / world,
            "rollout/staleness": float(np.mean(self._ages)) if self._ages else 0.0,
        }
        if tried[0]:
            found["rollout/tau"] = 1 + sum(accepted) / tried[0]
            found |= {
                f"rollout/acceptance_depth_{k}": a / max(t, 1) for k, (a, t) in enumerate(zip(accepted, tried, strict=True), 1)
            }
            found["rollout/tokens_per_second"] = tokens / max(rolling / world * spent, 1e-9)
        self._start()
        return found


class Replayer:
    """Windows of micro-batches from a buffer of rollouts, refreshed where they are due."""

    def __init__(
        self, net: DrafterNet, objective: Objective, roller: Roller, plan: RolloutPlan, prompts: Sequence[Request], share: Share, length: int
    ):  # fmt: skip
        """`prompts`: those that the rollouts answer, endlessly. `length`: tokens of a packed row. UserError if the processes cannot share a step evenly."""
        self.net, self.objective, self.roller, self.plan, self.prompts = net, objective, roller, plan, prompts
        self.share, self.length = share, length
        require_streams(plan.config, objective)
        self.streams = scored_streams(objective.streams, plan.config.replay)
        self.order = PromptOrder(len(prompts), plan.seed)
        self.buffer = RolloutBuffer(plan, share.rank, share.world)
        self.log = RolloutLog(roller.drafts)
        self._meeting = Meeting()
        self._like: Features | None = None
        self._schedule: tuple[int, np.ndarray] | None = None

    def due(self, step: int) -> bool:
        """Whether prompts are to be answered before this step (0, 1, ...)."""
        return step % self.plan.config.every == 0

    def refresh(self, step: int, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Answer the prompts that stand before this step. Called on every rank."""
        refresh = step // self.plan.config.every
        self._meeting.prepare()
        _settle(device)
        began = time.monotonic()
        self.roller.take(weights)
        rollouts = self.roller.answer(requests(self.prompts, self.order, self.buffer.missing(refresh)))
        for rollout in rollouts:
            self.buffer.add(number_of(rollout), rollout)
        _settle(device)
        done = time.monotonic()
        self._meeting.wait()
        self.log.rolled(rollouts, done - began, time.monotonic() - done)

    def window(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step, on the CPU."""
        config, share = self.plan.config, self.share
        refresh, within = divmod(step, config.every)
        if self._schedule is None or self._schedule[0] != refresh:
            self._schedule = refresh, self.plan.schedule(refresh)
        of_all = self._schedule[1][within]
        self.log.learnt(self.plan.staleness(of_all.tolist(), step))
        numbers = of_all[share.rank :: share.world]
        parts = np.array_split(numbers, share.accumulate)
        sequences, features, layouts = zip(
            *(self._micro(step, micro, part.tolist()) for micro, part in enumerate(parts)), strict=True
        )
        counts = window_counts(sequences, layouts, partial(self.objective.counts, depth=self.net.needs.depth))
        return [
            MicroBatch(*made, micro, micro == len(parts) - 1, None if micro else counts)
            for micro, made in enumerate(zip(sequences, features, layouts, strict=True))
        ]

    def _micro(self, step: int, micro: int, numbers: list[int]) -> tuple[Sequences, Features, Layout]:
        config, net = self.plan.config, self.net
        rollouts = [self.buffer[number] for number in numbers]
        packed = pack_rollouts(rollouts, self.length, multiple=self.share.rows, like=self._like)
        self._like = self._like or _widths(packed.features)
        place = self.share.rank * self.share.accumulate + micro
        layout = taught_by(net, packed, rollouts, config.replay, self.streams, (self.plan.seed, step, place))
        return packed.sequences, packed.features, layout


def taught_by(
    net: DrafterNet, packed: Packed, rollouts: Sequence[Rollout], replay: str, streams: tuple[bool, bool], seed: tuple[int, ...]
) -> Layout:  # fmt: skip
    """What packed rollouts teach, replayed as `OnPolicyConfig.replay` says. `seed`: what is drawn of a text (a block drafter's anchors) follows from it
    and from the packed row."""
    sequences, depth = packed.sequences, net.needs.depth
    if replay == "text":
        return net.layout(sequences, numbers=[(*seed, row) for row in range(len(sequences.ids_BT))])
    if replay == "anchors":
        return chain_layout(sequences, depth, net.speaks_V, round_anchors(packed, rollouts))
    first = replay == "first_rejection"
    return replay_layout(packed, rollouts, depth, net.speaks_V, streams=streams, first_rejection_only=first)


def _widths(features: Features) -> Features:
    """How wide features are, and of which type, with no tokens."""
    return Features(features.taps_BTAD[:0, :0].clone(), features.final_BTD[:0, :0].clone())


def _settle(device: torch.device) -> None:
    """What was queued before is not to be timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
