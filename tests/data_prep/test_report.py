"""The data report says what the stores hold."""

import json
import re
import shutil
from collections import Counter

import pytest
import torch
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.pipeline import prepare
from data_prep.report import worries, write_report
from data_prep.sources import JsonlPrompts, SelfPrompts
from drafttrain.data.store import TokenStore
from drafttrain.data.token_counts import count
from drafttrain.vocab import Cost, best_size, choose


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
    # One answer a chat: two taps of all rows but the last two, and a final state of every answer token but the last.
    vectors = 2 * (s["tokens"] - 2 * s["chats"]) + s["answer_tokens"] - s["chats"]
    assert s["feature_bytes"] == {"bfloat16": vectors * 8 * 2, "float8_e4m3fn": vectors * (8 + 4)}


def _sums(store):
    chats = [store.chat(i) for i in range(len(store))]
    return sum(int(c.supervised.sum()) for c in chats), sum(len(c.ids) for c in chats)


def test_the_report_names_every_drop_and_its_figures_exist(folder):
    text = (folder / "report" / "README.md").read_text()
    for reason in TokenStore.open(folder / "train").manifest.rows["dropped"]:
        assert f"| {reason} |" in text
    figures = re.findall(r"!\[\w+\]\((\w+\.png)\)", text)
    assert len(figures) == 3 and all((folder / "report" / name).stat().st_size > 1000 for name in figures)


def test_coverage_of_every_source_counted_one_by_one(folder):
    """From the stores, chat by chat, by the file of prompts: of training answers, of all others', of held-out ones."""
    s = json.loads((folder / "report" / "summary.json").read_text())
    kept, held_out = TokenStore.open(folder / "train"), TokenStore.open(folder / "held_out")
    vocabulary = set(choose(kept.counts()[0], 16, kept.counts()[1], always=(2,)).ids.tolist())
    source = {}
    for name in ("prompts.jsonl", "held_out.jsonl"):
        source |= {row["key"]: row["source"] for row in map(json.loads, (folder / name).read_text().splitlines())}

    def covered(store, wanted):
        said = [
            token in vocabulary
            for chat in (store.chat(i) for i in range(len(store)))
            if wanted(source[chat.key.removesuffix("#greedy")])
            for token in chat.ids[chat.supervised].tolist()
        ]
        return sum(said) / len(said) if said else None

    assert len({group["covered"] for group in s["sources"].values()}) == 2
    for name, group in s["sources"].items():
        assert group["covered"] == pytest.approx(covered(kept, lambda other, name=name: other == name))
        assert group["covered_elsewhere"] == pytest.approx(covered(kept, lambda other, name=name: other != name))
        assert group["held_out_covered"] == pytest.approx(covered(held_out, lambda other, name=name: other == name))
    assert s["draft_vocabulary"]["training"] == pytest.approx(covered(kept, lambda other: True))
    assert s["draft_vocabulary"]["held_out"] == pytest.approx(covered(held_out, lambda other: True))
    assert s["draft_vocabulary"]["size"] == 16


@pytest.fixture
def again(folder, monkeypatch):
    """Writes the report anew; returns (its numbers, how often each chat was read)."""

    def write(draft_vocab):
        read = Counter()
        chat = TokenStore.chat
        monkeypatch.setattr(
            TokenStore, "chat", lambda store, index: (read.update([(store.folder.name, index)]), chat(store, index))[1]
        )
        stores = [TokenStore.open(folder / name) for name in ("train", "held_out")]
        write_report(folder, *stores, (2,), draft_vocab, 2)
        monkeypatch.undo()
        return json.loads((folder / "report" / "summary.json").read_text()), read

    yield write
    write(16)


def test_every_chat_is_read_once(folder, again):
    s, read = again(16)
    assert len(read) == s["chats"] + s["held_out"]["chats"] and set(read.values()) == {1}


def test_the_best_size_and_what_new_answers_need(folder, again):
    cost = Cost(outside=1000, per_token=40, target=100_000, drafts=3)
    s, _ = again(cost)
    counts = count(TokenStore.open(folder / "train"))
    assert s["draft_vocabulary"]["size"] == best_size(counts, cost) and s["draft_vocabulary"]["best"]
    assert f"1,000 + 40 x {s['draft_vocabulary']['size']} weights" in (folder / "report" / "README.md").read_text()
    for size, share in s["coverage"]["new answers, expected"]:
        assert share == pytest.approx(float(counts.expected(torch.tensor([size]))[0]))
    for share, size in s["size_for_new_coverage"].items():
        assert float(counts.expected(torch.tensor([size]))[0]) >= float(share) - 1e-9
        assert size >= s["size_for_coverage"][share]


def fine() -> dict:
    """A summary in which nothing stands out."""
    group = {"looping": 0.1, "cut_at_limit": 0.2, "answer_tokens": 5000, "covered": 0.95, "covered_elsewhere": 0.99}
    return {
        "rows": {"in": 100, "dropped": {"duplicate": 20, "split off as held out": 40}},
        "sources": {"chat": group, "french": dict(group)},
        "draft_vocabulary": {"held_out": 0.93},
        "held_out": {"answer_tokens": 3000},
    }


def test_nothing_stands_out(folder, again):
    assert worries(fine()) == []
    again(None)
    assert "## Worth a look\n\n" in (folder / "report" / "README.md").read_text()


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("rows", "dropped", "duplicate"), 21, "21% of the rows were dropped: duplicate."),
        (("sources", "french", "covered"), 0.93, "covers 93.0% of the answers to french, but 99.0% of all others"),
        (("sources", "french", "looping"), 0.25, "25% of the answers to french loop."),
        (("sources", "chat", "cut_at_limit"), 0.3, "30% of the answers to chat were cut at the limit."),
        (("draft_vocabulary", "held_out"), 0.82, "covers 82.0% of held-out answers"),
    ],
)
def test_shares_that_worry_are_said_in_words(place, value, words):
    summary = fine()
    inner = summary
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    [sentence] = worries(summary)
    assert words in sentence


def test_a_few_tokens_are_no_reason_to_worry():
    summary = fine()
    summary["sources"]["french"] |= {"covered": 0.5, "answer_tokens": 400}
    summary["draft_vocabulary"]["held_out"], summary["held_out"]["answer_tokens"] = 0.5, 300
    assert worries(summary) == []


def test_nothing_is_said_of_features_where_nobody_knows_what_is_read(folder, tmp_path):
    place = shutil.copytree(folder, tmp_path / "data")
    stores = [TokenStore.open(place / name) for name in ("train", "held_out")]
    for taps, said in ((2, "2 taps of"), (1, "1 tap of"), (0, "The final state of the tokens"), (None, None)):
        text = write_report(place, *stores, (2,), 16, taps).read_text()
        assert ("## Stored features" in text, said is None or f"## Stored features\n\n{said}" in text) == (said is not None, True)
        assert ("feature_bytes" in json.loads((place / "report" / "summary.json").read_text())) == (said is not None)
