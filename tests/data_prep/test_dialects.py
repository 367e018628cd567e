"""Every form that a chat is written in, and every fault of a row, by its reason."""

import json
from collections import Counter

import pytest

from data_prep.dialects import Broken, Reader
from data_prep.prompt import Prompt

SYSTEM, HELLO = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}
ANSWER, NEXT = {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def read(row, turns: int | None = None) -> tuple[Prompt, Reader]:
    reader = Reader("s", turns, Counter(), Counter())
    return reader.prompt(7, row), reader


def share(*pairs) -> list[dict]:
    return [{"from": who, "value": text} for who, text in pairs]


@pytest.mark.parametrize(
    ("row", "dialect", "messages"),
    [
        ({"messages": [HELLO]}, "messages", [HELLO]),
        ({"messages": [SYSTEM, HELLO, ANSWER, NEXT, ANSWER]}, "messages", [SYSTEM, HELLO, NEXT]),
        (
            {"messages": [{"role": "developer", "content": "x"}, HELLO]},
            "messages",
            [{"role": "developer", "content": "x"}, HELLO],
        ),
        (
            {"conversations": share(("system", "be brief"), ("human", "hello there"), ("gpt", "yes"), ("human", "and then"))},
            "conversations",
            [SYSTEM, HELLO, NEXT],
        ),
        ({"conversations": [HELLO, ANSWER]}, "conversations", [HELLO]),
        ({"prompt": "hello there"}, "prompt", [HELLO]),
        ({"prompt": "hello there", "system": "be brief"}, "prompt", [SYSTEM, HELLO]),
        ({"prompt": "hello there", "system": "", "tools": [], "id": None}, "prompt", [HELLO]),
        ({"prompt": [SYSTEM, HELLO]}, "prompt", [SYSTEM, HELLO]),
        ({"turns": ["hello there", "and then"]}, "turns", [HELLO, NEXT]),
        ({"turns": ["hello there"], "messages": None, "prompt": None}, "turns", [HELLO]),
        ({"messages": [HELLO], "prompt": "another", "turns": 3}, "messages", [HELLO]),
        ({"prompt": "hello there", "turns": 1}, "prompt", [HELLO]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]}]},
            "messages",
            [{"role": "user", "content": "hello\nthere"}],
        ),
        ({"messages": [HELLO, {"role": "assistant", "content": None, "tool_calls": []}, NEXT]}, "messages", [HELLO, NEXT]),
    ],
)
def test_forms(row, dialect, messages):
    prompt, reader = read(row)
    assert prompt == Prompt("s-000007", "s", messages) and reader.dialects == {dialect: 1}
    assert not reader.notes


def test_ids_and_tools():
    assert read({"id": 12, "prompt": "x"})[0].key == "s-12"
    for tools in ([TOOL], json.dumps([TOOL])):
        assert read({"id": "a b", "prompt": "x", "tools": tools})[0] == Prompt(
            "s-a b", "s", [{"role": "user", "content": "x"}], [TOOL]
        )


@pytest.mark.parametrize(
    ("chat", "turns", "messages", "note"),
    [
        ([HELLO, ANSWER, {"role": "tool", "content": "21"}, ANSWER, NEXT], None, [HELLO], "cut before their first tool result"),
        ([ANSWER, HELLO], None, [HELLO], "lost the answers before their first user turn"),
        ([ANSWER, SYSTEM, HELLO], None, [SYSTEM, HELLO], "lost the answers before their first user turn"),
        ([HELLO, ANSWER, NEXT], 1, [HELLO], "cut after user turn 1 (turns: 1)"),
        ([HELLO, ANSWER, NEXT, ANSWER, {"role": "user", "content": ""}], 2, [HELLO, NEXT], "cut after user turn 2 (turns: 2)"),
    ],
)
def test_what_is_cut_is_noted(chat, turns, messages, note):
    prompt, reader = read({"messages": chat}, turns)
    assert prompt.messages == messages and reader.notes == {note: 1}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1], "not an object with keys"),
        ("text", "not an object with keys"),
        ({"text": "x"}, "none of messages, conversations, prompt, turns"),
        ({"messages": "x"}, "no list of messages"),
        ({"messages": []}, "no list of messages"),
        ({"conversations": {}}, "no list of conversations"),
        ({"turns": 3}, "no list of turns"),
        ({"turns": ["x", 3]}, "a user turn that is not text"),
        ({"turns": ["x", " "]}, "an empty user turn"),
        ({"prompt": 3}, "a prompt that is not text"),
        ({"prompt": "\n"}, "an empty user turn"),
        ({"messages": [ANSWER]}, "no user turn"),
        ({"messages": [{"role": "tool", "content": "x"}, HELLO]}, "no user turn"),
        ({"messages": ["x"]}, "a message without a role"),
        ({"messages": [{"content": "x"}]}, "a message without a role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": [HELLO, NEXT]}, "two user turns in a row"),
        ({"messages": [HELLO, ANSWER, NEXT, NEXT]}, "two user turns in a row"),
        ({"messages": [HELLO, ANSWER, SYSTEM, NEXT]}, "a system message after the first user turn"),
        ({"messages": [{"role": "system", "content": ""}, HELLO]}, "an empty system text"),
        ({"messages": [SYSTEM, HELLO], "system": "x"}, "a system text beside a chat that has its own"),
        ({"messages": [{"role": "user"}]}, "an empty user turn"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "a user turn that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images are not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "images are not supported, nor is audio",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "a content part that is not text"),
        ({"messages": [{"role": "user", "content": [3]}]}, "a content part that is not text"),
        ({"messages": [{"role": "user", "content": []}]}, "an empty user turn"),
        ({"conversations": share(("human", "<image>\nlook")), "image": "1.png"}, "images are not supported"),
        ({"prompt": "a\0b"}, "a user turn with a NUL character"),
        ({"prompt": "a\ud800b"}, "a user turn with half of a surrogate pair"),
        ({"prompt": "x", "id": 1.5}, "an id that is neither a whole number nor text of 1 to 200 letters"),
        ({"prompt": "x", "id": True}, "an id that is neither a whole number nor text of 1 to 200 letters"),
        ({"prompt": "x", "id": ""}, "an id that is neither a whole number nor text of 1 to 200 letters"),
        ({"prompt": "x", "id": "a\0"}, "an id with a NUL character"),
        ({"prompt": "x", "id": "a@turn2"}, "an id that ends in '@turn' and a number, as the names of later turns do"),
        ({"prompt": "x", "tools": {"name": "f"}}, "tools that are no list of schemas"),
        ({"prompt": "x", "tools": ["f"]}, "tools that are no list of schemas"),
        ({"prompt": "x", "tools": "{"}, "tools that are no list of schemas"),
        ({"prompt": "x", "tools": [{"a": float("nan")}]}, "tools that are no list of schemas"),
        ({"prompt": "x", "tools": [{"a": "\udc00"}]}, "tools with half of a surrogate pair"),
    ],
)
def test_faults(row, reason):
    reader = Reader("s", None, Counter(), Counter())
    with pytest.raises(Broken) as error:
        reader.prompt(1, row)
    assert str(error.value) == reason
    assert not reader.dialects and not reader.notes


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"key": "k"}, "no list of messages"), (3, "no list of messages"), ({"messages": [HELLO]}, "no key")],
)
def test_faults_of_a_data_folders_own_rows(row, reason):
    with pytest.raises(Broken) as error:
        Reader("s", None, Counter(), Counter()).stored(row)
    assert str(error.value) == reason
