"""config.json and the tensor table: one test for each way in which an engine would load a wrong file in silence."""

import json
from dataclasses import replace

import pytest
import torch

from drafttrain.drafters.decoder import DecoderShape
from drafttrain.errors import UserError
from drafttrain.export.eagle3 import Eagle3Facts, engine_config, read_engine_config, tensor_table
from drafttrain.export.format import check_tensors, word

SHAPE = DecoderShape(
    hidden=64, target_hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=24, rms_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, max_positions=8192, vocab=500,
)  # fmt: skip
FACTS = Eagle3Facts(taps=(1, 14, 26), shape=SHAPE, draft_vocab=120)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def roped(rope, **sizes) -> Eagle3Facts:
    return replace(FACTS, shape=replace(SHAPE, rope_parameters=rope, **sizes))


def written(facts=FACTS, dtype=torch.bfloat16) -> dict:
    """The config after a trip through JSON, which is what an engine sees."""
    return json.loads(json.dumps(engine_config(facts, dtype, {"bos_token_id": 1, "eos_token_id": [2, 3]})))


def tensors(facts=FACTS, dtype=torch.bfloat16) -> dict:
    return {name: torch.zeros(shape, dtype=own or dtype) for name, (shape, own) in tensor_table(facts).items()}


def test_the_two_layer_id_fields_give_both_engines_the_same_hidden_states():
    """vLLM takes the top-level list as it is; SGLang the nested one, plus one. k = the stream after k layers = output of k-1."""
    config = written()
    vllm = config["eagle_aux_hidden_state_layer_ids"]
    sglang = [i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    assert vllm == sglang == [2, 15, 27]
    assert config["eagle_config"]["use_aux_hidden_state"] is True


def test_the_default_layers_of_both_engines_come_out_as_their_default():
    n = 30
    config = written(replace(FACTS, taps=(1, n // 2 - 1, n - 4)))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, n // 2, n - 3]


@pytest.mark.parametrize("taps", [(5,), (0, 7), (1, 5, 9, 13, 20)])
def test_the_number_of_taps_is_written_because_vllm_takes_three(taps):
    facts = replace(FACTS, taps=taps)
    assert written(facts)["num_aux_hidden_states"] == len(taps)
    assert tensor_table(facts)["fc.weight"][0] == (64, len(taps) * 64)


@pytest.mark.parametrize("taps", [(14, 1, 26), (1, 1, 26), (), (-1, 3)])
def test_taps_out_of_order_are_refused_because_engines_sort_them(taps):
    with pytest.raises(UserError, match="ascend"):
        replace(FACTS, taps=taps)


@pytest.mark.parametrize("rope", [SHAPE.rope_parameters, LLAMA3, YARN])
def test_transformers_reads_the_same_rope_from_either_schema(rope, tmp_path):
    """An old reader sees only rope_theta and rope_scaling, a new one only rope_parameters; transformers judges both."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = written(roped(rope, max_positions=131072))
    wanted = LlamaConfig(rope_parameters=dict(rope), head_dim=24, max_position_embeddings=131072)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert "rope_theta" in old and "rope_parameters" in new
    for version in (config, old, new):
        (tmp_path / "config.json").write_text(json.dumps(version))
        got = LlamaConfig.from_pretrained(tmp_path)
        a, b = LlamaRotaryEmbedding(got), LlamaRotaryEmbedding(wanted)
        torch.testing.assert_close(a.inv_freq, b.inv_freq, rtol=0, atol=0)
        assert a.attention_scaling == b.attention_scaling


def test_rope_scaling_is_null_without_scaling_and_complete_with_it():
    assert written()["rope_scaling"] is None and written()["rope_theta"] == 100000.0
    scaling = written(roped(LLAMA3))["rope_scaling"]
    assert scaling == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": 1e4},
    ],
)
def test_rope_that_the_engines_cannot_do_is_refused(rope):
    with pytest.raises(UserError):
        roped(rope)


def test_the_position_limit_is_the_targets():
    assert written()["max_position_embeddings"] == 8192


def test_what_makes_an_engine_build_another_network_is_fixed():
    config = written()
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 1 and config["head_dim"] == 24 and config["rms_norm_eps"] == 1e-5
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings", "attention_bias"):
        assert config[name] is False
    assert (config["vocab_size"], config["draft_vocab_size"], config["target_hidden_size"]) == (500, 120, 64)
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and config["eos_token_id"] == [2, 3]


def test_a_full_vocabulary_has_no_map_and_its_size_is_still_written():
    """SGLang takes a null draft_vocab_size for 'use the target's head'; vLLM 0.33 has no parameter for an identity map."""
    full = replace(FACTS, draft_vocab=500)
    assert written(full)["draft_vocab_size"] == 500
    assert not {"d2t", "t2d"} & tensor_table(full).keys()
    assert tensor_table(FACTS)["d2t"] == ((120,), torch.int64) and tensor_table(FACTS)["t2d"] == ((500,), torch.bool)


def test_the_table_is_the_engines():
    """Written out by hand from vLLM's and SGLang's llama_eagle3.py; no embeddings, which both take from the target."""
    shapes = {name: shape for name, (shape, _) in tensor_table(FACTS).items()}
    assert shapes == {
        "fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (120, 64), "d2t": (120,), "t2d": (500,),
        "midlayer.input_layernorm.weight": (64,), "midlayer.hidden_norm.weight": (64,),
        "midlayer.post_attention_layernorm.weight": (64,),
        "midlayer.self_attn.q_proj.weight": (96, 128), "midlayer.self_attn.k_proj.weight": (48, 128),
        "midlayer.self_attn.v_proj.weight": (48, 128), "midlayer.self_attn.o_proj.weight": (64, 96),
        "midlayer.mlp.gate_proj.weight": (96, 64), "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
    }  # fmt: skip


def test_every_difference_from_the_table_is_named():
    check_tensors(tensors(), tensor_table(FACTS), torch.bfloat16, "the drafter", "vLLM")
    got = tensors()
    got["midlayer.self_attn.q_norm.weight"] = torch.zeros(24)
    got["midlayer.hidden_normm.weight"] = got.pop("midlayer.hidden_norm.weight")
    got["fc.weight"] = got["fc.weight"].T
    got["d2t"] = got["d2t"].int()
    got["norm.weight"] = got["norm.weight"].float()
    with pytest.raises(UserError) as caught:
        check_tensors(got, tensor_table(FACTS), torch.bfloat16, "the drafter", "vLLM")
    for part in (
        "midlayer.hidden_norm.weight is missing", "midlayer.hidden_normm.weight is not one", "q_norm.weight is not one",
        "fc.weight is [192, 64] instead of [64, 192]", "d2t is int32 instead of int64",
        "norm.weight is float32 instead of bfloat16",
    ):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("rope", [SHAPE.rope_parameters, LLAMA3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reading_gives_back_what_was_written(rope, dtype):
    facts = roped(rope)
    assert read_engine_config(written(facts, dtype), "x") == facts
    assert written(facts, dtype)["torch_dtype"] == word(dtype)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("eagle_aux_hidden_state_layer_ids", [1, 14, 26], "layer ids"),
        ("num_aux_hidden_states", 4, "num_aux_hidden_states"),
        ("rope_theta", 10000.0, "RoPE"),
        ("norm_before_residual", True, "norm_before_residual"),
        ("norm_before_fc", True, "norm_before_fc"),
        ("num_hidden_layers", 2, "num_hidden_layers"),
        ("architectures", ["Eagle3Qwen3ForCausalLM"], "architectures"),
        ("target_hidden_size", 128, "target_hidden_size"),
        ("draft_vocab_size", 501, "draft vocabulary"),
    ],
)
def test_reading_refuses_fields_that_disagree_or_mean_another_network(field, value, complaint):
    with pytest.raises(UserError, match=complaint):
        read_engine_config(written() | {field: value}, "x")


def test_reading_names_a_missing_field():
    config = written()
    del config["num_aux_hidden_states"]
    with pytest.raises(UserError, match="num_aux_hidden_states"):
        read_engine_config(config, "x")
