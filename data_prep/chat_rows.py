"""Chats of a file with the answers of others, as templates read them: JSONL (plain or gzipped), or one JSON value.

    {"messages": [{"role": ..., "content": ...}]}            also "conversations": [{"from": ..., "value": ...}], as in ShareGPT
    [{"role": ..., "content": ...}]                          the messages alone

and beside them, if wanted, "tools" and "system".
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from data_prep.dialects import LEADING, Broken, content_of, role_of, tools_of
from data_prep.rows import GZIP, json_lines
from drafttrain.errors import UserError

FORMS = '{"messages": [{"role": ..., "content": ...}]} or {"conversations": [{"from": ..., "value": ...}]}'
PROMPTS = "prompt", "turns"
"""Rows of questions alone have these."""
UNANSWERED = (
    "it is a prompt with no assistant turn, so there is no answer to be shown; data_prep has the target answer prompts: run it, and give the "
    "folder runs/NAME/data/train/ that it makes."
)
ALL_BROKEN = 1000
"""Lines without JSON, after which a file is taken for something else."""


def rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1; of the line in JSONL) and content of each row; a Broken in place of a line that is no JSON. UserError."""
    lines = json_lines(str(file), "FILE")
    first = next(lines, None)
    if first is None:
        return
    if isinstance(first[1], list | Broken) and (value := _one_value(file)) is not None:
        yield from enumerate(value, 1) if isinstance(value, list) and not _is_chat(value) else [(1, value)]
        return
    head = [first]
    while isinstance(head[-1][1], Broken) and len(head) < ALL_BROKEN and (following := next(lines, None)) is not None:
        head.append(following)
    if isinstance(head[-1][1], Broken):
        raise UserError(f"{file} is not JSON ({head[-1][1]}); give a JSONL file with rows like {FORMS}.")
    yield from chain(head, lines)


def _one_value(file: Path) -> Any:
    """The content of a file that is one JSON value over all its lines; None for others."""
    with open(file, "rb") as plain:
        packed = plain.read(len(GZIP)) == GZIP
    try:
        return json.loads((gzip.decompress(file.read_bytes()) if packed else file.read_bytes()).decode("utf-8-sig"))
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error):  # its lines are read, and say which
        return None


def _is_chat(value: list) -> bool:
    return bool(value) and all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)


def chat_of(row: Any) -> tuple[list[dict], list[dict] | None]:
    """Messages and tools of a row. Raises UserError if it holds none, or no answer."""
    if isinstance(row, Broken):
        raise UserError(f"it is {row}; leave it out or mend it.")
    tools, system = (row.get("tools"), row.get("system")) if isinstance(row, dict) else (None, None)
    if isinstance(row, dict):
        found = next((row[name] for name in ("messages", "conversations", "conversation") if row.get(name)), None)
        if found is None and any(row.get(name) for name in PROMPTS):
            raise UserError(UNANSWERED)
        row = found
    if not isinstance(row, list) or not _is_chat(row):
        raise UserError(f"it holds no chat; a row looks like {FORMS}.")
    try:
        messages = [_message(message) for message in row]
        if isinstance(system, str) and system and messages[0]["role"] not in LEADING:
            messages.insert(0, {"role": "system", "content": system})
        if all(message["role"] in ("user", *LEADING) for message in messages):
            raise UserError(UNANSWERED)
        return messages, tools_of(tools)
    except Broken as error:
        raise UserError(f"it has {error}; mend it.") from None


def _message(message: dict) -> dict:
    """A message as templates read it, from either form; a `role` is left as it is, for the template to judge. Raises Broken."""
    if "role" not in message:
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": role_of(message), "content": content_of(message), **others}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    """Arguments as an object: OpenAI's interface has them as JSON text, which engines parse before they render a chat."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        raise Broken("a tool call whose arguments are no JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
