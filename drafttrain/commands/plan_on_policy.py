"""What an on-policy recipe amounts to: rollouts where supervised training has rows, their bytes, and what training would refuse or hardly meant.

    made   = ceil(steps / every) * rollouts      each refresh answers as many prompts
    learnt = steps * batch                       some of them more than once, or never
    held   = (buffer + rollouts) / processes     while prompts are answered, the old ones still stand
    rows   <= ceil(m / floor(length / longest))  of a micro-batch of m rollouts, the longest of `longest` tokens: first fit leaves no row but
                                                 the last with room for one more

Letters: K greatest depth that is learnt, W processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from drafttrain.commands.plan_engine import bytes_as, engine_buffers
from drafttrain.data.store import TokenStore
from drafttrain.drafters.base import DrafterNet
from drafttrain.files import human_bytes, many
from drafttrain.losses import Distillation
from drafttrain.recipe import Recipe
from drafttrain.target.target import Target
from drafttrain.tasks.on_policy_config import scored_streams
from drafttrain.tasks.on_policy_start import drafts_of, find_prompts, require_refreshes, require_streams, require_text
from drafttrain.tasks.rollout_buffer import RolloutPlan
from drafttrain.tasks.rollout_files import MadeWith, bytes_of
from drafttrain.topology import Topology


@dataclass(frozen=True)
class Prompts:
    """What the rollouts answer."""

    longest: int
    """Tokens; before there is a store, the most that data_prep lets through."""
    mean: float
    """Tokens on average; before there is a store, the same."""
    too_long: int = 0
    """How many make more than data.length tokens with an answer of on_policy.max_tokens."""
    distinct: int | None = None
    """None before there is a store."""
    said: tuple[str, ...] = ()
    """What training says of those that are not answered."""


def planned_prompts(
    recipe: Recipe, store: TokenStore | None, target: Target | None = None, net: DrafterNet | None = None
) -> Prompts:
    """The prompts of the store that training would have answered, or what data_prep would leave of them.

    Args:
        target, net: None where the target's config cannot be read; then its room is not asked for.

    Raises:
        UserError: as training would, where none is left.
    """
    config, length = recipe.on_policy, recipe.data.length
    if store is None:
        most = recipe.prepare.max_prompt
        return Prompts(most, most, int(most + config.max_tokens > length))
    positions, drafts = (None, 0) if target is None or net is None else (target.max_positions, drafts_of(config, net))
    found = find_prompts(store, config, length, positions, drafts)
    lengths = [len(request.ids) for request in found.answered]
    too_long = sum(each + config.max_tokens > length for each in lengths)
    return Prompts(max(lengths), sum(lengths) / len(lengths), too_long, len(lengths), tuple(found.lines()))


def require_on_policy(recipe: Recipe, topology: Topology) -> None:
    """UserError as from training, where it needs neither target nor drafter to refuse."""
    config, steps = recipe.on_policy, recipe.trainer.get("max_steps")
    if steps:
        require_refreshes(config, steps)
    RolloutPlan(config, recipe.data.seed).lanes(topology.rank, topology.world)
    if config.as_text:
        require_text(recipe.objective)
    require_streams(config, recipe.objective)


# ---- arithmetic ----------------------------------------------------------------------------------------------------------------


def of_rollouts(recipe: Recipe, topology: Topology, prompts: Prompts) -> Iterator[str]:
    """How many rollouts are made of which prompts and learnt from, and what is hardly meant in that."""
    yield from _counted(recipe, topology, prompts)
    yield from _unmeant(recipe, topology, prompts)


def _counted(recipe: Recipe, topology: Topology, prompts: Prompts) -> Iterator[str]:
    config, steps = recipe.on_policy, recipe.trainer.get("max_steps")
    accumulate, rows = _accumulate(recipe), most_rows(recipe, topology, prompts)
    each, more = divmod(config.batch // topology.world, accumulate)
    of_micro = f"{each} or {each + 1} rollouts" if more else many(each, "rollout")
    processes = "process" if topology.world == 1 else "processes"
    yield (
        f"rollouts/step: {topology.world} {processes} x {accumulate} accumulations x {of_micro} = {config.batch:,}, of the newest {config.buffer:,}; a "
        f"micro-batch has at most {many(rows, 'row')} x {recipe.data.length:,} tokens"
    )
    often = "step" if config.every == 1 else f"{config.every} steps"
    answers = f"{config.rollouts:,} prompts are answered before every {often}, each with at most {config.max_tokens:,} tokens"
    if not steps:
        yield f"{answers}; steps: {steps}"
        return
    made, learnt = -(-steps // config.every) * config.rollouts, steps * config.batch
    yield (
        f"{answers}: in {steps:,} steps {made:,} rollouts of at most {made * config.max_tokens:,} tokens; {learnt:,} are learnt from, each "
        f"{learnt / made:.2f} times on average"
    )
    if prompts.distinct is None:
        yield "passes over the prompts are known after data_prep"
        return
    yield from prompts.said
    yield f"passes over the prompts: {made:,} rollouts answer {prompts.distinct:,} prompts {made / prompts.distinct:.2f} times"


def most_elements(recipe: Recipe, topology: Topology, depth: int) -> int:
    """A bound on what a micro-batch scores. A round commits a token at least, so an answer has no more rounds than tokens."""
    config = recipe.on_policy
    of_micro = -(-config.batch // (topology.world * _accumulate(recipe)))
    if config.as_text:
        return of_micro * config.max_tokens * depth
    accepted, rejected = scored_streams(recipe.objective.streams, config.replay)
    return of_micro * config.max_tokens * (accepted + rejected * min(depth, config.drafts or depth))


def most_rows(recipe: Recipe, topology: Topology, prompts: Prompts) -> int:
    """A bound on the packed rows of a micro-batch."""
    config, data = recipe.on_policy, recipe.data
    of_micro = -(-config.batch // (topology.world * _accumulate(recipe)))
    fit = max(1, data.length // (prompts.longest + config.max_tokens))
    return -(-of_micro // (fit * data.rows)) * data.rows


def _accumulate(recipe: Recipe) -> int:
    return recipe.trainer.get("accumulate_grad_batches", 1)


# ---- bytes ---------------------------------------------------------------------------------------------------------------------


def kept(recipe: Recipe, topology: Topology, target: Target, net: DrafterNet, prompts: Prompts, tau: float | None) -> list[str]:
    """Bytes of the rollouts, in memory and on disk. `tau`: of the drafter that the run begins from, where that is known."""
    config, size = recipe.on_policy, _size(recipe)
    drafts = drafts_of(config, net) if config.keeps_rounds else None
    made_with = MadeWith(target.identity, net.needs.taps, drafts)

    def buffer(tokens_a_round: float) -> int:
        return bytes_of(config, made_with, prompts.mean, tokens_a_round, size)

    most = buffer(1.0)
    mine, new = most / topology.world, most * config.rollouts / config.buffer / topology.world
    machine = (
        f" ({topology.local} of them on a machine: {human_bytes(topology.local * (mine + new))})" if topology.local > 1 else ""
    )
    found = [
        f"disk, rollouts: at most {human_bytes(most)} beside a checkpoint, and twice that while another one is saved",
        f"memory, each process: at most {human_bytes(mine)} for its rollouts, and {human_bytes(new)} more while prompts are answered{machine}",
    ]
    if drafts is not None:
        likely = "" if tau is None else f"; at tau {tau:.2f} of checkpoint.start about {human_bytes(buffer(tau))} on disk"
        found.append(
            f"rollouts are as large as that where every draft is rejected and every answer is as long as it may be{likely}"
        )
    return found


def device_parts(recipe: Recipe, topology: Topology, target: Target, net: DrafterNet, prompts: Prompts) -> list[tuple[str, int]]:
    """What answering prompts keeps on the device of each process, and its bytes."""
    config, size = recipe.on_policy, _size(recipe)
    copied = size * sum(weight.numel() for weight in net.parameters())
    rows = min(config.slots, config.rollouts // topology.world)
    longest = prompts.longest + config.max_tokens
    try:
        slots, buffers = engine_buffers(target, net, drafts_of(config, net), rows, longest, config.keeps_rounds)
    except RuntimeError:  # of torch: the target's code looks at a value
        return [("served copy of the drafter (the caches of its answers are not counted)", copied)]
    return [
        ("served copy of the drafter", copied),
        (f"caches and records of {rows:,} answers (on_policy.slots) x {slots:,} positions", bytes_as(buffers, size)),
    ]


def _size(recipe: Recipe) -> int:
    """Bytes of a number of the target, its features, and the drafter as it is served."""
    return 2 if recipe.target.dtype == "bfloat16" else 4


# ---- hardly meant --------------------------------------------------------------------------------------------------------------


def _unmeant(recipe: Recipe, topology: Topology, prompts: Prompts) -> Iterator[str]:
    """Warnings and notes of an on-policy recipe."""
    config, data = recipe.on_policy, recipe.data
    if prompts.too_long:
        yield _cut(recipe, prompts)
    mine = config.batch // topology.world
    if _accumulate(recipe) > mine:
        yield (
            f"warning: trainer.accumulate_grad_batches is {_accumulate(recipe)}, but a process has {mine} rollouts a step, so some micro-batches are "
            f"empty; lower it to {mine} or less"
        )
    if data.features == "stored":
        yield (
            "warning: data.features is stored, but on-policy training learns from what its rollouts record, and stored features are never read; "
            "set it to online"
        )
    if isinstance(recipe.objective, Distillation) and config.replay == "rounds":
        yield (
            "note: of every round Distillation scores what was accepted and the token behind it; what was rejected is learnt by "
            "OnPolicyDistillation alone"
        )
    fresh, made = Fraction(str(config.fresh)) * config.every, Fraction(config.rollouts, config.batch)
    if fresh > made and config.buffer > config.rollouts:
        yield (
            f"note: on_policy.fresh is {config.fresh:g}, but {config.rollouts:,} new rollouts for {config.every} steps of {config.batch} are too few to use "
            f"none twice: {_newest(recipe):.0%} of a step's are new; for more raise on_policy.rollouts or lower on_policy.every"
        )


def _cut(recipe: Recipe, prompts: Prompts) -> str:
    config, length = recipe.on_policy, recipe.data.length
    whole = prompts.longest + config.max_tokens
    who = (
        f"a prompt of prepare.max_prompt {prompts.longest:,} tokens"
        if prompts.distinct is None
        else f"{prompts.too_long:,} of {prompts.distinct:,} prompts, the longest of {prompts.longest:,} tokens,"
    )
    return (
        f"warning: {who} and on_policy.max_tokens {config.max_tokens:,} make more than data.length {length:,}: what an answer has beyond is cut and not "
        f"learnt from; raise data.length to {whole:,}, or lower on_policy.max_tokens"
    )


def _newest(recipe: Recipe) -> float:
    """Share of a step's rollouts that are of the newest refresh, once the buffer is full."""
    plan = RolloutPlan(recipe.on_policy, recipe.data.seed)
    refresh = -(-recipe.on_policy.buffer // recipe.on_policy.rollouts)
    return float(np.mean(plan.schedule(refresh) >= plan.made(refresh).start))
