"""`drafttrain plan`: the resolved recipe and its arithmetic, without weights, data or processes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from data_prep.config import PrepareConfig
from drafttrain.commands.plan_adapt import adapted
from drafttrain.commands.plan_checks import refused_by_bench, refused_of, require_room, unmeant
from drafttrain.commands.plan_export import exported
from drafttrain.commands.plan_lora import learner_of
from drafttrain.commands.plan_memory import memory, target_bytes
from drafttrain.commands.plan_on_policy import (
    Prompts,
    device_parts,
    kept,
    most_elements,
    of_rollouts,
    planned_prompts,
    require_on_policy,
)
from drafttrain.commands.plan_start import filled, find_start, require_start, start_tau
from drafttrain.commands.plan_taught import taught
from drafttrain.data.features import vector_bytes
from drafttrain.data.kept_rows import wanted_final
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import Share, plan_arithmetic
from drafttrain.data.token_counts import count
from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.drafters.warm_start import WarmStart
from drafttrain.errors import UserError
from drafttrain.files import human_bytes
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run, dump_yaml
from drafttrain.target.hub import only_cached
from drafttrain.target.load import locate
from drafttrain.target.quantised import require_unrounded
from drafttrain.target.refusals import reason
from drafttrain.target.target import Target
from drafttrain.tasks.memory import DIVIDED_FROM, DRAFTER, GRADIENTS, OPTIMIZER, TARGET
from drafttrain.tasks.on_policy_start import drafts_of, require_text
from drafttrain.tasks.optimizer import require_whole_matrices, token_sides, turned_by_muon
from drafttrain.tasks.shared_target import require_no_answers
from drafttrain.tasks.speed_config import require_recordable
from drafttrain.tasks.strategy import zero_stage
from drafttrain.topology import Topology, read_topology
from drafttrain.trainer_section import trainer_arguments
from drafttrain.types import Identity
from drafttrain.vocab import DraftVocabulary

ADAM_BYTES, MUON_BYTES = 8, 4
"""Two fp32 averages of every trained weight, or one momentum."""


def run(recipe: Recipe, options: Options) -> None:
    """Print the plan, once under torchrun. Raises UserError for everything that `train` would refuse before it loads anything."""
    topology = read_topology()
    if topology.rank > 0:
        return
    require_whole_matrices(recipe.optimizer, recipe.trainer.get("strategy"))
    if recipe.task != "on_policy":
        require_recordable(recipe.speed, recipe.trainer)
    require_no_answers(recipe.speed, recipe.checkpoint, recipe.task == "on_policy", recipe.target.weights)
    recipe.lora.require_start(recipe.checkpoint.start)
    trainer_arguments(recipe.trainer, options.run.logs, elsewhere=True)
    print(dump_yaml(recipe.plain()))
    for line in arithmetic(recipe, options.run, topology):
        print(line)


def arithmetic(recipe: Recipe, run: Run, topology: Topology) -> Iterator[str]:
    """What the recipe amounts to, one sentence a line.

    Raises:
        UserError: what training would refuse; a start that is not there and a store of another drafter's features come behind the lines.
    """
    target, unread = outline(recipe)
    if target is not None:
        require_unrounded(target.model.config, recipe.target)  # before anything is said of a library that rounds
    store = _store(run)
    yield f"run folder: {run.folder}/"
    yield f"processes: {topology}"
    if recipe.task == "on_policy":
        require_on_policy(recipe, topology)
    else:
        require_text(recipe.objective)
        yield from _steps(recipe, store, topology, recipe.data.length if target is None else target.max_positions)
    gathered = store is not None or (run.data / "prompts.json").exists()
    yield from unmeant(recipe, topology, gathered, prepared=store is not None)
    if target is None:
        if recipe.task == "on_policy":
            yield from of_rollouts(recipe, topology, planned_prompts(recipe, store))
        yield f"parameters and bytes: not known, because the target's config cannot be read: {unread}"
        require_start(recipe, run)
        return
    yield from refused_of(recipe, target, prepared=store is not None)
    counted = store if store is not None and store.manifest.identity.vocab == target.vocab else None
    start, said = find_start(recipe, run, target, None if counted is None else counted.manifest.identity)
    vocabulary, chosen = _vocabulary(recipe, target, counted, start)
    with torch.device("meta"):
        net = recipe.drafter.build(target, vocabulary)
    yield from [*chosen, *said, *([] if start is None else filled(start, net))]
    require_room(net, recipe.data.length)
    if recipe.checkpoint.tau_prompts:
        net.require_drafts(recipe.checkpoint.drafts, "checkpoint.drafts")
    net.require_drafts(recipe.validate.drafts, "validate.drafts")
    prompts = None
    if recipe.task == "on_policy":
        net.require_drafts(drafts_of(recipe.on_policy, net), "on_policy.drafts")
        prompts = planned_prompts(recipe, store, target, net)
        yield from of_rollouts(recipe, topology, prompts)
    yield from taught(target, net, vocabulary, recipe.objective)
    yield from refused_by_bench(recipe.bench, net)
    yield from adapted(recipe)
    learner, said = learner_of(recipe, target, net)
    yield from said
    yield from _disk(recipe, store, target, net, learner)
    if prompts is not None:
        yield from kept(recipe, topology, target, net, prompts, start_tau(recipe))
    yield from _device(recipe, topology, target, net, learner, prompts)
    yield from memory(recipe, store, topology, target, net)
    if store is not None and recipe.data.features == "stored":
        if store.manifest.taps is None:
            yield f"{store.folder}/ holds no features yet: run data_prep before training"
        else:
            store.require_features(net.needs.taps, recipe.data.feature_dtype, wanted_final(net.needs))
    require_start(recipe, run)


def outline(recipe: Recipe) -> tuple[Target | None, str]:
    """The target without its weights, from its config alone; None and a sentence that says why if that cannot be had.

    Where the Hub does not answer at once, what it gave before is all that is looked at.

    Raises:
        UserError: a local target that does not exist.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = recipe.target
    where, gguf = locate(config.path)
    extra: dict[str, Any] = {"revision": config.revision, "local_files_only": only_cached(where, config.revision)}
    if gguf is not None:
        extra["gguf_file"] = gguf
    try:
        found = AutoConfig.from_pretrained(where, trust_remote_code=config.trust_remote_code, **extra)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises a dozen kinds; a plan goes on without
        return None, reason(error)
    text = found.get_text_config()
    identity = Identity(config.path, "", "", "", "", text.num_hidden_layers, text.hidden_size, text.vocab_size)
    return Target(model, SimpleNamespace(tokenizer=None), identity, ()), ""  # type: ignore[arg-type]


def _vocabulary(
    recipe: Recipe, target: Target, store: TokenStore | None, start: WarmStart | None
) -> tuple[DraftVocabulary, list[str]]:
    """The draft vocabulary and its arithmetic. Before data_prep it is one of the right size, or a full one where counts decide the size."""
    if store is not None:
        return choose_vocabulary(recipe.drafter, target, count(store)) if start is None else start.choose_vocabulary(count(store))
    if start is not None and start.held is not None and not start.held.is_full:
        return start.held, [
            f"draft vocabulary: the checkpoint's {len(start.held.ids):,} tokens, or those of them that data_prep leaves"
        ]
    size = recipe.drafter.draft_vocab
    if not isinstance(size, int):
        known = (
            "all tokens of the target" if size is None else f"{size}, a size that is known after data_prep; all tokens until then"
        )
        return DraftVocabulary.full(target.vocab), [f"draft vocabulary: {known}"]
    if size > target.vocab:
        raise UserError(
            f"drafter.init_args.draft_vocab is {size}, but the target has {target.vocab} tokens; lower it, or set it to null."
        )
    return DraftVocabulary(torch.arange(size), target.vocab), []


def _steps(recipe: Recipe, store: TokenStore | None, topology: Topology, positions: int) -> list[str]:
    """Tokens of a step, and epochs once there is a token store."""
    data, steps = recipe.data, recipe.trainer.get("max_steps")
    share = Share(topology.rank, topology.world, recipe.trainer.get("accumulate_grad_batches", 1), data.rows)
    if store is None or not steps:
        factors = f"{share.world} processes x {share.accumulate} accumulations x {share.rows} rows x {data.length} tokens"
        return [f"tokens/step: {factors} = {share.window_rows * data.length:,}; steps: {steps}; epochs are known after data_prep"]
    return plan_arithmetic(RowPlan(read_chats(store, min(data.length, positions)), data.length, data.seed), share, steps)


def _disk(recipe: Recipe, store: TokenStore | None, target: Target, net: DrafterNet, learner: DrafterNet) -> list[str]:
    """Bytes of features, checkpoints and export. `learner`: the net with what is trained, adapters or itself."""
    trained, state = _trained(learner), _optimizer(recipe, learner)[1]
    frozen = _size(learner) - trained
    in_drafter = f"{frozen:,} frozen in the drafter, " if frozen else ""
    lines = [f"parameters: {trained:,} trained, {in_drafter}{_size(target.model):,} frozen in the target"]
    lines.append(f"disk, features: {_features(recipe, store, target, net)}")
    resume, drafter = human_bytes(4 * trained + state), human_bytes(4 * _size(net))
    apart = f" and {human_bytes(4 * trained)} of adapters beside it" if frozen else ""
    export, warnings = exported(target, net, recipe.export)
    lines.append(f"disk, checkpoints: {resume} to resume, {drafter} a drafter{apart}; export: {export}")
    return lines + warnings


def _features(recipe: Recipe, store: TokenStore | None, target: Target, net: DrafterNet) -> str:
    """Bytes of stored features: to the byte once there are chats, else at most."""
    data, taps, final = recipe.data, len(net.needs.taps), wanted_final(net.needs)
    if data.features != "stored" and recipe.task == "on_policy":
        return "none, rollouts bring theirs"
    if data.features != "stored":
        return "none, the target reads every row inside the training step"
    vector = vector_bytes(target.hidden, data.feature_dtype)
    kept = f"{target.hidden} numbers in {data.feature_dtype}"
    if store is not None:
        bytes_final = store.bytes_of_features(0, data.feature_dtype, final)
        bytes_taps = store.bytes_of_features(taps, data.feature_dtype, final) - bytes_final
        whose = "that teach" if final == "taught" else "that drafts see or learn from"
        return (
            f"{bytes_taps // vector:,} states of {taps} taps + {bytes_final // vector:,} final states {whose}, each {kept} = "
            f"{human_bytes(bytes_taps + bytes_final)}"
        )
    each = f"({taps} taps + 1 final state) x {kept}"
    tokens = _most_tokens(recipe.prepare)
    if tokens is None:
        return f"at most {each} = {human_bytes((taps + 1) * vector)} a token; how many tokens is known after data_prep"
    return f"at most {tokens:,} tokens x {each} = at most {human_bytes(tokens * (taps + 1) * vector)}"


def _device(
    recipe: Recipe, topology: Topology, target: Target, net: DrafterNet, learner: DrafterNet, prompts: Prompts | None
) -> list[str]:
    """Bytes that stay on each device; activations come on top. `prompts`: None where no rollouts are made; `learner` as `_disk` says."""
    stage = zero_stage(recipe.trainer.get("strategy"))
    size = getattr(torch, recipe.target.dtype).itemsize
    # What is kept, its bytes, and from which ZeRO stage on it is divided among the processes (there is no stage 4).
    parts = [
        ("target", target_bytes(recipe, target, topology.world), DIVIDED_FROM[TARGET]),
        ("drafter", _size(learner) * 4, DIVIDED_FROM[DRAFTER]),
        ("gradients", _trained(learner) * 4, DIVIDED_FROM[GRADIENTS]),
        (*_optimizer(recipe, learner), DIVIDED_FROM[OPTIMIZER]),
    ]
    if not net.words and not net.vocabulary.is_full:
        parts.append(("head for the draft vocabulary", len(net.vocabulary.ids) * target.hidden * size, 4))
    if prompts is not None:
        parts += [(name, each, 4) for name, each in device_parts(recipe, topology, target, net, prompts)]
    divided = [(name, part if stage < first else part // topology.world) for name, part, first in parts]
    kept = " + ".join(f"{name} {human_bytes(part)}" for name, part in divided)
    elements, words = recipe.data.rows * recipe.data.length * net.needs.depth, len(net.vocabulary.ids)
    if prompts is not None:
        elements = most_elements(recipe, topology, net.needs.depth)
    chunk = getattr(recipe.objective, "chunk", 0)
    whose = f"{chunk:,} elements' (objective.init_args.chunk)" if 0 < chunk < elements else "a micro-batch's"
    logits = human_bytes(min(elements, chunk or elements) * words * 4)
    return [
        f"device ({topology.accelerator}), each process: {kept} = {human_bytes(sum(part for _, part in divided))}",
        f"device, on top: activations; one copy of {whose} logits is at most {logits}",
    ]


def _optimizer(recipe: Recipe, net: DrafterNet) -> tuple[str, int]:
    """Who steps the weights, and the bytes that it keeps about them."""
    trained, turned = _trained(net), sum(weight.numel() for weight in turned_by_muon(recipe.optimizer, net, token_sides(net)))
    return "Muon and Adam" if turned else "Adam", turned * MUON_BYTES + (trained - turned) * ADAM_BYTES


def _store(run: Run) -> TokenStore | None:
    """The training store if data_prep has finished."""
    try:
        return TokenStore.open(run.data / "train")
    except UserError:
        return None


def _most_tokens(prepare: PrepareConfig) -> int | None:
    """A bound on the tokens of the training store, before there is one; None if a source gives no number of prompts or of turns.

    A row holds no more than the longest prompt and an answer. A chat has at most one row for each turn: several where the template
    writes its history anew.
    """
    counts = [vars(source).get("count") for source in prepare.prompts]
    turns = [vars(source).get("turns", 1) for source in prepare.prompts]
    if None in turns:
        return None
    rows = [] if None in counts else [sum(count * each for count, each in zip(counts, turns, strict=True))]
    if prepare.count is not None:
        rows.append(prepare.count * max(turns))
    if not rows:
        return None
    return min(rows) * (prepare.samples + prepare.greedy) * (prepare.max_prompt + prepare.max_tokens)


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _trained(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
