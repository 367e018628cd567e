"""The speculators formats: what vLLM makes of them against plain references, each known mistake among them; config.json, and what is not written
or read. The library's own classes are in test_speculators_library.py (slow)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError
from drafttrain.export import eagle3
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export

from .drafting import both_faces
from .drafting import exported as case_of
from .reference import ReferenceEagle3, as_vllm_reads
from .reference_blocks import ReferenceDFlash2, ReferenceDSpark, ReferencePEagle
from .test_dflash import PLAIN, config_of, edit_config
from .test_eagle3 import DRAFTS, PROMPT, V31, close, edit_tensors, hf_hidden_states, text
from .test_eagle_medusa import make_net, ours

EAGLE3 = Eagle3(taps=[0, 1, 3], depth=DRAFTS)
P_EAGLE = PEagle(taps=[1, 2], depth=5, layers=3, mask_token=319, fc_norm=True)
DSPARK = DSpark(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6)
DFLASH2 = DFlash2(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6, candidates=4, group=8, window=None)
CASES = (
    ("eagle3", EAGLE3, 60), ("eagle3 full", Eagle3(taps=[2], depth=DRAFTS), None),
    ("eagle3.1", Eagle3(taps=[0, 1, 3], depth=DRAFTS, **V31), 60), ("eagle3 low-rank", Eagle3(taps=[1, 2], depth=DRAFTS, head_rank=7), 60),
)  # fmt: skip


def exported(target, folder, config=EAGLE3, draft_vocab=60, **export):
    net = make_net(target, config, draft_vocab)
    return net, export_drafter(
        net, target, folder, ExportConfig(**({"dtype": "float32", "format": "speculators"} | export)), None
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("name", "config", "draft_vocab"), CASES)
@torch.no_grad()
def test_vllm_computes_our_eagle3_from_it(targets, tmp_path, architecture, name, config, draft_vocab):
    target = targets(architecture)
    net, _ = exported(target, tmp_path / "export", config, draft_vocab)
    sequences, reference = text(net), ReferenceEagle3(tmp_path / "export", torch.full((target.vocab, target.hidden), torch.nan))
    ids = sequences.ids_BT[0].tolist()
    taps = hf_hidden_states(target, sequences.ids_BT, reference.vllm_layers())[:PROMPT]
    wanted = reference.draft(ids[: PROMPT + 1], taps, ids[PROMPT + 1 : PROMPT + DRAFTS])
    for got in ours(net, target, sequences):
        close(got, wanted)
    others = {"d2t", "t2d", "embed_tokens.weight"}
    assert reference.used | others == reference.weights.keys() | others
    assert reference.config["num_speculative_tokens"] == DRAFTS


def p_eagle_draft(case, reference):
    ids = case.sequences.ids_BT[0, : PROMPT + 1].tolist()
    return reference.draft(ids, case.taps(reference.vllm_layers()), case.drafts)


def block_reference(case, target):
    kind = ReferenceDSpark if case.net.config is DSPARK else ReferenceDFlash2
    return kind(case.folder, target.embedding_weight, target.head_weight)


def block_chain(case, reference):
    return reference.chain(case.anchor, case.taps(reference.vllm_layers()), case.drafts)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("config", "draft_vocab"), [(P_EAGLE, 60), (replace(P_EAGLE, taps=[0, 1, 3], fc_norm=False, layers=1), None)]
)
@torch.no_grad()
def test_vllm_drafts_our_p_eagle_from_it(targets, tmp_path, architecture, config, draft_vocab):
    """The embeddings are in the file, so what vLLM would lend does not matter."""
    target = targets(architecture)
    case = case_of(target, tmp_path / "export", "speculators", config, draft_vocab)
    reference = ReferencePEagle(case.folder, torch.full((target.vocab, target.hidden), torch.nan))
    wanted = p_eagle_draft(case, reference)
    others = {"d2t", "t2d", "embed_tokens.weight"}
    assert reference.used | others == reference.weights.keys() | others
    assert reference.config["num_speculative_tokens"] == config.depth and float(wanted[wanted.isfinite()].std()) > 0.5
    for got in both_faces(case, target, wanted.argmax(-1).tolist()):
        close(got, wanted)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("config", "draft_vocab"), [(DSPARK, None), (DSPARK, 60), (DFLASH2, None)])
@torch.no_grad()
def test_vllm_drafts_our_blocks_from_it(targets, tmp_path, architecture, config, draft_vocab):
    target = targets(architecture)
    case = case_of(target, tmp_path / "export", "speculators", config, draft_vocab)
    reference = block_reference(case, target)
    tokens, wanted, *_ = block_chain(case, reference)
    others = {"d2t", "t2d"}
    assert reference.used | others == reference.weights.keys() | others
    assert reference.config["num_speculative_tokens"] == len(tokens) == case.drafts
    said = wanted.isfinite()
    for got in both_faces(case, target, tokens):
        close(got[said], wanted[said])
        assert got.argmax(-1).tolist() == tokens


LAYER = "transformer_layer_config"
MISTAKES = {
    "vllm_forgets_the_norms_of_taps": (P_EAGLE, {LAYER: {"fc_norm": False}}, None),
    "masked_token_of_another_row": (P_EAGLE, {"mask_token_id": 318}, None),
    "layers_one_lower": (P_EAGLE, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, None),
    "vllm_takes_three_taps": (P_EAGLE, {LAYER: {"num_aux_hidden_states": 3}}, RuntimeError),
    "read_as_1_plus_n": (DSPARK, {"sample_from_anchor": False}, AssertionError),
    "a_layout_by_default": (DSPARK, {"sample_from_anchor": None}, AssertionError),
    "layers_one_lower_dspark": (DSPARK, {"aux_hidden_state_layer_ids": [0, 2]}, None),
    "causal_block": (DFLASH2, {"sliding_window_non_causal": False}, None),
    "more_candidates": (DFLASH2, {"selector_top_k": 5}, None),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_the_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mistake):
    """In config.json, by what vLLM makes of it."""
    config, change, stops = MISTAKES[mistake]
    case = case_of(tiny_llama, tmp_path / "export", "speculators", config)

    def drafted():
        if config is P_EAGLE:
            return p_eagle_draft(case, ReferencePEagle(case.folder, tiny_llama.embedding_weight))
        return block_chain(case, block_reference(case, tiny_llama))[1]

    wanted = drafted()
    edit_config(case.folder, **change)
    if stops is not None:
        with pytest.raises(stops):
            drafted()
    else:
        assert not torch.allclose(drafted(), wanted, rtol=0, atol=1e-2)


def test_an_eagle3_of_two_taps_tells_vllm_how_many(tiny_llama, tmp_path):
    """Which does not count the layer ids of this form, and takes three."""
    exported(tiny_llama, tmp_path / "export", Eagle3(taps=[1, 2], depth=DRAFTS))
    assert as_vllm_reads(config_of(tmp_path / "export"))["num_aux_hidden_states"] == 2


def test_vllm_026_takes_every_dspark_for_1_plus_n_and_the_card_says_so(tiny_llama, tmp_path):
    case = case_of(tiny_llama, tmp_path / "export", "speculators", DSPARK)
    config, card = config_of(case.folder), (case.folder / "README.md").read_text()
    assert [as_vllm_reads(config, release)["dspark_bonus_anchor"] for release in ("0.26", "0.33")] == [True, False]
    assert "vLLM 0.33 and later" in card and any("vLLM 0.26 takes every DSpark" in note for note in case.made["notes"])


def test_config_json_by_hand(tiny_llama, tmp_path):
    layer = {
        "model_type": "llama", "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "mlp_bias": False, "vocab_size": 320, "tie_word_embeddings": False, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip

    def frame(algorithm, tokens):
        proposal = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        return {
            "speculators_model_type": algorithm, "speculators_version": "0.9.0", "dtype": "float32", "torch_dtype": "float32",
            "target_hidden_size": 32, "speculators_config": {
                "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [proposal],
                "verifier": {"name_or_path": Path(tiny_llama.identity.path).name, "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip

    exported(tiny_llama, tmp_path / "eagle3")
    assert config_of(tmp_path / "eagle3") == {
        "architectures": ["Eagle3Speculator"], LAYER: layer | {"num_aux_hidden_states": 3}, "draft_vocab_size": 60, **frame("eagle3", 4),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "embed_requires_grad": False,
    }  # fmt: skip
    exported(tiny_llama, tmp_path / "dflash", PLAIN, None)
    layers = {
        "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 2,
    }  # fmt: skip
    assert config_of(tmp_path / "dflash") == {
        "architectures": ["DFlashSpeculator"], "transformer_layer_config": layer | layers, "draft_vocab_size": 320, **frame("dflash", 4),
        "aux_hidden_state_layer_ids": [1, 3], "block_size": 5, "mask_token_id": 319, "sample_from_anchor": False,
        "sliding_window_non_causal": True, "num_target_layers": 5,
    }  # fmt: skip
    exported(tiny_llama, tmp_path / "p-eagle", P_EAGLE)
    assert config_of(tmp_path / "p-eagle") == {
        "architectures": ["PEagleSpeculator"], "draft_vocab_size": 60, **frame("peagle", 5),
        LAYER: layer | {"num_hidden_layers": 3, "num_aux_hidden_states": 2, "fc_norm": True},
        "eagle_aux_hidden_state_layer_ids": [2, 3], "mask_token_id": 319, "norm_before_residual": False, "norm_before_fc": False,
        "fc_norm": True, "norm_output": False, "embed_requires_grad": False,
    }  # fmt: skip
    block = {
        LAYER: layer | layers, "draft_vocab_size": 320, "aux_hidden_state_layer_ids": [1, 3], "block_size": 5, "mask_token_id": 319,
        "sliding_window_non_causal": True, "num_target_layers": 5,
    }  # fmt: skip
    exported(tiny_llama, tmp_path / "dspark", DSPARK, None)
    assert config_of(tmp_path / "dspark") == block | frame("dspark", 5) | {
        "architectures": ["DSparkSpeculator"], "sample_from_anchor": True, "markov_rank": 6, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    exported(tiny_llama, tmp_path / "headless", replace(DSPARK, confidence=False), None)
    headless, whole = config_of(tmp_path / "headless"), config_of(tmp_path / "dspark")
    assert headless == whole | {"enable_confidence_head": False, "confidence_head_with_markov": False}
    exported(tiny_llama, tmp_path / "dflash2", DFLASH2, None)
    assert config_of(tmp_path / "dflash2") == block | frame("dflash2", 4) | {
        "architectures": ["DFlash2DraftModel"], "sample_from_anchor": False, "conv_kernel_size": 2, "conv_group_size": 8,
        "selector_rank": 6, "selector_top_k": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "change", "complaint"),
    [
        (EAGLE3, {"norm_before_residual": True}, "norm_before_residual is True"),
        (EAGLE3, {"norm_before_residual": None}, "norm_before_residual is None"),
        (EAGLE3, {"norm_before_fc": True}, "norm_before_fc is True"),
        (EAGLE3, {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "must ascend, without repeats, from 0"),
        (EAGLE3, {"transformer_layer_config": {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
        (PLAIN, {"sliding_window_non_causal": False}, "sliding_window_non_causal is False"),
        (PLAIN, {"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2}}, "window counted from the anchor"),
        (PLAIN, {"transformer_layer_config": {"model_type": "llama"}}, "model_type is 'llama'"),
        (PLAIN, {"mask_token_id": 400}, "the mask is number 400"),
        (EAGLE3, {LAYER: {"num_aux_hidden_states": 2}}, "num_aux_hidden_states is 2, not 3"),
        (P_EAGLE, {LAYER: {"fc_norm": False}}, "fc_norm is False, not True"),
        (P_EAGLE, {"norm_output": True}, "norm_output is True"),
        (P_EAGLE, {LAYER: {"model_type": "qwen3"}}, "model_type is 'qwen3'"),
        (P_EAGLE, {LAYER: {"num_hidden_layers": 2}}, "layers.2.input_layernorm.weight is not one of"),
        (DSPARK, {"sample_from_anchor": False}, "does not say sample_from_anchor true"),
        (DSPARK, {"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        (DSPARK, {"confidence_head_with_markov": False}, "confidence_head_with_markov is False"),
        (DSPARK, {"markov_rank": 5}, "markov_w1.weight is"),
        (DFLASH2, {"sample_from_anchor": True}, r"1\+N only"),
        (DFLASH2, {"conv_kernel_size": 3}, "conv_kernel_size is 3"),
        (DFLASH2, {"selector_rank": 5}, "predecessor_codebook is"),
    ],
)
def test_what_would_be_another_network_is_not_read(tiny_llama, tmp_path, config, change, complaint):
    exported(tiny_llama, tmp_path / "export", config, None)
    edit_config(tmp_path / "export", **change)
    with pytest.raises(UserError, match=complaint):
        load_export(tmp_path / "export", tiny_llama)


@pytest.mark.parametrize("config", [EAGLE3, PLAIN, P_EAGLE, DSPARK, DFLASH2])
def test_a_missing_field_is_named(tiny_llama, tmp_path, config):
    exported(tiny_llama, tmp_path / "export", config, None)
    whole = config_of(tmp_path / "export")
    (tmp_path / "export" / "drafttrain.json").unlink()
    for field in ("draft_vocab_size", "transformer_layer_config"):
        (tmp_path / "export" / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != field}))
        with pytest.raises(UserError, match=f"no '{field}'"):
            load_export(tmp_path / "export", tiny_llama)


@pytest.mark.parametrize(
    ("architecture", "config", "draft_vocab", "complaint"),
    [
        ("llama", DFLASH2, 60, "among all tokens of the target"), ("llama", replace(DFLASH2, window=8), None, "window from the anchor"),
        ("gemma3", DFLASH2, None, "caps or scales its logits, and speculators' form of DFlash 2"), ("gemma3", DSPARK, None, "caps or scales"),
        ("llama", replace(DSPARK, window=8), None, "window from the anchor"),
    ],
)  # fmt: skip
def test_what_it_cannot_say_is_refused_by_name(targets, tmp_path, architecture, config, draft_vocab, complaint):
    with pytest.raises(UserError, match=complaint) as refused:
        exported(targets(architecture), tmp_path / "export", config, draft_vocab)
    assert "\n" not in str(refused.value) and "set export.format to" in str(refused.value) and not list(tmp_path.iterdir())


def test_a_target_that_the_library_cannot_load_needs_a_name(tiny_llama, tmp_path, monkeypatch):
    """It takes embeddings and head from the target's own files, which a GGUF file has not."""
    monkeypatch.setattr(tiny_llama, "identity", replace(tiny_llama.identity, path="package:weights/tiny.gguf"))
    with pytest.raises(UserError, match="set export.base_model to the id"):
        exported(tiny_llama, tmp_path / "export")
    exported(tiny_llama, tmp_path / "export", base_model="org/tiny")
    assert config_of(tmp_path / "export")["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"


def test_embeddings_are_in_the_file_because_the_library_may_not_load_them(targets, tmp_path, monkeypatch):
    """As the first layer reads them, so there is no gap to warn of; and others are not read."""
    target = targets("gemma3")
    monkeypatch.setattr(eagle3, "EMBEDDING_GAP", 1e-9)
    assert any("raw" in note for note in exported(target, tmp_path / "export", format="vllm")[1]["notes"])
    assert not any("raw" in note for note in exported(target, tmp_path / "export")[1]["notes"])
    table = load_file(tmp_path / "export" / "model.safetensors")["embed_tokens.weight"]
    torch.testing.assert_close(table, target.embed(torch.arange(target.vocab)))
    (tmp_path / "export" / "drafttrain.json").unlink()
    edit_tensors(tmp_path / "export", lambda t: t["embed_tokens.weight"].div_(target.hidden**0.5))
    with pytest.raises(UserError, match="table of embeddings that is not the target's"):
        load_export(tmp_path / "export", target)


def test_the_card_says_how_vllm_serves_it(tiny_llama, tmp_path):
    _, made = exported(tiny_llama, tmp_path / "export", PLAIN, None, base_model="org/tiny", push="me/tiny-dflash")
    card = (tmp_path / "export" / "README.md").read_text()
    assert made["format"] == "dflash-speculators" and "speculators (0.9.0" in card and "- speculators" in card
    assert (
        "vllm serve org/tiny" in card
        and '"model": "me/tiny-dflash", "num_speculative_tokens": 4' in card
        and "sglang" not in card
    )
