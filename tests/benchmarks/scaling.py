"""Training in 1, 2, ... processes: is it as many times as fast, and does it learn the same? python tests/benchmarks/scaling.py [flags]

    --config RECIPE --config recipes/hardware/zero2.yaml [--section.key value] --processes 1,2,4 --steps 60 --warmup 20
    --curves ddp-h100,zero1,zero2,zero3 --curve-steps 100 --global-rows 8 --at-once 4
    --data FOLDER             # a run's data folder, as data_prep leaves it; random chats of the recipe's target unless given
    --seconds 560 --out FILE  # no run begins later, and none lasts longer
    --tiny                    # a tiny target on the CPU, over gloo

Every number is that of a real `torchrun --nproc-per-node N -m drafttrain train`, read from its own log. It runs two things:

Weak scaling: each process has the recipe's rows, so N processes train N times as many tokens a step.

    efficiency = tokens/s of N processes / (N x tokens/s of the fewest)        both behind --warmup steps

The speed is the median of stretches of ten steps, so that a size that is compiled or recorded late counts as the one pause that it is; the mean stands
beside it. A run that is cut off by time counts with what it had logged.

Loss curves: --global-rows rows a step, however many processes share them out, for DDP and each stage of ZeRO (recipes/hardware/*.yaml, neither compiled nor
as graphs, unless --fast-curves: then as the recipes and flags have it). The mean distance of a curve from the first one stands beside the mean distance of
that one from one with another seed (other first weights, another order of the chats).
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Lock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from tiny_run import ragged_chats, write_store  # noqa: E402

from drafttrain.cli import pairs  # noqa: E402
from drafttrain.recipe import load_recipe  # noqa: E402
from drafttrain.target.load import load_speaker  # noqa: E402

STRETCH = 10
"""Steps between logs where speed is measured."""
NO_PAUSE = {"checkpoint.every": 10**9, "checkpoint.tau_prompts": 0}
"""Neither saved nor measured while it is timed."""
TINY = """
name: tiny
target: {{path: {target}}}
prepare: {{prompts: [{{class_path: SelfPrompts, init_args: {{count: 2}}}}]}}
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 2, 3], depth: 2, draft_vocab: 200}}}}
objective: {{class_path: Distillation}}
data: {{length: 48, rows: 2}}
optimizer: {{lr: 1.0e-3, warmup_steps: 2}}
trainer: {{precision: 32-true}}
"""


@dataclass(frozen=True)
class Trained:
    """One run, and what its log says."""

    name: str
    processes: int
    rows: list[dict[str, float]]
    """Of the log: step, tokens_seen, seconds, train/loss, ..."""

    def speeds(self, warmup: int) -> tuple[float, float] | None:
        """Tokens/s behind the warm-up: median of the stretches between logs, and mean. None where less than one stretch was logged."""
        rows = [row for row in self.rows if row["step"] >= warmup]
        stretches = [(b["tokens_seen"] - a["tokens_seen"]) / (b["seconds"] - a["seconds"]) for a, b in pairwise(rows)]
        if not stretches:
            return None
        return median(stretches), (rows[-1]["tokens_seen"] - rows[0]["tokens_seen"]) / (rows[-1]["seconds"] - rows[0]["seconds"])

    @property
    def losses(self) -> dict[int, float]:
        return {int(row["step"]): row["train/loss"] for row in self.rows}


def distance(one: Trained, other: Trained) -> tuple[float, float]:
    """Mean and largest |loss - loss| / loss over the steps that both logged."""
    mine, theirs = one.losses, other.losses
    gaps = [abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in sorted(mine.keys() & theirs.keys())]
    return sum(gaps) / len(gaps), max(gaps)


class Runs:
    """Trains, one run behind the other, until time is up."""

    def __init__(self, args: argparse.Namespace, configs: list[str], more: list[str], folder: Path):
        self.configs, self.more, self.folder, self.data = configs, more, folder, args.data
        self.until, self.out, self.done = time.monotonic() + args.seconds, args.out, []
        self.lock = Lock()

    def train(
        self, name: str, processes: int, changes: dict[str, object], hardware: str | None = None, sharing: int | None = None
    ) -> Trained | None:
        """`sharing`: it may take that part of the time that is left (3: a third), and counts with what it had logged by then."""
        left = self.until - time.monotonic()
        if left < 5:
            print(f"{name}: not measured, since time was up", flush=True)
            return None
        left /= sharing or 1
        run = self.folder / "runs" / name
        run.mkdir(parents=True)
        (run / "data").symlink_to(self.data.resolve(), target_is_directory=True)
        configs = [*self.configs, *([str(ROOT / "recipes" / "hardware" / f"{hardware}.yaml")] if hardware else [])]
        flags = [word for config in configs for word in ("--config", config)]
        flags += self.more + [word for key, value in changes.items() for word in (f"--{key}", str(value))]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
            "-m",
            "drafttrain",
            "train",
        ]
        command += [*flags, "--name", name, "--runs", str(self.folder / "runs")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        log, began = self.folder / f"{name}.log", time.monotonic()
        with open(log, "w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ)
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                code = None
                process.terminate()  # torchrun tells its processes, which killed alone it would leave behind
                process.wait()
        rows = read_log(run)
        if not rows or (code != 0 and not (code is None and sharing)):
            tail = "\n    ".join(log.read_text().splitlines()[-8:])
            print(f"{name}: failed, {'time was up' if code is None else f'exit code {code}'}\n    {tail}", flush=True)
            return None
        found = Trained(name, processes, rows)
        last = rows[-1]
        print(
            f"{name}: {last['step']:.0f} steps, {last['tokens_seen']:,.0f} tokens, loss {last['train/loss']:.4f}, {time.monotonic() - began:.0f} s in all",
            flush=True,
        )
        with self.lock:
            self.done.append(found)
            if self.out:
                self.out.write_text(json.dumps([asdict(one) for one in self.done], indent=1))
        return found


def read_log(run: Path) -> list[dict[str, float]]:
    """The rows of a run's own log that have a loss."""
    rows = []
    for file in sorted((run / "logs").glob("version_*/metrics.csv")):
        with open(file) as stream:
            for row in csv.DictReader(stream):
                if row.get("train/loss"):
                    rows.append({name: float(value) for name, value in row.items() if value})
    return sorted(rows, key=lambda row: row["step"])


def weak_scaling(runs: Runs, processes: list[int], steps: int, warmup: int) -> list[str]:
    """A table, one line for each number of processes."""
    found = []
    changes = NO_PAUSE | {"trainer.max_steps": steps, "trainer.log_every_n_steps": min(STRETCH, max((steps - warmup) // 2, 1))}
    for i, count in enumerate(processes):
        if one := runs.train(f"weak-{count}", count, changes, sharing=len(processes) - i):
            if speeds := one.speeds(warmup):
                found.append((count, *speeds))
            else:
                print(
                    f"weak-{count}: time was up at step {one.rows[-1]['step']:.0f}, before the warm-up of {warmup} was over",
                    flush=True,
                )
    lines = ["", "| processes | tokens/s, median | mean | efficiency |", "| --- | --- | --- | --- |"]
    for count, speed, mean in found:
        least, of_least, _ = min(found)
        lines.append(f"| {count} | {speed:,.0f} | {mean:,.0f} | {speed / count / (of_least / least):.1%} |")
    return lines


def loss_curves(
    runs: Runs, processes: list[int], ways: list[str], steps: int, rows: int, seed: int, at_once: int = 1, fast: bool = False
) -> list[str]:
    """A table, one line for each way and number of processes."""
    plain = {} if fast else {"speed.compile": "false", "speed.graph_target": "false"}
    changes = NO_PAUSE | plain | {"trainer.max_steps": steps, "trainer.log_every_n_steps": 1}
    wanted = []
    for way in ways:
        for count in processes:
            if rows % count:
                print(f"{way}-{count}: {rows} rows cannot be shared out evenly by {count} processes", flush=True)
                continue
            shared = changes | {"data.rows": rows // count, "trainer.accumulate_grad_batches": 1, "data.seed": seed}
            wanted.append((f"curve-{way}-{count}", count, shared, way))
            if len(wanted) == 1:
                wanted.append((f"curve-{way}-{count}-seed", count, shared | {"data.seed": seed + 1}, way))
    with ThreadPoolExecutor(at_once) as pool:
        trained = list(pool.map(lambda one: runs.train(*one), wanted))
    other = trained[1] if trained else None  # of the first way with another seed, which is no line of the table
    found = [(way, run) for i, ((*_, way), run) in enumerate(zip(wanted, trained, strict=True)) if i != 1 and run is not None]
    first = next((run for _, run in found), None)
    if first is None:
        return ["no loss curve was measured"]
    lines = [
        "",
        "| way | processes | last loss | distance from the first, mean | largest | spread of two seeds, mean |",
        "|" + " --- |" * 6,
    ]
    spread = f"{distance(other, first)[0]:.2e}" if other else ""
    for way, one in found:
        mean, most = distance(one, first)
        lines.append(f"| {way} | {one.processes} | {one.rows[-1]['train/loss']:.6f} | {mean:.2e} | {most:.2e} | {spread} |")
    return lines


def random_data(configs: list[str], more: list[str], folder: Path, count: int) -> Path:
    """Chats of random tokens of the recipe's target, which is not loaded for it."""
    recipe, _ = load_recipe(configs, pairs(more))
    speaker = load_speaker(recipe.target)
    words = min(speaker.vocab, len(speaker.tokenizer))
    chats = ragged_chats(count, words, longest=recipe.data.length)
    special = torch.tensor(sorted({*speaker.tokenizer.all_special_ids, *speaker.tokenizer.added_tokens_decoder}))
    for chat in chats:  # one of them may stand for a masked token, which no text has
        chat.ids[torch.isin(chat.ids, special)] = words // 2
    write_store(folder / "data" / "train", chats, speaker.identity)
    return folder / "data"


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--processes", default="")
    parser.add_argument("--steps", type=int, default=60, help="0: no weak scaling")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--curves", type=_words, default=["ddp-h100", "zero1", "zero2", "zero3"])
    parser.add_argument("--curve-steps", type=int, default=100, help="0: no loss curves")
    parser.add_argument("--global-rows", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=1, help="loss curves side by side; speeds are never measured so")
    parser.add_argument(
        "--fast-curves",
        action="store_true",
        help="loss curves of compiled steps, and graphs where recipes and flags ask for them",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--chats", type=int, default=2000, help="random ones")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--work", type=Path, help="folder for runs and logs; a temporary one unless given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args, more = parser.parse_known_args()
    visible = max(torch.cuda.device_count(), 1)
    args.processes = [int(word) for word in _words(args.processes)] or [n for n in (1, 2, 4, 8) if n <= visible]
    if args.tiny:
        args.curves, args.global_rows, args.chats = ["ddp"], 4, 60
    elif not args.config:
        parser.error("--config RECIPE is needed, or --tiny")
    return args, more


def main() -> None:
    args, more = arguments()
    folder = args.work or Path(tempfile.mkdtemp(prefix="scaling-"))
    folder.mkdir(parents=True, exist_ok=True)
    configs = [str(Path(config).resolve()) for config in args.config]
    if args.tiny:
        from tiny import build_target_folder

        (folder / "tiny.yaml").write_text(TINY.format(target=build_target_folder("llama", folder / "target")))
        configs = [str(folder / "tiny.yaml"), *configs]
    if args.data is None:
        args.data = random_data(configs, more, folder, args.chats)
    where = ", ".join(dict.fromkeys(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))) or "CPU"
    print(f"{where}, torch {torch.__version__}, processes {args.processes}, runs under {folder}", flush=True)
    runs, lines = Runs(args, configs, more, folder), []
    if args.steps:
        lines += weak_scaling(runs, args.processes, args.steps, args.warmup)
        print("\n".join(lines), flush=True)
    if args.curve_steps:
        print(
            "\n".join(
                loss_curves(
                    runs,
                    args.processes,
                    args.curves,
                    args.curve_steps,
                    args.global_rows,
                    args.seed,
                    args.at_once,
                    args.fast_curves,
                )
            ),
            flush=True,
        )
    if not runs.done:
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()
