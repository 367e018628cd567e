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


def hold_out(prompts: Sequence[Prompt], count: int, seed: int, source: str | None) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out), each in the given order. UserError if the split would leave no prompt for training."""
    eligible = [prompt for prompt in prompts if source in (None, prompt.source)]
    if len(eligible) < count or len(prompts) <= count:
        of = f" of source {source}" if source else ""
        raise UserError(
            f"prepare.held_out is {count}, but there are {len(eligible)} usable prompts{of} ({len(prompts)} in all) and some "
            "must be left to train on; lower it or ask for more prompts."
        )
    chosen = {prompt.key for prompt in heapq.nsmallest(count, eligible, key=lambda prompt: _order(prompt.key, seed))}
    return [p for p in prompts if p.key not in chosen], [p for p in prompts if p.key in chosen]


def near_duplicates(training: Sequence[Prompt], held_out: Sequence[Prompt], threshold: float) -> dict[str, str]:
    """Key of each training prompt whose user turn is at least this similar to a held-out one -> key of that one."""
    held = [shingles(prompt.user) for prompt in held_out]
    index: dict[tuple, list[int]] = defaultdict(list)
    for number, each in enumerate(held):
        for shingle in each:
            index[shingle].append(number)
    found = {}
    for prompt in training:
        own = shingles(prompt.user)
        shared = Counter(number for shingle in own if shingle in index for number in index[shingle])
        for number, common in shared.items():
            if common >= threshold * (len(own) + len(held[number]) - common):
                found[prompt.key] = held_out[number].key
                break
    return found


def _order(key: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()
