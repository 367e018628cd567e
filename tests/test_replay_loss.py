"""On-policy distillation against a loop over rounds in fp64; cut into micro-batches and chunks, perturbed, and compiled."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from replay_streams import DEPTH, IDS_V, NOTHING, ROUNDS, WIDTH, Model, by_hand, distance, layout_of, replayed, results, some
from tiny import waiting_forbidden
from torch import Tensor
from torch._dynamo.utils import counters

from drafttrain.divergences import JSD, K3, BernoulliKL, ForwardKL, HardCrossEntropy, ReverseKL, SmoothL1
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.position_weights import Decay, DPace, Exponential, Streak, Uniform, ValidPrefix
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.tasks.window import Meter
from drafttrain.types import Layout

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


@pytest.mark.parametrize(("beta", "times"), [(0.2, 1), (0.8, 2)])
def test_what_both_streams_ask_for_is_computed_once_and_what_differs_is_not_confused(monkeypatch, beta, times):
    (drafted, model), asked, of = replayed(ROUNDS), [], JSD.of
    monkeypatch.setattr(JSD, "of", lambda own, scored: asked.append(own) or of(own, scored))
    found = results(OnPolicyDistillation([JSD(0.2)], [JSD(beta, weight=3.0)]), drafted, model)
    assert len(asked) == times
    for stream, divergence, positions in ((0, JSD(0.2), Uniform()), (1, JSD(beta, weight=3.0), Decay())):
        part = some(drafted, (drafted.stream_N == stream).nonzero()[:, 0])
        [alone] = Distillation([divergence], positions, "weights").terms(part, model.student, model, DEPTH)[0].values()
        torch.testing.assert_close(2 * found[f"{('accepted', 'rejected')[stream]} sum"], alone.sum.detach())


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
    with waiting_forbidden():
        results(objective, drafted, model)


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
    by_label = {"paper": set(), "code": {"accepted", "rejected"}, "mixed": {"rejected"}}
    assert moved == (by_label[lists] if changed == "label" else {"accepted", "rejected"})


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
