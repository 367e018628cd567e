"""What a training step holds, beside what `plan` says it will: PYTHONPATH=.:tests python tests/benchmarks/step_memory.py [flags]

    --cases eagle3-135m,eagle3-135m-32k,dflash-8b,dspark-8b,eagle3-8b --seconds 540 --out FILE
    --tiny --device cpu                        # shrunken targets and short rows, in fp32: that all ways give the same loss and gradients

Of every case one packed row or more of random tokens: the target (its real shape, random weights, bf16) reads, the drafter (fp32 weights, computed with in
bf16, as trainer.precision bf16-mixed does) learns, AdamW steps; three times, the last of which counts. Each case in several ways: logits in
chunks or all at once (objective.chunk), attention dense or fused (speed.fused_blocks, speed.fused_rows), layers computed again in the backward pass
(speed.checkpoint_activations), a window; those that are compiled come last, since each takes a minute or two.

Columns: the peak of `max_memory_allocated` behind the first step; what tasks/memory.py tells of it without a GPU, and their ratio (compiled kernels hold
less than is told); the peak of the allocator with its gaps; the widest tensor of logits in a step, as rows of the vocabulary (where nothing is fused);
milliseconds of the last step; and how far loss and gradients of the first step are from those of the case's first way. A way that fails (out of
memory, say) prints why.
"""

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from draft_pass import random_target, recipe_of
from recipe_targets import REAL, shrunken
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.layouts import one_chat
from drafttrain.losses import Distillation
from drafttrain.target.target import Target
from drafttrain.tasks.memory import Step, peak_of
from drafttrain.tasks.optimizer import make_optimizer, token_sides
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.teacher import TargetTeacher, plainly
from drafttrain.types import Layout, Sequences
from drafttrain.vocab import DraftVocabulary

GIB = 2**30
SAMPLED = 65536
"""Numbers of each weight's gradient that are compared."""
PROMPT = 1 / 12
"""Share of a row that is not supervised."""
BLOCKS, ROWS, AGAIN, COMPILE = "fused_blocks", "fused_rows", "checkpoint_activations", "compile"


@dataclass(frozen=True)
class Way:
    """One way of computing a step of a case."""

    speed: tuple[str, ...] = ()
    """What of `SpeedConfig` is on."""
    chunk: int = 0
    window: int | None = None

    def __str__(self) -> str:
        words = [
            *self.speed,
            *([f"chunk {self.chunk:,}"] if self.chunk else []),
            *([f"window {self.window:,}"] if self.window else []),
        ]
        return ", ".join(words) or "plain"


@dataclass(frozen=True)
class Case:
    """A drafter on rows of some length of a target."""

    shape: str
    drafter: Any
    objective: Any
    rows: int
    length: int
    ways: tuple[Way, ...]


def cases() -> dict[str, Case]:
    def block(kind: str, *ways: Way) -> Case:
        recipe = recipe_of("qwen3-8b", kind)
        assert recipe is not None
        drafter: Any = replace(recipe.drafter, block=16, anchors=512, draft_vocab=None)  # type: ignore[call-arg]
        return Case("qwen3-8b", drafter, recipe.objective, 1, 3072, ways)

    small, large = Eagle3(depth=5, draft_vocab=16384), Eagle3(depth=7, draft_vocab=32000)
    return {
        "eagle3-135m": Case("smollm2-135m", small, Distillation(), 8, 1024, (
            Way(), Way((ROWS,)), Way((AGAIN,)), Way((ROWS, AGAIN), chunk=4096), Way((COMPILE,)), Way((COMPILE, ROWS)), Way((COMPILE, ROWS, AGAIN)))),
        "eagle3-135m-32k": Case("smollm2-135m", small, Distillation(), 1, 32768, (
            Way((ROWS,), 4096), Way((ROWS, AGAIN), 4096), Way((ROWS, AGAIN), 4096, window=2048), Way((COMPILE, ROWS, AGAIN), 4096))),
        "dflash-8b": block("dflash",
            Way((BLOCKS,), 2048), Way((BLOCKS, AGAIN), 2048), Way((), 2048), Way((BLOCKS,)), Way((BLOCKS, ROWS, AGAIN), 2048), Way((COMPILE, BLOCKS), 2048)),
        "dspark-8b": block("dspark", Way((BLOCKS,), 2048), Way((BLOCKS, AGAIN), 2048)),
        "eagle3-8b": Case("qwen3-8b", large, Distillation(), 1, 4096, (
            Way((), 2048), Way((ROWS,), 2048), Way((ROWS, AGAIN), 2048), Way((COMPILE, ROWS), 2048), Way((COMPILE, ROWS, AGAIN), 2048))),
    }  # fmt: skip


def tiny(case: Case) -> Case:
    """The same on a few tokens."""
    small: dict[str, Any] = {"draft_vocab": None} if hasattr(case.drafter, "anchors") else {"draft_vocab": 200}
    small |= {"block": 4, "anchors": 24} if hasattr(case.drafter, "anchors") else {}
    ways = (replace(way, chunk=min(way.chunk, 16), window=way.window and 9) for way in case.ways)
    ways = tuple(way for way in ways if COMPILE not in way.speed)
    return replace(case, drafter=replace(case.drafter, **small), rows=min(case.rows, 2), length=96, ways=ways)


@dataclass(frozen=True)
class Held:
    """What one way came to."""

    case: str
    way: str
    told: int
    """Bytes, of the estimate; 0 where it failed."""
    told_s: float
    """Seconds that it took."""
    peak: int
    """Bytes, measured; 0 on a CPU."""
    reserved: int
    rows: int | None
    """Of the vocabulary, in the widest tensor of logits; None where nobody looked."""
    ms: float
    loss_off: float
    grads_off: float | None


class Widest(TorchDispatchMode):
    """Notes the largest tensor whose rows are as wide as the vocabulary; weights and their gradients are known by their number of rows."""

    def __init__(self, words: int, of_weights: set[int]):
        super().__init__()
        self.words, self.of_weights, self.rows = words, of_weights, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] == self.words:
                rows = x.numel() // self.words
                self.rows = max(self.rows, 0 if rows in self.of_weights else rows)
        return out


class Training:
    """A drafter that learns from one micro-batch, in the order of the trainer."""

    def __init__(self, target: Target, case: Case, way: Way):
        cuda, speed = target.device.type == "cuda", SpeedConfig(**dict.fromkeys(way.speed, True))
        drafter = replace(case.drafter, window=way.window) if way.window else case.drafter
        size = drafter.draft_vocab
        self.vocabulary = (
            DraftVocabulary.full(target.vocab) if size is None else DraftVocabulary(torch.arange(size), target.vocab)
        )
        self.step = Step(
            target, target.dtype, drafter, self.vocabulary, replace(case.objective, chunk=way.chunk), speed=speed,
            precision="bf16-mixed" if cuda else "32-true",
        )  # fmt: skip
        torch.manual_seed(0)
        with target.device:
            net: DrafterNet = drafter.build(target, self.vocabulary).train()
        net.speaks_V = self.vocabulary.t2d  # layouts are made on the CPU
        net.fused, net.fused_rows, net.recomputes = (
            speed.fused_blocks and cuda,
            speed.fused_rows and cuda,
            speed.checkpoint_activations,
        )
        target.fused_rows = net.fused_rows
        self.target, self.net = target, net
        self.optimizer = make_optimizer(self.step.optimizer, net, cuda, token_sides(net))
        self.score = make_score(net, self.step.objective, TargetTeacher(target, net), net.needs.depth, speed.compile)

    def batch(self, case: Case) -> tuple[Sequences, Layout]:
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(1, len(self.vocabulary.ids), (case.rows, case.length), generator=g)
        chat = one_chat(ids[0], int(case.length * PROMPT))
        rows = (getattr(chat, name).repeat(case.rows, 1) for name in ("supervised_BT", "position_BT", "document_BT"))
        sequences = Sequences(ids, *rows)
        return sequences, self.net.layout(sequences, numbers=[(0, row) for row in range(case.rows)])

    def loss(self, sequences: Sequences, layout: Layout) -> Tensor:
        device = self.target.device
        with torch.no_grad(), plainly(device):
            features = self.target.read_packed(sequences, self.net.needs.taps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            terms, _ = self.score(sequences, features, layout)
        return torch.stack([term.sum / term.count for term in terms.values()]).sum()

    def learn(self, sequences: Sequences, layout: Layout) -> Tensor:
        loss = self.loss(sequences, layout)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def sampled(self) -> Tensor:
        """The first numbers of every gradient, in one row."""
        return torch.cat([w.grad.flatten()[:SAMPLED].float() for w in self.net.parameters() if w.grad is not None])


def held(name: str, case: Case, way: Way, target: Target, first: dict[str, Any]) -> Held:
    """`first` keeps loss and gradients of the case's first way."""
    training, device = Training(target, case, way), target.device
    cuda = device.type == "cuda"
    sequences, layout = training.batch(case)
    began = time.perf_counter()
    told = estimate(training.step, sequences, layout)
    told_s = time.perf_counter() - began
    sequences, layout = sequences.to(device), layout.to(device)
    loss = training.learn(sequences, layout)
    said, grads = float(loss), training.sampled()
    if way.window is None:
        first.setdefault("loss", said)
        first.setdefault("grads", grads)
    loss_off, grads_off = abs(said / first["loss"] - 1), float((grads - first["grads"]).norm() / first["grads"].norm())
    del grads
    training.optimizer.step()
    rows = (
        None
        if cuda and (BLOCKS in way.speed or ROWS in way.speed or COMPILE in way.speed)
        else widest(training, sequences, layout)
    )
    for _ in range(2):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        training.learn(sequences, layout)
        training.optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - began)
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    return Held(name, str(way), told, told_s, peak, reserved, rows, ms, loss_off, grads_off)


def estimate(step: Step, sequences: Sequences, layout: Layout) -> int:
    try:
        return peak_of(step, sequences, layout).bytes
    except Exception as error:
        print(f"  (not told: {type(error).__name__}: {str(error)[:200]})", flush=True)
        return 0


def widest(training: Training, sequences: Sequences, layout: Layout) -> int | None:
    """Rows of the widest tensor of logits in a whole step, backward included; None where it could not be watched."""
    words = len(training.vocabulary.ids)
    weights = [*training.net.parameters(), training.target.head_weight]
    known = {w.numel() // words for w in weights if words in w.shape} | {training.net.shape.hidden}
    try:
        with Widest(words, known) as seen:
            training.learn(sequences, layout)
    except Exception as error:  # the step itself may still be possible
        print(f"  (not watched: {type(error).__name__}: {str(error)[:120]})", flush=True)
        return None
    return seen.rows


def table(found: list[Held]) -> list[str]:
    heads = [
        "case",
        "way",
        "measured, GiB",
        "told, GiB",
        "told / measured",
        "reserved, GiB",
        "widest logits, rows",
        "ms",
        "loss off by",
        "gradients off by",
    ]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for one in found:
        measured = [
            f"{one.peak / GIB:.2f}",
            f"{one.told / GIB:.2f}",
            f"{one.told / one.peak:.3f}" if one.peak else "",
            f"{one.reserved / GIB:.2f}",
        ]
        cells = [
            one.case,
            one.way,
            *measured,
            "" if one.rows is None else f"{one.rows:,}",
            f"{one.ms:.0f}",
            f"{one.loss_off:.1e}",
        ]
        lines.append(f"| {' | '.join([*cells, f'{one.grads_off:.1e}'])} |")
    return lines


def _forget(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(cases()))
    parser.add_argument("--seconds", type=float, default=540.0, help="no way begins later than this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args, began = arguments(), time.perf_counter()
    device = torch.device(args.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}", flush=True)
    every = {name: tiny(case) if args.tiny else case for name, case in cases().items()}
    found: list[Held] = []
    firsts: dict[str, dict[str, Any]] = {name: {} for name in every}
    for compiled in (False, True):
        shape, target = "", None
        for name in args.cases.split(","):
            case = every[name]
            for way in (way for way in case.ways if (COMPILE in way.speed) == compiled):
                if time.perf_counter() - began > args.seconds:
                    print(f"{name}, {way}: not measured, since time was up", flush=True)
                    continue
                try:
                    if target is None or case.shape != shape:
                        target = None
                        _forget(device)
                        config = shrunken(REAL[case.shape]()) if args.tiny else REAL[case.shape]()
                        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
                        shape, target = case.shape, random_target(config, device, dtype, case.shape)
                    one = held(name, case, way, target, firsts[name])
                    found.append(one)
                    ratio = f", told / measured {one.told / one.peak:.3f}" if one.peak else ""
                    print(
                        f"{name}, {way}: {one.peak / GIB:.2f} GiB, told {one.told / GIB:.2f} in {one.told_s:.1f} s{ratio}, {one.ms:.0f} ms, "
                        f"off by {one.loss_off:.1e} and {one.grads_off:.1e}",
                        flush=True,
                    )  # fmt: skip
                except Exception as error:  # too large for this device, perhaps; the other ways may fit
                    print(f"{name}, {way} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                _forget(device)
                if args.out:
                    facts = {"device": where, "torch": torch.__version__, "ways": [asdict(one) for one in found]}
                    args.out.write_text(json.dumps(facts, indent=1))
    print("\n".join(["", *table(found)]))
    print(f"\n{time.perf_counter() - began:.0f} s in all", flush=True)
    off = [one for one in found if max(one.loss_off, one.grads_off or 0.0) > 1e-4 and "window" not in one.way]
    if device.type == "cpu" and (off or not found):
        raise SystemExit("ways that must compute the same differ, or none ran")


if __name__ == "__main__":
    main()
