"""Block drafters as published: DFlash, DFlash 2 and DSpark, of z-lab, SpecForge, vLLM and speculators (published.py names the tensors).

Their tensors have the same names everywhere; where the options stand differs, so each is looked for in `dflash_config` and `dspark_config`, then
at the top, with and without `dspark_` before it:

    z-lab, SpecForge   block_size at the top or nested, target_layer_ids (0-based outputs), mask_token_id
    speculators        aux_hidden_state_layer_ids (1 higher), the layers' fields in transformer_layer_config

The layout. DFlash and DFlash 2 are 1+N unless `sample_from_anchor` says otherwise; DSpark samples from the anchor unless that is false or
`dspark_bonus_anchor` true. Ours have one layout each, and a drafter read in the other is one slot off and accepts nothing: so it is refused.

A window: `layer_types` that all slide, or use_swa with swa_window_size. vLLM counts it from each slot, as ours does; speculators from the anchor.

Letters: S slots of a block, r rank.
"""

from typing import Any

from torch import Tensor

from drafttrain.drafters.published_layout import Published, masked_by, numbers

BLOCK = 16
"""Slots of a block where config.json says nothing, as SGLang has it."""
TABLES = r"embed_tokens\.weight|lm_head\.weight|t2d|d2t|.*rotary_emb\.inv_freq"
CODEBOOKS = {
    f"candidate_selector.{name}.weight": f"candidate_selector.{name}" for name in ("predecessor_codebook", "successor_codebook")
}
SPECULATORS = "speculators_model_type"


def dflash(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    return _block("DFlash", "DFlash", config, tensors)


def dflash2(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    found = _block("DFlash 2", "DFlash2", config, tensors)
    found.theirs = lambda name: [CODEBOOKS.get(name, name)]
    found.options |= {
        "rank": _said(config, "selector_rank", 256),
        "candidates": _said(config, "selector_top_k", 16),
        "group": _said(config, "conv_group_size", 16),
    }
    if (taps := _said(config, "conv_kernel_size", 2)) != 2:
        found.refusals.append(f"conv_kernel_size is {taps}, and kernels of ours read 2 slots")
    found.logits = float(_said(config, "output_multiplier", 1.0)), _said(config, "final_logit_softcapping", None)
    return found


def dspark(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    """With a Markov head, and a confidence head that reads the token before beside the state, or none."""
    found = _block("DSpark", "DSpark", config, tensors, from_anchor=True)
    first = tensors.get("markov_head.markov_w1.weight")
    own = "confidence_head.proj.weight" in tensors
    told = own and bool(_said(config, "confidence_head_with_markov", True))
    rank = first.shape[-1] if first is not None else 0
    found.options |= {"rank": _said(config, "markov_rank", rank), "confidence": told}
    if own and not told:
        found.left_out += r"|confidence_head\..*"
        found.notes += (
            "its confidence head reads the state alone, and ours the token before too; it changes no draft and is left out",
        )
    if (kind := _said(config, "markov_head_type", "vanilla")) != "vanilla":
        found.refusals.append(f"markov_head_type is {kind}, and a Markov head of ours is vanilla")
    found.logits = 1.0, None
    return found


def _block(word: str, drafter: str, config: dict[str, Any], tensors: dict[str, Tensor], from_anchor: bool = False) -> Published:
    """What all kinds share. `from_anchor` is the kind's layout, both ours and its readers' default."""
    inner = config.get("transformer_layer_config") or config
    mask, notes = masked_by(_said(config, "mask_token_id", None))
    layers = len(numbers(r"layers\.(\d+)\.self_attn\.q_proj\.weight", tensors))
    window, refusals = _window(config, inner, layers)
    if _from_anchor(config, from_anchor) != from_anchor:
        layout = "is 1+N (slot 0 is the anchor)" if from_anchor else "samples from the anchor (slot 0 drafts the first token)"
        refusals.append(f"it {layout}, and our {word} does not")
    if inner.get("is_causal") or config.get("is_causal") or _said(config, "causal", False):
        refusals.append(f"it is causal, and the slots of our {word} see each other")
    if (kind := _said(config, "projector_type", None)) not in (None, "dflash", "dspark"):
        refusals.append(f"projector_type is {kind}, which no drafter of ours is")
    return Published(
        layout=f"{word}, speculators' fields" if SPECULATORS in config else word,
        drafter=drafter,
        config=inner,
        tensors=tensors,
        options={"block": _said(config, "block_size", BLOCK), "layers": layers, "taps": _taps(config), "window": window, **mask},
        refusals=refusals,
        left_out=TABLES,
        notes=notes,
    )


def _said(config: dict[str, Any], name: str, default: Any) -> Any:
    """A field wherever it stands."""
    for place in (config.get("dflash_config"), config.get("dspark_config")):
        if place and place.get(name) is not None:
            return place[name]
    return next((config[key] for key in (f"dspark_{name}", name) if config.get(key) is not None), default)


def _from_anchor(config: dict[str, Any], default: bool) -> bool:
    if config.get("dspark_bonus_anchor") is not None:
        return not config["dspark_bonus_anchor"]
    return bool(_said(config, "sample_from_anchor", default))


def _taps(config: dict[str, Any]) -> tuple[int, ...] | None:
    """0-based layer outputs, ascending; None where the checkpoint leaves them to its reader."""
    if above := config.get("aux_hidden_state_layer_ids"):
        return tuple(sorted(layer - 1 for layer in above))
    found = _said(config, "target_layer_ids", None)
    return tuple(sorted(found)) if found else None


def _window(config: dict[str, Any], inner: dict[str, Any], layers: int) -> tuple[int | None, list[str]]:
    """The window of all layers, and why ours cannot have it."""
    kinds = inner.get("layer_types")
    least = inner.get("max_window_layers", layers) if inner.get("use_sliding_window") else layers
    slides = [i >= least for i in range(layers)] if kinds is None else [kind == "sliding_attention" for kind in kinds[:layers]]
    if _said(config, "use_swa", any(slides)) is False or not (any(slides) or _said(config, "use_swa", False)):
        return None, []
    if slides and any(slides) and not all(slides):
        return None, ["some of its layers slide and some do not, and ours all do or none"]
    if SPECULATORS in config:
        return None, ["its window is counted from the anchor, and ours from each slot"]
    return _said(config, "swa_window_size", inner.get("sliding_window")), []
