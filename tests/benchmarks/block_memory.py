"""What one training step of a block drafter holds: PYTHONPATH=.:tests python tests/benchmarks/block_memory.py [flags]

    --shape qwen3-8b --drafters dflash,dspark --block 16 --anchors 512 --length 3072 --chunk 2048 --seconds 120 --out FILE
    --tiny --device cpu                        # a shrunken target in fp32: chunked and plain give the same loss and gradients

Forward, objective and backward of one packed row, at the shape of a target of which there are only embedding and head; features are random.
Weights are fp32 and computed with in bf16, as trainer.precision bf16-mixed does; states of an optimizer are not counted. Each drafter in four ways:
its attention by a dense mask or fused (speed.fused_blocks), the logits of its elements in chunks (objective.chunk) or all at once.

Columns: the peak of memory; the part of it above what was there before the step (weights, embedding, head, features); the same as a multiple of all
logits, anchors x block x vocabulary in fp32; the widest tensor of logits that the objective held, as rows of the vocabulary; milliseconds of the second
step; and how far loss and gradients are from those of the drafter's first way. A way that fails (out of memory, say) prints why.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from draft_pass import KINDS, bare, recipe_of
from recipe_targets import REAL, shrunken
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from drafttrain.drafters.base import DrafterNet
from drafttrain.layouts import one_chat
from drafttrain.losses import Objective
from drafttrain.recipe import Recipe
from drafttrain.target.target import Target
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary

GIB = 2**30
FALLBACK = "smollm2-135m"
"""Whose recipe says a drafter's objective, where the shape has none."""
SAMPLED = 65536
"""Numbers of each weight's gradient that are compared."""
PROMPT = 1 / 12
"""Share of the row that is not supervised."""


def headed_target(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """Embedding and head with random weights; the layers stay outlines."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight = nn.Parameter(torch.empty(module.weight.shape, device=device, dtype=dtype).normal_(std=0.02))
    return bare(model, "embedding and head")


@dataclass
class Step:
    """All that a training step needs."""

    net: DrafterNet
    objective: Objective
    teacher: TargetTeacher
    sequences: Sequences
    features: Features
    layout: Layout
    counts: dict[str, float]

    def forward(self, objective: Objective) -> Tensor:
        device = self.sequences.ids_BT.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            drafted = self.net.rows(self.sequences, self.features, self.layout)
            terms, _ = objective.terms(drafted, self.net.logits, self.teacher, self.net.needs.depth)
        return torch.stack([term.sum / self.counts[name] for name, term in terms.items()]).sum()


def step_of(kind: str, target: Target, args: argparse.Namespace) -> Step:
    """A fresh net behind one packed row of random tokens and features."""
    recipe = recipe_of(args.shape, kind) or recipe_of(FALLBACK, kind)
    assert isinstance(recipe, Recipe)
    own = recipe_of(args.shape, kind)
    config: Any = replace(own.drafter if own else KINDS[kind](), block=args.block, anchors=args.anchors, draft_vocab=None)
    torch.manual_seed(0)
    vocabulary = DraftVocabulary.full(target.vocab)
    with target.device:
        net = config.build(target, vocabulary).train()
    net.speaks_V = vocabulary.t2d  # layouts are made on the CPU
    g = torch.Generator().manual_seed(0)
    sequences = one_chat(torch.randint(1, target.vocab, (args.length,), generator=g), int(args.length * PROMPT))
    layout = net.layout(sequences, numbers=[(0, 0)])
    shape = (1, args.length, len(net.needs.taps), target.hidden)
    taps = torch.randn(shape, device=target.device, dtype=target.dtype)
    features = Features(taps, torch.randn(1, args.length, target.hidden, device=target.device, dtype=target.dtype))
    objective = recipe.objective
    return Step(
        net, objective, TargetTeacher(target, net), sequences.to(target.device), features, layout.to(target.device),
        objective.counts(layout, net.needs.depth),
    )  # fmt: skip


class Widest(TorchDispatchMode):
    """Notes the largest tensor whose rows are as wide as the vocabulary; weights and their gradients are known by their number of rows."""

    def __init__(self, words: int, of_weights: set[int]):
        super().__init__()
        self.words, self.of_weights, self.rows = words, of_weights, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if (
                isinstance(x, Tensor)
                and x.dim() > 1
                and x.shape[-1] == self.words
                and x.numel() // self.words not in self.of_weights
            ):
                self.rows = max(self.rows, x.numel() // self.words)
        return out


@dataclass(frozen=True)
class Held:
    """One way of computing a step."""

    drafter: str
    fused: bool
    chunk: int
    loss: float
    loss_off: float
    grads_off: float | None
    """None where there is no gradient."""
    rows: int | None
    """Of the vocabulary, in the widest tensor of the objective; None where nobody looked."""
    ms: float
    peak: int
    """Bytes; 0 where it is not known."""
    before: int


def held(step: Step, kind: str, fused: bool, chunk: int, first: dict[str, Any]) -> Held:
    """One step to warm up, and one that is measured; `first` keeps loss and gradients of the drafter's first way."""
    device = step.sequences.ids_BT.device
    cuda = device.type == "cuda"
    objective: Any = replace(step.objective, chunk=chunk)  # type: ignore[call-arg]
    step.net.fused = fused
    learns = cuda or not fused  # flex_attention has no gradient on a CPU
    rows = None if fused else widest(step, objective)
    for _ in range(2 if cuda else 1):
        step.net.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        began = time.perf_counter()
        with torch.set_grad_enabled(learns):
            loss = step.forward(objective)
        if learns:
            loss.backward()
        if cuda:
            torch.cuda.synchronize()
        ms = 1e3 * (time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    said, grads = float(loss.detach()), sampled(step.net) if learns else None
    first.setdefault("loss", said)
    if grads is not None:
        first.setdefault("grads", grads)
    far = None if grads is None else float((grads - first["grads"]).norm() / first["grads"].norm())
    return Held(kind, fused, chunk, said, abs(said / first["loss"] - 1), far, rows, ms, peak, before)


def widest(step: Step, objective: Objective) -> int | None:
    """Rows of the widest tensor of logits in a whole step, backward included; None where it could not be watched."""
    words = step.teacher.target.vocab
    weights = [*step.net.parameters(), step.teacher.target.head_weight]
    step.net.zero_grad(set_to_none=True)
    try:
        with Widest(words, {w.numel() // words for w in weights if words in w.shape}) as seen:
            step.forward(objective).backward()
    except Exception as error:  # the step itself may still be possible
        print(f"  (not watched: {type(error).__name__}: {str(error)[:120]})", flush=True)
        return None
    return seen.rows


def sampled(net: DrafterNet) -> Tensor:
    """The first numbers of every gradient, in one row."""
    return torch.cat([w.grad.flatten()[:SAMPLED].float() for w in net.parameters() if w.grad is not None])


def ways(args: argparse.Namespace) -> Iterator[tuple[bool, int]]:
    """Those without a compilation first."""
    return ((fused, chunk) for fused in (False, True) for chunk in (args.chunk, 0))


def measure(kind: str, target: Target, args: argparse.Namespace, until: float) -> list[Held]:
    step = step_of(kind, target, args)
    elements, weights = len(step.layout.label_N), sum(w.numel() for w in step.net.parameters())
    print(f"{kind}: {weights:,} weights, {elements:,} scored elements, blocks of {args.block}", flush=True)
    found: list[Held] = []
    first: dict[str, Any] = {}
    for fused, chunk in ways(args):
        name = f"  {kind}, {'fused' if fused else 'dense'}, chunk {chunk}"
        if time.perf_counter() > until:
            print(f"{name}: not measured, since time was up", flush=True)
            continue
        try:
            found.append(held(step, kind, fused, chunk, first))
            print(f"{name}: {found[-1].peak / GIB:.2f} GiB, {found[-1].ms:.0f} ms, loss {found[-1].loss:.5f}", flush=True)
        except Exception as error:  # too large for this device, perhaps; the other ways may fit
            print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        step.net.zero_grad(set_to_none=True)
        _forget(target.device)
    return found


def table(found: list[Held], logits: int) -> list[str]:
    heads = ["drafter", "attention", "objective.chunk", "peak, GiB", "above what was there", "of all logits", "widest logits, rows",
             "ms", "loss off by", "gradients off by"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for one in found:
        above = one.peak - one.before
        memory = [f"{one.peak / GIB:.2f}", f"{above / GIB:.2f}", f"{above / logits:.2f}"] if one.peak else ["", "", ""]
        cells = [one.drafter, "fused" if one.fused else "dense", str(one.chunk or "0 (all at once)"), *memory]
        cells += ["" if one.rows is None else f"{one.rows:,}", f"{one.ms:.0f}", f"{one.loss_off:.1e}"]
        cells.append("" if one.grads_off is None else f"{one.grads_off:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratios(found: list[Held]) -> list[str]:
    """What chunks save, and what the fused attention saves, of the peak and of what is above the start."""
    by_way = {(one.drafter, one.fused, bool(one.chunk)): one for one in found if one.peak}
    lines = []
    for kind in dict.fromkeys(one.drafter for one in found):
        pairs = [(f"{kind}, {words} attention: plain", "chunked", (kind, fused, False), (kind, fused, True))
                 for fused, words in ((False, "dense"), (True, "fused"))]  # fmt: skip
        pairs += [(f"{kind}, {words} logits: dense", "fused", (kind, False, chunked), (kind, True, chunked))
                  for chunked, words in ((True, "chunked"), (False, "plain"))]  # fmt: skip
        for large, small, a, b in pairs:
            if a in by_way and b in by_way:
                more, less = by_way[a], by_way[b]
                above = (more.peak - more.before) / (less.peak - less.before)
                lines.append(
                    f"{large} peaks at {more.peak / less.peak:.2f} times what {small} does; {above:.2f} times above the start."
                )
    return lines


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b", choices=list(REAL))
    parser.add_argument("--drafters", default="dflash,dspark")
    for name, value in (("block", 16), ("anchors", 512), ("length", 3072), ("chunk", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=120.0, help="no way begins later than this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.block, args.anchors, args.length, args.chunk = 4, 24, 96, 16
    return args


def main() -> None:
    args = arguments()
    device, began = torch.device(args.device), time.perf_counter()
    config = shrunken(REAL[args.shape]()) if args.tiny else REAL[args.shape]()
    torch.manual_seed(0)
    target = headed_target(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    logits = args.anchors * args.block * target.vocab * 4
    print(
        f"{args.shape}{' shrunken' if args.tiny else ''}: width {target.hidden}, {target.vocab:,} tokens, one row of {args.length}, {where}, torch "
        f"{torch.__version__}\nall logits: {args.anchors} anchors x {args.block} slots x {target.vocab:,} tokens x 4 bytes = {logits / GIB:.2f} GiB",
        flush=True,
    )
    found: list[Held] = []
    for kind in args.drafters.split(","):
        try:
            found += measure(kind, target, args, began + args.seconds)
        except Exception as error:  # the other drafter is still worth measuring
            print(f"{kind} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        _forget(device)
        if args.out:
            facts = {
                "device": where,
                "torch": torch.__version__,
                "logits_bytes": logits,
                "args": {k: str(v) for k, v in vars(args).items()},
            }
            args.out.write_text(json.dumps(facts | {"ways": [asdict(one) for one in found], "ratios": ratios(found)}, indent=1))
    print("\n".join(["", *table(found, logits), "", *ratios(found)]))
    print(f"\n{time.perf_counter() - began:.0f} s in all", flush=True)
    if device.type == "cpu" and any(max(one.loss_off, one.grads_off or 0.0) > 1e-4 for one in found):
        raise SystemExit("chunked and plain, or dense and fused, differ")


if __name__ == "__main__":
    main()
