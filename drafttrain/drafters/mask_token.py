"""The token that stands for "not known yet" in block drafters: a row of the target's embedding that no text ever uses.

First choice is a padding row, behind the tokenizer's last token. Where the table has none, a reserved special token: one that is neither an end of
turn nor bos, pad or unk, and that the chat template does not write. Training counts it in the chats, and refuses one that occurs.
"""

from drafttrain.errors import UserError
from drafttrain.target.target import Target

TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "u"},
]
"""A chat that a template may not like: then its generation prompt alone is looked at."""


def mask_token(target: Target, asked: int | None = None) -> int:
    """The token asked for, or the one chosen for this target. UserError where it cannot serve, or where there is none."""
    tokenizer = target.tokenizer
    if tokenizer is None:  # an outline of a target, from its sizes alone: nothing is embedded
        return asked or 0
    used = _used(target)
    if asked is not None:
        if not 0 <= asked < target.vocab:
            raise UserError(
                f"drafter.init_args.mask_token is {asked}, but the target's embedding has rows 0 to {target.vocab - 1}."
            )
        if asked in used:
            raise UserError(
                f"drafter.init_args.mask_token is {asked}, which the target's chats use; give a row that no text uses, or null to have one chosen."
            )
        return asked
    known = len(tokenizer)
    if known < target.vocab:
        return known
    reserved = [token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special and token not in used]
    if not reserved:
        raise UserError(
            "this target has neither a padding row behind its last token nor a reserved special token, so nothing can stand for a masked one; "
            "set drafter.init_args.mask_token to a token that its texts never use."
        )
    return max(reserved)


def _used(target: Target) -> set[int]:
    """Special tokens that texts and templates of this target do use."""
    tokenizer = target.tokenizer
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    used = {*target.end_ids, *(token for token in named if token is not None)}
    for chat in (TALK, TALK[1:], TALK[1:2]):
        try:
            return used | set(target.render(chat))
        except Exception:  # a template may refuse a chat in any way it likes
            continue
    return used
