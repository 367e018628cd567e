"""The data report says what the stores hold."""

import json
import re

import pytest
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.pipeline import prepare
from data_prep.sources import JsonlPrompts, SelfPrompts
from drafttrain.data.features import feature_bytes
from drafttrain.data.store import TokenStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources, two answers to each prompt."""
    place = tmp_path_factory.mktemp("report")
    rows = [{"messages": [{"role": "user", "content": f"kaban lodor {word}"}]} for word in ("misban", "nufel", "rahus", "tigim")]
    (place / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = FakeTarget()
    prepare(
        small_config(
            prompts=[SelfPrompts(count=24, max_tokens=30), JsonlPrompts(str(place / "p.jsonl"), name="file")], greedy=True
        ),
        target,
        place / "data",
        taps=None,
        draft_vocab=16,
        tap_count=2,
        ask=FakeSpeech(target),
        say=lambda text: None,
    )
    return place / "data"


def test_numbers_are_those_of_the_stores(folder):
    s = json.loads((folder / "report" / "summary.json").read_text())
    store = TokenStore.open(folder / "train")
    assert (s["chats"], s["answer_tokens"], s["tokens"]) == (len(store), *_sums(store))
    assert s["rows"]["in"] == s["rows"]["kept"] + sum(s["rows"]["dropped"].values())
    assert set(s["sources"]) == {"self", "file"} and sum(g["chats"] for g in s["sources"].values()) == len(store)
    assert sum(g["answer_tokens"] for g in s["sources"].values()) == s["answer_tokens"]
    ends = [int(store.chat(i).ids[-1]) == 2 for i in range(len(store))]
    cut = sum(g["cut_at_limit"] * g["chats"] for g in s["sources"].values())
    assert round(cut) == ends.count(False) > 0
    assert s["turns"] == {"1": len(store)}
    for name in ("training answers", "held-out answers"):
        size, share = s["coverage"][name][-1]
        assert size == FakeTarget().vocab and share == 1.0
    assert s["feature_bytes"]["float8_e4m3fn"] == s["tokens"] * feature_bytes(2, 8, "float8_e4m3fn")


def _sums(store):
    chats = [store.chat(i) for i in range(len(store))]
    return sum(int(c.supervised.sum()) for c in chats), sum(len(c.ids) for c in chats)


def test_the_report_names_every_drop_and_its_figures_exist(folder):
    text = (folder / "report" / "README.md").read_text()
    for reason in TokenStore.open(folder / "train").manifest.rows["dropped"]:
        assert f"| {reason} |" in text
    figures = re.findall(r"!\[\w+\]\((\w+\.png)\)", text)
    assert len(figures) == 3 and all((folder / "report" / name).stat().st_size > 1000 for name in figures)
