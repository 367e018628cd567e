"""Draft vocabulary: the target tokens that a reduced head can say.

`ids[d]` is the target id of draft id d, ascending. `d2t` is the *offset* that serving engines load: target_id = d + d2t[d].
`t2d` marks the target ids that are covered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import UserError


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
        return DraftVocabulary(torch.arange(size), size)

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


SIZE_MULTIPLE = 64
"""A size found from a coverage is rounded up to this: matrix products like it."""


def size_for(counts_V: Tensor, share: float) -> int:
    """Smallest number of most frequent tokens that covers this share of all counted ones; 1 where nothing was counted."""
    ordered = counts_V.sort(descending=True).values.double().cumsum(0)
    total = float(ordered[-1])
    return int((ordered < share * total - 1e-9).sum()) + 1 if total else 1


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
        size = min(-(-size_for(counts_V, size) // SIZE_MULTIPLE) * SIZE_MULTIPLE, vocab)
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
