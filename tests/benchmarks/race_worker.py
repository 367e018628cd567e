"""One contender of race.py, in a process of its own: python race_worker.py CASE.json RESULT.json

Ours is what `drafttrain train` runs (`tasks.train._fit`: Lightning, DistillTask, Conductor), from a recipe and a hardware recipe, over batches whose
layouts are made; theirs is what `speculators train` runs (`Trainer.train_epoch` of 0.9.0), from its own flags, over batches collated by its own
`CollateFn`. Both get the same packed rows of tokens and the same random taps and final states, which lie on the device; nobody logs or saves.
"""

import argparse
import fcntl
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
from draft_pass import headed_target, random_target, recipe_of  # noqa: E402
from flops import drafter_products, matrix_rate, target_products  # noqa: E402
from recipe_targets import REAL, shrunken  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402

from drafttrain.types import Features, Sequences  # noqa: E402

SHORTEST, LONGEST = 1 / 16, 3 / 8
"""Of a row, how long its chats are: for a row of 4,096 tokens 256 to 1,536, so none reaches beyond the window of 2,048 that is speculators' default."""
PROMPT = 1 / 4
"""Share of a chat that is not supervised."""
ROWS = 4
"""Different packed rows, which come again and again."""
GATED = 3
"""Steps that compile, before a process says that it is warm."""
SLOW = 1.3
"""A step is not steady yet where it takes longer than this many of the median."""


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    shape: str
    drafter: str
    """eagle3 or dflash."""
    size: int
    """Steps that EAGLE-3 is unrolled for, or slots of DFlash's blocks."""
    contender: str
    length: int = 4096
    anchors: int = 512
    draft_vocab: int | None = None
    """Of EAGLE-3, that of the recipe unless given."""
    warmup: int = 8
    steps: int = 30
    device: str = "cuda"
    tiny: bool = False
    hardware: str = "recipes/hardware/zero2.yaml"
    optimizer: str = "adamw"
    """adamw, or muon, in which both have it."""
    ours: tuple[str, ...] = ()
    """More of the recipe, as --section.key value."""
    theirs: tuple[str, ...] = ()
    """More flags of `speculators train`."""
    profile: str | None = None
    gate: str | None = None
    """Folder in which processes that started together say that they are warm, and then take turns."""
    began: float = field(default_factory=time.time)
    """When the process was started."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def target(self) -> PretrainedConfig:
        config = REAL[self.shape]()
        return shrunken(config) if self.tiny else config

    @property
    def mask_token(self) -> int:
        return self.target.vocab_size - 1

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def packed_row(length: int, words: int, seed: int) -> Sequences:
    """A row filled with chats of random tokens below `words`."""
    g = torch.Generator().manual_seed(seed)
    row = torch.arange(length)
    supervised, position, document = torch.zeros(length, dtype=torch.bool), torch.zeros_like(row), torch.zeros_like(row)
    start, number = 0, 0
    while start < length:
        size = int(torch.randint(max(int(SHORTEST * length), 8), int(LONGEST * length) + 1, (), generator=g))
        if length - start - size < 8:  # what would be left is no chat
            size = length - start
        chat = slice(start, start + size)
        position[chat], document[chat] = row[:size], number
        supervised[chat] = row[:size] >= max(int(PROMPT * size), 1)
        start, number = start + size, number + 1
    ids = torch.randint(3, words, (length,), generator=g)
    return Sequences(*(x[None] for x in (ids, supervised, position, document)))


def random_features(case: Case, taps: int, number: int) -> Features:
    torch.manual_seed(1000 + number)
    shape = (1, case.length, taps + 1, case.target.hidden_size)
    rows = torch.randn(shape, device=case.device, dtype=case.dtype)
    return Features(rows[:, :, :taps].contiguous(), rows[:, :, taps].contiguous())


class Gate:
    """Where processes that compile side by side wait until the last one is warm; then each has the machine alone, one behind the other."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name

    def enter(self) -> None:
        (self.folder / self.name).touch()
        while not (self.folder / "open").exists():
            time.sleep(0.05)
        self._lock = open(self.folder / "lock", "a")  # noqa: SIM115 - held until leave()
        fcntl.flock(self._lock, fcntl.LOCK_EX)


class Timer:
    """Wall time of steps that warm up, one by one, and of those that are measured, together."""

    def __init__(self, case: Case):
        self.case, self.ends, self.seconds, self.peak, self.done = case, [], 0.0, 0, 0
        self.gate = Gate(Path(case.gate), f"{case.shape}-{case.drafter}-{case.size}-{case.contender}") if case.gate else None
        self.first = case.warmup + (GATED if case.gate else 0)
        """Steps before the measured ones."""

    def step(self) -> None:
        """Behind every step."""
        self.done += 1
        case = self.case
        if self.done <= self.first:
            case.wait()
            self.ends.append(time.time() - case.began)
        if self.gate and self.done == GATED:
            if case.cuda:
                torch.cuda.empty_cache()  # room for those whose turn it is
            self.gate.enter()
        if self.done == self.first:
            # A replay allocates nothing: what a recorded step holds was counted when it was recorded.
            if case.cuda and "--speed.graph_step" not in case.ours:
                torch.cuda.reset_peak_memory_stats()
            self._since, self._from = time.perf_counter(), time.time()
        if self.done == self.first + case.steps:
            case.wait()
            self.seconds, self._to = (time.perf_counter() - self._since) / case.steps, time.time()
            self.peak = torch.cuda.max_memory_allocated() if case.cuda else 0
            # The gate opens when the process ends: what is looked at behind the measured steps has the machine alone too.

    @property
    def measuring(self) -> bool:
        return self.first <= self.done < self.first + self.case.steps

    @property
    def finished(self) -> bool:
        return self.done >= self.first + self.case.steps

    def facts(self) -> dict[str, Any]:
        """Seconds from the start of the process to the first step's end, and to the end of the last step that was not yet as fast as the others."""
        took = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        slow = [end for end, seconds in zip(self.ends[1:], took, strict=True) if seconds > SLOW * self.seconds + 0.005]
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.case.length / self.seconds,
            "peak": self.peak,
            "measured_at": [self._from, self._to],
            "first_step_at": self.ends[0],
            "steady_at": None if self.gate else max([self.ends[0], *slow]),
            "warmup": took,
        }


# ---- ours --------------------------------------------------------------------------------------------------------------


def recipe_flags(case: Case) -> list[tuple[str, str]]:
    """What the race says over the recipes: the shape of the work, and that nothing is logged or saved."""
    rare = str(10**9)
    flags = {
        "data.length": str(case.length), "data.rows": "1", "trainer.max_steps": rare, "trainer.log_every_n_steps": rare,
        "trainer.accumulate_grad_batches": "1", "trainer.gradient_clip_val": "1.0", "trainer.logger": "false", "checkpoint.every": rare,
        "checkpoint.tau_prompts": "0", "speed.fused_blocks": "true", "speed.fused_rows": "true", "speed.overlap_target": "true",
    }  # fmt: skip
    if case.drafter == "dflash":
        flags |= {"block": str(case.size), "anchors": str(case.anchors), "mask_token": str(case.mask_token)}
    else:
        flags |= {"depth": str(case.size)}
        if case.draft_vocab:
            flags["draft_vocab"] = str(case.draft_vocab)
    flags = {name if "." in name else f"drafter.init_args.{name}": value for name, value in flags.items()}
    if case.optimizer == "muon":
        flags["optimizer.muon_lr"] = "1e-3"
    if not case.cuda:
        flags |= {"trainer.precision": "32-true", "speed.compile": "false"}
    return [*flags.items(), *zip((key.removeprefix("--") for key in case.ours[::2]), case.ours[1::2], strict=True)]


def trainer_section(case: Case, recipe: Any) -> dict[str, Any]:
    """The recipe's, without DeepSpeed where it is not installed or cannot be."""
    if case.cuda and importlib.util.find_spec("deepspeed"):
        return recipe.trainer
    return recipe.trainer | {"strategy": "auto"}


def ours(case: Case) -> dict[str, Any]:
    import lightning.pytorch as pl
    from train_step import Clock

    from drafttrain.data.stream import LookAhead, MicroBatch, Share, pinned, window_counts
    from drafttrain.layouts import filled
    from drafttrain.recipe import load_recipe
    from drafttrain.tasks.conductor import Run
    from drafttrain.tasks.distill import DistillTask, Position, Setup
    from drafttrain.tasks.sections import Sections
    from drafttrain.tasks.speed import reads_ahead, records_steps
    from drafttrain.tasks.stop import StopSignal
    from drafttrain.tasks.train import _fit
    from drafttrain.tasks.watch import Watch
    from drafttrain.topology import Topology
    from drafttrain.trainer_section import trainer_arguments
    from drafttrain.vocab import DraftVocabulary

    file = {"eagle3": ["eagle3-h100", "eagle3"], "dflash": ["dflash"]}[case.drafter]
    paths = [ROOT / "recipes" / case.shape / f"{name}.yaml" for name in file]
    recipe, _ = load_recipe([next(path for path in paths if path.is_file()), ROOT / case.hardware], recipe_flags(case))
    online, device = case.contender == "online", torch.device(case.device)
    torch.manual_seed(0)
    if online:
        target = random_target(case.target, device, case.dtype, case.shape)
    else:
        target = headed_target(case.target, device, case.dtype)
    size: Any = recipe.drafter.draft_vocab
    vocabulary = DraftVocabulary.full(target.vocab) if size is None else DraftVocabulary(torch.arange(size), target.vocab)

    def build():
        torch.manual_seed(0)
        with device:
            return recipe.drafter.build(target, vocabulary)

    net, objective, depth = build(), recipe.objective, 0
    net.speaks_V = vocabulary.t2d  # layouts are made on the CPU
    depth = net.needs.depth
    head = getattr(net, "lm_head", None)
    if case.contender == "ours-frozen-head" and head is not None:
        head.requires_grad_(False)
    words = min(len(vocabulary.ids), case.mask_token)
    recorded = records_steps(recipe.speed, device)
    batches, work = [], []
    for number in range(ROWS):
        sequences = packed_row(case.length, words, number)
        layout = net.layout(sequences, numbers=[(0, number)])
        window = window_counts([sequences], [layout], lambda layout: objective.counts(layout, depth))
        teacher = any(type(divergence).__name__ != "HardCrossEntropy" for divergence in objective.divergences)
        work.append(
            drafter_products(net, sequences, layout, teacher, any(w.requires_grad for w in head.parameters()) if head else False)
        )
        if online:
            work[-1] += target_products(case.target, sequences)
        if recorded:
            layout = filled(layout, case.length, net.fixed_queries)
        if case.cuda:
            sequences, layout = pinned(sequences), pinned(layout)
        features = None if online else random_features(case, len(net.needs.taps), number)
        batches.append(MicroBatch(sequences, features, layout, 0, True, window))

    timer, clock, marks = Timer(case), Clock(device), []

    class Stopwatch(pl.Callback):
        """Marks what a step is made of, and ends the training."""

        profile = host = None

        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            if timer.finished and self.host is None:
                case.wait()
                self.began = time.perf_counter()
            elif timer.finished and case.profile:
                self.profile = torch.profiler.profile()
                self.profile.__enter__()
            self.marks = [clock.mark()]

        def on_before_backward(self, trainer, task, loss):
            self.marks.append(clock.mark())

        def on_after_backward(self, trainer, task):
            self.marks.append(clock.mark())

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            self.marks.append(clock.mark())
            if timer.measuring:
                marks.append(self.marks)
            elif timer.finished and self.host is None:
                self.host = time.perf_counter() - self.began
            timer.step()
            if self.profile is not None:
                case.wait()
                self.profile.__exit__(None, None, None)
                write_profile(self.profile, case)
            if self.host is not None and (not case.profile or self.profile is not None):
                trainer.should_stop = True

    class Read:
        """What the target needs is a part of its own."""

        def __init__(self, read: Callable):
            self.read, self.marks = read, []

        def __call__(self, batch):
            first, found, last = clock.mark(), self.read(batch), clock.mark()
            if timer.measuring:
                self.marks.append((first, last))
            return found

    class Endless:
        """Fresh ones each time: a target that reads ahead leaves its features in them."""

        def __iter__(self) -> Iterator[MicroBatch]:
            while True:
                for b in batches:
                    yield MicroBatch(b.sequences, b.features, b.layout, b.micro, b.last, b.window)

    with tempfile.TemporaryDirectory() as folder, StopSignal() as stop:
        run_folder = Path(folder)
        section = trainer_section(case, recipe)
        trainer = trainer_arguments(section, run_folder) | {"callbacks": [stopwatch := Stopwatch()]}
        sections = Sections(
            recipe.target, recipe.drafter, objective, recipe.data, recipe.optimizer, recipe.checkpoint, trainer, recipe.speed
        )
        task = DistillTask(
            Setup(
                target,
                net,
                objective,
                recipe.optimizer,
                Share(rows=1),
                0,
                Position(),
                stop,
                recipe.speed,
                recipe.data.feature_dtype,
            )
        )
        if online:
            task._features = Read(task._features)  # type: ignore[method-assign]
        topology = Topology(accelerator="gpu" if case.cuda else "cpu")
        run = Run(run_folder / "checkpoints", recipe.checkpoint, recipe.drafter, build, [], {})
        with Watch(topology.store, 0, 1, recipe.checkpoint.hung_s) as watch:
            loader = LookAhead(Endless()) if online and reads_ahead(recipe.speed, device) else Endless()
            _fit(task, loader, run, sections, topology, run_folder, None, watch)  # type: ignore[arg-type]
    case.wait()
    names = ("forward", "backward", "clip and step")
    parts = {name: sum(clock.between(m[i], m[i + 1]) for m in marks) / len(marks) for i, name in enumerate(names)}
    parts["host"] = 1e3 * (stopwatch.host or 0.0)
    if online:
        parts["of forward, the target"] = sum(clock.between(*m) for m in task._features.marks) / len(task._features.marks)  # type: ignore[attr-defined]
    per_step = sum(product.operations for row in work for product in row) / len(work)
    trained = sum(w.numel() for w in net.parameters() if w.requires_grad)
    strategy = section.get("strategy", "auto")
    return timer.facts() | {
        "parts": parts, "trained": trained, "flop": per_step, "work": [str(product) for product in work[0]],
        "how": f"{Path(case.hardware).name}, strategy {strategy if isinstance(strategy, str) else strategy['class_path'].rpartition('.')[2]}, "
        f"precision {recipe.trainer.get('precision')}, {recipe.speed}",
        "elements": [len(batch.layout.label_N) for batch in batches],
    }  # fmt: skip


# ---- theirs ------------------------------------------------------------------------------------------------------------


def their_flags(case: Case, folder: Path, layers: list[int]) -> list[str]:
    """All else as `speculators train` has it by default. The race is with AdamW on both sides unless Muon is asked for."""
    flags = {
        "verifier-name-or-path": folder, "speculator-type": case.drafter, "total-seq-len": case.length, "optimizer": case.optimizer,
        "save-path": folder / "checkpoints", "data-path": folder, "log-freq": 10**9, "mask-token-id": case.mask_token, "max-steps": 10**9,
    }  # fmt: skip
    if case.drafter == "dflash":
        flags |= {"block-size": case.size, "max-anchors": case.anchors}
    else:
        flags |= {"ttt-steps": case.size}
    if not case.cuda:
        flags |= {"draft-attn-impl": "eager", "loss-implementation": "eager", "hidden-states-dtype": "float32"}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [*words, "--target-layer-ids", *map(str, layers), *case.theirs]


def save_ends(case: Case, folder: Path) -> None:
    """The verifier as they load it: its config, embedding, head and last norm."""
    from safetensors.torch import save_file

    config = case.target
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[config.model_type]]
    config.save_pretrained(folder)
    torch.manual_seed(0)
    table = (config.vocab_size, config.hidden_size)
    weights = {
        "model.embed_tokens.weight": torch.empty(table, device=case.device, dtype=case.dtype).normal_(std=0.02).cpu(),
        "lm_head.weight": torch.empty(table, device=case.device, dtype=case.dtype).normal_(std=0.02).cpu(),
        "model.norm.weight": torch.ones(config.hidden_size, dtype=case.dtype),
    }
    save_file(weights, folder / "model.safetensors")


def theirs(case: Case) -> dict[str, Any]:
    import logging

    import speculators.train.distributed as distributed
    from speculators.model import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.config import TrainConfig
    from speculators.train.data import CollateFn
    from speculators.train.trainer import Trainer, TrainerConfig

    if case.cuda:
        part_tuned_kernels()
    recipe: Any = recipe_of(case.shape, case.drafter)
    config = case.target
    words = case.draft_vocab or recipe.drafter.draft_vocab
    taps = recipe.drafter.layers if case.drafter == "dflash" else 3
    layers = [1 + i for i in range(taps)]  # which ones they are changes no number of operations
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_ends(case, folder)
        args = argparse.Namespace(**TrainConfig.resolve(their_flags(case, folder, layers)).flatten())
        set_seed(args.seed, args.deterministic_cuda)
        if not case.cuda:
            distributed._local_rank = torch.device("cpu")  # type: ignore[assignment]
        model_class = SpeculatorModel.registry[args.speculator_type]
        t2d = d2t = None
        if words is not None:
            t2d = torch.arange(config.vocab_size) < words
            d2t = torch.zeros(words, dtype=torch.long)  # draft id + this = target id
        model = build_draft_model(args, model_class, t2d, d2t, words or config.vocab_size)
        dtype = getattr(torch, args.hidden_states_dtype)
        preprocess = shift_batch if case.drafter == "eagle3" else None
        collate = CollateFn(case.length, config.hidden_size, taps, dtype, preprocess)
        speakable = min(words or config.vocab_size, case.mask_token)
        batches = [collate(their_items(case, packed_row(case.length, speakable, number), taps, number)) for number in range(ROWS)]
        batches = [{k: v.to(case.device) if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in batches]
        train_kwargs, val_kwargs = model_class.get_trainer_kwargs(**vars(args))
        own = {name: getattr(args, name) for name in TrainerConfig._fields if hasattr(args, name)}
        own |= {"num_epochs": 1, "hidden_states_dtype": dtype, "resume_from_checkpoint": False}
        trainer = Trainer(
            model, TrainerConfig(**own, train_call_kwargs=train_kwargs, val_call_kwargs=val_kwargs), Cycle(batches, 10**6)
        )
    trainer.global_step = 1  # step 0 would be logged, which waits for the device
    timer = Timer(case)

    def train(steps: int) -> None:
        trainer.train_loader = Cycle(batches, steps)
        trainer.train_epoch(0, step_callback=timer.step)

    try:
        train(1)
    except Exception as error:
        if not case.cuda or "already tracked" not in str(error):
            raise
        print(f"their fused losses are left out of the compiled graph: {str(error)[:200]}", flush=True)
        call_losses_as_they_are()
        train(1)
    train(timer.first - 1)
    train(case.steps)
    if case.cuda:  # their own breakdown, of a step that waits behind each part
        logger = logging.getLogger("speculators.metrics")
        logger.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = lambda record: kept.update(record.msg.get("profile") or {})  # type: ignore[method-assign]
        logger.addHandler(handler)
        trainer.global_step = 0
        trainer.train_loader = Cycle(batches, 1)
        trainer.train_epoch(0)
    parts = {
        ours: kept[own]
        for ours, own in (("forward", "fwd_ms"), ("backward", "bwd_ms"), ("clip and step", "opt_ms"))
        if own in kept
    }
    if "clip_ms" in kept:  # counted as backward by them
        parts["backward"], parts["clip and step"] = kept["bwd_ms"] - kept["clip_ms"], kept["opt_ms"] + kept["clip_ms"]
    trained = sum(w.numel() for w in model.parameters() if w.requires_grad)
    loss = train_kwargs["loss_config"]
    return timer.facts() | {"parts": parts, "trained": trained, "how": f"loss {'+'.join(loss)} ({args.loss_implementation}), {args.draft_attn_impl}, "
            f"{args.optimizer}, autocast {dtype}"}  # fmt: skip


def part_tuned_kernels() -> None:
    """torch 2.11's compiler takes no two kernels that share one list of tuning choices, as their fused losses do ("already tracked for mutation")."""
    from speculators.losses import fused

    fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)


def call_losses_as_they_are() -> None:
    """The same kernels, outside of the compiled graph."""
    from speculators.losses import fused

    torch._dynamo.reset()
    for name in [name for name in vars(fused) if name.startswith("fused_")]:
        setattr(fused, name, torch.compiler.disable(getattr(fused, name)))


class Cycle:
    """As much of a DataLoader as their trainer asks for."""

    batch_sampler = None

    def __init__(self, batches: list[dict], steps: int):
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict]:
        return (self.batches[step % len(self.batches)] for step in range(self.steps))


def their_items(case: Case, sequences: Sequences, taps: int, number: int) -> list[dict]:
    """The chats of a row, each as their dataset gives it."""
    features, items = random_features(case, taps, number), []
    for document in range(int(sequences.document_BT.max()) + 1):
        (at,) = (sequences.document_BT[0] == document).nonzero(as_tuple=True)
        chat = slice(int(at[0]), int(at[-1]) + 1)
        size = chat.stop - chat.start
        items.append({
            "hidden_states": features.taps_BTAD[0, chat].flatten(1), "input_ids": sequences.ids_BT[0, chat].to(case.device),
            "verifier_last_hidden_states": features.final_BTD[0, chat], "loss_mask": sequences.supervised_BT[0, chat].to(case.device),
            "lengths": torch.tensor([size]), "position_ids": torch.arange(size, device=case.device),
        })  # fmt: skip
    return items


# ---- the command -------------------------------------------------------------------------------------------------------


def write_profile(profile: Any, case: Case) -> None:
    host = "self_cpu_time_total"
    with open(str(case.profile), "a") as file:
        print(f"== {case.shape}, {case.drafter} {case.size}, {case.contender}: one step", file=file)
        for order in ("self_device_time_total", host) if case.cuda else (host,):
            print(profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90), file=file)


def compiler_caches() -> dict[str, int]:
    """What torch.compile found kept, what it had to do, and what it could not keep."""
    return {
        f"{kind}: {name}": number
        for kind in ("aot_autograd", "inductor")
        for name, number in torch._dynamo.utils.counters[kind].items()
        if "cache" in name
    }


def rate(case: Case) -> dict[str, Any]:
    """The card's matrix rate, and what it is."""
    if not case.cuda:
        return {"device": "CPU", "rate": None}
    return {"device": torch.cuda.get_device_name(), "rate": matrix_rate(torch.device("cuda"))}


CONTENDERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "ours": ours, "ours-frozen-head": ours, "online": ours, "speculators": theirs, "rate": rate,
}  # fmt: skip


def main() -> None:
    case = Case(**json.loads(Path(sys.argv[1]).read_text()))
    if not case.cuda:
        torch.set_num_threads(1)
    found = CONTENDERS[case.contender](replace(case, ours=tuple(case.ours), theirs=tuple(case.theirs)))
    facts = {"torch": torch.__version__, "python": sys.version.split()[0], "case": asdict(case), "compiler": compiler_caches()}
    Path(sys.argv[2]).write_text(json.dumps(found | facts, indent=1))


if __name__ == "__main__":
    main()
