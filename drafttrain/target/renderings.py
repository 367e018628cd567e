"""What a template makes of a chat, of its beginnings, and of a turn with marks in place of its words.

prompt  messages[:i] with the generation prompt        what the target reads when it answers
turn    messages[:i+1] without                         its answer, as the template shows it when it is the newest
whole   all messages without                           what is trained on
"""

from collections.abc import Sequence

from drafttrain.errors import UserError
from drafttrain.target.template import MARK, ChatTemplate

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALLED = "drafttrain_mark"
"""Stands for what a call says: plain letters, which no template escapes."""


class Lost(Exception):
    """Why an answer cannot be supervised; a clause for people."""


class Renderings:
    """Renderings of one chat, all with the same arguments and tools."""

    def __init__(self, chat: ChatTemplate, messages: Sequence[dict], tools: list[dict] | None, whole: str):
        self.chat, self.messages, self.tools, self.whole = chat, list(messages), tools, whole
        self.mark, self.called = MARK, CALLED
        while self.mark in whole:
            self.mark += MARK
        while self.called in whole:
            self.called += CALLED

    def prompt(self, index: int) -> str:
        """What the target reads when it answers at message `index`. Raises Lost."""
        if index == 0:
            raise Lost("the chat begins with it, and nothing stands before it that the target could have read")
        return self._text(self.messages[:index], generation_prompt=True)

    def before(self, index: int) -> str:
        """The same without the generation prompt. Raises Lost."""
        return self._text(self.messages[:index])

    def turn(self, index: int) -> str:
        """The chat up to and with message `index`. Raises Lost."""
        return self.whole if index + 1 == len(self.messages) else self._text(self.messages[: index + 1])

    def around(self, index: int, message: dict, generation_prompt: bool = False) -> tuple[str, str] | None:
        """What stands before and after the mark if `message` stands at `index`; None if the template does not show it."""
        try:
            text = self._text([*self.messages[:index], message], generation_prompt)
        except Lost:
            return None
        before, mark, after = text.rpartition(self.mark)
        return (before, after) if mark else None

    def shows_call(self, index: int, number: int) -> bool:
        """Whether the template shows call `number` of the message: its function's name, its arguments or its id."""
        message = self.messages[index]
        calls = list(message["tool_calls"])
        call, other = calls[number], {"name": self.called, "arguments": {self.called: self.called}}
        inner = isinstance(call.get("function"), dict)
        calls[number] = {**call, "id": self.called, **({"function": {**call["function"], **other}} if inner else other)}
        try:
            return self.called in self._text([*self.messages[:index], {**message, "tool_calls": calls}])
        except Lost:
            return False

    def _text(self, messages: list[dict], generation_prompt: bool = False) -> str:
        try:
            return self.chat.text(messages, generation_prompt, tools=self.tools)
        except UserError as error:
            raise Lost(f"the chat up to it cannot be rendered: {str(error).rstrip('.')}") from None


def content_of(message: dict) -> str:
    """The words of a message; those of its text parts where it has parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def like(message: dict, words: str) -> str | list[dict]:
    """Content with these words, in the form of the message's own."""
    return [{"type": "text", "text": words}] if isinstance(message.get("content"), list) else words


def with_thought(message: dict, thought: str) -> dict:
    """The message with this thought in the field where it has one (`reasoning_content` where it has none)."""
    fields = [name for name in THOUGHT_FIELDS if message.get(name)] or ["reasoning_content"]
    return {**message, **dict.fromkeys(fields, thought)}


def has_thought(message: dict) -> bool:
    """Whether a field of the message holds reasoning."""
    return any(message.get(name) for name in THOUGHT_FIELDS)


def squash(text: str) -> str:
    """Without white space."""
    return "".join(text.split())
