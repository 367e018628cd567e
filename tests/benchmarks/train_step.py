"""One training step, taken apart: python tests/benchmarks/train_step.py --config RECIPE [--config ...] [--section.key value]

Reads the token store of the recipe's run and times, without a trainer, each way of computing the same step (as it stands; the
target as a CUDA graph; the drafter compiled; both). Prints milliseconds of each part, tokens/s, the ratio to the first line, peak
memory, and how long the first step took. `--profile FILE` adds a table of the slowest kernels of each variant.
"""

import argparse
import time
from pathlib import Path

import torch

from drafttrain import vocab
from drafttrain.cli import pairs
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import Share, WindowStream
from drafttrain.recipe import load_recipe
from drafttrain.target.load import load_target
from drafttrain.tasks.speed import GraphedRead, make_score
from drafttrain.tasks.teacher import TargetTeacher

VARIANTS = {"plain": (False, False), "graph": (True, False), "compile": (False, True), "both": (True, True)}
"""Name -> (target as a CUDA graph, drafter compiled)."""


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", default="plain,graph,compile,both")
    parser.add_argument("--weights", default="bfloat16", help="type of the drafter's weights")
    parser.add_argument("--profile", type=Path)
    own, rest = parser.parse_known_args()
    recipe, _ = load_recipe(own.config, pairs(rest))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(recipe.target, device=device)
    store = TokenStore.open(own.runs / recipe.name / "data" / "train")
    supervised_V, other_V = store.counts()
    vocabulary = vocab.choose(supervised_V, recipe.drafter.draft_vocab, other_V, 0.0, target.end_ids)
    plan = RowPlan(read_chats(store, min(recipe.data.length, target.max_positions)), recipe.data.length, 0)

    print(
        f"{'variant':10} {'read':>7} {'draft':>7} {'back':>7} {'step':>7} {'all ms':>7} {'tokens/s':>9} {'ratio':>6} {'GiB':>6} {'first s':>8}"
    )
    base = None
    for name in own.variants.split(","):
        graph, compile = VARIANTS[name]
        if graph and device.type != "cuda":
            continue
        torch.manual_seed(0)
        net = recipe.drafter.build(target, vocabulary).to(getattr(torch, own.weights))
        depth = net.needs.depth
        counts = recipe.objective.counts
        stream = WindowStream(
            store,
            plan,
            Share(rows=recipe.data.rows),
            net.layout,
            lambda layout, depth=depth, counts=counts: counts(layout, depth),
        )
        windows = iter(stream)
        batches = [next(windows) for _ in range(own.steps + 3)]
        score = make_score(net, recipe.objective, TargetTeacher(target, net), depth, compile)
        read = GraphedRead(target, net.needs.taps) if graph else lambda s, taps=net.needs.taps: target.read_packed(s, taps)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")
        clock = Clock(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step(batch, read=read, score=score, optimizer=optimizer, clock=clock):
            batch = batch.to(device)
            marks = [clock.mark()]
            features = read(batch.sequences)
            marks.append(clock.mark())
            terms, _ = score(batch.sequences, features, batch.layout)
            loss = torch.stack([term.sum / batch.window[name] for name, term in terms.items()]).sum()
            marks.append(clock.mark())
            loss.backward()
            marks.append(clock.mark())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(clock.mark())
            return marks, loss

        clock.wait()
        began = time.perf_counter()
        step(batches[0])
        clock.wait()
        first = time.perf_counter() - began
        for batch in batches[1:3]:
            step(batch)
        clock.wait()
        began = time.perf_counter()
        done = [step(batch) for batch in batches[3:]]
        clock.wait()
        seconds = (time.perf_counter() - began) / own.steps
        assert all(torch.isfinite(loss) for _, loss in done)
        tokens = sum(batch.window["tokens"] for batch in batches[3:]) / own.steps
        parts = [sum(clock.between(m[i], m[i + 1]) for m, _ in done) / own.steps for i in range(4)]
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        base = base or seconds
        cells = " ".join(f"{part:7.1f}" for part in parts)
        print(
            f"{name:10} {cells} {1e3 * seconds:7.1f} {tokens / seconds:9,.0f} {base / seconds:6.2f} {memory:6.2f} {first:8.1f}",
            flush=True,
        )
        if own.profile:
            kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if clock.cuda else [])]
            with torch.profiler.profile(activities=kinds) as profile:
                for batch in batches[3:6]:
                    step(batch)
                clock.wait()
            order = "self_cuda_time_total" if clock.cuda else "self_cpu_time_total"
            with own.profile.open("a") as file:
                print(
                    f"== {name}, 3 steps",
                    profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70),
                    file=file,
                )
        del net, optimizer, score, read, done, windows, stream


if __name__ == "__main__":
    main()
