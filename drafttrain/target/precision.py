"""The frozen target's matrices in fewer bits than they came in, by torchao: half the memory of bfloat16, and another target.

    W ~ s_r Q_r,  a scale for each row r (output);  int8: Q = round(W / s), fp8: Q in float8_e4m3fn

Products are computed in the target's own type. Only linear layers are rounded: embedding and head, which drafters begin from and objectives read, stay as
they are, and so do the experts of a mixture, which are no linear layers. What the target says changes a little, so its identity does too: the revision
of the weights is followed by what they were rounded to.
"""

from typing import Any

import torch
from torch import nn

from drafttrain.errors import UserError, install
from drafttrain.target.config import TargetConfig
from drafttrain.target.quantised import packed_bits, packed_names, quantisation


def require_library(weights: str | None) -> None:
    """UserError where weights are to be rounded without torchao. Asked before they are loaded, which takes minutes for large ones."""
    if weights is None:
        return
    try:
        import torchao.quantization  # noqa: F401
    except ImportError:
        raise UserError(
            f"target.weights is {weights}, but torchao, which rounds them, is not installed; run {install('torchao')}, or set it to null."
        ) from None


def round_weights(model: Any, weights: str, device: str | torch.device) -> None:
    """Rounds the matrices of the layers to int8 or fp8, one by one, and moves each to the device as it is done. UserError without torchao."""
    require_library(weights)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    head = model.get_output_embeddings()
    config = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[weights]()
    quantize_(model, config, filter_fn=lambda module, name: type(module) is nn.Linear and module is not head, device=device)


def bytes_of(model: Any, config: TargetConfig, shards: int) -> int:
    """The most that each of `shards` processes holds of a target's weights: plain, the matrices of its layers rounded (experts count whole), or as they came
    quantised, without their scales. `model`: an outline will do."""
    size, head = getattr(torch, config.dtype).itemsize, model.get_output_embeddings()
    matrices = [module.weight for module in model.modules() if type(module) is nn.Linear and module is not head]
    bits = packed_bits(said) if (said := quantisation(model.config, config.path)) else None
    if bits is not None:
        names = packed_names(model, said)
        matrices = [weight for name, weight in model.named_parameters() if name in names]
    entries, rows = sum(weight.numel() for weight in matrices), sum(len(weight) for weight in matrices)
    others = sum(weight.numel() for weight in model.parameters()) - entries
    if bits is not None:
        shared = entries * bits // 8
    else:
        shared = entries * size if config.weights is None else entries + rows * size
    return others * size + shared // shards


def revision_of(revision: str, weights: str | None) -> str:
    """What an identity says of weights: where they come from, and what they were rounded to."""
    return revision if weights is None else f"{revision}+{weights}"


def rounded_to(revision: str) -> str | None:
    """What the weights of an identity's revision were rounded to; None for those as they came."""
    return revision.rpartition("+")[2] if "+" in revision else None
