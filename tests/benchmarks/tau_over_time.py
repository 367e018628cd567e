"""What did the same GPU-seconds buy? PYTHONPATH=. python tests/benchmarks/tau_over_time.py RUN [RUN ...] --out FILE.png

Each RUN is the folder of a training (runs/NAME); read are the held-out taus of its logs, and what time it had trained for at each. Measuring
and saving are in no time. The figure shows all curves; the table compares runs at equal times: where the shortest one ends, and at a half
and a quarter of that, between two measurements by a straight line. Runs that share a name up to a trailing -seedN are one line of the
table: mean, +- standard deviation. Where there were GPUs, times are GPU-seconds (seconds x processes), else seconds.
"""

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.errors import UserError
from drafttrain.markdown import table
from drafttrain.plots import png, tau_over_time

TAU, GPU, WALL = "held_out/tau", "gpu_seconds", "seconds"
PARTS = (0.25, 0.5, 1.0)
"""Of the time that the shortest run has."""


@dataclass(frozen=True)
class Curve:
    """The held-out taus of a run."""

    name: str
    """Of its folder, without -seedN."""
    unit: str
    points: list[tuple[float, float]]
    """(time, tau), in order."""

    def at(self, time: float) -> float | None:
        """tau between the measurements beside that time; None outside of what was measured."""
        for (t0, tau0), (t1, tau1) in zip(self.points, self.points[1:], strict=False):
            if t0 <= time <= t1:
                return tau0 if t0 == t1 else tau0 + (tau1 - tau0) * (time - t0) / (t1 - t0)
        return dict(self.points).get(time)


def read(run: Path) -> Curve:
    """The curve of a run that may have been stopped and gone on. UserError if its logs hold no tau."""
    found: dict[int, tuple[float, float]] = {}
    units = set()
    for file in sorted((run / "logs").glob("version_*/metrics.csv"), key=lambda path: int(path.parent.name.rpartition("_")[2])):
        with file.open(newline="", encoding="utf-8") as rows:
            steps = [(int(row["step"]), row) for row in csv.DictReader(rows)]
        first = min((step for step, _ in steps), default=0)
        found = {step: point for step, point in found.items() if step < first}  # what a crash undid was trained again
        time = 0.0
        for step, row in steps:
            unit = GPU if row.get(GPU) else WALL
            if row.get(unit):
                time = float(row[unit])
                units.add(unit)
            if row.get(TAU):
                found[step] = time, float(row[TAU])
    if not found:
        raise UserError(f"{run}/logs holds no {TAU}; give the folder of a training that measured it (checkpoint.tau_prompts).")
    if len(units) > 1:
        raise UserError(f"{run} was trained on GPUs in one start and without in another, so its times cannot be added up.")
    return Curve(
        re.sub(r"-seed\d+$", "", run.resolve().name), units.pop() if units else WALL, [found[step] for step in sorted(found)]
    )


def grouped(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Name -> its runs. UserError if some have GPU-seconds and others wall time."""
    if len({curve.unit for curve in curves}) > 1:
        without = next(curve.name for curve in curves if curve.unit == WALL)
        raise UserError(f"{without} has no {GPU} in its logs, but another run has; compare runs of one kind of machine.")
    names = dict.fromkeys(curve.name for curve in curves)
    return {name: [curve for curve in curves if curve.name == name] for name in names}


def compared(groups: dict[str, list[Curve]]) -> str:
    """The table: tau at equal times, and the last column's ratio to the first line. UserError where none of a name's runs had a tau by then."""
    unit = "GPU-s" if next(iter(groups.values()))[0].unit == GPU else "s"
    end = min(curve.points[-1][0] for runs in groups.values() for curve in runs)
    times = [part * end for part in PARTS]
    rows, means = [], []
    for name, runs in groups.items():
        taus = [[curve.at(time) for curve in runs] for time in times]
        if not any(taus[-1]):
            raise UserError(
                f"{name} has no held-out tau before {end:,.0f} {unit}, where the shortest run ends; set a smaller checkpoint.tau_every."
            )
        means.append(statistics.fmean(tau for tau in taus[-1] if tau is not None))
        rows.append([name, len(runs), *(_mean(values) for values in taus), f"{means[-1] / means[0]:.3f}"])
    return table(["run", "runs", *(f"tau at {time:,.0f} {unit}" for time in times), "ratio to the first"], rows)


def _mean(values: Sequence[float | None]) -> str:
    """Over runs, with their standard deviation; a dash where one has none."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.3f}{spread}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    try:
        groups = grouped([read(run) for run in args.runs])
        told = compared(groups)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    label = "GPU-seconds of training" if next(iter(groups.values()))[0].unit == GPU else "seconds of training"
    args.out.write_bytes(png(tau_over_time({name: [curve.points for curve in runs] for name, runs in groups.items()}, label)))
    print(told)
    print(f"{args.out}: the curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
