"""Prompts from files and from the target itself."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_target import FakeSpeech

from data_prep import rows as rows_module
from data_prep.config import PrepareConfig
from data_prep.ledger import Ledger
from data_prep.selfprompt import SHOWN_EXAMPLES, Seeds
from data_prep.sources import DatasetPrompts, JsonlPrompts, SelfPrompts, StorePrompts
from drafttrain.errors import UserError
from drafttrain.recipe import load_recipe


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def write(path, rows) -> str:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def test_broken_lines_are_named_and_the_rest_kept(tmp_path, work, ledger, said):
    rows = [
        {"messages": [user("one")]},
        b'{"messages": [',
        {"messages": [{"role": "assistant", "content": "hi"}]},
        b"",
        {"text": "no messages"},
        b'{"messages": "\xff"}',
        {"messages": [user("  ")]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"content": "no role"}]},
        {"id": "own", "messages": [user("two")]},
    ]
    path = write(tmp_path / "some prompts.jsonl", rows)
    found = JsonlPrompts(path).collect(work, ledger)
    assert [(p.key, p.source, p.messages) for p in found] == [
        ("some_prompts-000001", "some_prompts", [user("one")]),
        ("some_prompts-own", "some_prompts", [user("two")]),
    ]
    assert ledger.facts(len(found)) == {
        "in": 9,  # the blank line is no row
        "kept": 2,
        "dropped": {
            "images are not supported": 1,
            "a message without a role": 1,
            "an empty user turn": 1,
            "none of messages, conversations, prompt, turns": 1,
            "no user turn": 1,
            "not JSON": 1,
            "not UTF-8": 1,
        },
    }
    assert f"{path} line 2: not JSON; left out" in said and f"{path} line 3: no user turn; left out" in said
    assert {"row": f"{path} line 8", "reason": "images are not supported"} in ledger.rows
    assert f"{path}: 2 lines of messages" in said


def test_turns_of_a_chat_are_kept_and_what_is_cut_is_said(tmp_path, work, said):
    system = {"role": "system", "content": "be brief"}
    answer = {"role": "assistant", "content": "yes"}
    path = write(
        tmp_path / "p.jsonl",
        [
            {"messages": [system, user("a"), answer, user("b")]},
            {"messages": [answer, user("c")]},
            {"messages": [user("d"), answer, {"role": "tool", "content": "1"}, answer, user("e")]},
        ],
    )
    ledger = Ledger()
    found = JsonlPrompts(path).collect(work, ledger)
    assert [p.messages for p in found] == [[system, user("a"), user("b")], [user("c")], [user("d")]]
    assert [p.user for p in found] == ["a\nb", "c", "d"]
    assert ledger.notes == {
        "chats lost the answers before their first user turn": 1,
        "chats cut before their first tool result": 1,
    }
    assert f"{path}: 1 chats cut before their first tool result" in said
    ledger = Ledger()
    assert [p.user for p in JsonlPrompts(path, turns=1).collect(work, ledger)] == ["a", "c", "d"]
    assert ledger.notes["chats cut after user turn 1 (turns: 1)"] == 1


def test_dialects_may_differ_from_line_to_line_and_are_counted(tmp_path, work, ledger, said):
    rows = [{"prompt": "a"}, {"messages": [user("b")]}, {"prompt": "c"}, {"turns": ["d", "e"]}]
    path = write(tmp_path / "p.jsonl", [*rows, {"conversations": [{"from": "human", "value": "f"}]}])
    assert [p.user for p in JsonlPrompts(path).collect(work, ledger)] == ["a", "b", "c", "d\ne", "f"]
    assert said == [f"{path}: 2 lines of prompt, 1 lines of messages, 1 lines of turns, 1 lines of conversations"]


def test_lines_that_no_prompt_needs_are_not_read_into_memory(tmp_path, work, ledger, said, monkeypatch):
    monkeypatch.setattr(rows_module, "LONGEST_LINE", 1 << 20)
    rows = [
        {"prompt": "one"},
        {"prompt": "x" * (1 << 20)},
        b"y" * (5 << 20),
        {"prompt": "four"},
        b"z" * (3 << 20),
    ]
    path = write(tmp_path / "p.jsonl", rows)
    assert [p.key for p in JsonlPrompts(path).collect(work, ledger)] == ["p-000001", "p-000004"]
    assert ledger.dropped == {"longer than 1 MiB": 3} and f"{path} line 5: longer than 1 MiB; left out" in said


def test_odd_bytes_are_named_by_line(tmp_path, work, ledger):
    rows = [b"\xef\xbb\xbf" + json.dumps({"prompt": "first\u2028still first"}).encode(), b'{"prompt": "a\0b"}', b"[" * 100_000]
    path = write(
        tmp_path / "p.jsonl", [*rows, b'{"prompt": "' + "wörter".encode("latin-1") + b'"}', b"\xff\xfe{\0", {"prompt": "ok"}]
    )
    assert [p.user for p in JsonlPrompts(path).collect(work, ledger)] == ["first\u2028still first", "ok"]
    assert ledger.dropped == {"a NUL byte": 1, "nested too deeply": 1, "not UTF-8": 2}


def test_many_broken_lines_are_named_in_the_file_only(tmp_path, work, ledger, said):
    path = write(tmp_path / "p.jsonl", [*[b"broken"] * 13, {"prompt": "ok"}])
    JsonlPrompts(path).collect(work, ledger)
    assert len(said) == 12 and f"{path}: 3 more such lines, all named in dropped.jsonl" in said and len(ledger.rows) == 13


def test_gzipped_files_are_read_and_damaged_ones_refused(tmp_path, work, ledger):
    data = gzip.compress(b'{"prompt": "one"}\n{"prompt": "two"}\n' * 500)
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(data)
    found = JsonlPrompts(str(path), count=2).collect(work, ledger)
    assert [p.key for p in found] == ["some-000001", "some-000002"]
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"JsonlPrompts.path is .*gz, a gzipped file that is cut short or damaged \(.*ended"):
        JsonlPrompts(str(path)).collect(work, ledger)
    path.write_bytes(data[:10] + b"nonsense")
    with pytest.raises(UserError, match="cut short or damaged"):
        JsonlPrompts(str(path)).collect(work, ledger)


def test_count_takes_the_first_usable_rows_and_reads_no_further(tmp_path, work, ledger, said):
    path = write(tmp_path / "p.jsonl", [b"broken", *({"messages": [user(str(i))]} for i in range(5))])
    found = JsonlPrompts(path, count=3).collect(work, ledger)
    assert [p.user for p in found] == ["0", "1", "2"] and ledger.read == 4
    JsonlPrompts(path, count=9).collect(work, Ledger())
    assert any("5 prompts, although the recipe asks for 9" in line for line in said)


def test_unusable_files_are_refused(tmp_path, work, ledger):
    with pytest.raises(UserError, match=r"nowhere.jsonl, which cannot be read"):
        JsonlPrompts(str(tmp_path / "nowhere.jsonl")).collect(work, ledger)
    path = write(tmp_path / "p.jsonl", [b"x", b"y"])
    with pytest.raises(UserError, match=r"no usable prompt among its 2 rows \(2 not JSON\); each line must look like"):
        JsonlPrompts(path).collect(work, ledger)
    with pytest.raises(UserError, match="which cannot be read .Is a directory."):
        JsonlPrompts(str(tmp_path)).collect(work, ledger)
    with pytest.raises(UserError, match=r"among its 0 rows \(it is empty\)"):
        JsonlPrompts(write(tmp_path / "empty.jsonl", [])).collect(work, Ledger())


def test_self_prompts_are_kept_until_there_are_enough(work, ledger):
    target = work.target
    words = target.tokenizer.encode("kaban lodor mifel nugim")
    work.ask.scripted = {
        "self-000000": [*words, 2],
        "self-000001": [*words, 2],  # duplicate
        "self-000002": words * 10,  # never ends
        "self-000003": [words[0], 2],  # one word
        "self-000004": [*words, 3, *words, 2],  # a special token inside
        "self-000005": words * 3 + [2],  # a loop
    }
    found = SelfPrompts(count=6, max_tokens=30).collect(work, ledger)
    assert found[0].key == "self-000000" and found[0].messages == [user("kaban lodor mifel nugim")]
    assert len(found) == 6 and len({p.user for p in found}) == 6
    dropped = dict(ledger.dropped)
    for reason in ("duplicate", "did not end within 30 tokens", "special token inside", "repeats itself"):
        assert dropped[reason] >= 1, reason
    assert dropped["shorter than 3 words"] >= 1
    assert ledger.read == 6 + sum(dropped.values()) and ledger.read % work.chunk == 0
    assert not any(p.user.endswith("<|end|>") for p in found)


def test_self_prompting_gives_up_with_its_yield(work, ledger):
    work.ask.scripted = {f"self-{i:06d}": [5, 2] for i in range(100)}
    with pytest.raises(UserError, match=r"kept 0 of 20 attempts .20 shorter than 3 words., fewer than the 2 asked for"):
        SelfPrompts(count=2, max_tokens=30).collect(work, ledger)


def test_a_closing_of_the_template_ends_a_user_turn_too(work, ledger, monkeypatch):
    """Llama-2 style templates close a user turn with ordinary tokens, which are no end of the assistant's turn."""
    monkeypatch.setattr(type(work.target), "user_prefix", lambda self: ([1], (7,)))
    work.ask.scripted = {f"self-{i:06d}": [10 + i, 20 + i, 30 + i, 7] for i in range(5)}
    found = SelfPrompts(count=5, max_tokens=30).collect(work, ledger)
    assert found[0].user == work.target.tokenizer.decode([10, 20, 30])
    assert work.ask.requests[0].ends == (7,)


def test_sampled_chunks_are_found_again(work, ledger):
    source = SelfPrompts(count=8, max_tokens=30)
    first = source.collect(work, ledger)
    calls = work.ask.calls
    work.ask.stop_after = 0  # speaking again would raise
    assert source.collect(work, Ledger()) == first and work.ask.calls == calls


def test_interrupted_sampling_ends_with_the_same_prompts(work, target, tmp_path, said):
    source = SelfPrompts(count=12, max_tokens=30)
    whole = source.collect(work, Ledger())
    broken = replace(work, folder=tmp_path / "other", ask=FakeSpeech(target, stop_after=1))
    with pytest.raises(RuntimeError):
        source.collect(broken, Ledger())
    assert source.collect(replace(broken, ask=FakeSpeech(target)), Ledger()) == whole


def asked_for(work, folder, count: int, **options) -> tuple[list, dict, list[str], dict]:
    """(prompts, ledger, keys that the target was asked for, files) of a few self-prompts; again until nothing stops it."""
    source, asked = SelfPrompts(count=count, max_tokens=30), []
    while True:
        speech, ledger = FakeSpeech(work.target, **options), Ledger()
        try:
            found = source.collect(replace(work, folder=folder, ask=speech), ledger)
        except RuntimeError:
            continue
        finally:
            asked += [request.key for request in speech.requests]
        files = {path.name: path.read_bytes() for path in (folder / "attempts").iterdir()}
        return found, ledger.facts(len(found)), asked, files


def test_no_more_attempts_than_prompts_are_made_at_once(work, tmp_path):
    """They are the first ones of those that a whole chunk would have given, and judged alike."""
    work = replace(work, chunk=8)
    whole, *_ = asked_for(work, tmp_path / "whole", 8)
    for count in (1, 2, 3, 5):
        found, facts, asked, files = asked_for(work, tmp_path / str(count), count)
        assert found == whole[:count] and facts["in"] == len(asked) == count + sum(facts["dropped"].values())
        assert len(asked) < int(found[-1].key[-6:]) + 1 + count  # the last piece at most was too much
        assert sorted(asked) == [f"self-{number:06d}" for number in range(len(asked))]
        stopped, again, _, left = asked_for(work, tmp_path / f"stopped-{count}", count, stop_after=1)
        assert (stopped, again, left) == (found, facts, files)


def test_a_chunk_that_is_longer_than_needed_gives_the_same(work, tmp_path):
    """As an earlier version made it, or a larger count before the prompts were decided."""
    found, facts, asked, _ = asked_for(work, tmp_path / "small", 2)
    asked_for(work, tmp_path / "large", 5)
    assert asked_for(work, tmp_path / "large", 2)[:3] == (found, facts, []) and len(asked) < 5
    asked_for(work, tmp_path / "small", 5)
    assert (tmp_path / "small" / "attempts" / "self-00000.json").read_bytes() == (
        tmp_path / "large" / "attempts" / "self-00000.json"
    ).read_bytes()


def test_prompts_longer_than_the_window_are_refused(work, ledger):
    with pytest.raises(UserError, match="the target reads at most 256"):
        SelfPrompts(count=2, max_tokens=256).collect(work, ledger)


def test_topics_take_turns_and_the_answer_is_the_prompt(work, ledger):
    source = SelfPrompts(count=5, max_tokens=30, topics=["kaban", "lodor"], examples=["mifel nugim rahus"])
    words = work.target.tokenizer.encode("kaban lodor mifel nugim")
    work.ask.scripted = {
        "self-000000": [*words, 2],
        "self-000001": [*work.target.tokenizer.encode("mifel nugim rahus"), 2],  # the example itself
        "self-000002": [],
    }
    found = source.collect(work, ledger)
    assert found[0].messages == [user("kaban lodor mifel nugim")] and len(found) == 5
    assert ledger.dropped["duplicate"] == 1 and ledger.dropped["did not end within 30 tokens"] >= 1
    assert ledger.read == 5 + sum(ledger.dropped.values())
    requests = {request.key: request for request in work.ask.requests}
    asked = [requests[f"self-{number:06d}"].messages[-1]["content"] for number in range(4)]
    assert ["about kaban" in text for text in asked] == [True, False, True, False]
    assert ["about lodor" in text for text in asked] == [False, True, False, True]
    assert all({"role": "assistant", "content": "mifel nugim rahus"} in request.messages for request in requests.values())
    first = requests["self-000000"]
    assert first.ids == tuple(work.target.render(list(first.messages))) and first.ends == ()
    calls = work.ask.calls
    assert source.collect(work, Ledger()) == found and work.ask.calls == calls  # found again, not sampled again


def test_examples_shown_depend_on_the_key_alone():
    seeds = Seeds([], [f"example {letter}" for letter in "abcdefgh"])
    assert seeds.chat(3, "self-000003") == seeds.chat(3, "self-000003") != seeds.chat(4, "self-000004")
    roles = [message["role"] for message in seeds.chat(0, "k")]
    assert roles == ["user", "assistant"] * SHOWN_EXAMPLES + ["user"]
    assert seeds.chat(0, "k")[-1]["content"] == "Write another question like that."
    assert Seeds(["bees"], ["x"]).chat(0, "k")[-1]["content"] == "Write another question like that, about bees."
    assert len(Seeds(["bees"], []).chat(0, "k")) == 1


@pytest.mark.parametrize(
    ("answer", "text", "why"),
    [
        ("Why do bees dance?", "Why do bees dance?", None),
        ('  "Why do bees dance?"\n', "Why do bees dance?", None),
        ('"Bees" is which kind of "word"', '"Bees" is which kind of "word"', None),
        ("Question 3:\nWhy do bees dance?", "Why do bees dance?", None),
        ('The question is: "Why do bees dance?"', "Why do bees dance?", None),
        ("A question about bees: Why do they dance?", "Why do they dance?", None),
        ("1. Why do bees dance?", "Why do bees dance?", None),
        ("1. Why bees?\n2. Why not wasps?", "1. Why bees?\n2. Why not wasps?", None),
        ("Answer my question: why do bees dance?", "Answer my question: why do bees dance?", None),
        ("Sure! Why do bees dance?", "Sure! Why do bees dance?", "announces a question instead of asking it"),
        ("Here is a question about bees: why do they dance?", "why do they dance?", None),
        ("Here are three ideas: bees, wasps, ants", None, "announces a question instead of asking it"),
        ("Here is my text about bees. Improve it.", "Here is my text about bees. Improve it.", None),
        ("<think>they want bees</think>Why do bees dance?", "Why do bees dance?", None),
    ],
)
def test_what_a_model_puts_around_a_question_is_taken_off(work, ledger, monkeypatch, answer, text, why):
    letters = dict(enumerate(answer, 4))
    monkeypatch.setattr(
        work.target.tokenizer, "decode", lambda ids, skip_special_tokens=False: "".join(letters.get(i, "") for i in ids)
    )
    work.ask.scripted = {f"self-{i:06d}": [*letters, 2] for i in range(5)}
    source = SelfPrompts(count=1, max_tokens=100, topics=["bees"], attempts_per_prompt=1)
    if why is None:
        assert source.collect(work, ledger)[0].user == text
    else:
        with pytest.raises(UserError, match=why):
            source.collect(work, ledger)


def test_topics_from_a_file(tmp_path, work, ledger):
    path = tmp_path / "topics.txt"
    path.write_text("kaban\n\n  lodor \n")
    by_file = SelfPrompts(count=5, max_tokens=30, topics_file=str(path))
    found = by_file.collect(work, ledger)
    assert "about lodor." in next(r for r in work.ask.requests if r.key == "self-000001").messages[0]["content"]
    before = by_file.content()
    path.write_text("kaban\nlodor\nmifel\n")
    assert found and by_file.content() != before
    assert by_file.decides() == SelfPrompts(count=5, max_tokens=30, topics_file="elsewhere").decides()
    for name in ("topics", "examples"):  # what leads the target decides what the prompts are
        assert SelfPrompts(1, **{name: ["a"]}).decides() != SelfPrompts(1, **{name: ["b"]}).decides()
    for content, sentence in ((b"\n", "has no topic"), (b"\xff", "not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            by_file.collect(work, Ledger())
    path.unlink()
    for use in (by_file.content, lambda: by_file.collect(work, Ledger())):
        with pytest.raises(UserError, match=r"topics_file is .*topics.txt, which cannot be read"):
            use()


def test_seeds_too_long_for_the_window_are_refused(work, ledger):
    with pytest.raises(UserError, match="or give shorter topics and examples"):
        SelfPrompts(count=2, max_tokens=30, topics=["kaban " * 250]).collect(work, ledger)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SelfPrompts(count=0), "SelfPrompts.count is 0; it must be at least 1"),
        (lambda: SelfPrompts(count=1, temperature=0.0), "SelfPrompts.temperature is 0.0; it must be above 0"),
        (lambda: SelfPrompts(count=1, temperature=float("inf")), "SelfPrompts.temperature is inf"),
        (lambda: SelfPrompts(count=1, name="a/b"), "'a/b'; it must be made of letters"),
        (lambda: SelfPrompts(count=1, name="a" * 61), "'-' and '.', 60 at most"),
        (lambda: JsonlPrompts(" "), "JsonlPrompts.path is ' '; it must be where the prompts are"),
        (lambda: JsonlPrompts("x.jsonl", count=0), "JsonlPrompts.count is 0"),
        (lambda: JsonlPrompts("x.jsonl", turns=0), "JsonlPrompts.turns is 0"),
        (lambda: JsonlPrompts("x.jsonl", weight=0.0), "JsonlPrompts.weight is 0.0; it must be above 0"),
        (lambda: JsonlPrompts("x.jsonl", weight=float("nan")), "JsonlPrompts.weight is nan"),
        (lambda: SelfPrompts(count=1, topics=[" "]), "SelfPrompts.topics is"),
        (lambda: SelfPrompts(count=1, topics=["a"], topics_file="b"), "both topics and topics_file"),
        (lambda: DatasetPrompts("x", columns={"question": "prompt"}), "DatasetPrompts.columns is"),
        (lambda: DatasetPrompts("x", columns={"prompt": 3}), "DatasetPrompts.columns is"),
        (lambda: StorePrompts("x", count=0), "StorePrompts.count is 0"),
        (lambda: PrepareConfig([SelfPrompts(1, weight=1.0), JsonlPrompts("x.jsonl")]), "gives self a weight, but x none"),
        (lambda: PrepareConfig([SelfPrompts(1)], count=0), "prepare.count is 0"),
        (lambda: PrepareConfig([SelfPrompts(1)], dedupe="fuzzy"), "prepare.dedupe is fuzzy; it must be exact or near"),
        (lambda: PrepareConfig(prompts=[]), "prepare.prompts is"),
        (lambda: PrepareConfig([SelfPrompts(1), SelfPrompts(2)]), "two sources of one name"),
        (lambda: PrepareConfig([SelfPrompts(1)], held_out_source="gsm8k"), "held_out_source is gsm8k, but the sources are self"),
        (lambda: PrepareConfig([SelfPrompts(1)], held_out=0), "prepare.held_out is 0"),
        (lambda: PrepareConfig([SelfPrompts(1)], near_duplicate=0.0), "prepare.near_duplicate is 0.0"),
        (lambda: PrepareConfig([SelfPrompts(1)], top_p=1.5), "prepare.top_p is 1.5"),
        (lambda: PrepareConfig([SelfPrompts(1)], temperature=-1.0), "prepare.temperature is -1.0"),
        (lambda: PrepareConfig([SelfPrompts(1)], temperature=float("inf")), "prepare.temperature is inf"),
        (lambda: PrepareConfig([SelfPrompts(1)], samples=10**12), "prepare.samples is 1000000000000; it must be 1 to 10,000"),
        (lambda: PrepareConfig([SelfPrompts(1)], chunk=0), "prepare.chunk is 0"),
    ],
)
def test_nonsense_is_refused(make, sentence):
    with pytest.raises(UserError) as error:
        make()
    assert sentence in str(error.value)


def test_a_recipe_can_name_and_mix_all_of_them(tmp_path):
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(
        """
prepare:
  count: 1000
  dedupe: near
  prompts:
    - {class_path: SelfPrompts, init_args: {count: 9, topics: [bees, "1984"], weight: 1}}
    - {class_path: JsonlPrompts, init_args: {path: chats.jsonl.gz, turns: 3, weight: 2.5}}
    - {class_path: StorePrompts, init_args: {path: runs/other/data/train, weight: 0.5}}
    - class_path: DatasetPrompts
      init_args: {path: owner/name, config_name: default, revision: main, columns: {prompt: question}, weight: 1}
"""
    )
    base = Path(__file__).parents[2] / "recipes" / "smollm2-135m" / "eagle3.yaml"
    recipe, notes = load_recipe([base, mixed])
    own, file, store, hub = recipe.prepare.prompts
    assert (
        own.topics == ["bees", "1984"] and file.name == "chats" and hub.columns == {"prompt": "question"} and hub.name == "name"
    )
    assert recipe.prepare.weights == {"self": 1.0, "chats": 2.5, "store": 0.5, "name": 1.0}
    written = tmp_path / "again.yaml"
    written.write_text(json.dumps(recipe.plain()))
    assert load_recipe([written])[0].prepare == recipe.prepare
