"""The held-out set: chosen by prompt, before anything is answered, and nothing close to it stays in training.

Which prompts are held out depends on the seed and each prompt's key only, so further prompts change it little. Near-duplicates
are found exactly, by word shingles and Jaccard similarity |a & b| / |a | b|, through an index from shingle to held-out prompts:
a training prompt is only compared with those that it shares a shingle with.
"""

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

from data_prep.prompt import Prompt
from data_prep.text import shingles
from drafttrain.errors import UserError


def hold_out(
    prompts: Sequence[Prompt], count: int, seed: int, source: str | None, dropped: str = ""
) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out), each in the given order. UserError if the split would leave no prompt for training.

    `dropped` says for people what was dropped before.
    """
    eligible = [prompt for prompt in prompts if source in (None, prompt.source)]
    if len(eligible) < count or len(prompts) <= count:
        of = f" of source {source}" if source else ""
        raise UserError(
            f"prepare.held_out is {count}, but there are {len(eligible)} usable prompts{of} ({len(prompts)} in all"
            f"{f'; dropped before: {dropped}' if dropped else ''}) and some must be left to train on; lower it or ask for more prompts."
        )
    chosen = {prompt.key for prompt in heapq.nsmallest(count, eligible, key=lambda prompt: _order(prompt.key, seed))}
    return [p for p in prompts if p.key not in chosen], [p for p in prompts if p.key in chosen]


def near_duplicates(training: Sequence[Prompt], held_out: Sequence[Prompt], threshold: float) -> dict[str, str]:
    """Key of each training prompt that is at least this similar to a held-out one -> key of that one.

    A held-out chat is compared as a whole and by its first turn, which is what is measured; a training chat by each of its turns too.
    """
    held = [(prompt.key, shingles(text)) for prompt in held_out for text in {prompt.turns[0], prompt.user}]
    index: dict[tuple, list[int]] = defaultdict(list)
    for number, (_, each) in enumerate(held):
        for shingle in each:
            index[shingle].append(number)
    found = {}
    for prompt in training:
        for text in dict.fromkeys((prompt.user, *prompt.turns)):
            if prompt.key not in found and (close := _closest(shingles(text), held, index, threshold)) is not None:
                found[prompt.key] = close
    return found


def _closest(
    own: frozenset, held: Sequence[tuple[str, frozenset]], index: dict[tuple, list[int]], threshold: float
) -> str | None:
    shared = Counter(number for shingle in own if shingle in index for number in index[shingle])
    for number, common in shared.items():
        key, other = held[number]
        if common >= threshold * (len(own) + len(other) - common):
            return key
    return None


def _order(key: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()
