"""The card's figures: each holds the numbers of its report, none is there without them, and every link leads to a file that a push sends."""

import copy
import json
import re
import shutil

import pytest

from drafttrain.commands.bench import UNSORTED as BENCH_UNSORTED
from drafttrain.errors import UserError
from drafttrain.export import card_bench
from drafttrain.export.card import TAU, card_text, write_card
from drafttrain.export.card_bench import bench_of, bench_text, tau_by_category
from drafttrain.export.card_figures import (
    MOST_POINTS,
    accepted_by_position,
    curve_kept,
    figures_of,
    speed_by_method,
    training_points,
)
from drafttrain.export.hub import preview, push
from drafttrain.plots import CurvePoint, png
from drafttrain.validation.bench_config import PLAIN
from drafttrain.validation.curve import read_curve
from export.hub_standin import HubStandin
from export.test_card import MADE, REPORT


def measured(tau: float, rate: float, sd: float | None, speedup: float, qa: float, math: float, **more) -> dict:
    """A method's part of bench.json."""
    speed = {"tokens_per_second": rate, "tokens_per_second_sd": sd, "speedup": speedup, "speedup_sd": sd}
    depths = {"acceptance_by_depth": [0.5, 0.25, None], "reach_by_depth": [0.5, 0.125, 0.0]}
    categories = {"qa": {"tau": qa, "rounds": 7}, "math": {"tau": math, "rounds": 9}}
    return {"tau": tau, "exact": True, "different": 0, "rounds": 16, "categories": categories} | speed | depths | more


RESULT = {
    "export_hash": MADE["weights"]["sha256"], "commit": "0123456789abcdef", "date": "2026-11-29T00:00:00+00:00", "lossless": True,
    "hardware": {"gpu": "Some GPU", "torch": "2.13"}, "categories": {"qa": 3, "math": 5}, "draft_length": {"best": 2, "points": []},
    "config": {"prompts": "/secret/place/spec_bench.jsonl", "max_tokens": 64, "repeats": 3},
    "temperatures": [
        {"temperature": 0.0, "questions": 8, "methods": {
            "plain": measured(1.0, 60.0, 0.5, 1.0, 1.0, 1.0),
            "chain 3": measured(2.25, 90.5, 2.5, 1.51, 1.75, 2.75),
            "lookup 5": measured(1.25, 48.25, 1.5, 0.81, 1.5, 1.125, different=2),
        }},
        {"temperature": 1.0, "questions": 8, "methods": {
            "plain": measured(1.0, 59.0, None, 1.0, 1.0, 1.0), "drawn 3": measured(1.625, 70.0, None, 1.19, 1.5, 1.75, exact=False),
        }},
    ],
}  # fmt: skip
CURVE = [[1000.0, 5.5, None], [2000.0, 4.25, None], [2000.0, None, 1.5], [3000.0, 3.0, 2.125], [4000.0, None, 2.0]]


def benchmark(tmp_path, **changes) -> dict:
    (tmp_path / "bench").mkdir(exist_ok=True)
    (tmp_path / "bench" / "bench.json").write_text(json.dumps(RESULT | changes))
    return bench_of(tmp_path)


@pytest.fixture
def hub(monkeypatch):
    """Without Xet, whose protocol is a binary library's own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with HubStandin({"hf_good": ["me"]}) as standin:
        yield standin


@pytest.fixture
def folder(tmp_path):
    """An export as it is before anything was measured, its training curve apart."""
    place = tmp_path / "export"
    place.mkdir()
    made = MADE | {"facts": MADE["facts"] | {"tokens seen": 3000, "curve": CURVE}}
    (place / "drafttrain.json").write_text(json.dumps(made))
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"weights")
    return place


def links(text: str) -> list[str]:
    return re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)


def widths(axes) -> list[float]:
    return [bar.get_width() for container in axes.containers for bar in container if hasattr(bar, "get_width")]


# ---- the numbers -----------------------------------------------------------------------------------------------------------


def test_acceptance_is_the_report_s_and_nothing_where_no_round_got():
    report = REPORT | {"acceptance_by_depth": [0.61, 0.5, 0.0, 0.0], "reach_by_depth": [0.61, 0.305, 0.0, 0.0]}
    (drafter,) = accepted_by_position(report, None).values()
    assert drafter.conditional == [0.61, 0.5, 0.0, None] and drafter.reach == [0.61, 0.305, 0.0, 0.0]
    left, right = figures_of(MADE, report)["plots/acceptance.png"].draw().axes
    assert [bar.get_height() for bar in left.containers[0]] == [0.61, 0.5, 0.0]
    assert [bar.get_height() for bar in right.containers[0]] == report["reach_by_depth"]
    assert "61.0% of the rounds of this drafter accept the first draft, and 0.0% all 4." in card_text(MADE, report)
    assert "0.610, 0.500, 0.000, never reached" in card_text(MADE, report)


def test_acceptance_of_a_benchmark_alone_is_of_its_methods(tmp_path):
    found = accepted_by_position(None, benchmark(tmp_path))
    assert list(found) == ["chain 3", "lookup 5"] and found["chain 3"].conditional == [0.5, 0.25, None]
    assert list(accepted_by_position(REPORT, benchmark(tmp_path))) == ["drafter"]


def test_tau_by_category_is_the_benchmark_s(tmp_path):
    bench = benchmark(tmp_path)
    wanted = {
        "qa": {"chain 3": 1.75, "lookup 5": 1.5},
        "math": {"chain 3": 2.75, "lookup 5": 1.125},
        "all questions": {"chain 3": 2.25, "lookup 5": 1.25},
    }
    assert tau_by_category(bench) == wanted
    figure = figures_of(MADE | {"benchmark": bench}, None)["plots/categories.png"]
    (axes,) = figure.draw().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(wanted)
    assert widths(axes) == [1.75, 2.75, 2.25, 1.5, 1.125, 1.25]
    assert figure.seen == "With chain 3, tau goes from 1.75 on qa to 2.75 on math; over all questions it is 2.25."


def test_questions_without_a_category_are_not_taken_for_all_of_them(tmp_path):
    tables = copy.deepcopy(RESULT["temperatures"])
    for each in tables:
        for method in each["methods"].values():
            method["categories"]["all"] = method["categories"].pop("math")
    mixed = benchmark(tmp_path, temperatures=tables, categories={"qa": 3, "all": 5})
    assert tau_by_category(mixed)["no category"]["chain 3"] == 2.75 and tau_by_category(mixed)["all questions"]["chain 3"] == 2.25
    assert "| no category | 5 |" in bench_text(mixed) and "| all questions | 8 |" in bench_text(mixed)
    for each in tables:
        for method in each["methods"].values():
            del method["categories"]["qa"]
    assert tau_by_category(benchmark(tmp_path, temperatures=tables, categories={"all": 8})) == {}


def test_speed_is_the_benchmark_s_with_its_spread(tmp_path):
    bench = benchmark(tmp_path)
    found = speed_by_method(bench)
    assert [(n, s.rate, s.spread, s.factor) for n, s in found.items()] == [
        ("chain 3", 90.5, 2.5, 1.51), ("lookup 5", 48.25, 1.5, 0.81), ("plain", 60.0, 0.5, None),
    ]  # fmt: skip
    figure = figures_of(MADE | {"benchmark": bench}, None)["plots/speed.png"]
    (axes,) = figure.draw().axes
    assert widths(axes)[:3] == [90.5, 48.25, 60.0]
    assert [text.get_text() for text in axes.texts] == ["90.5 (1.51×)", "48.2 (0.81×)", "60.0"]
    assert [list(line.get_segments()[0][:, 0]) for line in axes.collections] == [[88.0, 93.0], [46.75, 49.75], [59.5, 60.5]]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [60.0]
    assert figure.seen == "chain 3 is fastest, 1.51 times plain decoding's 60.0 tokens/s."


def test_a_drafter_that_makes_nothing_faster_is_said_to(tmp_path):
    tables = copy.deepcopy(RESULT["temperatures"])
    del tables[0]["methods"]["chain 3"]
    bench = benchmark(tmp_path, temperatures=tables)
    seen = figures_of(MADE | {"benchmark": bench}, None)["plots/speed.png"].seen
    assert (
        seen
        == "No method is faster than plain decoding here; the nearest is lookup 5, 0.81 times plain decoding's 60.0 tokens/s."
    )
    del tables[0]["methods"]["lookup 5"]
    assert set(figures_of(MADE | {"benchmark": benchmark(tmp_path, temperatures=tables)}, None)) == set()


def test_the_training_curve_is_the_log_s(tmp_path):
    log = tmp_path / "version_0"
    log.mkdir()
    (log / "metrics.csv").write_text(
        "tokens_seen,train/loss,held_out/tau\n1000,5.5,\n2000,4.25,\n,,1.5\n3000,3.0,2.125\n4000,,2.0\n"
    )
    kept = json.loads(json.dumps(curve_kept(read_curve(tmp_path))))
    assert kept == CURVE
    made = MADE | {"facts": {"curve": kept, "tokens seen": 3000}}
    assert training_points(made) == read_curve(tmp_path)
    figure = figures_of(made, None)["plots/training.png"]
    loss, tau = figure.draw().axes
    assert loss.lines[0].get_xydata().tolist() == [[1000, 5.5], [2000, 4.25], [3000, 3.0]]
    assert tau.lines[0].get_xydata().tolist() == [[2000, 1.5], [3000, 2.125], [4000, 2.0]]
    assert figure.seen == (
        "After 4,000 tokens the training loss has gone from 5.5 to 3. tau on held-out prompts has gone from 1.500 to 2.000, 2.125 at best. "
        "These weights are those after 3,000 tokens."
    )


def test_the_tau_of_a_drafter_of_step_0_begins_its_curve():
    """Exports of earlier versions kept none before the first token, so the best of these taus would be another one than the card's."""
    facts = {"curve": CURVE, "steps": 0, "tokens seen": 0, "held-out tau while training": 2.25, "begun from": "someone/drafter"}
    figure = figures_of(MADE | {"facts": facts}, None)["plots/training.png"]
    assert figure.draw().axes[1].lines[0].get_xydata().tolist() == [[0, 2.25], [2000, 1.5], [3000, 2.125], [4000, 2.0]]
    assert figure.seen.endswith(
        "tau on held-out prompts has gone from 2.250 to 2.000, 2.250 at best. These weights are those that training began from."
    )
    there = [[0.0, None, 2.25], *CURVE]  # not twice, where it was kept
    assert training_points(MADE | {"facts": facts | {"curve": there}}) == training_points(MADE | {"facts": facts})
    assert training_points(MADE | {"facts": facts | {"steps": 4}})[0].tokens == 1000


def test_a_long_curve_is_thinned_but_no_tau_is_lost():
    points = [CurvePoint(10.0 * k, 100.0 - k, 1.0 + k if k % 500 == 3 else None) for k in range(2001)]
    kept = curve_kept(points)
    losses, taus = ([p for p in kept if p[k] is not None] for k in (1, 2))
    assert (
        MOST_POINTS // 2 < len(losses) <= MOST_POINTS + 1
        and kept[0] == [0.0, 100.0, None]
        and kept[-1] == [20000.0, -1900.0, None]
    )
    assert [tau for _, _, tau in taus] == [4.0, 504.0, 1004.0, 1504.0]
    assert all([10.0 * k, 100.0 - k] in [p[:2] for p in losses] for k in range(0, 2001, 6))
    assert curve_kept([]) == []


# ---- the card --------------------------------------------------------------------------------------------------------------


def test_what_was_not_measured_has_no_figure(tmp_path):
    assert links(card_text(MADE, None)) == [] and "Benchmarked" not in card_text(MADE, None)
    assert links(card_text(MADE, REPORT)) == ["plots/acceptance.png"]
    assert links(card_text(MADE | {"facts": {"curve": CURVE[2:3]}}, None)) == ["plots/training.png"]
    bench = benchmark(tmp_path, categories={"all": 8}, draft_length=None)
    text = card_text(MADE | {"benchmark": bench}, REPORT)
    assert links(text) == ["plots/acceptance.png", "plots/speed.png"]
    assert "tau by category" not in text and "fastest chain" not in text


def test_what_tau_is_stands_once_under_the_first_figures(tmp_path):
    bench, curve = {"benchmark": benchmark(tmp_path)}, {"facts": {"curve": CURVE}}
    assert TAU not in card_text(MADE, None)
    for made, report, last in (
        (MADE, REPORT, "acceptance"), (MADE | bench, REPORT, "speed"), (MADE | curve, None, "training"), (MADE | curve | bench, None, "speed"),
    ):  # fmt: skip
        before, *after = card_text(made, report).split(f"\n\n{TAU}")
        assert len(after) == 1 and links(before)[-1] == f"plots/{last}.png" and before.endswith(".")


def test_the_benchmark_s_tables(tmp_path):
    text = card_text(MADE | {"benchmark": benchmark(tmp_path)}, REPORT)
    for part in (
        "| 0 | chain 3 | 2.250 | 90.5 ± 2.5 | 1.51 ± 2.50 | yes |", "| 0 | lookup 5 | 1.250 | 48.2 ± 1.5 | 0.81 ± 1.50 | not in 2 answers |",
        "| 1 | drawn 3 | 1.625 | 70.0 | 1.19 | in distribution |", "| math | 5 | 2.750 | 1.125 |", "| all questions | 8 | 2.250 | 1.250 |",
        "8 questions of spec_bench.jsonl, one at a time, answers up to 64 tokens; mean of 3 timed runs. The fastest chain there has 2 drafts.",
        "Measured on Some GPU, torch 2.13; drafttrain at `0123456789ab`.",
    ):  # fmt: skip
        assert part in text
    assert "/secret" not in text


def test_every_link_leads_to_a_file_that_a_push_sends_and_refreshing_brings_in_what_was_measured(folder, hub, tmp_path):
    shown = {"training.png"}
    for report, bench, added in (
        (None, None, set()),
        (REPORT, None, {"acceptance.png"}),
        (None, benchmark(tmp_path), {"categories.png", "speed.png"}),
    ):
        write_card(folder, report, bench)
        shown |= added
        found = links((folder / "README.md").read_text())
        assert set(found) == {f"plots/{name}" for name in shown} and len(found) == len(shown)
        assert {path.name for path in (folder / "plots").iterdir()} == shown
        assert all((folder / path).read_bytes().startswith(b"\x89PNG") for path in found)
    text = (folder / "README.md").read_text()
    for path in links(text):
        below = text.split(f"({path})\n\n", 1)[1].splitlines()[0]
        assert below.endswith(".") and len(below) > 30
    listed = preview(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token="hf_good")
    assert all(any(line.startswith(f"  {path}  ") for line in listed) for path in links(text))
    push(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token="hf_good")
    assert all(hub.repos["me/tiny-eagle3"].files[path] == (folder / path).read_bytes() for path in links(text))


def test_a_figure_goes_when_its_numbers_go(folder, tmp_path):
    write_card(folder, REPORT, benchmark(tmp_path))
    (folder / "plots" / "mine.png").write_bytes(b"somebody's")
    write_card(folder, None, benchmark(tmp_path, categories={"all": 8}))
    assert {path.name for path in (folder / "plots").iterdir()} == {"acceptance.png", "speed.png", "training.png", "mine.png"}
    assert "categories.png" not in (folder / "README.md").read_text()


def test_the_same_numbers_give_the_same_bytes_anywhere(folder, tmp_path):
    bench = benchmark(tmp_path)
    shutil.copytree(folder, tmp_path / "elsewhere")
    for place in (folder, tmp_path / "elsewhere"):
        write_card(place, REPORT, bench)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 8 and all((folder / f).read_bytes() == (tmp_path / "elsewhere" / f).read_bytes() for f in files)
    assert all(str(tmp_path).encode() not in (folder / file).read_bytes() for file in files)
    write_card(folder, None)  # what drafttrain.json keeps is enough to draw them again
    assert all((folder / f).read_bytes() == (tmp_path / "elsewhere" / f).read_bytes() for f in files)
    made = json.loads((folder / "drafttrain.json").read_text())
    for path, figure in figures_of(made, made["measured"]).items():
        assert png(figure.draw()) == (folder / path).read_bytes()


def test_numbers_of_training_are_rounded_and_counts_are_not():
    text = card_text(MADE | {"facts": {"held-out tau while training": 1.2270531400966185, "tokens seen": 1234567}}, None)
    assert "- held-out tau while training: 1.227\n- tokens seen: 1234567\n" in text


def test_where_the_data_came_from():
    data = {
        "chats": 1234, "tokens": 56789, "supervised_tokens": 3456, "sources": {"self": 1000, "gsm8k": 300},
        "answers": {"samples": 1, "greedy": True, "temperature": 0.7},
    }  # fmt: skip
    text = card_text(MADE | {"facts": MADE["facts"] | {"data": data}}, None)
    assert (
        "The data: 1,234 chats of 56,789 tokens, 3,456 of them the target's answers; prompts from self (1,000 prompts), gsm8k (300 prompts); "
        "answers with samples 1, greedy True, temperature 0.7." in text
    )
    assert "The data" not in card_text(MADE, None)


def test_a_benchmark_is_read_if_it_is_there_and_whole(tmp_path):
    assert bench_of(tmp_path) is None
    assert benchmark(tmp_path)["export_hash"] == MADE["weights"]["sha256"]
    with pytest.raises(UserError, match=r"lacks a number .*run `drafttrain bench` again"):
        benchmark(tmp_path, temperatures=[{"temperature": 0}])
    with pytest.raises(UserError, match=r"bench\.json"):
        (tmp_path / "bench" / "bench.json").write_text("{")
        bench_of(tmp_path)


def test_the_words_of_the_benchmark_are_its_own():
    assert (card_bench.PLAIN, card_bench.UNSORTED) == (PLAIN, BENCH_UNSORTED)
