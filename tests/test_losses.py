"""Distillation against loops, chunked against plain, and what a chunk may hold."""

import itertools
from dataclasses import replace

import pytest
import torch
from tiny import waiting_forbidden
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drafttrain.divergences import (
    JSD,
    K3,
    BernoulliKL,
    ForwardKL,
    HardCrossEntropy,
    LKAlpha,
    LKLambda,
    ReverseKL,
    Scored,
    SmoothL1,
    SoftCrossEntropy,
    Taught,
    TopKCrossEntropy,
    TotalVariation,
)
from drafttrain.errors import UserError
from drafttrain.losses import REDUCTIONS, Distillation
from drafttrain.position_weights import Decay, DPace, Exponential, Guesses, Streak, Uniform, ValidPrefix
from drafttrain.types import Drafted, Layout

WORDS, WIDTH, DEPTH, DRAFTS = 23, 8, 3, 12
SAYABLE = {"full": torch.arange(WORDS), "reduced": torch.arange(0, WORDS, 2)}
EVERY = [
    SoftCrossEntropy(),
    HardCrossEntropy(weight=0.5),
    ReverseKL(weight=0.3),
    JSD(0.3),
    TotalVariation(),
    LKAlpha(weight=0.1),
    LKLambda(),
    TopKCrossEntropy(3),
    SmoothL1(weight=2.0),
    ForwardKL(),
    BernoulliKL(),
    K3(),
]


class Linear:
    """A teacher and a student over the same words; both remember how many rows they were asked for at once."""

    def __init__(self, ids_V: Tensor):
        g = torch.Generator().manual_seed(5)
        self.ids_V, self.taught, self.spoken = ids_V, [], []
        self.teacher_VD = torch.randn(WORDS, WIDTH, generator=g)
        self.student_VH = torch.randn(len(ids_V), WIDTH, generator=g).requires_grad_()
        self.bias_V = torch.randn(WORDS, generator=g).requires_grad_()

    def logits(self, final_ND: Tensor) -> Tensor:
        self.taught.append(len(final_ND))
        return final_ND @ self.teacher_VD[self.ids_V].T

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        return logits_NV.logsumexp(-1) - (final_ND @ self.teacher_VD.T).logsumexp(-1)

    def student(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        self.spoken.append(len(hidden_NH))
        return hidden_NH @ self.student_VH.T + self.bias_V[prev_N][:, None] * self.student_VH[:, 0]


def drafted_of(ids_V: Tensor, seed: int = 0, share: float = 0.7) -> Drafted:
    """Elements of some drafts, ordered by depth; some are left out, drafts 3 and 7 are padding."""
    g = torch.Generator().manual_seed(seed)
    places = [
        (r, k) for k in range(1, DEPTH + 1) for r in range(DRAFTS) if r not in (3, 7) and torch.rand((), generator=g) < share
    ]
    draft_N, depth_N = torch.tensor(places, dtype=torch.long).reshape(-1, 2).T
    N, M = len(places), 9
    return Drafted(
        hidden_NH=torch.randn(N, WIDTH, generator=g).requires_grad_(),
        teacher_MD=torch.randn(M, WIDTH, generator=g),
        row_N=torch.randint(M, (N,), generator=g),
        label_N=ids_V[torch.randint(len(ids_V), (N,), generator=g)],
        prev_N=torch.randint(WORDS, (N,), generator=g),
        draft_N=draft_N,
        drafts=DRAFTS,
        depth_N=depth_N,
        vocabulary_V=ids_V,
    )


def layout_of(drafted: Drafted) -> Layout:
    """Only what counts are made of."""
    nothing = torch.zeros(0, dtype=torch.long)
    return Layout(nothing, drafted.depth_N, nothing, nothing, drafted.draft_N, nothing, nothing, nothing, nothing)


@pytest.fixture(params=SAYABLE)
def ids_V(request):
    return SAYABLE[request.param]


@pytest.mark.parametrize(
    ("reduction", "positions"),
    [
        (reduction, positions)
        for reduction, positions in itertools.product(
            REDUCTIONS, [Uniform(), Decay(0.6), Exponential(2.0), DPace(), Streak(), ValidPrefix()]
        )
        if positions.known or reduction != "weights"
    ],
    ids=str,
)
def test_terms_equal_a_loop_over_elements(ids_V, reduction, positions):
    drafted, model = drafted_of(ids_V), Linear(ids_V)
    objective = Distillation([SoftCrossEntropy(), SmoothL1(weight=3.0)], positions, reduction)
    terms, metrics = objective.terms(drafted, model.student, model, DEPTH)
    wanted = {name: [0.0, 0.0] for name in terms}
    logged = dict.fromkeys(metrics, 0.0)
    said = model.student(drafted.hidden_NH, drafted.prev_N).detach()
    label_N = torch.tensor([ids_V.tolist().index(label) for label in drafted.label_N.tolist()])
    right_N = said.argmax(-1) == label_N
    q_N = said.softmax(-1)[torch.arange(len(said)), label_N]
    weight_N = positions.of_guesses(Guesses(drafted.depth_N, drafted.draft_N, DRAFTS, DEPTH, q_N, right_N))
    seen = set()
    for n in range(len(said)):
        k, p = int(drafted.depth_N[n]), model.logits(drafted.teacher_MD[drafted.row_N[n]][None])[0].softmax(-1)
        soft = float(-(p * said[n].log_softmax(-1)).sum())
        gap = (drafted.hidden_NH[n].detach() - drafted.teacher_MD[drafted.row_N[n]]).abs()
        smooth = float(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
        name, new = {
            "depths": (f"depth_{k}", 1.0),
            "drafts": ("drafts", float(int(drafted.draft_N[n]) not in seen)),
            "weights": ("weights", float(weight_N[n])),
        }[reduction]
        seen.add(int(drafted.draft_N[n]))
        wanted[name][0] += float(weight_N[n]) * (soft + 3 * smooth)
        wanted[name][1] += new
        logged[f"loss_depth_{k}"] += soft + 3 * smooth
        logged[f"soft_cross_entropy_depth_{k}"] += soft
        logged[f"smooth_l1_depth_{k}"] += smooth
        logged[f"top1_depth_{k}"] += float(right_N[n])
    counts = objective.counts(layout_of(drafted), DEPTH)
    for name, term in terms.items():
        assert [float(term.sum.detach()), float(term.count)] == pytest.approx(wanted[name], rel=1e-4)
        assert counts[name] == pytest.approx(wanted[name][1], rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(logged, rel=1e-4)
    assert {name: counts[name] for name in counts if name.startswith("depth_")} == {
        f"depth_{k}": float((drafted.depth_N == k).sum()) for k in range(1, DEPTH + 1)
    }


def results(objective: Distillation, drafted: Drafted, model: Linear) -> dict[str, Tensor]:
    """Sums, metrics, and the gradients of the batch's own loss."""
    leaves = drafted.hidden_NH, model.student_VH, model.bias_V
    terms, metrics = objective.terms(drafted, model.student, model, DEPTH)
    loss = torch.stack([term.sum / term.count.clamp(min=1) for term in terms.values()]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return {name: term.sum.detach() for name, term in terms.items()} | metrics | dict(zip("abc", grads, strict=True))


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("positions", [DPace(), Streak(), ValidPrefix(0.9)], ids=repr)
def test_no_gradient_flows_through_a_weight(positions, chunk):
    ids_V = SAYABLE["reduced"]
    drafted, model = drafted_of(ids_V), Linear(ids_V)
    terms, _ = Distillation([HardCrossEntropy()], positions, "drafts", chunk).terms(drafted, model.student, model, DEPTH)
    log_q_NV = model.student(drafted.hidden_NH, drafted.prev_N).log_softmax(-1)
    label_N = torch.searchsorted(ids_V, drafted.label_N)
    log_q_N, right_N = log_q_NV[torch.arange(len(label_N)), label_N], log_q_NV.argmax(-1) == label_N
    given = Guesses(drafted.depth_N, drafted.draft_N, DRAFTS, DEPTH, log_q_N.detach().exp(), right_N)
    wanted = -(positions.of_guesses(given) * log_q_N).sum()
    grads = [torch.autograd.grad(value, drafted.hidden_NH)[0] for value in (terms["drafts"].sum, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("divergence", [*EVERY, None], ids=lambda d: type(d).__name__)
def test_chunked_equals_plain(ids_V, divergence, chunk):
    drafted, divergences = drafted_of(ids_V), EVERY if divergence is None else [divergence]
    plain, chunked = (results(Distillation(divergences, DPace(), "drafts", c), drafted, Linear(ids_V)) for c in (0, chunk))
    assert plain.keys() == chunked.keys()
    for name, value in plain.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("positions", [DPace(), Decay(0.5)], ids=repr)
@pytest.mark.parametrize("divergence", EVERY, ids=lambda d: type(d).__name__)
def test_behind_a_frozen_head_a_chunk_teaches_as_much_and_is_computed_once(ids_V, divergence, positions):
    """What an element's weight and divisor are is not known when its gradient is computed; some weights are 0."""
    drafted, model = drafted_of(ids_V), Linear(ids_V)
    model.student_VH.requires_grad_(False), model.bias_V.requires_grad_(False)
    frozen, grads, sums = replace(drafted, frozen_head=True), [], []
    for own, chunk in ((drafted, 0), (frozen, 5)):
        model.spoken.clear()
        terms, metrics = Distillation([divergence], positions, "drafts", chunk).terms(own, model.student, model, DEPTH)
        loss = 3 * terms["drafts"].sum / terms["drafts"].count
        grads.append(torch.autograd.grad(loss, drafted.hidden_NH)[0])
        sums.append({"loss": loss.detach()} | metrics)
        assert sum(model.spoken) == len(drafted.label_N) and max(model.spoken) <= (chunk or 1000)
    assert grads[0].any()
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-7)


def test_of_two_divergences_behind_a_frozen_head_each_keeps_its_own_gradient():
    """Their factors differ, and one gradient for both could not tell them apart."""
    drafted, model = drafted_of(SAYABLE["full"]), Linear(SAYABLE["full"])
    kinds = [SoftCrossEntropy(), HardCrossEntropy(weight=0.5)]
    plain, chunked = (
        results(Distillation(kinds, chunk=chunk), replace(drafted, frozen_head=True), model)["a"] for chunk in (0, 5)
    )
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_elements_give_no_loss_and_no_gradient(reduction, chunk):
    ids_V = SAYABLE["reduced"]
    drafted, objective = drafted_of(ids_V, share=0.0), Distillation(EVERY, reduction=reduction, chunk=chunk)
    assert not any(objective.counts(layout_of(drafted), DEPTH).values())
    assert not any(value.any() for value in results(objective, drafted, Linear(ids_V)).values())


def test_a_chunk_holds_only_its_own_logits_of_either_model():
    """Nobody computes more rows at once, and nothing of a vocabulary's width is kept for the way back."""
    ids_V, kept = SAYABLE["full"], {}
    for chunk in (0, 4):
        drafted, model, kept[chunk] = drafted_of(ids_V), Linear(ids_V), []
        with saved_tensors_hooks(lambda x, sizes=kept[chunk]: sizes.append(x.shape) or x, lambda x: x):
            terms, _ = Distillation(EVERY, chunk=chunk).terms(drafted, model.student, model, DEPTH)
        N = len(drafted.label_N)
        assert max(model.spoken) <= (chunk or N) and max(model.taught) <= (chunk or len(drafted.teacher_MD))
        sum(term.sum for term in terms.values()).backward()
        assert max(model.spoken) <= (chunk or N)
    assert any(shape[-1:] == (WORDS,) and len(shape) == 2 for shape in kept[0])
    assert not any(WORDS in shape for shape in kept[4])


@pytest.mark.parametrize(("fewer", "times"), [(1, 2), (0, 1), (-9, 1)])
def test_logits_are_computed_again_only_where_a_chunk_does_not_hold_all(fewer, times):
    ids_V = SAYABLE["reduced"]
    drafted, model = drafted_of(ids_V), Linear(ids_V)
    N = len(drafted.label_N)
    terms, _ = Distillation(EVERY, chunk=N - fewer).terms(drafted, model.student, model, DEPTH)
    sum(term.sum for term in terms.values()).backward()
    assert sum(model.spoken) == times * N and sum(model.taught) == times * N


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("positions", [Decay(), DPace(), ValidPrefix()], ids=repr)
def test_the_host_never_waits_for_the_device(chunk, positions):
    ids_V = SAYABLE["reduced"]
    drafted, model, device = drafted_of(ids_V), Linear(ids_V), torch.device("cuda")
    columns = {name: value.detach().to(device) for name, value in vars(drafted).items() if isinstance(value, Tensor)}
    drafted = replace(drafted, **columns | {"hidden_NH": columns["hidden_NH"].requires_grad_()})
    for name in ("ids_V", "teacher_VD", "student_VH", "bias_V"):
        value = getattr(model, name)
        setattr(model, name, value.detach().to(device).requires_grad_(value.requires_grad))
    objective = Distillation(EVERY, positions, "drafts", chunk)
    results(objective, drafted, model)  # libraries wait when they are first used
    with waiting_forbidden():
        results(objective, drafted, model)


def test_the_teacher_speaks_once_for_each_row_where_all_is_held():
    ids_V = SAYABLE["reduced"]
    drafted, model = drafted_of(ids_V), Linear(ids_V)
    Distillation(EVERY).terms(drafted, model.student, model, DEPTH)
    assert model.taught == [len(drafted.teacher_MD)]


@pytest.mark.parametrize("divergence", EVERY, ids=lambda d: type(d).__name__)
def test_learning_by_any_divergence_raises_what_the_target_would_accept(divergence):
    """Each divergence is least where drafter and target agree: some steps down it bring them together."""
    ids_V = SAYABLE["full"]
    drafted, model, g = drafted_of(ids_V, share=1.0), Linear(ids_V), torch.Generator().manual_seed(2)
    weight_VH, hidden_NH = torch.randn(WORDS, WIDTH, generator=g).requires_grad_(), drafted.hidden_NH
    if isinstance(divergence, SmoothL1):  # states teach, through the target's own head
        learned, say = hidden_NH, lambda: hidden_NH @ model.teacher_VD.T
    else:
        learned, say = weight_VH, lambda: drafted.teacher_MD[drafted.row_N] @ weight_VH.T
    p_MV = (drafted.teacher_MD @ model.teacher_VD.T).softmax(-1)

    def accepted() -> float:
        return float(torch.minimum(p_MV[drafted.row_N], say().softmax(-1)).sum(-1).mean().detach())

    before, optimizer = accepted(), torch.optim.Adam([learned], lr=0.05)
    label_N = p_MV.argmax(-1)[drafted.row_N]  # what the target says most
    for _ in range(60):
        if isinstance(divergence, K3):  # an estimate over what the drafter draws
            label_N = say().detach().softmax(-1).multinomial(1, generator=g)[:, 0]
        loss = divergence.of(Scored(hidden_NH, say(), label_N, Taught(model, drafted.teacher_MD), drafted.row_N)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert accepted() > before + 0.2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"divergences": []}, "divergences is empty, but must name at least one"),
        ({"divergences": [JSD(0.1), SmoothL1(), JSD(0.2)]}, "divergences names JSD twice"),
        ({"reduction": "mean"}, "reduction is 'mean', but must be one of depths, drafts, weights"),
        ({"reduction": "weights", "positions": DPace()}, "reduction is weights, but those of DPace are not known before"),
        ({"chunk": -1}, "chunk is -1, but must be 0"),
    ],
)
def test_an_objective_cannot_hold_nonsense(arguments, sentence):
    with pytest.raises(UserError, match=f"objective.init_args.{sentence}"):
        Distillation(**arguments)
