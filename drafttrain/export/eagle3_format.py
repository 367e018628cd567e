"""The EAGLE-3 folder as vLLM (0.26.0, 0.33.0) and SGLang (0.5.23) read it: tensor table and config.json, both directions.

Every rule here was read in the engines' source. What they do with a mistake is to serve and accept nothing:

- Layer ids: we tap 0-based layer outputs i. SGLang reads the nested list and adds 1; vLLM reads the top-level list as it is.
  So nested [i...] and top-level [i+1...], ascending, for both engines concatenate in layer order whatever the list says.
- The number of taps: vLLM takes 3 unless `num_aux_hidden_states` says otherwise, so it is always written.
- RoPE: older readers know `rope_theta`/`rope_scaling`, transformers 5 knows `rope_parameters`. Both are written.
- `max_position_embeddings` sizes the drafter's RoPE cache: the target's value, or long prompts break it.
- `d2t` holds offsets: target id = draft id + d2t[draft id]. It is left out where the vocabulary is full.
- SGLang skips tensor names that it does not know, and vLLM does not miss tensors that are missing: so names and shapes are
  compared with this table before anything is written, and again after it is read back.

Letters: H width of the drafter = width of the target, A taps, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.errors import UserError

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class Eagle3Facts:
    """All that config.json has to say, in our own words."""

    taps: tuple[int, ...]
    """0-based layer outputs, ascending."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_parameters: dict[str, Any]
    """The transformers-5 dictionary: rope_type, rope_theta and what the type needs."""
    max_positions: int
    vocab: int
    draft_vocab: int

    @property
    def full(self) -> bool:
        """True if the drafter may say every token: then there is no vocabulary map."""
        return self.draft_vocab == self.vocab

    def __post_init__(self) -> None:
        if list(self.taps) != sorted(set(self.taps)) or not self.taps or self.taps[0] < 0:
            raise UserError(
                f"taps are {list(self.taps)}, but engines read layers in order: they must ascend, without repeats, from 0 on."
            )
        if not 0 < self.draft_vocab <= self.vocab:
            raise UserError(
                f"the draft vocabulary has {self.draft_vocab} tokens, but the target {self.vocab}: it must be between 1 and that."
            )
        if (
            self.rope_parameters.get("rope_type") in ("linear", "dynamic", "yarn", "llama3")
            and "factor" not in self.rope_parameters
        ):
            raise UserError(
                f"rope_parameters {self.rope_parameters} scale positions but name no factor; engines cannot read that."
            )
        if "rope_theta" not in self.rope_parameters or any(isinstance(value, dict) for value in self.rope_parameters.values()):
            raise UserError(
                f"rope_parameters are {self.rope_parameters}, but the engines' Llama drafter has one RoPE for its one layer: "
                "one flat dictionary with rope_theta is needed."
            )
        if self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                "the drafter rotates a part of each head (partial_rotary_factor), but the engines' Llama drafter rotates all."
            )


def tensor_table(facts: Eagle3Facts) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Name -> (shape, dtype; None means the export's own). Exactly these tensors are in the file."""
    H, q, kv = facts.hidden, facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    weights: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(facts.taps) * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.mlp.gate_proj.weight": (facts.intermediate, H),
        "midlayer.mlp.up_proj.weight": (facts.intermediate, H),
        "midlayer.mlp.down_proj.weight": (H, facts.intermediate),
        "norm.weight": (H,),
        "lm_head.weight": (facts.draft_vocab, H),
    }
    table: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {name: (shape, None) for name, shape in weights.items()}
    if not facts.full:
        table["d2t"] = ((facts.draft_vocab,), torch.int64)
        table["t2d"] = ((facts.vocab,), torch.bool)
    return table


def check_tensors(tensors: dict[str, Tensor], facts: Eagle3Facts, dtype: torch.dtype, where: str) -> None:
    """Raises UserError that lists every name, shape and dtype in which `tensors` differ from the table."""
    table = tensor_table(facts)
    faults = [f"{name} is missing" for name in sorted(table.keys() - tensors.keys())]
    faults += [f"{name} is not one of the format's tensors" for name in sorted(tensors.keys() - table.keys())]
    for name in sorted(table.keys() & tensors.keys()):
        shape, own = table[name]
        got = tensors[name]
        if tuple(got.shape) != shape:
            faults.append(f"{name} is {list(got.shape)} instead of {list(shape)}")
        if got.dtype != (own or dtype):
            faults.append(f"{name} is {_word(got.dtype)} instead of {_word(own or dtype)}")
    if faults:
        raise UserError(
            f"{where} does not hold what vLLM and SGLang read ({'; '.join(faults)}); engines would load it in silence and accept "
            "nothing. Only an EAGLE-3 drafter of one layer without biases or query/key norms can be exported."
        )


def engine_config(facts: Eagle3Facts, dtype: torch.dtype, special_ids: dict[str, Any]) -> dict[str, Any]:
    """config.json as the engines read it. `special_ids` are the target's bos/eos/pad ids, which some readers want."""
    nested, top = list(facts.taps), [tap + 1 for tap in facts.taps]
    rope = {"rope_type": "default"} | facts.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": facts.hidden,
        "target_hidden_size": facts.hidden,
        "intermediate_size": facts.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": facts.rms_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": facts.vocab,
        "draft_vocab_size": facts.draft_vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": facts.max_positions,
        "rope_theta": facts.rope_parameters["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "num_aux_hidden_states": len(nested),
        "eagle_aux_hidden_state_layer_ids": top,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "dtype": _word(dtype),
        "torch_dtype": _word(dtype),
        **special_ids,
    }


def read_engine_config(config: dict[str, Any], where: str) -> tuple[Eagle3Facts, torch.dtype]:
    """What an engine would understand from config.json alone, and the dtype of its weights.

    Raises UserError if it is another kind of drafter, asks for something that this reader does not compute, or if two fields
    that say the same thing (one for each engine) disagree.
    """
    wanted = {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    try:
        wrong = [f"{key} is {config[key]!r}, not {value!r}" for key, value in wanted.items() if config[key] != value]
        nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        top = config["eagle_aux_hidden_state_layer_ids"]
        if top != [tap + 1 for tap in nested] or config["num_aux_hidden_states"] != len(nested):
            wrong.append(f"layer ids {top} (vLLM) and {nested} (SGLang, one lower) or num_aux_hidden_states disagree")
        rope = config["rope_parameters"]
        legacy = {"rope_type": "default"} | (config["rope_scaling"] or {}) | {"rope_theta": config["rope_theta"]}
        if legacy != rope:
            wrong.append(f"RoPE is {legacy} in the older fields but {rope} in rope_parameters")
        if config["target_hidden_size"] != config["hidden_size"]:
            wrong.append(f"target_hidden_size is {config['target_hidden_size']}, not hidden_size {config['hidden_size']}")
        facts = Eagle3Facts(
            taps=tuple(nested),
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_eps=config["rms_norm_eps"],
            rope_parameters=rope,
            max_positions=config["max_position_embeddings"],
            vocab=config["vocab_size"],
            draft_vocab=config["draft_vocab_size"],
        )
        dtype = getattr(torch, config["torch_dtype"])
    except KeyError as error:
        raise UserError(
            f"{where}/config.json has no {error}, so this is no EAGLE-3 export of ours; export the drafter again."
        ) from error
    if wrong:
        raise UserError(f"{where}/config.json is not an EAGLE-3 drafter that can be read here: {'; '.join(wrong)}.")
    return facts, dtype


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
