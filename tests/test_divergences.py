"""Every divergence against loops over plain numbers: its value, and its gradient by differences of those loops."""

import math

import pytest
import torch
from torch import Tensor

from drafttrain.divergences import (
    JSD,
    K3,
    BernoulliKL,
    Confidence,
    Divergence,
    ForwardKL,
    HardCrossEntropy,
    LKAlpha,
    LKLambda,
    ReverseKL,
    Scored,
    Selection,
    SmoothL1,
    SoftCrossEntropy,
    Taught,
    TopKCrossEntropy,
    TotalVariation,
)
from drafttrain.errors import UserError
from drafttrain.recipe_build import choices

WORDS, WIDTH, ROWS = 9, 5, [0, 2, 2, 1]
SAYABLE = {"full": list(range(WORDS)), "reduced": [0, 2, 3, 5, 6, 8]}
ALL = [
    SoftCrossEntropy(),
    ForwardKL(),
    HardCrossEntropy(),
    ReverseKL(),
    JSD(),
    JSD(0.2),
    TotalVariation(),
    LKAlpha(),
    LKLambda(),
    LKLambda(kl_scale=0.7, kl_decay=3.0),
    TopKCrossEntropy(2),
    TopKCrossEntropy(99),
    SmoothL1(),
    Confidence(),
    Selection(),
    BernoulliKL(),
    K3(),
]


class Choice:
    """A selector among five, which likes a word more or less behind each word."""

    candidates = 5

    def __init__(self):
        self.word_VD = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(8))

    def base_logits(self, hidden_NH: Tensor) -> Tensor:
        raise AssertionError("logits are given")

    def added(self, hidden_NH: Tensor, prev_N: Tensor, token_NC: Tensor) -> Tensor:
        return ((hidden_NH * self.word_VD[prev_N])[:, None] * self.word_VD[token_NC]).sum(-1)


CHOICE, PREV_N = Choice(), torch.tensor([4, 0, 8, 3])


class Table:
    """A teacher whose logits are linear in the row's final state, over a vocabulary of which some words can be said."""

    def __init__(self, ids: list[int]):
        g = torch.Generator().manual_seed(3)
        self.weight_VD, self.ids, self.asked = 2 * torch.randn(WORDS, WIDTH, generator=g), ids, []

    def logits(self, final_ND: Tensor) -> Tensor:
        self.asked.append("logits")
        return (final_ND @ self.weight_VD.T)[:, self.ids]

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        self.asked.append("log_mass")
        return logits_NV.logsumexp(-1) - (final_ND @ self.weight_VD.T).logsumexp(-1)


@pytest.fixture(params=SAYABLE)
def teacher(request):
    return Table(SAYABLE[request.param])


def numbers(teacher: Table):
    """The drafter's states [N, D] and logits [N, V], labels [N], the target's final states [M, D]."""
    g = torch.Generator().manual_seed(1)
    final_MD = torch.randn(3, WIDTH, generator=g)
    hidden_ND = 1.5 * torch.randn(len(ROWS), WIDTH, generator=g)
    logits_NV = 2 * torch.randn(len(ROWS), len(teacher.ids), generator=g)
    return hidden_ND, logits_NV, torch.tensor([1, 0, 4, 1]), final_MD


def softmax(logits: list[float]) -> list[float]:
    top = sum(math.exp(x) for x in logits)
    return [math.exp(x) / top for x in logits]


def by_hand(
    divergence: Divergence, state, logits, label: int, final, teacher: Table, share: float | None, prev: int = 0
) -> float:
    """One element, from its definition. `share` is what has no gradient, LKLambda's w and Confidence's alpha; None computes the former."""
    q = softmax(logits)
    whole = softmax([sum(w * x for w, x in zip(row, final, strict=True)) for row in teacher.weight_VD.tolist()])
    mass = sum(whole[i] for i in teacher.ids)
    p, words = [whole[i] / mass for i in teacher.ids], range(len(teacher.ids))
    alpha = sum(min(whole[i], q[v]) for v, i in enumerate(teacher.ids))

    def kl(a, b):
        return sum(a[v] * math.log(a[v] / b[v]) for v in words)

    match divergence:
        case SoftCrossEntropy():
            return -sum(p[v] * math.log(q[v]) for v in words)
        case ForwardKL():
            return kl(p, q)
        case BernoulliKL():
            a, b = max(p[label], math.exp(-10)), max(q[label], math.exp(-10))
            return min(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)), 10)
        case K3():
            gap = math.log(p[label]) - math.log(q[label])
            return min(math.exp(gap) - gap - 1, 10)
        case HardCrossEntropy():
            return -math.log(q[label])
        case ReverseKL():
            return kl(q, p)
        case JSD(beta=beta):
            m = [beta * p[v] + (1 - beta) * q[v] for v in words]
            return beta * kl(p, m) + (1 - beta) * kl(q, m)
        case TotalVariation():
            return sum(abs(p[v] - q[v]) for v in words) / 2
        case LKAlpha():
            return -math.log(alpha)
        case LKLambda(kl_scale=scale, kl_decay=decay):
            w = scale * math.exp(-decay * alpha) if share is None else share
            return w * kl(p, q) + (1 - w) * (1 - alpha)
        case TopKCrossEntropy(k=k):
            return -sum(p[v] * math.log(q[v]) for v in sorted(words, key=lambda v: -p[v])[:k])
        case Confidence():
            kept = 1 / (1 + math.exp(-sum(state)))
            return -share * math.log(kept) - (1 - share) * math.log(1 - kept)
        case Selection():
            best = sorted(words, key=lambda v: -logits[v])[:5]
            best = best if label in best else [*best[:4], label]
            table = CHOICE.word_VD.tolist()
            added = {v: sum(h * a * b for h, a, b in zip(state, table[prev], table[v], strict=True)) for v in best}
            return -math.log(softmax([logits[v] + added[v] for v in best])[best.index(label)])
        case SmoothL1():
            gaps = [abs(a - b) for a, b in zip(state, final, strict=True)]
            return sum(d * d / 2 if d < 1 else d - 0.5 for d in gaps) / len(gaps)


def share_by_hand(divergence: Divergence, logits, final, teacher: Table) -> float | None:
    if not isinstance(divergence, LKLambda | Confidence):
        return None
    alpha = math.exp(-by_hand(LKAlpha(), None, logits, 0, final, teacher, None))
    if isinstance(divergence, Confidence):
        return alpha
    return divergence.kl_scale * math.exp(-divergence.kl_decay * alpha)


@pytest.mark.parametrize("each", [False, True], ids=["pooled rows", "a row for each"])
@pytest.mark.parametrize("divergence", ALL, ids=repr)
def test_values_and_gradients_equal_loops(divergence, teacher, each):
    hidden_ND, logits_NV, label_N, final_MD = numbers(teacher)
    inputs = hidden_ND.requires_grad_(), logits_NV.requires_grad_()
    row_N = torch.tensor(ROWS)
    taught = Taught(teacher, final_MD[row_N] if each else final_MD)
    extra = {"confidence": hidden_ND.sum(-1)}
    loss_N = divergence.of(Scored(*inputs, label_N, taught, None if each else row_N, PREV_N, extra, CHOICE))
    loss_N.sum().backward()
    for n, row in enumerate(ROWS):
        state, logits, final = hidden_ND[n].tolist(), logits_NV[n].tolist(), final_MD[row].tolist()
        share = share_by_hand(divergence, logits, final, teacher)

        def value(state, logits, final=final, n=n, share=share):
            return by_hand(divergence, state, logits, int(label_N[n]), final, teacher, share, int(PREV_N[n]))

        assert float(loss_N[n].detach()) == pytest.approx(value(state, logits), rel=1e-4, abs=1e-6)
        for tensor, place in zip(inputs, range(2), strict=True):
            grad = torch.zeros_like(tensor[n]) if tensor.grad is None else tensor.grad[n]
            for i in range(len(grad)):
                up, down = ([list(state), list(logits)] for _ in range(2))
                up[place][i] += 1e-6
                down[place][i] -= 1e-6
                assert float(grad[i]) == pytest.approx((value(*up) - value(*down)) / 2e-6, rel=1e-3, abs=1e-5)


def test_confidence_in_the_words_of_the_paper_and_without_a_head():
    """With a full vocabulary alpha is 1 - 0.5 ||p - q||_1; and a drafter that has no confidence is refused."""
    teacher = Table(SAYABLE["full"])
    hidden_ND, logits_NV, label_N, final_MD = numbers(teacher)
    told_N, row_N = torch.tensor([0.3, -1.0, 40.0, 2.0]), torch.tensor(ROWS)
    scored = Scored(hidden_ND, logits_NV, label_N, Taught(teacher, final_MD), row_N, extra={"confidence": told_N})
    gap_N = (teacher.logits(final_MD)[row_N].softmax(-1) - logits_NV.softmax(-1)).abs().sum(-1)
    wanted = torch.nn.BCEWithLogitsLoss(reduction="none")(told_N, 1 - gap_N / 2)
    torch.testing.assert_close(Confidence().of(scored), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(2 * TotalVariation().of(scored), gap_N)
    with pytest.raises(UserError, match="names Confidence, but this drafter has no head"):
        Confidence().of(Scored(hidden_ND, logits_NV, label_N, Taught(teacher, final_MD), row_N))


def test_selection_puts_in_the_label_that_is_missing_and_needs_a_selector():
    """Labels and candidates are as the test of values has them: some labels are among the best, some not."""
    hidden_ND, logits_NV, label_N, final_MD = numbers(Table(SAYABLE["full"]))
    there = [int(label_N[n]) in logits_NV[n].topk(5).indices.tolist() for n in range(len(label_N))]
    assert set(there) == {True, False}
    scored = Scored(hidden_ND, logits_NV, label_N, Taught(Table(SAYABLE["full"]), final_MD), None, PREV_N)
    with pytest.raises(UserError, match="names Selection, but this drafter has no selector"):
        Selection().of(scored)


def test_every_divergence_is_tried_here_and_named_once():
    tried = {type(divergence).__name__: type(divergence).name for divergence in ALL}
    ours = {name for name, cls in choices(Divergence).items() if cls.__module__.startswith("drafttrain.")}
    assert tried.keys() == ours and len(set(tried.values())) == len(tried)


@pytest.mark.parametrize(
    ("divergence", "asked"),
    [
        (HardCrossEntropy(), []),
        (SmoothL1(), []),
        (SoftCrossEntropy(), ["logits"]),
        (TopKCrossEntropy(), ["logits"]),
        (LKLambda(), ["log_mass", "logits"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_nobody_asks_for_is_not_computed(divergence, asked):
    teacher = Table(SAYABLE["reduced"])
    hidden_ND, logits_NV, label_N, final_MD = numbers(teacher)
    divergence.of(Scored(hidden_ND, logits_NV, label_N, Taught(teacher, final_MD), torch.tensor(ROWS)))
    assert sorted(teacher.asked) == asked


def test_a_draft_that_is_never_accepted_has_a_finite_loss_and_gradient():
    """alpha of e^-200 is nothing in fp32; its logarithm and the way out are not."""
    logits_NV = torch.tensor([[200.0, 0.0]], requires_grad=True)
    teacher = Table([0, 1])
    teacher.logits = lambda final_ND: torch.tensor([[-200.0, 0.0]])
    teacher.log_mass = lambda final_ND, logits: torch.zeros(1)
    taught = Taught(teacher, torch.zeros(1, WIDTH))
    for divergence in (
        LKAlpha(),
        LKLambda(),
        JSD(),
        ReverseKL(),
        TotalVariation(),
        SoftCrossEntropy(),
        ForwardKL(),
        BernoulliKL(),
        K3(),
    ):
        [loss] = divergence.of(Scored(torch.zeros(1, WIDTH), logits_NV, torch.tensor([0]), taught, None))
        (gradient,) = torch.autograd.grad(loss, logits_NV)
        assert loss.isfinite() and gradient.isfinite().all(), divergence
        if isinstance(divergence, LKAlpha):
            assert float(loss.detach()) == pytest.approx(200 - math.log(2), rel=1e-4) and float(gradient[0, 0]) > 0.4


class Fixed:
    """A teacher of these logits."""

    def __init__(self, logits_MV: Tensor):
        self.logits_MV = logits_MV

    def logits(self, final_ND: Tensor) -> Tensor:
        return self.logits_MV


def of_labels(divergence: Divergence, logits_NV: Tensor, teacher_NV: Tensor, label_N: Tensor) -> Tensor:
    """[N]: a divergence that asks for logits and labels alone."""
    N = len(label_N)
    return divergence.of(Scored(torch.zeros(N, 1), logits_NV, label_N, Taught(Fixed(teacher_NV), torch.zeros(N, 1)), None))


def test_the_mean_of_k3_over_what_the_drafter_draws_is_the_reverse_kl():
    """Every word of a small vocabulary as the label, weighed by q; that of BernoulliKL is no such thing, being 0 where p = q at the label alone."""
    g = torch.Generator().manual_seed(4)
    logits_V, teacher_V = torch.randn(2, 6, generator=g)
    log_q_V, log_p_V = logits_V.double().log_softmax(-1), teacher_V.double().log_softmax(-1)
    found_V = of_labels(K3(), logits_V.expand(6, 6), teacher_V.expand(6, 6), torch.arange(6)).double()
    assert float((log_q_V.exp() * found_V).sum()) == pytest.approx(float((log_q_V.exp() * (log_q_V - log_p_V)).sum()), rel=1e-5)
    same_V = of_labels(BernoulliKL(), logits_V.expand(6, 6), logits_V.expand(6, 6), torch.arange(6))
    torch.testing.assert_close(same_V, torch.zeros(6), atol=1e-6, rtol=0)


EDGES = [-300.0, -30.0, -12.0, -9.0, -2.0, 0.0, 2.0, 9.0, 30.0, 300.0]
"""Logit of the label above that of two other words: p and q from e^-300 to 1 - 2 e^-300."""


@pytest.mark.parametrize("divergence", [BernoulliKL(), K3()], ids=repr)
def test_estimators_have_finite_values_and_right_gradients_where_p_and_q_are_0_and_1(divergence):
    """Against finite differences in fp64 within the bounds, and 0 beyond; fp32 agrees with fp64."""
    at = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES))
    teacher_NV = torch.nn.functional.pad(at[:, :1], (0, 2))
    label_N = torch.zeros(len(at), dtype=torch.long)
    found = {}
    for dtype in (torch.float32, torch.float64):
        logits_NV = torch.nn.functional.pad(at[:, 1:], (0, 2)).to(dtype).requires_grad_()
        loss_N = of_labels(divergence, logits_NV, teacher_NV, label_N)
        found[dtype] = loss_N.detach().double(), torch.autograd.grad(loss_N.sum(), logits_NV)[0].double()
        assert all(x.isfinite().all() for x in found[dtype]) and loss_N.max() <= 10 and loss_N.min() > -1e-6
    for narrow, wide in zip(*found.values(), strict=True):
        torch.testing.assert_close(narrow, wide, atol=2e-5, rtol=1e-4)
    logits_NV, step = logits_NV.detach(), 1e-6
    for v in range(3):
        up_N, down_N = (
            of_labels(divergence, logits_NV + sign * step * torch.eye(3, dtype=logits_NV.dtype)[v], teacher_NV, label_N)
            for sign in (1, -1)
        )
        torch.testing.assert_close(found[torch.float64][1][:, v], (up_N - down_N) / (2 * step), atol=1e-5, rtol=1e-4)
    assert (found[torch.float64][1][loss_N.detach() == 10] == 0).all() and (loss_N.detach() == 10).any()


@pytest.mark.parametrize("teacher", ["full"], indirect=True)
def test_forward_kl_has_the_gradient_of_soft_cross_entropy_and_is_0_where_they_agree(teacher):
    hidden_ND, logits_NV, label_N, final_MD = numbers(teacher)
    logits_NV.requires_grad_()
    taught, row_N = Taught(teacher, final_MD), torch.tensor(ROWS)
    grads = [
        torch.autograd.grad(own.of(Scored(hidden_ND, logits_NV, label_N, taught, row_N)).sum(), logits_NV)[0]
        for own in (ForwardKL(), SoftCrossEntropy())
    ]
    assert torch.equal(*grads)
    same = Scored(hidden_ND, taught.logits_MV[row_N], label_N, taught, row_N)
    torch.testing.assert_close(ForwardKL().of(same), torch.zeros(len(ROWS)), atol=2e-6, rtol=0)


def test_states_of_another_width_are_refused():
    teacher = Table(SAYABLE["full"])
    _, logits_NV, label_N, final_MD = numbers(teacher)
    scored = Scored(torch.zeros(len(ROWS), WIDTH + 1), logits_NV, label_N, Taught(teacher, final_MD), torch.tensor(ROWS))
    with pytest.raises(UserError, match="SmoothL1 compares the drafter's states, 6 wide, with the target's, 5 wide"):
        SmoothL1().of(scored)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: JSD(1.0), "beta of JSD is 1.0, but must be above 0 and below 1"),
        (lambda: JSD(0.0), "beta of JSD is 0.0"),
        (lambda: TopKCrossEntropy(0), "k of TopKCrossEntropy is 0"),
        (lambda: LKLambda(kl_scale=1.5), "kl_scale of LKLambda is 1.5"),
        (lambda: LKLambda(kl_decay=-1.0), "kl_decay of LKLambda is -1.0"),
        (lambda: SmoothL1(weight=0.0), "weight of SmoothL1 is 0.0, but must be a number above 0; leave the divergence out"),
        (lambda: ReverseKL(weight=math.nan), "weight of ReverseKL is nan"),
    ],
)
def test_a_divergence_cannot_hold_nonsense(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


def test_what_is_picked_has_the_gradient_of_a_gather():
    g = torch.Generator().manual_seed(0)
    logits, label, upstream = torch.randn(6, 9, generator=g), torch.randint(0, 9, (6,), generator=g), torch.randn(6, generator=g)
    wanted, found = (logits.clone().requires_grad_() for _ in range(2))
    (wanted.gather(1, label[:, None])[:, 0] * upstream).sum().backward()
    picked = Scored(torch.empty(6, 0), found, label, None, None).log_q_label_N + found.logsumexp(-1)
    (picked * upstream).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.slow
def test_compiled_hard_cross_entropy_holds_no_table_of_logits_in_fp32():
    """One in the logits' own type forward, whose place their gradient takes; the gradient of a gather would be another, twice as large."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(shape, generator=g).bfloat16() for shape in ((300, 64), (64, 5000)))
    label = torch.randint(0, 5000, (300,), generator=g)
    hidden.requires_grad_()

    def loss(hidden, label):
        scored = Scored(hidden, (hidden @ head).float(), label, None, None)
        return HardCrossEntropy().of(scored).sum()

    compiled = torch.compile(loss)
    _, code = run_and_get_code(lambda: compiled(hidden, label).backward())
    tables = [line for part in code for line in part.splitlines() if "empty_strided_cpu((300, 5000)" in line]
    assert len(tables) == 1 and "bfloat16" in tables[0], tables
