"""The mix of sources, and near-duplicates among all prompts, against plain definitions."""

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.gather import askable, gather
from data_prep.ledger import Ledger
from data_prep.mix import NOT_NEEDED, mix, quotas
from data_prep.pipeline import prepare
from data_prep.prompt import Prompt, Work
from data_prep.repeats import near_repeats, rows_of_band
from data_prep.sources import JsonlPrompts
from data_prep.text import jaccard, shingles
from drafttrain.errors import UserError


def prompts(**sizes: int) -> list[Prompt]:
    return [Prompt(f"{s}-{i}", s, [{"role": "user", "content": f"{s} {i}"}]) for s, size in sizes.items() for i in range(size)]


def test_quotas_equal_the_plain_search():
    """The largest total for which every share, rounded to whole prompts, is at hand."""
    draw = random.Random(0)
    for _ in range(200):
        names = "abcd"[: draw.randint(1, 4)]
        weights = {name: draw.choice([0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0]) for name in names}
        at_hand = {name: draw.randint(1, 40) for name in names}
        count = draw.choice([None, draw.randint(1, 60)])
        whole = sum(Fraction(str(weight)) for weight in weights.values())
        share = {name: Fraction(str(weight)) / whole for name, weight in weights.items()}
        fits = [n for n in range(1, 1 + (count or 200)) if all(share[name] * n <= at_hand[name] for name in names)]
        if not fits:
            with pytest.raises(UserError, match="too few for its weight"):
                quotas(at_hand, weights, count)
            continue
        found = quotas(at_hand, weights, count)
        assert sum(found.values()) == fits[-1]
        assert all(found[name] <= at_hand[name] and abs(found[name] - share[name] * fits[-1]) < 1 for name in names)


def test_weights_are_read_as_typed():
    assert quotas({"a": 3, "b": 7}, {"a": 0.3, "b": 0.7}, None) == {"a": 3, "b": 7}
    assert quotas({"a": 3, "b": 7}, {"a": 3.0, "b": 7.0}, None) == {"a": 3, "b": 7}


def test_mix_depends_on_keys_and_seed_only():
    said: list[str] = []
    ledger = Ledger()
    given = prompts(a=30, b=10)
    found = mix(given, {"a": 1.0, "b": 1.0}, None, 0, ledger, said.append)
    assert Counter(p.source for p in found) == {"a": 10, "b": 10} and ledger.dropped == {NOT_NEEDED: 20}
    assert found == [p for p in given if p in found] and said == ["the mix: 10 of 30 from a, 10 of 10 from b"]
    again = mix(given[::-1], {"b": 2.0, "a": 2.0}, None, 0, Ledger(), said.append)
    assert {p.key for p in again} == {p.key for p in found}
    other = mix(given, {"a": 1.0, "b": 1.0}, None, 1, Ledger(), said.append)
    assert {p.key for p in other} != {p.key for p in found}
    fewer = mix(given, {"a": 1.0, "b": 1.0}, 8, 0, Ledger(), said.append)
    assert {p.key for p in fewer} < {p.key for p in found} and len(fewer) == 8


def test_count_without_weights_and_more_than_there_are():
    said: list[str] = []
    given = prompts(a=6, b=4)
    assert mix(given, None, None, 0, Ledger(), said.append) == given and said == []
    ledger = Ledger()
    assert len(mix(given, None, 7, 0, ledger, said.append)) == 7 and ledger.dropped == {NOT_NEEDED: 3}
    assert len(mix(given, None, 70, 0, Ledger(), said.append)) == 10
    assert said == ["the mix has 10 prompts, although prepare.count asks for 70: the sources give no more"]


def test_a_source_without_prompts_is_named():
    with pytest.raises(UserError, match="prompt source b has 0 prompts left for training, too few for its weight of 2.0"):
        mix(prompts(a=5), {"a": 1.0, "b": 2.0}, None, 0, Ledger(), print)


def sentence(draw: random.Random, length: int) -> list[str]:
    return [f"w{draw.randrange(60)}" for _ in range(length)]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_near_repeats_are_those_of_the_plain_definition(threshold):
    draw = random.Random(0)
    texts = [sentence(draw, draw.randint(5, 30)) for _ in range(120)]
    for _ in range(120):
        words = list(draw.choice(texts))
        for _ in range(draw.randint(0, 3)):
            words[draw.randrange(len(words))] = "other"
        texts.append(words)
    draw.shuffle(texts)
    given = [Prompt(str(i), "s", [{"role": "user", "content": " ".join(words)}]) for i, words in enumerate(texts)]
    kept, plain = [], {}
    for index, prompt in enumerate(given):
        close = [other for other in kept if jaccard(shingles(prompt.user), shingles(given[other].user)) >= threshold]
        if close:
            plain[index] = close[0]
        else:
            kept.append(index)
    found = near_repeats(given, threshold)
    assert 20 < len(plain) < 120
    assert all(
        jaccard(shingles(given[a].user), shingles(given[b].user)) >= threshold and b not in found for a, b in found.items()
    )
    assert len(set(found) ^ set(plain)) <= 0.05 * len(plain)


def test_bands_miss_one_pair_in_a_hundred_at_most():
    assert [rows_of_band(threshold) for threshold in (0.01, 0.5, 0.7, 0.9, 1.0)] == [1, 3, 4, 10, 128]


def test_texts_without_words_and_few_prompts():
    given = [Prompt(str(i), "s", [{"role": "user", "content": text}]) for i, text in enumerate(["???", "!!!", "???"])]
    assert near_repeats(given, 0.7) == {2: 0} and near_repeats([], 0.7) == {}


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_that_ask_the_same_are_duplicates_across_sources(work, ledger):
    def chat(key: str, *said: tuple[str, str], tools=None) -> Prompt:
        return Prompt(key, "s", [{"role": role, "content": text} for role, text in said], tools)

    given = [
        chat("a", ("user", "Hello there")),
        chat("b", ("user", "hello  there.")),
        chat("c", ("system", "x"), ("user", "hello there")),
        chat("d", ("user", "x"), ("user", "hello there")),
        chat("e", ("user", "hello there"), tools=[{"name": "f"}]),
        chat("f", ("user", "hello there"), tools=[{"name": "f"}]),
        chat("g", ("user", "hello there"), tools=[{"name": "g"}]),
        chat("a", ("user", "another")),
    ]
    assert [p.key for p in askable(given, work, 100, ledger)] == ["a", "c", "d", "e", "g"]
    assert ledger.dropped == {"duplicate": 2, "id used twice": 1}


def test_only_the_first_turn_must_fit_and_render(work, ledger):
    long = Prompt("a", "s", [{"role": "user", "content": "short"}, {"role": "user", "content": "long " * 90}])
    assert askable([long], work, 20, ledger) == [long]


def test_prompts_with_odd_line_ends_are_found_again(tmp_path, said):
    texts = [f"kaban\u2028lodor\x85mifel {number}\r\x0b" for number in range(6)]
    path = write(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])
    target = FakeTarget()
    work = Work(target, FakeSpeech(target), tmp_path / "data", 5, said.append)
    config = small_config(prompts=[JsonlPrompts(path)], held_out=1, near_duplicate=1.0)
    first, again = gather(config, work), gather(config, work)
    assert first.training == again.training and first.held_out == again.held_out and len(first.training) == 5


@pytest.mark.parametrize("count", [None, 6])
def test_ledger_adds_up_through_mix_and_dedupe(tmp_path, count):
    draw = random.Random(1)
    base = [" ".join(sentence(draw, 12)) for _ in range(30)]
    a = write(tmp_path / "a.jsonl", [{"prompt": text} for text in base[:20]] + [{"prompt": base[0].upper()}])
    b = write(tmp_path / "b.jsonl", [{"prompt": text} for text in base[20:]] + [{"prompt": base[3] + " more"}, {"text": 1}])
    sources = [JsonlPrompts(a, weight=1.0), JsonlPrompts(b, weight=0.5)]
    config = small_config(prompts=sources, held_out=2, dedupe="near", count=count)
    target = FakeTarget()
    said: list[str] = []
    store = prepare(config, target, tmp_path / "data", taps=None, draft_vocab=16, ask=FakeSpeech(target), say=said.append)
    rows = store.manifest.rows
    assert rows["in"] == 33 == rows["kept"] + sum(rows["dropped"].values())
    assert rows["dropped"]["near-duplicate"] == 1 == rows["dropped"]["duplicate"] and rows["dropped"][NOT_NEEDED] >= 1
    found = Counter(json.loads(line)["source"] for line in (tmp_path / "data" / "prompts.jsonl").read_text().splitlines())
    assert 0 <= found["a"] - 2 * found["b"] <= 1 and (count is None or found.total() == count)
    plain = replace(config, prompts=[replace(source, weight=None) for source in sources], count=None)
    prepare(plain, target, tmp_path / "plain", taps=None, draft_vocab=16, ask=FakeSpeech(target), say=said.append)
    held = [(tmp_path / name / "held_out.jsonl").read_text() for name in ("data", "plain")]
    assert held[0] == held[1]  # the mix does not move the held-out set
