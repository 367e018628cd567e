"""What each verifier must do, worked out by loops over every draft in Python floats, from the papers' formulas alone.

Each oracle gives the probability of every (accepted drafts, token behind them) as {text: probability}.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable

from decoding.verify_cases import World

from drafttrain.decoding.sampling import Sampling

Text = tuple[int, ...]
Model = Callable[[Text], list[float]]


def processed(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, then the smallest set of most probable tokens that holds top_p."""
    weights = [math.exp(x / sampling.temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    kept, mass = set(), 0.0
    for x in sorted(range(len(p)), key=lambda x: -p[x]):
        if mass < sampling.top_p - 1e-7:
            kept.add(x)
            mass += p[x]
    return [p[x] / mass if x in kept else 0.0 for x in range(len(p))]


def models(world: World, sampling: Sampling) -> tuple[Model, Model]:
    """Target and drafter as functions from a text to the distribution behind it."""

    def number(text: Text) -> int:
        i = 0
        for token in text:
            i = i * world.vocab + token + 1
        return i % len(world.target_IV)

    tables = [[processed(row, sampling) for row in table.double().tolist()] for table in (world.target_IV, world.drafter_IV)]
    return (lambda text: tables[0][number(text)]), (lambda text: tables[1][number(text)])


def positive_part(p: list[float], q: list[float]) -> list[float]:
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [x / sum(left) for x in left] if sum(left) > 1e-12 else p


def without(q: list[float], token: int) -> list[float]:
    rest = 1 - q[token]
    return [0.0 if x == token else v / rest for x, v in enumerate(q)] if rest > 1e-12 else [0.0] * len(q)


def sequences(q: list[float], count: int, replacement: bool):
    """(tokens in the order drawn, probability), shorter where q runs out of tokens."""
    if count == 0 or not any(q):
        yield (), 1.0
        return
    for x, v in enumerate(q):
        if v:
            for rest, chance in sequences(q if replacement else without(q, x), count - 1, replacement):
                yield (x, *rest), v * chance


def tree(
    world: World, sampling: Sampling, branching: tuple[int, ...], replacement: bool, kseq: bool = False
) -> dict[Text, float]:
    """Children of a place are tried in turn; equal ones share their children."""
    p, q = models(world, sampling)

    @functools.cache
    def behind(text: Text, depth: int, count: int) -> dict[Text, float]:
        found: dict[Text, float] = defaultdict(float)
        stop = depth == len(branching) or (world.stopping and text[-1:] == (0,))
        for drafts, reach in sequences(q(text), 0 if stop else count, replacement):
            left = p(text)
            for token, accepted, rest_of_p in (_kseq if kseq else _turns)(p(text), q(text), drafts, replacement):
                if accepted:
                    children = drafts.count(token) * (branching[depth + 1] if depth + 1 < len(branching) else 0)
                    for rest, chance in behind((*text, token), depth + 1, children).items():
                        found[rest] += reach * accepted * chance
                reach, left = reach * (1 - accepted), rest_of_p
            for token, v in enumerate(left):
                found[(*text, token)] += reach * v
        return found

    return behind((), 0, branching[0])


def _turns(p: list[float], q: list[float], drafts: Text, replacement: bool):
    """(draft, probability that it is accepted when its turn comes, what is left of p if it is not)."""
    for token in drafts:
        accepted = min(1.0, p[token] / q[token])
        p = positive_part(p, q)
        q = q if replacement else without(q, token)
        yield token, accepted, p


def _kseq(p: list[float], q: list[float], drafts: Text, replacement: bool):
    low, high, k = 1.0, float(max(len(drafts), 1)), len(drafts)

    def beta(rho: float) -> float:
        return sum(min(b, a / rho) for a, b in zip(p, q, strict=True))

    for _ in range(40):
        rho = (low + high) / 2
        low, high = (low, rho) if 1 - (1 - beta(rho)) ** k <= rho * beta(rho) else (rho, high)
    any_accepted = 1 - (1 - beta(high)) ** k
    share = any_accepted / beta(high) if beta(high) else 0.0
    left = positive_part(p, [min(b, a / high) * share for a, b in zip(p, q, strict=True)])
    for token in drafts:
        yield token, min(1.0, p[token] / (high * q[token])), left


def block(world: World, sampling: Sampling, drafts: int) -> dict[Text, float]:
    p, q = models(world, sampling)
    found: dict[Text, float] = defaultdict(float)
    for path in itertools.product(range(world.vocab), repeat=drafts):
        if world.stopping and 0 in path:
            path, tail = path[: path.index(0) + 1], path[path.index(0) + 1 :]
            if any(tail):
                continue  # one path stands for all that would go on
        chance = math.prod(q(path[:i])[x] for i, x in enumerate(path))
        if not chance:
            continue
        weights = [1.0]
        for i, x in enumerate(path):
            weights.append(min(1.0, weights[-1] * p(path[:i])[x] / q(path[:i])[x]))
        longer = 0.0  # probability that a longer path than path[:i] is kept
        for i in range(len(path), -1, -1):
            want = [weights[i] * v for v in p(path[:i])]
            if i == len(path):
                keep, left = weights[i], p(path[:i])
            else:
                beyond = sum(max(a - b, 0.0) for a, b in zip(want, q(path[:i]), strict=True))
                keep = 1.0 if i == 0 else beyond / (beyond + 1 - weights[i]) if beyond else 0.0
                left = positive_part(want, q(path[:i]))
            for token, v in enumerate(left):
                found[(*path[:i], token)] += chance * (1 - longer) * keep * v
            longer += (1 - longer) * keep
    return found


def first_tokens(outcomes: dict[Text, float], p: Model, count: int = 3) -> dict[Text, float]:
    """Probability of each text of `count` tokens, where plain decoding goes on behind what a round said."""
    found: dict[Text, float] = defaultdict(float)

    def extend(text: Text, chance: float) -> None:
        if len(text) >= count:
            found[text[:count]] += chance
        elif chance:
            for token, v in enumerate(p(text)):
                extend((*text, token), chance * v)

    for text, chance in outcomes.items():
        extend(text, chance)
    return found
