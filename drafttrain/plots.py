"""Figures from plain numbers: every function takes lists and dicts and returns a matplotlib Figure.

One look for all: a method keeps its colour from figure to figure, bars carry their values, and there is no pyplot state, so
figures can be drawn in any thread and without a display. `png(figure)` turns one into bytes.

    png(acceptance_by_depth({"drafter": Acceptance([0.4, 0.3], [0.4, 0.12])}))
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT, GRID = "#222222", "#767676", "#e4e4e4"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
METHOD_COLOURS = {"drafter": "#0072b2", "lookup": "#e69f00", "untrained": "#8a8a8a", "plain": "#bbbbbb", "simulated": "#56b4e9"}


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of one method at depths 1, 2, ...; None where it is not defined (no round reached that depth)."""

    conditional: Sequence[float | None]
    """Accepted at k / rounds that reached k."""
    reach: Sequence[float | None]
    """Accepted at k / all rounds."""


@dataclass(frozen=True)
class Speed:
    """How fast one method is."""

    rate: float
    """Tokens a second."""
    spread: float | None = None
    """Their standard deviation over timed runs; None of a single run."""
    factor: float | None = None
    """Speed-up against plain decoding; None for what is compared with nothing."""


@dataclass(frozen=True)
class CurvePoint:
    """One measured moment of a training run; None where that moment did not measure the quantity."""

    tokens: float
    loss: float | None = None
    tau: float | None = None


def colour(method: str, index: int = 0) -> str:
    """The colour of a method: its own, or the palette's at `index` for one that has none."""
    return METHOD_COLOURS.get(method, PALETTE[index % len(PALETTE)])


def acceptance_by_depth(methods: Mapping[str, Acceptance]) -> Figure:
    """Two panels of bars, conditional acceptance and reach, by depth and method."""
    figure, (left, right) = _figure(2, width=9.0)
    depths = max((len(a.reach) for a in methods.values()), default=0)
    for axes, field, title in (
        (left, "conditional", "Accepted, of the rounds that got there"),
        (right, "reach", "Accepted, of all rounds"),
    ):
        _grouped_bars(axes, {name: getattr(a, field) for name, a in methods.items()}, depths)
        axes.set_title(title)
        axes.set_xlabel("depth of the draft token")
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.legend(frameon=False, fontsize=8, loc="upper right")  # reach falls with depth and leaves room there
    return figure


def tau_by_method(tau: Mapping[str, float]) -> Figure:
    """Horizontal bars of the acceptance length; the line at 1 is plain decoding."""
    figure, (axes,) = _figure(1, width=6.0, height=0.9 + 0.42 * max(len(tau), 1))
    names = list(tau)
    bars = axes.barh(names, [tau[n] for n in names], color=[colour(n, i) for i, n in enumerate(names)], height=0.62)
    axes.bar_label(bars, fmt="%.3f", padding=4, fontsize=9, color=INK)
    axes.axvline(1.0, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.15 * max([1.0, *tau.values()]))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID)
    axes.set_xlabel("tau: tokens per target pass (dashed: plain decoding)")
    return figure


def accepted_histogram(rounds: Mapping[str, Sequence[int]]) -> Figure:
    """Share of the rounds that accepted 0, 1, 2, ... draft tokens, by method.

    Args:
        rounds: by method, how many rounds accepted 0, 1, 2, ... drafts.
    """
    figure, (axes,) = _figure(1, width=6.0)
    shares = {name: [n / sum(counts) if sum(counts) else None for n in counts] for name, counts in rounds.items()}
    _grouped_bars(axes, shares, max((len(c) for c in rounds.values()), default=0), first=0)
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("draft tokens accepted in a round")
    axes.set_ylabel("share of rounds")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def training_curve(points: Sequence[CurvePoint]) -> Figure:
    """Loss and held-out tau by tokens seen; a panel is left out where nothing was measured.

    Raises:
        ValueError: if no point holds a loss or a tau.
    """
    series = {
        "training loss": [(p.tokens, p.loss) for p in points if p.loss is not None],
        "tau on held-out prompts": [(p.tokens, p.tau) for p in points if p.tau is not None],
    }
    drawn = {title: values for title, values in series.items() if values}
    if not drawn:
        raise ValueError(f"none of the {len(points)} points holds a loss or a tau: nothing to draw")
    figure, panels = _figure(len(drawn), width=4.5 * len(drawn))
    for axes, (title, values) in zip(panels, drawn.items(), strict=True):
        tau = title.startswith("tau")
        x, y = zip(*values, strict=True)
        marker = "o" if len(values) <= 60 else ""
        axes.plot(x, y, color=PALETTE[0] if tau else PALETTE[5], linewidth=1.6, marker=marker, markersize=3)
        axes.set_title(title)
        axes.set_xlabel("tokens seen")
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        axes.grid(axis="x", visible=False)
    return figure


def histograms(panels: Mapping[str, Sequence[float]], bins: int = 40) -> Figure:
    """A panel for each title, with a histogram of its values."""
    figure, all_axes = _figure(max(len(panels), 1), width=4.0 * max(len(panels), 1))
    for index, (axes, (title, values)) in enumerate(zip(all_axes, panels.items(), strict=False)):
        axes.hist(list(values), bins=bins, color=PALETTE[index % len(PALETTE)])
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    return figure


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> Figure:
    """One line for each name through its (x, y) points, x on a logarithmic scale."""
    figure, (axes,) = _figure(1, width=6.0)
    for index, (name, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=PALETTE[index % len(PALETTE)], linewidth=1.6, marker="o", markersize=3, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def tau_over_time(groups: Mapping[str, Sequence[Sequence[tuple[float, float]]]], x_label: str) -> Figure:
    """tau on held-out prompts by time: a colour for each name, and below it a line through the (time, tau) points of each of its runs."""
    figure, (axes,) = _figure(1, width=6.5, height=3.6)
    for index, (name, runs) in enumerate(groups.items()):
        label = name if len(runs) == 1 else f"{name} ({len(runs)} runs)"
        for number, points in enumerate(runs):
            x, y = zip(*points, strict=True)
            shade = PALETTE[index % len(PALETTE)]
            axes.plot(x, y, color=shade, linewidth=1.4, marker="o", markersize=3, label=None if number else label)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
    axes.set_xlabel(x_label)
    axes.set_ylabel("tau on held-out prompts")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def bars(values: Mapping[str, float]) -> Figure:
    """Horizontal bars in the order given, each with its number."""
    figure, (axes,) = _figure(1, width=7.0, height=0.9 + 0.34 * max(len(values), 1))
    drawn = axes.barh(list(values), list(values.values()), color=PALETTE[0], height=0.62)
    axes.bar_label(drawn, labels=[f"{value:,.0f}" for value in values.values()], padding=4, fontsize=9, color=INK)
    axes.set_xlim(0, 1.2 * max([1.0, *values.values()]))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure


def speed_by_method(speeds: Mapping[str, Speed]) -> Figure:
    """Horizontal bars of tokens a second, each with its speed-up, and a whisker of one standard deviation where there were several runs; a line at
    the rate of `plain` where that is among them."""
    figure, (axes,) = _figure(1, width=6.5, height=0.9 + 0.42 * max(len(speeds), 1))
    rates, plain = {name: speed.rate for name, speed in speeds.items()}, speeds.get("plain")
    shades = [colour(name, index) for index, name in enumerate(speeds)]
    axes.barh(list(rates), list(rates.values()), color=shades, height=0.62)
    for row, speed in enumerate(speeds.values()):
        if speed.spread is not None:
            axes.errorbar(speed.rate, row, xerr=speed.spread, color=INK, linewidth=1, capsize=2)
        label = f"{speed.rate:,.1f}" + ("" if speed.factor is None else f" ({speed.factor:.2f}×)")
        end = (speed.rate + (speed.spread or 0.0), row)
        axes.annotate(label, end, (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    if plain is not None:
        axes.axvline(plain.rate, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.3 * max([1e-9, *(speed.rate + (speed.spread or 0.0) for speed in speeds.values())]))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID)
    axes.set_xlabel("tokens a second" + (" (dashed: plain decoding)" if plain is not None else ""))
    return figure


def by_category(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Figure:
    """A panel of horizontal bars for each title: category -> method -> value; the line at 1 is plain decoding."""
    first = next(iter(panels.values()))
    methods = list(dict.fromkeys(name for values in first.values() for name in values))
    thickness = 0.84 / max(len(methods), 1)
    figure, all_axes = _figure(len(panels), width=4.6 * len(panels), height=1.2 + 0.19 * len(first) * (len(methods) + 0.7))
    for axes, (title, categories) in zip(all_axes, panels.items(), strict=True):
        for index, name in enumerate(methods):
            present = [(row, values[name]) for row, values in enumerate(categories.values()) if name in values]
            rows = [row + (index - (len(methods) - 1) / 2) * thickness for row, _ in present]
            drawn = axes.barh(rows, [v for _, v in present], thickness * 0.9, color=colour(name, index), label=name)
            axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=7, color=FAINT)
        axes.axvline(1.0, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(categories)), list(categories))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max([1.0, *(v for values in categories.values() for v in values.values())]))
        axes.set_xlabel(f"{title} (dashed: plain decoding)")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID)
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper left", frameon=False, fontsize=8, ncols=4)
    return figure


def stacked(bars: Mapping[str, Mapping[str, float]], x_label: str) -> Figure:
    """A horizontal bar for each name, made of its parts, each in the same order and colour; the total stands at its end."""
    parts = list(dict.fromkeys(part for values in bars.values() for part in values))
    figure, (axes,) = _figure(1, width=8.0, height=1.4 + 0.42 * max(len(bars), 1))
    left = [0.0] * len(bars)
    for index, part in enumerate(parts):
        widths = [max(values.get(part, 0.0), 0.0) for values in bars.values()]  # a part by subtraction may come out below nothing
        axes.barh(list(bars), widths, left=left, height=0.62, color=PALETTE[index % len(PALETTE)], label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f"{total:.2f}", (total, row), (4, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 1.12 * max([*left, 1e-9]))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID)
    axes.set_xlabel(x_label)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=len(parts))
    return figure


def speed_by_drafts(speedup: Mapping[int, float], tau: Mapping[int, float], best: int) -> Figure:
    """Speed-up (left, `best` marked) and tau (right) by number of drafts; the line at 1 is plain decoding."""
    figure, (left, right) = _figure(2, width=9.0)
    for axes, values, label, shade in ((left, speedup, "speed-up", PALETTE[0]), (right, tau, "tau", PALETTE[2])):
        axes.plot(list(values), list(values.values()), color=shade, linewidth=1.6, marker="o", markersize=4)
        axes.axhline(1.0, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xticks(list(values))
        axes.set_xlim(min(values) - 0.6, max(values) + 0.6)
        axes.set_xlabel("drafts in a round (dashed: plain decoding)")
        axes.set_title(label)
    left.plot([best], [speedup[best]], "o", markersize=11, markerfacecolor="none", markeredgecolor=PALETTE[5], markeredgewidth=2)
    mark = f"best: {best}, {speedup[best]:.2f}"
    low, high = min([1.0, *speedup.values()]), max([1.0, *speedup.values()])
    left.set_ylim(low - 0.15 * (high - low), high + 0.3 * (high - low))
    left.annotate(mark, (best, speedup[best]), (0, 11), textcoords="offset points", ha="center", fontsize=8, color=PALETTE[5])
    return figure


def speed_by_batch(rates: Mapping[str, Mapping[int, float]], speedups: Mapping[str, Mapping[int, float]]) -> Figure:
    """Tokens a second (left, on logarithmic scales) and speed-up (right) by batch size, a line for each method."""
    figure, (left, right) = _figure(2, width=9.5, height=3.6)
    for axes, lines, title in ((left, rates, "tokens/s"), (right, speedups, "speed-up (dashed: plain decoding)")):
        for index, (name, values) in enumerate(lines.items()):
            shade = colour(name, index)
            axes.plot(list(values), list(values.values()), color=shade, linewidth=1.6, marker="o", markersize=3, label=name)
        batches = list(next(iter(lines.values())))
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("answers at the same time")
        axes.set_title(title)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _: short_number(value))
    left.yaxis.set_minor_formatter(lambda value, _: "")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    right.axhline(1.0, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    right.set_ylim(bottom=0)
    return figure


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as PNG bytes, the same bytes for the same numbers (no date, no version inside)."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def short_number(value: float) -> str:
    """950 -> '950', 12_500 -> '12.5k', 3_000_000 -> '3M'."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _figure(panels: int, width: float, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """An empty figure in the house style, with its panels side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=9, length=0)
        axes.title.set_fontsize(10)
        axes.xaxis.label.set(fontsize=9, color=FAINT)
        axes.yaxis.label.set(fontsize=9, color=FAINT)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    return figure, all_axes


def _grouped_bars(axes: Axes, values: Mapping[str, Sequence[float | None]], groups: int, first: int = 1) -> None:
    """Bars of every method side by side, one group for each depth `first`, `first + 1`, ...; None draws no bar."""
    width = 0.8 / max(len(values), 1)
    for index, (name, heights) in enumerate(values.items()):
        shift = (index - (len(values) - 1) / 2) * width
        present = [(k, h) for k, h in enumerate(heights) if h is not None and math.isfinite(h)]
        bars = axes.bar(
            [first + k + shift for k, _ in present], [h for _, h in present], width * 0.92, color=colour(name, index), label=name
        )
        axes.bar_label(bars, labels=[f"{100 * h:.0f}" for _, h in present], padding=1, fontsize=7, color=FAINT)
    axes.set_xticks(range(first, first + groups))
    axes.set_xlim(first - 0.5, first + groups - 0.5)
