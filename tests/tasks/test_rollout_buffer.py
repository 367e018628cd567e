"""The numbers of an on-policy run against a loop that really makes, keeps and drops its rollouts."""

from collections import Counter, deque
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
import torch
from decoding.verify_cases import chi_square

from drafttrain.errors import UserError
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.rollout_buffer import PromptOrder, RolloutBuffer, RolloutPlan, number_of, requests
from drafttrain.types import Request, Rollout

CONFIGS = {
    "default": OnPolicyConfig(),
    "adapting": OnPolicyConfig(rollouts=8, batch=8, buffer=32, every=1, fresh=0.3),
    "nothing older": OnPolicyConfig(rollouts=16, batch=4, buffer=16, every=6, fresh=0.25),
    "few older": OnPolicyConfig(rollouts=12, batch=4, buffer=20, every=7, fresh=0.4),
    "nothing fresh": OnPolicyConfig(rollouts=8, batch=4, buffer=24, every=3, fresh=0.0),
    "all fresh": OnPolicyConfig(rollouts=16, batch=4, buffer=48, every=3, fresh=1.0),
    "more steps than rollouts": OnPolicyConfig(rollouts=8, batch=4, buffer=16, every=11, fresh=0.5),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
REFRESHES = 9


def rollout(number: int) -> Rollout:
    return Rollout(f"{number}/p", torch.tensor([1, 2, 3]), 1, [1], 0, True, torch.empty(0, dtype=torch.long))


class Loop:
    """Makes rollouts one by one and keeps them in queues, with no arithmetic on numbers but `n % batch`."""

    def __init__(self, config: OnPolicyConfig):
        self.config, self.number, self.step = config, 0, 0
        self.lanes = [deque(maxlen=config.buffer // config.batch) for _ in range(config.batch)]
        self.made_at: dict[int, int] = {}
        self.newest: set[int] = set()

    def refresh(self) -> None:
        self.newest = set()
        for _ in range(self.config.rollouts):
            self.lanes[self.number % self.config.batch].append(self.number)
            self.made_at[self.number] = self.step
            self.newest.add(self.number)
            self.number += 1


@every_config
def test_steps_are_those_of_a_loop_that_makes_keeps_and_drops(config):
    plan, loop = RolloutPlan(config, seed=3), Loop(config)
    for refresh in range(REFRESHES):
        assert plan.last_refresh(loop.step) == refresh - 1
        loop.refresh()
        assert set(plan.made(refresh)) == loop.newest
        assert [list(plan.kept(lane, refresh)) for lane in range(config.batch)] == [list(kept) for kept in loop.lanes]
        schedule = plan.schedule(refresh)
        assert schedule.shape == (config.every, config.batch)
        for numbers in schedule:
            assert all(number in kept for number, kept in zip(numbers, loop.lanes, strict=True))
            ages = [loop.step - loop.made_at[number] for number in numbers]
            assert [plan.age(int(number), loop.step) for number in numbers] == ages
            assert plan.staleness(numbers, loop.step) == pytest.approx(sum(ages) / len(ages))
            loop.step += 1
            assert plan.last_refresh(loop.step) == refresh


@every_config
def test_a_lane_repeats_nothing_while_it_has_others(config):
    plan = RolloutPlan(config, seed=0)
    for refresh in range(REFRESHES):
        for lane, drawn in enumerate(plan.schedule(refresh).T):
            times = Counter(drawn.tolist())
            kept = plan.kept(lane, refresh)
            assert {number % config.batch for number in times} == {lane}
            assert max(times.values()) == -(-config.every // len(kept)), "as even as it can be"
            if config.every >= len(kept):
                assert set(times) == set(kept)


@every_config
def test_the_share_of_fresh_rollouts_is_the_one_asked_for(config):
    plan, fresh = RolloutPlan(config, seed=1), Fraction(str(config.fresh))
    per_lane = config.rollouts // config.batch
    asked, got = Fraction(0), 0
    for refresh in range(2 * REFRESHES):
        schedule = plan.schedule(refresh)
        found = (schedule >= plan.made(refresh).start).sum(0)
        older = len(plan.kept(0, refresh)) - per_lane
        wanted = fresh * config.every
        if older == 0:
            assert (found == config.every).all()
        elif ceil(wanted) <= per_lane and older >= config.every - floor(wanted):
            assert set(found.tolist()) <= {floor(wanted), ceil(wanted)}
            asked, got = asked + wanted * config.batch, got + int(found.sum())
            assert abs(got - asked) < 1, "the remainders of all lanes together stay below one rollout"
    if config in (CONFIGS["default"], CONFIGS["adapting"], CONFIGS["all fresh"]):
        assert asked > REFRESHES


def test_shares_where_the_buffer_sets_the_bounds():
    def found(config, refresh):
        plan = RolloutPlan(config, seed=0)
        return set((plan.schedule(refresh) >= plan.made(refresh).start).sum(0).tolist())

    assert found(OnPolicyConfig(), 0) == {8} and found(OnPolicyConfig(), 1) == {4} and found(OnPolicyConfig(), 9) == {4}
    assert found(CONFIGS["nothing older"], 5) == {6}
    assert found(CONFIGS["nothing fresh"], 0) == {3} and found(CONFIGS["nothing fresh"], 5) == {0}
    assert found(CONFIGS["all fresh"], 5) == {3}
    few = OnPolicyConfig(rollouts=12, batch=4, buffer=20, every=5, fresh=0.2)  # 3 new and 2 older ones to a lane
    assert found(few, 4) == {3}, "one is asked for, but only two older ones are there"
    many = OnPolicyConfig(rollouts=8, batch=4, buffer=40, every=6, fresh=1.0)  # 2 new and 8 older ones to a lane
    assert found(many, 6) == {2}, "no new one twice while there are older ones"


def test_where_a_step_follows_every_refresh_fresh_ones_are_in_every_step():
    config = CONFIGS["adapting"]
    plan = RolloutPlan(config, seed=0)
    per_step = [int((plan.schedule(refresh)[0] >= plan.made(refresh).start).sum()) for refresh in range(1, 41)]
    assert set(per_step) == {2, 3} and sum(per_step) == 0.3 * 8 * 40
    by_lane = [
        sum(int(plan.schedule(refresh)[0, lane] >= plan.made(refresh).start) for refresh in range(1, 41)) for lane in (0, 7)
    ]
    assert by_lane == [12, 12]


def test_older_ones_are_drawn_evenly_and_fresh_ones_come_at_any_step():
    config = OnPolicyConfig(rollouts=16, batch=16, buffer=80, every=2, fresh=0.5)  # one new and four older ones to a lane
    plan, ages, places = RolloutPlan(config, seed=7), Counter(), Counter()
    neighbours = Counter()
    for refresh in range(10, 90):
        schedule = plan.schedule(refresh)
        for lane, drawn in enumerate(schedule.T):
            back = [refresh - number // 16 for number in drawn.tolist()]
            ages.update(age for age in back if age)
            places[back.index(0)] += 1
            if lane:
                neighbours[places_of(schedule, lane, refresh), places_of(schedule, lane - 1, refresh)] += 1
    assert set(ages) == {1, 2, 3, 4} and evenness(ages) > 1e-3
    assert evenness(places) > 1e-3
    assert evenness(neighbours) > 1e-3 and len(neighbours) == 4, "lanes do not copy each other"


def evenness(counts: Counter) -> float:
    """p-value of all that was seen being equally likely."""
    found = torch.tensor(list(counts.values()), dtype=torch.float64)
    return chi_square(found, found.mean().expand(len(found)))


def places_of(schedule: np.ndarray, lane: int, refresh: int) -> int:
    """The step at which a lane's one fresh rollout of 16 lanes comes."""
    return [number // 16 for number in schedule[:, lane].tolist()].index(refresh)


def test_the_schedule_follows_from_the_seed_and_the_refresh_alone():
    config = CONFIGS["default"]
    first = RolloutPlan(config, 5).schedule(4)
    RolloutPlan(config, 5).schedule(3)
    assert (RolloutPlan(config, 5).schedule(4) == first).all()
    assert (RolloutPlan(config, 6).schedule(4) != first).any()
    shifted = RolloutPlan(config, 5).schedule(5) - config.rollouts
    assert (shifted != first).any(), "another refresh is drawn anew"


@pytest.mark.parametrize("config", [CONFIGS["default"], CONFIGS["adapting"], CONFIGS["few older"]], ids=str)
def test_any_number_of_processes_learns_from_the_same_rollouts(config):
    plan = RolloutPlan(config, seed=2)
    steps: dict[int, list] = {}
    for world in (1, 2, 4):
        buffers = [RolloutBuffer(plan, rank, world) for rank in range(world)]
        random = np.random.default_rng(world)
        for refresh in range(6):
            for buffer in buffers:
                for number in random.permutation(buffer.missing(refresh)).tolist():  # answers end in any order
                    buffer.add(number, rollout(number))
                assert not buffer.missing(refresh) and len(buffer) == sum(len(plan.kept(j, refresh)) for j in buffer.lanes)
            for numbers in plan.schedule(refresh):
                served = [[number_of(b[n]) for n in numbers[rank::world].tolist()] for rank, b in enumerate(buffers)]
                assert all(len(share) == config.batch // world for share in served)
                steps.setdefault(world, []).append(sorted(number for share in served for number in share))
    assert steps[1] == steps[2] == steps[4]


def test_a_process_keeps_its_own_lanes_alone():
    plan = RolloutPlan(OnPolicyConfig(rollouts=8, batch=4, buffer=8), seed=0)
    buffer = RolloutBuffer(plan, rank=1, world=2)
    assert list(buffer.lanes) == [1, 3] and buffer.missing(0) == [1, 3, 5, 7]
    with pytest.raises(ValueError, match="rollout 2 is of lane 2"):
        buffer.add(2, rollout(2))
    for number in (1, 3, 5, 7, 9):
        buffer.add(number, rollout(number))
    assert list(buffer) == [3, 5, 7, 9] and 1 not in buffer and buffer.missing(1) == [11, 13, 15]
    with pytest.raises(KeyError):
        buffer[1]
    with pytest.raises(
        UserError, match=r"on_policy.batch is 4, which 3 processes cannot share evenly; set it to a multiple of 3"
    ):
        RolloutBuffer(plan, 0, 3)


@pytest.mark.parametrize("prompts", [1, 2, 7, 100])
def test_every_epoch_answers_every_prompt_once_in_an_order_of_its_own(prompts):
    order = PromptOrder(prompts, seed=4)
    epochs = [[order[epoch * prompts + i] for i in range(prompts)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(prompts)) for epoch in epochs)
    if prompts == 100:
        assert len({tuple(epoch) for epoch in epochs}) == 5
        assert [PromptOrder(100, 5)[i] for i in range(100)] != epochs[0]
    backwards = PromptOrder(prompts, seed=4)
    numbers = list(range(5 * prompts))
    assert [backwards[n] for n in reversed(numbers)] == [prompt for epoch in reversed(epochs) for prompt in reversed(epoch)], (
        "nothing depends on what was asked before"
    )


def test_orders_are_drawn_evenly():
    counts = Counter(tuple(PromptOrder(3, seed)[3 * epoch + i] for i in range(3)) for seed in range(30) for epoch in range(20))
    assert len(counts) == 6 and evenness(counts) > 1e-3


def test_no_prompts_have_no_order():
    with pytest.raises(ValueError, match="no prompts"):
        PromptOrder(0, 0)


def test_a_prompt_that_comes_again_is_another_request():
    prompts = [Request(f"gsm8k/{i}", (1, i), limit=5) for i in range(3)]
    order = PromptOrder(3, seed=0)
    asked = requests(prompts, order, range(9))
    assert len({request.key for request in asked}) == 9
    assert [request.ids for request in asked] == [prompts[order[n]].ids for n in range(9)]
    assert sorted(request.ids for request in asked) == sorted(3 * [prompt.ids for prompt in prompts])
    assert all(request.limit == 5 for request in asked)
    answers = [Rollout(request.key, torch.tensor(request.ids), 2, [], 0, True, torch.empty(0)) for request in asked]
    assert [number_of(answer) for answer in answers] == list(range(9))
    assert requests(prompts, order, [4]) == [asked[4]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollouts": 0}, "on_policy.rollouts is 0, but must be 1 or more"),
        ({"every": 0}, "on_policy.every is 0, but must be 1 or more"),
        ({"batch": -1}, "on_policy.batch is -1"),
        ({"buffer": 0}, "on_policy.buffer is 0"),
        ({"max_tokens": 0}, "on_policy.max_tokens is 0"),
        ({"max_tokens": 1}, "on_policy.max_tokens is 1, but must be 2 or more"),
        ({"slots": 0}, "on_policy.slots is 0"),
        ({"drafts": 0}, "on_policy.drafts is 0, but must be 1 or more, or null"),
        ({"fresh": 1.1}, "on_policy.fresh is 1.1, but is a share: it must lie between 0 and 1"),
        ({"fresh": float("nan")}, "on_policy.fresh is nan"),
        ({"temperature": -0.1}, "on_policy.temperature is -0.1, but must be 0"),
        ({"temperature": float("inf")}, "on_policy.temperature is inf"),
        ({"replay": "texts"}, "on_policy.replay is 'texts', but must be one of rounds, text, anchors, first_rejection"),
        ({"rollouts": 100}, "on_policy.rollouts is 100, but must be a multiple of on_policy.batch 32; set it to 96 or 128"),
        ({"rollouts": 16}, "on_policy.rollouts is 16, but must be a multiple of on_policy.batch 32; set it to 32."),
        ({"buffer": 1000}, "on_policy.buffer is 1000, but must be a multiple of on_policy.batch 32; set it to 992 or 1024"),
        ({"buffer": 128}, "on_policy.buffer is 128, but must hold at least the 256 rollouts of a refresh"),
    ],
)
def test_a_config_cannot_hold_nonsense(options, words):
    with pytest.raises(UserError) as error:
        OnPolicyConfig(**options)
    assert words in str(error.value)
