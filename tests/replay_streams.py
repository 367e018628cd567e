"""Made-up rounds as both streams of elements, two linear models to score them, and the on-policy loss as a loop in fp64."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.divergences import K3, BernoulliKL, Divergence, ForwardKL, HardCrossEntropy, ReverseKL
from drafttrain.losses import Objective
from drafttrain.position_weights import Decay, DPace, Exponential, PositionWeight, Uniform, ValidPrefix
from drafttrain.replay import ReplayLayout
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.types import Drafted

WORDS, WIDTH, DEPTH = 17, 6, 4
IDS_V = torch.arange(0, WORDS, 2)
ROUNDS = [(0, 1, 4), (4, 4, 4), (2, 3, 4), (1, 2, 2), (3, 4, 4), (0, 1, 3), (2, 1, 1), (1, 2, 4), (4, 5, 4), (0, 1, 1), (2, 3, 4)]
"""(accepted, kept, within) of each round: none and all accepted, cut by the limit among the accepted drafts, cut behind the rejected one."""
NOTHING = torch.zeros(0, dtype=torch.long)


def layout_of(drafted: Drafted) -> ReplayLayout:
    """What counts are made of."""
    rest = dict.fromkeys(ReplayLayout.__dataclass_fields__, NOTHING)
    return ReplayLayout(**rest | {name: getattr(drafted, name) for name in ("depth_N", "draft_N", "stream_N")})


class Model:
    """A teacher and a student with a matrix each, and the grid of the drafter's states."""

    def __init__(self, drafts: int, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        self.teacher_VD = torch.randn(len(IDS_V), WIDTH, generator=g)
        self.student_VH = torch.randn(len(IDS_V), WIDTH, generator=g).requires_grad_()
        self.bias_V = torch.randn(WORDS, generator=g).requires_grad_()
        self.grid_RKH = torch.randn(drafts, DEPTH, WIDTH, generator=g).requires_grad_()
        self.row_RKD = torch.randn(drafts, DEPTH, WIDTH, generator=g)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.student_VH, self.bias_V, self.grid_RKH]

    def logits(self, final_ND: Tensor) -> Tensor:
        return final_ND @ self.teacher_VD.T

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        raise AssertionError("nobody asks for alpha")

    def student(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return hidden_NH @ self.student_VH.T + self.bias_V[prev_N][:, None] * self.student_VH[:, 0]


def replayed(rounds: list[tuple[int, int, int]], seed: int = 0) -> tuple[Drafted, Model]:
    """Both streams of the rounds, one after the other, each by depth. Draft 2i+1 is round i, the others are padding. What the target says
    in place of a rejected draft is often outside the draft vocabulary, and then left out."""
    g, drafts = torch.Generator().manual_seed(seed), 2 * len(rounds) + 1
    places = []
    for stream, k in ((stream, k) for stream in (0, 1) for k in range(1, DEPTH + 1)):
        for i, (accepted, kept, within) in enumerate(rounds):
            first, last = ((1, min(accepted + 1, kept)), (accepted + 1, within))[stream]
            left_out = stream == 0 and k == accepted + 1 and float(torch.rand((), generator=g)) < 0.3
            if first <= k <= last and not left_out:
                places.append((stream, 2 * i + 1, k))
    stream_N, draft_N, depth_N = torch.tensor(places, dtype=torch.long).reshape(-1, 3).T
    model, N = Model(drafts, seed), len(places)
    drafted = Drafted(
        hidden_NH=model.grid_RKH[draft_N, depth_N - 1],
        teacher_MD=model.row_RKD.flatten(0, 1),
        row_N=draft_N * DEPTH + depth_N - 1,
        label_N=IDS_V[torch.randint(len(IDS_V), (N,), generator=g)],
        prev_N=torch.randint(WORDS, (N,), generator=g),
        draft_N=draft_N,
        drafts=drafts,
        depth_N=depth_N,
        vocabulary_V=IDS_V,
        stream_N=stream_N,
    )
    return drafted, model


def some(drafted: Drafted, at_N: Tensor) -> Drafted:
    """Some of the elements."""
    names = ("hidden_NH", "row_N", "label_N", "prev_N", "draft_N", "depth_N", "stream_N")
    return replace(drafted, **{name: getattr(drafted, name)[at_N] for name in names})


def results(objective: Objective, drafted: Drafted, model: Model) -> dict[str, Tensor]:
    """Sums and counts, metrics, the batch's own loss and its gradients."""
    drafted = replace(drafted, hidden_NH=model.grid_RKH[drafted.draft_N, drafted.depth_N - 1])
    terms, metrics = objective.terms(drafted, model.student, model, DEPTH)
    loss = torch.stack([term.sum / term.count.clamp(min=1e-9) for term in terms.values()]).sum()
    grads = torch.autograd.grad(loss, model.leaves, materialize_grads=True, allow_unused=True)
    found = {"loss": loss.detach()} | metrics | dict(zip("abc", grads, strict=True))
    for name, term in terms.items():
        found |= {f"{name} sum": term.sum.detach(), f"{name} count": term.count}
    return found


# ---- a loop over elements ----------------------------------------------------------------------------------------------


def distance(divergence: Divergence, log_q_V: Tensor, log_p_V: Tensor, label: int) -> Tensor:
    """From its definition, fp64."""
    p_V, q_V = log_p_V.exp(), log_q_V.exp()
    match divergence:
        case ForwardKL():
            return (p_V * (log_p_V - log_q_V)).sum()
        case ReverseKL():
            return (q_V * (log_q_V - log_p_V)).sum()
        case HardCrossEntropy():
            return -log_q_V[label]
        case K3():
            gap = log_p_V[label] - log_q_V[label]
            return (gap.exp() - gap - 1).clamp(max=10)
        case BernoulliKL():
            p, q = (log_V[label].clamp(min=-10).exp() for log_V in (log_p_V, log_q_V))
            return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).clamp(max=10)
    raise AssertionError(divergence)


def place_weight(positions: PositionWeight, branch: dict[int, tuple[float, bool]], k: int) -> float:
    """Weight of depth k of a branch: depth -> (q, right)."""
    q = [branch.get(m, (0.0, False))[0] for m in range(DEPTH + 1)]
    match positions:
        case Uniform():
            return 1.0
        case Decay(base=base):
            return base ** (k - 1)
        case Exponential(gamma=gamma):
            return math.exp((1 - k) / gamma)
        case ValidPrefix(base=base):
            return base ** (k - 1) * all(branch.get(m, (0.0, False))[1] for m in range(1, k))
    smoothing = positions.smoothing if isinstance(positions, DPace) else 0.0
    return sum(math.prod((1 - smoothing) * q[i] + smoothing for i in range(1, m + 1)) for m in branch if m >= k)


def by_hand(objective: OnPolicyDistillation, drafted: Drafted, model: Model) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """The loss of fp64 copies of the model's leaves (they stand in `model.doubles`), and the sum and Z of either stream."""
    model.doubles = [leaf.detach().double().requires_grad_() for leaf in model.leaves]
    student_VH, bias_V, grid_RKH = model.doubles
    elements = []
    for n in range(len(drafted.label_N)):
        stream, draft, k, label = (int(x[n]) for x in (drafted.stream_N, drafted.draft_N, drafted.depth_N, drafted.label_N))
        logits_V = student_VH @ grid_RKH[draft, k - 1] + bias_V[drafted.prev_N[n]] * student_VH[:, 0]
        log_p_V = (model.teacher_VD.double() @ drafted.teacher_MD[drafted.row_N[n]].double()).log_softmax(-1)
        elements.append((stream, draft, k, IDS_V.tolist().index(label), logits_V.log_softmax(-1), log_p_V))

    def said(stream: int, draft: int) -> dict[int, tuple[float, bool]]:
        own = [e for e in elements if e[:2] == (stream, draft)]
        return {k: (float(log_q_V[label].exp().detach()), int(log_q_V.argmax()) == label) for _, _, k, label, log_q_V, _ in own}

    sums = {}
    for number, name in enumerate(("accepted", "rejected")):
        positions, total, weight_sum, seen = (
            getattr(objective, f"{name}_positions"),
            torch.zeros((), dtype=torch.float64),
            0.0,
            set(),
        )
        for stream, draft, k, label, log_q_V, log_p_V in elements:
            if stream == number:
                branch = said(0, draft) | (
                    said(1, draft) if number else {}
                )  # what was drafted goes on where the text was corrected
                weight = place_weight(positions, branch, k)
                own = sum(d.weight * distance(d, log_q_V, log_p_V, label) for d in getattr(objective, name))
                total, weight_sum = total + weight * own, weight_sum + weight
                seen.add(draft)
        sums[name] = total, weight_sum if positions.known else float(len(seen))
    a, r = objective.accepted_weight, objective.rejected_weight
    (sum_a, z_a), (sum_r, z_r) = sums["accepted"], sums["rejected"]
    pooled = (a * sum_a + r * sum_r) / (a * z_a + r * z_r)
    loss = pooled if objective.reduction == "pooled" else (a * sum_a / z_a + r * sum_r / z_r) / (a + r)
    return loss, {name: (float(total.detach()), z) for name, (total, z) in sums.items()}
