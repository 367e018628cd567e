"""EAGLE-1, EAGLE-3 and P-EAGLE as published: the original's, SpecForge's, vLLM's and speculators' names (published.py names the tensors)."""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from drafttrain.drafters.published_layout import Published, masked_by, numbers

TABLES = r"embed_tokens\.weight|t2d|d2t|.*rotary_emb\.inv_freq"
"""What a drafter with a head of its own has no place for."""


def eagle(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    biased = "fc.bias" in tensors and bool(tensors["fc.bias"].any())  # SGLang wants one, be it zeros
    return Published(
        layout="EAGLE-1/2",
        drafter="Eagle",
        config=config,
        tensors=tensors,
        options={"bias": True} if biased else {},
        trained={"bias": biased},
        zeros=r"fc\.bias",
        left_out=r"embed_tokens\.weight|lm_head\.weight|.*rotary_emb\.inv_freq" + ("" if biased else r"|fc\.bias"),
        raw_embeddings="fc.weight",
    )


def eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    family, inner, first = _family(config, tensors)
    refusals = _refusals(config)
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        refusals.append("use_aux_hidden_state is false, and an EAGLE-3 drafter of ours reads taps of layers")
    return Published(
        layout=f"EAGLE-3, {family}",
        drafter="Eagle3",
        config=inner,
        tensors=tensors,
        theirs=_named(r"^midlayer\.", first),
        options={
            "taps": _taps(config),
            "fc_norm": _normed(config, tensors),
            "norm_output": bool(config.get("norm_output")),
            "window": inner.get("sliding_window") if "sliding_attention" in (inner.get("layer_types") or [])[:1] else None,
            "head_rank": None,
        },
        refusals=refusals,
        left_out=TABLES,
    )


def p_eagle(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    """EAGLE-3's first layer, ordinary ones behind it, and `mask_hidden`, A Ht numbers in whatever shape."""
    family, inner, first = _family(config, tensors)
    token = next((config[name] for name in ("pard_token", "ptd_token_id", "mask_token_id") if config.get(name) is not None), None)
    mask, notes = masked_by(token)
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafts = config.get("max_drafts") or proposals[0].get("speculative_tokens")
    return Published(
        layout=f"P-EAGLE, {family}",
        drafter="PEagle",
        config=inner,
        tensors=tensors | {name: state.reshape(1, 1, -1) for name, state in tensors.items() if name == "mask_hidden"},
        theirs=_named(r"^layers\.0\.", first),
        options={
            "taps": _taps(config),
            "layers": max(numbers(r"layers\.(\d+)\.self_attn\.q_proj\.weight", tensors), default=0) + 1,
            "fc_norm": _normed(config, tensors),
            **mask,
        },
        trained={"depth": drafts} if drafts else {},
        refusals=_refusals(config),
        left_out=TABLES,
        notes=notes,
    )


def _family(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[str, dict[str, Any], str]:
    """Whose names these are, the fields of the block, and what the first layer is called."""
    inner = config.get("transformer_layer_config") or {}
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    family = "speculators' names" if inner else {"midlayer.": "the original's names", "layers.0.": "vLLM's names"}[first]
    return family, inner or config, first


def _named(ours: str, theirs: str) -> Callable[[str], list[str]]:
    return lambda name: [re.sub(ours, theirs, name)]


def _normed(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    return bool(config.get("fc_norm")) or "fc_norm.0.weight" in tensors


def _refusals(config: dict[str, Any]) -> list[str]:
    """Options of the first layer that ours has not. The nested field counts before the one at the top, as engines have it."""
    nested = config.get("eagle_config") or {}
    return [
        f"{key} is true, and {why}"
        for key, why in (
            ("norm_before_residual", "our block takes the residual before the norm, as SGLang's does"),
            ("norm_before_fc", "our taps are normed one by one (fc_norm) or not at all"),
        )
        if nested.get(key, config.get(key))
    ]


def _taps(config: dict[str, Any]) -> tuple[int, ...] | None:
    """0-based layer outputs, ascending; None where the checkpoint leaves them to its reader."""
    if top := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(sorted(layer - 1 for layer in top))
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(sorted(nested)) if nested else None
