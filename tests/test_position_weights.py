"""Every position weight against loops over drafts, with elements left out in the middle and at the end."""

import math

import pytest
import torch

from drafttrain.divergences import HardCrossEntropy
from drafttrain.errors import UserError
from drafttrain.position_weights import Decay, DPace, Exponential, Guesses, PositionWeight, Streak, Uniform, ValidPrefix
from drafttrain.recipe_build import choices

DEPTH, DRAFTS = 4, 7
REACH = {0: [1, 2, 3, 4], 2: [1, 3, 4], 3: [2, 3], 4: [1], 6: [1, 2, 4]}
"""Draft -> depths that are scored. Drafts 1 and 5 are padding; what is missing in between was left out."""
ALL = [
    Uniform(),
    Decay(),
    Decay(0.5),
    Exponential(4.0),
    DPace(),
    DPace(0.0),
    DPace(0.8),
    Streak(),
    ValidPrefix(),
    ValidPrefix(0.8),
]


def guesses(seed: int = 0) -> Guesses:
    """In the order of a layout: by depth, so that a draft's elements are far apart."""
    g = torch.Generator().manual_seed(seed)
    places = [(draft, depth) for depth in range(1, DEPTH + 1) for draft, depths in REACH.items() if depth in depths]
    draft_N, depth_N = torch.tensor(places).T
    q_N, right_N = torch.rand(len(places), generator=g), torch.rand(len(places), generator=g) < 0.6
    return Guesses(depth_N, draft_N, DRAFTS, DEPTH, q_N, right_N)


def by_hand(weight: PositionWeight, given: Guesses, n: int) -> float:
    """The weight of element n, from its definition."""
    own, k = int(given.draft_N[n]), int(given.depth_N[n])
    at = {int(given.depth_N[i]): i for i in range(len(given.q_N)) if given.draft_N[i] == own}
    q = {m: float(given.q_N[at[m]]) if m in at else 0.0 for m in range(1, DEPTH + 1)}
    right = {m: m in at and bool(given.right_N[at[m]]) for m in range(1, DEPTH + 1)}

    def reach(smoothing):
        chances = {m: math.prod((1 - smoothing) * q[i] + smoothing for i in range(1, m + 1)) for m in at if m >= k}
        return sum(chances.values())

    match weight:
        case Uniform():
            return 1.0
        case Decay(base=base):
            return base ** (k - 1)
        case Exponential(gamma=gamma):
            return math.exp(-(k - 1) / gamma)
        case DPace(smoothing=smoothing):
            return reach(smoothing)
        case Streak():
            return reach(0.0)
        case ValidPrefix(base=base):
            return base ** (k - 1) * all(right[m] for m in range(1, k))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", ALL, ids=repr)
def test_weights_equal_loops(weight, seed):
    given = guesses(seed)
    found_N = weight.of_guesses(given)
    assert found_N.tolist() == pytest.approx([by_hand(weight, given, n) for n in range(len(found_N))], rel=1e-5)
    if weight.known:
        assert torch.equal(weight.of_depth(given.depth_N), found_N)


def test_every_weight_is_tried_here():
    ours = {name for name, cls in choices(PositionWeight).items() if cls.__module__.startswith("drafttrain.")}
    assert {type(weight).__name__ for weight in ALL} == ours


@pytest.mark.parametrize("drafts", [5, 7])
def test_streak_with_hard_cross_entropy_climbs_the_expected_number_of_right_drafts(drafts):
    """The gradient of sum_n w_n (-log q_n) / drafts is that of -J, J = mean over drafts of sum_m prod_{j<=m} q_j."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(drafts, DEPTH, 6, generator=g, dtype=torch.float64, requires_grad=True)
    label = torch.randint(6, (drafts, DEPTH), generator=g)
    q = logits.softmax(-1).gather(2, label[..., None])[..., 0]
    streaks = q.cumprod(1).sum(1).mean()
    (wanted,) = torch.autograd.grad(-streaks, logits, retain_graph=True)

    draft_N, depth_N = torch.arange(drafts).repeat_interleave(DEPTH), torch.arange(1, DEPTH + 1).repeat(drafts)
    given = Guesses(depth_N, draft_N, drafts, DEPTH, q.flatten().detach(), torch.zeros(drafts * DEPTH, dtype=torch.bool))

    class Labels:
        log_q_label_N = q.log().flatten()

    loss = (Streak().of_guesses(given) * HardCrossEntropy().of(Labels())).sum() / drafts
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, wanted)


def test_an_element_that_was_left_out_counts_as_wrong_for_those_behind_it():
    given = guesses()
    behind = (given.draft_N == 2) & (given.depth_N >= 3)  # depth 2 is missing
    assert not Streak().of_guesses(given)[behind].any() and not ValidPrefix().of_guesses(given)[behind].any()
    first = (given.draft_N == 2) & (given.depth_N == 1)
    assert float(DPace(0.5).of_guesses(given)[first]) > float((0.5 * given.q_N + 0.5)[first])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Decay(0.0), "base of Decay is 0.0, but must be above 0 and at most 1"),
        (lambda: Decay(1.5), "base of Decay is 1.5"),
        (lambda: ValidPrefix(-1.0), "base of ValidPrefix is -1.0"),
        (lambda: Exponential(0.0), "gamma of Exponential is 0.0"),
        (lambda: DPace(1.0), "smoothing of DPace is 1.0"),
    ],
)
def test_a_weight_cannot_hold_nonsense(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
