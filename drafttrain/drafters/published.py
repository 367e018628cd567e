"""Trained drafters as their projects publish them: which layout a folder holds, and what our tensors are called in it.

    EAGLE-1, EAGLE-2   fc.{weight,bias}  layers.0.*                       (Li et al. 2024, arXiv 2401.15077; 2406.16858)
    EAGLE-3            fc.weight  midlayer.* or layers.0.*  norm.weight  lm_head.weight  d2t  t2d     (arXiv 2503.01840): the original,
                       SpecForge and exports of ours say midlayer; speculators and vLLM say layers.0
    P-EAGLE            EAGLE-3's, further layers.{i}.*, mask_hidden       (arXiv 2602.01469)
    DFlash             fc.weight  hidden_norm.weight  layers.{i}.*  norm.weight, with q_norm and k_norm   (arXiv 2602.06036): z-lab, SpecForge,
                       speculators; d2t, t2d and lm_head.weight for a reduced vocabulary
    DFlash 2           DFlash's, layers.{i}.{attention,mlp}_conv.*  candidate_selector.*
    DSpark             DFlash's, markov_head.markov_w{1,2}.weight  confidence_head.proj.*              (arXiv 2607.05147)
    Medusa             {k}.{l}.linear.{weight,bias}  {k}.{layers}.weight  (Cai et al. 2024, arXiv 2401.10774)
                       vLLM: blocks.{k}.layers.{l}.weight  lm_heads.{k}.weight, or one lm_head.weight, and token_map
    Hydra, Hydra++     hydra_mlp.{k}.{l}.linear.*  hydra_mlp.{k}.{first}.res_connection.*  hydra_lm_head.{k}.*, and for Hydra++
                       prefix_embeding_layer.* (spelt so)                 (Ankner et al. 2024, arXiv 2402.05109)

What each says of itself: published_layout.py; how they are read: published_eagle.py, published_blocks.py, published_heads.py.

Letters: i layer of a drafter, k head, l layer of a head.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from drafttrain.drafters.published_blocks import dflash, dflash2, dspark
from drafttrain.drafters.published_eagle import eagle, eagle3, p_eagle
from drafttrain.drafters.published_heads import hydra, medusa, medusa_vllm
from drafttrain.drafters.published_layout import Published
from drafttrain.errors import UserError

LAYOUTS: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], Published]], ...] = (
    (r"hydra_mlp\..*", hydra),
    (r"(medusa_head\.)?\d+\.\d+\.linear\.weight", medusa),
    (r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight", medusa_vllm),
    (r"candidate_selector\..*", dflash2),
    (r"markov_head\..*", dspark),
    (r"hidden_norm\.weight", dflash),
    (r"mask_hidden", p_eagle),
    (r"midlayer\..*|layers\.0\.hidden_norm\.weight", eagle3),
    (r"layers\.0\.self_attn\.q_proj\.weight", eagle),
)
"""A tensor that only this layout, and none behind it, has -> how it is read. The first that fits counts."""
SPECULATORS = {"eagle3": eagle3, "peagle": p_eagle, "dflash": dflash, "dflash2": dflash2, "dspark": dspark}
"""Kinds of that library, and how they are read."""


def recognise(config: dict[str, Any], tensors: dict[str, Tensor], where: str) -> Published:
    """What a published folder holds, by its config.json and the names of its tensors. Raises UserError for a layout that is not known."""
    kind = config.get("speculators_model_type")
    if kind in SPECULATORS:
        return SPECULATORS[kind](config, tensors)
    if kind is not None:
        raise UserError(
            f"{where} is a {kind} drafter of speculators; of that library's kinds only {', '.join(SPECULATORS)} can be read."
        )
    for name, read in LAYOUTS:
        if any(re.fullmatch(name, own) for own in tensors):
            return read(config, tensors)
    some = ", ".join(sorted(tensors)[:6])
    raise UserError(
        f"{where} ({', '.join(config.get('architectures') or []) or 'no architectures in config.json'}) holds tensors such as {some}, which is "
        "none of the layouts that can be read: EAGLE-1/2, EAGLE-3 and P-EAGLE (original, SpecForge, speculators), DFlash, DFlash 2, DSpark, Medusa, "
        "Hydra, or a drafter of ours."
    )
