"""Which tokens of a rendered chat the target would have generated, found from its own template.

Nothing here knows a role marker. For the answer at message i three renderings are compared, as characters:

    prompt  messages[:i] with the generation prompt        what the target reads when it answers
    turn    messages[:i+1] without                         its answer, as the template shows it when it is the newest
    whole   all messages without                           what is trained on

An answer counts if `whole` begins with `prompt` and goes on just as `turn` does: then every one of its tokens stands behind exactly
what the target had read. What the template writes before an answer and the target did not say (a forced `<think>`, an empty think
block) is in the prompt, or is told apart by rendering the turn again with marks in place of its words. Its end is the first special
token that the template writes after the words; what follows that one is the template's.

A template may rewrite history: drop earlier reasoning, or all of it. An answer that was so changed is not what the target said, or
does not stand behind what it had read. It is left unsupervised and named in the notes; a chat in which no answer is left is refused.

Where the template marks its answers itself with `{% generation %}`, those marks are kept, but only as far as they hold what the
target can have said, and the end of turn is added to them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile

from drafttrain.errors import UserError
from drafttrain.target.template import MARK, ChatTemplate

BLOCKS, RENDERINGS = "generation blocks", "renderings"
"""The two methods."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
ATTEMPTS = 3
"""Renderings of one chat must agree; one that writes the time of day can change between two of them."""
MENDING = (
    "Have the target answer these prompts itself (python -m data_prep --config RECIPE keeps what it read and said), or set "
    "template_arguments or --template so that the chat is rendered as the target reads it"
)


@dataclass(frozen=True)
class Supervised:
    """A rendered chat of T tokens."""

    ids: list[int]
    """Token ids of the chat without a generation prompt at its end [T]."""
    mask: list[bool]
    """True where the target would have generated the token [T]."""
    method: str
    """`generation blocks` where the template marks its answers itself, else `renderings`."""
    notes: list[str]
    """What a reader of the mask should know: answers left out and why, tokens on a boundary, a missing end of turn."""
    pieces: list[str] = field(default_factory=list)
    """The text of each token [T]; joined they are the rendered chat. A character of several tokens stands in the first of them."""


class _Lost(Exception):
    """Why an answer cannot be supervised; a clause for people."""


@dataclass(frozen=True)
class _Span:
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
class _Tokens:
    """The tokenised text: token t covers the characters starts[t]:ends[t]."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def supervise(
    chat: ChatTemplate,
    messages: Sequence[dict],
    tools: list[dict] | None = None,
    *,
    last_turn_only: bool = False,
    reasoning: bool = True,
) -> Supervised:
    """Ids of a chat, and which of them the target would have generated: its answers and the token that ends each of them.

    With `last_turn_only` only the last answer counts. Without `reasoning` thoughts do not, up to and including their closing tag.

    Raises:
        UserError: there is no answer, the template refuses the chat, no answer stands as the target said it, or the
            tokenizer cannot say which characters a token covers.
    """
    messages = list(messages)
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise UserError(
            "a chat has no assistant turn, so nothing in it is the target's; give it a message with role 'assistant'."
        )
    for _ in range(ATTEMPTS):
        whole = chat.text(messages, generation_prompt=False, tools=tools)
        renderings = _Renderings(chat, messages, tools, whole)
        wanted = turns[-1:] if last_turn_only else turns
        spans, lost = _spans(renderings, wanted, turns, reasoning)
        marks = _block_marks(chat, messages, tools)
        if chat.text(messages, generation_prompt=False, tools=tools) == whole:
            break
    else:
        raise UserError(
            f"the chat template of {chat.path} renders one chat differently each time (does it write the time?), so nothing can "
            "be compared; give the time in target.template_arguments, or use a template without it."
        )
    if not spans:
        raise UserError(_refusal(chat, lost))
    return _assemble(chat, renderings, spans, lost, marks)


# --- one answer ---------------------------------------------------------------------------------------------------------------


class _Renderings:
    """What the template makes of a chat, of its beginnings, and of its turns with marks in place of their words."""

    def __init__(self, chat: ChatTemplate, messages: list[dict], tools: list[dict] | None, whole: str):
        self.chat, self.messages, self.tools, self.whole = chat, messages, tools, whole
        self.mark = MARK
        while self.mark in whole:
            self.mark += MARK

    def prompt(self, index: int) -> str:
        """What the target reads when it answers at message `index`."""
        if index == 0:
            raise _Lost("the chat begins with it, and nothing stands before it that the target could have read")
        return self._text(self.messages[:index], generation_prompt=True)

    def before(self, index: int) -> str:
        """The same without the generation prompt."""
        return self._text(self.messages[:index])

    def turn(self, index: int) -> str:
        """The chat up to and with message `index`."""
        return self.whole if index + 1 == len(self.messages) else self._text(self.messages[: index + 1])

    def around(self, index: int, message: dict) -> tuple[str, str] | None:
        """What stands before and after the mark if `message` stands at `index`; None if the template does not show it."""
        try:
            text = self._text([*self.messages[:index], message])
        except _Lost:
            return None
        before, mark, after = text.rpartition(self.mark)
        return (before, after) if mark else None

    def _text(self, messages: list[dict], generation_prompt: bool = False) -> str:
        try:
            return self.chat.text(messages, generation_prompt, tools=self.tools)
        except UserError as error:
            raise _Lost(f"the chat up to it cannot be rendered: {str(error).rstrip('.')}") from None


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
        return self.head > 0 or any(self.message.get(name) for name in THOUGHT_FIELDS)


def _spans(
    renderings: _Renderings, wanted: list[int], turns: list[int], reasoning: bool
) -> tuple[list[_Span], list[tuple[str, str]]]:
    """The answers that can be supervised, and (which, why not) for the others."""
    spans, lost = [], []
    for index in wanted:
        try:
            spans.append(_span(renderings, index, reasoning))
        except _Lost as why:
            lost.append((f"answer {turns.index(index) + 1} of {len(turns)}", str(why)))
    return spans, lost


def _span(renderings: _Renderings, index: int, reasoning: bool) -> _Span:
    """The answer at message `index` in the whole chat. Raises _Lost."""
    turn = _read_turn(renderings, index)
    _require_shown(renderings, index, turn)
    start = len(turn.prompt)
    skipped = _injected(renderings, index, turn) or _header(renderings, index, turn)
    words, closing = turn.text[start : turn.words_end], turn.text[turn.words_end : turn.end]
    # A template may write an empty think block into the newest turn alone; the answer may stand behind it or without it.
    forms = [(skipped, words), (0, words[skipped:])]
    skip, text = next((form for form in forms if renderings.whole.startswith(form[1], start)), (0, None))
    if text is None:
        raise _Lost(
            "it is rendered differently once the chat goes on (its reasoning is dropped, say), so it is not what was said"
        )
    first, words_end = start + skip, start + len(text)
    if not closing:  # some templates close a turn only where another one follows
        eos = renderings.chat.tokenizer.eos_token or ""
        closing = eos if renderings.whole.startswith(eos, words_end) else ""
    if not reasoning and turn.thinks:
        first = max(first, _thought_end(renderings, index, turn))
    ends = bool(closing) and renderings.whole.startswith(closing, words_end)
    notes = []
    if not closing:
        notes.append("the template writes no end-of-turn token after an answer, so none is supervised")
    elif not ends:
        notes.append("an answer that is not the last is not followed by the end-of-turn token that the target says")
    if turn.content not in text and turn.content.strip() in text:
        notes.append("the template strips white space around an answer; what is left of it is supervised")
    if not ends and first >= words_end:
        raise _Lost("it is empty, and no end of turn is rendered after it")
    return _Span(turn.prompt, first, words_end, words_end + len(closing) * ends, tuple(notes))


def _read_turn(renderings: _Renderings, index: int) -> _Turn:
    """Renderings of an answer. Raises _Lost where the chat does not begin with what the target read."""
    message = renderings.messages[index]
    prompt, text = renderings.prompt(index), renderings.turn(index)
    for rendered in (text, renderings.whole):
        if not rendered.startswith(prompt):
            raise _Lost(_not_behind_its_prompt(renderings, index, prompt, rendered))
    content = _content(message)
    plain = renderings.around(index, {"role": "assistant", "content": _like(message, renderings.mark)})
    words_end, end = _end_of_turn(renderings.chat, text, len(prompt), plain[1] if plain else None)
    return _Turn(message, content, _thought_head(content, prompt), prompt, text, words_end, end, plain)


def _not_behind_its_prompt(renderings: _Renderings, index: int, prompt: str, rendered: str) -> str:
    before = renderings.before(index)
    if rendered.startswith(before) and prompt.startswith(before):
        return (
            f"the target answers behind {_end_of(prompt, before)!r}, but the chat is rendered without that, so the answer does not "
            "stand behind what the target had read"
        )
    return "what stands before it is rendered differently once the chat goes on, so it does not stand behind what the target had read"


def _end_of(prompt: str, before: str) -> str:
    return prompt[len(before) :][-40:]


def _end_of_turn(chat: ChatTemplate, text: str, start: int, tail: str | None) -> tuple[int, int]:
    """(where the words end, where the end-of-turn token ends) in a rendering that ends with an answer.

    `tail` is what the template writes after the words of a plain answer; an answer with tool calls may be closed otherwise, and
    then its last special token is taken.
    """
    if tail is not None and text.endswith(tail) and len(text) - len(tail) >= start:
        words_end = len(text) - len(tail)
        special = _special_tokens(chat, tail)
        return words_end, words_end + special[0][1] if special else words_end
    special = _special_tokens(chat, text[start:])
    if not special:
        return len(text), len(text)
    return start + special[-1][0], start + special[-1][1]


def _special_tokens(chat: ChatTemplate, text: str) -> list[tuple[int, int]]:
    """Characters of the special tokens in a text; of any added tokens where none is special."""
    if not text:
        return []
    added = chat.tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special} | set(chat.tokenizer.all_special_ids)
    tokens = _tokenise(chat, text)
    for kind in (special, set(added)):
        found = [(tokens.starts[t], tokens.ends[t]) for t, number in enumerate(tokens.ids) if number in kind]
        if found:
            return found
    return []


def _require_shown(renderings: _Renderings, index: int, turn: _Turn) -> None:
    """Raises _Lost unless the newest turn shows all that its message holds, white space aside."""
    shown = _squash(turn.text[: turn.words_end])
    words = _squash(turn.content)
    # With tool calls the content stands before them; without, the answer ends with it.
    if not (
        words in _squash(turn.text[len(turn.prompt) : turn.words_end])
        if turn.message.get("tool_calls")
        else shown.endswith(words)
    ):
        raise _Lost("the template does not show its content as it is (reasoning dropped, or words changed)")
    if any(turn.message.get(name) for name in THOUGHT_FIELDS):
        around = renderings.around(index, _with_thought(turn.message, renderings.mark))
        if around is None:
            raise _Lost("the template drops its reasoning, behind which the target had said it")


def _injected(renderings: _Renderings, index: int, turn: _Turn) -> int:
    """Characters after the prompt that are an empty think block which the template writes into an answer without thoughts."""
    if turn.thinks:
        return 0
    start = len(turn.prompt)
    if turn.plain is not None and turn.plain[0].startswith(turn.prompt) and turn.text.startswith(turn.plain[0]):
        gap = turn.plain[0][start:]
        return len(gap) if EMPTY_THOUGHT.search(gap) or _is_empty_thought(renderings, index, turn, gap) else 0
    found = None if turn.content else EMPTY_THOUGHT.match(turn.text[start : turn.words_end])
    return found.end() if found else 0


def _is_empty_thought(renderings: _Renderings, index: int, turn: _Turn, gap: str) -> bool:
    """Whether a thought, if there were one, would stand inside `gap`: then without one the gap is an empty thought."""
    if not gap.strip():
        return False
    message = {"role": "assistant", "content": _like(turn.message, "words")}
    around = renderings.around(index, _with_thought(message, renderings.mark))
    if around is None or not around[0].startswith(turn.prompt):
        return False
    return _squash(around[0][len(turn.prompt) :] + around[1]).startswith(_squash(gap) + "words")


def _header(renderings: _Renderings, index: int, turn: _Turn) -> int:
    """Characters of a role header after the prompt, in a template that has no generation prompt. White space alone is no header."""
    if turn.plain is None or renderings.before(index) != turn.prompt:
        return 0
    start = len(turn.prompt)
    pairs = zip(turn.text[start:], turn.plain[0][start:], strict=False)
    common = "".join(here for here, there in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return len(common) if common.strip() else 0


def _thought_end(renderings: _Renderings, index: int, turn: _Turn) -> int:
    """Where the reasoning of an answer ends, its closing tag included. Raises _Lost where that cannot be told."""
    if turn.head == len(turn.content) and turn.head:
        raise _Lost("all of it is reasoning")
    message = {**turn.message, "content": _like(turn.message, turn.content[: turn.head] + renderings.mark)}
    around = renderings.around(index, message)
    before = around[0].rstrip() if around else None
    if before is None or not turn.text.startswith(before):
        raise _Lost("its reasoning cannot be told from its words")
    return len(before)


def _thought_head(content: str, prompt: str) -> int:
    """Leading characters of a content that are a thought: up to its last closing tag; all of it if the tag never comes."""
    for opening, closing in THOUGHT_TAGS:
        opened = content.lstrip().startswith(opening)
        if opened or (prompt.rstrip().endswith(opening) and closing in content):
            at = content.rfind(closing)
            return len(content) if at < 0 else at + len(closing)
    return 0


def _content(message: dict) -> str:
    """The words of a message; those of its text parts where it has parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _like(message: dict, words: str) -> str | list[dict]:
    """Content with these words, in the form of the message's own."""
    return [{"type": "text", "text": words}] if isinstance(message.get("content"), list) else words


def _with_thought(message: dict, thought: str) -> dict:
    fields = [name for name in THOUGHT_FIELDS if message.get(name)] or ["reasoning_content"]
    return {**message, **dict.fromkeys(fields, thought)}


def _squash(text: str) -> str:
    return "".join(text.split())


# --- the whole chat -----------------------------------------------------------------------------------------------------------


def _assemble(
    chat: ChatTemplate,
    renderings: _Renderings,
    spans: list[_Span],
    lost: list[tuple[str, str]],
    marks: list[bool] | None,
) -> Supervised:
    """From characters to tokens: a token is supervised if its first character is."""
    whole = renderings.whole
    tokens = _tokenise(chat, whole)
    notes = [f"{which} is not supervised: {why}" for which, why in lost] + [note for span in spans for note in span.notes]
    in_span: list[_Span | None] = [_span_at(spans, start) for start in tokens.starts]
    notes += _boundary_notes(chat, spans, in_span, tokens)
    if "strftime_now" in _template(chat):
        notes.append("the template writes today's date: on another day the chat has other tokens")
    method = RENDERINGS
    mask = [span is not None for span in in_span]
    if marks is not None and any(own and marked for own, marked in zip(mask, marks, strict=True)):
        method = BLOCKS
        mask = _narrowed(in_span, marks, tokens)
    elif marks is not None:
        notes.append("the template's {% generation %} blocks mark nothing that the target said; renderings were compared instead")
    if not any(mask):
        raise UserError(
            f"no token of a chat begins inside an answer of {chat.path}: its tokenizer joins them with what stands before; {MENDING}."
        )
    return Supervised(tokens.ids, mask, method, list(dict.fromkeys(notes)), _pieces(whole, tokens))


def _boundary_notes(chat: ChatTemplate, spans: list[_Span], in_span: list[_Span | None], tokens: _Tokens) -> list[str]:
    """Where the tokens of the chat cannot be those that the target read and said, because tokenizers join what lies side by side."""
    notes = []
    straddling = sum(
        any(tokens.starts[t] < span.start < tokens.ends[t] for span in spans)
        or ((span := in_span[t]) is not None and tokens.ends[t] > span.end)
        for t in range(len(tokens.ids))
    )
    if straddling:
        notes.append(f"{straddling} tokens lie on the boundary of an answer; such a token is supervised if it begins inside")
    prompts = [chat.encode(span.prompt) for span in spans]
    changed = sum(tokens.ids[: len(prompt)] != prompt for prompt in prompts)
    if changed:
        notes.append(
            f"{changed} answers change the tokens before them: the prompt alone is tokenised differently at the boundary"
        )
    return notes


def _span_at(spans: list[_Span], character: int) -> _Span | None:
    return next((span for span in spans if span.start <= character < span.end), None)


def _narrowed(in_span: list[_Span | None], marks: list[bool], tokens: _Tokens) -> list[bool]:
    """What the template marks inside the answers, and an end of turn right behind a mark (or behind no words at all)."""
    mask: list[bool] = []
    for t, span in enumerate(in_span):
        closes = span is not None and tokens.starts[t] >= span.words_end
        empty = span is not None and span.start == span.words_end
        mask.append(span is not None and (marks[t] or (closes and (empty or bool(mask and mask[-1])))))
    return mask


def _block_marks(chat: ChatTemplate, messages: list[dict], tools: list[dict] | None) -> list[bool] | None:
    """The template's own marks, per token; None if it has none. Tokens that a block touches are marked."""
    if not GENERATION.search(_template(chat)):
        return None
    encoded = chat.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **chat.arguments
    )
    return [bool(mark) for mark in encoded["assistant_masks"]]


def _template(chat: ChatTemplate) -> str:
    """The text of the template; of all of them where the tokenizer has several."""
    template = chat.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _tokenise(chat: ChatTemplate, text: str) -> _Tokens:
    """Tokens and the characters each covers. Raises UserError where the tokenizer cannot tell."""
    try:
        encoded = chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError:
        raise UserError(
            f"the tokenizer of {chat.path} does not say which characters a token covers, and answers cannot be told apart without; "
            "use a model with a tokenizer.json (a fast tokenizer)."
        ) from None
    offsets = encoded["offset_mapping"]
    ends = list(accumulate((end for _, end in offsets), max))
    # Some tokenizers leave the space before a word out of its offsets: a token begins where the one before it ended.
    starts = [min(start, end) for (start, _), end in zip(offsets, [0, *ends], strict=False)]
    return _Tokens(list(encoded["input_ids"]), starts, ends)


def _pieces(text: str, tokens: _Tokens) -> list[str]:
    """The text cut behind each token; the parts joined are the text."""
    cuts = [0, *tokens.ends]
    if tokens.ids:
        cuts[-1] = len(text)
    return [text[start:end] for start, end in pairwise(cuts)]


def _refusal(chat: ChatTemplate, lost: list[tuple[str, str]]) -> str:
    reasons = "; ".join(f"{which}: {why}" for which, why in lost)
    return f"with the chat template of {chat.path} no answer of the chat can be supervised ({reasons}). {MENDING}."
