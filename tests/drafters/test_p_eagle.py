"""P-EAGLE: the six-token chat by hand, the forward pass against a loop over pairs of elements, and what a dropped element may change."""

import math
from dataclasses import replace

import pytest
import torch
from drafters.test_eagle3 import ALL, chat
from drafters.test_faces import net_for
from tiny import rows_of
from tiny_run import logged, ragged_chats, start, write_store
from torch._dynamo.utils import counters

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.divergences import SoftCrossEntropy
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError
from drafttrain.layouts import QUERY_MULTIPLE, ThinnedLayout, chain_layout, thinned_layout, thinned_width
from drafttrain.losses import Distillation
from drafttrain.ops.rotary import rotate
from drafttrain.position_weights import Uniform
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Features

CONFIG = PEagle(taps=[0, 2], depth=4, layers=3, mask_token=319, cod_ratio=0.5, cod_least=0.3)
SHARES = [1.0, 0.5, 0.3, 0.3]
LONG = chat("000" + "1" * 60 + "0000" + "1" * 53, documents="0" * 63 + "1" * 57)


def elements_of(layout):
    rows = layout.pool_M[layout.teacher_N]
    return list(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), layout.label_N.tolist(), rows.tolist(), strict=True))


def pairs_of(layout):
    return list(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), strict=True))


# ---- the forward pass -----------------------------------------------------------------------------------------------------


def by_pairs(net, features, ids, document, position, anchor, depth):
    """h of (anchor, depth), in numpy's way: every element of the chat, every layer, a loop over pairs, the rule as the paper writes it."""
    T, K = len(ids), net.config.depth
    elements = [(row, d) for row in range(T - 1) for d in range(K) if d == 0 or row == anchor - 1]
    unknown = net.fc(net.mask_hidden[0, 0])
    embedding = torch.stack([net.embed(ids[row + 1] if d == 0 else torch.tensor(net.mask)) for row, d in elements])
    state = torch.stack([net.fc(features.taps_BTAD[0, row].flatten()) if d == 0 else unknown for row, d in elements])
    place = torch.tensor([[int(position[row]) + d for row, d in elements]])
    D, groups = net.shape.head_dim, net.shape.heads // net.shape.kv_heads
    for number, layer in enumerate(net.layers):
        if number == 0:
            read = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(state)], dim=-1)
        else:
            read = layer.input_layernorm(state)
        turn = net.rotary(place, read.dtype)
        query = rotate(layer.self_attn.queries(read[None]), *turn)[0]
        key, value = layer.self_attn.keys_values(read[None])
        key = rotate(key, *turn)[0]
        mixed = torch.zeros_like(query)
        for q, (row, d) in enumerate(elements):
            seen = [
                n for n, (other, e) in enumerate(elements)
                if document[other] == document[row] and ((e == 0 and other <= row) or (other == row and e <= d))
            ]  # fmt: skip
            for h in range(len(query)):
                weights = (key[h // groups, seen] @ query[h, q] / D**0.5).softmax(0)
                mixed[h, q] = weights @ value[0, h // groups, seen]
        state = state + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    return net.norm(state[elements.index((anchor - 1, depth - 1))])


@torch.no_grad()
def test_the_six_token_chat_by_hand(tiny_llama):
    """0 p, 1 p, 2 a, 3 b, 4 c, 5 eot: what counts, what is read, where it stands, who sees whom."""
    net, sequences = net_for(tiny_llama, CONFIG), chat("001111")
    layout = net.layout(sequences, 3)
    wanted = [(2, 1, 12, 2), (2, 2, 13, 3), (2, 3, 14, 4), (3, 1, 13, 3), (3, 2, 14, 4), (4, 1, 14, 4)]
    # Tokens stand as 10, 11, ...: label A+k is 10 + A + k, taught by row A+k-1; 14 and 19 are outside net_for's vocabulary.
    assert sorted(elements_of(layout)) == [(a, k, 10 + a + k, row) for a, k, label, row in wanted if (10 + a + k) % 5 != 4]
    layout = chain_layout(sequences, 3, ALL)
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    drafted = net.rows(sequences, features, layout)
    assert len(pairs_of(layout)) == 6
    for n, (anchor, depth) in enumerate(pairs_of(layout)):
        one = sequences.ids_BT[0], sequences.document_BT[0], sequences.position_BT[0]
        torch.testing.assert_close(drafted.hidden_NH[n], by_pairs(net, features, *one, anchor, depth), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_packed_chats_equal_a_loop_over_pairs(tiny_llama):
    """Anchors at the start and the end of documents, and drafts whose text overlaps, in a row with padding."""
    net = net_for(tiny_llama, CONFIG)
    sequences = chat("01111001110111...".replace(".", "0"), documents="00000000001111...")
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = chain_layout(sequences, 4, ALL)
    drafted = net.rows(sequences, features, layout)
    found = pairs_of(layout)
    assert {(1, 1), (1, 3), (3, 1), (8, 1), (11, 2), (12, 1)} <= set(found)
    for n, (anchor, depth) in enumerate(found):
        one = sequences.ids_BT[0], sequences.document_BT[0], sequences.position_BT[0]
        torch.testing.assert_close(drafted.hidden_NH[n], by_pairs(net, features, *one, anchor, depth), atol=1e-5, rtol=1e-4)


# ---- conditional drop of tokens --------------------------------------------------------------------------------------------


def test_kept_elements_are_nested_and_drawn_by_the_number_of_the_row_alone():
    dense = chain_layout(LONG, 4, ALL)
    every = {pair: rest for pair, *rest in ((e[:2], e[2:]) for e in elements_of(dense))}
    draws = set()
    for row in range(20):
        layout, again = (thinned_layout(LONG, SHARES, ALL, [(7, row)]) for _ in range(2))
        assert all(torch.equal(getattr(layout, name), getattr(again, name)) for name in layout.__dataclass_fields__)
        kept = {(anchor, depth): [(label, teacher)] for anchor, depth, label, teacher in elements_of(layout)}
        assert kept.items() <= every.items()
        assert all((anchor, depth - 1) in kept for anchor, depth in kept if depth > 1)
        at = [{anchor for anchor, depth in kept if depth == k} for k in (1, 2, 3, 4)]
        assert at[0] == {anchor for anchor, depth in every if depth == 1}
        # A dropped anchor is one of the row's whole list; of the kept ones only those count whose draft is long enough.
        drafting = layout.query_BQ[0][layout.query_BQ[0] >= 0] + 1
        for k, share in enumerate(SHARES, start=1):
            first = drafting[: math.ceil(share * len(drafting))].tolist()
            assert at[k - 1] == {anchor for anchor in first if (anchor, k) in every}
        draws.add(tuple(sorted(at[3])))
    assert len(draws) == 20


def test_every_anchor_is_kept_equally_often():
    """Chi-square over the anchors; A draws without replacement have the covariance of a multinomial's, times A/(A-1)."""
    counts, rows, anchors = torch.zeros(LONG.ids_BT.shape[1]), 600, 59 + 52
    assert len(chain_layout(LONG, 1, ALL).anchor_N) == anchors
    for row in range(rows):
        counts[thinned_layout(LONG, SHARES, ALL, [(1, row)]).query_BQ[0, : math.ceil(0.3 * anchors)] + 1] += 1
    counts = counts[counts > 0]
    p = math.ceil(0.3 * anchors) / anchors
    statistic = float(((counts - rows * p) ** 2).sum()) / (rows * p * (1 - p)) * (anchors - 1) / anchors
    degrees = anchors - 1
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees), (statistic, degrees)


@torch.no_grad()
def test_kept_elements_are_what_they_are_in_the_dense_forward(tiny_llama):
    net = net_for(tiny_llama, CONFIG)
    features = tiny_llama.read_packed(LONG, net.needs.taps)
    dense, thinned = net.layout(LONG), net.layout(LONG, numbers=[(3, 4)])
    every, some = (net.rows(LONG, features, layout) for layout in (dense, thinned))
    where = {pair: n for n, pair in enumerate(pairs_of(dense))}
    index = torch.tensor([where[pair] for pair in pairs_of(thinned)])
    assert 0 < len(index) < 0.7 * len(where)
    torch.testing.assert_close(some.hidden_NH, every.hidden_NH[index], atol=1e-5, rtol=1e-4)
    for name in ("label_N", "prev_N", "depth_N"):
        assert torch.equal(getattr(some, name), getattr(every, name)[index])
    torch.testing.assert_close(some.teacher_MD[some.row_N], every.teacher_MD[every.row_N[index]])


@torch.no_grad()
def test_a_ratio_of_one_is_dense(tiny_llama):
    net = net_for(tiny_llama, PEagle(taps=[0, 2], depth=4, layers=3, mask_token=319, cod_ratio=1.0, cod_least=0.3))
    dense, asked = net.layout(LONG), net.layout(LONG, numbers=[(3, 4)])
    assert all(torch.equal(getattr(dense, name), getattr(asked, name)) for name in dense.__dataclass_fields__)
    # Dropping nothing by way of a draw: the same elements in another order.
    features, drawn = tiny_llama.read_packed(LONG, net.needs.taps), thinned_layout(LONG, [1.0] * 4, net.speaks_V, [(3, 4)])
    every, some = (net.rows(LONG, features, layout) for layout in (dense, drawn))
    assert sorted(pairs_of(dense)) == sorted(pairs_of(drawn)) and pairs_of(dense) != pairs_of(drawn)
    index = torch.tensor([pairs_of(dense).index(pair) for pair in pairs_of(drawn)])
    torch.testing.assert_close(some.hidden_NH, every.hidden_NH[index], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_what_is_dropped_is_not_computed(tiny_llama):
    """Elements that pass through each layer's MLP: 120 rows, and of 128 places for drafting rows the shares 0.5, 0.3 and 0.3 in 32s."""
    net, seen = net_for(tiny_llama, CONFIG), []
    for layer in net.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    features = tiny_llama.read_packed(LONG, net.needs.taps)
    for numbers, wanted in ((None, 120 + 3 * 128), ([(3, 4)], 120 + 64 + 64 + 64)):
        seen.clear()
        net.rows(LONG, features, net.layout(LONG, numbers=numbers))
        assert seen == [wanted] * 3


def test_kept_elements_always_have_a_place():
    for share in (1.0, 0.7, 0.49, 0.7**3, 0.2, 0.64, 1 / 3):
        for anchors in range(1, 130):
            Q = -(-anchors // QUERY_MULTIPLE) * QUERY_MULTIPLE
            assert math.ceil(share * anchors) <= thinned_width(Q, share) <= Q


def test_a_thinned_layout_stays_one_where_it_goes(tiny_llama):
    layout = net_for(tiny_llama, CONFIG).layout(LONG, numbers=[(1, 1)])
    moved = layout.to("cpu")
    assert isinstance(moved, ThinnedLayout) and torch.equal(moved.query_BQ, layout.query_BQ)


# ---- objective, training, drafting -----------------------------------------------------------------------------------------


def test_the_published_objective_is_the_mean_over_kept_elements(tiny_llama):
    net = net_for(tiny_llama, CONFIG)
    layout = net.layout(LONG, numbers=[(2, 2)])
    features = tiny_llama.read_packed(LONG, net.needs.taps)
    drafted = net.rows(LONG, features, layout)
    objective = Distillation([SoftCrossEntropy()], Uniform(), "weights")
    terms, _ = objective.terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 4)
    ids, wanted = net.vocabulary.ids, 0.0
    for n, (anchor, depth) in enumerate(pairs_of(layout)):
        p = tiny_llama.logits(features.final_BTD[0, anchor + depth - 1])[ids].softmax(-1)
        wanted -= float((p * (net.lm_head.weight @ drafted.hidden_NH[n]).log_softmax(-1)).sum().detach())
    [term] = terms.values()
    assert float(term.sum.detach()) == pytest.approx(wanted, rel=1e-4)
    assert float(term.count) == objective.counts(layout, 4)["weights"] == len(layout.depth_N)


def test_every_weight_learns_and_so_does_the_mask(tiny_llama):
    net = net_for(tiny_llama, CONFIG)
    drafted = net.rows(LONG, tiny_llama.read_packed(LONG, net.needs.taps), net.layout(LONG, numbers=[(2, 2)]))
    net.logits(drafted.hidden_NH, drafted.prev_N).logsumexp(-1).sum().backward()
    assert all(float(weight.grad.abs().max()) > 0 for weight in net.parameters())
    assert net.unsaid == (319,) and net.mask_hidden.shape == (1, 1, 2 * tiny_llama.hidden)


@torch.no_grad()
def test_all_depths_at_once_are_those_stepped_through(tiny_llama):
    net = net_for(tiny_llama, CONFIG)
    features = tiny_llama.read_packed(chat("00" + "1" * 10), net.needs.taps)
    state = net.begin(1, 32, 4)
    first = net.commit(state, None, features, torch.arange(20, 32)[None], torch.tensor([12]), 32)
    stepped = [net.step(state, torch.tensor([[9]]), torch.full((1, 1), depth - 2))[:, 0] for depth in (1, 2, 3)]
    assert torch.equal(net.ahead(state), torch.stack([first, *stepped], dim=1))
    with pytest.raises(UserError, match="a round asks for 5 drafts"):
        ChainProposer(net, 5)


@torch.no_grad()
def test_rows_committed_by_themselves_keep_their_places(tiny_llama):
    """Rows 2 and 0 of three alone, then row 1, against all three at once."""
    net, g = net_for(tiny_llama, CONFIG), torch.Generator().manual_seed(4)
    features = Features(*(torch.randn(3, 6, *x, tiny_llama.hidden, generator=g) for x in ((2,), ())))
    tokens, counts = torch.randint(3, 300, (3, 6), generator=g), torch.tensor([6, 4, 5])
    together, apart = net.begin(3, 32, 4), net.begin(3, 32, 4)
    net.commit(together, None, features, tokens, counts, 32)
    for rows in (torch.tensor([2, 0]), torch.tensor([1])):
        hidden = net.commit(apart, rows, rows_of(features, rows), tokens[rows], counts[rows], 32)
        torch.testing.assert_close(hidden, net.ahead(together)[rows, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(net.ahead(apart), net.ahead(together), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_compiled_step_is_compiled_once_for_all_sizes(tiny_llama):
    """Widths follow from shapes alone: how many anchors a batch has never recompiles, and nothing leaves the graph. (Batches so small that depths
    of different shares are padded to one width are a case of their own, and so left out.)"""
    net = net_for(tiny_llama, replace(CONFIG, layers=2, depth=3))
    objective, teacher = Distillation([SoftCrossEntropy()], Uniform(), "weights"), TargetTeacher(tiny_llama, net)
    plain, compiled = (make_score(net, objective, teacher, 3, compile=flag) for flag in (False, True))
    counters.clear()
    for ones in (90, 190, 150):
        sequences = chat("000" + "1" * ones + "0" * (190 - ones))
        features, layout = tiny_llama.read_packed(sequences, net.needs.taps), net.layout(sequences, numbers=[(1, ones)])
        found = []
        for score in (plain, compiled):
            net.zero_grad()
            [term] = score(sequences, features, layout)[0].values()
            (term.sum / term.count).backward()
            found.append([term.sum.detach(), *(weight.grad.clone() for weight in net.parameters())])
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], counters


def run_of(folder, target):
    """A run whose chats do not hold the mask."""
    for name, count in (("train", 23), ("held_out", 4)):
        write_store(folder / "data" / name, ragged_chats(count, 319), target.identity)
    return folder


def test_what_is_dropped_is_the_same_however_a_window_is_shared_out(tmp_path, tiny_llama, target_folders):
    """One row in four micro-batches, and four rows in one; stopped and gone on: the draw follows from the row's number."""
    folder = target_folders("llama")
    objective = {"divergences": [SoftCrossEntropy()], "positions": Uniform(), "reduction": "weights"}

    def losses_of(name, steps, rows, accumulate):
        run = tmp_path / name if (tmp_path / name).exists() else run_of(tmp_path / name, tiny_llama)
        start(run, folder, drafter=replace(CONFIG, draft_vocab=200), objective=objective, data={"rows": rows, "length": 80}, optimizer={"schedule": "constant"},
              trainer={"max_steps": steps, "accumulate_grad_batches": accumulate})  # fmt: skip
        return logged(run)

    whole = losses_of("whole", 4, 4, 1)
    assert losses_of("parts", 4, 1, 4) == pytest.approx(whole, rel=1e-4)
    losses_of("halves", 2, 4, 1)
    assert losses_of("halves", 4, 4, 1) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"depth": 0}, "depth is 0"), ({"layers": 0}, "layers is 0"), ({"cod_ratio": 0.0}, "cod_ratio is 0.0"),
     ({"cod_least": 1.5}, "cod_least is 1.5"), ({"taps": [3, 1]}, "ascending")],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        PEagle(**arguments)
