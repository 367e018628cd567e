"""Warm starts: a net of ours, written down by hand under each published layout's names, comes back with the same logits; what does not
fit is named; a training that begins from it begins where it was."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters.test_faces import shaken
from export.hub_standin import HubStandin, Repo
from safetensors.torch import load_file, save_file
from tiny_run import logged, make_run, start

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.drafters.save import save_drafter
from drafttrain.drafters.warm_start import WarmStart
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.layouts import one_chat
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.types import Identity
from drafttrain.vocab import Counts, DraftVocabulary, count

BLOCK = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm.weight",
)  # fmt: skip
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "hidden_act": "silu", "vocab_size": 320, "rope_theta": 10000.0,
}  # fmt: skip
EAGLE3 = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=200)


# ---- the published layouts, by hand ----------------------------------------------------------------------------------------


def eagle1(net):
    w = net.state_dict()
    tensors = {"layers.0." + name: w["layers.0." + name] for name in BLOCK}
    return LLAMA | {"architectures": ["LlamaForCausalLM"]}, tensors | {
        "fc.weight": w["fc.weight"], "embed_tokens.weight": net.embedding.module.weight.detach(),
    } | ({"fc.bias": w["fc.bias"]} if "fc.bias" in w else {})  # fmt: skip


def eagle3(net, block="midlayer."):
    w = net.state_dict()
    tensors = {block + name: w["midlayer." + name] for name in (*BLOCK, "input_layernorm.weight", "hidden_norm.weight")}
    tensors |= {name: w[name] for name in ("fc.weight", "norm.weight", "lm_head.weight")}
    ids = net.vocabulary.ids
    if len(ids) < 320:
        marked = torch.zeros(320, dtype=torch.bool)
        marked[ids] = True
        tensors |= {"d2t": torch.tensor([token - row for row, token in enumerate(ids.tolist())]), "t2d": marked}
    return LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}, tensors


def specforge(net):
    config, tensors = eagle3(net)
    taps = list(net.needs.taps)
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps}
    return config, tensors | {"embed_tokens.weight": net.embedding.module.weight.detach()}


def eagle31(net):
    config, tensors = specforge(net)
    tensors |= {f"fc_norm.{i}.weight": net.state_dict()[f"fc_norm.{i}.weight"] for i in range(3)}
    return config | {"fc_norm": True, "norm_output": True}, tensors


def vllm_eagle3(net):
    config, tensors = eagle3(net, "layers.0.")
    return config | {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in net.needs.taps]}, tensors


def speculators(net):
    _, tensors = eagle3(net, "layers.0.")
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 200, "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in net.needs.taps], "transformer_layer_config": LLAMA,
    }, tensors | {"embed_tokens.weight": net.embedding.module.weight.detach()}  # fmt: skip


def medusa(net):
    w, K, L = net.state_dict(), net.config.heads, net.config.layers
    tensors = {}
    for k in range(K):
        for layer in range(L):
            for what in ("weight", "bias"):
                tensors[f"{k}.{layer}.linear.{what}"] = w[f"heads.{k}.layers.{layer}.{what}"]
        tensors[f"{k}.{L}.weight"] = w["lm_head.weight"][:, 32 * k : 32 * (k + 1)].clone()
    return {"medusa_num_heads": K, "medusa_num_layers": L, "base_model_name_or_path": "somebody/target"}, tensors


def medusa_vllm(net):
    """Without biases, the tokens of its heads in an order of their own."""
    w, K, L = net.state_dict(), net.config.heads, net.config.layers
    tensors = {f"blocks.{k}.layers.{i}.weight": w[f"heads.{k}.layers.{i}.weight"] for k in range(K) for i in range(L)}
    config = {"model_type": "medusa", "num_heads": K, "num_hidden_layers": L, "hidden_size": 32, "vocab_size": 320}
    if not net.config.own_heads:
        return config | {"original_lm_head": True}, tensors | {"lm_head.weight": net.target_weight}
    order = torch.randperm(len(net.vocabulary.ids), generator=torch.Generator().manual_seed(3))
    tensors |= {f"lm_heads.{k}.weight": w["lm_head.weight"][order, 32 * k : 32 * (k + 1)].clone() for k in range(K)}
    return config | {"truncated_vocab_size": len(order)}, tensors | {"token_map": net.vocabulary.ids[order]}


def hydra(net):
    w, K, L, prefix = net.state_dict(), net.config.heads, net.config.layers, net.config.prefix
    place, after = (lambda layer: 1 + 2 * layer, ".1") if prefix else (lambda layer: layer, "")
    tensors = {}
    for k in range(K):
        for i in range(L):
            for what in ("weight", "bias"):
                tensors[f"hydra_mlp.{k}.{place(i)}.linear.{what}"] = w[f"heads.{k}.layers.{i}.{what}"]
        tensors[f"hydra_mlp.{k}.{place(0)}.res_connection.weight"] = w[f"heads.{k}.project.weight"]
        tensors[f"hydra_mlp.{k}.{place(0)}.res_connection.bias"] = torch.zeros(32)
        tensors[f"hydra_lm_head.{k}{after}.weight"] = w["lm_head.weight"][:, 32 * k : 32 * (k + 1)].clone()
        tensors[f"hydra_lm_head.{k}{after}.bias"] = torch.zeros(len(w["lm_head.weight"]))
    if prefix:
        inner = {f"prefix_embeding_layer.layers.0.{name}": w[f"prefix.{name}"] for name in (*BLOCK, "input_layernorm.weight")}
        tensors |= inner | {"prefix_embeding_layer.norm.weight": w["prefix.norm.weight"]}
        tensors["prefix_embeding_layer.embed_tokens.weight"] = torch.randn(320, 32)
        tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.randn(4)
    return {
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "hydra_num_heads": K, "hydra_num_layers": L, "grounded_heads": True,
        "hidden_state_offset": 0,
    }, tensors  # fmt: skip


PUBLISHED = {
    "eagle1": (Eagle(bias=True, noise=0.0), eagle1, "EAGLE-1/2"),
    "eagle1 without bias": (Eagle(noise=0.0), eagle1, "EAGLE-1/2"),
    "eagle3": (EAGLE3, specforge, "EAGLE-3, the original's names"),
    "eagle3.1": (
        Eagle3(taps=[0, 2, 3], draft_vocab=200, fc_norm=True, norm_output=True),
        eagle31,
        "EAGLE-3, the original's names",
    ),
    "eagle3 of vllm": (EAGLE3, vllm_eagle3, "EAGLE-3, vLLM's names"),
    "speculators": (EAGLE3, speculators, "EAGLE-3, speculators' names"),
    "eagle3, usual taps": (Eagle3(draft_vocab=200), eagle3, "EAGLE-3, the original's names"),
    "eagle3 full": (Eagle3(taps=[0, 2, 3], draft_vocab=None), specforge, "EAGLE-3, the original's names"),
    "medusa": (Medusa(heads=3, layers=2, own_heads=True), medusa, "Medusa, the original's names"),
    "medusa of vllm": (Medusa(heads=3, layers=2, own_heads=True, draft_vocab=200), medusa_vllm, "Medusa, vLLM's names"),
    "medusa of vllm, shared": (Medusa(heads=3), medusa_vllm, "Medusa, vLLM's names"),
    "hydra": (Hydra(heads=3, layers=2, own_heads=True), hydra, "Hydra"),
    "hydra++": (Hydra(heads=3, layers=3, own_heads=True, prefix=True), hydra, "Hydra++"),
}


def counts_for(target) -> Counts:
    """Of twelve texts in which low ids are frequent."""
    g = torch.Generator().manual_seed(2)
    shares = 1.0 / torch.arange(1, target.vocab + 1).double()
    said = [(shares.multinomial(40, replacement=True, generator=g), torch.arange(40) >= 9) for _ in range(12)]
    sums = [
        sum(ids[mask if answer else ~mask].bincount(minlength=target.vocab) for ids, mask in said) for answer in (True, False)
    ]
    return count(*sums, said)


def some_ids(size):
    return (
        torch.cat([torch.arange(3), 3 + torch.randperm(317, generator=torch.Generator().manual_seed(5))[: size - 3]])
        .sort()
        .values
    )


def source(target, config):
    """A net with random weights everywhere, over some tokens."""
    size = config.draft_vocab or target.vocab
    net = shaken(config.build(target, DraftVocabulary(some_ids(size), target.vocab)), seed=4)
    net.target_weight = target.head_weight.detach()
    if isinstance(config, Medusa) and (config.draft_vocab or not config.own_heads):
        for head in net.heads:  # vLLM's form has no biases
            for layer in head.layers:
                torch.nn.init.zeros_(layer.bias)
    return net


def write(folder: Path, config: dict, tensors: dict, file="model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
    save_file(tensors, folder / file) if file.endswith("safetensors") else torch.save(tensors, folder / file)
    return folder


def begin(target, config, where, pickles=False):
    """What train does: (net, lines)."""
    opened = WarmStart.open(str(where), pickles, config, target)
    vocabulary, lines = opened.choose_vocabulary(counts_for(target))
    torch.manual_seed(99)
    net = config.build(target, vocabulary)
    return net.eval(), [*lines, *opened.fill(net)]


@torch.no_grad()
def logits_of(net, target, tokens):
    """Logits [N, tokens] over one text of tokens that every net at hand can say, at every depth."""
    chat = one_chat(tokens[torch.arange(30) * 7 % len(tokens)], prompt_len=0)
    drafted = net.rows(chat, target.read_packed(chat, net.needs.taps), net.layout(chat, 3))
    columns = [net.vocabulary.ids.tolist().index(token) for token in tokens.tolist()]
    return net.logits(drafted.hidden_NH, drafted.prev_N)[:, columns]


def assert_same(net, old, target):
    tokens = net.vocabulary.ids
    assert bool(old.vocabulary.t2d[tokens].all())
    torch.testing.assert_close(logits_of(net, target, tokens), logits_of(old, target, tokens), rtol=1e-5, atol=1e-5)


def refused(target, config, where, pickles=False) -> str:
    with pytest.raises(UserError) as caught:
        begin(target, config, where, pickles)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what comes back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_net_comes_back(tiny_llama, tmp_path, name):
    config, published, layout = PUBLISHED[name]
    old = source(tiny_llama, config)
    net, lines = begin(tiny_llama, config, write(tmp_path / "it", *published(old)))
    assert_same(net, old, tiny_llama)
    assert any(line.startswith(f"starting from {tmp_path}/it: {layout}, {len(net.state_dict())} tensors") for line in lines)
    assert not [line for line in lines if line.startswith("note")]


def test_what_is_left_out_is_said(tiny_llama, tmp_path):
    config, published, _ = PUBLISHED["hydra++"]
    config_json, tensors = published(source(tiny_llama, config))
    said = begin(tiny_llama, config, write(tmp_path, config_json, tensors))[1][-1]
    assert said.endswith(
        "left out, as the target's or not needed: prefix_embeding_layer.embed_tokens.weight, prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"
    )


OURS = {
    "eagle3": (EAGLE3, "vllm"),
    "eagle3 native": (EAGLE3, "native"),
    "eagle3 low-rank": (Eagle3(taps=[0, 1], draft_vocab=100, head_rank=6), "native"),
    "eagle": (Eagle(noise=0.0), "vllm"),
    "eagle of sglang": (Eagle(noise=0.0), "sglang"),
    "eagle with bias": (Eagle(bias=True, noise=0.0), "sglang"),
    "medusa": (Medusa(heads=3), "vllm"),
    "medusa, few words": (Medusa(heads=3, draft_vocab=100), "native"),
    "hydra": (Hydra(heads=3, prefix=True), "native"),
}


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("name", sorted(OURS))
def test_a_drafter_of_ours_and_its_exports_come_back(targets, tmp_path, name, architecture):
    """Gemma multiplies its embeddings, and engines feed a drafter the raw ones."""
    (config, format), target = OURS[name], targets(architecture)
    old = source(target, config)
    save_drafter(tmp_path / "best", old, config, target.identity, {})
    export_drafter(old, target, tmp_path / "export", ExportConfig(dtype="float32", format=format), None)
    for folder in ("best", "export"):
        net, lines = begin(target, config, tmp_path / folder)
        if net.words:
            assert_same(net, old, target)
        assert all(torch.allclose(value, net.state_dict()[own], atol=1e-6) for own, value in old.state_dict().items())
        assert any(f"starting from {tmp_path / folder}: " in line for line in lines) and "note" not in str(lines)


@pytest.mark.parametrize("format", ["vllm", "native"])
def test_an_export_of_ours_is_the_one_that_was_made_and_says_for_which_target(tiny_llama, tmp_path, format):
    """As `generate --draft` and `inspect` hold it; a flipped bit is a weight like any other."""
    export_drafter(source(tiny_llama, EAGLE3), tiny_llama, tmp_path, ExportConfig(dtype="float32", format=format), None)
    made = json.loads((tmp_path / "drafttrain.json").read_text())
    (tmp_path / "drafttrain.json").write_text(json.dumps(made | {"identity": made["identity"] | {"revision": "tuned"}}))
    assert any("trained with another target (the revision" in line for line in begin(tiny_llama, EAGLE3, tmp_path)[1])
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert "is not the file that was exported" in refused(tiny_llama, EAGLE3, tmp_path)


PARALLEL = {
    "dflash, its own taps": DFlash(block=4, layers=2, mask_token=319, anchors=None),
    "dspark": DSpark(block=4, layers=2, taps=[0, 2], mask_token=319, anchors=None, rank=6),
    "dflash2": DFlash2(block=4, layers=2, mask_token=319, anchors=None),
    "p-eagle": PEagle(taps=[0, 2, 3], depth=4, layers=2, mask_token=319, draft_vocab=200),
}


@pytest.mark.parametrize("name", sorted(PARALLEL))
def test_a_parallel_drafter_of_ours_comes_back(tiny_llama, tmp_path, name):
    """Also one whose taps the recipe leaves to the family, which has other defaults than EAGLE's."""
    config = PARALLEL[name]
    old = source(tiny_llama, config)
    save_drafter(tmp_path / "best", old, config, tiny_llama.identity, {})
    other = {"cod_ratio": 0.5} if name == "p-eagle" else {"anchors": 9}  # how it is trained may change
    net, lines = begin(tiny_llama, replace(config, **other), tmp_path / "best")
    assert all(torch.equal(value, net.state_dict()[own]) for own, value in old.state_dict().items())
    assert any(f"starting from {tmp_path / 'best'}: " in line for line in lines) and "note" not in str(lines)


def test_a_drafter_of_ours_for_another_target_is_told(tiny_llama, tmp_path):
    old = source(tiny_llama, EAGLE3)
    other = Identity(**(tiny_llama.identity.__dict__ | {"revision": "tuned"}))
    save_drafter(tmp_path / "best", old, EAGLE3, other, {})
    net, lines = begin(tiny_llama, EAGLE3, tmp_path / "best")
    assert_same(net, old, tiny_llama)
    assert any("trained with another target (the revision of the target's weights (tuned there" in line for line in lines)


def published_hydra(tensors, prefix, k, u):
    """Logits of head k as published, biases and all, from the published tensors."""
    place, after = (lambda layer: 1 + 2 * layer, ".1") if prefix else (lambda layer: layer, "")
    linear = lambda x, name: x @ tensors[name + ".weight"].T + tensors[name + ".bias"]  # noqa: E731
    first = f"hydra_mlp.{k}.{place(0)}"
    r = linear(u, first + ".res_connection") + torch.nn.functional.silu(linear(u, first + ".linear"))
    for i in (1, 2):
        r = r + torch.nn.functional.silu(linear(r, f"hydra_mlp.{k}.{place(i)}.linear"))
    return linear(r, f"hydra_lm_head.{k}{after}")


def biased_hydra(target, prefix):
    config_json, tensors = hydra(source(target, Hydra(heads=3, layers=3, own_heads=True, prefix=prefix)))
    g = torch.Generator().manual_seed(8)
    for name in tensors:
        if name.endswith("bias"):
            tensors[name] = torch.randn(tensors[name].shape, generator=g) * 0.3
    return config_json, tensors


@torch.no_grad()
@pytest.mark.parametrize("words", [None, 90])
@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_comes_back_with_its_biases(tiny_llama, tmp_path, prefix, words):
    """Also where the head is cut to fewer tokens: each has its own constant."""
    config_json, tensors = biased_hydra(tiny_llama, prefix)
    config = Hydra(heads=3, layers=3, own_heads=True, prefix=prefix, head_bias=True, draft_vocab=words)
    net, lines = begin(tiny_llama, config, write(tmp_path, config_json, tensors))
    assert not [line for line in lines if line.startswith("note")] and not any("bias" in line for line in lines)
    c_BWH, path_BWK = torch.randn(1, 40, 32), torch.randint(0, 320, (1, 40, 3))
    for k in range(3):
        u = torch.cat([c_BWH, tiny_llama.embed(path_BWK[..., : k + 1]).flatten(2)], dim=-1)[0]
        wanted = published_hydra(tensors, prefix, k, u)[:, net.vocabulary.ids]
        got = net.logits(net.ask(k + 1, c_BWH, path_BWK)[0], path_BWK[0, :, 0])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("prefix", [False, True])
def test_hydra_s_biases_leave_one_constant_for_each_head(tiny_llama, tmp_path, prefix):
    """Without heads that hold it: the published formula with its biases, computed from the published tensors, against our net."""
    config_json, tensors = biased_hydra(tiny_llama, prefix)
    config = Hydra(heads=3, layers=3, own_heads=True, prefix=prefix)
    net, lines = begin(tiny_llama, config, write(tmp_path, config_json, tensors))
    largest = 0.0
    for k in range(3):
        u = torch.randn(40, 32 * (k + 2))
        said = published_hydra(tensors, prefix, k, u)
        ours = net.heads[k](u) @ net.lm_head.weight[:, 32 * k : 32 * (k + 1)].T
        constant = (said - ours).mean(0)
        assert float(constant.abs().max()) > 0.1
        torch.testing.assert_close(said - constant, ours, rtol=1e-4, atol=1e-4)
        largest = max(largest, float((constant - constant.mean()).abs().max()))
    (note,) = [line for line in lines if line.startswith("note")]
    assert f"up to {largest:.2g}" in note or f"up to {largest:.3g}" in note
    assert note.endswith("set drafter.init_args.head_bias to true to keep it") and "\n" not in note
    assert not any("hydra_lm_head" in line for line in lines)  # said once, in words


def test_a_hydra_without_biases_fills_one_that_has_them(tiny_llama, tmp_path):
    config, published, _ = PUBLISHED["hydra++"]
    old = source(tiny_llama, config)
    config_json, tensors = published(old)
    tensors = {name: value for name, value in tensors.items() if not name.startswith("hydra_lm_head") or "bias" not in name}
    net, _ = begin(tiny_llama, replace(config, head_bias=True), write(tmp_path, config_json, tensors))
    assert_same(net, old, tiny_llama)
    assert not net.head_bias.weight.any()


def test_tables_that_are_not_the_target_s_and_another_rotary_base_are_told(tiny_llama, tmp_path):
    config_json, tensors = specforge(source(tiny_llama, EAGLE3))
    tensors["embed_tokens.weight"] = torch.randn(320, 32)
    lines = begin(tiny_llama, EAGLE3, write(tmp_path, config_json | {"rope_theta": 500000.0}, tensors))[1]
    notes = [line for line in lines if line.startswith("note")]
    assert "base 500000 (default), the target with 10000" in notes[0] and "embed_tokens.weight is not this target's" in notes[1]


# ---- the vocabulary of the head ---------------------------------------------------------------------------------------------


def test_a_reduced_vocabulary_takes_the_place_of_the_choice_by_counts(tiny_llama, tmp_path):
    old = source(tiny_llama, EAGLE3)
    folder = write(tmp_path, *specforge(old))
    supervised_V = counts_for(tiny_llama).supervised_V
    share = float(supervised_V[some_ids(200)].sum() / supervised_V.sum())
    for size in (200, "best", 0.1):
        net, lines = begin(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=size), folder)
        assert torch.equal(net.vocabulary.ids, some_ids(200))
        assert lines[0].startswith("draft vocabulary: 200 tokens of the checkpoint, in place of a choice by counts; they are")
        assert f"{share:.2%}" in lines[0]


def test_a_reduced_vocabulary_is_cut_to_fewer_of_its_tokens(tiny_llama, tmp_path, monkeypatch):
    old, counts = source(tiny_llama, EAGLE3), counts_for(tiny_llama).supervised_V
    rarest = max(token for token in some_ids(200).tolist() if not counts[token])  # of those never said, the highest ids go first
    monkeypatch.setattr(tiny_llama, "end_ids", (2, rarest))
    net, lines = begin(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=90), write(tmp_path, *specforge(old)))
    assert_same(net, old, tiny_llama)
    kept, cut = net.vocabulary.ids, some_ids(200)[~torch.isin(some_ids(200), net.vocabulary.ids)]
    assert len(kept) == 90 and {2, rarest} <= set(kept.tolist())
    others = [token for token in kept.tolist() if token not in tiny_llama.end_ids]
    assert int(counts[others].min()) >= int(counts[cut].max())
    assert lines[0].startswith("draft vocabulary: 90 of the 200 tokens of the checkpoint")


def test_a_full_head_is_cut_to_the_recipe_s_vocabulary(tiny_llama, tmp_path):
    old = source(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=None))
    folder = write(tmp_path, *specforge(old))
    net, lines = begin(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=64), folder)
    assert len(net.vocabulary.ids) == 64 and "its head is cut to them, row by row" in lines
    assert_same(net, old, tiny_llama)


@pytest.mark.parametrize("size", [201, 320, None])
def test_a_head_never_grows(tiny_llama, tmp_path, size):
    folder = write(tmp_path, *specforge(source(tiny_llama, EAGLE3)))
    assert "the head of checkpoint.start" in (text := refused(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=size), folder))
    assert "has 200 tokens" in text and "set draft_vocab to 200 or less" in text


def test_coverage_that_is_asked_for_is_held(tiny_llama, tmp_path):
    folder = write(tmp_path, *specforge(source(tiny_llama, EAGLE3)))
    text = refused(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=200, least_coverage=0.95), folder)
    assert "drafter.init_args.least_coverage asks for 95.0%" in text
    assert "drafter.init_args.draft_vocab asks for 99.0%" in refused(tiny_llama, Eagle3(taps=[0, 2, 3], draft_vocab=0.99), folder)


def test_an_end_of_turn_that_cannot_be_said_is_told(tiny_llama, tmp_path, monkeypatch):
    folder = write(tmp_path, *specforge(source(tiny_llama, EAGLE3)))
    mute = int((~torch.isin(torch.arange(320), some_ids(200))).nonzero()[0, 0])
    monkeypatch.setattr(tiny_llama, "end_ids", (2, mute))
    assert f"note: it cannot say the end-of-turn tokens [{mute}]" in begin(tiny_llama, EAGLE3, folder)[1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "has a head of 200 tokens, but the target 320, and no d2t says which they are"),
        (lambda t: t["t2d"].logical_not_(), "its d2t and t2d name different tokens"),
        (lambda t: t["d2t"].add_(300), "its maps name tokens outside of the target's 320"),
        (lambda t: (t.pop("t2d"), t["d2t"].copy_(-torch.arange(200))), "its maps name a token twice"),
        (lambda t: t.update(d2t=t["d2t"][:150]), "its maps name 150 tokens, its head has 200 rows"),
    ],
)
def test_maps_that_do_not_fit_are_refused(tiny_llama, tmp_path, change, sentence):
    config_json, tensors = specforge(source(tiny_llama, EAGLE3))
    tensors["d2t"], tensors["t2d"] = tensors["d2t"].clone(), tensors["t2d"].clone()
    change(tensors)
    assert sentence in refused(tiny_llama, EAGLE3, write(tmp_path, config_json, tensors))


def test_a_missing_d2t_is_read_off_t2d(tiny_llama, tmp_path):
    old = source(tiny_llama, EAGLE3)
    config_json, tensors = specforge(old)
    del tensors["d2t"]
    assert_same(begin(tiny_llama, EAGLE3, write(tmp_path, config_json, tensors))[0], old, tiny_llama)


def test_full_heads_beside_a_token_map(tiny_llama, tmp_path):
    config = PUBLISHED["medusa of vllm"][0]
    old = source(tiny_llama, config)
    config_json, tensors = medusa_vllm(old)
    for k in range(3):
        full = torch.randn(320, 32)
        full[tensors["token_map"]] = tensors[f"lm_heads.{k}.weight"]
        tensors[f"lm_heads.{k}.weight"] = full
    assert_same(begin(tiny_llama, config, write(tmp_path, config_json, tensors))[0], old, tiny_llama)


# ---- what is refused --------------------------------------------------------------------------------------------------------


def test_every_tensor_that_does_not_fit_is_listed(tiny_llama, tmp_path):
    config_json, tensors = speculators(source(tiny_llama, EAGLE3))
    del tensors["layers.0.mlp.up_proj.weight"], tensors["norm.weight"]
    tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    tensors["layers.1.mlp.up_proj.weight"] = torch.ones(48, 32)
    tensors["fc.weight"] = torch.ones(32, 64)
    tensors["layers.0.hidden_norm.weight"] = torch.full((32,), float("nan"))
    tensors["layers.0.self_attn.o_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
    text = refused(tiny_llama, EAGLE3, write(tmp_path, config_json, tensors))
    for words in (
        "layers.0.mlp.up_proj.weight is missing",
        "norm.weight is missing",
        "layers.0.self_attn.q_norm.weight is unknown",
        "layers.1.mlp.up_proj.weight is unknown",
        "fc.weight is [32, 64] instead of [32, 96]",
        "layers.0.hidden_norm.weight holds numbers that are not finite",
        "layers.0.self_attn.o_proj.weight holds int8 instead of floating-point numbers",
    ):
        assert words in text
    assert text.count(";") == 6


def test_a_missing_head_of_medusa_is_named_as_the_file_would(tiny_llama, tmp_path):
    config = PUBLISHED["medusa"][0]
    config_json, tensors = medusa(source(tiny_llama, config))
    del tensors["1.2.weight"], tensors["2.1.linear.bias"]
    tensors["0.2.weight"] = tensors["0.2.weight"][:, :16]
    text = refused(tiny_llama, config, write(tmp_path, config_json, tensors))
    assert "1.2.weight is missing" in text and "2.1.linear.bias is missing" in text
    assert "0.2.weight is [320, 16] instead of [320, 32]" in text


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("eagle3", Eagle3(taps=[0, 1, 3], draft_vocab=200), "drafter.init_args.taps is [0, 1, 3], its own [0, 2, 3]"),
        ("eagle3 of vllm", Eagle3(taps=[1, 3], draft_vocab=200), "drafter.init_args.taps is [1, 3], its own [0, 2, 3]"),
        ("eagle3, usual taps", Eagle3(taps=[2], draft_vocab=200), "drafter.init_args.taps is [2], its own [1]"),
        ("eagle3", Eagle3(taps=[0, 2, 3], head_rank=4, draft_vocab=200), "drafter.init_args.head_rank is 4, its own null"),
        ("eagle3.1", EAGLE3, "fc_norm is false, its own true; drafter.init_args.norm_output is false, its own true"),
        ("eagle1", Eagle(), "drafter.init_args.bias is false, its own true"),
        ("eagle1", EAGLE3, "a drafter of class Eagle, but drafter.class_path is Eagle3"),
        (
            "medusa",
            Medusa(heads=1, layers=1),
            "heads is 1, its own 3; drafter.init_args.layers is 1, its own 2; drafter.init_args.own_heads",
        ),
        ("hydra", Hydra(heads=3, layers=2, own_heads=True, prefix=True), "drafter.init_args.prefix is true, its own false"),
    ],
)
def test_another_net_than_the_recipe_s_is_refused_with_what_to_set(tiny_llama, tmp_path, name, config, sentence):
    made_by, published, _ = PUBLISHED[name]
    assert sentence in refused(tiny_llama, config, write(tmp_path, *published(source(tiny_llama, made_by))))


def test_another_net_of_ours_is_refused_with_what_to_set(tiny_llama, tmp_path):
    save_drafter(tmp_path / "best", source(tiny_llama, EAGLE3), EAGLE3, tiny_llama.identity, {})
    text = refused(tiny_llama, Eagle3(taps=[0, 1, 3], depth=7, draft_vocab=200, norm_output=True), tmp_path / "best")
    assert "taps is [0, 1, 3], its own [0, 2, 3]; drafter.init_args.norm_output is true, its own false" in text
    assert "depth" not in text


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (
            "speculators",
            {"norm_before_residual": True},
            "norm_before_residual is true, and our block takes the residual before the norm",
        ),
        ("eagle3", {"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is true"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        (
            "eagle3",
            {"hidden_size": 64, "num_attention_heads": 8},
            "hidden_size is 64, but this target's drafters have 32; num_attention_heads is 8",
        ),
        ("eagle1", {"hidden_act": "gelu"}, "hidden_act is gelu, but this target's drafters have silu"),
        ("hydra", {"grounded_heads": False}, "grounded_heads is False, and a Hydra of ours sees the drafted tokens"),
        ("hydra", {"hidden_state_offset": 2}, "hidden_state_offset is 2"),
        ("speculators", {"speculators_model_type": "mtp"}, "is a mtp drafter of speculators"),
    ],
)
def test_what_our_nets_cannot_compute_is_refused_with_the_reason(tiny_llama, tmp_path, name, change, sentence):
    config, published, _ = PUBLISHED[name]
    config_json, tensors = published(source(tiny_llama, config))
    assert sentence in refused(tiny_llama, config, write(tmp_path, config_json | change, tensors))


def test_a_checkpoint_for_a_wider_target_is_refused(tiny_llama, tmp_path):
    """Medusa's config does not tell its width, its tensors do."""
    config = PUBLISHED["medusa"][0]
    config_json, tensors = medusa(source(tiny_llama, config))
    wide = {name: torch.randn([64 if size == 32 else size for size in value.shape]) for name, value in tensors.items()}
    assert "0.0.linear.weight is [64, 64] instead of [32, 32]" in refused(tiny_llama, config, write(tmp_path, config_json, wide))


def test_layouts_and_folders_that_are_not_known(tiny_llama, tmp_path):
    folder = write(
        tmp_path / "model", {"architectures": ["GPT"]}, {"wte.weight": torch.ones(2), "h.0.attn.weight": torch.ones(2)}
    )
    assert "(GPT) holds tensors such as h.0.attn.weight, wte.weight, which is none of the layouts" in refused(
        tiny_llama, EAGLE3, folder
    )
    (tmp_path / "empty").mkdir()
    assert "holds no weights (*.safetensors)" in refused(tiny_llama, EAGLE3, tmp_path / "empty")
    assert "there is no such folder" in refused(tiny_llama, EAGLE3, tmp_path / "nowhere")
    alone = write(tmp_path / "alone", *specforge(source(tiny_llama, EAGLE3)))
    (alone / "config.json").unlink()
    assert "has no config.json" in refused(tiny_llama, EAGLE3, alone)


def test_damaged_and_doubled_files(tiny_llama, tmp_path):
    folder = write(tmp_path, *specforge(source(tiny_llama, EAGLE3)))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    assert "model.safetensors is damaged" in refused(tiny_llama, EAGLE3, folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "more.safetensors").write_bytes(whole)
    assert "in more than one file" in refused(tiny_llama, EAGLE3, folder)


def test_weights_in_pieces_are_put_together(tiny_llama, tmp_path):
    old = source(tiny_llama, EAGLE3)
    config_json, tensors = specforge(old)
    names = sorted(tensors)
    write(tmp_path, config_json, {name: tensors[name] for name in names[:5]}, "model-00001-of-00002.safetensors")
    write(tmp_path, config_json, {name: tensors[name] for name in names[5:]}, "model-00002-of-00002.safetensors")
    assert_same(begin(tiny_llama, EAGLE3, tmp_path)[0], old, tiny_llama)


class Malice:
    """Unpickled without care, it writes a file."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (open, (str(self.trace), "w"))


@pytest.mark.parametrize(
    ("name", "file"), [("eagle1", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt"), ("hydra++", "hydra_lm_head.pt")]
)
def test_pickles_are_read_only_when_allowed(tiny_llama, tmp_path, name, file):
    config, published, _ = PUBLISHED[name]
    old = source(tiny_llama, config)
    folder = write(tmp_path, *published(old), file=file)
    text = refused(tiny_llama, config, folder)
    assert f"as a pickle ({file})" in text and "set checkpoint.start_pickle to true" in text
    assert_same(begin(tiny_llama, config, folder, pickles=True)[0], old, tiny_llama)


def test_a_pickle_of_more_than_tensors_does_nothing(tiny_llama, tmp_path):
    folder = write(tmp_path / "it", {}, {})
    (folder / "model.safetensors").unlink()
    for bad in (pickle.dumps(Malice(tmp_path / "trace")), b"nothing"):
        (folder / "pytorch_model.bin").write_bytes(bad)
        assert "damaged or holds more than tensors" in refused(tiny_llama, EAGLE3, folder, pickles=True)
    torch.save({"fc.weight": Malice(tmp_path / "trace")}, folder / "pytorch_model.bin")
    assert "damaged or holds more than tensors" in refused(tiny_llama, EAGLE3, folder, pickles=True)
    torch.save({"epoch": 3, "fc.weight": torch.ones(2)}, folder / "pytorch_model.bin")
    assert "something else than named tensors" in refused(tiny_llama, EAGLE3, folder, pickles=True)
    assert not (tmp_path / "trace").exists()


def test_an_empty_start_is_refused():
    with pytest.raises(UserError, match=r"checkpoint.start is empty"):
        CheckpointConfig(start=" ")


# ---- training ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def taught(tmp_path, tiny_llama, target_folders):
    """A run that has learned something, and its run folder."""
    folder = make_run(tmp_path / "taught", tiny_llama)
    start(folder, target_folders("llama"), optimizer={"lr": 1e-2}, trainer={"max_steps": 25}, data={"rows": 4})
    return folder


def test_training_begins_at_the_loss_of_its_source(tmp_path, tiny_llama, target_folders, taught, capsys):
    """A step of size zero shows the loss of what it began from; every checkpoint kind shows the same."""
    llama, still = target_folders("llama"), {"optimizer": {"lr": 1e-12}, "trainer": {"max_steps": 1}, "data": {"rows": 4}}
    fresh, again = (make_run(tmp_path / name, tiny_llama) for name in ("fresh", "again"))
    start(fresh, llama, **still)
    best = taught / "checkpoints" / "best"
    start(again, llama, checkpoint={"start": str(best)}, **still)
    out = capsys.readouterr().out
    assert f"starting from {best}: a drafter of drafttrain" in out
    assert "draft vocabulary: 200 tokens of the checkpoint" in out
    assert logged(again)[1] < 0.9 * logged(fresh)[1]
    kept, begun = (load_file(folder / "drafter.safetensors") for folder in (best, again / "checkpoints" / "last_drafter"))
    assert all(torch.allclose(value, begun[name], atol=1e-6) for name, value in kept.items())


def test_a_run_that_goes_on_does_not_read_its_start_again(tmp_path, tiny_llama, target_folders, taught, capsys):
    """The vocabulary of the source is not the one that counts would choose, so it must be remembered."""
    llama = target_folders("llama")
    old = source(tiny_llama, EAGLE3)
    folder = write(tmp_path / "published", *specforge(old))
    whole, broken = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "broken"))
    settings = {"checkpoint": {"start": str(folder), "every": 2}, "optimizer": {"schedule": "constant"}}
    start(whole, llama, trainer={"max_steps": 5}, **settings)
    start(broken, llama, trainer={"max_steps": 2}, **settings)
    (folder / "model.safetensors").unlink()
    capsys.readouterr()
    start(broken, llama, trainer={"max_steps": 5}, **settings)
    assert f"checkpoint.start {folder} is not read again" in capsys.readouterr().out
    assert logged(broken) == logged(whole)
    ends = [load_file(run / "checkpoints" / "last_drafter" / "drafter.safetensors") for run in (whole, broken)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert torch.equal(ends[0]["d2t"], old.vocabulary.d2t)


def test_another_start_is_not_resumed_and_a_lost_vocabulary_is_named(tmp_path, tiny_llama, target_folders, taught):
    llama, best = target_folders("llama"), str(taught / "checkpoints" / "best")
    run = make_run(tmp_path / "run", tiny_llama)
    start(run, llama, trainer={"max_steps": 1}, checkpoint={"start": best})
    with pytest.raises(UserError, match=r"checkpoint.start: .*/best before, None now"):
        start(run, llama)
    (run / "checkpoints" / "start_vocabulary.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"start_vocabulary.safetensors, which holds the draft vocabulary of this run, cannot be read"
    ):
        start(run, llama, checkpoint={"start": best})


# ---- the Hub -----------------------------------------------------------------------------------------------------------------

OPEN = """
import json, os, sys
from drafttrain.drafters.start_files import find, read_tensors
from drafttrain.errors import UserError

answers = {}
for name, where, pickle, token in json.load(sys.stdin):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        folder = find(where, pickle)
        answers[name] = [sorted(file.name for file in folder.iterdir()), sorted(read_tensors(folder, pickle, f"checkpoint.start {where}"))]
    except UserError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def test_hub_ids(tiny_llama, tmp_path):
    """In a process of its own: the client library reads its endpoint and cache folder when it is imported."""
    config_json, tensors = specforge(source(tiny_llama, EAGLE3))
    safe, bad = write(tmp_path / "safe", config_json, tensors), write(tmp_path / "bin", config_json, tensors, "pytorch_model.bin")

    def files(folder):
        return {file.name: file.read_bytes() for file in folder.iterdir()} | {
            "README.md": b"card",
            "training_args.bin": b"pickle",
        }

    with HubStandin({"hf_mine": ["me"], "hf_other": ["other"]}) as hub:
        hub.repos["me/eagle3"] = Repo(private=True, files=files(safe), large={"model.safetensors"})
        hub.repos["me/secret"] = Repo(private=True, files=files(safe), large={"model.safetensors"})
        hub.repos["me/pickled"] = Repo(private=False, files=files(bad), large={"pytorch_model.bin"})
        hub.repos["me/gated"] = Repo(private=False, gated=True, files=files(safe), large={"model.safetensors"})
        asked = [
            ("mine", "me/eagle3", False, "hf_mine"),
            ("not mine", "me/secret", False, "hf_other"),
            ("gated", "me/gated", False, "hf_other"),
            ("pickled", "me/pickled", False, "hf_mine"),
            ("pickled, allowed", "me/pickled", True, "hf_mine"),
        ]
        env = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        env["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "0"
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            env.pop(name, None)
        answers = ask(asked, env)
    away = ask([("cached", "me/eagle3", False, "hf_mine"), ("away", "me/other", False, None)], env | {"HF_HUB_OFFLINE": "1"})
    assert answers["mine"] == [["config.json", "model.safetensors"], sorted(tensors)] == away["cached"]
    assert "there is no such repository on the Hub (or it is private" in answers["not mine"]
    assert "checkpoint.start me/gated could not be downloaded: it is gated" in answers["gated"]
    assert "holds no weights (*.safetensors) (if it holds a pickle" in answers["pickled"]
    assert answers["pickled, allowed"][1] == sorted(tensors)
    assert "the Hub cannot be reached and it is not in the local cache" in away["away"]


def ask(asked, env):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", OPEN], input=json.dumps(asked), env=env, cwd=root, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
