"""One training step, taken apart: python tests/benchmarks/train_step.py --config RECIPE [--config ...] [--section.key value]

Reads the token store of the recipe's run and times, without a trainer, each way of computing the same step: as it stands; the target as a CUDA graph;
the drafter compiled; both; and beside each other, the target reading the next row while the drafter learns from this one (overlap: then `read` is how
long the drafter waited for it). Prints milliseconds of each part, tokens/s, the ratio to the first line, peak memory, and how long the first step took.

    --target.weights int8    # (or fp8) with --shape too: what rounded weights take and cost
    --shape qwen3-8b     # no store and no weights: random rows, and a random target of this shape (tests/recipe_targets.py)
    --seconds 300        # no variant begins later; one that fails is named, and the next one begins
    --profile FILE       # adds a table of the slowest kernels of each variant
"""

import argparse
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import race_worker  # puts tests/ on the path
import torch
from draft_pass import bare, random_target
from recipe_targets import REAL
from transformers import AttentionInterface, AutoModelForCausalLM

from drafttrain import vocab
from drafttrain.cli import pairs
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import MicroBatch, Share, WindowStream, window_counts
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.target.fuse import fuse_norms
from drafttrain.target.load import load_target
from drafttrain.target.precision import round_weights
from drafttrain.target.target import ATTENTION, Target, hf_attention
from drafttrain.tasks.speed import GraphedRead, ReadAhead, make_score
from drafttrain.tasks.teacher import TargetTeacher, plainly
from drafttrain.types import Sequences
from drafttrain.vocab import DraftVocabulary

VARIANTS = {
    "plain": (False, False, False), "graph": (True, False, False), "compile": (False, True, False), "both": (True, True, False),
    "overlap": (False, False, True), "overlap graph": (True, False, True), "overlap both": (True, True, True),
}  # fmt: skip
"""Name -> (target as a CUDA graph, drafter compiled, the target beside the drafter)."""
WARMUP = 3


class Clock:
    """Marks on the device's time line where there is one."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first, second) -> float:
        """Milliseconds."""
        return first.elapsed_time(second) if self.cuda else 1e3 * (second - first)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Work:
    """What is trained: the recipe's drafter, on its run's store or on random rows."""

    def __init__(self, recipe: Recipe, store: Path, shape: str | None, device: torch.device):
        self.recipe, self.device = recipe, device
        if shape is not None:
            self.target: Target = self._random_target(shape)
            size: Any = recipe.drafter.draft_vocab
            self.vocabulary = (
                DraftVocabulary.full(self.target.vocab)
                if size is None
                else DraftVocabulary(torch.arange(size), self.target.vocab)
            )
            self.rows = None
            return
        self.target = load_target(recipe.target, device=device)
        opened = TokenStore.open(store)
        supervised_V, other_V = opened.counts()
        self.vocabulary = vocab.choose(supervised_V, recipe.drafter.draft_vocab, other_V, 0.0, self.target.end_ids)
        chats = read_chats(opened, min(recipe.data.length, self.target.max_positions))
        self.rows = opened, RowPlan(chats, recipe.data.length, 0)

    def _random_target(self, shape: str) -> Target:
        config, dtype, weights = REAL[shape](), getattr(torch, self.recipe.target.dtype), self.recipe.target.weights
        if weights is None:
            return random_target(config, self.device, dtype, shape)
        AttentionInterface.register(ATTENTION, hf_attention)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.set_attn_implementation(ATTENTION)
        round_weights(model, weights, self.device)
        fuse_norms(model)
        return bare(model, shape)

    def net(self) -> Any:
        torch.manual_seed(0)
        with self.device:
            net = self.recipe.drafter.build(self.target, self.vocabulary)
        net.speaks_V = self.vocabulary.t2d  # layouts are made on the CPU
        return net

    def batches(self, net: Any, count: int) -> list[MicroBatch]:
        recipe, depth = self.recipe, net.needs.depth

        def counts(layout):
            return recipe.objective.counts(layout, depth)

        if self.rows is not None:
            windows = iter(WindowStream(*self.rows, Share(rows=recipe.data.rows), net.layout, counts))
            found = [next(windows) for _ in range(count)]
        else:
            found = [self._random(net, counts, number * recipe.data.rows) for number in range(count)]
        return [batch.pin_memory() for batch in found] if self.device.type == "cuda" else found

    def _random(self, net: Any, counts: Any, first: int) -> MicroBatch:
        data, words = self.recipe.data, min(len(self.vocabulary.ids), *net.unsaid or (self.target.vocab,))
        rows = [race_worker.packed_row(data.length, words, first + number) for number in range(data.rows)]
        sequences = Sequences(*(torch.cat([getattr(row, name) for row in rows]) for name in Sequences.__dataclass_fields__))
        layout = net.layout(sequences, numbers=[(0, first + number) for number in range(data.rows)])
        return MicroBatch(sequences, None, layout, 0, True, window_counts([sequences], [layout], counts))


def measure(
    work: Work, name: str, steps: int, weights: torch.dtype, profile: Path | None
) -> tuple[list[float], float, float, float, float]:
    """(ms of each part, seconds of a step, tokens in it, GiB, seconds of the first step)"""
    graph, compile, overlap = VARIANTS[name]
    target, device, clock = work.target, work.device, Clock(work.device)
    net = work.net().to(weights)
    taps, objective = net.needs.taps, work.recipe.objective
    batches = work.batches(net, steps + WARMUP)
    score = make_score(net, objective, TargetTeacher(target, net), net.needs.depth, compile)
    graphed = GraphedRead(target, taps, copies=overlap) if graph else None
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=clock.cuda)

    def read(sequences: Sequences):
        with torch.no_grad(), plainly(device):
            return graphed(sequences) if graphed else target.read_packed(sequences, taps)

    ahead = ReadAhead(read, device) if overlap else None

    def step(batch: MicroBatch, following: MicroBatch | None):
        host, batch = batch, batch.to(device)
        host.features = None
        marks = [clock.mark()]
        features = ahead.features(batch) if ahead else read(batch.sequences)
        if ahead and following is not None:
            ahead.begin(following)
        marks.append(clock.mark())
        terms, _ = score(batch.sequences, features, batch.layout)
        loss = torch.stack([term.sum / batch.window[term_name] for term_name, term in terms.items()]).sum()
        marks.append(clock.mark())
        loss.backward()
        marks.append(clock.mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(clock.mark())
        return marks, loss.detach()

    def run(part: list[MicroBatch], following: MicroBatch | None) -> Iterator:
        for batch, after in zip(part, [*part[1:], following], strict=True):
            yield step(batch, after)

    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    clock.wait()
    began = time.perf_counter()
    list(run(batches[:1], batches[1]))
    clock.wait()
    first = time.perf_counter() - began
    list(run(batches[1:WARMUP], batches[WARMUP]))
    clock.wait()
    began = time.perf_counter()
    done = list(
        run(batches[WARMUP:], batches[WARMUP])
    )  # as many reads as steps: the last one begins another, which is waited for
    clock.wait()
    seconds = (time.perf_counter() - began) / steps
    if not all(torch.isfinite(loss) for _, loss in done):
        raise RuntimeError("a loss is not finite")
    parts = [sum(clock.between(m[i], m[i + 1]) for m, _ in done) / steps for i in range(4)]
    tokens = sum(batch.window["tokens"] for batch in batches[WARMUP:] if batch.window) / steps
    memory = torch.cuda.max_memory_allocated() / 2**30 if clock.cuda else 0.0
    if profile:
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if clock.cuda else [])]
        with torch.profiler.profile(activities=kinds) as profiled:
            list(run(batches[WARMUP : WARMUP + 3], None))
            clock.wait()
        order = "self_cuda_time_total" if clock.cuda else "self_cpu_time_total"
        with profile.open("a") as file:
            table = profiled.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70)
            print(f"== {name}, 3 steps", table, file=file)
    return parts, seconds, tokens, memory, first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--shape", choices=REAL)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--weights", default="bfloat16", help="type of the drafter's weights")
    parser.add_argument("--profile", type=Path)
    own, rest = parser.parse_known_args()
    until = time.monotonic() + own.seconds
    recipe, _ = load_recipe(own.config, pairs(rest))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = Work(recipe, own.runs / recipe.name / "data" / "train", own.shape, device)
    data = recipe.data
    print(f"{recipe.name}{f', random {own.shape}' if own.shape else ''}: rows of {data.length} tokens, {data.rows} a step")
    print(
        f"{'variant':13} {'read':>7} {'draft':>7} {'back':>7} {'step':>7} {'all ms':>7} {'tokens/s':>9} {'ratio':>6} {'GiB':>6} {'first s':>8}",
        flush=True,
    )
    base = None
    for name in own.variants.split(","):
        graph, _, overlap = VARIANTS[name]
        if (graph or overlap) and device.type != "cuda":
            continue
        if time.monotonic() > until:
            print(f"{name:13} not measured: {own.seconds:g} s are over", flush=True)
            continue
        try:
            parts, seconds, tokens, memory, first = measure(work, name, own.steps, getattr(torch, own.weights), own.profile)
        except Exception as error:
            print(f"{name:13} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        base = base or seconds
        cells = " ".join(f"{part:7.1f}" for part in parts)
        print(
            f"{name:13} {cells} {1e3 * seconds:7.1f} {tokens / seconds:9,.0f} {base / seconds:6.2f} {memory:6.2f} {first:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
