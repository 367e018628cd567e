"""Answers as text, with the tokens that the drafter had guessed set apart from those that the target had to say itself."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.types import Rollout

PROMPT_CHARACTERS = 300


@dataclass(frozen=True)
class Piece:
    """Part of an answer."""

    text: str
    drafted: bool
    """True if the drafter guessed it and the target agreed."""


@dataclass(frozen=True)
class Sample:
    """An answer to be shown."""

    key: str
    prompt: str
    """The end of the prompt, on one line."""
    answer: str
    """HTML."""


def sample(tokenizer, rollout: Rollout) -> Sample:
    """The rollout as text. The prompt is decoded without special tokens and shortened from its front."""
    prompt = " ".join(tokenizer.decode(rollout.ids[: rollout.prompt_len].tolist(), skip_special_tokens=True).split())
    shown = prompt if len(prompt) <= PROMPT_CHARACTERS else "…" + prompt[-PROMPT_CHARACTERS:]
    return Sample(rollout.key, html.escape(shown), marked(pieces(tokenizer, rollout)))


def token_origins(rollout: Rollout) -> list[bool]:
    """For every answer token, whether it was an accepted draft: first the prefill's token, then r drafts and one more a round."""
    origins = [False]
    for accepted in rollout.accepted:
        origins += [True] * accepted + [False]
    return origins[: len(rollout.answer)]


def pieces(tokenizer, rollout: Rollout) -> list[Piece]:
    """The answer cut where drafted and undrafted tokens meet; the texts joined are the decoded answer.

    A character whose bytes lie on both sides of a cut goes to the piece that completes it.
    """
    answer, origins = rollout.answer.tolist(), token_origins(rollout)
    found: list[Piece] = []
    done = 0
    for end in range(1, len(answer) + 1):
        if end < len(answer) and origins[end] == origins[end - 1]:
            continue
        whole = tokenizer.decode(answer[:end])
        if end < len(answer):
            whole = whole.rstrip("\ufffd")
        if len(whole) > done:
            found.append(Piece(whole[done:], origins[end - 1]))
            done = len(whole)
    return found


def marked(parts: Sequence[Piece]) -> str:
    """HTML that Markdown viewers show as it is: accepted drafts are bold and underlined."""
    return "".join(f"<ins><b>{html.escape(p.text)}</b></ins>" if p.drafted else html.escape(p.text) for p in parts)
