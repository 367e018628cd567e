"""What `drafttrain plan` says of the most that a device holds at once: a training step done without numbers (tasks/memory.py)."""

from functools import partial
from itertools import islice

import torch

from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import Share, WindowStream
from drafttrain.drafters.base import DrafterNet
from drafttrain.files import human_bytes
from drafttrain.layouts import filled, one_chat, widened
from drafttrain.recipe import Recipe
from drafttrain.target.precision import bytes_of
from drafttrain.target.quantised import packed_bits, quantisation
from drafttrain.target.target import Target
from drafttrain.tasks.adapt_config import AdaptConfig
from drafttrain.tasks.memory import DIVIDED_FROM, DRAFTER, GRADIENTS, OPTIMIZER, OTHERS, TARGET, Step, peak_of
from drafttrain.tasks.strategy import uses_deepspeed, zero_stage
from drafttrain.topology import Topology
from drafttrain.types import Layout, Sequences

LOOKED_AT = 32
"""Micro-batches of the store, of which the one with most elements counts."""
LONG = 8192
"""Tokens of a row from which on a mask of all pairs is worth a word."""
PRECISIONS = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}
"""Shorter words for trainer.precision."""
STAYS = (TARGET, DRAFTER, GRADIENTS, OPTIMIZER, OTHERS)
"""What is there from step to step, named first."""


def target_bytes(recipe: Recipe, target: Target, world: int) -> int:
    """What each of so many processes holds of the target's weights. `target`: an outline."""
    return bytes_of(target.model, recipe.target, world if recipe.speed.shard_target else 1)


def step_of(recipe: Recipe, target: Target, net: DrafterNet, world: int = 1) -> Step:
    """What training would do on a GPU."""
    precision, trainer = str(recipe.trainer.get("precision")), recipe.trainer
    strategy = trainer.get("strategy")
    precision = PRECISIONS.get(precision, precision)
    return Step(
        target, getattr(torch, recipe.target.dtype), recipe.drafter, net.vocabulary, recipe.objective, recipe.optimizer, recipe.speed,
        online=recipe.data.features == "online", feature_dtype=recipe.data.feature_dtype, precision=precision,
        accumulate=trainer.get("accumulate_grad_batches", 1), world=world, zero=zero_stage(strategy) if uses_deepspeed(strategy) else None,
        target_bytes=target_bytes(recipe, target, world),
    )  # fmt: skip


def memory(recipe: Recipe, store: TokenStore | None, topology: Topology, target: Target, net: DrafterNet) -> list[str]:
    """The peak and what it is made of. `target` and `net` are outlines; layouts are made by the net. A line says so where it cannot be told."""
    if recipe.task == "on_policy" or recipe.lora.rank is not None:
        return []  # their micro-batches hang on what is answered, their weights on what is started from
    try:
        sequences, layout = _micro_batch(recipe, store, target, net)
        peak = peak_of(step_of(recipe, target, net, topology.world), sequences, layout)
    except Exception as error:  # whatever somebody's model does with tensors that have no numbers
        first = (str(error).splitlines() or [""])[0][:120]
        return [f"memory of a step: cannot be told without running one ({type(error).__name__}: {first})"]
    named = sorted(peak.parts, key=lambda part: (part not in STAYS, STAYS.index(part) if part in STAYS else 0))
    made_of = " + ".join(f"{part} {human_bytes(peak.parts[part])}" for part in named)
    whose = "a full row" if store is None else "the fullest of the first micro-batches"
    notes = _notes(recipe, target, topology.world)
    return [
        f"memory of a step{' of train' if _adapts(recipe) else ''} on a GPU, each process: {made_of} = at most {human_bytes(peak.bytes)} at once ({len(layout.label_N):,} elements, "
        f"{whose}){notes}"
    ]


def _adapts(recipe: Recipe) -> bool:
    """Whether the recipe says anything of `adapt`, whose steps are others."""
    return recipe.adapt != AdaptConfig()


def _notes(recipe: Recipe, target: Target, world: int) -> str:
    found = []
    if recipe.speed.compile:
        found.append("speed.compile holds less, often a third")
    if recipe.speed.records:
        found.append("speed.graph_step holds what a step computes once more while it records a further size")
    if recipe.data.length >= LONG and not recipe.speed.fused_rows:
        found.append("speed.fused_rows holds no scores of such long rows")
    if _adapts(recipe):
        recorded = ", and records none" if recipe.speed.records else ""
        found.append(f"adapt learns from answers instead, in steps as large as those are{recorded}")
    if uses_deepspeed(strategy := recipe.trainer.get("strategy")):
        stage = zero_stage(strategy)
        divided = ", ".join(part for part, first in DIVIDED_FROM.items() if stage >= first) or "nothing"
        how = "" if world > 1 else ": this plan has one; torchrun --nproc-per-node N -m drafttrain plan counts for N"
        found.append(f"DeepSpeed adds its buckets, and ZeRO-{stage} divides {divided} among {world} process(es){how}")
    said = quantisation(target.model.config, recipe.target.path)
    if said and packed_bits(said) is None:
        found.append(
            "the target's weights came quantised, but in bits that its config.json does not tell, or that are unpacked without a further package (MXFP4), so "
            "they are counted as plain ones"
        )
    elif said or recipe.target.weights is not None:
        found.append("what unpacks the target's weights where they are multiplied is not counted")
    return "".join(f"; {note}" for note in found)


def _micro_batch(recipe: Recipe, store: TokenStore | None, target: Target, net: DrafterNet) -> tuple[Sequences, Layout]:
    """The one with most elements of the first of a store; without one, rows of which every token is supervised and can be said."""
    data = recipe.data

    def fill(layout: Layout) -> Layout:
        if recipe.speed.records:
            return filled(layout, data.length, net.fixed_queries)
        return widened(layout, data.length) if recipe.speed.compile and not net.fixed_queries else layout

    if store is None:
        alone = one_chat(net.vocabulary.ids[:1].cpu().repeat(data.length), prompt_len=1)
        full = Sequences(*(getattr(alone, name).repeat(data.rows, 1) for name in Sequences.__dataclass_fields__))
        return full, fill(net.layout(full, numbers=[(data.seed, row) for row in range(data.rows)]))
    plan = RowPlan(read_chats(store, min(data.length, target.max_positions)), data.length, data.seed)
    counts = partial(recipe.objective.counts, depth=net.needs.depth)
    stream = WindowStream(store, plan, Share(rows=data.rows), net.layout, counts)
    fullest = max(islice(stream, LOOKED_AT), key=lambda batch: len(batch.layout.label_N))
    return fullest.sequences, fill(fullest.layout)
