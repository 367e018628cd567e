"""Figures hold the numbers they were given, draw undefined values as nothing, and come out as the same bytes twice."""

import itertools

import pytest

from drafttrain.plots import (
    METHOD_COLOURS,
    Acceptance,
    CurvePoint,
    acceptance_by_depth,
    accepted_histogram,
    bars,
    curves,
    histograms,
    png,
    short_number,
    tau_by_method,
    tau_over_time,
    training_curve,
)


def heights(axes):
    return [[bar.get_height() for bar in container] for container in axes.containers]


def test_acceptance_draws_conditional_left_and_reach_right_and_nothing_for_undefined():
    figure = acceptance_by_depth(
        {"drafter": Acceptance([0.5, 0.4], [0.5, 0.2]), "untrained": Acceptance([0.0, None], [0.0, 0.0])}
    )
    left, right = figure.axes
    assert heights(left) == [[0.5, 0.4], [0.0]]
    assert heights(right) == [[0.5, 0.2], [0.0, 0.0]]
    assert list(left.get_xticks()) == [1, 2]


def test_bars_of_one_depth_stand_side_by_side():
    figure = acceptance_by_depth({name: Acceptance([0.5, 0.4], [0.5, 0.2]) for name in ("drafter", "lookup", "untrained")})
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for group in figure.axes[0].containers for bar in group)
    assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))


def test_histogram_is_a_share_of_each_methods_own_rounds():
    figure = accepted_histogram({"drafter": [2, 1, 1, 0], "lookup": [30, 10, 0, 0], "untrained": [0, 0, 0, 0]})
    assert heights(figure.axes[0]) == [[0.5, 0.25, 0.25, 0.0], [0.75, 0.25, 0.0, 0.0], []]
    assert list(figure.axes[0].get_xticks()) == [0, 1, 2, 3]


def test_tau_bars_and_the_colour_of_a_method():
    figure = tau_by_method({"drafter": 1.4, "lookup": 1.1, "plain": 1.0})
    bars = figure.axes[0].containers[0]
    assert [round(b.get_width(), 3) for b in bars] == [1.4, 1.1, 1.0]
    assert figure.axes[0].get_xlim()[1] > 1.4
    assert METHOD_COLOURS["drafter"] != METHOD_COLOURS["lookup"]


def test_training_curve_leaves_out_what_was_not_measured():
    points = [CurvePoint(100, loss=5.0), CurvePoint(200, loss=4.0), CurvePoint(300)]
    figure = training_curve(points)
    assert len(figure.axes) == 1
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[100, 5.0], [200, 4.0]]
    both = training_curve([*points, CurvePoint(400, tau=1.3)])
    assert both.axes[1].lines[0].get_xydata().tolist() == [[400, 1.3]]
    with pytest.raises(ValueError, match="1 points holds a loss or a tau"):
        training_curve([CurvePoint(1)])


def test_png_is_a_picture_and_the_same_twice():
    first, second = (png(tau_by_method({"drafter": 1.4})) for _ in range(2))
    assert first.startswith(b"\x89PNG\r\n")
    assert first == second
    assert first != png(tau_by_method({"drafter": 1.5}))


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (12_500, "12.5k"), (3_000_000, "3M"), (0, "0")])
def test_short_number(value, text):
    assert short_number(value) == text


def test_plain_figures_hold_their_numbers():
    panels = histograms({"a": [1, 1, 2], "b": [5]}, bins=2).axes
    assert [axes.get_title() for axes in panels] == ["a", "b"] and heights(panels[0]) == [[2, 1]]
    (axes,) = curves({"x": [(256, 0.5), (512, 0.75)]}, "size", "share").axes
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.75] and axes.get_xscale() == "log"
    (axes,) = bars({"why": 3, "because": 1}).axes
    assert [bar.get_width() for bar in axes.patches] == [3, 1] and png(bars({}))


def test_tau_over_time_draws_a_line_for_each_run_and_a_colour_for_each_name():
    groups = {"control": [[(0, 2.0), (10, 2.1)], [(0, 2.0), (12, 2.2)]], "opd": [[(0, 2.0), (11, 2.4)]]}
    (axes,) = tau_over_time(groups, "GPU-seconds").axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [list(p) for p in run] for runs in groups.values() for run in runs
    ]
    first, second, third = (line.get_color() for line in axes.lines)
    assert first == second != third and axes.get_xlim()[0] == 0 and axes.get_xlabel() == "GPU-seconds"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["control (2 runs)", "opd"]
