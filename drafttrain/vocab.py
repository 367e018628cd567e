"""Draft vocabulary: the target tokens that a reduced head can say, and how many of them pay.

`ids[d]` is the target id of draft id d, ascending. `d2t` is the *offset* that serving engines load: target_id = d + d2t[d].
`t2d` marks the target ids that are covered.

**How many.** A draft reads b weights of the drafter outside its head and h more for each of the n tokens in it, a pass of the target
reads P, and K drafts are made a round. The best n is where the expected speed-up over plain decoding is largest:

    S(n) = tau(n) / (1 + K (b + h n) / P),    tau(n) = 1 + x + ... + x^K,    x = a C(n)

(Leviathan et al. 2023, arXiv 2211.17192). b and h are a round's weights divided by its K drafts: a drafter that says all of them in one pass is read
once for all, one that drafts token by token K times. C(n) is the share of new text that the first n tokens cover, and a = 0.7 is assumed to be the
acceptance of a token that the drafter can say, since nothing is trained yet. A weight costs its bytes wherever it stands, which is what small
batches wait for; large ones wait for FLOPs, and there the K + 1 tokens that the target reads cost more than the one pass assumed here. What a
kernel launch costs is not in it: for targets of less than about a billion weights a larger vocabulary is cheaper than S says.
Ben Shoham (2026, arXiv 2603.05210) searches such a trade-off with a tree-structured Parzen estimator (TPE). With the tokens in order of
their counts only the number n is left to find, so every multiple of 64 is tried: the exact optimum, without a dependency.

**Coverage of new text.** A vocabulary covers the answers that it was chosen by better than any others. So one question with its answers
is left out, the n tokens are chosen by the rest, and C(n) is the share of the answers left out that they cover, over all questions.
Were every token a text of its own, that would be Good and Turing's estimate, 1 - N_1/N for n = all tokens seen (N_1 of the N were
seen once). Words come in bunches, and that estimate is far too high: over 170 chats of SmolLM2-135M it promises 94% for 2,048 tokens,
leaving out chats 83%, and held-out answers were covered to 83%.

Shapes: V vocabulary, S sizes, T tokens of a text, W distinct tokens of a text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafttrain.errors import UserError

ASSUMED_ACCEPTANCE = 0.7
"""a: how often a draft is right where the token is in the vocabulary; taus of 2.5 to 3.5 with 5 drafts mean 0.63 to 0.77."""
SIZE_MULTIPLE = 64
"""A size that is found and not given is a multiple of this: matrix products like it."""
PROMPT_COUNTS = 4096
"""Counts on prompts only break ties; from here on they are not told apart where tokens are ranked one text at a time."""

Size = int | float | Literal["best"] | None
"""How many tokens, the share of the counted tokens to be covered, the size of the largest speed-up, or the full vocabulary."""


@dataclass(frozen=True)
class DraftVocabulary:
    """Which of the target's `size` tokens the drafter can say."""

    ids: Tensor
    """Target ids, ascending, int64 [Vd]."""
    size: int
    """The target's vocabulary."""

    def __post_init__(self):
        if len(self.ids) > self.size:
            raise UserError(
                f"the draft vocabulary has {len(self.ids)} tokens, more than the target's {self.size}; lower drafter.init_args.draft_vocab."
            )
        ascending = bool((self.ids[1:] > self.ids[:-1]).all())
        if not len(self.ids) or not ascending or int(self.ids[0]) < 0 or int(self.ids[-1]) >= self.size:
            raise UserError(
                "a draft vocabulary must hold distinct ascending token ids of the target; this one is damaged, so build it again."
            )

    @staticmethod
    def full(size: int) -> "DraftVocabulary":
        return DraftVocabulary(torch.arange(size, device="cpu"), size)  # also where a net is built on meta

    @staticmethod
    def from_d2t(d2t: Tensor, size: int) -> "DraftVocabulary":
        """Undo the offsets of a checkpoint."""
        return DraftVocabulary(torch.arange(len(d2t)) + d2t.cpu(), size)

    @property
    def is_full(self) -> bool:
        return len(self.ids) == self.size

    @property
    def d2t(self) -> Tensor:
        """Offsets [Vd], int64."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """Covered target ids [V], bool."""
        covered = torch.zeros(self.size, dtype=torch.bool)
        covered[self.ids] = True
        return covered


@dataclass(frozen=True)
class Cost:
    """Weights that one draft and one pass of the target read; of a drafter, those of a round divided by its drafts."""

    outside: float
    """b, of the drafter outside its head."""
    per_token: float
    """h, of the head for each token that it can say."""
    target: int
    """P."""
    drafts: int
    """K."""

    def ratio(self, size):
        """A draft in passes of the target; for one size or for a tensor of them."""
        return (self.outside + self.per_token * size) / self.target

    def speed_up(self, size, coverage):
        """S, the expected speed-up over plain decoding, where `coverage` of new text can be said."""
        x = ASSUMED_ACCEPTANCE * coverage
        return sum(x**depth for depth in range(self.drafts + 1)) / (1 + self.drafts * self.ratio(size))


@dataclass(frozen=True)
class Counts:
    """How often the target says each token, and how a choice by these counts would serve text that is not in them."""

    supervised_V: Tensor
    """Counts in the training answers."""
    other_V: Tensor
    """Counts in what stands around them."""
    places_V: Tensor
    """Tokens of answers that were left out, by their place in the order of the rest: the n first tokens cover the n first places."""
    total: int
    """Tokens of the training answers, those included that are in none of the counts."""
    left_out: int
    """Tokens of the answers that were left out, likewise."""

    def trained(self, sizes_S: Tensor) -> Tensor:
        """Share of the training answers that the most frequent tokens cover, for each number of them [S]; 0 where nothing was counted."""
        return self.supervised_V.sort(descending=True).values.cumsum(0)[sizes_S - 1].double() / max(self.total, 1)

    def expected(self, sizes_S: Tensor) -> Tensor:
        """C, the share of new answers, for each number of tokens [S]."""
        return self.places_V.cumsum(0)[sizes_S - 1].double() / max(self.left_out, 1)

    def size_for_expected(self, share: float) -> int:
        """Smallest number of tokens that is expected to cover this share of new answers."""
        return min(int((self.places_V.cumsum(0) < share * self.left_out - 1e-9).sum()) + 1, len(self.places_V))


def count(supervised_V: Tensor, other_V: Tensor, texts: Iterable[tuple[Tensor, Tensor]], among_V: Tensor | None = None) -> Counts:
    """Counts with the places of texts that are left out one by one.

    `texts` are some or all of those that were counted: ids [T], and whether each token is supervised [T]. Where `among_V` [V, bool] is
    given, only those tokens can be chosen at all.
    """
    V = len(supervised_V)
    among_V = torch.ones(V, dtype=torch.bool) if among_V is None else among_V
    ids = among_V.nonzero()[:, 0]
    order = _rank_key(supervised_V[ids], other_V[ids], ids, V).sort().values
    places_V, left_out = torch.zeros(V, dtype=torch.int64), 0
    for ids_T, supervised_T in texts:
        left_out += int(supervised_T.sum())
        kept_T = among_V[ids_T]
        ids_W, where_T = ids_T[kept_T].unique(return_inverse=True)
        said_W, other_W = (
            torch.zeros_like(ids_W).index_add_(0, where_T, mask_T[kept_T].long()) for mask_T in (supervised_T, ~supervised_T)
        )
        with_W = _rank_key(supervised_V[ids_W], other_V[ids_W], ids_W, V)
        without_W = _rank_key(supervised_V[ids_W] - said_W, other_V[ids_W] - other_W, ids_W, V)
        # Ahead of a token without this text: all that was ahead, but this text's own tokens by what is left of their counts.
        ahead_W = _above(order, without_W) - _above(with_W.sort().values, without_W) + _above(without_W.sort().values, without_W)
        places_V.index_add_(0, ahead_W, said_W)
    return Counts(supervised_V * among_V, other_V * among_V, places_V, int(supervised_V.sum()), left_out)


def _rank_key(supervised: Tensor, other: Tensor, ids: Tensor, V: int) -> Tensor:
    """Larger for tokens that `choose` takes earlier: by count in answers, then in prompts, then by id. Distinct, int64."""
    return (supervised * PROMPT_COUNTS + other.clamp(max=PROMPT_COUNTS - 1)) * V + (V - 1 - ids)


def _above(ascending: Tensor, keys_W: Tensor) -> Tensor:
    """How many of the ascending keys are larger, for each of `keys_W`."""
    return len(ascending) - torch.searchsorted(ascending, keys_W, right=True)


def size_for(counts_V: Tensor, share: float) -> int:
    """Smallest number of most frequent tokens that covers this share of all counted ones; 1 where nothing was counted."""
    ordered = counts_V.sort(descending=True).values.double().cumsum(0)
    total = float(ordered[-1])
    return int((ordered < share * total - 1e-9).sum()) + 1 if total else 1


def rounded(size: int, vocab: int) -> int:
    """The next multiple of `SIZE_MULTIPLE`, at most the vocabulary."""
    return min(-(-size // SIZE_MULTIPLE) * SIZE_MULTIPLE, vocab)


def best_size(counts: Counts, cost: Cost, least_coverage: float = 0.0, most: int | None = None) -> int:
    """The multiple of `SIZE_MULTIPLE` (or the largest size at all) with the largest speed-up S, of those that cover `least_coverage` of
    the training answers.

    `most` is the largest size, all V unless given. Raises UserError where even that covers too little.
    """
    most = len(counts.supervised_V) if most is None else most
    sizes_S = torch.tensor([*range(SIZE_MULTIPLE, most, SIZE_MULTIPLE), most])
    allowed_S = counts.trained(sizes_S) >= least_coverage - 1e-9
    if not allowed_S.any() and counts.total:
        raise UserError(
            f"all {most:,} tokens together cover {float(counts.trained(sizes_S)[-1]):.1%} of the training answers, but "
            f"drafter.init_args.least_coverage asks for {least_coverage:.1%}; lower it."
        )
    speed_up_S = cost.speed_up(sizes_S, counts.expected(sizes_S))
    return int(sizes_S[speed_up_S.masked_fill(~allowed_S, -1.0).argmax()])


def choose(
    counts_V: Tensor,
    size: int | float | None,
    fallback_V: Tensor | None = None,
    least_coverage: float = 0.0,
    always: Sequence[int] = (),
) -> DraftVocabulary:
    """The tokens that the target says most often, by counts on supervised tokens.

    `size` is how many, or, as a float up to 1.0, the share of the counted tokens to be covered; None is the full vocabulary. Tokens in
    `always` (ends of turn) are in it whatever their counts: a drafter that cannot say them never ends an answer.

    Where fewer tokens were seen than asked for, the rest is filled by `fallback_V` (counts on prompts), then by the lowest
    ids: byte-pair vocabularies are in merge order, so a low id is a frequent token. Raises UserError if the size does not fit
    or the choice covers less than `least_coverage` of the counted tokens.
    """
    vocab = len(counts_V)
    if size is None:
        return DraftVocabulary.full(vocab)
    if isinstance(size, float):
        size = rounded(size_for(counts_V, size), vocab)
    if not 0 < size <= vocab:
        raise UserError(
            f"drafter.init_args.draft_vocab is {size}, but the target's vocabulary has {vocab} tokens; use 1 to {vocab}, or null for all of it."
        )
    fallback_V = torch.zeros_like(counts_V) if fallback_V is None else fallback_V
    counts, prompts = counts_V.tolist(), fallback_V.tolist()
    first = set(always)
    order = sorted(range(vocab), key=lambda token: (token not in first, -counts[token], -prompts[token], token))
    chosen = DraftVocabulary(torch.tensor(sorted(order[:size])), vocab)
    reached = coverage(chosen, counts_V)
    if reached < least_coverage:
        raise UserError(
            f"a draft vocabulary of {size} tokens covers {reached:.1%} of the training answers, but drafter.init_args.least_coverage asks for "
            f"{least_coverage:.1%}; raise drafter.init_args.draft_vocab or lower the coverage asked for."
        )
    return chosen


def coverage(vocabulary: DraftVocabulary, counts_V: Tensor) -> float:
    """Share of counted tokens that the drafter can say (1.0 where nothing was counted)."""
    total = int(counts_V.sum())
    return float(counts_V[vocabulary.ids].sum()) / total if total else 1.0


def describe(vocabulary: DraftVocabulary, counts: Counts) -> str:
    """The vocabulary in a sentence, for people: its size and what it covers."""
    if vocabulary.is_full:
        return f"draft vocabulary: all {vocabulary.size:,} tokens of the target"
    size = len(vocabulary.ids)
    new = float(counts.expected(torch.tensor([size]))[0])
    return (
        f"draft vocabulary: {size:,} of {vocabulary.size:,} tokens, which are {coverage(vocabulary, counts.supervised_V):.2%} of the "
        f"training answers and about {new:.1%} of new ones"
    )


def arithmetic(counts: Counts, cost: Cost, size: int) -> str:
    """What a size costs and what it brings, beside its half, its double and all tokens, in a sentence for people."""
    V = len(counts.supervised_V)
    sizes_S = torch.tensor(sorted({max(size // 2, 1), size, min(2 * size, V), V}))
    speed_up_S = cost.speed_up(sizes_S, counts.expected(sizes_S))
    by_size = ", ".join(f"{n:,} tokens {s:.3f}" for n, s in zip(sizes_S.tolist(), speed_up_S.tolist(), strict=True))
    return (
        f"a draft reads {cost.outside:,.0f} + {cost.per_token:,.0f} x {size:,} weights, {cost.ratio(size):.1%} of the target's {cost.target:,}; "
        f"expected speed-up with {cost.drafts} drafts, right {ASSUMED_ACCEPTANCE:.0%} of the time where the token can be said: {by_size}"
    )
