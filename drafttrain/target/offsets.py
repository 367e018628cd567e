"""Characters and tokens: which characters of a text each token covers, and which of its tokens are special.

Shapes: T tokens.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from drafttrain.errors import UserError
from drafttrain.target.template import ChatTemplate


@dataclass(frozen=True)
class Tokens:
    """A tokenised text: token t covers the characters starts[t]:ends[t]."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


@dataclass(frozen=True)
class Special:
    """A special token and its characters."""

    start: int
    end: int
    id: int


def tokenise(chat: ChatTemplate, text: str) -> Tokens:
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
    return Tokens(list(encoded["input_ids"]), starts, ends)


def special_tokens(chat: ChatTemplate, text: str) -> list[Special]:
    """The special tokens in a text, in order; any added tokens where none is special."""
    if not text:
        return []
    added = chat.tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special} | set(chat.tokenizer.all_special_ids) | chat.end_ids
    tokens = tokenise(chat, text)
    for kind in (special, set(added)):
        found = [Special(tokens.starts[t], tokens.ends[t], number) for t, number in enumerate(tokens.ids) if number in kind]
        if found:
            return found
    return []


def pieces(text: str, tokens: Tokens) -> list[str]:
    """The text cut behind each token [T]; the parts joined are the text."""
    cuts = [0, *tokens.ends]
    if tokens.ids:
        cuts[-1] = len(text)
    return [text[start:end] for start, end in pairwise(cuts)]
