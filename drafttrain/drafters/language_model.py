"""An ordinary causal language model on disk, in the form of Llama or Qwen3: what its config.json comes to, and its tensors under our names.

    model.embed_tokens.weight [V, H]    model.layers.{i}.*    model.norm.weight [H]    lm_head.weight [V, H], left out where it is tied

The two forms differ by the norms that Qwen3 has on every head's queries and keys. Both are what transformers, vLLM and SGLang load.

Letters: V vocabulary, H width.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.drafters.decoder import DecoderShape, plain_rope
from drafttrain.drafters.start_files import WEIGHTS, find, fitting, read_config, read_tensors, unlike
from drafttrain.errors import UserError
from drafttrain.files import typed_path
from drafttrain.target.target import Target
from drafttrain.target.template import ChatTemplate

ASKED = "drafter.init_args.model"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""model_type -> the class that transformers and engines build."""
PLAIN: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Fields of config.json for which there is one value that we compute."""
WINDOWLESS = {"default", "linear", "llama3"}
"""Kinds of rotary positions whose angles do not depend on how many there are."""
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
"""Fields of config.json that count something."""
NOT_WEIGHTS = "rotary_emb.inv_freq"
"""Tables that old checkpoints hold."""


@dataclass(frozen=True)
class LanguageModel:
    """Sizes of a language model."""

    shape: DecoderShape
    layers: int
    tied: bool
    """Whether it speaks with its own table of embeddings."""
    qk_norm: bool

    @property
    def model_type(self) -> str:
        return "qwen3" if self.qk_norm else "llama"


def language_model(config: Mapping[str, Any], target: Target, what: str) -> LanguageModel:
    """The sizes that config.json says, as transformers reads them.

    The window of positions is the target's: a drafter is asked as far as its target reaches.
    Raises UserError for another kind of model, for another vocabulary than the target's, and for what could not be computed here.
    """
    from transformers import LlamaConfig, Qwen3Config

    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{what} is a model of type {kind!r}, but a stand-alone drafter is one of {' or '.join(ARCHITECTURES)}; give a model of that form."
        )
    try:
        said = (Qwen3Config if kind == "qwen3" else LlamaConfig).from_dict(dict(config))
    except Exception as error:  # transformers raises a dozen kinds for fields that contradict each other
        raise UserError(f"{what} has a config.json that cannot be read ({' '.join(str(error).split())[:160]}).") from error
    rope = said.rope_parameters
    faults = [
        f"{name} is {getattr(said, name)!r}, not {value!r}"
        for name, value in PLAIN.items()
        if getattr(said, name, value) != value
    ]
    faults += [
        f"{name} is {getattr(said, name)!r}, which is no size"
        for name in SIZES
        if not getattr(said, name) or getattr(said, name) < 1
    ]
    if said.vocab_size != target.vocab:
        faults.append(f"its vocabulary has {said.vocab_size:,} rows, the target's {target.vocab:,}, and tokens must be the same")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        faults.append("it rotates a part of each head")
    if rope["rope_type"] not in WINDOWLESS and said.max_position_embeddings != target.max_positions:
        faults.append(
            f"its {rope['rope_type']} positions are made for {said.max_position_embeddings:,}, and the target reads {target.max_positions:,}"
        )
    if getattr(said, "quantization_config", None):  # an empty one is of plain weights, as for a target
        faults.append("its weights are quantised")
    if faults:
        raise UserError(f"{what} cannot draft for {target.identity.path}: {'; '.join(faults)}; give another model.")
    shape = DecoderShape(
        hidden=said.hidden_size,
        target_hidden=target.hidden,
        heads=said.num_attention_heads,
        kv_heads=said.num_key_value_heads,
        head_dim=said.head_dim,
        intermediate=said.intermediate_size,
        rms_eps=said.rms_norm_eps,
        max_positions=target.max_positions,
        vocab=target.vocab,
        rope_parameters=plain_rope(said),
    )
    return LanguageModel(shape, said.num_hidden_layers, bool(said.tie_word_embeddings), kind == "qwen3")


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a language model that a drafter begins as."""

    where: str
    """As the user typed it."""
    folder: Path
    sizes: LanguageModel

    @staticmethod
    def open(where: str, target: Target) -> "Checkpoint":
        """Find it, a local folder or a Hub id, and hold its tokenizer and sizes against the target's, of which an outline has no tokenizer.

        Raises UserError where it is missing or damaged, or no model of the target's tokens.
        """
        folder, what = find(where, pickle=False, asked=ASKED), f"{ASKED} {where}"
        with fitting(what):
            sizes = language_model(read_config(folder, what), target, what)
        if target.tokenizer is not None:
            _require_tokenizer(where, folder, target)
        return Checkpoint(where, folder, sizes)

    def weights(self, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its tensors by our names, in fp32, each of the shape that it has in `names`. UserError that lists those that do not fit."""
        what = f"{ASKED} {self.where}"
        if not any(self.folder.glob(WEIGHTS)):
            raise UserError(f"{what} holds no weights as safetensors, and nothing else is read; give a model that has them.")
        tensors = {name: x for name, x in read_tensors(self.folder, False, what).items() if not name.endswith(NOT_WEIGHTS)}
        if self.sizes.tied:
            tensors.pop("lm_head.weight", None)  # some write it beside the table that it is
        theirs = {outer_name(name): own for name, own in names.items()}
        fit = [(name, tensors[name]) for name in sorted(theirs) if name in tensors and tensors[name].shape == theirs[name].shape]
        odd = [name for name, x in fit if not x.is_floating_point() or not x.isfinite().all()]
        faults = [*unlike(tensors, theirs), *(f"{name} does not hold finite floating-point numbers" for name in odd)]
        if faults:
            raise UserError(f"{what} does not hold what its config.json says: {'; '.join(faults)}; download or copy it again.")
        return {name: tensors[outer_name(name)].float() for name in names}


def outer_name(name: str) -> str:
    """What everybody else calls a weight of ours."""
    if name == "tokens.weight":
        return "model.embed_tokens.weight"
    return name if name.startswith("lm_head.") else f"model.{name}"


def first_token(target: Target) -> int:
    """The token with which every chat of the target begins (0 for an outline). UserError where chats begin with the user's own words."""
    if target.tokenizer is None:
        return 0
    first, other = (target.render([{"role": "user", "content": words}])[0] for words in ("a", "1"))
    if first != other:
        raise UserError(
            f"chats of {target.identity.path} begin with the user's own words, and a stand-alone drafter needs a token that they all begin with; "
            "give the target's chat template one (its bos), or choose another drafter."
        )
    return first


def _require_tokenizer(where: str, folder: Path, target: Target) -> None:
    from transformers import AutoTokenizer

    local = os.path.isdir(typed_path(where))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if local else where, revision=None if local else folder.name)
    except Exception as error:  # transformers raises a dozen kinds; every one means that there is none
        raise UserError(
            f"{ASKED} {where} has no tokenizer that can be read ({' '.join(str(error).split())[:160]}); copy the target's there if it is the same."
        ) from error
    if ChatTemplate(tokenizer, {}, where).vocabulary_hash() != target.identity.tokenizer:
        raise UserError(
            f"{ASKED} {where} has another tokenizer than {target.identity.path}, so its tokens mean something else; give a model of the target's family."
        )
