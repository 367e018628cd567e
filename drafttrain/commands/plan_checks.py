"""What a recipe asks for and cannot have, or hardly meant, told from its numbers before anything is made.

What training would refuse is refused. What another command would refuse, or nobody would, is a line that begins with `warning:`; so is what a stage would
refuse on this machine alone, since a plan may be made elsewhere than the training.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from data_prep.config import PrepareConfig, require_window
from data_prep.rows import json_lines
from data_prep.sources import JsonlPrompts, PromptSource
from drafttrain.commands.bench_methods import fitted
from drafttrain.decoding.methods import Experts, Method, Tree
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.recipe import Recipe
from drafttrain.target.precision import require_library
from drafttrain.target.quantised import require_unpacked
from drafttrain.target.target import Target
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.speed_config import require_compiler
from drafttrain.topology import Topology, require_gpu
from drafttrain.trainer_section import require_deepspeed
from drafttrain.validation.bench_config import BenchConfig

WAY_OUT = ", so data_prep would refuse; lower it or give more prompts"


def unmeant(recipe: Recipe, topology: Topology, gathered: bool, prepared: bool) -> list[str]:
    """Warnings that need neither target nor drafter.

    Args:
        gathered: whether data_prep has split off the held-out prompts already.
        prepared: whether it has finished, and needs no file of prompts any more.
    """
    found = [] if gathered else _held_out(recipe.prepare)
    if recipe.task != "on_policy" and recipe.on_policy != OnPolicyConfig():
        found.append(
            f"warning: on_policy is set, but task is {recipe.task}, which learns from the stored answers and never reads it; set task to on_policy"
        )
    if recipe.speed.cpp_wrapper and not recipe.speed.compile:
        found.append(
            "warning: speed.cpp_wrapper is true, but speed.compile false, so there is nothing that it would launch; set speed.compile to true"
        )
    found += _refused_here(recipe, topology, prepared)
    warm_up, steps = recipe.optimizer.warmup_steps, recipe.trainer.get("max_steps")
    if isinstance(steps, int) and 0 < steps <= warm_up:
        found.append(
            f"warning: optimizer.warmup_steps is {warm_up:,}, but trainer.max_steps {steps:,}, so the learning rate never reaches optimizer.lr; "
            "lower the first or raise the second"
        )
    return found


def _refused_here(recipe: Recipe, topology: Topology, prepared: bool) -> list[str]:
    """What the stages would refuse for what this machine lacks, in their words."""
    strategy = recipe.trainer.get("strategy")
    asked: list[tuple[str, Callable[[], None]]] = [
        ("training", partial(require_gpu, strategy, topology.accelerator)),
        ("training", partial(require_deepspeed, strategy)),
        ("training", partial(require_library, recipe.target.weights)),
        ("training", partial(require_compiler, recipe.speed)),
    ]
    asked += [] if prepared else [("data_prep", source.require_there) for source in recipe.prepare.prompts]
    return _refusals(asked)


def refused_of(recipe: Recipe, target: Target, prepared: bool) -> list[str]:
    """Warnings where this machine lacks what unpacks a target's quantised weights, and where its positions are too few for the longest chats to be made.
    `target`: an outline, made of the config."""
    asked: list[tuple[str, Callable[[], None]]] = [
        ("training", partial(require_unpacked, target.model.config, recipe.target.path))
    ]
    asked += [] if prepared else [("data_prep", partial(require_window, recipe.prepare, target.max_positions))]
    return _refusals(asked)


def _refusals(asked: Sequence[tuple[str, Callable[[], None]]]) -> list[str]:
    """A warning for each stage that would refuse."""
    found = []
    for stage, require in asked:
        try:
            require()
        except UserError as error:
            found.append(f"warning: on this machine {stage} would refuse: {error}")
    return found


def refused_by_bench(bench: BenchConfig, net: DrafterNet) -> list[str]:
    """A warning for every method that `bench` could not draft with, such as one that is deeper than the drafter, in its words.

    Methods whose shape is measured first (StaticTree) fit the drafter by themselves.
    """
    found = []
    for number, method in enumerate(fitted(bench, net.deepest).methods):
        # Of several drafters the others are not read here.
        own = Tree(method.drafts, method.top_k, method.nodes, method.least_gain) if isinstance(method, Experts) else method
        if type(own).prepare is not Method.prepare:
            continue
        try:
            own.proposer(net, Sampling(1.0))
        except UserError as error:
            found.append(f"warning: bench would refuse bench.methods[{number}], {method.label}: {error}")
    return found


def require_room(net: DrafterNet, length: int) -> None:
    """UserError, as from training, where no row of `length` tokens (data.length) is long enough for the deepest draft to be learnt."""
    depth, most = net.needs.depth, length - 2  # a row before the anchor, the anchor, and as many labels as drafts
    if depth > most:
        raise UserError(
            f"this {type(net.config).__name__} learns {depth} drafts in a row, but a row of data.length {length} tokens has room for at most "
            f"{most}; raise data.length, or train fewer (heads, depth or block of drafter.init_args)."
        )


def _held_out(prepare: PrepareConfig) -> list[str]:
    """A warning where the sources give fewer prompts than are held out, or none beside them."""
    wanted, chosen = prepare.held_out, prepare.held_out_source
    counts = {source.name: _most_prompts(source, wanted + 1) for source in prepare.prompts}
    own = counts[chosen] if chosen is not None else None
    known = [count for count in counts.values() if count is not None]
    if own is not None and own < wanted:
        return [f"warning: prepare.held_out is {wanted:,}, but {chosen} gives at most {own:,} prompts{WAY_OUT}"]
    if len(known) == len(counts) and sum(known) <= wanted:
        return [
            f"warning: prepare.held_out is {wanted:,}, but prepare.prompts gives at most {sum(known):,}, and some must be left to train on"
            f"{WAY_OUT}"
        ]
    return []


def _most_prompts(source: PromptSource, enough: int) -> int | None:
    """A bound on the prompts of a source, no line of a file behind `enough` being read; None where only data_prep can tell."""
    count = vars(source).get("count")
    if not isinstance(source, JsonlPrompts):
        return count
    try:
        lines = sum(1 for _ in islice(json_lines(source.path, "JsonlPrompts.path"), enough))
    except UserError:  # the file is not on this machine, or not yet
        return count
    return lines if count is None else min(lines, count)
