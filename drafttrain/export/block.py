"""A decoder block in config.json, both directions, and its tensors: what EAGLE-1, EAGLE-3 and block drafters have in common.

- RoPE: older readers know `rope_theta`/`rope_scaling`, transformers 5 knows `rope_parameters`. Both are written.
- `max_position_embeddings` sizes the drafter's RoPE cache: the target's value, or long prompts break it.

Letters: H width of the drafter = width of the target, X what the attention reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.errors import UserError
from drafttrain.export.format import dtype_words
from drafttrain.target.target import Target


def rope_fault(rope: dict[str, Any]) -> str | None:
    """Why the engines' drafters cannot read these rotary parameters; None if they can."""
    if rope.get("rope_type") in ("linear", "dynamic", "yarn", "llama3") and "factor" not in rope:
        return f"rope_parameters {rope} scale positions but name no factor; engines cannot read that"
    if "rope_theta" not in rope or any(isinstance(value, dict) for value in rope.values()):
        return (
            f"rope_parameters are {rope}, but the engines' drafters have one RoPE for all layers: "
            "one flat dictionary with rope_theta is needed"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "the drafter rotates a part of each head (partial_rotary_factor), but the engines' drafters rotate all"
    return None


def refused(net: DrafterNet) -> str | None:
    """Why no engine can run this block; None if engines can."""
    fault = rope_fault(net.shape.rope_parameters)
    return f"{fault}; set export.format to native" if fault else None


def head_refusal(target: Target) -> str | None:
    """Why an engine's drafter could not speak with this target's head; None if it can. A cap or a scale above 0 changes no first choice."""
    if getattr(target.head, "bias", None) is None:
        return None
    return "the target's head has a bias, which engines leave out for a drafter; set export.format to native"


def block_config(shape: DecoderShape, dtype: Any, special_ids: dict[str, Any]) -> dict[str, Any]:
    """The Llama fields of config.json. `special_ids` are the target's bos/eos/pad ids, which some readers want."""
    rope = {"rope_type": "default"} | shape.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.target_hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_parameters["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        **dtype_words(dtype),
        **special_ids,
    }


PLAIN = {
    "num_hidden_layers": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""What the block of our reader can be."""


def unlike(config: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Fields that have other values than wanted. Raises KeyError for one that is missing."""
    return [f"{key} is {config[key]!r}, not {value!r}" for key, value in wanted.items() if config[key] != value]


TOLD_OTHERWISE = ("dtype", "torch_dtype", "rope_theta", "rope_scaling")
"""Fields that the facts of a drafter do not decide, or that `read_block` compares."""


def unlike_facts(config: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """`unlike` for a whole config.json that the facts read from it come to. Raises KeyError for a field that is missing."""
    return unlike(config, {key: value for key, value in wanted.items() if key not in TOLD_OTHERWISE})


@contextmanager
def reading_of(where: str, kind: str) -> Iterator[list[str]]:
    """Inside, config.json is read as that of this kind of drafter, and what contradicts itself in it is added to the list.

    Raises UserError for a field that is missing (KeyError), and at the end for the contradictions.
    """
    wrong: list[str] = []
    try:
        yield wrong
    except KeyError as error:
        raise UserError(
            f"{where}/config.json has no {error}, so this is no {kind} export of ours; export the drafter again."
        ) from error
    if wrong:
        article = "an" if kind.startswith("E") else "a"
        raise UserError(f"{where}/config.json is not {article} {kind} drafter that can be read here: {'; '.join(wrong)}.")


def require_taps(taps: tuple[int, ...], layers: int | None = None) -> None:
    """Raises UserError unless 0-based layer outputs ascend, below the target's number of layers where that is known."""
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or (layers is not None and taps[-1] >= layers):
        end = "on" if layers is None else f"to {layers - 1}"
        raise UserError(
            f"taps are {list(taps)}, but engines read layers in order: they must ascend, without repeats, from 0 {end}."
        )


def require_masked(draft_vocab: int, mask: int, vocab: int) -> None:
    """Raises UserError where the draft vocabulary or the token of a masked element reaches beyond the target's."""
    if not (0 < draft_vocab <= vocab and 0 <= mask < vocab):
        raise UserError(
            f"the draft vocabulary has {draft_vocab} tokens and the mask is number {mask}, but the target has "
            f"{vocab}: neither may reach beyond them."
        )


def require_rope(shape: DecoderShape) -> None:
    """Raises UserError for rotary parameters that the engines' drafters cannot read."""
    if fault := rope_fault(shape.rope_parameters):
        raise UserError(f"{fault}.")


def settled(drafter: Any, taps: tuple[int, ...], mask: int, target: Target) -> Any:
    """A drafter's configuration with the taps and the masked token of a folder; what was left to be chosen for the target in training stays so
    where the choice is the same."""
    if drafter.taps_of(target) != taps:
        drafter = replace(drafter, taps=list(taps))
    return drafter if drafter.mask_token is None else replace(drafter, mask_token=mask)


def read_block(config: dict[str, Any], plain: dict[str, Any] = PLAIN) -> tuple[DecoderShape, list[str]]:
    """The shape that an engine would understand, and what in it disagrees or cannot be computed here. Raises KeyError."""
    wrong = unlike(config, plain)
    rope = config["rope_parameters"]
    legacy = {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": config["rope_theta"]}
    if legacy != rope:
        wrong.append(f"RoPE is {legacy} in the older fields but {rope} in rope_parameters")
    if config["target_hidden_size"] != config["hidden_size"]:
        wrong.append(f"target_hidden_size is {config['target_hidden_size']}, not hidden_size {config['hidden_size']}")
    shape = DecoderShape(
        hidden=config["hidden_size"],
        target_hidden=config["target_hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        rms_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        vocab=config["vocab_size"],
        rope_parameters=rope,
    )
    return shape, wrong


def block_table(shape: DecoderShape, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the block's tensors; its attention reads `inputs` numbers a row."""
    H, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.o_proj.weight": (H, q),
        f"{prefix}.post_attention_layernorm.weight": (H,),
        f"{prefix}.mlp.gate_proj.weight": (shape.intermediate, H),
        f"{prefix}.mlp.up_proj.weight": (shape.intermediate, H),
        f"{prefix}.mlp.down_proj.weight": (H, shape.intermediate),
    }


def special_ids(target: Target) -> dict[str, Any]:
    """bos, eos and pad of the target, where it has them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(target.config, name) for name in names if getattr(target.config, name, None) is not None}
