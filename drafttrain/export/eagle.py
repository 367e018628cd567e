"""EAGLE-1, EAGLE-2 and HASS as vLLM (0.26.0, 0.33.0) or SGLang (0.5.23) read them: two flavours, for no folder serves both.

                    vLLM                              SGLang
    class           EagleLlamaForCausalLM             LlamaForCausalLMEagle
    fc.bias         dropped in silence: none          left at random where it is missing: always shipped, zeros if untrained
    head            the target's, whole               the target's, or its rows in --speculative-token-map (hot_vocab_size)

Both read x = fc [embedding; state], embedding first, and a layer without `input_layernorm`; no norm stands at the end. Embeddings and head
are the target's and not in the file. vLLM has a `truncated_vocab_size` for EAGLE in its configuration, but no code that reads it.

Both feed the embedding as it stands in the target's table. Where the target multiplies it by s (Gemma), the left half of fc is
multiplied by s instead.

SGLang's map is a torch file with the list of target ids. Our reader takes the same from `d2t`, which SGLang passes over with a warning.

Letters: H width of the drafter = width of the target, Vd draft vocabulary.
"""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.eagle import Eagle, EagleNet
from drafttrain.drafters.head import TargetHead
from drafttrain.export.block import block_config, block_table, head_refusal, read_block, reading_of, refused, special_ids, unlike
from drafttrain.export.format import (
    Engine,
    Format,
    Table,
    Written,
    fill,
    map_table,
    map_tensors,
    read_map,
    require_target,
    state_of,
)
from drafttrain.target.target import Target

TOKEN_MAP = "hot_token_id.pt"


class _EagleFormat(Format):
    """What the flavours share."""

    title = "EAGLE drafter"
    method = "eagle"
    biased: bool
    """Whether fc.bias is in the file."""

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if target.embedding_scale() is None:
            return (
                "the target changes its embeddings by more than one factor, and engines give a drafter the raw ones; "
                "set export.format to native"
            )
        return refused(net) or head_refusal(target)

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        tensors, scale = state_of(net), target.embedding_scale() or 1.0
        _scale_embedding(tensors, scale)
        if self.biased:
            tensors.setdefault("fc.bias", torch.zeros(net.shape.hidden))
        config = {"architectures": [self.architecture], **block_config(net.shape, dtype, special_ids(target))}
        return Written(config, tensors, copied=scale == 1.0)

    def table(self, config: dict[str, Any], where: str) -> Table:
        shape = self._shape(config, where)
        H = shape.hidden
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), **block_table(shape, "layers.0", inputs=H)}
        if self.biased:
            shapes["fc.bias"] = (H,)
        return {name: (size, None) for name, size in shapes.items()}

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        shape = self._shape(config, where)
        require_target(shape.vocab, shape.hidden, target, where)
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        vocabulary = read_map(weights, shape.vocab, where)
        _scale_embedding(weights, 1 / (target.embedding_scale() or 1.0))
        bias = "fc.bias" in weights and bool(weights["fc.bias"].any())
        if not bias:
            weights.pop("fc.bias", None)
        full = Eagle(draft_vocab=None if vocabulary.is_full else len(vocabulary.ids))
        drafter = replace(recorded if isinstance(recorded, Eagle) else full, bias=bias)
        embedding = Frozen(target.model.get_input_embeddings())
        return fill(EagleNet(drafter, shape, vocabulary, embedding, TargetHead(target, vocabulary)), weights, target)

    def about(self, made: dict[str, Any]) -> str:
        return "One decoder layer reads the target's final hidden states and speaks with the target's own head."

    def _shape(self, config: dict[str, Any], where: str) -> DecoderShape:
        with reading_of(where, "EAGLE") as wrong:
            shape, found = read_block(config)
            wrong += found + unlike(config, {"architectures": [self.architecture]})
        return shape


class EagleForVllm(_EagleFormat):
    """Without a bias, and with all of the target's tokens."""

    name = "eagle-vllm"
    architecture = "EagleLlamaForCausalLM"
    engines = (Engine("vllm", "0.26 and later", "eagle"),)
    biased = False

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if net.config.bias:
            return (
                "vLLM drops the bias of an EAGLE-1 drafter's fusing layer in silence; set export.format to sglang, or train with "
                "drafter.init_args.bias false"
            )
        if not net.vocabulary.is_full:
            return (
                f"vLLM lets an EAGLE-1 drafter say every token of the target, and this one says {len(net.vocabulary.ids):,} of them; set "
                "export.format to sglang, or train with drafter.init_args.draft_vocab null"
            )
        return super().refusal(net, target)


class EagleForSglang(_EagleFormat):
    """With a bias, and on request with a part of the target's tokens."""

    name = "eagle-sglang"
    architecture = "LlamaForCausalLMEagle"
    engines = (Engine("sglang", "0.5.23", "EAGLE"),)
    biased = True

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        made = super().write(net, target, dtype, called)
        if net.vocabulary.is_full:
            return made
        ids = net.vocabulary.ids.cpu()
        content = io.BytesIO()
        torch.save(ids.tolist(), content)
        config = made.config | {"hot_vocab_size": len(ids)}
        return replace(
            made, config=config, tensors=made.tensors | map_tensors(net.vocabulary), files={TOKEN_MAP: content.getvalue()}
        )

    def table(self, config: dict[str, Any], where: str) -> Table:
        vocab = config.get("vocab_size", 0)
        return super().table(config, where) | map_table(config.get("hot_vocab_size", vocab), vocab)

    def extra_flags(self, engine: str, made: dict[str, Any], here: str) -> str:
        full = made["config"]["draft_vocab"] == made["config"]["vocab"]
        return "" if full else f" \\\n  --speculative-token-map {here}/{TOKEN_MAP}"


def _scale_embedding(tensors: dict[str, Tensor], scale: float) -> None:
    """Multiply the half of fc that reads the embedding."""
    weight = tensors["fc.weight"].clone()
    weight[:, : weight.shape[1] // 2] *= scale
    tensors["fc.weight"] = weight
