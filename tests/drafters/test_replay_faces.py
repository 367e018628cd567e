"""Replayed rounds of every drafter against its decoding face and the target, each asked afresh behind the drafted prefix."""

from dataclasses import replace

import pytest
import torch
from decoding.test_engine import overfit
from decoding.test_recorded_rounds import asked, fresh_rows, kept
from drafters.test_faces import DRAFTERS, net_for

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.heads import Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.replay import pack_rollouts, replay_layout
from drafttrain.types import Features

CASES = [("llama", name) for name in DRAFTERS] + [(a, n) for a in ("qwen3", "mixtral") for n in ("eagle3", "hydra++", "dflash")]
ROUNDING = 1e-5
"""Of a row's length."""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def taught(request, targets):
    """A target, prompts, and a drafter that knows half of their answers."""
    architecture, name = request.param
    target = targets(architecture)
    requests, plain = asked(target)
    net = net_for(target, DRAFTERS[name])
    overfit(target, net, [plain[r.key] for r in requests[::2]], steps=20)
    return target, requests, net


def rolled_out(taught, drafts):
    """Rollouts in the order of their prompts, by greedy chains."""
    target, requests, net = taught
    rollouts = kept(target, requests, ChainProposer(net, drafts), keep_features=True, taps=net.needs.taps)
    return [rollouts[r.key] for r in requests]


def round_of(packed, rollouts, layout, n):
    """(rollout, index of the round) that element n belongs to."""
    row, place = divmod(int(layout.anchor_N[n]), packed.sequences.ids_BT.shape[1])
    inside = (packed.row_G == row) & (packed.offset_G <= place) & (place < packed.offset_G + packed.length_G)
    (g,) = inside.nonzero()[:, 0].tolist()
    (i,) = (rollouts[g].rounds.anchor_R == place - int(packed.offset_G[g])).nonzero()[:, 0].tolist()
    return rollouts[g], i


def stepped_logits(net, rollout, i, depths):
    """What the decoding face says at depths 1, 2, ... of a round, fed its drafts [depths, Vd]."""
    rounds, anchor = rollout.rounds, int(rollout.rounds.anchor_R[i])
    features = Features(rollout.taps_TAD[None, :anchor], rollout.final_TD[None, :anchor])
    state = net.begin(1, anchor + depths, depths)
    hidden = net.commit(state, None, features, rollout.ids[None, 1 : anchor + 1], torch.tensor([anchor]), anchor + depths)
    prev, said = rollout.ids[anchor][None], []
    for depth in range(1, depths + 1):
        if depth > 1:
            prev = rounds.drafted_RK[i, depth - 2][None]
            hidden = net.step(state, prev[None], torch.full((1, 1), depth - 3))[0]
        said.append(net.logits(hidden, prev)[0])
    return torch.stack(said)


def replayed(net, packed, rollouts, depth, **options):
    """The layout, the drafted rows, and their logits."""
    layout = replay_layout(packed, rollouts, depth, net.speaks_V, **options)
    with torch.no_grad():
        drafted = net.rows(packed.sequences, packed.features, layout)
        return layout, drafted, net.logits(drafted.hidden_NH, drafted.prev_N)


def near(found, wanted):
    assert ((found - wanted).norm(dim=-1) <= ROUNDING * wanted.norm(dim=-1)).all(), (found - wanted).abs().max()


@pytest.mark.parametrize(("drafts", "depth"), [(4, 4), (2, 4), (4, 2)])
def test_replay_is_the_drafting(taught, drafts, depth):
    """Student and teacher of every element, several rollouts in a row, and the greedy choice of the replay: what was drafted."""
    target, _, net = taught
    depth = min(depth, net.deepest or depth)
    rollouts = rolled_out(taught, drafts)
    packed = pack_rollouts(rollouts, 64, multiple=2)
    assert len(packed.row_G) > int(packed.row_G.max()) + 1
    layout, drafted, logits = replayed(net, packed, rollouts, depth)
    asked, taught_rows, behind = {}, {}, 0
    for n in range(len(layout.depth_N)):
        rollout, i = round_of(packed, rollouts, layout, n)
        rounds, k, key = rollout.rounds, int(layout.depth_N[n]), (rollout.key, i)
        if key not in asked:
            proposed = int(rounds.proposed_R[i])
            asked[key] = stepped_logits(net, rollout, i, min(depth, proposed + 1, net.deepest or depth))
            taught_rows[key] = fresh_rows(target, rollout, rounds, i)
        near(logits[n], asked[key][k - 1])
        near(drafted.teacher_MD[drafted.row_N[n]], taught_rows[key][k - 1])
        if k <= rounds.proposed_R[i]:
            assert int(net.vocabulary.ids[logits[n].argmax()]) == int(rounds.drafted_RK[i, k - 1])
        assert int(drafted.prev_N[n]) == int(rollout.ids[rounds.anchor_R[i]] if k == 1 else rounds.drafted_RK[i, k - 2])
        behind += k > rounds.accepted_R[i] + 1
    assert torch.equal(drafted.stream_N, layout.stream_N) and torch.equal(drafted.label_N, layout.label_N)
    deepest = [int(layout.depth_N[layout.stream_N == stream].max()) for stream in (0, 1)]
    assert 1 < deepest[0] <= min(drafts + 1, depth) and deepest[1] == min(drafts, depth)
    assert behind > 5 and len(asked) > 20


def test_a_rejected_draft_is_read_by_those_behind_it_alone(taught):
    """Another d_{r+1} alters the student at depth r+2 of that round if it reads drafts at all, and nothing before or elsewhere."""
    _, _, net = taught
    rollouts = rolled_out(taught, 4)
    packed = pack_rollouts(rollouts, 64)
    layout, _, before = replayed(net, packed, rollouts, 4)
    altered = []
    for rollout in rollouts:
        rounds, drafted_RK = rollout.rounds, rollout.rounds.drafted_RK.clone()
        rejected_R = (rounds.accepted_R < rounds.proposed_R).nonzero()[:, 0]
        first_R = rounds.accepted_R[rejected_R]
        drafted_RK[rejected_R, first_R] = (drafted_RK[rejected_R, first_R] + 7) % 300
        altered.append(replace(rollout, rounds=replace(rounds, drafted_RK=drafted_RK)))
    # A label outside the draft vocabulary would be dropped: all are put in, so that elements stay the same.
    speaks_V = torch.ones_like(net.speaks_V)
    layout, other = (replay_layout(packed, r, 4, speaks_V) for r in (rollouts, altered))
    assert torch.equal(layout.cell_N, other.cell_N) and torch.equal(layout.stream_N, other.stream_N)
    with torch.no_grad():
        first, second = (net.rows(packed.sequences, packed.features, x) for x in (layout, other))
        before, after = (net.logits(x.hidden_NH, x.prev_N) for x in (first, second))
    seen = 0
    for n in range(len(layout.depth_N)):
        rollout, i = round_of(packed, rollouts, layout, n)
        ahead = int(layout.depth_N[n]) - int(rollout.rounds.accepted_R[i]) - 2
        if ahead < 0:
            assert torch.equal(before[n], after[n])
        elif ahead == 0:
            changes = not torch.allclose(before[n], after[n], atol=1e-4)
            assert changes != isinstance(net.config, DFlash | Medusa | PEagle)
            seen += 1
    assert seen > 5
