"""Objectives: what the rows of a `Drafted` record are scored by.

    loss = sum over terms of  sum_n w_n * (sum_d weight_d * divergence_d(n)) / count

A term is a sum and the name of its count. The sums are local; one place divides them (the training task), by counts of the whole
accumulation window over all ranks, which are known from the data alone. An objective knows nothing of EAGLE or diffusion, of
optimizers or of ranks.

Shapes: N scored elements, G divergences, H drafter width, M teacher rows, D target width, V draft vocabulary, K depths.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafttrain.divergences import Divergence, Scored, SoftCrossEntropy, Taught, Teacher
from drafttrain.errors import UserError
from drafttrain.position_weights import Decay, Guesses, PositionWeight
from drafttrain.types import Drafted, Layout, Term

Student = Callable[[Tensor, Tensor], Tensor]
"""(hidden_NH, prev_N) -> logits over the draft vocabulary."""
REDUCTIONS = ("depths", "drafts", "weights")


@dataclass(frozen=True)
class Objective:
    """Base of the classes that a recipe may name as its objective."""

    @property
    def streams(self) -> tuple[bool, bool]:
        """Whether it scores what a replayed round accepted, and what it rejected."""
        return True, False

    def counts(self, layout: Layout, depth: int) -> dict[str, float]:
        """Name -> what the sums of that name are divided by, from the data alone; always with `depth_k`, the elements of each depth."""
        raise NotImplementedError

    def terms(
        self, drafted: Drafted, student: Student, teacher: Teacher, depth: int
    ) -> tuple[dict[str, Term], dict[str, Tensor]]:
        """Summands of the loss by the name of their count, and detached sums to be logged, whose names end in that of their count. Elements of depth 0,
        which fill a layout up, are in none."""
        raise NotImplementedError


@dataclass(frozen=True)
class Distillation(Objective):
    """Divergences between drafter and target, weighted by the place in the draft."""

    divergences: list[Divergence] = field(default_factory=lambda: [SoftCrossEntropy()])
    """Added up, each with its weight: SoftCrossEntropy, ForwardKL, HardCrossEntropy, ReverseKL, JSD, TotalVariation, LKAlpha, LKLambda,
    TopKCrossEntropy, SmoothL1, Confidence, Selection, BernoulliKL, K3."""
    positions: PositionWeight = field(default_factory=Decay)
    """Weight by the place in the draft: Uniform, Decay, Exponential, DPace, Streak, ValidPrefix."""
    reduction: str = "depths"
    """What sums are divided by: depths (the mean of every depth, added up: EAGLE), drafts (the number of drafts: D-PACE), or weights
    (the sum of the position weights: DFlash)."""
    chunk: int = 0
    """Elements whose logits are held at once; the target's are then computed for each element, not once for each row. Where it is less than a
    micro-batch has, all logits are computed twice, once more on the way back, unless the drafter speaks with the target's head (DFlash, EAGLE-1, Medusa) and
    learns from one divergence. 0 holds all."""

    def __post_init__(self):
        require_divergences("divergences", self.divergences)
        if self.reduction not in REDUCTIONS:
            raise UserError(f"objective.init_args.reduction is {self.reduction!r}, but must be one of {', '.join(REDUCTIONS)}.")
        if self.reduction == "weights":
            require_known("weights", self.positions, "drafts")
        require_chunk(self.chunk)

    def counts(self, layout: Layout, depth: int) -> dict[str, float]:
        per_depth = torch.bincount(layout.depth_N, minlength=depth + 1)
        counts = {f"depth_{k}": float(per_depth[k]) for k in range(1, depth + 1)}
        if self.reduction == "drafts":
            counts["drafts"] = float(len(layout.draft_N.unique()))
        if self.reduction == "weights":
            counts["weights"] = float(self.positions.of_depth(layout.depth_N).double().sum())
        return counts

    def terms(
        self, drafted: Drafted, student: Student, teacher: Teacher, depth: int
    ) -> tuple[dict[str, Term], dict[str, Tensor]]:
        loss_GN, log_q_N, right_N = score_elements(self.divergences, drafted, student, teacher, self.chunk)
        guesses = Guesses(drafted.depth_N, drafted.draft_N, drafted.drafts, depth, log_q_N.exp(), right_N)
        there_N = (drafted.depth_N > 0).float()
        weight_N = torch.where(there_N > 0, self.positions.of_guesses(guesses), 0.0)  # the weight of depth 0 may be infinite
        loss_N = torch.stack([own.weight * loss_N for own, loss_N in zip(self.divergences, loss_GN, strict=True)]).sum(0)
        logged = {"loss": loss_N, "top1": right_N.float()}
        if len(self.divergences) > 1:
            logged |= {own.name: own_N for own, own_N in zip(self.divergences, loss_GN, strict=True)}
        metrics: dict[str, Tensor] = {}
        for name, value_N in logged.items():
            sum_K = by_depth(value_N.detach(), drafted.depth_N, depth)
            metrics |= {f"{name}_depth_{k}": sum_K[k] for k in range(1, depth + 1)}
        return self._reduce(weight_N * loss_N, weight_N, there_N, guesses), metrics

    def _reduce(self, loss_N: Tensor, weight_N: Tensor, there_N: Tensor, guesses: Guesses) -> dict[str, Term]:
        """The terms of weighted losses."""
        if self.reduction == "weights":
            return {"weights": Term(loss_N.sum(), weight_N.sum())}
        if self.reduction == "drafts":
            return {"drafts": Term(loss_N.sum(), guesses.grid(there_N, absent=0.0).amax(1).sum())}
        depth_N, depth = guesses.depth_N, guesses.depth
        sum_K, count_K = by_depth(loss_N, depth_N, depth), by_depth(there_N, depth_N, depth)
        return {f"depth_{k}": Term(sum_K[k], count_K[k]) for k in range(1, depth + 1)}


def score_elements(
    divergences: Sequence[Divergence], drafted: Drafted, student: Student, teacher: Teacher, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Divergences, before their weights [G, N], with gradient; log q(label) and whether the label is the drafter's likeliest token, [N],
    detached. `chunk` elements at once, 0 all: see `Distillation.chunk`.

    A divergence is row-wise: what becomes of element n's loss is a factor of its own gradient and of no other. So where a head is frozen and nothing but
    the states learns, a chunk's gradient is computed right behind its logits, before anybody knows the factor, and the logits are dropped for good.
    """
    names, selector = list(drafted.extra), drafted.selector

    def score(hidden_NH: Tensor, prev_N: Tensor, label_N: Tensor, taught: Taught, row_N: Tensor | None, *extra: Tensor):
        logits_NV = student(hidden_NH, prev_N) if selector is None else selector.base_logits(hidden_NH)
        more = dict(zip(names, extra, strict=True))
        scored = Scored(hidden_NH, logits_NV.float(), label_N, taught, row_N, prev_N, more, selector)
        loss_GN = torch.stack([divergence.of(scored) for divergence in divergences])
        return loss_GN, scored.log_q_label_N.detach(), scored.logits_NV.detach().argmax(-1) == label_N

    def score_alone(hidden_NH: Tensor, prev_N: Tensor, label_N: Tensor, row_N: Tensor, *extra: Tensor):
        return score(hidden_NH, prev_N, label_N, Taught(teacher, drafted.teacher_MD[row_N]), None, *extra)

    each_N = drafted.hidden_NH, drafted.prev_N, torch.searchsorted(drafted.vocabulary_V, drafted.label_N)
    more_N = drafted.extra.values()
    if not chunk:
        return score(*each_N, Taught(teacher, drafted.teacher_MD), drafted.row_N, *more_N)
    if len(drafted.label_N) <= chunk:  # the way back would hold no less if it computed them again
        return score_alone(*each_N, drafted.row_N, *more_N)

    def score_again(*chunk_N: Tensor):
        return checkpoint(score_alone, *chunk_N, use_reentrant=False)

    def score_once(hidden_NH: Tensor, *rest_N: Tensor):
        def total(hidden_NH: Tensor):
            loss_1N, log_q_N, right_N = score_alone(hidden_NH, *rest_N)
            return loss_1N.sum(), (loss_1N, log_q_N, right_N)

        gradient_NH, (loss_1N, log_q_N, right_N) = torch.func.grad(total, has_aux=True)(hidden_NH.detach())
        carrier_N = (hidden_NH.float() * gradient_NH.float()).sum(-1)  # its gradient is that one
        return loss_1N + (carrier_N - carrier_N.detach()), log_q_N, right_N

    once = drafted.frozen_head and selector is None and not names and len(divergences) == 1
    parts = []
    for i in range(-(-len(drafted.label_N) // chunk)):
        piece = slice(i * chunk, (i + 1) * chunk)
        of_chunk = (x[piece] for x in (*each_N, drafted.row_N, *more_N))
        parts.append(score_once(*of_chunk) if once else score_again(*of_chunk))
    loss_GN, log_q_N, right_N = (torch.cat(pieces, dim=-1) for pieces in zip(*parts, strict=True))
    return loss_GN, log_q_N, right_N


def by_depth(value_N: Tensor, depth_N: Tensor, depth: int) -> Tensor:
    """Sums of the values at each depth [K+1]; that of depth k stands at place k."""
    return value_N.new_zeros(depth + 1).index_add(0, depth_N, value_N)


def require_divergences(key: str, divergences: Sequence[Divergence]) -> None:
    """UserError where a list of divergences is empty or names one twice."""
    if not divergences:
        raise UserError(f"objective.init_args.{key} is empty, but must name at least one, such as SoftCrossEntropy.")
    twice = [name for name, times in Counter(type(d).__name__ for d in divergences).items() if times > 1]
    if twice:
        raise UserError(f"objective.init_args.{key} names {', '.join(twice)} twice; name it once, with a larger weight.")


def require_known(reduction: str, positions: PositionWeight, instead: str) -> None:
    """UserError where sums are to be divided by position weights that do not follow from the data."""
    if not positions.known:
        raise UserError(
            f"objective.init_args.reduction is {reduction}, but those of {type(positions).__name__} are not known before the drafter has "
            f"said something, so micro-batches could not agree on their sum; use {instead}."
        )


def require_chunk(chunk: int) -> None:
    """UserError where `chunk` is no number of elements."""
    if chunk < 0:
        raise UserError(f"objective.init_args.chunk is {chunk}, but must be 0 (all elements at once) or a number of elements.")
