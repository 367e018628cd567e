"""Targets whose weights came quantised: what their config says of it, and whether they can be read so. (Rounding plain ones: precision.py.)"""

import copy
from fnmatch import fnmatch
from textwrap import shorten
from typing import Any

from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.refusals import reason

BITS = {"fp8": 8, "fbgemm_fp8": 8, "load_in_8bit": 8, "load_in_4bit": 4}
"""Ways of quantising that say their bits by being named. Not MXFP4, which transformers unpacks, behind a warning, wherever the package `kernels` is missing."""
LEFT_PLAIN = "modules_to_not_convert", "llm_int8_skip_modules", "ignore"
"""Where quantization_config names modules that it does not speak of."""


def quantisation(hf_config: Any, path: str) -> Any:
    """What a config says of weights that came quantised, and None of others, as of a GGUF, which is made plain."""
    said = getattr(hf_config, "quantization_config", None) or getattr(hf_config.get_text_config(), "quantization_config", None)
    return None if path.endswith(".gguf") else said


def require_unrounded(hf_config: Any, config: TargetConfig) -> None:
    """UserError where weights that came quantised are to be rounded."""
    if config.weights is not None and quantisation(hf_config, config.path):
        raise UserError(
            f"target.weights is {config.weights}, but the weights of target {config.path} came quantised (quantization_config in its config.json); set it to "
            "null."
        )


def require_known(packed: Any, path: str) -> None:
    """UserError where `packed`, what `quantisation` said, is a way that transformers does not know: it would read the packed numbers as they stand."""
    from transformers.quantizers import AutoHfQuantizer

    if packed and not AutoHfQuantizer.supports_quant_method(packed):
        raise UserError(
            f"target {path} could not be loaded: its weights are quantised by {packed['quant_method']!r} (quantization_config in its config.json), which "
            "transformers does not know; choose other weights of that model, or remove quantization_config if these are plain."
        )


def packed_bits(said: Any) -> int | None:
    """Bits of a quantised number, where `said`, what `quantisation` found, tells them: each way of quantising has a name of its own for it."""
    groups = said.get("config_groups")  # compressed-tensors
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    told = [said.get("bits"), said.get("w_bit"), *(each.get("num_bits") for each in weights if each)]
    told += [bits for way, bits in BITS.items() if said.get(way) is True or said.get("quant_method") == way]
    return max((bits for bits in told if isinstance(bits, int)), default=None)


def packed_names(model: Any, said: Any) -> set[str]:
    """Names of the weights that came quantised: the matrices and experts of its layers, but for modules that `said` leaves plain."""
    plain = [str(pattern) for key in LEFT_PLAIN if isinstance(named := said.get(key), list) for pattern in named]
    patterns = [f"*{pattern.removeprefix('re:').removesuffix('$').replace('.*', '*')}.*" for pattern in plain]
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = [name for name, weight in model.named_parameters() if weight.dim() > 1 and id(weight) not in ends]
    return {name for name in matrices if not any(fnmatch(name, pattern) for pattern in patterns)}


def require_whole(found: Any, packed: bool, path: str) -> None:
    """UserError where weights were not in the files (transformers draws those at random), or stand there with scales of which the config says nothing.
    `found`: what transformers says of loading."""
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"target {path} could not be loaded: {len(missing)} of its weights are in none of its files ({shorten(', '.join(missing), 160, placeholder=' ...')}); "
            "fetch it again."
        )
    scales = sorted(key for key in found["unexpected_keys"] if ".weight_scale" in key)
    if scales and not packed:
        raise UserError(
            f"target {path} could not be loaded: its weights stand beside scales ({shorten(', '.join(scales), 160, placeholder=' ...')}), so they are quantised, "
            "but its config.json has no quantization_config that says how; choose other weights of that model."
        )


def require_unpacked(hf_config: Any, path: str) -> None:
    """UserError, in the words of loading, where weights are quantised in a way that transformers does not know, or that needs what this machine lacks. The
    config alone is asked."""
    from transformers.quantizers import AutoHfQuantizer

    if not (said := quantisation(hf_config, path)):
        return
    try:
        require_known(said, path)
        AutoHfQuantizer.from_config(copy.deepcopy(said), pre_quantized=True).validate_environment(device_map=None)
    except UserError:
        raise
    except Exception as error:  # each kind of quantisation has its own
        raise UserError(f"target {path} could not be loaded: {reason(error)}") from error
