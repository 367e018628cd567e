"""On-policy distillation against a loop over rounds in fp64; cut into micro-batches and chunks, perturbed, and compiled."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from drafttrain.divergences import JSD, K3, BernoulliKL, Divergence, ForwardKL, HardCrossEntropy, ReverseKL, SmoothL1
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.position_weights import Decay, DPace, Exponential, PositionWeight, Streak, Uniform, ValidPrefix
from drafttrain.replay import ReplayLayout
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.tasks.window import Meter
from drafttrain.types import Drafted, Layout

WORDS, WIDTH, DEPTH = 17, 6, 4
IDS_V = torch.arange(0, WORDS, 2)
ROUNDS = [(0, 1, 4), (4, 4, 4), (2, 3, 4), (1, 2, 2), (3, 4, 4), (0, 1, 3), (2, 1, 1), (1, 2, 4), (4, 5, 4), (0, 1, 1), (2, 3, 4)]
"""(accepted, kept, within) of each round: none and all accepted, cut by the limit among the accepted drafts, cut behind the rejected one."""
NOTHING = torch.zeros(0, dtype=torch.long)
LISTS = {
    "paper": {},
    "code": {"accepted": [BernoulliKL()], "rejected": [K3()]},
    "mixed": {
        "accepted": [ForwardKL(weight=0.9), ReverseKL(weight=0.1)],
        "rejected": [HardCrossEntropy(weight=0.3), ForwardKL()],
    },
}
WEIGHTS = [Uniform(), Decay(0.6), Exponential(2.0), DPace(), Streak(), ValidPrefix(0.9)]
POSITIONS = [(own, Decay()) for own in WEIGHTS] + [(Uniform(), own) for own in WEIGHTS] + [(DPace(0.2), DPace(0.7))]


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


def results(objective: OnPolicyDistillation, drafted: Drafted, model: Model) -> dict[str, Tensor]:
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


CASES = [
    pytest.param(reduction, accepted, rejected, weights, id=f"{reduction}-{accepted}-{rejected}-{weights}")
    for reduction in ("streams", "pooled")
    for accepted, rejected in POSITIONS
    for weights in ((1.0, 1.0), (2.0, 0.3), (1.0, 0.0), (0.0, 0.7))
    if (weights[0] or rejected.known)
    and (
        reduction == "streams" or all(own.known or not weight for own, weight in zip((accepted, rejected), weights, strict=True))
    )
]


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize(("reduction", "accepted", "rejected", "weights"), CASES)
def test_the_loss_equals_a_loop_over_elements(lists, reduction, accepted, rejected, weights):
    objective = OnPolicyDistillation(
        **LISTS[lists], accepted_positions=accepted, rejected_positions=rejected,
        accepted_weight=weights[0], rejected_weight=weights[1], reduction=reduction,
    )  # fmt: skip
    drafted, model = replayed(ROUNDS)
    found, (loss, sums) = results(objective, drafted, model), by_hand(objective, drafted, model)
    assert float(found["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, wanted in zip("abc", torch.autograd.grad(loss, model.doubles), strict=True):
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=1e-6)
    counts = objective.counts(layout_of(drafted), DEPTH)
    whole = {"pooled": sum(weight * z for weight, (_, z) in zip(weights, sums.values(), strict=True))}
    for name, z in (
        whole if reduction == "pooled" else {name: z for name, (_, z) in sums.items() if f"{name} sum" in found}
    ).items():
        assert [counts[name], float(found[f"{name} count"])] == pytest.approx([z, z], rel=1e-5)
    for name, weight in zip(sums, weights, strict=True):
        assert (f"loss_{name}" in found) == (name in counts) == bool(weight)
        if weight:
            assert [float(found[f"loss_{name}"]), counts[name]] == pytest.approx(list(sums[name]), rel=1e-5)


def test_metrics_are_sums_over_the_count_that_they_end_in():
    objective, (drafted, model) = OnPolicyDistillation(**LISTS["mixed"]), replayed(ROUNDS)
    found, counts = results(objective, drafted, model), objective.counts(layout_of(drafted), DEPTH)
    log_q_NV = model.student(drafted.hidden_NH, drafted.prev_N).log_softmax(-1).detach()
    log_p_NV = model.logits(drafted.teacher_MD[drafted.row_N]).log_softmax(-1)
    label_N = torch.searchsorted(IDS_V, drafted.label_N)
    for stream, name in enumerate(("accepted", "rejected")):
        for k in range(1, DEPTH + 1):
            mine = ((drafted.stream_N == stream) & (drafted.depth_N == k)).nonzero()[:, 0]
            own = [[distance(d, log_q_NV[n], log_p_NV[n], int(label_N[n])) for n in mine] for d in getattr(objective, name)]
            wanted = {d.name: sum(map(float, values)) for d, values in zip(getattr(objective, name), own, strict=True)}
            wanted["loss"] = sum(d.weight * wanted[d.name] for d in getattr(objective, name))
            wanted["top1"] = float((log_q_NV.argmax(-1) == label_N)[mine].sum())
            for title, value in wanted.items():
                assert float(found[f"{title}_{name}_depth_{k}"]) == pytest.approx(value, rel=1e-4, abs=1e-5)
            assert counts[f"{name}_depth_{k}"] == len(mine)
    assert all(counts[f"depth_{k}"] == float((drafted.depth_N == k).sum()) for k in range(1, DEPTH + 1))
    meter = Meter()
    meter.add({"loss": found["loss"]} | {name: value for name, value in found.items() if "_" in name})
    meter.close_window(counts | {"tokens": 9.0})
    means = meter.read()
    assert means["loss_rejected"] == pytest.approx(float(found["loss_rejected"]) / counts["rejected"])
    assert means["top1_accepted_depth_2"] == pytest.approx(float(found["top1_accepted_depth_2"]) / counts["accepted_depth_2"])
    assert 0 < means["loss_accepted_depth_1"] != pytest.approx(float(found["loss_accepted_depth_1"]) / counts["depth_1"])


# ---- the same loss in other ways ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("reduction", ["streams", "pooled"])
@pytest.mark.parametrize("lists", LISTS)
def test_chunked_equals_plain(lists, reduction, chunk):
    positions = {"accepted_positions": DPace(), "rejected_positions": ValidPrefix()} if reduction == "streams" else {}
    plain, chunked = (
        results(OnPolicyDistillation(**LISTS[lists], **positions, reduction=reduction, chunk=c), *replayed(ROUNDS))
        for c in (0, chunk)
    )
    for name, value in plain.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("lists", LISTS)
def test_elements_may_stand_in_any_order_and_are_scored_once(lists, monkeypatch):
    objective, found, spoken = OnPolicyDistillation(**LISTS[lists], rejected_positions=DPace()), [], []
    speak = Model.student
    monkeypatch.setattr(
        Model, "student", lambda own, hidden_NH, prev_N: spoken.append(len(prev_N)) or speak(own, hidden_NH, prev_N)
    )
    for shuffle in (False, True):
        drafted, model = replayed(ROUNDS)
        N = len(drafted.label_N)
        order_N = torch.randperm(N, generator=torch.Generator().manual_seed(1)) if shuffle else torch.arange(N)
        found.append(results(objective, some(drafted, order_N), model))
    assert spoken == [N, N]
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {**LISTS["code"], "reduction": "pooled"},
        {"rejected_weight": 0.25, "accepted_positions": DPace(), "rejected_positions": Streak()},
    ],
    ids=["streams", "pooled", "drafts"],
)
def test_eight_micro_batches_of_one_give_the_gradient_of_one_of_eight(arguments, chunk):
    """Pieces are ragged, one has no rejected element, and one nothing at all."""
    g = torch.Generator().manual_seed(3)
    rounds = [(r, r + 1, DEPTH) for r in torch.randint(DEPTH + 1, (40,), generator=g).tolist()]
    rounds[:2] = [(4, 5, 4), (4, 5, 4)]
    edges = [0, 2, 3, 9, 9, 15, 26, 31, 40]
    drafted, model = replayed(rounds)
    objective = OnPolicyDistillation(**arguments, chunk=chunk)

    def gradient(pieces: list[Tensor]) -> Tensor:
        parts = [some(drafted, at_N) for at_N in pieces]
        counts = [objective.counts(layout_of(part), DEPTH) for part in parts]
        window = {name: sum(count[name] for count in counts) for name in counts[0]}
        total = [torch.zeros_like(leaf) for leaf in model.leaves]
        for part in parts:
            terms, _ = objective.terms(part, model.student, model, DEPTH)
            loss = torch.stack([term.sum / window[name] for name, term in terms.items()]).sum()
            grads = torch.autograd.grad(loss, model.leaves, retain_graph=True)
            total = [a + b for a, b in zip(total, grads, strict=True)]
        return torch.cat([x.flatten() for x in total])

    round_N = drafted.draft_N // 2
    cut = gradient([((a <= round_N) & (round_N < b)).nonzero()[:, 0] for a, b in itertools.pairwise(edges)])
    whole = gradient([torch.arange(len(round_N))])
    assert float((cut - whole).norm() / whole.norm()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {**LISTS["code"], "reduction": "pooled", "chunk": 40},
        {"accepted_positions": DPace(), "rejected_positions": ValidPrefix()},
    ],
    ids=["paper", "code", "drafts"],
)
def test_compiled_equals_plain_in_one_graph(arguments):
    """However many elements either stream has, nothing is compiled twice and nothing leaves the graph."""
    objective, g = OnPolicyDistillation(**arguments), torch.Generator().manual_seed(5)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(objective.terms, fullgraph=True)

    class Compiled:
        @staticmethod
        def terms(drafted, *more):
            for name in ("hidden_NH", "row_N", "label_N", "prev_N", "draft_N", "depth_N", "stream_N"):
                torch._dynamo.maybe_mark_dynamic(getattr(drafted, name), 0)
            return compiled(drafted, *more)

    _, model = replayed(ROUNDS)
    for seed in range(3):
        rounds = [(r, r + 1, DEPTH) for r in torch.randint(DEPTH + 1, (11,), generator=g).tolist()]
        drafted, _ = replayed(rounds, seed)
        assert 40 < len(drafted.label_N) <= 80
        plain, found = (results(one, drafted, model) for one in (objective, Compiled))
        for name, value in plain.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("chunk", [0, 7])
def test_the_host_never_waits_for_the_device(chunk):
    drafted, model = replayed(ROUNDS)
    for name in ("teacher_VD", "student_VH", "bias_V", "grid_RKH"):
        value = getattr(model, name)
        setattr(model, name, value.detach().cuda().requires_grad_(value.requires_grad))
    columns = {name: value.cuda() for name, value in vars(drafted).items() if isinstance(value, Tensor)}
    drafted = replace(drafted, **columns)
    objective = OnPolicyDistillation([ForwardKL(), BernoulliKL()], [ReverseKL(), K3()], DPace(), ValidPrefix(), chunk=chunk)
    results(objective, drafted, model)  # libraries wait when they are first used
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(objective, drafted, model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- what depends on what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["label", "teacher"])
@pytest.mark.parametrize("lists", LISTS)
def test_an_element_changes_the_term_of_its_own_stream_alone(lists, changed):
    objective, (drafted, model) = OnPolicyDistillation(**LISTS[lists]), replayed(ROUNDS)
    before = results(objective, drafted, model)
    moved = set()
    for n in range(len(drafted.label_N)):
        if changed == "label":
            label_N = drafted.label_N.clone()
            label_N[n] = IDS_V[(IDS_V.tolist().index(int(label_N[n])) + 1) % len(IDS_V)]
            other = replace(drafted, label_N=label_N)
        else:  # a row of its own: depth r+1 of a round has one row in both streams
            row_N, M = drafted.row_N.clone(), len(drafted.teacher_MD)
            row_N[n] = M
            other = replace(drafted, row_N=row_N, teacher_MD=torch.cat([drafted.teacher_MD, torch.randn(1, WIDTH)]))
        after = results(objective, other, model)
        own, foreign = ("accepted", "rejected") if drafted.stream_N[n] == 0 else ("rejected", "accepted")
        torch.testing.assert_close(after[f"{foreign} sum"], before[f"{foreign} sum"], rtol=1e-6, atol=0)
        moved |= {own} if abs(float(after[f"{own} sum"] - before[f"{own} sum"])) > 1e-3 else set()
    asked = {name for name in ("accepted", "rejected") if changed == "teacher" or lists != "paper"}
    assert moved >= asked - ({"accepted"} if (lists, changed) == ("mixed", "label") else set())


@pytest.mark.parametrize(("a", "r"), [(1.0, 1.0), (3.0, 0.5), (0.2, 2.0), (1.0, 0.0)])
def test_the_gradients_of_the_streams_stand_in_the_ratio_of_their_weights(a, r):
    """A state before the first rejection belongs to the accepted stream alone, one behind it to the rejected."""
    drafted, model = replayed(ROUNDS)
    equal, found = (
        results(OnPolicyDistillation(accepted_weight=x, rejected_weight=y), drafted, model)["c"] for x, y in ((1.0, 1.0), (a, r))
    )
    rejected_RK = torch.zeros(equal.shape[:2])
    rejected_RK[drafted.draft_N, drafted.depth_N - 1] = 4.0 * drafted.stream_N
    accepted_RK = torch.zeros_like(rejected_RK).index_put(
        (drafted.draft_N, drafted.depth_N - 1), 1.0 - drafted.stream_N, accumulate=True
    )
    only_a, only_r = (accepted_RK == 1) & (rejected_RK == 0), (accepted_RK == 0) & (rejected_RK == 4)
    assert only_a.any() and only_r.any()
    torch.testing.assert_close(found[only_a], equal[only_a] * 2 * a / (a + r))
    torch.testing.assert_close(found[only_r], equal[only_r] * 2 * r / (a + r))


@pytest.mark.parametrize("reduction", ["streams", "pooled"])
@pytest.mark.parametrize("chunk", [0, 4])
def test_no_elements_give_no_loss_and_no_gradient(reduction, chunk):
    drafted, model = replayed([(2, 3, 4)])
    objective, none = OnPolicyDistillation(reduction=reduction, chunk=chunk), some(drafted, NOTHING)
    assert not any(objective.counts(layout_of(none), DEPTH).values())
    assert not any(value.any() for value in results(objective, none, model).values())


def test_one_stream_of_the_text_is_distillation():
    drafted, model = replayed(ROUNDS)
    text = some(drafted, (drafted.stream_N == 0).nonzero()[:, 0])
    for streams in (text.stream_N, None):
        objective = OnPolicyDistillation(accepted_positions=Decay(), rejected_weight=0.0)
        [found], [wanted] = (
            one.terms(replace(text, stream_N=streams), model.student, model, DEPTH)[0].values()
            for one in (objective, Distillation([ForwardKL()], Decay(), "weights"))
        )
        torch.testing.assert_close([found.sum, found.count], [wanted.sum, wanted.count])


def test_the_jsd_of_online_speculative_decodings_code_is_two_weighted_divergences():
    """distill_trainer.py of OSD (arXiv 2310.07177) calls 0.9 KL(p||q) + 0.1 KL(q||p) jsd, which no JSD is."""
    drafted, model = replayed(ROUNDS)
    log_q_NV = model.student(drafted.hidden_NH, drafted.prev_N).detach().double().log_softmax(-1)
    log_p_NV = model.logits(drafted.teacher_MD[drafted.row_N]).double().log_softmax(-1)
    forward_N = (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)
    wanted_N = 0.9 * forward_N + 0.1 * (log_q_NV.exp() * (log_q_NV - log_p_NV)).sum(-1)
    lists = [ForwardKL(weight=0.9), ReverseKL(weight=0.1)]
    found = OnPolicyDistillation(lists, lists, rejected_positions=Uniform(), reduction="pooled")
    other = replace(found, accepted=[JSD(0.1)], rejected=[JSD(0.1)])
    assert float(results(found, drafted, model)["loss"]) == pytest.approx(float(wanted_N.mean()), rel=1e-5)
    assert float(results(other, drafted, model)["loss"]) != pytest.approx(float(wanted_N.mean()), rel=0.1)


# ---- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_layout_without_rounds_is_refused():
    layout = Layout(*[NOTHING] * 9)
    with pytest.raises(
        UserError, match="objective.class_path is OnPolicyDistillation, but the training texts have no record of what"
    ):
        OnPolicyDistillation().counts(layout, DEPTH)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"accepted": []}, "accepted is empty, but must name at least one"),
        ({"rejected": []}, "rejected is empty, but must name at least one"),
        ({"rejected": [K3(), SmoothL1(), K3(weight=0.1)]}, "rejected names K3 twice"),
        ({"accepted_weight": -1.0}, "accepted_weight is -1.0, but must be 0 "),
        ({"rejected_weight": math.nan}, "rejected_weight is nan, but must be 0 "),
        ({"rejected_weight": math.inf}, "rejected_weight is inf"),
        ({"accepted_weight": 0.0, "rejected_weight": 0.0}, "accepted_weight and rejected_weight are both 0"),
        ({"reduction": "depths"}, "reduction is 'depths', but must be one of streams, pooled"),
        ({"reduction": "pooled", "accepted_positions": DPace()}, "reduction is pooled, but those of DPace are not known before"),
        ({"reduction": "pooled", "rejected_positions": Streak()}, "reduction is pooled, but those of Streak are not known"),
        (
            {"accepted_weight": 0.0, "rejected_positions": Streak()},
            "rejected_positions is Streak, which follows a draft from its first",
        ),
        ({"chunk": -2}, "chunk is -2, but must be 0"),
    ],
)
def test_an_objective_cannot_hold_nonsense(arguments, sentence):
    with pytest.raises(UserError, match=f"objective.init_args.{sentence}"):
        OnPolicyDistillation(**arguments)
