"""Medusa heads and Hydra as published, and as vLLM names Medusa (published.py names the tensors).

Numbers l of layers count modules, dropout among them, so only their order means anything.

**Biases of Hydra.** Its blocks add a bias b beside the projection, r_1 = P u + b + SiLU(U_1 u + b_1), and its heads one beside the matrix,
W r + c. Our blocks have none. With r' = r - b the layers behind are the same with b_l + U_l b in the place of b_l, and the logits W r' +
(W b + c): the same net with one constant for each token and head, which is what `head_bias` holds. Without that option it is left out, and told.

Letters: k head, l layer, Vd rows of the head.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.published_layout import Published, numbers


def medusa(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    heads = len(numbers(r"(\d+)\.\d+\.linear\.weight", tensors))
    layers = len(numbers(r"\d+\.(\d+)\.linear\.weight", tensors))
    return Published(
        layout="Medusa, the original's names",
        drafter="Medusa",
        config=config,
        tensors=tensors,
        theirs=_heads(heads, r"\1.\2.linear.\3", f"{{k}}.{layers}.weight"),
        options={"heads": heads, "layers": layers, "own_heads": True},
    )


def medusa_vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    heads = len(numbers(r"blocks\.(\d+)\.layers\.\d+\.weight", tensors))
    layers = len(numbers(r"blocks\.\d+\.layers\.(\d+)\.weight", tensors))
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


def hydra(config: dict[str, Any], tensors: dict[str, Tensor]) -> Published:
    heads = len(numbers(HYDRA_BLOCK.replace(r"(\d+)", r"\d+") % r"(\d+)", tensors))
    places = numbers(HYDRA_BLOCK % r"\d+", tensors)
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
        trained={"head_bias": bool(largest)},
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
