"""Values of a kind that no reader expects, in the JSON files of a drafter's folder: each is told and taken out, so that what looks further can count on
kinds. A key whose kind is not listed here is anybody's."""

import math
from collections.abc import Callable
from typing import Any

MOST = 1 << 31
"""No size of a drafter is larger."""
SHOWN = 60
"""Characters of a value that are repeated."""


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < MOST


def _place(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _taps(value: Any) -> bool:
    return isinstance(value, list) and all(_place(each) for each in value)


Kind = tuple[Callable[[Any], bool], str]
COUNT: Kind = (_count, f"a whole number from 1 to {MOST - 1:,}")
PLACE: Kind = (_place, f"a whole number from 0 to {MOST - 1:,}")
NUMBER: Kind = (_number, "a number above 0")
OBJECT: Kind = (lambda value: isinstance(value, dict), "an object with keys")
NAMES: Kind = (_names, "a list of names")
TAPS: Kind = (_taps, "a list of the numbers of layers")
TEXT: Kind = (lambda value: isinstance(value, str), "text")
SIZES = (
    "vocab_size", "hidden_size", "target_hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "draft_vocab_size", "truncated_vocab_size", "hot_vocab_size", "num_aux_hidden_states",
    "num_target_layers", "block_size", "markov_rank", "num_heads", "max_drafts", "selector_rank", "selector_top_k", "conv_kernel_size",
    "conv_group_size", "medusa_num_heads", "medusa_num_layers", "hydra_num_heads", "hydra_num_layers", "original_max_position_embeddings",
    "sliding_window", "swa_window_size", "layers", "hidden", "vocab", "draft_vocab", "most_drafts", "bytes",
)  # fmt: skip
OBJECTS = (
    "rope_parameters", "rope_scaling", "eagle_config", "dflash_config", "dspark_config", "transformer_layer_config", "speculators_config", "verifier",
    "identity", "config", "weights", "init_args", "facts",
)  # fmt: skip
KINDS: dict[str, Kind] = (
    dict.fromkeys(SIZES, COUNT)
    | dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), PLACE)
    | dict.fromkeys(("rope_theta", "rms_norm_eps"), NUMBER)
    | dict.fromkeys(OBJECTS, OBJECT)
    | dict.fromkeys(
        ("model_type", "torch_dtype", "dtype", "speculators_model_type", "class_path", "file", "sha256", "revision"),
        TEXT,
    )
    | {"architectures": NAMES, "taps": TAPS}
)
NEVER_NULL = "vocab_size", "hidden_size", "rope_theta"
"""Keys of which null means as little as none at all; of others it may mean something (no window)."""
OWN = ("init_args", "facts")
"""Objects whose keys are those of a class of ours, which judges them itself."""


def tidied(
    found: dict[str, Any], file: str, fault: Callable[[str], None], taken: set[str], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A copy without values of a wrong kind, each told to `fault` in a sentence, their keys added to `taken`."""
    kept = {}
    for key, value in found.items():
        here = (*path, key)
        known = KINDS.get(key)
        if value is not None and known is not None and not known[0](value):
            shown = repr(value) if len(repr(value)) <= SHOWN else f"{repr(value)[:SHOWN]} ..."
            fault(f"{file}: {'.'.join(here)} is {shown}, but must be {known[1]}; write what the drafter was made with.")
            taken.add(key)
        elif value is not None or key not in NEVER_NULL:
            kept[key] = tidied(value, file, fault, taken, here) if isinstance(value, dict) and key not in OWN else value
    return kept
