"""Training speed beside speculators 0.9.0, the same work on the same GPU: python tests/benchmarks/race.py [flags]

    --targets smollm2-135m,qwen3-8b --drafters eagle3-3,eagle3-7,dflash-16 --contenders ours,speculators,online --caches cold,warm
    --speculators FOLDER       # holds the library and what it imports, unless it is installed: pip install --no-deps --target FOLDER speculators==0.9.0 ...
    --seconds 560 --out race.json                              # no process begins later, and none lasts longer
    --tiny --device cpu                                        # shrunken targets, to see that it runs
    --show race.json more.json                                 # the tables of runs that were made

    --together --compile-seconds 300                           # all compile side by side, and are measured alone, one behind the other, when the last is warm

Every contender is a process of its own (race_worker.py, which says what it computes), so that its peak of memory and its caches are its own; `cold` begins
with empty caches of torch.compile and Triton, `warm` runs again with what cold left. All get rows of --length tokens, one row a step.

    ours               the recipe of this target and drafter, by --hardware: forward, loss, backward, clipping, AdamW, through Lightning
    ours-frozen-head   the same with EAGLE-3's head frozen, as speculators freezes it: weights as many as theirs
    speculators        its Trainer with its own defaults, but AdamW
    online             ours with the whole target, which reads each row inside the step

tokens/s are rows x length, all of it text, over the seconds of --steps steps behind --warmup, measured together. Peak: max_memory_allocated of those
steps; inputs lie on the device, the same in both. Start: from the start of the process to the last step that was not yet as fast as the others. Host: how
long the host takes to queue one step of ours on an idle device. MFU: operations counted by flops.py over the seconds, over the measured rate of an
8192 x 8192 x 8192 product in bf16; theirs is given by our count.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GIB = 2**30
OURS = "ours", "ours-frozen-head", "online"


def key_of(run: dict[str, Any]) -> tuple[str, str, int, str]:
    case = run["case"]
    return case["shape"], case["drafter"], case["size"], case["contender"]


class Field:
    """Starts processes, one behind the other, until time is up."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.until, self.runs = args, time.monotonic() + args.seconds, []
        self.work = Path(args.work or tempfile.mkdtemp(prefix="race-"))
        self.work.mkdir(parents=True, exist_ok=True)

    def run(self, shape: str, drafter: str, size: int, contender: str, cache: str) -> None:
        left = self.until - time.monotonic()
        if left < 5:
            print(f"{shape} {drafter} {size} {contender}, {cache}: not measured, since time was up", flush=True)
            return
        process, *kept = self._start(shape, drafter, size, contender, cache)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            process.returncode = None
        self._read(process, *kept)

    def together(self, cases: list[tuple[str, str, int, str]]) -> None:
        """All at once; the gate opens when all are warm or at an end, or after --compile-seconds for those that are, and not before --when exists."""
        gate, opens = self.work / "gate", time.monotonic() + self.args.compile_seconds
        shutil.rmtree(gate, ignore_errors=True)
        gate.mkdir()
        started = [(*self._start(*case, "cold", gate), "-".join(map(str, case))) for case in cases]
        while time.monotonic() < min(opens, self.until):
            if all(process.poll() is not None or (gate / name).exists() for process, *_, name in started):
                break
            time.sleep(0.1)
        while self.args.when and not self.args.when.exists() and time.monotonic() < self.until:
            time.sleep(0.1)
        late = [process for process, *_, name in started if process.poll() is None and not (gate / name).exists()]
        for process in late:
            process.kill()
        (gate / "open").touch()
        for process, *kept, _ in started:
            try:
                process.wait(max(self.until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late.append(process)
            if process in late:
                process.returncode = None
            self._read(process, *kept)

    def _start(
        self, shape: str, drafter: str, size: int, contender: str, cache: str, gate: Path | None = None
    ) -> tuple[Any, ...]:
        """The process, and what its result is read by."""
        args, name = self.args, f"{shape} {drafter} {size} {contender}"
        case: dict[str, Any] = {
            "shape": shape, "drafter": drafter, "size": size, "contender": contender, "length": args.length, "anchors": args.anchors,
            "draft_vocab": args.draft_vocab, "warmup": args.warmup, "steps": args.steps, "device": args.device, "tiny": args.tiny,
            "hardware": args.hardware, "optimizer": args.optimizer, "ours": args.ours, "theirs": args.theirs, "began": time.time(),
            "gate": str(gate.resolve()) if gate else None,
            "profile": str(args.profile.resolve()) if args.profile and contender in OURS and (gate or cache == args.caches[-1]) else None,
        }  # fmt: skip
        files = [self.work / f"{name.replace(' ', '-')}-{cache}.{end}" for end in ("case.json", "result.json", "log")]
        files[0].write_text(json.dumps(case))
        files[1].unlink(missing_ok=True)
        kept = self.work / "caches" / name.replace(" ", "-")
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"), "TRITON_CACHE_DIR": str(kept / "triton")}
        if args.speculators and contender == "speculators":
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(args.speculators.resolve()), environ.get("PYTHONPATH")]))
        command = [sys.executable, str(HERE / "race_worker.py"), str(files[0]), str(files[1])]
        with open(files[2], "w") as log:
            return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT), name, cache, files

    def _read(self, process: Any, name: str, cache: str, files: list[Path]) -> None:
        args, done = self.args, process.returncode
        if done != 0 or not files[1].is_file():
            why = "time was up" if done is None else f"exit code {done}"
            tail = "\n    ".join(files[2].read_text().splitlines()[-6:])
            print(f"{name}, {cache}: failed, {why}\n    {tail}", flush=True)
            return
        found: dict[str, Any] = json.loads(files[1].read_text()) | {"cache": cache}
        self.runs.append(found)
        if found["case"]["contender"] != "rate":
            print(
                f"{name}, {cache}: {found['tokens_per_second']:,.0f} tokens/s, {1e3 * found['seconds']:.1f} ms a step, {found['peak'] / GIB:.2f} GiB, "
                f"first step at {found['first_step_at']:.1f} s, steady at {found['steady_at'] or float('nan'):.1f} s; {found['parts'].get('host', 0.0):.1f} ms of the host; {found['trained']:,} weights trained; {found['how']}",
                flush=True,
            )
        if args.out:
            args.out.write_text(json.dumps(self.runs, indent=1))


def tables(runs: list[dict[str, Any]]) -> list[str]:
    """One line for each contender, and below how MFU was counted."""
    rates = [run for run in runs if run["case"]["contender"] == "rate"]
    rate = next((run["rate"] for run in rates if run["rate"]), None)
    by_key: dict[tuple, dict[str, dict]] = {}
    for run in runs:
        if run["case"]["contender"] != "rate":
            by_key.setdefault(key_of(run), {})[run["cache"]] = run
    where = ", ".join(dict.fromkeys(run["device"] for run in rates))
    heads = ["target", "drafter", "who", "tokens/s", "x speculators", "ms", "forward", "backward", "clip, step", "peak GiB", "of theirs", "MFU",
             "start cold s", "start warm s"]  # fmt: skip
    lines = [where, "", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    counted = []
    for key, caches in by_key.items():
        one = caches.get("warm") or caches["cold"]
        other = by_key.get((*key[:3], "speculators"))
        theirs = (other.get("warm") or other["cold"]) if other else None
        alike = [one, *by_key.get((*key[:3], "ours"), {}).values()]
        flop = next((run["flop"] for run in alike if run.get("flop")), None)
        parts = one["parts"]
        cells = [key[0], f"{key[1]} {key[2]}", key[3], f"{one['tokens_per_second']:,.0f}"]
        cells.append(f"{one['tokens_per_second'] / theirs['tokens_per_second']:.2f}" if theirs else "")
        cells.append(f"{1e3 * one['seconds']:.1f}")
        cells += [f"{parts[part]:.1f}" if part in parts else "" for part in ("forward", "backward", "clip and step")]
        cells.append(f"{one['peak'] / GIB:.2f}" if one["peak"] else "")
        cells.append(f"{one['peak'] / theirs['peak']:.2f}" if theirs and theirs["peak"] else "")
        cells.append(f"{flop / one['seconds'] / rate:.1%}" if flop and rate else "")
        cells += [f"{found:.1f}" if (found := caches.get(cache, {}).get("steady_at")) else "" for cache in ("cold", "warm")]
        lines.append(f"| {' | '.join(cells)} |")
        if one.get("work"):
            counted += ["", f"{key[0]}, {key[1]} {key[2]}, {key[3]} (the first row's work; MFU takes the mean of the rows):"]
            counted += [f"    {product}" for product in one["work"]]
            total = f"    {flop / 1e12:.3f} TFLOP a step"
            if rate:
                total += f" / {one['seconds']:.5f} s / {rate / 1e12:.0f} TFLOP/s = {flop / one['seconds'] / rate:.1%}"
            if "of forward, the target" in parts:
                total += f"; the target's forward pass took {parts['of forward, the target']:.1f} ms of {parts['forward']:.1f}"
            counted.append(total)
    return lines + counted


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=_words, default=["smollm2-135m", "qwen3-8b"])
    parser.add_argument("--drafters", type=_words, default=["eagle3-3", "eagle3-7", "dflash-16"])
    parser.add_argument("--contenders", type=_words, default=["ours", "speculators", "online"])
    parser.add_argument("--caches", type=_words, default=["cold", "warm"])
    for name, value in (("length", 4096), ("anchors", 512), ("warmup", 8), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--draft-vocab", type=int, help="of EAGLE-3; that of the recipe unless given")
    parser.add_argument("--hardware", default="recipes/hardware/zero2.yaml", help="without DeepSpeed where that is not installed")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"])
    parser.add_argument("--ours", type=str.split, default=[], help="more of the recipe: '--objective.init_args.chunk 0'")
    parser.add_argument("--theirs", type=str.split, default=[], help="more of their flags: '--full-attention-indices 0'")
    parser.add_argument("--together", action="store_true", help="of cold caches; the start is not timed then")
    parser.add_argument("--compile-seconds", type=float, default=300.0)
    parser.add_argument(
        "--when", type=Path, help="with --together: measure once this file exists, so that others can use the machine until then"
    )
    parser.add_argument("--speculators", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", type=Path, help="the slowest kernels of a step of ours")
    parser.add_argument("--work", help="folder for cases, logs and caches; a temporary one unless given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, nargs="*")
    args = parser.parse_args()
    if args.tiny:
        args.length, args.anchors, args.draft_vocab, args.warmup, args.steps = 256, 16, 100, 2, 2
    return args


def main() -> None:
    args = arguments()
    if args.show:
        print("\n".join(tables([run for file in args.show for run in json.loads(file.read_text())])))
        return
    field = Field(args)
    field.run(args.targets[0], "eagle3", 1, "rate", "cold")
    cases = [
        (shape, drafter, int(size), contender, cache)
        for shape in args.targets
        for drafter, _, size in (name.rpartition("-") for name in args.drafters)
        for cache in args.caches
        for contender in args.contenders
        if not (contender == "ours-frozen-head" and drafter == "dflash")  # its head is the target's
    ]
    if args.together:
        field.together(list(dict.fromkeys(case[:4] for case in cases)))
    else:
        for case in cases:
            field.run(*case)
    print("\n".join(["", *tables(field.runs)]))
    if not any(run["case"]["contender"] != "rate" for run in field.runs):
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()
