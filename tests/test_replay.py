"""Replayed rounds: what is scored, fed and taught, against a plain loop over rounds and depths; packing; ranks that have nothing."""

from dataclasses import fields, replace

import pytest
import torch
from decoding.test_engine import Meddler, overfit, plain_of, requests_for
from decoding.test_recorded_rounds import ended_early, kept
from torch._dynamo.utils import counters

from drafttrain.data.stream import MicroBatch
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.layouts import QUERY_MULTIPLE, chain_layout
from drafttrain.losses import Distillation
from drafttrain.replay import ReplayLayout, pack_rollouts, replay_layout, round_anchors
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import DraftRounds, Features, Rollout
from drafttrain.vocab import DraftVocabulary

K, TAPS, WIDTH, WORDS = 4, 2, 6, 50
ALL = torch.ones(WORDS, dtype=torch.bool)


def made_up(g, prompt, answer, drafts=K, ended=False, key="p"):
    """A rollout of random tokens and rows. Its chains may end early; the last round runs past the end (`ended`: by an end of turn)."""
    ids = torch.randint(2, WORDS, (prompt + answer,), generator=g)
    rounds, anchor, draw = [], prompt, lambda least, most: int(torch.randint(least, most + 1, (1,), generator=g))
    while anchor < len(ids) - 1:
        proposed = draw(0, drafts)
        accepted, left = draw(0, proposed), len(ids) - 1 - anchor
        drafted = torch.full((drafts,), -1)
        drafted[:proposed] = torch.randint(2, WORDS, (proposed,), generator=g)
        drafted[: min(accepted, left)] = ids[anchor + 1 : anchor + 1 + min(accepted, left)]
        if accepted < min(proposed, left) and drafted[accepted] == ids[anchor + 1 + accepted]:
            drafted[accepted] = 2 + (drafted[accepted] - 1) % (WORDS - 2)  # it was rejected
        within = min(proposed, left) if ended else min(proposed, left + draw(0, 1))
        rounds.append((anchor, drafted, proposed, accepted, draw(2, WORDS - 1), min(accepted + 1, left), within))
        anchor += accepted + 1
    columns = list(zip(*rounds, strict=True)) if rounds else [(), (torch.empty(0, drafts),), *[()] * 5]
    anchors, drafted, *others = columns
    drafted_RK = torch.stack(drafted) if rounds else torch.zeros(0, drafts, dtype=torch.long)
    numbers = [torch.tensor(x, dtype=torch.long) for x in (anchors, *others)]
    final_RPD = torch.randn(len(rounds), drafts + 1, WIDTH, generator=g)
    record = DraftRounds(numbers[0], drafted_RK, *numbers[1:], final_RPD)
    taps, final = torch.randn(len(ids), TAPS, WIDTH, generator=g), torch.randn(len(ids), WIDTH, generator=g)
    taps[-1:], final[-1:] = 0, 0
    return Rollout(key, ids, prompt, record.accepted_R.tolist(), 0, ended, torch.empty(0), taps, final, rounds=record)


def some(seed, count=7):
    """Rollouts of all lengths, one of them a single token long, one without rounds, chains of two lengths."""
    g = torch.Generator().manual_seed(seed)
    made = [
        made_up(g, 1 + i, (17, 1, 30, 9, 22, 3, 13)[i], drafts=K - i % 2, ended=bool(i % 2), key=f"p{i}") for i in range(count)
    ]
    return [*made[:-1], replace(made[-1], rounds=None)]


def expected(rollouts, packed, depth, speaks, streams=(True, True), first_rejection_only=False):
    """(stream, row, anchor, depth, label, token before, teacher row) of every element, and how many each depth lost."""
    found, dropped = [], [0] * depth
    for g, rollout in enumerate(rollouts):
        rounds = rollout.rounds
        row, offset, length = int(packed.row_G[g]), int(packed.offset_G[g]), int(packed.length_G[g])
        for i in range(0 if rounds is None else len(rounds.anchor_R)):
            names = ("anchor_R", "proposed_R", "accepted_R", "kept_R", "within_R")
            anchor, proposed, accepted, kept_, within = (int(getattr(rounds, name)[i]) for name in names)
            if anchor + kept_ > length - 1:
                continue
            for k in range(1, depth + 1):
                labels = {}
                if k <= accepted + 1 and k <= kept_ and (not first_rejection_only or (k == accepted + 1 and accepted < proposed)):
                    labels[0] = int(rollout.ids[anchor + k])
                if accepted < k <= within:
                    labels[1] = int(rounds.drafted_RK[i, k - 1])
                for stream, label in labels.items():
                    before = int(rollout.ids[anchor] if k == 1 else rounds.drafted_RK[i, k - 2])
                    if not streams[stream]:
                        continue
                    if not speaks[label]:
                        dropped[k - 1] += 1
                        continue
                    found.append((stream, row, offset + anchor, k, label, before, tuple(rounds.final_RPD[i, k - 1].tolist())))
    return sorted(found), dropped


def elements(packed, layout):
    T, ids_BT = packed.sequences.ids_BT.shape[1], packed.sequences.ids_BT
    taught = packed.features.pool(layout.pool_M)[layout.teacher_N]
    columns = (layout.stream_N, layout.anchor_N // T, layout.anchor_N % T, layout.depth_N, layout.label_N, layout.prev(ids_BT))
    return sorted(zip(*(x.tolist() for x in columns), map(tuple, taught.tolist()), strict=True))


def hold(rollouts, length, depth, speaks, **options):
    packed = pack_rollouts(rollouts, length)
    layout = replay_layout(packed, rollouts, depth, speaks, **options)
    wanted, dropped = expected(rollouts, packed, depth, speaks, **options)
    assert elements(packed, layout) == wanted and layout.dropped_K.tolist() == dropped
    well_formed(packed, layout, depth)
    return layout


def well_formed(packed, layout, depth):
    """The letters agree: rows, drafts, cells and what is fed, and no drafting row is without an element."""
    B, T = packed.sequences.ids_BT.shape
    Q = layout.query_BQ.shape[1]
    assert layout.fed_BQK.shape == (B, Q, depth) and Q % QUERY_MULTIPLE == 0
    assert torch.equal(layout.cell_N, (layout.depth_N - 1) * B * Q + layout.draft_N)
    assert torch.equal(layout.query_BQ.flatten()[layout.draft_N] + layout.draft_N // Q * T + 1, layout.anchor_N)
    assert set(layout.draft_N.tolist()) == set((layout.query_BQ.flatten() >= 0).nonzero()[:, 0].tolist())
    for row_Q, fed_QK in zip(layout.query_BQ, layout.fed_BQK, strict=True):
        drafting = row_Q >= 0
        assert row_Q[drafting].tolist() == sorted(set(row_Q.tolist()) - {-1}) and not drafting[drafting.sum() :].any()
        assert not fed_QK[~drafting].any() and bool((fed_QK >= 0).all())
    places = list(zip(layout.stream_N.tolist(), layout.draft_N.tolist(), layout.depth_N.tolist(), strict=True))
    assert len(set(places)) == len(places)
    grid = torch.stack([layout.tokens(packed.sequences.ids_BT, step) for step in range(depth)], dim=2)
    assert torch.equal(grid, layout.fed_BQK)


@pytest.mark.parametrize("length", [90, 35, 12])
@pytest.mark.parametrize("depth", [1, 3, 4, 7])
def test_elements_equal_a_plain_loop(length, depth):
    """Chains shorter and longer than the depth, some ended early; texts that are cut; a draft vocabulary of 4/5."""
    for seed in range(4):
        rollouts, speaks = some(seed), torch.arange(WORDS) % 5 != 2
        hold(rollouts, length, depth, ALL)
        layout = hold(rollouts, length, depth, speaks)
        assert int(layout.dropped_K.sum()) > 0
        for streams in ((True, False), (False, True)):
            alone = hold(rollouts, length, depth, speaks, streams=streams)
            assert set(alone.stream_N.tolist()) <= {streams.index(True)}
        hold(rollouts, length, depth, speaks, streams=(True, False), first_rejection_only=True)
        hold(rollouts, length, depth, speaks, first_rejection_only=True)


def test_the_accepted_stream_is_the_answer_and_both_meet_at_the_first_rejection():
    """Every token behind an answer's first is verified once, and taught by the round that said it; depth r+1 stands in both streams."""
    rollouts = some(0)
    packed = pack_rollouts(rollouts, 90)
    layout = replay_layout(packed, rollouts, K + 1, ALL)
    accepted = layout.stream_N == 0
    labels = (layout.anchor_N + layout.depth_N)[accepted]
    wanted = []
    for g, rollout in enumerate(rollouts):
        begin = int(packed.row_G[g]) * 90 + int(packed.offset_G[g])
        wanted += range(begin + rollout.prompt_len + 1, begin + len(rollout.ids)) if rollout.rounds is not None else ()
    assert sorted(labels.tolist()) == sorted(wanted)
    meet = set(layout.cell_N[accepted].tolist()) & set(layout.cell_N[~accepted].tolist())
    assert len(meet) > 10
    for cell in meet:
        one, other = (layout.cell_N == cell).nonzero()[:, 0].tolist()
        assert layout.teacher_N[one] == layout.teacher_N[other] and layout.label_N[one] != layout.label_N[other]


@pytest.fixture(scope="module")
def meddled(tiny_llama):
    """Rollouts whose chains run past limits and drafted ends of turn, accepted and rejected."""
    requests = requests_for(tiny_llama)
    whole = plain_of(tiny_llama, requests, overrun=K)
    requests = [replace(r, ends=(*r.ends, 3)) for r in ended_early(requests, whole)]
    rollouts = kept(tiny_llama, requests, Meddler(requests, whole, K), keep_features=True)
    return [rollouts[r.key] for r in requests]


@pytest.mark.parametrize("length", [100, 30])
def test_limits_and_ends_of_turn(tiny_llama, meddled, length):
    speaks = torch.arange(tiny_llama.vocab) % 5 != 1
    for depth in (2, K, K + 2):
        layout = hold(meddled, length, depth, speaks)
        assert int((layout.stream_N == 1).sum()) > 5
    full = torch.ones(tiny_llama.vocab, dtype=torch.bool)
    every = sum(int((r.rounds.proposed_R - r.rounds.accepted_R).sum()) for r in meddled)
    layout = hold(meddled, 100, K, full)
    assert int((layout.stream_N == 1).sum()) < every  # some were drafted past the end


def test_a_round_that_teaches_nothing_does_not_draft():
    rollouts = some(1)
    packed = pack_rollouts(rollouts, 90)
    every, rejected = (replay_layout(packed, rollouts, K, ALL, streams=streams) for streams in ((True, True), (False, True)))
    assert 0 < int((rejected.query_BQ >= 0).sum()) < int((every.query_BQ >= 0).sum())
    none = replay_layout(packed, rollouts, K, ~ALL)
    assert not len(none.depth_N) and int(none.query_BQ.max()) == -1 and int(none.dropped_K.sum()) == len(every.depth_N)
    assert replay_layout(packed, rollouts, K, ALL, least_queries=70).query_BQ.shape[1] == 96


def test_rollouts_are_packed_first_fit():
    """Room by room, by hand: 18, 3, 33 cut to 25, 13, 27 cut to 25, 9 and 20 tokens in rows of 25."""
    rollouts = some(2)
    lengths = [len(r.ids) for r in rollouts]
    assert lengths == [18, 3, 33, 13, 27, 9, 20]
    packed = pack_rollouts(rollouts, 25, multiple=4)
    assert packed.length_G.tolist() == [18, 3, 25, 13, 25, 9, 20]
    assert packed.row_G.tolist() == [0, 0, 1, 2, 3, 2, 4] and packed.offset_G.tolist() == [0, 18, 0, 0, 0, 13, 0]
    sequences, features = packed.sequences, packed.features
    assert sequences.ids_BT.shape == (8, 25) and features.taps_BTAD.shape == (8, 25, TAPS, WIDTH)
    filled = torch.zeros(8, 25, dtype=torch.bool)
    for g, rollout in enumerate(rollouts):
        b, begin, length = (int(x[g]) for x in (packed.row_G, packed.offset_G, packed.length_G))
        span = slice(begin, begin + length)
        assert torch.equal(sequences.ids_BT[b, span], rollout.ids[:length])
        assert sequences.position_BT[b, span].tolist() == list(range(length))
        assert sequences.supervised_BT[b, span].tolist() == [t >= rollout.prompt_len for t in range(length)]
        assert len(set(sequences.document_BT[b, span].tolist())) == 1
        assert torch.equal(features.taps_BTAD[b, span], rollout.taps_TAD[:length])
        assert torch.equal(features.final_BTD[b, span], rollout.final_TD[:length])
        filled[b, span] = True
        if rollout.rounds is not None:
            rows = rollout.rounds.final_RPD.flatten(0, 1)
            assert torch.equal(features.branch_VD[packed.branch_G[g] :][: len(rows)], rows)
    assert torch.equal(sequences.document_BT >= 0, filled)
    assert not features.final_BTD[~filled].any() and not sequences.supervised_BT[~filled].any()
    documents = [sequences.document_BT[b][filled[b]].unique().numel() for b in range(8)]
    assert documents == [2, 1, 2, 1, 1, 0, 0, 0]
    # Without rounds the same rows are text to be learnt from as any other.
    bare = pack_rollouts([replace(r, rounds=None) for r in rollouts], 25, multiple=4)
    assert bare.features.branch_VD is None and torch.equal(bare.sequences.ids_BT, sequences.ids_BT)
    layout, plain = (chain_layout(p.sequences, 3, ALL) for p in (packed, bare))
    assert all(torch.equal(getattr(layout, f.name), getattr(plain, f.name)) for f in fields(layout))
    assert torch.equal(packed.features.pool(layout.pool_M), bare.features.pool(layout.pool_M))


@pytest.mark.parametrize("length", [90, 25])
def test_answers_as_text_from_where_their_rounds_began(length):
    """Every depth, with the answer's own tokens, of the anchors of rounds and of no others."""
    rollouts = [rollout for rollout in some(3) if rollout.rounds is not None]
    packed = pack_rollouts(rollouts, length)
    layout = chain_layout(packed.sequences, K, ALL, round_anchors(packed, rollouts))
    T, wanted = packed.sequences.ids_BT.shape[1], set()
    for g, rollout in enumerate(rollouts):
        row, offset, reach = (int(x[g]) for x in (packed.row_G, packed.offset_G, packed.length_G))
        for anchor in rollout.rounds.anchor_R.tolist():
            depths = range(1, min(K, reach - 1 - anchor) + 1)
            wanted |= {(row * T + offset + anchor, k, int(rollout.ids[anchor + k])) for k in depths}
    got = list(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), layout.label_N.tolist(), strict=True))
    assert set(got) == wanted and len(got) == len(wanted) > 20
    every = chain_layout(packed.sequences, K, ALL)
    assert len(set(layout.anchor_N.tolist())) < len(set(every.anchor_N.tolist()))


def test_a_rank_without_rollouts_takes_part(tiny_llama):
    """Every weight gets a gradient of zero, or none, and no count is anything but 0."""
    for config in (Eagle3(taps=[0, 2], depth=3), DFlash(block=4, layers=1, taps=[0, 2], mask_token=319)):
        torch.manual_seed(0)
        net = config.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
        like = Features(torch.empty(0, 2, tiny_llama.hidden), torch.empty(0, tiny_llama.hidden))
        packed = pack_rollouts([], 16, multiple=3, like=like)
        assert packed.sequences.ids_BT.shape == (3, 16) and not len(packed.row_G) and packed.features.branch_VD is None
        layout = replay_layout(packed, [], 3, net.speaks_V)
        well_formed(packed, layout, 3)
        drafted = net.rows(packed.sequences, packed.features, layout)
        assert len(drafted.stream_N) == len(drafted.hidden_NH) == 0
        terms, _ = Distillation().terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 3)
        sum(term.sum for term in terms.values()).backward()
        assert all(w.grad is None or not w.grad.any() for w in net.parameters())
    assert pack_rollouts([], 16).sequences.ids_BT.shape == (1, 16)


def test_records_stay_what_they_are(monkeypatch):
    """On a device and in page-locked memory, with rows of branches or without."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    rollouts = some(3)
    packed = pack_rollouts(rollouts, 40)
    layout = replay_layout(packed, rollouts, K, ALL)
    for features in (packed.features, replace(packed.features, branch_VD=None)):
        batch = MicroBatch(packed.sequences, features, layout, 0, True, None)
        for moved in (batch.to("cpu"), batch.pin_memory()):
            assert type(moved.layout) is ReplayLayout
            for mine, other in ((layout, moved.layout), (features, moved.features)):
                for field in fields(mine):
                    one, two = getattr(mine, field.name), getattr(other, field.name)
                    assert one is two is None or torch.equal(one, two)
    half = packed.features.to("cpu", torch.bfloat16)
    assert {half.taps_BTAD.dtype, half.final_BTD.dtype, half.branch_VD.dtype} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "least_queries"),
    [(Eagle3(taps=[0, 2], depth=4), 0), (DFlash(block=5, layers=1, taps=[0, 2], mask_token=319), 90)],
    ids=["eagle3", "dflash"],
)
def test_a_compiled_step_gives_the_same_loss_and_gradients_and_is_compiled_once(tiny_llama, config, least_queries):
    requests = requests_for(tiny_llama, lengths=(5, 17, 9, 2, 11, 8, 7, 12, 3, 21, 6, 4))
    plain = plain_of(tiny_llama, requests)
    torch.manual_seed(0)
    net = config.build(tiny_llama, DraftVocabulary(torch.arange(0, tiny_llama.vocab, 2), tiny_llama.vocab))
    overfit(tiny_llama, net, [plain[r.key] for r in requests[::2]], steps=10)
    rollouts = list(kept(tiny_llama, requests, ChainProposer(net, K), keep_features=True, taps=net.needs.taps).values())
    teacher = TargetTeacher(tiny_llama, net)
    scores = [make_score(net, Distillation(), teacher, K, compile=flag) for flag in (False, True)]
    counters.clear()
    torch._dynamo.reset()
    for some_ in (rollouts[:4], rollouts[4:8], rollouts[8:], rollouts[1:6]):
        packed = pack_rollouts(some_, 64, multiple=4)
        layout = replay_layout(packed, some_, K, net.speaks_V, least_queries=least_queries)
        found = []
        for score in scores:
            net.zero_grad()
            terms, _ = score(packed.sequences, packed.features, layout)
            sum(term.sum for term in terms.values()).backward()
            found.append({name: w.grad.clone() for name, w in net.named_parameters() if w.grad is not None})
        for name, wanted in found[0].items():
            torch.testing.assert_close(found[1][name], wanted, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
