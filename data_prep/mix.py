"""Shares of the sources among the training prompts.

With weights w_s and n_s prompts at hand, the largest mix of these shares has N = floor(min_s n_s / (w_s / sum w)) prompts. Whole
numbers of prompts are given by the method of largest remainders (Hamilton), so each source is less than one prompt from its
share. Which prompts of a source stay depends on the seed and their keys only.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import floor

from data_prep.ledger import Ledger
from data_prep.prompt import Prompt
from drafttrain.errors import UserError

NOT_NEEDED = "not needed for the mix"


def mix(
    prompts: Sequence[Prompt],
    weights: Mapping[str, float] | None,
    count: int | None,
    seed: int,
    ledger: Ledger,
    say: Callable[[str], None],
) -> list[Prompt]:
    """Prompts that stay, in the given order: as many as the weights allow, `count` at most. UserError if that is none.

    Without weights the sources are one heap: `count` prompts stay of it.
    """
    if weights is None and count is None:
        return list(prompts)
    group = (lambda prompt: prompt.source) if weights else (lambda prompt: "")
    at_hand = Counter(group(prompt) for prompt in prompts)
    wanted = quotas(at_hand, weights or {"": 1.0}, count)
    total = sum(wanted.values())
    if count is not None and total < count:
        say(f"the mix has {total:,} prompts, although prepare.count asks for {count:,}: the sources give no more")
    stays: set[str] = set()
    for name, quota in wanted.items():
        own = (prompt.key for prompt in prompts if group(prompt) == name)
        stays.update(heapq.nsmallest(quota, own, key=lambda key: hashlib.sha256(f"mix:{seed}:{key}".encode()).digest()))
    for prompt in prompts:
        if prompt.key not in stays:
            ledger.drop(NOT_NEEDED, prompt.key)
    if weights:
        say("the mix: " + ", ".join(f"{quota:,} of {at_hand[name]:,} from {name}" for name, quota in wanted.items()))
    return [prompt for prompt in prompts if prompt.key in stays]


def quotas(at_hand: Mapping[str, int], weights: Mapping[str, float], count: int | None) -> dict[str, int]:
    """How many prompts each source gives. UserError if a source has too few for even one prompt of the mix."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}  # as typed: 0.1 is a tenth
    shares = {name: weight / sum(exact.values()) for name, weight in exact.items()}
    scarcest = min(shares, key=lambda name: Fraction(at_hand.get(name, 0)) / shares[name])
    total = floor(at_hand.get(scarcest, 0) / shares[scarcest])
    total = total if count is None else min(total, count)
    if total < 1:
        raise UserError(
            f"The prompt source {scarcest} has {at_hand.get(scarcest, 0)} prompts left for training, too few for its weight of "
            f"{weights[scarcest]}; lower the weight, or remove the source."
        )
    found = {name: floor(share * total) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (found[name] - shares[name] * total, name))
    for name in by_remainder[: total - sum(found.values())]:
        found[name] += 1
    return found
