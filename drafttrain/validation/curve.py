"""The training curve from a run's metrics CSV, where a row holds only what was logged at its step."""

import csv
from pathlib import Path

from drafttrain.plots import CurvePoint

TOKENS, LOSS, TAU = ("tokens", "tokens_seen"), ("loss", "train_loss"), ("tau", "held_out_tau")
"""Names of the columns, with or without a group in front (`train/loss`)."""


def read_curve(path: str | Path) -> list[CurvePoint]:
    """Loss and held-out tau by tokens seen. A row without a token count takes the last one above it.

    Returns:
        [] if the file is missing or lacks the columns: a report is written without its training curve.
    """
    path = Path(path)
    if not path.is_file():
        return []
    points: list[CurvePoint] = []
    seen = 0.0
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tokens, loss, tau = (_cell(row, names) for names in (TOKENS, LOSS, TAU))
            seen = tokens if tokens is not None else seen
            if seen and (loss is not None or tau is not None):
                points.append(CurvePoint(seen, loss, tau))
    return points


def _cell(row: dict, names: tuple[str, ...]) -> float | None:
    """The first non-empty number among the columns with one of these names."""
    for column, text in row.items():
        if column and column.rsplit("/", 1)[-1] in names and text:
            try:
                return float(text)
            except ValueError:
                return None
    return None
