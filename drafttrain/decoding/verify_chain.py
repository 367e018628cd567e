"""Verification of a chain x_1..x_n that was drawn at random: draft by draft, or all drafts together.

`TokenWise` accepts x_i with probability min(1, p(x_i)/q(x_i)) and stops at the first that is not accepted; the token behind is drawn
from norm(max(p - q, 0)) there, or from p behind the last draft (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318).

`Block` judges the drafts together. It keeps at least as many on average, and no other rule keeps more (block verification, Sun et
al. 2024, arXiv 2403.10444):

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i)/q(x_i))                  # how far the target still wants the path x_1..x_i
    s_i = sum_x max(w_i p(x | x_1..x_i) - q(x | x_1..x_i), 0)       # what it wants behind x_i beyond what q covers there
    h_i = s_i / (s_i + 1 - w_i),  h_n = w_n at the last draft n

The longest x_1..x_i for which a number u_i of its own is below h_i is kept. The token behind it is drawn from p if i = n, and else
from norm(max(w_i p - q, 0)).

Why it is exact: P(kept at least x_1..x_i | x_1..x_i) = w_i. This holds at the last draft; and before it, longer paths are kept with
sum_x min(w_i p, q) = w_i - s_i, so that in total (w_i - s_i) + (1 - w_i + s_i) h_i = w_i. So x_1..x_i+1 is said by acceptance with
min(w_i p, q) and by the token behind with the rest of w_i p.

Rows may have different numbers of drafts, if a row stops drafting for reasons that were known before the next token was drawn. A
token that q excludes was not drawn, and ends the chain before it.

Letters: B rows, N drafts, P = N + 1 places (0 the anchor, n + 1 draft n), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.sampling import ACCEPT, RESIDUAL, Sampling, draw, probabilities, round_uniforms
from drafttrain.decoding.verify import at_place, drawn_from, residual
from drafttrain.types import Proposal, Verdict


@dataclass(frozen=True)
class TokenWise:
    """Speculative sampling of chains: node n must follow node n-1. The same verdicts as of `Rejection` with all widths 1, faster."""

    def __call__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Verdict:
        chain = _Chain(logits_BPV, proposal, sampling, stream_B, length_B)
        accepted_BN = (chain.uniform_BN * chain.q_BN < chain.p_BN) & (chain.place_P[1:] <= chain.count_B1)
        return chain.verdict(accepted_BN.long().cumprod(1).sum(1), torch.ones_like(chain.p_BPV[:, :, 0]))


@dataclass(frozen=True)
class Block:
    """Joint verification of chains: node n must follow node n-1."""

    def __call__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Verdict:
        chain = _Chain(logits_BPV, proposal, sampling, stream_B, length_B)
        weight_BP = _weights(chain.p_BN, chain.q_BN)
        more_BP = (weight_BP[..., None].float() * chain.p_BPV - chain.q_BPV).clamp(min=0).sum(-1).double()
        keep_BP = more_BP / (more_BP + 1 - weight_BP).clamp(min=torch.finfo(torch.float32).tiny)
        keep_BP = torch.where(chain.place_P == chain.count_B1, weight_BP, keep_BP)
        kept_BN = (chain.uniform_BN < keep_BP[:, 1:]) & (chain.place_P[1:] <= chain.count_B1)
        longest_BP = torch.nn.functional.pad(torch.where(kept_BN, chain.place_P[1:], 0), (1, 0))
        return chain.verdict(longest_BP.amax(1), weight_BP)


class _Chain:
    """What is weighed: the distributions of every place, both probabilities of each draft (float64, where a number in [0, 1) stays
    below 1), a random number for each, and how many drafts there are."""

    def __init__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor):
        N, tokens_BN1 = proposal.tokens_BN.shape[1], proposal.tokens_BN[..., None]
        self.q_BPV, self.p_BPV = drawn_from(proposal, sampling).float(), probabilities(logits_BPV, sampling)
        self.p_BN = self.p_BPV[:, :N].gather(2, tokens_BN1)[..., 0].double()
        self.q_BN = self.q_BPV[:, :N].gather(2, tokens_BN1)[..., 0].double()
        drawn_BN = self.q_BN > 0 if proposal.valid_BN is None else proposal.valid_BN & (self.q_BN > 0)
        self.count_B1 = drawn_BN.long().cumprod(1).sum(1, keepdim=True)
        self.place_P = torch.arange(N + 1, device=length_B.device)
        self.uniform_BN = round_uniforms(stream_B, length_B, N, ACCEPT)
        self.last_B = round_uniforms(stream_B, length_B, 1, RESIDUAL)[:, 0]

    def verdict(self, accepted_B: Tensor, weight_BP: Tensor) -> Verdict:
        """The token behind is drawn from p behind all drafts, and else from norm(max(w p - q, 0))."""
        accepted_B1, p_BV = accepted_B[:, None], at_place(self.p_BPV, accepted_B)
        left_BV = residual(weight_BP.gather(1, accepted_B1).float() * p_BV, at_place(self.q_BPV, accepted_B))
        said_B = draw(torch.where(accepted_B1 == self.count_B1, p_BV, left_BV), self.last_B)
        return Verdict(accepted_B, self.place_P[:-1].expand(len(accepted_B), -1), said_B)


def _weights(p_BN: Tensor, q_BN: Tensor) -> Tensor:
    """w of every place, float64 [B, P]."""
    weights = [p_BN.new_ones(len(p_BN), 1)]
    for n in range(p_BN.shape[1]):
        ratio_B1 = p_BN[:, n, None] / q_BN[:, n, None].clamp(min=torch.finfo(torch.float32).tiny)
        weights.append((weights[-1] * ratio_B1).clamp(max=1))
    return torch.cat(weights, dim=1)
