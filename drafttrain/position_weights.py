"""Position weights: how much an element counts by its place k = 1, 2, ... in its draft.

    known from the data     Uniform 1,  Decay b^(k-1),  Exponential exp(-(k-1)/gamma)
    of what was guessed     DPace, Streak, ValidPrefix: from q_k, the drafter's probability of the label at place k, and from whether
                            the label was its likeliest token; both without gradient

A later draft is served only if all earlier ones were right, which is why it counts less. An element that is left out (its label is
outside the draft vocabulary) counts as never right for those behind it, and weighs nothing itself.

Shapes: N scored elements, R drafts (an upper bound: rows of the grid may be empty), K depths.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from drafttrain.errors import UserError


@dataclass(frozen=True)
class Guesses:
    """What the drafter said of the scored elements, detached, and where they lie in their drafts."""

    depth_N: Tensor
    """1 to K; 0 for elements that only fill a layout up (layouts.py): they lie nowhere."""
    draft_N: Tensor
    """0 <= draft < drafts; the elements of a draft have distinct depths."""
    drafts: int
    depth: int
    """K"""
    q_N: Tensor
    """The drafter's probability of the label."""
    right_N: Tensor
    """True where the label was the drafter's likeliest token."""

    def grid(self, values_N: Tensor, absent: float) -> Tensor:
        """[R, K]: the elements' values where they lie, `absent` where there is none. No wait for the device."""
        empty = values_N.new_full((self.drafts, self.depth + 1), absent)
        return empty.index_put((self.draft_N, self.depth_N), values_N)[:, 1:]

    def back(self, grid_RK: Tensor) -> Tensor:
        """[N]: what lies at the elements' places."""
        return grid_RK[self.draft_N, self.depth_N - 1]


@dataclass(frozen=True)
class PositionWeight:
    """Base of the classes that a recipe may name as an objective's position weight."""

    known: ClassVar[bool] = True
    """Does the weight follow from the depth alone?"""

    def of_depth(self, depth_N: Tensor) -> Tensor:
        """[N], fp32: the weight by depth, where it is known from that alone."""
        raise NotImplementedError

    def of_guesses(self, guesses: Guesses) -> Tensor:
        """[N], fp32, without gradient."""
        return self.of_depth(guesses.depth_N)


@dataclass(frozen=True)
class Uniform(PositionWeight):
    """1 everywhere."""

    def of_depth(self, depth_N: Tensor) -> Tensor:
        return torch.ones_like(depth_N, dtype=torch.float32)


@dataclass(frozen=True)
class Decay(PositionWeight):
    """base^(k-1) (EAGLE-3's code and Medusa's paper: 0.8)."""

    base: float = 0.8
    """Weight of each further place, as a share of the one before."""

    def __post_init__(self):
        _require_base(self)

    def of_depth(self, depth_N: Tensor) -> Tensor:
        return self.base ** (depth_N - 1).float()


@dataclass(frozen=True)
class Exponential(PositionWeight):
    """exp(-(k-1)/gamma) (DFlash: arXiv 2602.06036; gamma 7 for 15 drafts, 5 for 9, 4 for 7)."""

    gamma: float = 7.0
    """Places over which the weight falls to 1/e."""

    def __post_init__(self):
        if not 0 < self.gamma < math.inf:
            raise UserError(f"gamma of Exponential is {self.gamma}, but must be a number of places, above 0.")

    def of_depth(self, depth_N: Tensor) -> Tensor:
        return ((1 - depth_N).float() / self.gamma).exp()


@dataclass(frozen=True)
class DPace(PositionWeight):
    """w_j = sum_{m>=j} prod_{i<=m} s_i with s = (1-smoothing) q + smoothing (D-PACE, arXiv 2605.18810).

    The expected number of places, from j on, that are reached if place i is right with probability s_i. A place that is left out has
    q = 0 for those behind it and adds no summand of its own.
    """

    known: ClassVar[bool] = False
    smoothing: float = 0.5
    """Keeps weight on the places behind one that is often wrong."""

    def __post_init__(self):
        if not 0 <= self.smoothing < 1:
            raise UserError(
                f"smoothing of DPace is {self.smoothing}, but must be 0 or more and below 1, where guesses would not count."
            )

    def of_guesses(self, guesses: Guesses) -> Tensor:
        return _expected_reach(guesses, self.smoothing)


@dataclass(frozen=True)
class Streak(PositionWeight):
    """w_j = sum_{m>=j} prod_{i<=m} q_i (streak distillation of SpecDiff-2, arXiv 2511.00606).

    With HardCrossEntropy the gradient is that of -J, where J = sum_m prod_{j<=m} q_j is the expected number of right drafts in a row.
    """

    known: ClassVar[bool] = False

    def of_guesses(self, guesses: Guesses) -> Tensor:
        return _expected_reach(guesses, 0.0)


@dataclass(frozen=True)
class ValidPrefix(PositionWeight):
    """base^(k-1) where the drafter's likeliest token was right at all earlier places of the draft, else 0.

    What greedy decoding would never reach is not learnt (the valid-prefix mask of SpecBlock, and Spec-AUF, arXiv 2607.01893).
    """

    known: ClassVar[bool] = False
    base: float = 1.0
    """Weight of each further place, as a share of the one before."""

    def __post_init__(self):
        _require_base(self)

    def of_guesses(self, guesses: Guesses) -> Tensor:
        right_RK = guesses.grid(guesses.right_N.float(), absent=0.0)
        before_RK = torch.cat([torch.ones_like(right_RK[:, :1]), right_RK[:, :-1]], dim=1).cumprod(1)
        return guesses.back(before_RK) * self.base ** (guesses.depth_N - 1).float()


def _require_base(weight: Decay | ValidPrefix) -> None:
    if not 0 < weight.base <= 1:
        raise UserError(f"base of {type(weight).__name__} is {weight.base}, but must be above 0 and at most 1.")


def _expected_reach(guesses: Guesses, smoothing: float) -> Tensor:
    """sum over the places m >= j that are scored of prod_{i<=m} ((1-smoothing) q_i + smoothing), for each element [N]."""
    q_RK = guesses.grid(guesses.q_N, absent=0.0)
    there_RK = guesses.grid(torch.ones_like(guesses.q_N), absent=0.0)
    reach_RK = ((1 - smoothing) * q_RK + smoothing).cumprod(1) * there_RK
    return guesses.back(reach_RK.flip(1).cumsum(1).flip(1))
