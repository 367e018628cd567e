"""The benchmark's figures hold the numbers of bench.json."""

import pytest

from drafttrain.plots import METHOD_COLOURS, PALETTE, by_category, colour, png, speed_by_batch, speed_by_drafts, stacked
from drafttrain.validation.bench_figures import figures_of


def widths(axes):
    return [[round(bar.get_width(), 3) for bar in container] for container in axes.containers]


def test_categories_stand_beside_each_other_method_by_method():
    tau = {"qa": {"chain": 2.0, "lookup 3": 1.1}, "all": {"chain": 1.8, "lookup 3": 1.2}}
    speed = {"qa": {"chain": 1.4, "lookup 3": 0.9}, "all": {"chain": 1.3, "lookup 3": 1.0}}
    figure = by_category({"tau": tau, "speed-up": speed})
    left, right = figure.axes
    assert widths(left) == [[2.0, 1.8], [1.1, 1.2]] and widths(right) == [[1.4, 1.3], [0.9, 1.0]]
    assert [label.get_text() for label in left.get_yticklabels()] == ["qa", "all"]
    chain, lookup = left.containers
    assert all(a.get_y() + a.get_height() <= b.get_y() + 1e-9 for a, b in zip(chain, lookup, strict=True))


def test_stages_are_stacked_and_nothing_is_drawn_for_less_than_nothing():
    (axes,) = stacked(
        {"plain": {"draft": 0.0, "check": 2.0, "rest": -0.1}, "chain": {"draft": 1.0, "check": 3.0, "rest": 0.5}}, "ms"
    ).axes
    assert widths(axes) == [[0.0, 1.0], [2.0, 3.0], [0.0, 0.5]]
    assert [bar.get_x() for bar in axes.containers[2]] == [2.0, 4.0]
    assert [text.get_text() for text in axes.texts] == ["2.00", "4.50"]


def test_the_best_draft_length_is_marked():
    left, right = speed_by_drafts({1: 1.1, 2: 1.5, 3: 1.3}, {1: 1.4, 2: 1.9, 3: 2.0}, 2).axes
    assert left.lines[0].get_xydata().tolist() == [[1, 1.1], [2, 1.5], [3, 1.3]]
    assert right.lines[0].get_ydata().tolist() == [1.4, 1.9, 2.0]
    mark = next(line for line in left.lines if line.get_markersize() == 11)
    assert mark.get_xydata().tolist() == [[2, 1.5]] and left.texts[0].get_text() == "best: 2, 1.50"


def test_batches_have_a_line_for_each_method_in_its_colour():
    rates = {"chain": {1: 100.0, 2: 190.0}, "plain": {1: 80.0, 2: 160.0}}
    left, right = speed_by_batch(rates, {"chain": {1: 1.25, 2: 1.19}}).axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[100, 190], [80, 160]]
    assert [line.get_color() for line in left.lines] == [colour("chain", 0), METHOD_COLOURS["plain"]] == [PALETTE[0], "#bbbbbb"]
    assert right.lines[0].get_ydata().tolist() == [1.25, 1.19]


def method(tau: float, speedup: float) -> dict:
    depths = {"acceptance_by_depth": [0.5, None], "reach_by_depth": [0.5, 0.0]}
    return {"tau": tau, "speedup": speedup, "categories": {"qa": {"tau": tau, "speedup": speedup}}} | depths


@pytest.mark.parametrize("full", [True, False])
def test_figures_come_from_the_numbers_and_what_was_not_measured_has_none(full):
    stages = {"ms_per_round": {"draft": 1.0, "check": 2.0, "commit": 0.1, "rest": 0.2}}
    batch = {"methods": {name: {"tokens_per_second": 5.0, "speedup": 1.0} for name in ("plain", "m")}}
    result = {
        "temperatures": [{"temperature": 0.5, "methods": {"plain": method(1, 1), "m": method(1.5, 1.2)}}],
        "breakdown": {"methods": {"plain": stages, "m": stages}},
        "draft_length": {"points": [{"drafts": 1, "speedup": 1.1, "tau": 1.4}], "best": 1} if full else None,
        "throughput": [batch | {"batch": 1}, batch | {"batch": 2}] if full else [],
    }
    figures = figures_of(result)
    always = ["categories-t0.5.png", "acceptance-t0.5.png", "stages.png"]
    assert list(figures) == always + (["drafts.png", "batches.png"] if full else [])
    assert widths(figures["categories-t0.5.png"][1].axes[1]) == [[1.2, 1.2]]
    assert all(png(figure).startswith(b"\x89PNG") and caption for caption, figure in figures.values())
