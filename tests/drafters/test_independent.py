"""A stand-alone drafter against transformers' own classes, from their checkpoints and fresh; and what it refuses to begin from."""

import json
from dataclasses import replace

import pytest
import torch
from drafters import test_faces as faces
from drafters.test_eagle3 import chat
from safetensors.torch import load_file, save_file
from tiny import COMMON, VOCAB, build_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.language_model import first_token
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.types import Features, Request
from drafttrain.vocab import DraftVocabulary

SIZES = dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, intermediate_size=40, num_hidden_layers=3)
OTHER = COMMON | SIZES
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FORMS = {
    "llama": lambda: LlamaConfig(**OTHER, rope_parameters=LLAMA3),
    "llama tied, short": lambda: LlamaConfig(**OTHER | {"max_position_embeddings": 128, "tie_word_embeddings": True}),
    "qwen3": lambda: Qwen3Config(**OTHER | {"head_dim": 16}),
    "qwen3 tied": lambda: Qwen3Config(**OTHER, tie_word_embeddings=True),
}
FULL = DraftVocabulary.full(VOCAB)
TIED = Independent(**faces.SMALL | {"hidden": 24}, layers=2, depth=4, qk_norm=True)


def folder_of(config, folder, seed=3):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=FORMS)
def published(request, tmp_path_factory):
    return folder_of(FORMS[request.param](), tmp_path_factory.mktemp("model"))


def theirs(folder, ids_T):
    """[T, V] by transformers."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids_T[None]).logits[0]


def along(net, target, ids_T):
    """[T-2, V]: what training scores behind tokens 1, ..., T-2."""
    sequences = one_chat(ids_T, 0)
    with torch.no_grad():
        layout = net.layout(sequences, 1)
        drafted = net.rows(sequences, target.read_packed(sequences, ()), layout)
        return net.logits(drafted.hidden_NH, drafted.prev_N)


def text(target, count=20):
    ids_T = torch.randint(3, target.vocab, (count,), generator=torch.Generator().manual_seed(1))
    ids_T[0] = first_token(target)
    return ids_T


# ---- what it computes --------------------------------------------------------------------------------------------------------


def test_it_says_what_the_model_says_that_it_begins_as(tiny_llama, published):
    """In training and in drafting, a piece at a time."""
    net = Independent(model=published).build(tiny_llama, FULL).eval()
    ids_T = text(tiny_llama)
    wanted = theirs(published, ids_T)
    torch.testing.assert_close(along(net, tiny_llama, ids_T), wanted[1:-1], atol=1e-5, rtol=1e-5)
    features = Features(torch.zeros(1, 6, 0, 32), torch.zeros(1, 6, 32))
    state = net.begin(1, 24, 8)
    for start in (1, 7):
        hidden = net.commit(state, None, features, ids_T[None, start : start + 6], torch.tensor([6]), 64)
        torch.testing.assert_close(net.logits(hidden, ids_T[:1])[0], wanted[start + 5], atol=1e-5, rtol=1e-5)
    for depth, token in enumerate(ids_T[13:19].tolist()):
        hidden = net.step(state, torch.tensor([[token]]), torch.tensor([[depth - 1]]))[0]
        torch.testing.assert_close(net.logits(hidden, ids_T[:1])[0], wanted[13 + depth], atol=1e-5, rtol=1e-5)
    assert float(wanted.std()) > 0.1


def test_a_width_of_its_own_and_one_table(any_target):
    """The contract of both faces where the width is not the target's, and embedding and head are one."""
    torch.manual_seed(0)
    net = faces.shaken(TIED.build(any_target, FULL))
    sequences = chat("0000111111110001111100", documents="0" * 14 + "1" * 6 + "..")
    features, layout, drafted = faces.drafted_of(net, any_target, sequences)
    trained, ids_T = net.logits(drafted.hidden_NH, drafted.prev_N), sequences.ids_BT[0]
    for n, (anchor, depth) in enumerate(zip(layout.anchor_N.tolist(), layout.depth_N.tolist(), strict=True)):
        start = 14 if anchor >= 14 else 0
        T = anchor - start
        state = net.begin(1, 40, 4)
        tokens = ids_T[None, start + 1 : anchor + 1]
        hidden = net.commit(state, None, features, tokens, torch.tensor([T]), 40)
        for k in range(1, depth):
            hidden = net.step(state, ids_T[anchor + k].view(1, 1), torch.tensor([[k - 2]]))[0]
        torch.testing.assert_close(trained[n], net.logits(hidden, ids_T[:1])[0], atol=1e-4, rtol=1e-4)
    assert net.per_word == 24 and not net.words and len(layout.depth_N) > 20


def test_whatever_a_text_begins_with_it_reads_the_token_that_chats_begin_with(tiny_llama):
    net = faces.shaken(TIED.build(tiny_llama, FULL))
    ids_T = text(tiny_llama)
    other_T = ids_T.clone()
    other_T[0] = 77
    assert first_token(tiny_llama) == 1 and torch.equal(*(along(net, tiny_llama, ids) for ids in (ids_T, other_T)))
    other_T[1] = 78
    assert not torch.allclose(along(net, tiny_llama, ids_T)[5:], along(net, tiny_llama, other_T)[5:], atol=1e-3)


def test_chats_that_begin_with_the_users_own_words_are_refused(tiny_llama, monkeypatch):
    monkeypatch.setattr(tiny_llama.tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UserError, match="begin with the user's own words"):
        TIED.build(tiny_llama, FULL)


def test_the_target_as_its_own_drafter_is_always_right(tiny_llama, target_folders):
    """Of rounds that end within an answer every draft is kept, where the prompt begins as chats do."""
    net = Independent(model=str(target_folders("llama"))).build(tiny_llama, FULL)
    requests = [Request(f"p{i}", (first_token(tiny_llama), *range(5 + i, 12 + i)), 21) for i in range(3)]
    rollouts = list(Engine(tiny_llama, proposer=ChainProposer(net, 4), slots=2, debug=True).generate(requests))
    assert {count for rollout in rollouts for count in rollout.accepted} == {4}


# ---- what it begins from -----------------------------------------------------------------------------------------------------


def test_a_part_of_the_vocabulary_has_the_rows_of_the_models_head(tiny_llama, tmp_path):
    folder, ids_T = folder_of(FORMS["llama"](), tmp_path), text(tiny_llama)
    vocabulary = DraftVocabulary(torch.arange(3, VOCAB, 7), VOCAB)
    net = Independent(model=folder, draft_vocab=len(vocabulary.ids)).build(tiny_llama, vocabulary)
    sequences = one_chat(ids_T, 0)
    layout = net.layout(sequences, 1)
    said = net.logits(net.rows(sequences, tiny_llama.read_packed(sequences, ()), layout).hidden_NH, ids_T[:1])
    torch.testing.assert_close(said, theirs(folder, ids_T)[layout.anchor_N][:, vocabulary.ids], atol=1e-5, rtol=1e-5)
    assert len(said) == len(layout.depth_N) > 0


def test_saved_and_loaded_it_is_the_same(tiny_llama, published, tmp_path):
    net = faces.shaken(Independent(model=published).build(tiny_llama, FULL))
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    again, _ = load_drafter(tmp_path / "best", tiny_llama)
    ids_T = text(tiny_llama)
    assert torch.equal(along(again, tiny_llama, ids_T), along(net, tiny_llama, ids_T)) and again.config == net.config


def test_fresh_weights_are_drawn_alike_and_small(tiny_llama):
    one, other = (torch.manual_seed(5) and replace(TIED, tied=False).build(tiny_llama, FULL).state_dict() for _ in range(2))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    matrices = {name: weight for name, weight in one.items() if weight.dim() > 1}
    assert len(matrices) == 2 + 2 * 7 and all(0.015 < float(weight.std()) < 0.025 for weight in matrices.values())


REFUSED = {
    "another form": (lambda: MistralConfig(**OTHER), "type 'mistral', but a stand-alone drafter is one of llama or qwen3"),
    "more tokens": (lambda: LlamaConfig(**OTHER | {"vocab_size": 321}), "has 321 rows, the target's 320"),
    "biases": (lambda: LlamaConfig(**OTHER, attention_bias=True, mlp_bias=True), "attention_bias is True, .*; mlp_bias is True"),
    "a window": (lambda: Qwen3Config(**OTHER, use_sliding_window=True, sliding_window=8), "use_sliding_window is True"),
    "another activation": (lambda: LlamaConfig(**OTHER, hidden_act="gelu"), "hidden_act is 'gelu', not 'silu'"),
    "positions that depend on their number": (
        lambda: LlamaConfig(
            **OTHER | {"max_position_embeddings": 128}, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "dynamic positions are made for 128, and the target reads 512",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_draft_is_refused(tiny_llama, tmp_path, case):
    config, complaint = REFUSED[case]
    folder = folder_of(config(), tmp_path)
    with pytest.raises(UserError, match=complaint) as error:
        Independent(model=folder).build(tiny_llama, FULL)
    assert str(error.value).startswith(f"drafter.init_args.model {folder} ")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantised"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "it rotates a part of each head"),
        ({"num_attention_heads": 5}, "a config.json that cannot be read"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_computed_is_refused(tiny_llama, tmp_path, change, complaint):
    folder, file = folder_of(FORMS["llama"](), tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=complaint):
        Independent(model=folder).build(tiny_llama, FULL)


def test_a_config_that_says_nothing_of_quantisation_is_one_of_plain_weights(tiny_llama, tmp_path):
    folder, file = folder_of(FORMS["llama"](), tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {}}))
    assert Independent(model=folder).build(tiny_llama, FULL)


def test_a_damaged_or_foreign_folder_is_refused(tiny_llama, tmp_path):
    folder = folder_of(FORMS["qwen3"](), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = load_file(weights)

    def complaint(tensors=None):
        save_file(tensors or whole, weights, metadata={"format": "pt"})
        with pytest.raises(UserError) as error:
            Independent(model=folder).build(tiny_llama, FULL)
        return str(error.value)

    norm = "model.layers.1.self_attn.q_norm.weight"
    assert f"{norm} is missing" in complaint({name: x for name, x in whole.items() if name != norm})
    assert "model.extra is unknown" in complaint(whole | {"model.extra": torch.zeros(2)})
    assert f"{norm} is [4] instead of [16]" in complaint(whole | {norm: torch.ones(4)})
    assert f"{norm} does not hold finite" in complaint(whole | {norm: torch.full((16,), torch.nan)})
    weights.write_bytes(b"nothing")
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        Independent(model=folder).build(tiny_llama, FULL)
    weights.unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds no weights as safetensors, and nothing else is read; give"):
        Independent(model=folder).build(tiny_llama, FULL)
    with pytest.raises(UserError, match="drafter.init_args.model is /nowhere, but there is no such folder"):
        Independent(model="/nowhere").build(tiny_llama, FULL)


def test_another_tokenizer_is_refused(tiny_llama, tmp_path):
    folder = folder_of(FORMS["llama"](), tmp_path)
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    first, second = list(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="has another tokenizer than .*, so its tokens mean something else"):
        Independent(model=folder).build(tiny_llama, FULL)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="has no tokenizer that can be read"):
        Independent(model=folder).build(tiny_llama, FULL)


def test_options_that_contradict_each_other_are_refused(tiny_llama):
    for options, complaint in (
        ({"model": "a/b", "layers": 2, "tied": False}, "sizes of its own, but layers, tied are set too"),
        ({"model": "a/b", "hidden": 8}, "but hidden is set too"),
        ({"heads": 4, "kv_heads": 3}, "heads is 4, but must be a multiple of kv_heads, which is 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"layers": 0}, "layers is 0, but must be at least 1"),
        ({"depth": 0}, "depth is 0, but must be at least 1"),
    ):
        with pytest.raises(UserError, match=complaint):
            Independent(**options)
    with pytest.raises(UserError, match="its table of all of them .tied.; set draft_vocab to null, or tied to false"):
        replace(TIED, draft_vocab=100).build(tiny_llama, DraftVocabulary(torch.arange(100), VOCAB))


def test_a_tied_model_says_all_tokens(tiny_llama, tmp_path):
    folder, ids_T = folder_of(FORMS["qwen3 tied"](), tmp_path), text(tiny_llama)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    wanted = along(Independent(model=folder).build(tiny_llama, FULL), tiny_llama, ids_T)
    save_file(
        tensors | {"lm_head.weight": torch.zeros(VOCAB, 24)}, tmp_path / "model.safetensors"
    )  # some write it, nobody reads it
    assert torch.equal(along(Independent(model=folder).build(tiny_llama, FULL), tiny_llama, ids_T), wanted)
    with pytest.raises(UserError, match="set draft_vocab to null, or give a model with a head of its own"):
        Independent(model=folder).build(tiny_llama, DraftVocabulary(torch.arange(100), VOCAB))
