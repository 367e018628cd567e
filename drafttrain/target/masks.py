"""Which tokens of a rendered chat the target would have generated, found from its own template.

Nothing here knows a role marker. For the answer at message i three renderings are compared, as characters:

    prompt  messages[:i] with the generation prompt        what the target reads when it answers
    turn    messages[:i+1] without                         its answer, as the template shows it when it is the newest
    whole   all messages without                           what is trained on

An answer counts if `whole` begins with `prompt` and goes on just as `turn` does: then every one of its tokens stands behind exactly
what the target had read. What the template writes before an answer and the target did not say (a forced `<think>`, an empty think
block) is in the prompt, or is told apart by rendering the turn again with marks in place of its words; `turns.py` says how, and where an
answer ends.

A template may rewrite history: drop earlier reasoning, or all of it. An answer that was so changed is not what the target said, or
does not stand behind what it had read. It is left unsupervised and named in the notes; a chat in which no answer is left is refused.

Where the template marks its answers itself with `{% generation %}`, those marks are kept, but only as far as they hold what the
target can have said, and the end of turn is added to them.
"""

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from drafttrain.errors import UserError
from drafttrain.target.offsets import Tokens, pieces, tokenise
from drafttrain.target.renderings import Lost, Renderings
from drafttrain.target.template import MARK, ChatTemplate
from drafttrain.target.turns import Span, find_span

BLOCKS, RENDERINGS = "generation blocks", "renderings"
"""The two methods."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
        renderings = Renderings(chat, messages, tools, whole)
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


def _spans(
    renderings: Renderings, wanted: list[int], turns: list[int], reasoning: bool
) -> tuple[list[Span], list[tuple[str, str]]]:
    """The answers that can be supervised, and (which, why not) for the others."""
    spans, lost = [], []
    for index in wanted:
        try:
            spans.append(find_span(renderings, index, reasoning))
        except Lost as why:
            lost.append((f"answer {turns.index(index) + 1} of {len(turns)}", str(why)))
    return spans, lost


def _assemble(
    chat: ChatTemplate,
    renderings: Renderings,
    spans: list[Span],
    lost: list[tuple[str, str]],
    marks: list[bool] | None,
) -> Supervised:
    """From characters to tokens: a token is supervised if its first character is."""
    whole = renderings.whole
    tokens = tokenise(chat, whole)
    notes = [f"{which} is not supervised: {why}" for which, why in lost] + [note for span in spans for note in span.notes]
    in_span: list[Span | None] = [_span_at(spans, start) for start in tokens.starts]
    notes += _boundary_notes(chat, spans, in_span, tokens)
    if _writes_the_date(chat, renderings):
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
    return Supervised(tokens.ids, mask, method, list(dict.fromkeys(notes)), pieces(whole, tokens))


def _boundary_notes(chat: ChatTemplate, spans: list[Span], in_span: list[Span | None], tokens: Tokens) -> list[str]:
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


def _span_at(spans: list[Span], character: int) -> Span | None:
    return next((span for span in spans if span.start <= character < span.end), None)


def _narrowed(in_span: list[Span | None], marks: list[bool], tokens: Tokens) -> list[bool]:
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


def _writes_the_date(chat: ChatTemplate, renderings: Renderings) -> bool:
    """Whether another date would give another text."""
    template = chat.tokenizer.chat_template
    if "strftime_now" not in _template(chat) or not isinstance(template, str):
        return "strftime_now" in _template(chat)
    tokenizer = copy(chat.tokenizer)
    tokenizer.chat_template = f"{{%- macro strftime_now(format) -%}}{MARK}{{%- endmacro -%}}{template}"
    other = ChatTemplate(tokenizer, chat.arguments, chat.path)
    return MARK in other.text(renderings.messages, generation_prompt=False, tools=renderings.tools)


def _template(chat: ChatTemplate) -> str:
    """The text of the template; of all of them where the tokenizer has several."""
    template = chat.tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _refusal(chat: ChatTemplate, lost: list[tuple[str, str]]) -> str:
    reasons = "; ".join(f"{which}: {why}" for which, why in lost)
    return f"with the chat template of {chat.path} no answer of the chat can be supervised ({reasons}). {MENDING}."
