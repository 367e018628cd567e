"""One answer: which characters of the rendered chat the target said.

    prompt | what the template wrote | words | end of turn | what the template writes between turns

The answer begins behind the prompt, and behind an empty thought or a role header that the template wrote there. Its words end where the
template goes on in the same way whatever they are. The end of turn is the first token behind them that ends the target's answers
(`ChatTemplate.end_ids`), as far as the template writes it between turns too; where none of those stands there, the first special one.
A template may close no turn at all: then the first token of the next turn ends it, if it is one of those that the target says (GLM-4.5
says `<|user|>`).
"""

import re
from dataclasses import dataclass
from itertools import takewhile

from drafttrain.target.offsets import special_tokens
from drafttrain.target.renderings import Lost, Renderings, content_of, has_thought, like, squash, with_thought
from drafttrain.target.template import ChatTemplate

EMPTY_THOUGHT = re.compile(r"\s*([<\[])([^<>\[\]/\s]+)[>\]]\s*\1/\2[>\]]\s*")
"""A tag of any name that is closed at once, and the white space around."""
THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
)
"""How reasoning is told from the answer where both stand in one content."""
SHOWN = 60
"""Characters of a prompt's end in a sentence."""


@dataclass(frozen=True)
class Span:
    """An answer in the rendered chat, in characters."""

    prompt: str
    """What the target read when it answered; the chat begins with it."""
    start: int
    """Of what it said: the end of the prompt, or behind what the template wrote after that."""
    words_end: int
    """Where the end of turn begins."""
    end: int
    """Behind the end of turn; equal to `words_end` where there is none."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Turn:
    """One answer, in the rendering where it is the newest."""

    message: dict
    content: str
    head: int
    """Leading characters of the content that are a thought."""
    prompt: str
    text: str
    words_end: int
    end: int
    plain: tuple[str, str] | None
    """What stands around the words of an answer without thoughts and tool calls, at this place."""

    @property
    def thinks(self) -> bool:
        return self.head > 0 or has_thought(self.message)


def find_span(renderings: Renderings, index: int, reasoning: bool) -> Span:
    """The answer at message `index` in the whole chat; without `reasoning`, behind its thoughts. Raises Lost."""
    turn = _read_turn(renderings, index)
    _require_shown(renderings, index, turn)
    start = len(turn.prompt)
    skipped = _injected(renderings, index, turn) or _header(renderings, index, turn)
    words = turn.text[start : turn.words_end]
    # A template may write an empty think block into the newest turn alone; the answer may stand behind it or without it.
    forms = [(skipped, words), (0, words[skipped:])]
    skip, text = next((form for form in forms if renderings.whole.startswith(form[1], start)), (0, None))
    if text is None:
        raise Lost("it is rendered differently once the chat goes on (its reasoning is dropped, say), so it is not what was said")
    first, words_end = start + skip, start + len(text)
    if not reasoning and turn.thinks:
        first = max(first, _thought_end(renderings, index, turn))
    closing = turn.text[turn.words_end : turn.end]
    end, notes = _closed(renderings, words_end, closing)
    if turn.content not in text and turn.content.strip() in text:
        notes.append("the template strips white space around an answer; what is left of it is supervised")
    if end == words_end and first >= words_end:
        raise Lost("it is empty, and no end of turn is rendered after it")
    return Span(turn.prompt, first, words_end, end, tuple(notes))


# --- where it begins ----------------------------------------------------------------------------------------------------------


def _read_turn(renderings: Renderings, index: int) -> _Turn:
    """Renderings of an answer. Raises Lost where the chat does not begin with what the target read."""
    message = renderings.messages[index]
    prompt, text = renderings.prompt(index), renderings.turn(index)
    content = content_of(message)
    head = _thought_head(content, prompt)
    for rendered in (text, renderings.whole):
        if not rendered.startswith(prompt):
            raise Lost(_not_behind_its_prompt(renderings, index, prompt, rendered))
    plain_message = {"role": "assistant", "content": like(message, renderings.mark)}
    plain = renderings.around(index, plain_message)
    going_on = renderings.around(index, plain_message, generation_prompt=True)
    tails = None if plain is None else (plain[1], plain[1] if going_on is None else going_on[1])
    words_end, end = _end_of_turn(renderings.chat, text, len(prompt), tails)
    return _Turn(message, content, head, prompt, text, words_end, end, plain)


def _not_behind_its_prompt(renderings: Renderings, index: int, prompt: str, rendered: str) -> str:
    before = renderings.before(index)
    if not (rendered.startswith(before) and prompt.startswith(before)):
        return "what stands before it is rendered differently once the chat goes on, so it does not stand behind what the target had read"
    forced = prompt[len(before) :][-SHOWN:]
    opened = next((opening for opening, _ in THOUGHT_TAGS if forced.rstrip().endswith(opening)), None)
    if opened is None:
        return (
            f"the target answers behind {forced!r}, but the chat is rendered without that, so the answer does not stand behind what "
            "the target had read"
        )
    return f"the target answers behind {forced!r}, so it begins with reasoning, and the chat is rendered without: " + (
        "the template drops it" if _brings_thought(renderings.messages[index], opened) else "the answer has none"
    )


def _brings_thought(message: dict, opening: str) -> bool:
    closings = [closing for tag, closing in THOUGHT_TAGS if tag == opening]
    return has_thought(message) or any(closing in content_of(message) for closing in closings)


def _require_shown(renderings: Renderings, index: int, turn: _Turn) -> None:
    """Raises Lost unless the newest turn shows all that its message holds, white space aside."""
    calls = turn.message.get("tool_calls") or []
    words = squash(turn.content)
    # With tool calls the content stands somewhere beside them; without, the answer ends with it.
    if not (
        words in squash(turn.text[len(turn.prompt) : turn.words_end])
        if calls
        else squash(turn.text[: turn.words_end]).endswith(words)
    ):
        raise Lost("the template does not show its content as it is (reasoning dropped, or words changed)")
    if has_thought(turn.message) and renderings.around(index, with_thought(turn.message, renderings.mark)) is None:
        raise Lost("the template drops its reasoning, behind which the target had said it")
    if not all(renderings.shows_call(index, number) for number in range(len(calls))):
        raise Lost("the template does not show all of its tool calls")


def _injected(renderings: Renderings, index: int, turn: _Turn) -> int:
    """Characters after the prompt that are an empty think block which the template writes into an answer without thoughts.

    Raises Lost where the answer has thoughts of its own behind that block.
    """
    start = len(turn.prompt)
    if turn.plain is not None and turn.plain[0].startswith(turn.prompt) and turn.text.startswith(turn.plain[0]):
        gap = turn.plain[0][start:]
        if not (EMPTY_THOUGHT.search(gap) or _is_empty_thought(renderings, index, turn, gap)):
            return 0
        if turn.thinks and squash(turn.content).startswith(squash(gap)):  # it said so itself
            return 0
        if turn.thinks:
            raise Lost(f"the template writes {squash(gap)!r} before its own reasoning, which belongs into reasoning_content")
        return len(gap)
    found = None if turn.content or turn.thinks else EMPTY_THOUGHT.match(turn.text[start : turn.words_end])
    return found.end() if found else 0


def _is_empty_thought(renderings: Renderings, index: int, turn: _Turn, gap: str) -> bool:
    """Whether a thought, if there were one, would stand inside `gap`: then without one the gap is an empty thought."""
    if not gap.strip():
        return False
    message = {"role": "assistant", "content": like(turn.message, "words")}
    around = renderings.around(index, with_thought(message, renderings.mark))
    if around is None or not around[0].startswith(turn.prompt):
        return False
    return squash(around[0][len(turn.prompt) :] + around[1]).startswith(squash(gap) + "words")


def _header(renderings: Renderings, index: int, turn: _Turn) -> int:
    """Characters of a role header after the prompt, in a template that has no generation prompt. White space alone is no header."""
    if turn.plain is None or renderings.before(index) != turn.prompt:
        return 0
    start = len(turn.prompt)
    pairs = zip(turn.text[start:], turn.plain[0][start:], strict=False)
    common = "".join(here for here, there in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return len(common) if common.strip() else 0


def _thought_end(renderings: Renderings, index: int, turn: _Turn) -> int:
    """Where the reasoning of an answer ends, its closing tag included. Raises Lost where that cannot be told."""
    if turn.head == len(turn.content) and turn.head:
        raise Lost("all of it is reasoning")
    message = {**turn.message, "content": like(turn.message, turn.content[: turn.head] + renderings.mark)}
    around = renderings.around(index, message)
    before = around[0].rstrip() if around else None
    if before is None or not turn.text.startswith(before):
        raise Lost("its reasoning cannot be told from its words")
    return len(before)


def _thought_head(content: str, prompt: str) -> int:
    """Leading characters of a content that are a thought: up to its last closing tag; all of it if the tag never comes."""
    for opening, closing in THOUGHT_TAGS:
        opened = content.lstrip().startswith(opening)
        if opened or (prompt.rstrip().endswith(opening) and closing in content):
            at = content.rfind(closing)
            return len(content) if at < 0 else at + len(closing)
    return 0


# --- where it ends ------------------------------------------------------------------------------------------------------------


def _end_of_turn(chat: ChatTemplate, text: str, start: int, tails: tuple[str, str] | None) -> tuple[int, int]:
    """(where the words end, where the end-of-turn token ends) in a rendering that ends with an answer.

    `tails` are what the template writes after the words of a plain answer, at the end of a chat and where the chat goes on; an answer
    with tool calls may be closed otherwise, and then its last special token is taken.
    """
    if tails is not None and text.endswith(tails[0]) and len(text) - len(tails[0]) >= start:
        words_end = len(text) - len(tails[0])
        special = special_tokens(chat, tails[0])
        between = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*tails, strict=False)))
        said = [token for token in special if token.id in chat.end_ids and token.end <= between]
        return words_end, words_end + (said or special)[0].end if special else words_end
    special = special_tokens(chat, text[start:])
    if not special:
        return len(text), len(text)
    return start + special[-1].start, start + special[-1].end


def _closed(renderings: Renderings, words_end: int, closing: str) -> tuple[int, list[str]]:
    """(end of the end of turn in the whole chat, notes)."""
    whole, chat = renderings.whole, renderings.chat
    if closing and whole.startswith(closing, words_end):
        return words_end + len(closing), []
    # What stands there instead may be another end that the target says: the next turn's first token, for one.
    following = special_tokens(chat, whole[words_end:])
    if following and following[0].start == 0 and following[0].id in chat.end_ids:
        return words_end + following[0].end, []
    if closing:
        return words_end, ["an answer that is not the last is not followed by the end-of-turn token that the target says"]
    return words_end, ["the template writes no end-of-turn token after an answer, so none is supervised"]
