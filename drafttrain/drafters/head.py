"""What turns a drafter's state into logits over its draft vocabulary.

    dense       W h                 W [Vd, H], trained                        one matrix product as wide as the drafter
    low-rank    W2 (W1 h)           W1 [r, H], W2 [Vd, r], trained            (SlimSpec): r/H of the weights for every token
    target      the target's own    frozen; caps and scales included          nothing to train, nothing to store

A trained head begins as s W, W the target's rows and s the factor by which the target multiplies their product (Granite's, Cohere's), so that it
says what the target does. The factor is in the weights, since (s W) h = s (W h): engines compute a drafter's logits as one product, so what they
load says what was trained, and nothing has to be told to them. Two things no matrix can hold. A cap c tanh(x / c) (Gemma 2) keeps the order of
the tokens: a head begins with the target's first choices, and with probabilities sharper than the capped ones, which are what it then learns. A
bias of the target's head is left out.

Shapes: N rows, H width, r rank, Vd draft vocabulary.
"""

import torch
from torch import Tensor, nn

from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary


class LowRankHead(nn.Module):
    """W2 W1: the full vocabulary for the price of a small one (SlimSpec)."""

    def __init__(self, width: int, rank: int, words: int):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, words, bias=False)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        return self.up(self.down(hidden_NH))

    @property
    def weight(self) -> Tensor:
        """The matrix that it stands for [Vd, H]: what an engine without low-rank heads loads."""
        return self.up.weight @ self.down.weight

    @torch.no_grad()
    def approximate(self, weight_VH: Tensor) -> None:
        """Begin as the matrix of this rank that is nearest to `weight_VH` (Eckart and Young 1936): its largest singular directions.

        They are the largest eigenvectors of W'W, a matrix as small as the drafter is wide: W = (W E) E'.
        """
        directions_HR = torch.linalg.eigh(weight_VH.T @ weight_VH).eigenvectors[:, -self.down.out_features :]
        self.down.weight.copy_(directions_HR.T)
        self.up.weight.copy_(weight_VH @ directions_HR)


def make_head(width: int, words: int, rank: int | None) -> nn.Module:
    """A trained head, dense where no rank is given."""
    return nn.Linear(width, words, bias=False) if rank is None else LowRankHead(width, rank, words)


def begin_as_target(head: nn.Linear | LowRankHead, target: Target, vocabulary: DraftVocabulary, times: int = 1) -> None:
    """A fresh head says what the target's own does of the draft vocabulary before it is capped, or comes as near as its rank allows. A head
    that reads several states beside each other has that many copies. An outline of a target (meta) has nothing to copy."""
    if target.device.type == "meta":
        return
    weight_VH = target.head_weight[vocabulary.ids.to(target.device)].float() * target.logit_factor
    if isinstance(head, LowRankHead):
        head.approximate(weight_VH)
    else:
        with torch.no_grad():
            head.weight.unflatten(1, (times, -1)).copy_(weight_VH[:, None])


class TargetHead:
    """The target's own head on the draft vocabulary. No module: it is neither trained, nor saved, nor broadcast."""

    def __init__(self, target: Target, vocabulary: DraftVocabulary):
        self._score = target.head_of(None if vocabulary.is_full else vocabulary.ids.to(target.device))
        self._dtype = target.dtype

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        """[N, Vd], in the target's type; gradients reach the states."""
        return self._score(hidden_NH.to(self._dtype))
