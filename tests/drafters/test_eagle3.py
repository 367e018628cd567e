"""EAGLE-3: the two faces against each other, the layout against the chat written out by hand, the contract of what may be seen."""

import json

import pytest
import torch
from safetensors.torch import save_file

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.warm_start import WarmStart
from drafttrain.errors import UserError
from drafttrain.export.inspect import inspect_folder
from drafttrain.layouts import chain_layout, run_lengths
from drafttrain.losses import Distillation
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Sequences
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


def test_objective_equals_a_plain_loop(tiny_llama):
    net = net_for(tiny_llama, holes=True)
    sequences = chat("000" + "1" * 17)
    layout = net.layout(sequences)
    assert layout.dropped_K.sum() > 0
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    drafted = net.rows(sequences, features, layout)
    objective = Distillation()
    terms, metrics = objective.terms(drafted, net.logits, TargetTeacher(tiny_llama, net), 3)
    ids = net.vocabulary.ids
    wanted, hits = [0.0] * 4, [0] * 4
    for n in range(len(layout.depth_N)):
        k, anchor = int(layout.depth_N[n]), int(layout.anchor_N[n])
        p = tiny_llama.logits(features.final_BTD[0, anchor + k - 1])[ids].softmax(-1)
        q = (net.lm_head.weight @ drafted.hidden_NH[n]).log_softmax(-1)
        wanted[k] += float(-(p * q).sum().detach())
        hits[k] += int(ids[q.argmax()] == sequences.ids_BT[0, anchor + k])
    for k in (1, 2, 3):
        assert float(terms[f"depth_{k}"].sum.detach()) == pytest.approx(0.8 ** (k - 1) * wanted[k], rel=1e-4)
        assert float(metrics[f"loss_depth_{k}"]) == pytest.approx(wanted[k], rel=1e-4)
        assert float(terms[f"depth_{k}"].count) == objective.counts(layout, 3)[f"depth_{k}"]
        assert int(metrics[f"top1_depth_{k}"]) == hits[k]


def test_chunked_objective_equals_plain(tiny_llama):
    net = net_for(tiny_llama)
    sequences = chat("000" + "1" * 37)
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences)
    grads = []
    for chunk in (0, 7):
        net.zero_grad()
        terms, metrics = Distillation(chunk=chunk).terms(
            net.rows(sequences, features, layout), net.logits, TargetTeacher(tiny_llama, net), 3
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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda record: [], r"drafter.json is damaged"),
        (lambda record: {"class_path": "Eagle3", "init_args": {}}, r"drafter.json is damaged"),
        (
            lambda record: record | {"init_args": record["init_args"] | {"later": 1}},
            r"other arguments than this version knows .*later",
        ),
        (lambda record: record | {"init_args": None}, r"other arguments than this version knows"),
    ],
)
def test_a_record_of_something_else_is_one_sentence(tiny_llama, tmp_path, change, sentence):
    net, file = net_for(tiny_llama), tmp_path / "best" / "drafter.json"
    save_drafter(file.parent, net, net.config, tiny_llama.identity, {})
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(UserError, match=sentence):
        load_drafter(file.parent, tiny_llama)


def test_weights_that_do_not_say_their_tokens_are_one_sentence(tiny_llama, tmp_path):
    net = net_for(tiny_llama)
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    save_file(net.state_dict(), tmp_path / "best" / "drafter.safetensors")
    with pytest.raises(UserError, match="has no d2t"):
        load_drafter(tmp_path / "best", tiny_llama)


def test_a_byte_that_was_flipped_is_one_sentence_and_what_earlier_versions_saved_loads(tiny_llama, tmp_path):
    net, best = net_for(tiny_llama), tmp_path / "best"
    save_drafter(best, net, net.config, tiny_llama.identity, {})
    load_drafter(best, tiny_llama)
    data = bytearray((best / "drafter.safetensors").read_bytes())
    data[-7] ^= 1  # inside a tensor, where every reader takes it for a weight
    (best / "drafter.safetensors").write_bytes(data)
    sentence = (
        r"best/drafter.safetensors is not the file that was saved \(its sha256 is not the one in drafter.json\); restore it"
    )
    with pytest.raises(UserError, match=sentence):
        load_drafter(best, tiny_llama)
    with pytest.raises(UserError, match=sentence):
        WarmStart.open(str(best), False, net.config, tiny_llama)
    assert any("is not the file that was saved" in fault for fault in inspect_folder(str(best)).faults)
    record = json.loads((best / "drafter.json").read_text())
    for odd in ({}, {"weights": None}, {"weights": {}}):
        (best / "drafter.json").write_text(json.dumps({key: value for key, value in record.items() if key != "weights"} | odd))
        load_drafter(best, tiny_llama)


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
