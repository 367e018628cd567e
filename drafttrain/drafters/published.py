"""Trained drafters as their projects publish them: which layout a folder holds, and what our tensors are called in it.

    EAGLE-1, EAGLE-2   fc.{weight,bias}  layers.0.*                       (Li et al. 2024, arXiv 2401.15077; 2406.16858)
    EAGLE-3            fc.weight  midlayer.* or layers.0.*  norm.weight  lm_head.weight  d2t  t2d     (arXiv 2503.01840): the original,
                       SpecForge and exports of ours say midlayer; speculators and vLLM say layers.0
    Medusa             {k}.{l}.linear.{weight,bias}  {k}.{layers}.weight  (Cai et al. 2024, arXiv 2401.10774)
                       vLLM: blocks.{k}.layers.{l}.weight  lm_heads.{k}.weight, or one lm_head.weight, and token_map
    Hydra, Hydra++     hydra_mlp.{k}.{l}.linear.*  hydra_mlp.{k}.{first}.res_connection.*  hydra_lm_head.{k}.*, and for Hydra++
                       prefix_embeding_layer.* (spelt so)                 (Ankner et al. 2024, arXiv 2402.05109)

Numbers l count modules, dropout among them, so only their order means anything. A layout says for each of *our* names which tensors of
the file stand for it; so a fault can be told in the file's own words, and nothing that is not asked for is taken in silence.

**Biases of Hydra.** Its blocks add a bias b beside the projection, r_1 = P u + b + SiLU(U_1 u + b_1), and its heads one beside the matrix,
W r + c. Our blocks have none. With r' = r - b the layers behind are the same with b_l + U_l b in the place of b_l, and the logits W r' +
(W b + c): the same net with one constant for each token and head, which is what `head_bias` holds. Without that option it is left out, and told.

Layers of the target: lists at the top level count as vLLM does, the residual stream behind k layers, our tap k - 1; lists in
`eagle_config` count 0-based outputs, as taps do.

Letters: k head, l layer, H width, V target vocabulary, Vd rows of the head.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import UserError

HEADS = ("lm_head.weight", "lm_head.up.weight")
"""What our drafters call the matrix with a row for each token."""


@dataclass
class Published:
    """A folder's drafter, in the words of its layout."""

    layout: str
    """For people."""
    drafter: str
    """Our class for it."""
    config: dict[str, Any]
    """What its config.json says of its block."""
    tensors: dict[str, Tensor]
    theirs: Callable[[str], list[str]] = lambda name: [name]
    """Our name -> the tensors of the file that stand for it, joined side by side if several."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the recipe's drafter must say to be the same net; taps of None are the usual ones."""
    refusals: list[str] = field(default_factory=list)
    """Why no recipe can be the same net."""
    zeros: str = r"(?!)"
    """Tensors that a file may lack where they are nothing but zeros (a pattern of full names)."""
    left_out: str = r"(?!)"
    """Tensors that have no place in our nets by design (a pattern of full names)."""
    lost: dict[str, str] = field(default_factory=dict)
    """A weight that ours have by an option -> what is lost without it, for people; its tensors are then left out."""
    raw_embeddings: str | None = None
    """The tensor whose left half reads embeddings as they stand in the target's table; ours reads them as the target does."""

    @property
    def rows(self) -> int | None:
        """Vd of its head; None where it speaks with the target's."""
        names = [name for ours in HEADS for name in self.theirs(ours)]
        return next((len(self.tensors[name]) for name in names if name in self.tensors and not self.skips(name)), None)

    def skips(self, name: str) -> bool:
        """Whether this tensor has no place in our nets by design."""
        return re.fullmatch(self.left_out, name) is not None


def recognise(config: dict[str, Any], tensors: dict[str, Tensor], where: str) -> Published:
    """What a published folder holds, by its config.json and the names of its tensors. Raises UserError for a layout that is not known."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UserError(f"{where} is a {kind} drafter of speculators; of that library's kinds only eagle3 can be read.")
    for name, read in LAYOUTS:
        if any(re.fullmatch(name, own) for own in tensors):
            return read(config, tensors)
    some = ", ".join(sorted(tensors)[:6])
    raise UserError(
        f"{where} ({', '.join(config.get('architectures') or []) or 'no architectures in config.json'}) holds tensors such as {some}, which is "
        "none of the layouts that can be read: EAGLE-1/2, EAGLE-3 (original, SpecForge, speculators), Medusa, Hydra, or a drafter of ours."
    )


# ---- the EAGLE line ---------------------------------------------------------------------------------------------------------


def _eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    inner = config.get("transformer_layer_config") or {}
    block = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    family = "speculators' names" if inner else {"midlayer.": "the original's names", "layers.0.": "vLLM's names"}[block]
    nested = config.get("eagle_config") or {}
    refusals = [
        f"{key} is true, and {why}"
        for key, why in (
            ("norm_before_residual", "our block takes the residual before the norm, as SGLang's does"),
            ("norm_before_fc", "our taps are normed one by one (fc_norm) or not at all"),
        )
        if nested.get(key, config.get(key))
    ]
    if nested.get("use_aux_hidden_state") is False:
        refusals.append("use_aux_hidden_state is false, and an EAGLE-3 drafter of ours reads taps of layers")
    return Published(
        layout=f"EAGLE-3, {family}",
        drafter="Eagle3",
        config=inner or config,
        tensors=tensors,
        theirs=lambda name: [re.sub(r"^midlayer\.", block, name)],
        options={
            "taps": _taps(config),
            "fc_norm": bool(config.get("fc_norm")) or "fc_norm.0.weight" in tensors,
            "norm_output": bool(config.get("norm_output")),
            "head_rank": None,
        },
        refusals=refusals,
        left_out=r"embed_tokens\.weight|t2d|d2t|.*rotary_emb\.inv_freq",
    )


def _taps(config: dict[str, Any]) -> tuple[int, ...] | None:
    """0-based layer outputs, ascending as engines read them; None where the checkpoint leaves them to its reader."""
    if top := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(sorted(layer - 1 for layer in top))
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(sorted(nested)) if nested else None


def _eagle(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    biased = "fc.bias" in tensors and bool(tensors["fc.bias"].any())  # SGLang wants one, be it zeros
    return Published(
        layout="EAGLE-1/2",
        drafter="Eagle",
        config=config,
        tensors=tensors,
        options={"bias": True} if biased else {},
        zeros=r"fc\.bias",
        left_out=r"embed_tokens\.weight|lm_head\.weight|.*rotary_emb\.inv_freq" + ("" if biased else r"|fc\.bias"),
        raw_embeddings="fc.weight",
    )


# ---- heads ------------------------------------------------------------------------------------------------------------------


def _numbers(pattern: str, tensors: dict[str, Tensor]) -> list[int]:
    """The distinct numbers that a pattern's one group matches, ascending."""
    return sorted({int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))})


def _medusa(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    heads = len(_numbers(r"(\d+)\.\d+\.linear\.weight", tensors))
    layers = len(_numbers(r"\d+\.(\d+)\.linear\.weight", tensors))
    return Published(
        layout="Medusa, the original's names",
        drafter="Medusa",
        config=config,
        tensors=tensors,
        theirs=_heads(heads, r"\1.\2.linear.\3", f"{{k}}.{layers}.weight"),
        options={"heads": heads, "layers": layers, "own_heads": True},
    )


def _medusa_vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    heads = len(_numbers(r"blocks\.(\d+)\.layers\.\d+\.weight", tensors))
    layers = len(_numbers(r"blocks\.\d+\.layers\.(\d+)\.weight", tensors))
    own = any(name.startswith("lm_heads.") for name in tensors)
    if own and "token_map" in tensors:  # full heads may stand beside a map of the tokens that are used
        used = tensors["token_map"].long()
        for name in (f"lm_heads.{k}.weight" for k in range(heads)):
            if name in tensors and len(tensors[name]) > len(used) and len(tensors[name]) > int(used.max()):
                tensors[name] = tensors[name][used]
    return Published(
        layout="Medusa, vLLM's names",
        drafter="Medusa",
        config=config,
        tensors=tensors,
        theirs=_heads(heads, r"blocks.\1.layers.\2.\3", "lm_heads.{k}.weight"),
        options={"heads": heads, "layers": layers, "own_heads": own},
        zeros=r"blocks\.\d+\.layers\.\d+\.bias",
        left_out="token_map" if own else r"token_map|lm_head\.weight",
    )


def _heads(heads: int, layer: str, matrix: str) -> Callable[[str], list[str]]:
    """Names of heads: `layer` for our heads.k.layers.l.what, `matrix` for the k-th part of our own heads."""

    def theirs(name: str) -> list[str]:
        if name == "lm_head.weight":
            return [matrix.format(k=k) for k in range(heads)]
        return [re.sub(r"^heads\.(\d+)\.layers\.(\d+)\.(weight|bias)$", layer, name)]

    return theirs


HYDRA_BLOCK = r"hydra_mlp\.%s\.(\d+)\.linear\.weight"


def _hydra(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    heads = len(_numbers(HYDRA_BLOCK.replace(r"(\d+)", r"\d+") % r"(\d+)", tensors))
    places = _numbers(HYDRA_BLOCK % r"\d+", tensors)
    matrix = "hydra_lm_head.{k}.1" if "hydra_lm_head.0.1.weight" in tensors else "hydra_lm_head.{k}"
    prefix = any(name.startswith("prefix_embeding_layer.") for name in tensors)
    tensors, largest = _fold_biases(tensors, heads, places, matrix)
    note = (
        f"its heads add a constant to each token's logit (their biases, up to {largest:.3g}), which is left out, so training begins a little behind "
        "it; set drafter.init_args.head_bias to true to keep it"
    )
    refusals = [
        f"{key} is {config[key]}, and a Hydra of ours {why}"
        for key, value, why in (
            ("grounded_heads", True, "sees the drafted tokens"),
            ("hidden_state_offset", 0, "reads the target's final state"),
        )
        if config.get(key, value) != value
    ]

    def theirs(name: str) -> list[str]:
        if what := {"lm_head.weight": ".weight", "head_bias.weight": ".bias"}.get(name):
            return [matrix.format(k=k) + what for k in range(heads)]
        if match := re.fullmatch(r"heads\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            k, layer, what = int(match[1]), int(match[2]), match[3]
            return [f"hydra_mlp.{k}.{places[layer] if layer < len(places) else layer}.linear.{what}"]
        if match := re.fullmatch(r"heads\.(\d+)\.project\.weight", name):
            return [f"hydra_mlp.{match[1]}.{places[0]}.res_connection.weight"]
        if name == "prefix.norm.weight":
            return ["prefix_embeding_layer.norm.weight"]
        return [re.sub(r"^prefix\.", "prefix_embeding_layer.layers.0.", name)]

    return Published(
        layout="Hydra++" if prefix else "Hydra",
        drafter="Hydra",
        config=config,
        tensors=tensors,
        theirs=theirs,
        options={"heads": heads, "layers": len(places), "own_heads": True, "prefix": prefix},
        refusals=refusals,
        zeros=r"hydra_lm_head\.\d+(\.1)?\.bias",
        left_out=r"prefix_embeding_layer\.embed_tokens\.weight|.*rotary_emb\.inv_freq",
        lost={"head_bias.weight": note} if largest else {},
    )


def _fold_biases(tensors: dict[str, Tensor], heads: int, places: list[int], matrix: str) -> tuple[dict[str, Tensor], float]:
    """The tensors with all biases beside projections and matrices in one constant of each head, [Vd, 1] under the name of the matrix's
    bias, none where all are alike; and the largest of them: see the top of this file."""
    folded, largest = dict(tensors), 0.0
    for k in range(heads):
        beside = folded.pop(f"hydra_mlp.{k}.{places[0]}.res_connection.bias", None)
        constant = folded.pop(matrix.format(k=k) + ".bias", None)
        constant = torch.zeros(()) if constant is None else constant.float()
        head = tensors.get(matrix.format(k=k) + ".weight")
        if beside is not None and head is not None:
            for place in places[1:]:
                weight, bias = (tensors.get(f"hydra_mlp.{k}.{place}.linear.{what}") for what in ("weight", "bias"))
                if weight is not None and bias is not None:
                    folded[f"hydra_mlp.{k}.{place}.linear.bias"] = bias.float() + weight.float() @ beside.float()
            constant = constant + head.float() @ beside.float()
        if (spread := float((constant - constant.mean()).abs().max())) > 1e-6:  # what all logits share changes nothing
            folded[matrix.format(k=k) + ".bias"] = constant[:, None]
            largest = max(largest, spread)
    return folded, largest


LAYOUTS: tuple[tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], Published]], ...] = (
    (r"hydra_mlp\..*", _hydra),
    (r"(medusa_head\.)?\d+\.\d+\.linear\.weight", _medusa),
    (r"(medusa_heads\.)?blocks\.\d+\.layers\.\d+\.weight", _medusa_vllm),
    (r"midlayer\..*|layers\.0\.hidden_norm\.weight", _eagle3),
    (r"layers\.0\.self_attn\.q_proj\.weight", _eagle),
)
"""A tensor that only this layout has -> how it is read. The first that fits counts."""
