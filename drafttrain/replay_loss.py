"""On-policy distillation: the drafter learns from its own rounds, from what was accepted and from what was rejected.

    accepted stream: depths 1..r+1, the labels being the verified tokens     L_a = sum_n w_n D_a(n) / Z_a
    rejected stream: depths r+1..K, the labels being the drafted tokens      L_r = sum_n w_n D_r(n) / Z_r
    streams (Draft-OPD's paper, arXiv 2605.29343)   loss = (l_a L_a + l_r L_r) / (l_a + l_r)
    pooled  (the code released with it)             loss = (l_a Z_a L_a + l_r Z_r L_r) / (l_a Z_a + l_r Z_r)

r drafts of a round were accepted, and depth r+1 stands in both streams. D are weighted sums of divergences; w follows from the place in the
draft, counted from the anchor; Z is the sum of the w of the stream, or, where they are not known from the data, the number of its drafts. The
paper's streams are KL(p||q) with w = 1 and KL(q||p) with w = 0.8^(k-1); the code's are BernoulliKL and K3, pooled. A stream of weight 0 is
left out: of the loss here, and best of the layout too, where nothing is then computed for it.

Shapes: N scored elements of both streams, G divergences, R drafts, K depths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.divergences import Divergence, ForwardKL, ReverseKL, Teacher
from drafttrain.errors import UserError
from drafttrain.losses import Objective, Student, by_depth, require_chunk, require_divergences, require_known, score_elements
from drafttrain.position_weights import Decay, Guesses, PositionWeight, Uniform
from drafttrain.types import Drafted, Layout, Term

STREAMS = ("accepted", "rejected")
"""By the number that `stream_N` gives them."""
REDUCTIONS = ("streams", "pooled")


@dataclass(frozen=True)
class OnPolicyDistillation(Objective):
    """Divergences between drafter and target on what a round accepted, and others on what it rejected (Draft-OPD, arXiv 2605.29343)."""

    accepted: list[Divergence] = field(default_factory=lambda: [ForwardKL()])
    """Divergences on the accepted drafts and the target's token behind them, added up, each with its weight."""
    rejected: list[Divergence] = field(default_factory=lambda: [ReverseKL()])
    """Divergences on the drafts from the first rejected one on."""
    accepted_positions: PositionWeight = field(default_factory=Uniform)
    """Weight of an accepted element by its place in the draft: Uniform, Decay, Exponential, DPace, Streak, ValidPrefix."""
    rejected_positions: PositionWeight = field(default_factory=Decay)
    """Weight of a rejected element by its place in the draft, counted from the anchor."""
    accepted_weight: float = 1.0
    """The accepted stream's share of the loss, beside rejected_weight; 0 leaves it out."""
    rejected_weight: float = 1.0
    """The rejected stream's share of the loss; 0 leaves it out."""
    reduction: str = "streams"
    """What sums are divided by: streams (each by its own, then the mean of the two), or pooled (both by one)."""
    chunk: int = 0
    """Elements whose logits are held at once; 0 holds all (faster where memory allows). Where a micro-batch has more, they are computed once or twice as with
    `Distillation.chunk`; the divergences of both streams count as one list."""

    def __post_init__(self):
        for key in ("accepted_weight", "rejected_weight"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise UserError(
                    f"objective.init_args.{key} is {getattr(self, key)}, but must be 0 (leaves the stream out) or more."
                )
        if not self._weights:
            raise UserError("objective.init_args.accepted_weight and rejected_weight are both 0, but one must be above 0.")
        if self.reduction not in REDUCTIONS:
            raise UserError(f"objective.init_args.reduction is {self.reduction!r}, but must be one of {', '.join(REDUCTIONS)}.")
        for number, name in enumerate(STREAMS):
            require_divergences(name, self._divergences[number])
            if self.reduction == "pooled" and number in self._weights:
                require_known("pooled", self._positions[number], "streams")
        if not self.accepted_weight and not self.rejected_positions.known:
            raise UserError(
                f"objective.init_args.rejected_positions is {type(self.rejected_positions).__name__}, which follows a draft from its first place "
                "on, but with accepted_weight 0 what was accepted is left out; use Uniform, Decay or Exponential."
            )
        require_chunk(self.chunk)

    @property
    def streams(self) -> tuple[bool, bool]:
        return self.accepted_weight > 0, self.rejected_weight > 0

    @property
    def _divergences(self) -> tuple[list[Divergence], list[Divergence]]:
        return self.accepted, self.rejected

    @property
    def _positions(self) -> tuple[PositionWeight, PositionWeight]:
        return self.accepted_positions, self.rejected_positions

    @property
    def _weights(self) -> dict[int, float]:
        """Of the streams that are not left out, by their numbers."""
        return {number: weight for number, weight in enumerate((self.accepted_weight, self.rejected_weight)) if weight}

    def counts(self, layout: Layout, depth: int) -> dict[str, float]:
        """`accepted` and `rejected`: Z; `pooled`: l_a Z_a + l_r Z_r; `depth_k`: elements, and `accepted_depth_k`, `rejected_depth_k`: those of one stream.

        Raises UserError where the layout was not made from rounds.
        """
        stream_N = layout.streams()
        if stream_N is None:
            raise UserError(
                "objective.class_path is OnPolicyDistillation, but the training texts have no record of what was drafted, accepted and rejected; "
                "choose Distillation, or train with task on_policy and on_policy.replay rounds, where every answer has one."
            )
        counts = {f"depth_{k}": 0.0 for k in range(1, depth + 1)}
        for number in self._weights:
            mine_N, name = stream_N == number, STREAMS[number]
            depth_N, positions = layout.depth_N[mine_N], self._positions[number]
            for k, count in enumerate(torch.bincount(depth_N, minlength=depth + 1).tolist()[1:], start=1):
                counts[f"{name}_depth_{k}"] = float(count)
                counts[f"depth_{k}"] += count
            known = positions.known
            counts[name] = float(positions.of_depth(depth_N).double().sum() if known else len(layout.draft_N[mine_N].unique()))
        if self.reduction == "pooled":
            counts["pooled"] = sum(weight * counts[STREAMS[number]] for number, weight in self._weights.items())
        return counts

    def terms(
        self, drafted: Drafted, student: Student, teacher: Teacher, depth: int
    ) -> tuple[dict[str, Term], dict[str, Tensor]]:
        """As `Objective.terms` says; without streams every element is an accepted one.

        All elements are scored in one pass, by the divergences of both streams, and a stream then weighs the others 0. How many elements
        each has is only known on the device: to sort them out would make the host wait for it, and would break a compiled graph.
        """
        kinds: list[Divergence] = []
        for number in self._weights:
            kinds += [own for own in self._divergences[number] if _place(own, kinds) is None]
        loss_GN, log_q_N, right_N = score_elements(kinds, drafted, student, teacher, self.chunk)
        stream_N = torch.zeros_like(drafted.depth_N) if drafted.stream_N is None else drafted.stream_N
        branches = _branches(drafted, stream_N == 1, depth, log_q_N.exp(), right_N)
        sums: dict[int, Term] = {}
        metrics: dict[str, Tensor] = {}
        for number in self._weights:
            mine_N, name = (stream_N == number).float(), STREAMS[number]
            weight_N = self._positions[number].of_guesses(branches[number]) * mine_N
            own_N = {own.name: loss_GN[_place(own, kinds)] for own in self._divergences[number]}
            loss_N = torch.stack([own.weight * own_N[own.name] for own in self._divergences[number]]).sum(0)
            sums[number] = Term((weight_N * loss_N).sum(), self._count(number, weight_N, mine_N, branches[number]))
            metrics[f"loss_{name}"] = sums[number].sum.detach()
            logged = {"loss": loss_N, "top1": right_N.float()} | (own_N if len(own_N) > 1 else {})
            for title, value_N in logged.items():
                sum_K = by_depth(value_N.detach() * mine_N, drafted.depth_N, depth)
                metrics |= {f"{title}_{name}_depth_{k}": sum_K[k] for k in range(1, depth + 1)}
        return self._reduce(sums), metrics

    def _count(self, number: int, weight_N: Tensor, mine_N: Tensor, branch: Guesses) -> Tensor:
        """Z of these elements."""
        if self._positions[number].known:
            return weight_N.sum()
        return branch.grid(mine_N, absent=0.0).amax(1).sum()

    def _reduce(self, sums: dict[int, Term]) -> dict[str, Term]:
        """The terms of the streams' weighted sums."""
        weights = self._weights
        if self.reduction == "streams":
            whole = sum(weights.values())
            return {STREAMS[number]: Term(weights[number] / whole * own.sum, own.count) for number, own in sums.items()}
        weighted = [(weights[number] * own.sum, weights[number] * own.count) for number, own in sums.items()]
        return {"pooled": Term(*(torch.stack(parts).sum() for parts in zip(*weighted, strict=True)))}


def _place(divergence: Divergence, kinds: Sequence[Divergence]) -> int | None:
    """Where the same divergence stands, whatever its weight; None: nowhere."""
    names = [name for name in divergence.__dataclass_fields__ if name != "weight"]
    for i, other in enumerate(kinds):
        if type(other) is type(divergence) and all(getattr(other, name) == getattr(divergence, name) for name in names):
            return i
    return None


def _branches(drafted: Drafted, rejected_N: Tensor, depth: int, q_N: Tensor, right_N: Tensor) -> tuple[Guesses, Guesses]:
    """What the drafter said along the text, and along what it drafted, which begins with the drafts that are in the text.

    Elements that are not of a branch lie aside, in a last draft that nobody counts: of the text the rejected ones; of what was drafted
    the one accepted element that has a rejected one in its place, the target's correction.
    """
    aside_N = torch.full_like(drafted.draft_N, drafted.drafts)

    def without(out_N: Tensor) -> Guesses:
        draft_N = torch.where(out_N, aside_N, drafted.draft_N)
        return Guesses(drafted.depth_N, draft_N, drafted.drafts + 1, depth, q_N, right_N)

    taken_RK = without(~rejected_N).grid(torch.ones_like(q_N), absent=0.0)
    corrected_N = ~rejected_N & (taken_RK[drafted.draft_N, drafted.depth_N - 1] > 0)
    return without(rejected_N), without(corrected_N)
