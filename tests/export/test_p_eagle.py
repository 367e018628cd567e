"""P-EAGLE against a plain reference of vLLM's class, row by row, each known mistake among them; its config.json, and what is not read."""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError
from drafttrain.export.export import load_export

from .drafting import both_faces, exported, saved_and_exported_draft_alike
from .reference_blocks import ReferencePEagle
from .test_dflash import config_of, edit_config
from .test_eagle3 import PROMPT, close, edit_tensors

PLAIN = PEagle(taps=[0, 1, 3], depth=5, layers=3, mask_token=319)
CASES = (
    (PLAIN, 60), (PLAIN, None), (PEagle(taps=[1, 2], depth=4, layers=2, mask_token=317, fc_norm=True), 319),
    (PEagle(taps=[2], depth=3, layers=1, mask_token=318), None), (PEagle(depth=1, layers=2, mask_token=319), 60),
)  # fmt: skip


def drafted(case, reference, drafts=None):
    ids = case.sequences.ids_BT[0, : PROMPT + 1].tolist()
    return reference.draft(ids, case.taps(reference.vllm_layers()), drafts or case.drafts)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("config", "draft_vocab"), CASES)
@torch.no_grad()
def test_vllm_drafts_our_p_eagle(targets, tmp_path, architecture, config, draft_vocab):
    """Three computations: training's elements, the decoding face, the plain reference on the folder and on transformers' hidden states."""
    target = targets(architecture)
    case = exported(target, tmp_path / "export", "vllm", config, draft_vocab)
    reference = ReferencePEagle(case.folder, target.embedding_weight)
    wanted = drafted(case, reference)
    unused = {"d2t", "t2d"} | ({"mask_hidden"} if config.depth == 1 else set())
    assert reference.used | unused == reference.weights.keys() | unused
    assert len(wanted) == config.depth and float(wanted[wanted.isfinite()].std()) > 0.5
    tokens = wanted.argmax(-1).tolist()
    for got in both_faces(case, target, tokens):
        close(got, wanted)
        assert got.argmax(-1).tolist() == tokens


@torch.no_grad()
def test_fewer_drafts_are_the_first_ones(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    reference = ReferencePEagle(case.folder, tiny_llama.embedding_weight)
    torch.testing.assert_close(drafted(case, reference, 3), drafted(case, reference)[:3], rtol=0, atol=1e-5)


def test_what_training_saved_and_what_was_exported_draft_alike(tiny_llama, tmp_path):
    for number, (asked, draft_vocab) in enumerate((("vllm", 60), ("native", None))):
        case = exported(tiny_llama, tmp_path / f"export{number}", asked, PLAIN, draft_vocab)
        saved_and_exported_draft_alike(case, tiny_llama, tmp_path / f"saved{number}")


def _same_position(bent):
    plain = bent.row
    bent.row = lambda token, hidden, t: plain(token, hidden, min(t, PROMPT - 1))


def _all_layers_read_the_first_cache(bent):
    plain = bent.row

    def row(token, hidden, t):
        bent.caches = [bent.caches[0]] * len(bent.caches)
        return plain(token, hidden, t)

    bent.row = row


MISTAKES = {
    "masked_token_of_another_row": lambda bent: bent.config.update(pard_token=318),
    "masked_state_zero": lambda bent: bent.weights["mask_hidden"].zero_(),
    "masked_state_not_fused": lambda bent: setattr(bent, "masked", lambda: bent.weight("mask_hidden").flatten()[:32]),
    "masked_elements_at_one_position": _same_position,
    "one_cache": _all_layers_read_the_first_cache,
    "one_layer_less": lambda bent: bent.config.update(num_hidden_layers=2),
    "absolute_d2t": lambda bent: setattr(bent, "spread", lambda x, ids, plain=bent.spread: plain(x, bent.weights["d2t"])),
}


@pytest.mark.parametrize("mutation", [*MISTAKES, "layers_one_lower"])
@torch.no_grad()
def test_the_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 300)
    reference, bent = (ReferencePEagle(case.folder, tiny_llama.embedding_weight) for _ in range(2))
    if mutation == "layers_one_lower":
        bent.config["eagle_aux_hidden_state_layer_ids"] = PLAIN.taps
    else:
        MISTAKES[mutation](bent)
    assert not torch.allclose(drafted(case, reference), drafted(case, bent), rtol=0, atol=1e-2)


def test_config_json_by_hand(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    assert config_of(case.folder) == {
        "architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "target_hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False, "vocab_size": 320, "draft_vocab_size": 60,
        "tie_word_embeddings": False, "max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "float32", "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "eagle_config": {"use_aux_hidden_state": True}, "norm_before_residual": False,
        "norm_before_fc": False, "fc_norm": False, "norm_output": False, "pard_token": 319, "max_drafts": 5,
    }  # fmt: skip
    shapes = {name: tuple(x.shape) for name, x in load_file(case.folder / "model.safetensors").items()}
    assert shapes["mask_hidden"] == (1, 1, 96) and shapes["layers.0.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (32, 32) and "layers.1.hidden_norm.weight" not in shapes


def test_the_command_of_the_card_says_parallel_drafting(tiny_llama, tmp_path):
    """Untold, vLLM would draft as EAGLE-3 and pass over the masked state."""
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    card = (case.folder / "README.md").read_text()
    [line] = [line for line in card.splitlines() if "--speculative-config" in line]
    asked = json.loads(line.strip().removeprefix("--speculative-config '").removesuffix("'"))
    assert asked == {"method": "eagle3", "model": "PATH/TO/THIS/FOLDER", "num_speculative_tokens": 3, "parallel_drafting": True}
    assert "3 decoder layers draft up to 5 tokens in one pass" in card and any(
        "parallel_drafting" in note for note in case.made["notes"]
    )


def test_sglang_is_refused_by_name(tiny_llama, tmp_path):
    with pytest.raises(UserError, match="SGLang has no P-EAGLE. Set it to vllm, speculators or native"):
        exported(tiny_llama, tmp_path / "export", "sglang", PLAIN, 60)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_hidden_layers": 2}, "layers.2.input_layernorm.weight is not one of"), ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_output": True}, "norm_output"), ({"eagle_aux_hidden_state_layer_ids": [4, 2, 1]}, "must ascend"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states"), ({"pard_token": 320}, "the mask is number 320"), ({"rope_theta": 5.0}, "RoPE"),
        ({"model_type": "qwen3"}, "model_type"), ({"fc_norm": True}, "fc_norm.0.weight is missing"),
        ({"draft_vocab_size": 61}, r"lm_head.weight is \[60, 32\]"), ({"max_drafts": 0}, "depth is 0"),
    ],
)  # fmt: skip
def test_fields_that_mean_another_network_are_named(tiny_llama, tmp_path, change, complaint):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    edit_config(case.folder, **change)
    with pytest.raises(UserError, match=complaint):
        load_export(case.folder, tiny_llama)


def test_a_missing_masked_state_is_named(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    edit_tensors(case.folder, lambda t: t.pop("mask_hidden"))
    (case.folder / "drafttrain.json").unlink()
    with pytest.raises(UserError, match="mask_hidden is missing"):
        load_export(case.folder, tiny_llama)


def test_a_field_that_vllm_needs_is_named(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 60)
    config = config_of(case.folder)
    del config["pard_token"]
    (case.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no 'pard_token'"):
        load_export(case.folder, tiny_llama)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "mixtral"])
def test_the_card_names_a_target_that_the_engine_hands_no_hidden_states_of(targets, tmp_path, architecture):
    made = exported(targets(architecture), tmp_path / "export", "vllm", PLAIN, 60).made
    told = [note for note in made["notes"] if "hidden states of a" in note]
    wanted = {"gemma3": "vLLM was not found to hand the hidden states of a Gemma3ForCausalLM", "mixtral": "a MixtralForCausalLM"}
    assert len(told) == (architecture in wanted) and all(wanted[architecture] in note for note in told)
