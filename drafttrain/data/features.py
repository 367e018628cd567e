"""How features are kept on disk, and the same rounding for features that are computed in the training step.

bfloat16        as they are
float8_e4m3fn   each vector divided by its largest magnitude / 448 (the type's largest number), which is kept beside it in fp32

Both paths round to bfloat16 first, so a run on stored features and a run on online ones read the same numbers.

Shapes: ... tokens (and taps), D target width.
"""

import torch
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.types import Features

FEATURE_DTYPES = ("bfloat16", "float8_e4m3fn")
LARGEST_E4M3 = 448.0
SCALE_BYTES = 4


def require_feature_dtype(name: str) -> None:
    """UserError for a type that features cannot be kept in."""
    if name not in FEATURE_DTYPES:
        raise UserError(f"data.feature_dtype is {name!r}, but must be one of {', '.join(FEATURE_DTYPES)}.")


def vector_bytes(hidden: int, dtype: str) -> int:
    """Bytes of one stored vector."""
    return hidden * 2 if dtype == "bfloat16" else hidden + SCALE_BYTES


def feature_bytes(taps: int, hidden: int, dtype: str = "bfloat16") -> int:
    """Most bytes that the features of one token take: taps and final, where both are kept."""
    return (taps + 1) * vector_bytes(hidden, dtype)


def encode(x: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """(stored [..., D], scale [...] or None)"""
    x = x.to(torch.bfloat16)
    if dtype == "bfloat16":
        return x, None
    scale = (x.float().abs().amax(-1) / LARGEST_E4M3).clamp(min=1e-12)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """bfloat16 [..., D]"""
    return stored if scale is None else (stored.float() * scale[..., None]).to(torch.bfloat16)


def rounded(features: Features, dtype: str) -> Features:
    """As they would be read back from disk."""
    return Features(decode(*encode(features.taps_BTAD, dtype)), decode(*encode(features.final_BTD, dtype)))
