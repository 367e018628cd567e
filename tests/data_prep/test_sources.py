"""Prompts from files and from the target itself."""

import json

import pytest
from fake_target import FakeSpeech

from data_prep.config import PrepareConfig
from data_prep.ledger import Ledger
from data_prep.sources import JsonlPrompts, SelfPrompts
from drafttrain.errors import UserError


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
        {"prompt": "no messages"},
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
            "a message whose content is not text": 1,
            "a message without a role": 1,
            "an empty user turn": 1,
            "no list of messages": 1,
            "no user turn": 1,
            "not JSON": 1,
            "not UTF-8": 1,
        },
    }
    assert f"{path} line 2: not JSON; left out" in said and f"{path} line 3: no user turn; left out" in said
    assert {"row": f"{path} line 5", "reason": "no list of messages"} in ledger.rows


def test_chat_is_cut_after_its_first_user_turn_and_that_is_said(tmp_path, work, ledger, said):
    system = {"role": "system", "content": "be brief"}
    answer = {"role": "assistant", "content": "yes"}
    path = write(
        tmp_path / "p.jsonl",
        [
            {"messages": [system, user("a"), answer, user("b")]},
            {"messages": [answer, user("c")]},
            {"messages": [user("d"), answer]},
        ],
    )
    found = JsonlPrompts(path).collect(work, ledger)
    assert [p.messages for p in found] == [[system, user("a")], [user("c")], [user("d")]]
    assert [p.user for p in found] == ["a", "c", "d"]
    assert sorted(ledger.notes.values()) == [1, 1]
    assert any("1 chats cut after their first user turn" in line for line in said)


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
    from dataclasses import replace

    source = SelfPrompts(count=12, max_tokens=30)
    whole = source.collect(work, Ledger())
    broken = replace(work, folder=tmp_path / "other", ask=FakeSpeech(target, stop_after=1))
    with pytest.raises(RuntimeError):
        source.collect(broken, Ledger())
    assert source.collect(replace(broken, ask=FakeSpeech(target)), Ledger()) == whole


def test_prompts_longer_than_the_window_are_refused(work, ledger):
    with pytest.raises(UserError, match="the target reads at most 256"):
        SelfPrompts(count=2, max_tokens=256).collect(work, ledger)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SelfPrompts(count=0), "SelfPrompts.count is 0; it must be at least 1"),
        (lambda: SelfPrompts(count=1, temperature=0.0), "SelfPrompts.temperature is 0.0; it must be above 0"),
        (lambda: SelfPrompts(count=1, name="a/b"), "'a/b'; it must be made of letters"),
        (lambda: JsonlPrompts("x.jsonl", count=0), "JsonlPrompts.count is 0"),
        (lambda: PrepareConfig(prompts=[]), "prepare.prompts is"),
        (lambda: PrepareConfig([SelfPrompts(1), SelfPrompts(2)]), "two sources of one name"),
        (lambda: PrepareConfig([SelfPrompts(1)], held_out_source="gsm8k"), "held_out_source is gsm8k, but the sources are self"),
        (lambda: PrepareConfig([SelfPrompts(1)], held_out=0), "prepare.held_out is 0"),
        (lambda: PrepareConfig([SelfPrompts(1)], near_duplicate=0.0), "prepare.near_duplicate is 0.0"),
        (lambda: PrepareConfig([SelfPrompts(1)], top_p=1.5), "prepare.top_p is 1.5"),
        (lambda: PrepareConfig([SelfPrompts(1)], temperature=-1.0), "prepare.temperature is -1.0"),
        (lambda: PrepareConfig([SelfPrompts(1)], chunk=0), "prepare.chunk is 0"),
    ],
)
def test_nonsense_is_refused(make, sentence):
    with pytest.raises(UserError) as error:
        make()
    assert sentence in str(error.value)
