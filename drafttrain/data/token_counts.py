"""Counts of a token store, and how a draft vocabulary that is chosen by them serves questions that are not in it (see vocab.py)."""

import re
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from drafttrain import vocab
from drafttrain.data.shards import Chat
from drafttrain.data.store import TokenStore

LEFT_OUT = 4096
"""Most questions that are left out, one by one: their mean is then known to a few tenths of a percent, in about a second."""
SAME_QUESTION = re.compile(r"(#(\d+|greedy)|@turn\d+)+$")
"""Endings of the keys of further answers to a question, and of later turns of a text: they hold the same rare words."""


def count(store: TokenStore, among_V: Tensor | None = None, visit: Callable[[int, Chat], None] | None = None) -> vocab.Counts:
    """Counts of the whole store, with up to `LEFT_OUT` of its questions left out, evenly spaced.

    `among_V` [V, bool] are the only tokens that can be chosen. `visit` is called with every chat and its index, so that who wants to see
    them all need not read them again. Raises UserError of a store without chats.
    """
    store.require_chats()
    chosen = _left_out(store.keys)
    texts: dict[str, list[Chat]] = defaultdict(list)
    for index in chosen if visit is None else range(len(store)):
        chat = store.chat(index)
        if visit is not None:
            visit(index, chat)
        if index in chosen:
            texts[chosen[index]].append(chat)
    joined = ((torch.cat([c.ids for c in chats]), torch.cat([c.supervised for c in chats])) for chats in texts.values())
    return vocab.count(*store.counts(), joined, among_V)


def _left_out(keys: list[str]) -> dict[int, str]:
    """Index -> question, of the chats that are left out."""
    questions = [SAME_QUESTION.sub("", key) for key in keys]
    different = list(dict.fromkeys(questions))
    step = -(-len(different) // LEFT_OUT)
    wanted = set(different[::step])
    return {index: question for index, question in enumerate(questions) if question in wanted}
