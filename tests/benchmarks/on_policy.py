"""Trainings side by side for an equal time: PYTHONPATH=. python tests/benchmarks/on_policy.py ENTRIES [options]

ENTRIES is a JSON-lines file; a line names one way of going on from a trained drafter, as a recipe with changes, as compare_drafters.py reads it:
    {"name": "rounds", "recipe": "recipes/smollm2-135m/dflash-opd.yaml", "set": {"optimizer.schedule": "constant"}, "seeds": [0, 1, 2]}

Every entry and seed becomes a run --runs/NAME-seedN whose data is --data (a folder that data_prep made), on the cards in turn. All start at once, and all are told to
stop (TERM) after --seconds: compare only what shared the cards alike. --set changes every one. With --anneal each rate falls to zero (a cosine, behind the
warm-up) within the time that is left when its run takes its first step, however many steps that is: behind an annealed start a constant rate costs tau. Then their last drafters lie in --out/NAME-N, where

    compare_drafters.py measure ENTRIES --out OUT ...    answers held-out prompts with each, and
    compare_drafters.py table ENTRIES --out OUT --base CONTROL    prints ratios with intervals;
    tau_over_time.py RUNS/A-seed0 RUNS/B-seed0 ...       draws tau over the GPU-seconds that each had.

A drafter that was not trained further stands in the table if its folder is copied to --out/start-0 and ENTRIES has a line for it with no recipe.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import drafttrain.cli
from drafttrain.tasks.optimizer import OptimizerConfig

ANNEALED = "annealed"
"""First argument of a training whose rate falls by the clock."""
LAST = 5.0
"""Seconds before the end at which it is zero."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("entries", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--config", action="append", default=[], help="recipes over every entry's own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over every entry's own")
    parser.add_argument("--anneal", action="store_true")
    args = parser.parse_args()
    entries = [json.loads(line) for line in args.entries.read_text().splitlines() if line.strip()]
    runs = [(entry, seed) for entry in entries if "recipe" in entry for seed in entry.get("seeds", [0])]
    cards, end = visible_cards(), time.monotonic() + args.seconds
    args.until = time.time() + args.seconds - LAST if args.anneal else None
    started = [
        (entry, seed, start(args, entry, seed, cards[place % len(cards)] if cards else None))
        for place, (entry, seed) in enumerate(runs)
    ]
    while time.monotonic() < end and any(process.poll() is None for *_, process in started):
        time.sleep(0.5)
    for *_, process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    failed = 0
    for entry, seed, process in started:
        name, code = f"{entry['name']}-seed{seed}", process.wait()
        drafter = args.runs / name / "checkpoints" / "last_drafter"
        if code or not drafter.exists():
            failed += 1
            print(f"{name} ended with {code}: {(args.runs / name / 'log').read_text()[-500:]}")
        else:
            shutil.copytree(drafter, args.out / f"{entry['name']}-{seed}", dirs_exist_ok=True)
            print(f"{name}: {args.out / entry['name']}-{seed}")
    sys.exit(1 if failed else 0)


def visible_cards() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them: of a job that was given the second card alone, that one is not 0."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[: torch.cuda.device_count()] if named else [str(i) for i in range(torch.cuda.device_count())]


def start(args, entry: dict, seed: int, card: str | None) -> subprocess.Popen:
    """The training of an entry, in a folder of its own that finds the data."""
    name = f"{entry['name']}-seed{seed}"
    run = args.runs / name
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "data").exists():
        (run / "data").symlink_to(args.data.resolve())
    keys = entry.get("set", {}) | dict(pair.split("=", 1) for pair in args.set) | {"name": name, "data.seed": seed}
    program = [__file__, ANNEALED, str(args.until)] if args.until else ["-m", "drafttrain"]
    command = [sys.executable, *program, "train", "--runs", str(args.runs)]
    for recipe in (entry["recipe"], *args.config):
        command += ["--config", recipe]
    for key, value in keys.items():
        command += [f"--{key}", str(value)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": card} if card is not None else {})
    with open(run / "log", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def anneal(until: float) -> None:
    """Lets every learning rate fall to zero by this time (seconds since 1970) in this process."""
    begun: list[float] = []

    def lr_fraction(self: OptimizerConfig, step: int, max_steps: int) -> float:
        now = time.time()
        if step and not begun:  # the schedule is asked for step 0 before anything is loaded
            begun.append(now)
        gone = min((now - begun[0]) / max(until - begun[0], 1.0), 1.0) if begun else 0.0
        return min((step + 1) / (self.warmup_steps + 1), 1.0) * (1 + math.cos(math.pi * gone)) / 2

    OptimizerConfig.lr_fraction = lr_fraction  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1:2] == [ANNEALED]:
        anneal(float(sys.argv[2]))
        sys.argv = ["drafttrain", *sys.argv[3:]]
        sys.exit(drafttrain.cli.main())
    main()
