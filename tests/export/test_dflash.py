"""DFlash against a plain reference of the engines' class, each known mistake among them; its config.json, and what is not written or read."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from drafttrain.drafters.dflash import DFlash
from drafttrain.errors import UserError
from drafttrain.export.backbone import facts_of, layer_config
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.export.rows import reads_raw

from .reference import ReferenceDFlash
from .test_eagle3 import PROMPT, close, edit_tensors, hf_hidden_states, text
from .test_eagle_medusa import capped, make_net, ours

PLAIN = DFlash(block=5, layers=2, taps=[0, 2], mask_token=319)
SLIDING = DFlash(block=6, layers=2, taps=[0, 2], mask_token=317, window=6)
CASES = (
    ("sglang", PLAIN, None), ("vllm", PLAIN, None), ("vllm", PLAIN, 60), ("vllm", SLIDING, None), ("vllm", SLIDING, 319),
    ("vllm", DFlash(block=2, layers=1, taps=[3], mask_token=318), None), ("speculators", PLAIN, None), ("speculators", PLAIN, 60),
    ("sglang", DFlash(block=8, layers=3, mask_token=319), None),
)  # fmt: skip


def exported(target, folder, asked="vllm", config=PLAIN, draft_vocab=None):
    net = make_net(target, config, draft_vocab)
    made = export_drafter(net, target, folder, ExportConfig(dtype="float32", format=asked), None)
    sequences = text(net, PROMPT + config.block)
    return SimpleNamespace(
        net=net, made=made, sequences=sequences, drafts=config.block - 1, folder=folder,
        reference=lambda: ReferenceDFlash(folder, target.embedding_weight, target.head_weight),
        taps=lambda layers: hf_hidden_states(target, sequences.ids_BT, layers),
    )  # fmt: skip


def drafted(case, reference, taps_TAD=None, drafts=None):
    taps_TAD = case.taps(reference.vllm_layers())[:PROMPT] if taps_TAD is None else taps_TAD
    return reference.draft(int(case.sequences.ids_BT[0, PROMPT]), taps_TAD, drafts or case.drafts)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, **changes):
    """Nested fields are given as dflash_config={...}, and merged."""
    (folder / "drafttrain.json").unlink(missing_ok=True)
    config = config_of(folder)
    for name, value in changes.items():
        config[name] = config[name] | value if name in ("dflash_config", "transformer_layer_config") else value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("asked", "config", "draft_vocab"), CASES)
@torch.no_grad()
def test_an_engine_computes_our_dflash(targets, tmp_path, architecture, asked, config, draft_vocab):
    """Three computations: training's rows, the decoding face, the plain reference on the folder and on transformers' hidden states."""
    target = targets(architecture)
    if not reads_raw(target) and asked != "vllm":
        with pytest.raises(UserError, match="raw ones"):
            exported(target, tmp_path / "export", asked, config, draft_vocab)
        return
    case = exported(target, tmp_path / "export", asked, config, draft_vocab)
    reference = case.reference()
    assert reference.vllm_layers() == reference.sglang_layers()
    if asked == "sglang":
        assert all(reference.vllm_reach(i) == reference.sglang_reach(i) for i in range(config.layers))
    wanted = capped(target, drafted(case, reference))
    assert reference.used | {"d2t", "t2d"} == reference.weights.keys() | {"d2t", "t2d"}
    for got in ours(case.net, target, case.sequences, case.drafts):
        close(got, wanted)
    assert float(wanted[wanted.isfinite()].std()) > 0.5 and len(wanted) == config.block - 1


def _forget_hidden_norm(bent):
    bent.combine = lambda taps: bent.linear("fc", taps.float().flatten(1))


def _norm_context_again(bent):
    bent.context = lambda layer, c: bent.norm(f"layers.{layer}.input_layernorm", c)


def _leave_context_keys(bent):
    plain = bent.key_rows
    without = {i: torch.ones_like(bent.weights[f"layers.{i}.self_attn.k_norm.weight"]) for i in range(2)}

    def keys(layer, x, start):
        if start:
            return plain(layer, x, start)
        name = f"layers.{layer}.self_attn.k_norm.weight"
        kept, bent.weights[name] = bent.weights[name], without[layer]
        found = plain(layer, x, start)
        bent.weights[name] = kept
        return found

    bent.key_rows = keys


def _forget_q_norm(bent):
    for i in range(2):
        bent.weights[f"layers.{i}.self_attn.q_norm.weight"] = torch.ones(8)


def _draft_from_slot_0(bent):
    bent.speaking = lambda slots: slots[:-1]


def _anchor_one_later(bent):
    plain = bent.slots
    bent.slots = lambda anchor, taps, drafts, start: plain(anchor, taps, drafts, start + 1)


def _forget_last_norm(bent):
    plain = bent.norm
    bent.norm = lambda name, x: x if name == "norm" else plain(name, x)


MISTAKES = {
    "mask_of_another_row": lambda bent: bent.nested.update(mask_token_id=bent.nested["mask_token_id"] - 1),
    "hidden_norm_missing": _forget_hidden_norm,
    "context_normed_in_each_layer": _norm_context_again,
    "context_keys_not_normed": _leave_context_keys,
    "q_norm_missing": _forget_q_norm,
    "causal_block": lambda bent: bent.nested.update(causal=True),
    "slot_0_speaks": _draft_from_slot_0,
    "anchor_one_position_later": _anchor_one_later,
    "same_positions": lambda bent: setattr(bent, "rotate", lambda x, t: x),
    "last_norm_missing": _forget_last_norm,
    "absolute_d2t": lambda bent: setattr(bent, "ids", bent.weights["d2t"]),
    "anchor_masked_too": lambda bent: setattr(
        bent, "slots", lambda anchor, *rest, plain=bent.slots: plain(bent.nested["mask_token_id"], *rest)
    ),
}
SLIDING_MISTAKES = {
    "window_one_longer": lambda bent: bent.nested.update(swa_window_size=7),
    "window_one_shorter": lambda bent: bent.nested.update(swa_window_size=5),
    "window_ignored": lambda bent: bent.config.update(layer_types=["full_attention"] * 2),
    "sliding_means_causal": lambda bent: bent.nested.pop("causal"),
}


@pytest.mark.parametrize("mutation", [*MISTAKES, *SLIDING_MISTAKES])
@torch.no_grad()
def test_the_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    sliding = mutation in SLIDING_MISTAKES
    case = exported(tiny_llama, tmp_path / "export", "vllm", SLIDING if sliding else PLAIN, None if sliding else 300)
    reference, bent = case.reference(), case.reference()
    (SLIDING_MISTAKES if sliding else MISTAKES)[mutation](bent)
    assert not torch.allclose(drafted(case, reference), drafted(case, bent), rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    "mutation", ["layers_one_lower", "layers_one_higher", "context_reaches_the_anchor", "context_ends_a_row_early"]
)
@torch.no_grad()
def test_the_comparison_notices_other_features(tiny_llama, tmp_path, mutation):
    case = exported(tiny_llama, tmp_path / "export")
    reference, layers = case.reference(), case.reference().vllm_layers()
    shift, rows = {
        "layers_one_lower": (-1, PROMPT), "layers_one_higher": (1, PROMPT), "context_reaches_the_anchor": (0, PROMPT + 1),
        "context_ends_a_row_early": (0, PROMPT - 1),
    }[mutation]  # fmt: skip
    bent, bent_taps = case.reference(), case.taps([k + shift for k in layers])[:rows]
    plain = bent.slots
    bent.slots = lambda anchor, taps, drafts, start: plain(anchor, taps, drafts, PROMPT)
    assert not torch.allclose(drafted(case, reference), drafted(case, bent, bent_taps), rtol=0, atol=1e-2)


@torch.no_grad()
def test_fewer_drafts_are_another_block_so_the_card_asks_for_all(tiny_llama, tmp_path):
    """Both engines make the block as long as the drafts that are asked for."""
    case = exported(tiny_llama, tmp_path / "export", "sglang")
    reference = case.reference()
    whole, shorter = drafted(case, reference), drafted(case, reference, drafts=2)
    assert not torch.allclose(whole[:2], shorter, rtol=0, atol=1e-2)
    assert any("Ask for 4 drafts" in note for note in case.made["notes"])
    card = (case.folder / "README.md").read_text()
    assert '"method": "dflash"' in card and '"num_speculative_tokens": 4' in card
    assert "--speculative-algorithm DFLASH" in card and "--speculative-num-draft-tokens 5" in card and "num-steps" not in card


@torch.no_grad()
def test_an_engine_lends_the_raw_table_of_embeddings(targets, tmp_path):
    """Gemma multiplies it, so the drafter brings its own; a table that fits neither is not read."""
    target = targets("gemma3")
    case = exported(target, tmp_path / "export")
    right, wrong = case.reference(), case.reference()
    wrong.embedding_VH = target.embedding_weight.float()
    assert not torch.allclose(drafted(case, right), drafted(case, wrong), rtol=0, atol=1e-2)
    assert config_of(case.folder)["has_embed_tokens"] and any("embeddings are in the file" in note for note in case.made["notes"])
    (case.folder / "drafttrain.json").unlink()
    edit_tensors(case.folder, lambda t: t["embed_tokens.weight"].mul_(1.1))
    with pytest.raises(UserError, match="table of embeddings that is not the target's"):
        load_export(case.folder, target)


def test_config_json_by_hand(tiny_llama, tmp_path):
    word = tiny_llama.tokenizer.convert_ids_to_tokens(319)
    assert tiny_llama.tokenizer.get_vocab()[word] == 319
    exported(tiny_llama, tmp_path / "export", "sglang")
    assert config_of(tmp_path / "export") == {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False, "vocab_size": 320, "draft_vocab_size": 320,
        "tie_word_embeddings": False, "max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "float32", "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "block_size": 5, "num_target_layers": 5,
        "has_embed_tokens": False, "is_causal": False, "eagle_aux_hidden_state_layer_ids": [1, 3],
        "dflash_config": {
            "mask_token_id": 319, "mask_token": word, "target_layer_ids": [0, 2], "causal": False, "sample_from_anchor": False,
            "use_aux_hidden_state": True, "use_swa": False,
        },
    }  # fmt: skip
    exported(tiny_llama, tmp_path / "sliding", "vllm", SLIDING, 60)
    config = config_of(tmp_path / "sliding")
    assert config["draft_vocab_size"] == 60 and config["layer_types"] == ["sliding_attention"] * 2
    assert (
        config["dflash_config"]["use_swa"] is True and config["dflash_config"]["swa_window_size"] == config["sliding_window"] == 6
    )


@pytest.mark.parametrize("config", [PLAIN, SLIDING])
def test_transformers_reads_the_layers_that_were_meant(tiny_llama, tmp_path, config):
    """Both engines read config.json with transformers, whose Qwen3 drops a window unless it is told to use it."""
    exported(tiny_llama, tmp_path / "export", "vllm", config)
    got = Qwen3Config.from_pretrained(tmp_path / "export")
    assert got.sliding_window == config.window and got.num_hidden_layers == config.layers
    assert got.layer_types == [f"{'full' if config.window is None else 'sliding'}_attention"] * config.layers
    assert got.is_causal is False and got.dflash_config["mask_token_id"] == config.mask_token
    net = load_export(tmp_path / "export", tiny_llama)
    bare = layer_config(facts_of(net, tiny_llama), torch.float32, {}) | {"use_sliding_window": False}
    assert Qwen3Config(**bare).sliding_window is None  # the trap is there


def test_a_mask_without_a_text_names_none(tiny_llama, tmp_path, monkeypatch):
    """A padding row behind the last token, chosen for this target, has no text; SGLang looks for its default one and does not find it."""
    monkeypatch.setattr(type(tiny_llama.tokenizer), "__len__", lambda self: 319)
    config = replace(PLAIN, mask_token=None, taps=[])
    exported(tiny_llama, tmp_path / "export", "sglang", config)
    nested = config_of(tmp_path / "export")["dflash_config"]
    assert "mask_token" not in nested and nested["mask_token_id"] == 319 and nested["target_layer_ids"] == [1, 2]
    again = load_export(tmp_path / "export", tiny_llama)
    assert again.config == config and (again.mask, again.needs.taps) == (319, (1, 2))  # what was left to be chosen stays so


@pytest.mark.parametrize(
    ("asked", "config", "draft_vocab", "complaint"),
    [
        ("sglang", PLAIN, 60, "says every token of the target, and this drafter says 60; set export.format to vllm"),
        ("sglang", SLIDING, None, "window of 6 takes in depend on SGLang's attention backend; set export.format to vllm"),
        (
            "vllm",
            DFlash(block=6, layers=1, taps=[1], mask_token=319, window=5),
            None,
            "window 6 or more, or set export.format to native",
        ),
        ("speculators", SLIDING, None, "window from the anchor"),
    ],
)
def test_what_an_engine_would_compute_otherwise_is_refused(tiny_llama, tmp_path, asked, config, draft_vocab, complaint):
    with pytest.raises(UserError, match=complaint):
        exported(tiny_llama, tmp_path / "export", asked, config, draft_vocab)
    assert not list(tmp_path.iterdir())
    best = exported(tiny_llama, tmp_path / "export", None, config, draft_vocab).made
    assert best["format"] == ("native" if config.window == 5 else "dflash-vllm")


@pytest.mark.parametrize("asked", ["vllm", "speculators"])
def test_the_other_layout_is_refused_by_name(tiny_llama, tmp_path, monkeypatch, asked):
    """A folder whose first slot speaks, in each place where the flag may stand; and a net that somebody turned into one."""
    case = exported(tiny_llama, tmp_path / "export", asked)
    places = [{"sample_from_anchor": True}] + ([{"dflash_config": {"sample_from_anchor": True}}] if asked == "vllm" else [])
    whole = (case.folder / "config.json").read_text()
    for change in places:
        (case.folder / "config.json").write_text(whole)
        edit_config(case.folder, **change)
        with pytest.raises(UserError, match=r"1\+N only"):
            load_export(case.folder, tiny_llama)
    monkeypatch.setattr(type(case.net), "first", 0)
    with pytest.raises(UserError, match=r"1\+N only"):
        export_drafter(case.net, tiny_llama, tmp_path / "again", ExportConfig(format=asked), None)


def test_a_causal_net_is_not_written(tiny_llama, tmp_path, monkeypatch):
    net = make_net(tiny_llama, PLAIN, None)
    monkeypatch.setattr(type(net), "causal", True)
    for asked, complaint in (("vllm", "'causal': True"), ("speculators", "sliding_window_non_causal is False")):
        with pytest.raises(UserError, match=complaint):
            export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(format=asked), None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"layer_ids is \[0, 2\], not \[1, 3\]"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, r"layer_ids is \[1, 3\], not \[2, 4\]"),
        ({"dflash_config": {"target_layer_ids": [2, 0]}}, "must ascend"),
        ({"dflash_config": {"target_layer_ids": [0, 5]}}, "from 0 to 4"),
        ({"dflash_config": {"mask_token_id": 320}}, "the mask is number 320"),
        ({"dflash_config": {"causal": True}}, "dflash_config"),
        ({"dflash_config": {"use_swa": True}}, "dflash_config"),
        ({"is_causal": True}, "is_causal is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "llama"}, "model_type"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"rope_theta": 5.0}, "RoPE"),
        ({"attention_bias": True}, "attention_bias"),
        ({"draft_vocab_size": 300}, "d2t is missing"),
        ({"sliding_window": 9}, "layer_types"),
    ],
)  # fmt: skip
def test_fields_that_disagree_or_mean_another_network_are_named(tiny_llama, tmp_path, change, complaint):
    exported(tiny_llama, tmp_path / "export")
    edit_config(tmp_path / "export", **change)
    with pytest.raises(UserError, match=complaint):
        load_export(tmp_path / "export", tiny_llama)


def test_a_missing_field_and_a_missing_tensor_are_named(tiny_llama, tmp_path):
    exported(tiny_llama, tmp_path / "export")
    config = config_of(tmp_path / "export")
    edit_tensors(tmp_path / "export", lambda t: t.pop("hidden_norm.weight"))
    edit_config(tmp_path / "export")
    with pytest.raises(UserError, match="hidden_norm.weight is missing"):
        load_export(tmp_path / "export", tiny_llama)
    del config["block_size"]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no 'block_size'"):
        load_export(tmp_path / "export", tiny_llama)


def test_a_head_that_is_not_the_targets_is_not_read(tiny_llama, tmp_path):
    exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    (tmp_path / "export" / "drafttrain.json").unlink()
    edit_tensors(tmp_path / "export", lambda t: t["lm_head.weight"].mul_(1.5))
    with pytest.raises(UserError, match="a head that is not the target's"):
        load_export(tmp_path / "export", tiny_llama)
