"""EAGLE-3: the two faces against each other, the layout against the chat written out by hand, the contract of what may be seen."""

import pytest
import torch

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout, run_lengths
from drafttrain.losses import SoftCrossEntropy
from drafttrain.types import Features, Sequences
from drafttrain.vocab import DraftVocabulary, choose, coverage, size_for

ALL = torch.ones(400, dtype=torch.bool)


def chat(supervised, ids=None, documents=None):
    """One packed row from a string of 0/1 marks; documents as a string of digits ('.' pads)."""
    T = len(supervised)
    ids = torch.tensor([ids if ids else list(range(10, 10 + T))])
    document = torch.tensor([[-1 if d == "." else int(d) for d in (documents or "0" * T)]])
    position = torch.zeros(1, T, dtype=torch.long)
    for t in range(1, T):
        position[0, t] = position[0, t - 1] + 1 if document[0, t] == document[0, t - 1] else 0
    return Sequences(ids, torch.tensor([[s == "1" for s in supervised]]), position, document)


def net_for(target, depth=3, holes=False, seed=0):
    torch.manual_seed(seed)
    ids = torch.arange(target.vocab)
    vocabulary = DraftVocabulary(ids[ids % 5 != 2], target.vocab) if holes else DraftVocabulary.full(target.vocab)
    return Eagle3(taps=[0, 1, 3], depth=depth, draft_vocab=len(vocabulary.ids)).build(target, vocabulary).eval()


def test_six_token_chat_by_hand():
    """0 p, 1 p, 2 a, 3 b, 4 c, 5 eot: A=2 -> labels 3, 4, 5 (rows 2, 3, 4); A=3 -> 4, 5; A=4 -> 5."""
    layout = chain_layout(chat("001111"), 3, ALL)
    rows = layout.pool_M[layout.teacher_N]
    got = sorted(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), layout.label_N.tolist(), rows.tolist(), strict=True))
    assert got == [(2, 1, 13, 2), (2, 2, 14, 3), (2, 3, 15, 4), (3, 1, 14, 3), (3, 2, 15, 4), (4, 1, 15, 4)]
    assert layout.query_BQ[0, :3].tolist() == [1, 2, 3] and layout.query_BQ[0, 3] == -1


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_layout_equals_a_dense_loop(depth):
    g = torch.Generator().manual_seed(depth)
    for trial in range(20):
        T = 40
        marks = "".join("1" if x else "0" for x in torch.rand(T, generator=g) > 0.25)
        cuts = sorted(torch.randint(1, T, (2,), generator=g).tolist())
        documents = "".join("." if t >= 36 else str(sum(t >= c for c in cuts)) for t in range(T))
        marks = "".join("0" if d == "." else m for m, d in zip(marks, documents, strict=True))
        sequences = chat(marks, documents=documents)
        speakable = torch.rand(400, generator=g) > 0.2
        layout = chain_layout(sequences, depth, speakable)
        wanted, dropped = [], [0] * depth
        for A in range(1, T):
            for k in range(1, depth + 1):
                inside = A + k < T and all(marks[t] == "1" and documents[t] == documents[A] for t in range(A, A + k + 1))
                if inside and documents[A - 1] == documents[A]:
                    label = int(sequences.ids_BT[0, A + k])
                    if speakable[label]:
                        wanted.append((A, k, label, A + k - 1))
                    else:
                        dropped[k - 1] += 1
        rows = layout.pool_M[layout.teacher_N]
        got = list(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), layout.label_N.tolist(), rows.tolist(), strict=True))
        assert sorted(got) == sorted(wanted), trial
        assert layout.dropped_K.tolist() == dropped


def test_run_lengths_stop_at_documents():
    assert run_lengths(chat("0111011", documents="0000111")).tolist() == [[0, 3, 2, 1, 0, 2, 1]]


def test_training_forward_equals_decoding_step_by_step(any_target):
    """Hidden states of every scored element against a drafter that is fed the same prefix one call at a time."""
    net = net_for(any_target, depth=4)
    sequences = chat("00001111111100011111..".replace(".", "0"), documents="0" * 14 + "1" * 6 + "..")
    features = any_target.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences)
    drafted = net.rows(sequences, features, layout)
    document = sequences.document_BT[0]
    checked = 0
    for anchor in layout.anchor_N.unique().tolist():
        start = int((document == document[anchor]).nonzero()[0])
        state = net.begin(2, 40, 3)
        # Row 1 of the state decodes something else at another length: neighbours must not matter.
        taps = features.taps_BTAD[0, start:anchor]
        pad = torch.zeros(3, *taps.shape[1:])
        both = torch.stack([torch.cat([taps, pad]), torch.cat([pad, taps])])
        tokens = torch.zeros(2, len(taps) + 3, dtype=torch.long)
        tokens[0, : len(taps)] = sequences.ids_BT[0, start + 1 : anchor + 1]
        hidden = net.commit(state, None, both, tokens, torch.tensor([len(taps), len(taps) + 2]), extent=40)[0]
        for depth in range(1, 5):
            if depth > 1:
                token = sequences.ids_BT[0, anchor + depth - 1] if anchor + depth - 1 < 22 else torch.tensor(0)
                hidden = net.step(state, torch.stack([token, torch.tensor(7)])[:, None], torch.full((2, 1), depth - 3))[0, 0]
            mine = ((layout.anchor_N == anchor) & (layout.depth_N == depth)).nonzero()[:, 0]
            for n in mine.tolist():
                torch.testing.assert_close(drafted.hidden_NH[n], hidden, atol=1e-5, rtol=1e-4)
                assert drafted.prev_N[n] == sequences.ids_BT[0, anchor + depth - 1]
                checked += 1
    assert checked == len(layout.depth_N) > 20


def test_committing_in_pieces_equals_committing_at_once(any_target):
    net = net_for(any_target)
    g = torch.Generator().manual_seed(0)
    taps = torch.randn(1, 12, 3, any_target.hidden, generator=g)
    tokens = torch.randint(3, any_target.vocab, (1, 12), generator=g)
    whole = net.commit(net.begin(1, 32, 2), None, taps, tokens, torch.tensor([12]), extent=32)
    state = net.begin(1, 32, 2)
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 12)):
        padded = torch.cat([taps[:, start:stop], torch.full((1, 3, 3, any_target.hidden), 9.0)], dim=1)
        padded_tokens = torch.cat([tokens[:, start:stop], torch.full((1, 3), 5)], dim=1)
        hidden = net.commit(state, None, padded, padded_tokens, torch.tensor([stop - start]), extent=32)
        net.step(state, torch.tensor([[11]]), torch.tensor([[-1]]))  # drafted and rejected: must leave no trace
        net.step(state, torch.tensor([[12]]), torch.tensor([[0]]))
    torch.testing.assert_close(hidden, whole, atol=1e-5, rtol=1e-4)


def test_branches_of_a_tree_equal_chains_of_their_own(any_target):
    """Every node of a random tree, stepped level by level, against the chain from the anchor to it, stepped token by token."""
    net, batch, nodes = net_for(any_target), 2, 9
    g = torch.Generator().manual_seed(1)
    counts, longest = torch.tensor([7, 11]), 11
    taps = torch.randn(batch, longest, 3, any_target.hidden, generator=g)
    context = torch.randint(3, any_target.vocab, (batch, longest), generator=g)
    tokens = torch.randint(3, any_target.vocab, (batch, nodes), generator=g)
    parents = torch.tensor([[-1, -1, -1, 0, 0, 2, 3, 3, 5], [-1, -1, -1, 2, 1, 1, 5, 4, 4]])  # three levels of three

    def begun():
        state = net.begin(batch, 32, nodes)
        net.commit(state, None, taps, context, counts, 32)
        return state

    state = begun()
    got = torch.cat([net.step(state, tokens[:, i : i + 3], parents[:, i : i + 3]) for i in (0, 3, 6)], dim=1)
    for n in range(nodes):
        paths = []
        for b in range(batch):
            path, node = [], n
            while node >= 0:
                path.insert(0, node)
                node = int(parents[b, node])
            paths.append(path)
        state = begun()
        for depth in range(len(paths[0])):
            step = torch.stack([tokens[b, paths[b][depth]] for b in range(batch)])[:, None]
            wanted = net.step(state, step, torch.full((batch, 1), depth - 1))
        torch.testing.assert_close(got[:, n], wanted[:, 0], atol=1e-5, rtol=1e-4)


def test_a_draft_sees_rows_before_its_anchor_only(tiny_llama):
    """Altering the features of any row >= A leaves drafts from A alone; altering row A-1, or the anchor token, does not."""
    net = net_for(tiny_llama)
    sequences = chat("0001111111")
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences)
    anchor = 5
    mine = layout.anchor_N == anchor
    before = net.rows(sequences, features, layout).hidden_NH[mine]

    def altered(rows=None, token=None):
        taps, ids = features.taps_BTAD.clone(), sequences.ids_BT.clone()
        if rows is not None:
            taps[:, rows] += 1.0
        if token is not None:
            ids[0, token] += 1
        changed = Sequences(ids, sequences.supervised_BT, sequences.position_BT, sequences.document_BT)
        return net.rows(changed, Features(taps, features.final_BTD), layout).hidden_NH[mine]

    assert torch.equal(altered(rows=slice(anchor, None)), before)
    assert not torch.allclose(altered(rows=slice(anchor - 1, anchor)), before, atol=1e-3)
    assert not torch.allclose(altered(token=anchor), before, atol=1e-3)
    assert torch.equal(altered(token=anchor + 3), before)  # depth 3 reads A+2 last
    # A token inside the draft is read by deeper steps only.
    deeper = altered(token=anchor + 1)
    depth = layout.depth_N[mine]
    assert torch.equal(deeper[depth == 1], before[depth == 1])
    assert not torch.allclose(deeper[depth == 2], before[depth == 2], atol=1e-3)


def test_packed_documents_do_not_see_each_other(tiny_llama):
    net = net_for(tiny_llama)
    sequences = chat("0011110111", documents="0000001111")
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences)
    packed = net.rows(sequences, features, layout)
    alone = chat("0111", ids=sequences.ids_BT[0, 6:].tolist())
    alone_layout = net.layout(alone)
    single = net.rows(alone, tiny_llama.read_packed(alone, net.needs.taps), alone_layout)
    mine = layout.anchor_N >= 6
    torch.testing.assert_close(packed.hidden_NH[mine], single.hidden_NH, atol=1e-5, rtol=1e-4)
    assert (layout.anchor_N[mine] - 6).tolist() == alone_layout.anchor_N.tolist()


def test_objective_equals_a_plain_loop(tiny_llama):
    net = net_for(tiny_llama, holes=True)
    sequences = chat("000" + "1" * 17)
    layout = net.layout(sequences)
    assert layout.dropped_K.sum() > 0
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    drafted = net.rows(sequences, features, layout)
    objective = SoftCrossEntropy(decay=0.8)
    teacher = lambda final: tiny_llama.logits(final, net.vocabulary.ids)  # noqa: E731
    terms, metrics = objective.terms(drafted, net.logits, teacher, 3)
    ids = net.vocabulary.ids
    wanted, hits = [0.0] * 4, [0] * 4
    for n in range(len(layout.depth_N)):
        k, anchor = int(layout.depth_N[n]), int(layout.anchor_N[n])
        p = tiny_llama.logits(features.final_BTD[0, anchor + k - 1])[ids].softmax(-1)
        q = (net.lm_head.weight @ drafted.hidden_NH[n]).log_softmax(-1)
        wanted[k] += float(-(p * q).sum().detach())
        hits[k] += int(ids[q.argmax()] == sequences.ids_BT[0, anchor + k])
    for k in (1, 2, 3):
        assert float(terms[f"depth_{k}"].sum) == pytest.approx(wanted[k], rel=1e-4)
        assert float(terms[f"depth_{k}"].count) == objective.counts(layout, 3)[f"depth_{k}"]
        assert terms[f"depth_{k}"].coefficient == pytest.approx(0.8 ** (k - 1))
        assert int(metrics[f"top1_depth_{k}"]) == hits[k]


def test_chunked_objective_equals_plain(tiny_llama):
    net = net_for(tiny_llama)
    sequences = chat("000" + "1" * 37)
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences)
    grads = []
    for chunk in (0, 7):
        net.zero_grad()
        terms, metrics = SoftCrossEntropy(chunk=chunk).terms(
            net.rows(sequences, features, layout), net.logits, tiny_llama.logits, 3
        )
        sum(t.sum for t in terms.values()).backward()
        grads.append([p.grad.clone() for p in net.parameters()] + [terms["depth_2"].sum.detach(), metrics["top1_depth_1"]])
    for plain, chunked in zip(*grads, strict=True):
        torch.testing.assert_close(plain, chunked, atol=1e-4, rtol=1e-4)


def test_saved_and_loaded_is_the_same_net(tiny_llama, targets, tmp_path):
    net = net_for(tiny_llama, holes=True)
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {"step": 3})
    loaded, record = load_drafter(tmp_path / "best", tiny_llama)
    assert record["facts"] == {"step": 3}
    for name, value in net.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert torch.equal(net.vocabulary.ids, loaded.vocabulary.ids)
    with pytest.raises(UserError, match="another target"):
        load_drafter(tmp_path / "best", targets("qwen3"))
    (tmp_path / "best" / "drafter.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(tmp_path / "best", tiny_llama)


def test_nothing_of_the_target_is_trained_or_saved(tiny_llama):
    net = net_for(tiny_llama)
    trained = {p.data_ptr() for p in net.parameters()}
    assert not trained & {p.data_ptr() for p in tiny_llama.model.parameters()}
    assert not any("embed" in name for name in net.state_dict())


def test_vocabulary_choice_and_offsets():
    counts = torch.zeros(50, dtype=torch.long)
    counts[[7, 30, 41]] = torch.tensor([5, 9, 1])
    prompts = torch.zeros(50, dtype=torch.long)
    prompts[20] = 4
    chosen = choose(counts, 6, prompts)
    assert chosen.ids.tolist() == [0, 1, 7, 20, 30, 41]
    for draft, target in enumerate(chosen.ids.tolist()):
        assert draft + int(chosen.d2t[draft]) == target
    assert chosen.t2d.nonzero()[:, 0].tolist() == chosen.ids.tolist()
    assert DraftVocabulary.from_d2t(chosen.d2t, 50).ids.tolist() == chosen.ids.tolist()
    assert coverage(chosen, counts) == 1.0 and coverage(choose(counts, 1), counts) == pytest.approx(9 / 15)
    with pytest.raises(UserError, match="draft_vocab is 51"):
        choose(counts, 51)
    with pytest.raises(UserError, match="covers 60.0%"):
        choose(counts, 1, least_coverage=0.9)
    assert choose(counts, None).is_full
    assert 49 in choose(counts, 2, always=(49,)).ids.tolist()


def test_a_draft_vocabulary_by_coverage():
    counts = torch.tensor([0, 50, 30, 15, 5])
    assert [size_for(counts, share) for share in (0.5, 0.8, 0.95, 0.96, 1.0)] == [1, 2, 3, 4, 4]
    assert size_for(torch.zeros(3), 0.9) == 1
    many = torch.arange(1000, 0, -1)
    chosen = choose(many, 0.5)
    assert len(chosen.ids) % 64 == 0 and 0.5 <= coverage(chosen, many) < 0.55
    for bad in (0.0, 1.5, 0, -3):
        with pytest.raises(UserError, match="draft_vocab"):
            Eagle3(draft_vocab=bad)
