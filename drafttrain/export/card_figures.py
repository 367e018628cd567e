"""The figures of a model card, drawn from the numbers that drafttrain.json keeps and from nothing else.

    plots/acceptance.png   accepted drafts by position    validate, else bench
    plots/categories.png   tau by category of questions   bench, where questions name categories
    plots/speed.png        tokens a second by method      bench
    plots/training.png     loss, and tau on held-out      training's log, as it was when the drafter was exported
                           prompts, by tokens seen

A figure whose numbers were not measured is not there. For each there is a function that prepares its numbers; the sentence below a figure is
made of the same ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from drafttrain import plots
from drafttrain.decoding.measure import defined
from drafttrain.export.card_bench import OVERALL, PLAIN, drafting, tau_by_category
from drafttrain.files import write_atomic

FOLDER = "plots"
NAMES = ("acceptance.png", "categories.png", "speed.png", "training.png")
MOST_POINTS = 400
"""Most losses of a training curve that an export keeps."""
BEGUN = "begun from"
"""What the facts of an export call the drafter that its training began from."""


@dataclass(frozen=True)
class CardFigure:
    """A figure, not drawn yet."""

    caption: str
    seen: str
    """What is seen there, in a sentence or two."""
    draw: Callable[[], Figure]


def figures_of(made: Mapping[str, Any], report: Mapping[str, Any] | None) -> dict[str, CardFigure]:
    """Path within the folder -> figure, in the order to be shown. `made` is drafttrain.json; `report` what it keeps of validation.json."""
    bench = made.get("benchmark")
    found = (_acceptance(accepted_by_position(report, bench), report is None), _categories(bench), _speed(bench), _training(made))
    return {f"{FOLDER}/{name}": figure for name, figure in zip(NAMES, found, strict=True) if figure is not None}


def write_figures(folder: Path, figures: Mapping[str, CardFigure]) -> None:
    """Write the PNG files, the same bytes for the same numbers."""
    for path, figure in figures.items():
        write_atomic(folder / path, plots.png(figure.draw()))


def remove_others(folder: Path, figures: Mapping[str, CardFigure]) -> None:
    """Remove the files of figures that earlier numbers had and these have not."""
    for name in NAMES:
        if f"{FOLDER}/{name}" not in figures:
            (folder / FOLDER / name).unlink(missing_ok=True)


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def accepted_by_position(report: Mapping[str, Any] | None, bench: Mapping[str, Any] | None) -> dict[str, plots.Acceptance]:
    """The drafter's acceptance by position as validated, else that of every benchmarked method at the first temperature; {} if neither is there."""
    if report is not None:
        measured: Mapping[str, Mapping[str, Any]] = {"drafter": report}
    else:
        measured = {} if bench is None else drafting(bench["temperatures"][0])
    return {
        name: plots.Acceptance(defined(m["acceptance_by_depth"], m["reach_by_depth"]), m["reach_by_depth"])
        for name, m in measured.items()
    }


def speed_by_method(bench: Mapping[str, Any] | None) -> dict[str, plots.Speed]:
    """Tokens a second of every method at the first temperature, plain decoding last; {} without a benchmark, or of plain decoding alone."""
    methods = {} if bench is None else bench["temperatures"][0]["methods"]
    order = [name for name in methods if name != PLAIN]
    rates = {name: methods[name] for name in [*order, PLAIN]} if order else {}
    return {
        name: plots.Speed(m["tokens_per_second"], m["tokens_per_second_sd"], None if name == PLAIN else m["speedup"])
        for name, m in rates.items()
    }


def curve_kept(points: Sequence[plots.CurvePoint]) -> list[list[float | None]]:
    """A training curve as drafttrain.json keeps it: [tokens seen, loss, tau on held-out prompts] of each point. Of more than 400 losses every
    n-th is kept, and the last; of taus all are."""
    losses = [point for point in points if point.loss is not None]
    step = -(-len(losses) // MOST_POINTS)
    kept = {id(point) for point in [*losses[:: max(step, 1)], *losses[-1:]]}
    return [[p.tokens, p.loss if id(p) in kept else None, p.tau] for p in points if id(p) in kept or p.tau is not None]


def is_unchanged(facts: Mapping[str, Any]) -> bool:
    """Whether what is exported is the drafter that training began from, since none measured later was better."""
    return facts.get("steps") == 0 and BEGUN in facts


def training_points(made: Mapping[str, Any]) -> list[plots.CurvePoint]:
    """The training curve that was kept; [] where none was. A drafter of step 0 begins it with the tau that made it the best, which
    exports of earlier versions kept no point of."""
    facts = made["facts"]
    points = [plots.CurvePoint(tokens, loss, tau) for tokens, loss, tau in facts.get("curve") or []]
    tau = facts.get("held-out tau while training")
    if points and points[0].tokens > 0 and facts.get("steps") == 0 and tau is not None:
        points.insert(0, plots.CurvePoint(0.0, None, tau))
    return points


# ---- figures ---------------------------------------------------------------------------------------------------------------


def _acceptance(methods: dict[str, plots.Acceptance], benched: bool) -> CardFigure | None:
    if not methods:
        return None
    told = []
    for name, each in methods.items():
        deepest = len(each.reach)
        whole = "it" if deepest == 1 else f"all {deepest}"
        told.append(
            f"{_percent(each.reach[0])} of the rounds of {name if benched else 'this drafter'} accept the first draft, and "
            f"{_percent(each.reach[-1])} {whole}."
        )
    return CardFigure("acceptance by position, in percent", " ".join(told), lambda: plots.acceptance_by_depth(methods))


def _categories(bench: Mapping[str, Any] | None) -> CardFigure | None:
    taus = tau_by_category(bench)
    if bench is None or not taus:
        return None
    overall = taus[OVERALL]
    name = max(overall, key=lambda label: overall[label])
    ranked = sorted((values[name], category) for category, values in taus.items() if category != OVERALL)
    (low, worst), (high, best) = ranked[0], ranked[-1]
    range_of = f"is {high:.2f} on {best}" if len(ranked) == 1 else f"goes from {low:.2f} on {worst} to {high:.2f} on {best}"
    seen = f"With {name}, tau {range_of}; over all questions it is {overall[name]:.2f}."
    caption = f"tau by category, temperature {bench['temperatures'][0]['temperature']:g}"
    return CardFigure(caption, seen, lambda: plots.by_category({"tau": taus}))


def _speed(bench: Mapping[str, Any] | None) -> CardFigure | None:
    rates = speed_by_method(bench)
    if bench is None or not rates:
        return None
    factor, name = max((each.factor, name) for name, each in rates.items() if each.factor is not None)
    base = f"plain decoding's {rates[PLAIN].rate:.1f} tokens/s"
    seen = (
        f"{name} is fastest, {factor:.2f} times {base}."
        if factor > 1
        else f"No method is faster than plain decoding here; the nearest is {name}, {factor:.2f} times {base}."
    )
    caption = f"tokens a second by method, temperature {bench['temperatures'][0]['temperature']:g}"
    return CardFigure(caption, seen, lambda: plots.speed_by_method(rates))


def _training(made: Mapping[str, Any]) -> CardFigure | None:
    points = training_points(made)
    if not points:
        return None
    losses, taus = [p.loss for p in points if p.loss is not None], [p.tau for p in points if p.tau is not None]
    told = [f"After {points[-1].tokens:,.0f} tokens the training loss {_went(losses, '.3g')}."] if losses else []
    if taus:
        told.append(f"tau on held-out prompts {_went(taus, '.3f')}, {max(taus):.3f} at best.")
    if is_unchanged(made["facts"]):
        told.append("These weights are those that training began from.")
    elif (tokens := made["facts"].get("tokens seen")) is not None:
        told.append(f"These weights are those after {tokens:,} tokens.")
    titles = [title for title, values in (("loss", losses), ("tau on held-out prompts", taus)) if values]
    return CardFigure(f"training: {' and '.join(titles)}", " ".join(told), lambda: plots.training_curve(points))


def _went(values: Sequence[float], form: str) -> str:
    last = format(values[-1], form)
    return f"is {last}" if len(values) == 1 else f"has gone from {values[0]:{form}} to {last}"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"
