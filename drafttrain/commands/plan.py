"""`drafttrain plan`: the resolved recipe and its arithmetic, without weights, data or processes."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from drafttrain.data.features import feature_bytes
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import Share, plan_arithmetic
from drafttrain.data.token_counts import count
from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.errors import UserError
from drafttrain.files import human_bytes
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run, dump_yaml
from drafttrain.target.load import locate
from drafttrain.target.target import Target
from drafttrain.topology import Topology, read_topology, uses_deepspeed
from drafttrain.trainer_section import trainer_arguments
from drafttrain.types import Identity
from drafttrain.vocab import DraftVocabulary

ADAM_BYTES = 8
"""Two fp32 averages of every trained weight."""


def run(recipe: Recipe, options: Options) -> None:
    """Print the plan. Raises UserError for everything that `train` would refuse before it loads anything."""
    topology = read_topology(recipe.trainer.get("strategy"))
    trainer_arguments(recipe.trainer, options.run.logs)
    print(dump_yaml(recipe.plain()))
    for line in arithmetic(recipe, options.run, topology):
        print(line)


def arithmetic(recipe: Recipe, run: Run, topology: Topology) -> list[str]:
    """What the recipe amounts to, one sentence a line."""
    target, reason = outline(recipe)
    store = _store(run)
    positions = recipe.data.length if target is None else target.max_positions
    lines = [f"run folder: {run.folder}/", f"processes: {topology}", *_steps(recipe, store, topology, positions)]
    if target is None:
        return [*lines, f"parameters and bytes: not known, because the target's config cannot be read ({reason})"]
    vocabulary, said = _vocabulary(recipe, target, store)
    with torch.device("meta"):
        net = recipe.drafter.build(target, vocabulary)
    return [*lines, *said, *_disk(recipe, store, target, net), *_device(recipe, topology, target, net)]


def outline(recipe: Recipe) -> tuple[Target | None, str]:
    """The target without its weights, from its config alone; None and the reason if that cannot be had.

    Raises:
        UserError: a local target that does not exist.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = recipe.target
    where, gguf = locate(config.path)
    extra = {} if gguf is None else {"gguf_file": gguf}
    try:
        found = AutoConfig.from_pretrained(where, revision=config.revision, trust_remote_code=config.trust_remote_code, **extra)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises a dozen kinds; a plan goes on without
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    text = found.get_text_config()
    identity = Identity(config.path, "", "", "", "", text.num_hidden_layers, text.hidden_size, text.vocab_size)
    return Target(model, SimpleNamespace(tokenizer=None), identity, ()), ""  # type: ignore[arg-type]


def _vocabulary(recipe: Recipe, target: Target, store: TokenStore | None) -> tuple[DraftVocabulary, list[str]]:
    """The draft vocabulary and its arithmetic. Before data_prep it is one of the right size, or a full one where counts decide the size."""
    if store is not None and store.manifest.identity.vocab == target.vocab:
        return choose_vocabulary(recipe.drafter, target, count(store))
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


def _disk(recipe: Recipe, store: TokenStore | None, target: Target, net: DrafterNet) -> list[str]:
    """Bytes of features, checkpoints and export."""
    trained = _size(net)
    lines = [f"parameters: {trained:,} trained, {_size(target.model):,} frozen in the target"]
    tokens, bound = _tokens(recipe, store)
    taps, dtype = len(net.needs.taps), recipe.data.feature_dtype
    per_token = feature_bytes(taps, target.hidden, dtype)
    if recipe.data.features == "stored" and tokens is not None:
        total = human_bytes(tokens * per_token)
        lines.append(
            f"disk, features: {bound}{tokens:,} tokens x ({taps} taps + 1) x {target.hidden} in {dtype} = {bound}{total}"
        )
    elif recipe.data.features == "stored":
        lines.append(f"disk, features: {human_bytes(per_token)} a token; how many tokens is known after data_prep")
    else:
        lines.append("disk, features: none, the target reads every row inside the training step")
    export = trained * (2 if recipe.export.dtype == "bfloat16" else 4)
    sizes = [human_bytes(count) for count in (trained * (4 + ADAM_BYTES), 4 * trained, export)]
    lines.append("disk, checkpoints: {} to resume, {} a drafter; export: {}".format(*sizes))
    return lines


def _device(recipe: Recipe, topology: Topology, target: Target, net: DrafterNet) -> list[str]:
    """Bytes that stay on each device; activations come on top."""
    stage = _zero_stage(recipe.trainer.get("strategy"))
    shared = [1 if stage < needed else topology.world for needed in (3, 3, 2, 1)]  # target, weights, gradients, Adam
    trained = _size(net)
    size = 2 if recipe.target.dtype == "bfloat16" else 4
    parts = [_size(target.model) * size, trained * 4, trained * 4, trained * ADAM_BYTES]
    parts = [part // among for part, among in zip(parts, shared, strict=True)]
    names = ("target", "drafter", "gradients", "Adam")
    kept = " + ".join(f"{name} {human_bytes(part)}" for name, part in zip(names, parts, strict=True))
    logits = recipe.data.rows * recipe.data.length * net.needs.depth * len(net.vocabulary.ids) * 4
    return [
        f"device ({topology.accelerator}), each process: {kept} = {human_bytes(sum(parts))}",
        f"device, on top: activations; one copy of a micro-batch's logits is at most {human_bytes(logits)}",
    ]


def _zero_stage(strategy: Any) -> int:
    if not uses_deepspeed(strategy):
        return 0
    if isinstance(strategy, dict):
        return int((strategy.get("init_args") or {}).get("stage", 2))
    return next((int(digit) for digit in strategy if digit.isdigit()), 2)


def _store(run: Run) -> TokenStore | None:
    """The training store if data_prep has finished."""
    try:
        return TokenStore.open(run.data / "train")
    except UserError:
        return None


def _tokens(recipe: Recipe, store: TokenStore | None) -> tuple[int | None, str]:
    """Tokens of the training store, or a bound from the recipe; and the words that go before the number."""
    if store is not None:
        return store.manifest.tokens, ""
    prepare = recipe.prepare
    counts = [vars(source).get("count") for source in prepare.prompts]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None, ""
    return sum(known) * (prepare.samples + prepare.greedy) * (prepare.max_prompt + prepare.max_tokens), "at most "


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
