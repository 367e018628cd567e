"""Choosing tokens: greedy, or sampled from each row's own random stream.

A row's draw at a position depends on the row's seed and the position alone, never on its neighbours or on how many drafts
were accepted: so a resumed, re-batched or speculative run says the same tokens as a plain one.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the target picks tokens. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Smallest set of most probable tokens that holds this much mass; 1 keeps all."""
    top_k: int = 0
    """Most probable tokens kept; 0 keeps all."""
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError(
                f"sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, but got {self.temperature}, {self.top_p} and {self.top_k}."
            )


def stream_of(key: str, seed: int) -> int:
    """The 63-bit name of a prompt's random stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{key}".encode()).digest()[:8], "big") >> 1


def uniforms(stream_B: Tensor, position_BT: Tensor) -> Tensor:
    """One number in [0, 1) per (stream, position), float64 [B, T] (SplitMix64, Steele et al. 2014, in wrapping int64)."""

    def shifted(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = stream_B[:, None] + (position_BT + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    x = x ^ shifted(x, 31)
    return shifted(x, 11).double() * 2.0**-53


def choose_tokens(logits_BTV: Tensor, sampling: Sampling, stream_B: Tensor, position_BT: Tensor) -> Tensor:
    """The target's token at each position [B, T]: argmax, or the inverse distribution function at the row's uniform."""
    if sampling.temperature == 0:
        return logits_BTV.argmax(-1)
    cumulative = probabilities(logits_BTV, sampling).cumsum(-1)
    point = uniforms(stream_B, position_BT).to(cumulative.dtype)[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, point, right=True)[..., 0].clamp(max=logits_BTV.shape[-1] - 1)


def probabilities(logits_BTV: Tensor, sampling: Sampling) -> Tensor:
    """Softmax after temperature, top-k, then top-p, fp32 [B, T, V] (not renormalised after top-p)."""
    logits = logits_BTV.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(before >= sampling.top_p, 0.0))
    return p
