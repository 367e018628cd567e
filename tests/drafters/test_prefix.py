"""Variable prefix: what is drawn against its chances, elements against a loop, trained blocks against decoded ones that are shown the same tokens, the
weights of places against the formula, and a run in micro-batches and in halves."""

import math
from collections import Counter

import pytest
import torch
from drafters.test_dflash import run_without_masks
from drafters.test_eagle3 import chat
from drafters.test_faces import DRAFTERS, committed, net_for
from tiny_run import logged, start

from drafttrain.divergences import HardCrossEntropy
from drafttrain.drafters.dflash import DFlash
from drafttrain.errors import UserError
from drafttrain.layouts import PrefixLayout, chain_layout, drawn_prefixes
from drafttrain.losses import Distillation
from drafttrain.position_weights import Exponential
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Features, Sequences

BLOCKS = ["dflash", "dflash window", "dflash2", "dspark"]
ALL = torch.ones(400, dtype=torch.bool)
TEXT = chat("0000111111110001111100", documents="0" * 14 + "1" * 6 + "..")
SOME = torch.tensor([[0, 0, 0, 0, 3, 0, 1, 2, 0, 2, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0]])
"""Tokens shown behind each anchor; fewer than are left of its run. Those of the last document's first two are other than the first one's."""


@pytest.mark.parametrize("base", [0.5, 0.9, 1.0])
def test_the_chance_of_a_prefix_falls_by_the_base_and_leaves_something_to_draft(base):
    """Chi-square over 4,000 rows, for an anchor that reaches five tokens and for one that reaches two."""
    sequences = chat("000111111001110")
    drawn_NT = torch.cat([drawn_prefixes(sequences, 5, base, [(3, row)]) for row in range(4000)])
    assert torch.equal(drawn_NT[17], drawn_prefixes(sequences, 5, base, [(3, 17)])[0])
    anchors = {3: 5, 4: 4, 5: 3, 6: 2, 7: 1, 11: 2, 12: 1}  # place -> supervised tokens behind it
    for t in range(15):
        reach = anchors.get(t, 1)
        seen = Counter(drawn_NT[:, t].tolist())
        assert set(seen) == set(range(reach))
        wanted = [4000 * base**m / sum(base**i for i in range(reach)) for m in range(reach)]
        chi2 = sum((seen[m] - wanted[m]) ** 2 / wanted[m] for m in range(reach))
        assert chi2 < 24  # four degrees of freedom at most: one chance in 10,000
    pairs = Counter(zip(drawn_NT[:, 3].tolist(), drawn_NT[:, 4].tolist(), strict=True))
    assert len(pairs) == 20  # neighbours are drawn apart


def test_prefixes_are_cut_to_the_depth():
    assert set(drawn_prefixes(chat("0" + "1" * 40), 3, 1.0, [(0, 0)])[0].tolist()) == {0, 1, 2}


def test_elements_by_a_loop():
    """Every draft begins behind the last shown token, in its cell of the grid of places, taught by the row before."""
    layout = chain_layout(TEXT, 4, ALL, shown_BT=SOME)
    assert isinstance(layout, PrefixLayout)
    Q = layout.query_BQ.shape[1]
    got = {
        (int(a), int(k), int(label), int(layout.pool_M[m]), int(draft), int(cell))
        for a, k, label, m, draft, cell in zip(
            layout.anchor_N, layout.depth_N, layout.label_N, layout.teacher_N, layout.draft_N, layout.cell_N, strict=True
        )
    }
    supervised, ids, wanted = TEXT.supervised_BT[0].tolist(), TEXT.ids_BT[0].tolist(), set()
    anchors = [t for t in range(1, 21) if supervised[t] and supervised[t + 1] and t != 14]
    for q, anchor in enumerate(anchors):
        assert layout.query_BQ[0, q] == anchor - 1
        m = int(SOME[0, anchor])
        assert layout.shown_BQ[0, q] == m
        for place in range(m + 1, 5):
            if all(supervised[anchor : anchor + place + 1]):
                wanted.add((anchor + m, place - m, ids[anchor + place], anchor + place - 1, q, (place - 1) * Q + q))
    assert got == wanted and len(got) == len(layout.anchor_N)
    assert torch.equal(layout.shown_BQ[0, len(anchors) :], torch.zeros(Q - len(anchors), dtype=torch.long))
    spoken = chain_layout(TEXT, 4, torch.arange(400) != ids[11], shown_BT=SOME)
    lost = [k for _, k, label, *_ in wanted if label == ids[11]]
    assert spoken.dropped_K.tolist() == [lost.count(k) for k in range(1, 5)] and len(lost) > 2


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_a_block_with_a_prefix_equals_a_decoded_one_that_is_shown_the_same(any_target, name, monkeypatch):
    """The decoding face, given the context before the anchor, reads [x_A, ..., x_{A+m}, MASK, ...] written out by hand."""
    net = net_for(any_target, DRAFTERS[name])
    features = any_target.read_packed(TEXT, net.needs.taps)
    layout = chain_layout(TEXT, net.deepest, net.speaks_V, shown_BT=SOME)
    drafted = net.rows(TEXT, features, layout)
    logits = net.logits(drafted.hidden_NH, drafted.prev_N)
    document, ids, checked = TEXT.document_BT[0], TEXT.ids_BT[0], 0
    for q, row in enumerate(layout.query_BQ[0].tolist()):
        if row < 0:
            continue
        anchor, m = row + 1, int(SOME[0, row + 1])
        begin = int((document == document[anchor]).nonzero()[0])
        read = ids[anchor : anchor + m + 1].tolist() + [net.mask] * (net.slots - m - 1)
        monkeypatch.setattr(net, "stream", lambda _, read=read: net.embed(torch.tensor([[read]])))
        context = Features(features.taps_BTAD[:, begin:anchor], features.final_BTD[:, begin:anchor])
        state, _ = committed(net, context, ids[None, begin + 1 : anchor + 1], torch.tensor([anchor - begin]), 1)
        for n in (layout.draft_N == q).nonzero()[:, 0].tolist():
            place = int(layout.anchor_N[n] + layout.depth_N[n]) - anchor
            hidden = net.ahead(state)[0, place - 1]
            torch.testing.assert_close(drafted.hidden_NH[n], hidden, atol=1e-5, rtol=1e-4)
            assert drafted.prev_N[n] == ids[anchor + place - 1] and drafted.label_N[n] == ids[anchor + place]
            torch.testing.assert_close(logits[n], net.logits(hidden[None], drafted.prev_N[n : n + 1])[0], atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked == len(layout.anchor_N) > 10


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_what_a_block_with_a_prefix_sees(tiny_llama, name):
    """Every shown token, none behind it, and features before its anchor alone, though it is shown tokens behind them."""
    net = net_for(tiny_llama, DRAFTERS[name])
    features = tiny_llama.read_packed(TEXT, net.needs.taps)
    layout = chain_layout(TEXT, net.deepest, net.speaks_V, shown_BT=SOME)
    anchor = 7  # shows two
    mine = layout.draft_N == (layout.query_BQ[0] == anchor - 1).nonzero()[0, 0]
    assert set(layout.anchor_N[mine].tolist()) == {anchor + 2}
    before = net.rows(TEXT, features, layout).hidden_NH[mine]

    def altered(rows=None, token=None):
        taps, final, ids = features.taps_BTAD.clone(), features.final_BTD.clone(), TEXT.ids_BT.clone()
        if rows is not None:
            taps[:, rows] += 1.0
        if token is not None:
            ids[0, token] += 1
        changed = Sequences(ids, TEXT.supervised_BT, TEXT.position_BT, TEXT.document_BT)
        return net.rows(changed, Features(taps, final), layout).hidden_NH[mine]

    assert torch.equal(altered(rows=slice(anchor, None)), before)
    assert not torch.allclose(altered(rows=slice(anchor - 1, anchor)), before, atol=1e-3)
    for shown in range(3):
        assert not torch.allclose(altered(token=anchor + shown), before, atol=1e-3)
    assert torch.equal(altered(token=anchor + 3), before)


def test_the_decay_begins_behind_the_prefix(tiny_llama):
    """Of a block whose first l slots are seen, slot k >= l weighs exp(-(k-l)/gamma); divided by the sum of the weights."""
    net = net_for(tiny_llama, DRAFTERS["dflash"])
    features = tiny_llama.read_packed(TEXT, net.needs.taps)
    layout = chain_layout(TEXT, 4, net.speaks_V, shown_BT=SOME)
    drafted = net.rows(TEXT, features, layout)
    objective = Distillation([HardCrossEntropy()], Exponential(2.0), "weights")
    terms, _ = objective.terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 4)
    logp_NV = net.logits(drafted.hidden_NH, drafted.prev_N).log_softmax(-1).detach()
    words, total, weights = net.vocabulary.ids.tolist(), 0.0, 0.0
    for n, draft in enumerate(layout.draft_N.tolist()):
        anchor = int(layout.query_BQ[0, draft]) + 1
        first, slot = int(SOME[0, anchor]) + 1, int(layout.anchor_N[n] + layout.depth_N[n]) - anchor
        weight = math.exp(-(slot - first) / 2.0)
        total -= weight * float(logp_NV[n, words.index(int(layout.label_N[n]))])
        weights += weight
    assert float(terms["weights"].sum.detach()) == pytest.approx(total, rel=1e-5)
    assert float(terms["weights"].count) == pytest.approx(weights, rel=1e-6)
    assert objective.counts(layout, 4)["weights"] == pytest.approx(weights, rel=1e-6)


def test_a_prefix_is_drawn_in_training_and_nowhere_else(tiny_llama):
    net = net_for(tiny_llama, DFlash(block=5, layers=1, taps=[0], mask_token=319, anchors=3, prefix_base=0.9))
    drawn = net.layout(TEXT, numbers=[(1, 2)])
    assert isinstance(drawn, PrefixLayout) and int((drawn.query_BQ >= 0).sum()) == 3
    assert torch.equal(drawn.shown_BQ, net.layout(TEXT, numbers=[(1, 2)]).shown_BQ)
    assert net.layout(TEXT).shown() is None
    plain = net_for(tiny_llama, DFlash(block=5, layers=1, taps=[0], mask_token=319, anchors=3))
    assert plain.layout(TEXT, numbers=[(1, 2)]).shown() is None
    assert torch.equal(plain.layout(TEXT, numbers=[(1, 2)]).query_BQ, drawn.query_BQ)  # the anchors are the same with and without


@pytest.mark.parametrize("base", [0.0, -1.0, 1.5, math.nan])
def test_a_base_that_is_no_share_is_refused(base):
    with pytest.raises(UserError, match="prefix_base is .*, but must be above 0 and at most 1, or null"):
        DFlash(prefix_base=base)


def test_a_run_is_the_same_in_micro_batches_and_in_halves(tmp_path, tiny_llama, target_folders):
    """And another one than without a prefix."""
    folder = target_folders("llama")

    def run(name, *stops, rows=4, prefix_base=0.7):
        drafter = DFlash(block=5, layers=1, taps=[0, 2], mask_token=319, anchors=4, prefix_base=prefix_base)
        made = run_without_masks(tmp_path / name, tiny_llama)
        for stop in stops:
            start(made, folder, drafter=drafter, objective={"divergences": [HardCrossEntropy()], "positions": Exponential(2.0), "reduction": "weights"},
                  data={"rows": rows}, optimizer={"schedule": "constant"}, trainer={"max_steps": stop, "accumulate_grad_batches": 4 // rows})  # fmt: skip
        return logged(made)

    whole = run("whole", 4)
    assert run("pieces", 4, rows=1) == pytest.approx(whole, rel=1e-4)
    assert run("halves", 2, 4) == pytest.approx(whole, rel=1e-6)
    assert run("plain", 4, prefix_base=None) != pytest.approx(whole, rel=1e-2)
