"""A stand-alone drafter as an ordinary language model of transformers: the folder that anybody would call a small Llama or Qwen3.

    config.json, model.safetensors       LlamaForCausalLM or Qwen3ForCausalLM, tensors under their names
    generation_config.json               bos, pad, and every token that ends a turn of the target
    tokenizer.json, ...                  the target's tokenizer and chat template

transformers takes it as `assistant_model` of `generate`, vLLM as `draft_model`, SGLang as `STANDALONE`. Each asks for the target's tokens, all of
them: logits over a part of the vocabulary have no form there.

Letters: V vocabulary, H width.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.independent import Independent, IndependentNet
from drafttrain.drafters.language_model import ARCHITECTURES, LanguageModel, first_token, language_model, outer_name
from drafttrain.errors import UserError
from drafttrain.export.block import block_config, block_table, read_block, reading_of, rope_fault, special_ids, unlike
from drafttrain.export.format import Engine, Format, Table, Written, fill, state_of
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary


class TransformersFormat(Format):
    """One folder for all who load language models."""

    name = "transformers"
    title = "Stand-alone drafter"
    method = "draft_model"
    architecture = ARCHITECTURES["llama"]
    engines = (
        Engine("transformers", "5", "assistant_model"),
        Engine("vllm", "0.26 and later", "draft_model"),
        Engine("sglang", "0.5.23", "STANDALONE"),
    )

    def claims(self, config: dict[str, Any]) -> bool:
        return config.get("architectures") in [[name] for name in ARCHITECTURES.values()]

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if not net.vocabulary.is_full:
            return (
                f"a language model says every token of the target, and this drafter says {len(net.vocabulary.ids):,} of them; set export.format to "
                "native, or train with drafter.init_args.draft_vocab null"
            )
        assert isinstance(net, IndependentNet)
        fault = rope_fault(net.sizes.shape.rope_parameters)
        return f"{fault}; set export.format to native" if fault else None

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        assert isinstance(net, IndependentNet)
        sizes = net.sizes
        config = block_config(sizes.shape, dtype, special_ids(target)) | _outlines(sizes)
        del config["target_hidden_size"]  # it hangs on no target's states
        files = {} if target.device.type == "meta" else _tokenizer_files(target)
        tensors = {outer_name(name): weight for name, weight in state_of(net).items()}
        return Written(config, tensors, files | {"generation_config.json": _generation(target)})

    def table(self, config: dict[str, Any], where: str) -> Table:
        with reading_of(where, "stand-alone") as wrong:
            layers, tied, kind = (config[name] for name in ("num_hidden_layers", "tie_word_embeddings", "model_type"))
            wrong += unlike(config, {"architectures": [ARCHITECTURES.get(kind)]})
            shape, found = read_block(config | {"target_hidden_size": config["hidden_size"]}, {"attention_bias": False})
            wrong += found
        shapes: dict[str, tuple[int, ...]] = {"tokens.weight": (shape.vocab, shape.hidden), "norm.weight": (shape.hidden,)}
        if not tied:
            shapes["lm_head.weight"] = (shape.vocab, shape.hidden)
        for number in range(layers):
            prefix = f"layers.{number}"
            shapes |= block_table(shape, prefix, shape.hidden) | {f"{prefix}.input_layernorm.weight": (shape.hidden,)}
            if kind == "qwen3":
                shapes |= {f"{prefix}.self_attn.{which}_norm.weight": (shape.head_dim,) for which in "qk"}
        return {outer_name(name): (size, None) for name, size in shapes.items()}

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        sizes = language_model(config, target, where)
        if config["max_position_embeddings"] != target.max_positions:
            raise UserError(
                f"{where}/config.json says max_position_embeddings {config['max_position_embeddings']}, but the target reads {target.max_positions}; "
                "engines size the drafter's positions by it, so export the drafter again."
            )
        drafter = recorded if isinstance(recorded, Independent) else Independent(model=where)
        net = IndependentNet(drafter, sizes, DecoderShape.of(target), DraftVocabulary.full(target.vocab), first_token(target))
        return fill(net, {name: tensors[outer_name(name)] for name in net.state_dict()}, target)

    def about(self, made: dict[str, Any]) -> str:
        return "It is a language model of its own, which reads tokens alone."


def _outlines(sizes: LanguageModel) -> dict[str, Any]:
    """What a language model says otherwise than a block that hangs on a target."""
    return {
        "architectures": [ARCHITECTURES[sizes.model_type]],
        "model_type": sizes.model_type,
        "num_hidden_layers": sizes.layers,
        "tie_word_embeddings": sizes.tied,
    }


def _generation(target: Target) -> bytes:
    ids = special_ids(target) | {"eos_token_id": list(target.end_ids)}
    return json.dumps(ids | {"do_sample": False}, indent=2).encode()


def _tokenizer_files(target: Target) -> dict[str, bytes]:
    """Name -> content of the target's tokenizer, as transformers writes it."""
    with TemporaryDirectory() as folder:
        target.tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
