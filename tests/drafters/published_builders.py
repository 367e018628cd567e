"""Block drafters and P-EAGLE written down by hand as their projects publish them: names and fields of the engines' tables, nothing of our exporter.

Each takes a net of ours for the tiny Llama target (width 32, 320 tokens, 5 layers) and returns (config.json, tensors).
"""

import torch

BLOCK = (
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
)  # fmt: skip
QWEN = {
    "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "vocab_size": 320,
}  # fmt: skip


def maps(net):
    """d2t and t2d of a reduced vocabulary."""
    ids = net.vocabulary.ids
    if len(ids) == 320:
        return {}
    marked = torch.zeros(320, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": torch.tensor([token - row for row, token in enumerate(ids.tolist())]), "t2d": marked}


def layers(net):
    """The layers' tensors."""
    w, found = net.state_dict(), {}
    for i in range(net.config.layers):
        for name in (*BLOCK, "self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            found[f"layers.{i}.{name}"] = w[f"layers.{i}.{name}"]
    return found | {name: w[name] for name in ("fc.weight", "hidden_norm.weight", "norm.weight")}


def fields(net, architecture, kind="full_attention"):
    """What every config.json of a block drafter says at its top."""
    count, slides = net.config.layers, kind == "sliding_attention"
    return QWEN | {
        "architectures": [architecture], "num_hidden_layers": count, "num_target_layers": 5, "layer_types": [kind] * count,
        "use_sliding_window": slides, "sliding_window": net.config.window if slides else None,
    }  # fmt: skip


def zlab_dflash(net):
    config = fields(net, "DFlashDraftModel") | {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": net.config.block,
    }
    return config | {"dflash_config": {"mask_token_id": net.mask, "target_layer_ids": list(net.needs.taps)}}, layers(net)


def zlab_dflash_usual_taps(net):
    config, tensors = zlab_dflash(net)
    del config["dflash_config"]["target_layer_ids"]
    return config, tensors


def vllm_dflash(net):
    """A reduced vocabulary and a window: its own rows of the target's head beside d2t."""
    config = fields(net, "DFlashDraftModel", "sliding_attention") | {
        "block_size": net.config.block,
        "draft_vocab_size": len(net.vocabulary.ids),
    }
    config["dflash_config"] = {
        "mask_token_id": net.mask, "target_layer_ids": list(net.needs.taps), "causal": False, "use_swa": True,
        "swa_window_size": net.config.window, "sample_from_anchor": False,
    }  # fmt: skip
    return config, layers(net) | maps(net) | {"lm_head.weight": net.target_weight[net.vocabulary.ids]}


def speculators_fields(net, kind, architecture, layer_count, layer_type="full_attention", **more):
    inner = QWEN | {"num_hidden_layers": layer_count, "layer_types": [layer_type] * layer_count}
    proposal = {"proposal_type": "greedy", "speculative_tokens": net.deepest, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [architecture], "speculators_model_type": kind, "speculators_version": "0.9.0", "transformer_layer_config": inner,
        "draft_vocab_size": len(net.vocabulary.ids), "target_hidden_size": None,
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal]},
        **more,
    }  # fmt: skip


def speculators_dflash(net):
    config = speculators_fields(
        net, "dflash", "DFlashSpeculator", net.config.layers, block_size=net.config.block, mask_token_id=net.mask, sample_from_anchor=False,
        sliding_window_non_causal=False, aux_hidden_state_layer_ids=[tap + 1 for tap in net.needs.taps],
    )  # fmt: skip
    head = {} if len(net.vocabulary.ids) == 320 else {"lm_head.weight": net.target_weight[net.vocabulary.ids]}
    return config, layers(net) | maps(net) | head


def selector(net):
    w, found = net.state_dict(), {}
    for i in range(net.config.layers):
        for conv in ("attention_conv", "mlp_conv"):
            for name in ("base_kernel", "kernel_projection.weight"):
                found[f"layers.{i}.{conv}.{name}"] = w[f"layers.{i}.{conv}.{name}"]
    for name in ("predecessor_codebook", "successor_codebook"):
        found[f"candidate_selector.{name}"] = w[f"candidate_selector.{name}.weight"]
    return found | {"candidate_selector.hidden_projection.weight": w["candidate_selector.hidden_projection.weight"]}


def conv_fields(net):
    return {
        "conv_group_size": net.config.group, "conv_kernel_size": 2, "selector_rank": net.config.rank, "selector_top_k": net.config.candidates,
    }  # fmt: skip


def specforge_dflash2(net):
    """The length of a block stands in the nested part, and all layers slide."""
    nested = {"block_size": net.config.block, "mask_token_id": net.mask, "target_layer_ids": list(net.needs.taps)}
    config = fields(net, "DFlash2DraftModel", "sliding_attention") | {
        "is_causal": False,
        "dflash_config": nested | conv_fields(net),
    }
    return config, layers(net) | selector(net)


def speculators_dflash2(net):
    config = speculators_fields(
        net, "dflash2", "DFlash2DraftModel", net.config.layers, block_size=net.config.block, mask_token_id=net.mask, sample_from_anchor=False,
        sliding_window_non_causal=True, aux_hidden_state_layer_ids=[tap + 1 for tap in net.needs.taps], **conv_fields(net),
    )  # fmt: skip
    return config, layers(net) | selector(net)


def markov(net):
    names = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    if net.config.confidence:
        names += ["confidence_head.proj.weight", "confidence_head.proj.bias"]
    return {name: net.state_dict()[name] for name in names}


def markov_fields(net):
    return {
        "markov_rank": net.config.rank, "markov_head_type": "vanilla", "enable_confidence_head": net.config.confidence,
        "confidence_head_with_markov": net.config.confidence,
    }  # fmt: skip


def vllm_dspark(net):
    """All its options at the top, as DeepSpec writes them."""
    config = fields(net, "Qwen3DSparkModel") | markov_fields(net)
    config |= {
        "block_size": net.config.block,
        "mask_token_id": net.mask,
        "target_layer_ids": list(net.needs.taps),
        "dspark_bonus_anchor": False,
    }
    return config, layers(net) | markov(net)


def specforge_dspark(net):
    """All its options nested, and no word of the layout."""
    nested = {
        "mask_token_id": net.mask,
        "target_layer_ids": list(net.needs.taps),
        "projector_type": "dspark",
        "confidence_head_alpha": 1.0,
    }
    config = fields(net, "DSparkDraftModel") | {"block_size": net.config.block, "dflash_config": nested | markov_fields(net)}
    return config, layers(net) | markov(net)


def speculators_dspark(net):
    config = speculators_fields(
        net, "dspark", "DSparkSpeculator", net.config.layers, block_size=net.config.block, mask_token_id=net.mask, sample_from_anchor=True,
        sliding_window_non_causal=False, aux_hidden_state_layer_ids=[tap + 1 for tap in net.needs.taps], **markov_fields(net),
    )  # fmt: skip
    head = {} if len(net.vocabulary.ids) == 320 else {"lm_head.weight": net.target_weight[net.vocabulary.ids]}
    return config, layers(net) | maps(net) | markov(net) | head


def deep(net, first):
    """P-EAGLE's tensors; `first` is what its first layer is called."""
    w = net.state_dict()
    found = {first + name: w["layers.0." + name] for name in (*BLOCK, "hidden_norm.weight")}
    for i in range(1, net.config.layers):
        found |= {f"layers.{i}.{name}": w[f"layers.{i}.{name}"] for name in BLOCK}
    return found | {name: w[name] for name in ("fc.weight", "norm.weight", "lm_head.weight", "mask_hidden")} | maps(net)


def vllm_p_eagle(net):
    """The masked state as a plain list of numbers."""
    config = QWEN | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": net.config.layers, "ptd_token_id": net.mask,
        "parallel_drafting": True, "draft_vocab_size": len(net.vocabulary.ids),
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in net.needs.taps],
    }  # fmt: skip
    tensors = deep(net, "layers.0.")
    return config, tensors | {"mask_hidden": tensors["mask_hidden"].flatten()}


def specforge_p_eagle(net):
    """Neither layers nor masked token are said; maps of the full vocabulary."""
    config = QWEN | {
        "architectures": ["PEagleDraftModel"],
        "model_type": "llama",
        "num_hidden_layers": net.config.layers,
        "draft_vocab_size": 320,
    }
    full = {"d2t": torch.zeros(320, dtype=torch.int64), "t2d": torch.ones(320, dtype=torch.bool)}
    return config, deep(net, "midlayer.") | full | {"embed_tokens.weight": net.embedding.module.weight.detach()}


def speculators_p_eagle(net):
    config = speculators_fields(
        net, "peagle", "PEagleSpeculator", net.config.layers, mask_token_id=net.mask, norm_before_residual=False, norm_before_fc=False,
        fc_norm=False, norm_output=False, eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in net.needs.taps],
    )  # fmt: skip
    return config, deep(net, "layers.0.") | {"embed_tokens.weight": net.embedding.module.weight.detach()}
