"""Divergences: how far what the drafter says of one element is from what the target says there.

    q = softmax(drafter's logits),  p = softmax(target's logits), both over the draft vocabulary
    c = the target's probability of that vocabulary,  alpha = sum_v min(c p(v), q(v)) = how often a draft from q is accepted

With a full vocabulary c = 1, and a draft vocabulary is otherwise left to p, which sums to 1 over it: only the divergences made of
alpha (LKAlpha, LKLambda, Confidence) know of the words that cannot be said. A divergence is row-wise: it gives one number for each element and
knows nothing of depths, sums or ranks. What nobody asks for is not computed.

Shapes: N elements, M rows of the target that teach them, H drafter width, D target width, V draft vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, nll_loss, smooth_l1_loss

from drafttrain.errors import UserError
from drafttrain.types import Selector


class computed_once:
    """A method read like an attribute and computed when first read: functools.cached_property without the lock that it has before
    Python 3.12, which torch.compile cannot enter."""

    def __init__(self, compute: Callable[[Any], Tensor]):
        self.compute, self.name = compute, compute.__name__

    def __get__(self, record: Any, owner: type) -> Tensor:
        value = self.compute(record)
        setattr(record, self.name, value)  # found before this method from now on
        return value


class Teacher(Protocol):
    """The target, as objectives see it."""

    def logits(self, final_ND: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary [N, V]."""

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        """log c: what the target's probabilities of the draft vocabulary sum to [N], given their logits; 0 where it is full."""


class Taught:
    """The target's side of some of its rows, in fp32 and without gradient; each thing is computed when first asked for."""

    def __init__(self, teacher: Teacher, final_MD: Tensor):
        self.teacher, self.final_MD = teacher, final_MD

    @computed_once
    def logits_MV(self) -> Tensor:
        with torch.no_grad():
            return self.teacher.logits(self.final_MD).float()

    @computed_once
    def p_MV(self) -> Tensor:
        return self.logits_MV.softmax(-1)

    @computed_once
    def log_p_MV(self) -> Tensor:
        return self.logits_MV.log_softmax(-1)

    @computed_once
    def entropy_M(self) -> Tensor:
        return -(self.p_MV * self.log_p_MV).sum(-1)

    @computed_once
    def log_mass_M(self) -> Tensor:
        with torch.no_grad():
            return self.teacher.log_mass(self.final_MD, self.logits_MV)


class Scored:
    """What a divergence may ask of N elements; each thing is computed when first asked for.

    Args:
        hidden_NH: What the drafter's head reads.
        logits_NV: The drafter's logits, fp32.
        label_N: Draft ids of the tokens to be predicted.
        taught: The target's rows.
        row_N: Which of them teaches each element; None where element n is taught by row n.
        prev_N: Target ids of the tokens before those to be predicted.
        extra: What else the drafter says of each element, by name [N, ...].
        selector: Its second head, if it has one; `logits_NV` are then the first one's.
    """

    def __init__(
        self, hidden_NH: Tensor, logits_NV: Tensor, label_N: Tensor, taught: Taught, row_N: Tensor | None, prev_N: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None, selector: Selector | None = None,
    ):  # fmt: skip
        self.hidden_NH, self.logits_NV, self.label_N = hidden_NH, logits_NV, label_N
        self.taught, self.row_N = taught, row_N
        self.prev_N, self.extra, self.selector = prev_N, extra or {}, selector

    def of_teacher(self, value_M: Tensor) -> Tensor:
        """[N, ...]: each element's part of something that the target has for every row [M, ...]."""
        return value_M if self.row_N is None else value_M[self.row_N]

    @computed_once
    def log_sum_N(self) -> Tensor:
        """log q = logits - this."""
        return self.logits_NV.logsumexp(-1)

    @computed_once
    def log_q_NV(self) -> Tensor:
        return self.logits_NV - self.log_sum_N[:, None]

    @computed_once
    def log_q_label_N(self) -> Tensor:
        # Minus the label's logit, as a loss and not as a gather: in a compiled step its gradient is a part of the kernel that writes that of the logits,
        # where a gather's is a table [N, V] in fp32 of its own, filled and read again.
        return -nll_loss(self.logits_NV, self.label_N, reduction="none") - self.log_sum_N

    @computed_once
    def log_not_q_label_N(self) -> Tensor:
        """log(1 - q(label)), from the other words: where q(label) rounds to 1, its value and its gradient are still exact."""
        others_NV = self.logits_NV.scatter(1, self.label_N[:, None], -math.inf)
        return others_NV.logsumexp(-1) - self.log_sum_N

    @computed_once
    def p_NV(self) -> Tensor:
        return self.of_teacher(self.taught.p_MV)

    @computed_once
    def log_p_NV(self) -> Tensor:
        return self.of_teacher(self.taught.log_p_MV)

    @computed_once
    def log_p_label_N(self) -> Tensor:
        row_N = torch.arange(len(self.label_N), device=self.label_N.device) if self.row_N is None else self.row_N
        return self.taught.log_p_MV[row_N, self.label_N]

    @computed_once
    def cross_entropy_N(self) -> Tensor:
        """-sum_v p log q"""
        return self.log_sum_N - (self.p_NV * self.logits_NV).sum(-1)

    @computed_once
    def log_alpha_N(self) -> Tensor:
        """log sum_v min(c p(v), q(v)), by exponents: alpha itself may be too small for a float."""
        log_c_N1 = self.of_teacher(self.taught.log_mass_M)[:, None]
        return torch.minimum(self.log_p_NV + log_c_N1, self.log_q_NV).logsumexp(-1)


@dataclass(frozen=True)
class Divergence:
    """Base of the classes that a recipe may list in an objective's divergences."""

    name: ClassVar[str] = "divergence"
    """What its means are logged as, before `_depth_k`."""
    weight: float = field(default=1.0, kw_only=True)
    """Factor in the sum of an objective's divergences."""

    def __post_init__(self):
        self._require("weight", 0 < self.weight < math.inf, "a number above 0; leave the divergence out instead of weighing it 0")

    def of(self, scored: Scored) -> Tensor:
        """[N], with gradient, before `weight`."""
        raise NotImplementedError

    def _require(self, key: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise UserError(f"{key} of {type(self).__name__} is {getattr(self, key)}, but must be {wanted}.")


@dataclass(frozen=True)
class SoftCrossEntropy(Divergence):
    """-sum_v p log q: the forward KL(p||q) up to the target's own entropy (EAGLE-3: Li et al. 2025, arXiv 2503.01840)."""

    name: ClassVar[str] = "soft_cross_entropy"

    def of(self, scored: Scored) -> Tensor:
        return scored.cross_entropy_N


@dataclass(frozen=True)
class ForwardKL(Divergence):
    """KL(p||q) = sum_v p (log p - log q): SoftCrossEntropy less the target's own entropy, so its gradient is the same, and 0 is its least value
    (DistillSpec: arXiv 2310.08461)."""

    name: ClassVar[str] = "forward_kl"

    def of(self, scored: Scored) -> Tensor:
        return scored.cross_entropy_N - scored.of_teacher(scored.taught.entropy_M)


@dataclass(frozen=True)
class HardCrossEntropy(Divergence):
    """-log q(label), the label being the token in the text (Medusa: Cai et al. 2024, arXiv 2401.10774). Asks nothing of the target."""

    name: ClassVar[str] = "hard_cross_entropy"

    def of(self, scored: Scored) -> Tensor:
        return -scored.log_q_label_N


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """KL(q||p) = sum_v q (log q - log p): the drafter avoids what the target would not say (DistillSpec: arXiv 2310.08461)."""

    name: ClassVar[str] = "reverse_kl"

    def of(self, scored: Scored) -> Tensor:
        return (scored.log_q_NV.exp() * (scored.log_q_NV - scored.log_p_NV)).sum(-1)


@dataclass(frozen=True)
class JSD(Divergence):
    """beta KL(p||m) + (1-beta) KL(q||m) with m = beta p + (1-beta) q: between forward and reverse KL (DistillSpec: arXiv 2310.08461)."""

    name: ClassVar[str] = "jsd"
    beta: float = 0.5
    """The target's share of the mixture m."""

    def __post_init__(self):
        super().__post_init__()
        self._require(
            "beta", 0 < self.beta < 1, "above 0 and below 1; what lies at its ends are SoftCrossEntropy and ReverseKL, scaled"
        )

    def of(self, scored: Scored) -> Tensor:
        log_p_NV, log_q_NV, beta = scored.log_p_NV, scored.log_q_NV, self.beta
        log_m_NV = torch.logaddexp(log_p_NV + math.log(beta), log_q_NV + math.log1p(-beta))
        forward_N = (scored.p_NV * (log_p_NV - log_m_NV)).sum(-1)
        reverse_N = (log_q_NV.exp() * (log_q_NV - log_m_NV)).sum(-1)
        return beta * forward_N + (1 - beta) * reverse_N


@dataclass(frozen=True)
class TotalVariation(Divergence):
    """sum_v |p - q| / 2: how often a draft from q is rejected, with a full vocabulary (DistillSpec: arXiv 2310.08461)."""

    name: ClassVar[str] = "total_variation"

    def of(self, scored: Scored) -> Tensor:
        return (scored.p_NV - scored.log_q_NV.exp()).abs().sum(-1) / 2


@dataclass(frozen=True)
class LKAlpha(Divergence):
    """-log alpha: the likelihood of being accepted (LK losses, arXiv 2602.23881)."""

    name: ClassVar[str] = "lk_alpha"

    def of(self, scored: Scored) -> Tensor:
        return -scored.log_alpha_N


@dataclass(frozen=True)
class LKLambda(Divergence):
    """w KL(p||q) + (1-w) (1-alpha) with w = kl_scale * exp(-kl_decay * alpha), no gradient through w (LK losses, arXiv 2602.23881).

    The KL leads while little is accepted, the acceptance itself later. The published code takes one w from the mean alpha of a batch;
    here every element has the w of its own alpha, so that the gradient does not depend on how a step is cut into micro-batches.
    """

    name: ClassVar[str] = "lk_lambda"
    kl_scale: float = 1.0
    """w where nothing is accepted."""
    kl_decay: float = 1.0
    """How fast w falls as more is accepted."""

    def __post_init__(self):
        super().__post_init__()
        self._require("kl_scale", 0 < self.kl_scale <= 1, "above 0 and at most 1, being a share")
        self._require("kl_decay", 0 <= self.kl_decay < math.inf, "0 or more")

    def of(self, scored: Scored) -> Tensor:
        alpha_N = scored.log_alpha_N.exp()
        share_N = self.kl_scale * (-self.kl_decay * alpha_N.detach()).exp()
        kl_N = (scored.p_NV * (scored.log_p_NV - scored.log_q_NV)).sum(-1)
        return share_N * kl_N + (1 - share_N) * (1 - alpha_N)


@dataclass(frozen=True)
class TopKCrossEntropy(Divergence):
    """-sum over the k likeliest v of p log q, p as it is (HASS: Zhang et al. 2024, arXiv 2408.15766). k beyond V takes all."""

    name: ClassVar[str] = "top_k_cross_entropy"
    k: int = 10
    """How many of the target's likeliest tokens."""

    def __post_init__(self):
        super().__post_init__()
        self._require("k", self.k >= 1, "1 or more")

    def of(self, scored: Scored) -> Tensor:
        p_MK, token_MK = scored.taught.p_MV.topk(min(self.k, scored.logits_NV.shape[1]))
        p_NK, token_NK = scored.of_teacher(p_MK), scored.of_teacher(token_MK)
        return scored.log_sum_N * p_NK.sum(-1) - (p_NK * scored.logits_NV.gather(1, token_NK)).sum(-1)


@dataclass(frozen=True)
class SmoothL1(Divergence):
    """Mean over the width of smooth-l1(drafter's state, target's final state): EAGLE-1's feature regression (arXiv 2401.15077).

    Raises UserError where the two widths differ.
    """

    name: ClassVar[str] = "smooth_l1"

    def of(self, scored: Scored) -> Tensor:
        hidden_NH, final_MD = scored.hidden_NH, scored.taught.final_MD
        if hidden_NH.shape[1] != final_MD.shape[1]:
            raise UserError(
                f"SmoothL1 compares the drafter's states, {hidden_NH.shape[1]} wide, with the target's, {final_MD.shape[1]} wide, which must be "
                "equal; choose another drafter or remove SmoothL1 from objective.init_args.divergences."
            )
        return smooth_l1_loss(hidden_NH.float(), scored.of_teacher(final_MD).float(), reduction="none").mean(-1)


@dataclass(frozen=True)
class Confidence(Divergence):
    """Binary cross-entropy between the drafter's confidence in its draft and alpha, how often it will be kept (DSpark, arXiv 2607.05147).

    With a full vocabulary alpha = 1 - 0.5 ||p - q||_1, as published. It is a target without gradient, so q learns nothing from it.
    Raises UserError where the drafter has no confidence.
    """

    name: ClassVar[str] = "confidence"

    def of(self, scored: Scored) -> Tensor:
        if "confidence" not in scored.extra:
            raise UserError(
                "objective.init_args.divergences names Confidence, but this drafter has no head that could learn it; remove it, or choose "
                "a drafter that tells how sure it is."
            )
        alpha_N = scored.log_alpha_N.detach().exp().clamp(max=1)
        return binary_cross_entropy_with_logits(scored.extra["confidence"].float(), alpha_N, reduction="none")


@dataclass(frozen=True)
class Selection(Divergence):
    """-log softmax(S)(label) over the candidates of a drafter that chooses by the token before (DFlash 2).

    S adds to the first head's logits what its selector says behind the text's own token. Candidates are the first head's likeliest tokens, the
    last of which gives way to the label where that is missing. Gradients reach both heads.
    Raises UserError where the drafter has no selector.
    """

    name: ClassVar[str] = "selection"

    def of(self, scored: Scored) -> Tensor:
        selector, label_N1 = scored.selector, scored.label_N[:, None]
        if selector is None or scored.prev_N is None:
            raise UserError(
                "objective.init_args.divergences names Selection, but this drafter has no selector that could learn it; remove it, or choose a "
                "drafter that selects among candidates."
            )
        best_NC = scored.logits_NV.detach().topk(min(selector.candidates, scored.logits_NV.shape[1])).indices
        there_N1 = (best_NC == label_N1).any(1, keepdim=True)
        token_NC = torch.cat([best_NC[:, :-1], torch.where(there_N1, best_NC[:, -1:], label_N1)], dim=1)
        score_NC = scored.logits_NV.gather(1, token_NC) + selector.added(scored.hidden_NH, scored.prev_N, token_NC).float()
        return score_NC.logsumexp(1) - (score_NC * (token_NC == label_N1)).sum(1)


LEAST_LOG, MOST = -10.0, 10.0
"""Of the estimators below, as in the code released with Draft-OPD: log-probabilities count as no less, and an element as no more, beyond which it
teaches nothing."""


@dataclass(frozen=True)
class BernoulliKL(Divergence):
    """p log(p/q) + (1-p) log((1-p)/(1-q)) with p and q the probabilities of the label alone: the forward KL between "it is the label" and
    "it is not" (Draft-OPD's code, on its accepted stream: arXiv 2605.29343). Both log-probabilities are at least -10, its value is at most 10."""

    name: ClassVar[str] = "bernoulli_kl"

    def of(self, scored: Scored) -> Tensor:
        log_p_N, log_q_N = scored.log_p_label_N.clamp(min=LEAST_LOG), scored.log_q_label_N.clamp(min=LEAST_LOG)
        p_N, not_p_N = log_p_N.exp(), -log_p_N.expm1()
        log_not_q_N = scored.log_not_q_label_N.clamp(max=math.log1p(-math.exp(LEAST_LOG)))  # of the q that is at least e^-10
        other_N = torch.xlogy(not_p_N, not_p_N) - not_p_N * log_not_q_N
        return (p_N * (log_p_N - log_q_N) + other_N).clamp(-MOST, MOST)


@dataclass(frozen=True)
class K3(Divergence):
    """exp(D) - D - 1 with D = log p - log q of the label: where labels are drawn from q, its mean is KL(q||p) (k3 of J. Schulman, "Approximating
    KL divergence", 2020; Draft-OPD's code, on its rejected stream: arXiv 2605.29343). Its value is at most 10."""

    name: ClassVar[str] = "k3"

    def of(self, scored: Scored) -> Tensor:
        # The value passes 10 at D = 2.6. A larger D would overflow, and what is infinite has no gradient that a clamp could make 0.
        gap_N = (scored.log_p_label_N - scored.log_q_label_N).clamp(max=3.0)
        return (gap_N.expm1() - gap_N).clamp(-MOST, MOST)
