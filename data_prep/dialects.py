"""The forms in which chats are written down, and what becomes of each: a prompt, or a reason why it is none.

    messages        {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": text or parts}, ...]}
    conversations   {"conversations": [{"from": "system" | "human" | "gpt", "value": text}, ...]}    as in ShareGPT
    prompt          {"prompt": text}
    turns           {"turns": [text, ...]}    user turns alone, as in Spec-Bench

and beside any of them, if wanted, "system" (text), "tools" (schemas of functions, or JSON text of them) and "id". Answers are not
used: training text is always the target's own. So a chat is kept up to its first tool result, which no answer of the target's led to.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from data_prep.prompt import Prompt

DIALECTS = ("messages", "conversations", "prompt", "turns")
"""In this order: a row that has two of them is read in the first."""
FIELDS = (*DIALECTS, "system", "tools", "id")
PICTURES = ("image", "images", "video", "videos", "audio", "audios")
"""Columns, and beginnings of the type of a content part, that hold what drafttrain does not read."""
LEADING = ("system", "developer")
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
    **{name: name for name in LEADING},
}
TEXTS = {"user": "user turn", **dict.fromkeys(LEADING, "system text")}
"""What is said by whom, in the reasons."""
LATER_TURN = re.compile(r"@turn\d+$")
"""Ending of the key of a row of training text that begins at a later turn (`dialogue.py`)."""
LONGEST_ID = 200


class Broken(Exception):
    """Why a row is no prompt."""


@dataclass(frozen=True)
class Reader:
    """Makes prompts of rows; counts the dialects it met, and what it had to cut."""

    source: str
    turns: int | None
    """Most user turns to keep."""
    dialects: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def prompt(self, number: int, row: Any) -> Prompt:
        """The prompt of row `number`. Raises Broken with the reason if it is none."""
        if not isinstance(row, dict):
            raise Broken("not an object with keys")
        if any(row.get(name) for name in PICTURES):
            raise Broken("images are not supported")
        dialect = next((name for name in DIALECTS if row.get(name) is not None), None)
        if dialect is None:
            raise Broken(f"none of {', '.join(DIALECTS)}")
        key, tools = self._key(number, row.get("id")), tools_of(row.get("tools"))
        found = self._messages(dialect, row[dialect])
        if row.get("system"):
            if found[0]["role"] in LEADING:
                raise Broken("a system text beside a chat that has its own")
            found.insert(0, {"role": "system", "content": text_of(row["system"], TEXTS["system"])})
        self.dialects[dialect] += 1
        return Prompt(key, self.source, found, tools)

    def stored(self, row: Any) -> Prompt:
        """The prompt that a data folder wrote down: its user turns already follow each other."""
        if not (isinstance(row, dict) and isinstance(row.get("messages"), list)):
            raise Broken("no list of messages")
        chat = [(role_of(message), message) for message in row["messages"]]
        if row.get("key") is None:
            raise Broken("no key")
        key, tools = self._key(0, row["key"]), tools_of(row.get("tools"))
        return Prompt(key, self.source, self._kept(chat, alternate=False), tools)

    def _messages(self, dialect: str, value: Any) -> list[dict]:
        if dialect == "prompt" and isinstance(value, str):
            return [{"role": "user", "content": text_of(value, "user turn")}]
        if not isinstance(value, list) or not value:
            raise Broken("a prompt that is not text" if dialect == "prompt" else f"no list of {dialect}")
        if dialect == "turns":
            return self._kept([("user", {"content": each}) for each in value], alternate=False)
        return self._kept([(role_of(message), message) for message in value], alternate=True)

    def _kept(self, chat: list[tuple[str, dict]], alternate: bool) -> list[dict]:
        """Leading system messages and the user turns that the target can answer."""
        found: list[dict] = []
        users, before, notes = 0, "", set()
        for role, message in chat:
            if role == "tool":
                notes.add("cut before their first tool result")
                break
            if role == "user":
                if alternate and before == "user":
                    raise Broken("two user turns in a row")
                if users == self.turns:
                    notes.add(f"cut after user turn {self.turns} (turns: {self.turns})")
                    break
                users += 1
            elif role == "assistant" and not users:
                notes.add("lost the answers before their first user turn")
            elif role in LEADING and users:
                raise Broken("a system message after the first user turn")
            if role != "assistant":
                found.append({"role": role, "content": text_of(content_of(message), TEXTS[role])})
            before = role
        if not users:
            raise Broken("no user turn")
        self.notes.update(notes)
        return found

    def _key(self, number: int, own: Any) -> str:
        if own is None:
            return f"{self.source}-{number:06d}"
        if isinstance(own, bool) or not isinstance(own, str | int) or not 0 < len(str(own)) <= LONGEST_ID:
            raise Broken(f"an id that is neither a whole number nor text of 1 to {LONGEST_ID} letters")
        if LATER_TURN.search(str(own)):
            raise Broken("an id that ends in '@turn' and a number, as the names of later turns do")
        return f"{self.source}-{_sound(str(own), 'an id with')}"


def role_of(message: Any) -> str:
    """Whose message it is, in one spelling. Raises Broken."""
    role = message.get("role") or message.get("from") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise Broken("a message without a role")
    if role.lower() not in ROLES:
        raise Broken(f"unknown role {role[:30]!r}")
    return ROLES[role.lower()]


def content_of(message: dict) -> Any:
    """What it says, in either spelling."""
    content = message.get("content")
    return message.get("value") if content is None else content


def text_of(content: Any, what: str) -> str:
    """The text of a message; parts of text are joined by line breaks. Raises Broken."""
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise Broken(f"a {what} that is not text" if content is not None else f"an empty {what}")
    if not content.strip():
        raise Broken(f"an empty {what}")
    return _sound(content, f"a {what} with")


def tools_of(value: Any) -> list[dict] | None:
    """Schemas of functions, or None for none. Raises Broken."""
    wrong = Broken("tools that are no list of schemas")
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise wrong
        _sound(json.dumps(tools, ensure_ascii=False, allow_nan=False), "tools with")
    except (ValueError, TypeError, RecursionError):
        raise wrong from None
    return tools


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type", "")) if isinstance(part, dict) else ""
    if kind.removeprefix("input_").startswith(PICTURES):
        raise Broken("images are not supported" if "audio" not in kind else "images are not supported, nor is audio")
    if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise Broken("a content part that is not text")
    return part["text"]


def _sound(text: str, what: str) -> str:
    """The text, unless no file can hold it or it would end other programs' strings."""
    if "\0" in text:
        raise Broken(f"{what} a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Broken(f"{what} half of a surrogate pair") from None
    return text
