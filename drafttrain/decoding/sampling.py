"""Choosing tokens: greedy, or drawn from each row's own random stream.

The target's draw at a position depends on the row's seed and the position alone, never on its neighbours or on how many drafts
were accepted: so a resumed, re-batched or speculative run says the same tokens as a plain one (`uniforms`). What a round of
drafting and verification needs besides depends on the row's seed and the position of the round's anchor (`round_uniforms`).

Letters: B rows, T positions, V vocabulary, C draws, S any number of leading sizes.
"""

import hashlib
import math
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
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError(
                f"sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, but got {self.temperature}, {self.top_p} and {self.top_k}."
            )


def stream_of(key: str, seed: int) -> int:
    """The 63-bit name of a prompt's random stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{key}".encode()).digest()[:8], "big") >> 1


TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
"""What random numbers are for: the target's own token, drawing drafts, accepting them, and the token behind them. The numbers of
different purposes are independent."""

_GOLDEN, _PURPOSE = -7046029254386353131, -2960836687040520213  # 0x9E3779B97F4A7C15, and another odd number: 0xD6E8FEB86659FD6B


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit over all (SplitMix64, Steele et al. 2014, in wrapping arithmetic)."""
    x = (x ^ _shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shifted(x, 31)


def _number(stream_B: Tensor, position_BT: Tensor, purpose: int) -> Tensor:
    stream_B = _mixed(stream_B + purpose * _PURPOSE) if purpose != TARGET else stream_B
    return _mixed(stream_B[:, None] + (position_BT + 1) * _GOLDEN)


def uniforms(stream_B: Tensor, position_BT: Tensor, purpose: int = TARGET) -> Tensor:
    """One number in [0, 1) per (stream, position) and purpose, float64 [B, T]."""
    return _shifted(_number(stream_B, position_BT, purpose), 11).double() * 2.0**-53


def round_uniforms(stream_B: Tensor, length_B: Tensor, count: int, purpose: int) -> Tensor:
    """The first `count` numbers for one purpose of the round whose anchor stands at position `length_B`, float64 [B, count].

    A round must not use again the numbers of the one before it, though it drafts some of the same positions anew: what was
    kept there tells something about the numbers that were used (block verification weighs a draft by those behind it), and
    draws that depend on what was kept are biased. Anchors only move on, so no two rounds of a row share one.
    """
    number_B = _number(stream_B, length_B[:, None], purpose)[:, 0]
    return uniforms(number_B, torch.arange(count, device=length_B.device).expand(len(length_B), -1))


def choose_tokens(logits_BTV: Tensor, sampling: Sampling, stream_B: Tensor, position_BT: Tensor) -> Tensor:
    """The target's token at each position [B, T]: argmax, or the inverse distribution function at the row's uniform."""
    if sampling.temperature == 0:
        return logits_BTV.argmax(-1)
    return draw(_kept(logits_BTV, sampling), uniforms(stream_B, position_BT))


def probabilities(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution over tokens after temperature, top-k, then top-p, fp32 [..., V]. The temperature must not be 0."""
    kept_SV = _kept(logits_SV, sampling)
    return kept_SV / kept_SV.sum(-1, keepdim=True) if sampling.top_p < 1 else kept_SV


def _kept(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """Softmax after temperature and top-k, of which top-p keeps the head; not normalised again."""
    logits = logits_SV.float() / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(before >= sampling.top_p, 0.0))
    return p


def draw(p_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """One token [...] for each distribution [..., V], which need not be normalised: its inverse distribution function at a number
    in [0, 1). Never a token without probability."""
    cumulative = p_SV.cumsum(-1)
    point = uniform_S.to(cumulative.dtype)[..., None] * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, point, right=True).clamp(max=p_SV.shape[-1] - 1)
    # A point next to the end, or between two sums that a GPU rounds apart, may hit a token without probability.
    return torch.where(p_SV.gather(-1, token) > 0, token, p_SV.argmax(-1, keepdim=True))[..., 0]


def draw_with_replacement(p_SV: Tensor, uniform_SC: Tensor) -> tuple[Tensor, Tensor]:
    """C tokens independent of each other, and that there was each to be drawn: int64 and bool [..., C]."""
    tokens_SC = torch.stack([draw(p_SV, uniform_S) for uniform_S in uniform_SC.unbind(-1)], -1)
    return tokens_SC, torch.ones_like(tokens_SC, dtype=torch.bool)


def draw_without_replacement(p_SV: Tensor, uniform_SC: Tensor) -> tuple[Tensor, Tensor]:
    """C different tokens in the order drawn, and whether there was any left to be drawn: int64 and bool [..., C].

    Each is drawn from the distribution without those before it, which is what recursive rejection takes the order to mean.
    """
    tokens, exists = [], []
    for uniform_S in uniform_SC.unbind(-1):
        token_S = draw(p_SV, uniform_S)
        exists.append(p_SV.gather(-1, token_S[..., None])[..., 0] > 0)
        p_SV = p_SV.scatter(-1, token_S[..., None], 0.0)
        tokens.append(token_S)
    return torch.stack(tokens, -1), torch.stack(exists, -1)
