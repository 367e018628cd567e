"""Prompts from lines of JSON that may still be written: a file, a pipe, or a terminal.

    {"messages": [{"role": "user", "content": "..."}, ...]}    or    {"prompt": "..."};    with "id" and "tools" if wanted

A line that is no prompt is said with its number and left out; blank lines are nothing. A last line needs no line break.
"""

import json
import os
import select
from collections import deque
from collections.abc import Callable
from typing import Any

from data_prep.dialects import Broken, role_of, text_of, tools_of
from data_prep.rows import EXAMPLE, LONGEST_LINE
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.tasks.stop import StopSignal
from drafttrain.types import Request

LOOK_S = 0.2
"""How often a wait looks for a stop signal."""
BLOCK = 1 << 16
"""Bytes read at once."""


class Lines:
    """Lines of a file descriptor as they come."""

    def __init__(self, handle: int, stop: StopSignal):
        self.handle, self.stop = handle, stop
        self._whole: deque[bytes | None] = deque()
        """None: longer than anybody types, and thrown away."""
        self._part = b""
        self._too_long = self._ended = False

    def next(self, wait: bool) -> tuple[bytes | None] | None:
        """The next line; None behind the last one, where a stop is wanted, or, unless told to wait, where none has come whole."""
        while not self.stop.requested:
            if self._whole:
                return (self._whole.popleft(),)
            if self._ended:
                return None
            ready, _, _ = select.select([self.handle], [], [], LOOK_S if wait else 0)
            if ready:
                self._read()
            elif not wait:
                return None
        return None

    def _read(self) -> None:
        read = os.read(self.handle, BLOCK)
        *whole, self._part = (self._part + read).split(b"\n")
        if not read:
            self._ended = True
            whole, self._part = ([self._part] if self._part else []), b""
        for line in whole:
            self._whole.append(None if self._too_long else line)
            self._too_long = False
        if len(self._part) > LONGEST_LINE:
            self._part, self._too_long = b"", True


class PromptStream:
    """Requests to the target, one for each good line."""

    def __init__(self, lines: Lines, target: Target, limit: int, drafts: int, say: Callable[[str], None]):
        """`limit`: most tokens of an answer. `drafts`: of a round, for which the target must have room too. UserError if no prompt could be answered."""
        self.lines, self.target, self.limit, self.say = lines, target, limit, say
        self._room = target.max_positions - limit - drafts - 1
        if self._room < 1:
            raise UserError(
                f"adapt.max_tokens is {limit}, which leaves no room for a prompt within the target's {target.max_positions:,} positions; lower it "
                f"to {target.max_positions - drafts - 2:,} at most."
            )
        self._number = 0
        self.left_out = 0
        """Lines that were no prompts."""

    def take(self, most: int) -> list[Request]:
        """The next prompts: waits for one, then takes those that have come, up to `most`. [] at the end or where a stop is wanted."""
        found: list[Request] = []
        while len(found) < most and (line := self.lines.next(wait=not found)) is not None:
            self._number += 1
            try:
                found += self._requests(*line)
            except (Broken, UserError) as error:
                self.left_out += 1
                self.say(f"line {self._number} of the prompts is left out: {str(error).rstrip('.')}.")
        return found

    def _requests(self, line: bytes | None) -> list[Request]:
        """The prompt of a line, or none of a blank one. Raises Broken, or UserError where the target's template refuses it."""
        if line is None:
            raise Broken(f"it is longer than {LONGEST_LINE >> 20} MiB")
        if not line.strip():
            return []
        try:
            row = json.loads(line.decode("utf-8-sig" if self._number == 1 else "utf-8"))  # some editors begin a file with a mark
        except (ValueError, RecursionError):
            raise Broken(f"it is not JSON; it must look like {EXAMPLE}") from None
        messages, key, tools = _chat(row), _key(row, self._number), tools_of(row.get("tools"))
        ids = tuple(self.target.render(messages, tools))
        if len(ids) > self._room:
            raise Broken(
                f"its {len(ids):,} tokens leave no room for {self.limit} more within the target's {self.target.max_positions:,} positions; shorten "
                "it, or lower adapt.max_tokens"
            )
        return [Request(key, ids, self.limit)]


def _chat(row: Any) -> list[dict]:
    """What the template reads, answers of earlier turns included. Raises Broken."""
    if not isinstance(row, dict):
        raise Broken(f"it is no object with keys; it must look like {EXAMPLE}")
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is None and prompt is not None:
        return [{"role": "user", "content": text_of(prompt, "prompt")}]
    if not isinstance(messages, list) or not messages:
        raise Broken(f"it has neither messages nor a prompt; it must look like {EXAMPLE}")
    chat = [
        {"role": role_of(message), "content": text_of(message.get("content"), f"{role_of(message)} message")}
        for message in messages
    ]
    if chat[-1]["role"] not in ("user", "tool"):
        raise Broken(f"its last message is the {chat[-1]['role']}'s, so there is nothing to answer")
    return chat


def _key(row: dict, number: int) -> str:
    """The prompt's own id, else the number of its line. Raises Broken."""
    own = row.get("id", number)
    if isinstance(own, bool) or not isinstance(own, str | int):
        raise Broken("its id is neither text nor a whole number")
    return text_of(str(own), "id")
