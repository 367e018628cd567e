"""Every drafter in every format, through the loading rules of the engines that are said to read it: nothing is left at random, nothing ignored.

The rules (loaders.py) know nothing of the exporter's tables, so a name that both the exporter and its own reader misspell is found here.
"""

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.export.registry import FORMATS

from .loaders import load, loader_of, shapes_of
from .test_dflash import config_of
from .test_round_trip import DRAFTERS, FULL, ONE_OF_FIVE_MISSING, net_for

ASKED = ("vllm", "sglang", "speculators")
BOTH, OLD, NEW = ("0.26", "0.33"), ("0.26",), ("0.33",)
RELEASES = {
    "medusa": OLD, "dflash2": NEW, "dflash2-vllm": NEW, "dflash2-speculators": NEW, "dspark-speculators": NEW,
}  # fmt: skip
"""Of vLLM, that load a format; both where nothing is said."""


def readers_of(format) -> list[tuple[str, str, str]]:
    """Engine, release and method for all that load a format. vLLM reads speculators' form too."""
    found = []
    for engine in format.engines:
        if engine.name not in ("sglang", "transformers"):
            for release in RELEASES.get(format.name, BOTH):
                found.append(("vllm", release, engine.method))
            assert ("0.26" in engine.versions) == ("0.26" in RELEASES.get(format.name, BOTH))
        if engine.name != "vllm":
            found.append((engine.name, "", engine.method))
    return found


def exported(target, folder, name, asked, size, drafters=DRAFTERS):
    """The format that is written, or None where it is refused."""
    try:
        made = export_drafter(net_for(target, name, size, drafters), target, folder, ExportConfig(format=asked), None)
    except UserError:  # why is test_round_trip's business
        return None
    return FORMATS[made["format"]]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_engines_leave_no_tensor_at_random_and_ignore_none(targets, tmp_path, architecture):
    target, seen = targets(architecture), set()
    cases = [(name, asked, size) for name in DRAFTERS for asked in ASKED for size in (FULL, ONE_OF_FIVE_MISSING)]
    for name, asked, size in cases:
        format = exported(target, folder := tmp_path / f"{name} {asked} {size}", name, asked, size)
        for engine, release, method in readers_of(format) if format else ():
            outcome = load(loader_of(folder, engine, release, method, "p-eagle" in name), shapes_of(folder))
            assert not outcome, f"{engine} {release}: {outcome} ({format.name} of {name})"
            seen.add((format.name, engine, release))
    every = {(format.name, engine, release) for format in FORMATS.values() for engine, release, _ in readers_of(format)}
    lost = {name for name, *_ in every - seen}
    needs_raw = {
        "dflash", "dflash-speculators", "dflash2", "dflash2-speculators", "dspark", "dspark-vllm", "dspark-speculators",
    }  # fmt: skip
    assert lost == (set() if architecture == "llama" else needs_raw)


def moved(tensors, name, to):
    tensors[to] = tensors.pop(name)


ODD = DRAFTERS | {
    "eagle3 two taps": Eagle3(taps=[1, 2], depth=2),
    "p-eagle two taps": PEagle(taps=[1, 2], depth=2, layers=2, mask_token=319),
}
MISTAKES = {
    # what is edited: drafter, format asked for, vocabulary, edit of (tensors, config); who notices: engine, release, fault, its words
    "misspelt for vLLM": (
        "eagle3", "vllm", FULL, lambda x, c: moved(x, "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.key_proj.weight"),
        [("vllm", "0.26", "stopped", "key_proj"), ("vllm", "0.33", "random", "model.layers.0.self_attn.qkv_proj.weight k")],
    ),
    "misspelt for SGLang": (
        "eagle3", "sglang", FULL, lambda x, c: moved(x, "midlayer.mlp.up_proj.weight", "midlayer.mlp.upper_proj.weight"),
        [("sglang", "", "ignored", "upper_proj"), ("sglang", "", "random", "model.layers.0.mlp.gate_up_proj.weight 1")],
    ),
    "midlayer misspelt": (
        "eagle3", "sglang", FULL, lambda x, c: moved(x, "midlayer.hidden_norm.weight", "middlelayer.hidden_norm.weight"),
        [("sglang", "", "random", "model.layers.0.hidden_norm.weight"), ("vllm", "0.33", "stopped", "middlelayer")],
    ),
    "no last norm": (
        "eagle3", "vllm", ONE_OF_FIVE_MISSING, lambda x, c: x.pop("norm.weight"),
        [("vllm", "0.26", "random", "model.norm.weight"), ("sglang", "", "random", "model.norm.weight")],
    ),
    "no map": (
        "eagle3", "vllm", ONE_OF_FIVE_MISSING, lambda x, c: x.pop("d2t"),
        [("vllm", "0.26", "random", "draft_id_to_target_id"), ("sglang", "", "random", "hot_token_id")],
    ),
    "taps not counted": (
        "eagle3 two taps", "speculators", FULL, lambda x, c: c["transformer_layer_config"].pop("num_aux_hidden_states"),
        [("vllm", "0.26", "stopped", "fc.weight is [32, 64], not [32, 96]"), ("vllm", "0.33", "stopped", "fc.weight")],
    ),
    "norms of taps forgotten": (
        "p-eagle normed taps", "speculators", FULL, lambda x, c: c["transformer_layer_config"].pop("fc_norm"),
        [("vllm", "0.33", "stopped", "fc_norm.0.weight")],
    ),
    "embeddings left to chance": (
        "p-eagle", "speculators", FULL, lambda x, c: x.pop("embed_tokens.weight"), [("speculators", "", "random", "embed_tokens.weight")],
    ),
    "no masked state": (
        "p-eagle two taps", "vllm", FULL, lambda x, c: x.pop("mask_hidden"), [("vllm", "0.26", "random", "mask_hidden")],
    ),
    "a layer more": (
        "p-eagle", "vllm", FULL, lambda x, c: c.update(num_hidden_layers=4), [("vllm", "0.33", "random", "model.layers.3.input_layernorm.weight")],
    ),
    "a bias that vLLM drops": (
        "eagle1", "vllm", FULL, lambda x, c: x.update({"fc.bias": x["fc.weight"][:, 0].clone()}), [("vllm", "0.26", "ignored", "fc.bias")],
    ),
    "no bias for SGLang": ("hass", "sglang", FULL, lambda x, c: x.pop("fc.bias"), [("sglang", "", "random", "model.fc.bias")]),
    "a norm that EAGLE has not": (
        "eagle1", "sglang", FULL, lambda x, c: x.update({"layers.0.input_layernorm.weight": x["layers.0.post_attention_layernorm.weight"].clone()}),
        [("sglang", "", "ignored", "layers.0.input_layernorm.weight")],
    ),
    "no head of Medusa": ("medusa", "vllm", FULL, lambda x, c: x.pop("lm_head.weight"), [("vllm", "0.26", "random", "lm_head.weight")]),
    "no norm of keys": (
        "dflash", "vllm", FULL, lambda x, c: x.pop("layers.1.self_attn.k_norm.weight"),
        [("vllm", "0.26", "random", "model.layers.1.self_attn.k_norm.weight"), ("sglang", "", "random", "layers.1.self_attn.k_norm.weight")],
    ),
    "a reduced head for SGLang": (
        "dflash", "sglang", FULL, lambda x, c: x.update({"lm_head.weight": x["fc.weight"].clone(), "d2t": x["norm.weight"].clone()}),
        [("sglang", "", "ignored", "lm_head.weight"), ("sglang", "", "ignored", "d2t")],
    ),
    "no reduced head": (
        "dflash", "speculators", ONE_OF_FIVE_MISSING, lambda x, c: x.pop("lm_head.weight"),
        [("vllm", "0.26", "random", "lm_head.weight"), ("speculators", "", "random", "lm_head.weight")],
    ),
    "kernels transposed": (
        "dflash2 all rows", "sglang", FULL,
        lambda x, c: x.update({"layers.0.mlp_conv.base_kernel": x["layers.0.mlp_conv.base_kernel"].transpose(1, 2).contiguous()}),
        [("sglang", "", "stopped", "base_kernel"), ("vllm", "0.33", "stopped", "base_kernel")],
    ),
    "codebook named as ours": (
        "dflash2 all rows", "speculators", FULL,
        lambda x, c: moved(x, "candidate_selector.successor_codebook", "candidate_selector.successor_codebook.weight"),
        [("speculators", "", "random", "successor_codebook"), ("vllm", "0.33", "stopped", "successor_codebook.weight")],
    ),
    "half a confidence": (
        "dspark", "vllm", FULL, lambda x, c: x.pop("confidence_head.proj.bias"),
        [("vllm", "0.33", "random", "confidence_head.proj.bias"), ("sglang", "", "random", "confidence_head.proj.bias")],
    ),
    "a language model without a norm of queries": (
        "independent qk-norm", "vllm", FULL, lambda x, c: x.pop("model.layers.0.self_attn.q_norm.weight"),
        [("vllm", "0.33", "random", "model.layers.0.self_attn.q_norm.weight"), ("sglang", "", "random", "model.layers.0.self_attn.q_norm.weight")],
    ),
    "no Markov head": (
        "dspark", "speculators", FULL, lambda x, c: x.pop("markov_head.markov_w1.weight"),
        [("vllm", "0.33", "random", "markov_w1"), ("speculators", "", "random", "markov_w1")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_rules_notice_each_mistake(tiny_llama, tmp_path, mistake):
    name, asked, size, edit, notices = MISTAKES[mistake]
    format = exported(tiny_llama, folder := tmp_path / "export", name, asked, size, ODD)
    tensors, config = load_file(folder / "model.safetensors"), config_of(folder)
    methods = {(engine, release): method for engine, release, method in readers_of(format)}

    def outcome(engine, release):
        return load(loader_of(folder, engine, release, methods[engine, release], "p-eagle" in name), shapes_of(folder))

    assert not any(outcome(engine, release) for engine, release in methods)
    edit(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for engine, release, fault, words in notices:
        assert any(words in sentence for sentence in getattr(outcome(engine, release), fault)), (
            engine,
            release,
            outcome(engine, release),
        )


def test_an_older_vllm_has_no_place_for_what_it_is_not_said_to_load(tiny_llama, tmp_path):
    """Of a DSpark in speculators' form, 0.26 takes as many taps as there are layers; DFlash 2 it does not know."""
    three = DRAFTERS | {"dspark": replace(DRAFTERS["dspark"], taps=[0, 1, 2])}
    exported(tiny_llama, tmp_path / "export", "dspark", "speculators", FULL, three)
    assert load(loader_of(tmp_path / "export", "vllm", "0.26", "dspark"), shapes_of(tmp_path / "export")).stopped
