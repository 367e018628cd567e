"""The training curve from a run's metrics files, where a row holds only what was logged at its step (the other cells are empty).

A run that was stopped and went on has one file for each start. After a crash the later file begins before the end of the earlier
one; what the earlier one says from there on was not kept, so it is left out.
"""

import csv
import re
from pathlib import Path

from drafttrain.plots import CurvePoint

TOKENS, LOSS, TAU = "tokens_seen", "train/loss", "held_out/tau"


def read_curve(logs: Path) -> list[CurvePoint]:
    """Loss and held-out tau by tokens seen, from one metrics file or every `metrics.csv` below a folder.

    A row without a token count takes the last one.

    Returns:
        [] if there is no such file or column: a report is written without its training curve.
    """
    points: list[CurvePoint] = []
    files = [logs] if logs.is_file() else sorted(logs.rglob("metrics.csv"), key=_start_number)
    for path in files:
        later = _read_file(path)
        if later:
            points = [p for p in points if p.tokens < later[0].tokens or _kept(p, later[0])] + later
    return points


def _kept(point: CurvePoint, first: CurvePoint) -> bool:
    """Whether a loss logged as training stopped stays: going on, tau is measured there first, and that step is not trained again."""
    return point.tokens == first.tokens and first.loss is None and point.loss is not None


def _start_number(path: Path) -> tuple[int, str]:
    """Order of the starts: the number in the folder's name (version_0, version_1, ..., version_10)."""
    number = re.search(r"(\d+)$", path.parent.name)
    return int(number.group()) if number else -1, str(path)


def _read_file(path: Path) -> list[CurvePoint]:
    points: list[CurvePoint] = []
    seen = None
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tokens, loss, tau = (_number(row.get(name)) for name in (TOKENS, LOSS, TAU))
            seen = seen if tokens is None else tokens
            if seen is not None and (loss is not None or tau is not None):
                points.append(CurvePoint(seen, loss, tau))
    return points


def _number(text: str | None) -> float | None:
    return float(text) if text else None
