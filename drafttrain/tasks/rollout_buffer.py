"""Which rollouts an on-policy run makes, keeps and learns from, worked out from numbers alone; and those that a process keeps.

    rollout n = refresh * rollouts + i      i < rollouts, answers prompt order[n], and comes into
    lane    j = n mod batch                 which keeps its newest buffer / batch rollouts

A refresh stands before each `every` optimizer steps, and a step draws one rollout from every lane. Rank r of W owns the lanes j = r mod W,
so a step learns from the same rollouts, with the same numbers, however many processes share it. All that is drawn follows from the seed
and numbers: nothing needs to be saved but the rollouts themselves.

How many of a lane's draws are of the newest refresh e, with x = fresh * every:

    f_j(e) = floor((e+1) x + j / batch) - floor(e x + j / batch)

which is x where x is whole; else the lanes take turns, and all of them together have floor(batch (e+1) x) - floor(batch e x) (Hermite's
identity), so the share is held also where `every` is 1.

Letters: S steps between two refreshes, J lanes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

import numpy as np

from drafttrain.errors import UserError
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.types import Request, Rollout

ORDER, DRAWS = 1, 2
"""What random numbers are for. They stand before the other words of a seed: NumPy takes [a, b] and [a, b, 0] for the same one."""


@dataclass(frozen=True)
class RolloutPlan:
    """The numbers of rollouts: when each is made, where it is kept, when it is learnt from."""

    config: OnPolicyConfig
    seed: int

    def made(self, refresh: int) -> range:
        """Numbers of the rollouts that a refresh makes."""
        return range(refresh * self.config.rollouts, (refresh + 1) * self.config.rollouts)

    def lane(self, number: int) -> int:
        return number % self.config.batch

    def lanes(self, rank: int, world: int) -> range:
        """The lanes of a process. UserError if the processes cannot share a step evenly."""
        if self.config.batch % world:
            raise UserError(
                f"on_policy.batch is {self.config.batch}, which {world} processes cannot share evenly; set it to a multiple of {world}, or start "
                "another number of processes."
            )
        return range(rank, self.config.batch, world)

    def last_refresh(self, step: int) -> int:
        """The newest refresh once `step` optimizer steps are done, before the next one begins; -1 is none."""
        return (step - 1) // self.config.every

    def kept(self, lane: int, refresh: int) -> range:
        """Numbers of the rollouts that a lane holds after a refresh, ascending."""
        config = self.config
        end = (refresh + 1) * config.rollouts + lane
        count = min(config.buffer, (refresh + 1) * config.rollouts) // config.batch
        return range(end - count * config.batch, end, config.batch)

    def age(self, number: int, step: int) -> int:
        """Optimizer steps that were done between the making of a rollout and step number `step` (0, 1, ...)."""
        return step - number // self.config.rollouts * self.config.every

    def staleness(self, numbers: Sequence[int], step: int) -> float:
        """Mean age of the rollouts of step number `step`."""
        return float(np.mean([self.age(int(number), step) for number in numbers]))

    def schedule(self, refresh: int) -> np.ndarray:
        """Numbers of the rollouts that the steps behind a refresh learn from [S, J], int64.

        The lanes of rank r of W are the columns [:, r::W].
        """
        return np.stack([self._draws(refresh, lane) for lane in range(self.config.batch)], axis=1)

    def _draws(self, refresh: int, lane: int) -> np.ndarray:
        """One lane's draws [S]: none twice while there are others."""
        every = self.config.every
        random = np.random.default_rng([self.seed, DRAWS, refresh, lane])
        kept = np.array(self.kept(lane, refresh), dtype=np.int64)
        newest, older = kept[kept >= self.made(refresh).start], kept[kept < self.made(refresh).start]
        fresh = min(self._fresh(refresh, lane), len(newest))
        drawn = random.permutation(older)[: every - fresh]
        drawn = np.concatenate([drawn, random.permutation(newest)[: every - len(drawn)]])
        while len(drawn) < every:
            drawn = np.concatenate([drawn, random.permutation(kept)[: every - len(drawn)]])
        return random.permutation(drawn)

    def _fresh(self, refresh: int, lane: int) -> int:
        """f_j(e) of the top of this file, in exact numbers."""
        x = Fraction(str(self.config.fresh)) * self.config.every
        offset = Fraction(lane, self.config.batch)
        return floor((refresh + 1) * x + offset) - floor(refresh * x + offset)


class PromptOrder:
    """Which prompt a rollout answers: every prompt once, then once more in another order, endlessly."""

    def __init__(self, prompts: int, seed: int):
        """ValueError if there are no prompts."""
        if prompts < 1:
            raise ValueError("there are no prompts to put in order")
        self.prompts, self.seed = prompts, seed
        self._recent: tuple[int, np.ndarray] | None = None

    def __getitem__(self, number: int) -> int:
        """Index of the prompt that rollout `number` answers."""
        epoch, within = divmod(number, self.prompts)
        if self._recent is None or self._recent[0] != epoch:
            self._recent = epoch, np.random.default_rng([self.seed, ORDER, epoch]).permutation(self.prompts)
        return int(self._recent[1][within])


def requests(prompts: Sequence[Request], order: PromptOrder, numbers: Sequence[int]) -> list[Request]:
    """The prompts that these rollouts answer. Their keys begin with the number, so a prompt that comes again is another request, with a
    random stream of its own."""
    found = [(number, prompts[order[number]]) for number in numbers]
    return [replace(prompt, key=f"{number}/{prompt.key}") for number, prompt in found]


def number_of(rollout: Rollout) -> int:
    """Of the rollout that one of these requests asked for."""
    return int(rollout.key.partition("/")[0])


class RolloutBuffer:
    """The rollouts that one process keeps, by number: the newest of each of its lanes."""

    def __init__(self, plan: RolloutPlan, rank: int, world: int):
        self.plan = plan
        self.lanes = plan.lanes(rank, world)
        self._kept: dict[int, Rollout] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept))

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def __getitem__(self, number: int) -> Rollout:
        """KeyError if it was not made yet, was dropped, or is of another process."""
        return self._kept[number]

    def missing(self, refresh: int) -> list[int]:
        """Numbers of this process's lanes that a refresh makes and that are not here."""
        return [n for n in self.plan.made(refresh) if self.plan.lane(n) in self.lanes and n not in self]

    def add(self, number: int, rollout: Rollout) -> None:
        """Keeps a rollout, in any order within a refresh, and drops the one whose room it takes. ValueError if its lane is not here."""
        if self.plan.lane(number) not in self.lanes:
            raise ValueError(f"rollout {number} is of lane {self.plan.lane(number)}, which another process keeps")
        self._kept[number] = rollout
        self._kept.pop(number - self.plan.config.buffer, None)
