"""Objectives: what the rows of a `Drafted` record are scored by.

An objective returns sums; one place divides them (the training task), by counts of the whole accumulation window over all
ranks, which are known from the data alone. It knows nothing of EAGLE or diffusion, of optimizers or of ranks.

Shapes: N scored rows, H drafter width, M teacher rows, D target width, V draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafttrain.errors import UserError
from drafttrain.types import Drafted, Layout, Term

Student = Callable[[Tensor, Tensor], Tensor]
"""(hidden_NH, prev_N) -> logits over the draft vocabulary."""
Teacher = Callable[[Tensor], Tensor]
"""(final_MD) -> logits over the draft vocabulary."""


@dataclass(frozen=True)
class Objective:
    """Base of the classes that a recipe may name as its objective."""

    def coefficients(self, depth: int) -> dict[str, float]:
        """Term name -> coefficient."""
        raise NotImplementedError

    def counts(self, layout: Layout, depth: int) -> dict[str, float]:
        """Term name -> what its sum is divided by, from the data alone."""
        raise NotImplementedError

    def terms(
        self, drafted: Drafted, student: Student, teacher: Teacher, depth: int
    ) -> tuple[dict[str, Term], dict[str, Tensor]]:
        """(terms with gradients, detached metric sums that share the terms' counts)."""
        raise NotImplementedError


@dataclass(frozen=True)
class SoftCrossEntropy(Objective):
    """EAGLE-3's objective: sum over depths k of decay^(k-1) * mean over rows of -sum_v p(v) log q(v).

    p is the target's distribution renormalised over the draft vocabulary (Li et al. 2025, arXiv 2503.01840).
    """

    decay: float = 0.8
    """Weight of each further depth."""
    chunk: int = 0
    """Rows whose logits are held at once; 0 holds all (faster where memory allows)."""

    def __post_init__(self):
        if not 0 < self.decay <= 1:
            raise UserError(f"objective.init_args.decay is {self.decay}, but must lie in (0, 1].")
        if self.chunk < 0:
            raise UserError(f"objective.init_args.chunk is {self.chunk}, but must be 0 (all rows at once) or a number of rows.")

    def coefficients(self, depth: int) -> dict[str, float]:
        return {f"depth_{k}": self.decay ** (k - 1) for k in range(1, depth + 1)}

    def counts(self, layout: Layout, depth: int) -> dict[str, float]:
        per_depth = torch.bincount(layout.depth_N, minlength=depth + 1)
        return {f"depth_{k}": float(per_depth[k]) for k in range(1, depth + 1)}

    def terms(
        self, drafted: Drafted, student: Student, teacher: Teacher, depth: int
    ) -> tuple[dict[str, Term], dict[str, Tensor]]:
        with torch.no_grad():
            target_MV = teacher(drafted.teacher_MD).float().softmax(-1)
        loss_N, best_N = _in_chunks(drafted, student, target_MV, self.chunk)
        hit_N = (best_N == drafted.label_N).float()
        zeros = loss_N.new_zeros(depth + 1)
        loss_K = zeros.index_add(0, drafted.depth_N, loss_N)
        hits_K = zeros.index_add(0, drafted.depth_N, hit_N)
        count_K = zeros.index_add(0, drafted.depth_N, torch.ones_like(loss_N))
        terms = {f"depth_{k}": Term(loss_K[k], count_K[k], self.decay ** (k - 1)) for k in range(1, depth + 1)}
        return terms, {f"top1_depth_{k}": hits_K[k] for k in range(1, depth + 1)}


def _in_chunks(drafted: Drafted, student: Student, target_MV: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Per row: cross-entropy (with gradient) and the target id the drafter says, holding at most `chunk` rows of logits."""

    def score(hidden_NH: Tensor, prev_N: Tensor, row_N: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = student(hidden_NH, prev_N)
        return soft_cross_entropy(logits_NV.float(), target_MV[row_N]), logits_NV.detach().argmax(-1)

    N = len(drafted.label_N)
    if not chunk or chunk >= N:
        loss, best = score(drafted.hidden_NH, drafted.prev_N, drafted.row_N)
        return loss, drafted.vocabulary_V[best]
    losses, bests = [], []
    for i in range(0, N, chunk):
        part = slice(i, i + chunk)
        loss, best = checkpoint(score, drafted.hidden_NH[part], drafted.prev_N[part], drafted.row_N[part], use_reentrant=False)
        losses.append(loss)
        bests.append(best)
    return torch.cat(losses), drafted.vocabulary_V[torch.cat(bests)]


def soft_cross_entropy(logits_NV: Tensor, target_NV: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) for each row [N], with q = softmax(logits) and p summing to 1."""
    return logits_NV.logsumexp(-1) - (target_NV * logits_NV).sum(-1)
