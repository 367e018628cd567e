"""The training stage: from a run's token store and a recipe's sections to a drafter in the run's folder.

    best = train(
        run_folder=Path("runs/x"),                    # holds data/train and data/held_out, made by data_prep
        target=TargetConfig(...), drafter=Eagle3(...), objective=Distillation(...),
        data=DataConfig(...), optimizer=OptimizerConfig(...), checkpoint=CheckpointConfig(...),
        trainer={"max_steps": 500, ...},              # arguments of lightning.pytorch.Trainer, classes already built
        topology=Topology(...),                       # world, local, nodes, rank, accelerator, device, store
    )

It is called in every process that torchrun started. It continues from `checkpoints/last` if there is one, and returns
`checkpoints/best` when all steps are done, or when a stop signal was obeyed (then that folder may not exist yet).
"""

import logging
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from drafttrain.data.kept_rows import wanted_final
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import DataConfig, LookAhead, MicroBatch, Share, WindowStream, make_loader, plan_arithmetic
from drafttrain.data.token_counts import count
from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.drafters.warm_start import WarmStart, keep_vocabulary, kept_vocabulary
from drafttrain.errors import UserError
from drafttrain.files import require_space
from drafttrain.layouts import filled
from drafttrain.losses import Objective
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.target.target import Target
from drafttrain.tasks import lora as adapters
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.checkpoints import Saved, find_last, require_readable, require_same_recipe
from drafttrain.tasks.conductor import Conductor, Run
from drafttrain.tasks.distill import DistillTask, Position, Setup
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.tasks.on_policy import OnPolicyTask
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.on_policy_start import drafts_of, find_prompts
from drafttrain.tasks.optimizer import OptimizerConfig, token_sides, turned_by_muon
from drafttrain.tasks.progress import Reporter
from drafttrain.tasks.rollouts import Turns
from drafttrain.tasks.sections import Sections, recipe_facts
from drafttrain.tasks.speed import own_stream, reads_ahead, records_steps
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.stop import StopSignal, take_over_signals
from drafttrain.tasks.strategy import uses_deepspeed, zero_stage
from drafttrain.tasks.train_checks import OURS, require_no_other_drafter, require_same_keeper, require_sections, require_start
from drafttrain.tasks.watch import Watch, meet
from drafttrain.tasks.zero_state import ZeroState, cut_anew, saved_by
from drafttrain.types import Request


class Processes(Protocol):
    """What is asked of a topology."""

    @property
    def world(self) -> int: ...
    @property
    def local(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def store(self) -> tuple[str, int] | None: ...


def train(
    *,
    run_folder: Path,
    target: TargetConfig,
    drafter: DrafterConfig,
    objective: Objective,
    data: DataConfig,
    optimizer: OptimizerConfig,
    checkpoint: CheckpointConfig,
    trainer: dict[str, Any],
    topology: Processes,
    speed: SpeedConfig | None = None,
    on_policy: OnPolicyConfig | None = None,
    lora: LoraConfig | None = None,
    begins: Callable[[], None] | None = None,
) -> Path:
    """Trains until `trainer.max_steps` or a stop signal; see the top of this file. UserError for everything a user can mend. `begins` is called when
    nothing is left that could be refused, before the first step."""
    speed, lora = speed or SpeedConfig(), lora or LoraConfig()
    sections = Sections(target, drafter, objective, data, optimizer, checkpoint, trainer, speed, on_policy, lora)
    require_sections(sections, topology)
    say = print if topology.rank == 0 else _say_nothing
    checkpoints = Path(run_folder) / "checkpoints"
    store = TokenStore.open(Path(run_folder) / "data" / "train")
    recipe = recipe_facts(sections, store)
    saved = find_last(checkpoints)
    require_start(sections, saved)
    require_no_other_drafter(checkpoints, saved)
    if saved is not None:
        require_same_recipe(saved, recipe)
        if saved.position.step >= sections.max_steps:
            say(
                f"{checkpoints}/ is finished: {saved.position.step} of {sections.max_steps} steps; raise trainer.max_steps to go on."
            )
            return checkpoints / "best"
        require_same_keeper(saved, trainer.get("strategy"))
        require_readable(saved, topology.rank, topology.world)
    watch = Watch(topology.store, topology.rank, topology.world, checkpoint.hung_s)
    if topology.store is not None:
        meet(topology.rank, topology.world, topology.accelerator, trainer.get("strategy"))
    with StopSignal() as stop, watch:
        say(f"loading {target.path}")
        model = load_target(target, device=topology.device, shards=topology.world if speed.shard_target else 1)
        build, net = _begin(sections, model, store, checkpoints, saved is not None, topology.rank, say)
        if net.needs.depth > data.length - 2:  # an anchor needs a row before it and `depth` labels behind it
            raise UserError(
                f"drafter.init_args.depth is {net.needs.depth}, but a row of data.length {data.length} tokens has room for at most "
                f"{data.length - 2} drafts; lower the depth or raise data.length."
            )
        _require_unsaid(net, store)
        if checkpoint.tau_prompts:
            net.require_drafts(checkpoint.drafts, "checkpoint.drafts")
        taps = net.needs.taps if data.features == "stored" else None
        store.require(model.identity, taps, data.feature_dtype, wanted_final(net.needs))
        share = Share(topology.rank, topology.world, trainer.get("accumulate_grad_batches", 1), data.rows)
        position = Position() if saved is None else saved.position
        if saved is not None:
            _say_resumed(saved, share, sections.max_steps, on_policy is not None, say)
        size = sum(weight.numel() for weight in net.parameters() if weight.requires_grad)
        frozen = sum(weight.numel() for weight in net.parameters()) - size
        in_drafter = f"{frozen:,} frozen in the drafter, " if frozen else ""
        in_target = sum(weight.numel() for weight in model.model.parameters())
        say(f"parameters: {size:,} trained, {in_drafter}{in_target:,} frozen in the target")
        if optimizer.muon_lr is not None:
            turned = sum(weight.numel() for weight in turned_by_muon(optimizer, net, token_sides(net)))
            say(f"Muon trains {turned:,} of {size:,} weights at {optimizer.muon_lr:g}, AdamW the others at {optimizer.lr:g}")
        require_space(checkpoints, 4 * (size * 8 + frozen * 3), "training (two resume states and two drafters)")
        held_out = _held_out(Path(run_folder), model, checkpoint)
        run = Run(checkpoints, checkpoint, drafter, build, held_out, recipe)
        setup = Setup(model, net, objective, optimizer, share, data.seed, position, stop, sections.speed, data.feature_dtype)
        if on_policy is None:
            stream = _stream(sections, store, share, model, net, position, say)
            task, loader = DistillTask(setup), _loader(sections, stream, topology.device)
        else:
            prompts = _prompts(store, model, on_policy, net, data.length, say)
            task, loader = _on_policy(setup, on_policy, prompts, build, data.length, checkpoints, saved is not None)
        if begins is not None:
            begins()
        _fit(task, loader, run, sections, topology, Path(run_folder), saved, watch)
    return checkpoints / "best"


def _begin(
    sections: Sections,
    target: Target,
    store: TokenStore,
    checkpoints: Path,
    resumed: bool,
    rank: int,
    say: Callable[[str], None],
) -> tuple[Callable[[], DrafterNet], DrafterNet]:
    """A function that makes the same fresh net each time, and the net to train: a fresh one, filled from `checkpoint.start` if that is
    named. A run that goes on does not read it again."""
    store.require(target.identity)
    drafter, where, start = sections.drafter, sections.checkpoint.start, None
    if where is None:
        vocabulary, lines = choose_vocabulary(drafter, target, count(store))
    elif resumed:
        vocabulary = kept_vocabulary(checkpoints, target.vocab)
        lines = [f"checkpoint.start {where} is not read again: the run goes on from its own checkpoint"]
    else:
        start = WarmStart.open(where, sections.checkpoint.start_pickle, drafter, target)
        vocabulary, lines = start.choose_vocabulary(count(store))

    def build() -> DrafterNet:
        torch.manual_seed(sections.data.seed)
        return drafter.build(target, vocabulary)

    net = build()
    if start is not None:
        lines += start.fill(net)
        if rank == 0:
            keep_vocabulary(checkpoints, vocabulary)
    if sections.lora.rank is not None:
        lines += adapters.begin(net, sections.lora, drafter, target.identity, sections.data.seed, checkpoints, resumed, rank)
    for line in lines:
        say(line)
    return build, net


def _require_unsaid(net: DrafterNet, store: TokenStore) -> None:
    """UserError where the chats hold a token that stands for a masked one."""
    if not net.unsaid:  # counting reads the whole store
        return
    supervised_V, other_V = store.counts()
    said = {token: int(supervised_V[token] + other_V[token]) for token in net.unsaid}
    if found := [f"{token} ({times:,} times)" for token, times in said.items() if times]:
        raise UserError(
            f"{store.folder}/ holds the token {', '.join(found)}, which stands for a masked one in this drafter, so it would be read as text and as "
            "no text at once; set drafter.init_args.mask_token to one that no chat holds."
        )


def _stream(
    sections: Sections,
    store: TokenStore,
    share: Share,
    target: Target,
    net: DrafterNet,
    position: Position,
    say: Callable[[str], None],
) -> WindowStream:
    """The run's micro-batches from its position on, with their arithmetic said."""
    data = sections.data
    chats = read_chats(store, min(data.length, target.max_positions))
    plan = RowPlan(chats, data.length, data.seed)
    for line in plan_arithmetic(plan, share, sections.max_steps):
        say(line)
    counts = partial(sections.objective.counts, depth=net.needs.depth)
    recorded = records_steps(sections.speed, target.device)
    fill = partial(filled, tokens=data.length, fixed_queries=net.fixed_queries) if recorded else None
    return WindowStream(store, plan, share, net.layout, counts, position.rows, data.features == "stored", fill)


def _loader(sections: Sections, stream: WindowStream, device: torch.device) -> Iterable[MicroBatch]:
    """The stream's micro-batches; where the target reads ahead, each with the next one."""
    data = sections.data
    loader = make_loader(stream, data.workers, pin=device.type == "cuda")
    return LookAhead(loader) if data.features == "online" and reads_ahead(sections.speed, device) else loader


def _prompts(
    store: TokenStore, target: Target, config: OnPolicyConfig, net: DrafterNet, length: int, say: Callable[[str], None]
) -> list[Request]:
    """What rollouts answer, with its arithmetic said."""
    prompts = find_prompts(store, config, length, target.max_positions, drafts_of(config, net))
    for line in prompts.lines():
        say(line)
    passes = config.rollouts / config.every / len(prompts.answered)
    say(
        f"on policy: {config.rollouts:,} of {len(prompts.answered):,} prompts are answered every {config.every} steps ({passes:.4f} passes over them a "
        f"step), and each step learns from {config.batch:,} of the newest {config.buffer:,} answers"
    )
    return prompts.answered


def _on_policy(
    setup: Setup,
    config: OnPolicyConfig,
    prompts: list[Request],
    build: Callable[[], DrafterNet],
    length: int,
    checkpoints: Path,
    resumed: bool,
) -> tuple[OnPolicyTask, DataLoader]:
    """The task that makes its own micro-batches, with the rollouts of its checkpoint, and the loader that counts them."""
    task = OnPolicyTask(setup, config, prompts, build, length, checkpoints / "rollouts")
    require_space(checkpoints, 2 * task.bytes_beside, "two sets of rollouts (on_policy.buffer of them)")
    if resumed:
        task.restore()
    return task, DataLoader(Turns(setup.share.accumulate), batch_size=None)


def _say_resumed(saved: Saved, share: Share, max_steps: int, on_policy: bool, say: Callable[[str], None]) -> None:
    rows = "" if on_policy else f" {saved.position.rows:,} rows,"  # there a step has as many rows as its rollouts fill
    say(f"resuming from {saved.folder}: {saved.position.step} of {max_steps} steps,{rows} {saved.position.tokens:,} tokens")
    if on_policy:
        return
    before = saved.share["world"] * saved.share["accumulate"] * saved.share["rows"]
    if before != share.window_rows:
        say(f"note: an optimizer step had {before} rows before and has {share.window_rows} now")


def _held_out(run_folder: Path, target: Target, config: CheckpointConfig) -> list[Request]:
    """The held-out prompts that tau is measured on, those that the target has room for."""
    if not config.tau_prompts:
        return []
    store = TokenStore.open(run_folder / "data" / "held_out")
    store.require(target.identity)
    room = target.max_positions - config.tau_tokens - config.drafts - 1
    if not len(store):
        raise UserError(
            f"{store.folder}/ holds no prompts; raise prepare.held_out and run data_prep again, or set checkpoint.tau_prompts to 0 to train without "
            "measuring tau."
        )
    requests = [request for request in store.requests(config.tau_tokens) if len(request.ids) <= room]
    if not requests:
        raise UserError(
            f"{store.folder}/ has no prompt that leaves room for {config.tau_tokens} tokens within the target's {target.max_positions} "
            "positions; lower checkpoint.tau_tokens, or set checkpoint.tau_prompts to 0 to train without measuring tau."
        )
    return requests[: config.tau_prompts]


def _fit(
    task: DistillTask,
    loader: Iterable,
    run: Run,
    sections: Sections,
    topology: Processes,
    run_folder: Path,
    saved: Saved | None,
    watch: Watch,
) -> None:
    """Composes Lightning's Trainer and runs it."""
    _quiet()
    devices = {"accelerator": topology.accelerator, "devices": topology.local, "num_nodes": topology.nodes}
    arguments = devices | {"use_distributed_sampler": False} | sections.trainer | OURS
    arguments.setdefault("logger", CSVLogger(run_folder / "logs", name=""))
    prompts = len(run.held_out)
    closing = f"measuring tau on {prompts} held-out prompts for the last time, then saving" if prompts else "saving"
    reporter = Reporter(task.position.step, sections.max_steps, closing, shown=topology.rank == 0)
    extra = arguments.pop("callbacks", None) or []
    trainer = pl.Trainer(
        **arguments, callbacks=[Conductor(run, reporter, watch), *(extra if isinstance(extra, list) else [extra])]
    )
    take_over_signals(trainer)
    if uses_deepspeed(trainer.strategy):  # its guess looks for a batch size in the loader, which has none
        trainer.strategy.config.setdefault("train_micro_batch_size_per_gpu", sections.data.rows)
        # torch's AdamW steps what is offloaded too; DeepSpeed's own would have to be compiled first.
        trainer.strategy.config.setdefault("zero_force_ds_cpu_optimizer", False)
    if saved is not None and saved.state.is_dir():
        _cut_anew(trainer.strategy, task, saved)
    try:
        with own_stream(sections.speed, task.target.device):
            trainer.fit(task, loader, ckpt_path=None if saved is None else str(saved.state), weights_only=True)
    finally:
        reporter.close()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _cut_anew(strategy: Any, task: DistillTask, saved: Saved) -> None:
    """Where DeepSpeed's pieces were made for another number of processes or by another stage, other ones are made of them."""
    if saved_by(saved.state) != (task.share.world, zero_stage(strategy)):
        cut_anew(strategy, task, ZeroState(saved.state))


def _quiet() -> None:
    """Lightning's banners and hints that do not apply to an endless stream with its own order."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # Of recorded steps under DDP, which adds gradients up on a stream of its own; events join the two.
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")


def _say_nothing(text: str) -> None:
    pass
