"""Block verification of a chain that was drawn at random: all drafts are judged together, and at least as many are kept on average
as by token-wise rejection; no other rule keeps more (Sun et al. 2024, arXiv 2403.10444).

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i)/q(x_i))                  # how far the target still wants the path x_1..x_i
    s_i = sum_x max(w_i p(x | x_1..x_i) - q(x | x_1..x_i), 0)       # what it wants behind x_i beyond what q covers there
    h_i = s_i / (s_i + 1 - w_i),  h_n = w_n at the last draft n

The longest x_1..x_i for which a number u_i of its own is below h_i is kept. The token behind it is drawn from p if i = n, and else
from norm(max(w_i p - q, 0)).

Why it is exact: P(kept at least x_1..x_i | x_1..x_i) = w_i. This holds at the last draft; and before it, longer paths are kept with
sum_x min(w_i p, q) = w_i - s_i, so that in total (w_i - s_i) + (1 - w_i + s_i) h_i = w_i. So x_1..x_i+1 is said by
acceptance with min(w_i p, q) and by the token behind with the rest of w_i p.

Nothing here needs the same number of drafts in each row, if a row stops drafting for reasons known before the token was drawn.

Letters: B rows, N drafts, P = N + 1 places (0 the anchor, n + 1 draft n), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.sampling import ACCEPT, RESIDUAL, Sampling, draw, probabilities, round_uniforms
from drafttrain.decoding.verify import at_place, drawn_from, residual
from drafttrain.types import Proposal, Verdict


@dataclass(frozen=True)
class Block:
    """Joint verification of chains: node n must follow node n-1."""

    def __call__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Verdict:
        q_BPV, tokens_BN1 = drawn_from(proposal, sampling).float(), proposal.tokens_BN[..., None]
        B, N = proposal.tokens_BN.shape
        p_BPV = probabilities(logits_BPV, sampling)
        p_BN, q_BN = (x[:, :N].gather(2, tokens_BN1)[..., 0].double() for x in (p_BPV, q_BPV))
        drawn_BN = q_BN > 0 if proposal.valid_BN is None else proposal.valid_BN & (q_BN > 0)
        count_B1 = drawn_BN.long().cumprod(1).sum(1, keepdim=True)
        weight_BP = _weights(p_BN, q_BN)
        more_BP = (weight_BP[..., None].float() * p_BPV - q_BPV).clamp(min=0).sum(-1).double()
        place_P = torch.arange(N + 1, device=length_B.device)
        keep_BP = more_BP / (more_BP + 1 - weight_BP).clamp(min=torch.finfo(torch.float32).tiny)
        keep_BP = torch.where(place_P == count_B1, weight_BP, keep_BP)
        kept_BN = (round_uniforms(stream_B, length_B, N, ACCEPT) < keep_BP[:, 1:]) & (place_P[1:] <= count_B1)
        accepted_B = torch.cat([torch.zeros_like(count_B1), torch.where(kept_BN, place_P[1:], 0)], dim=1).amax(1)
        weight_B1, p_BV = weight_BP.gather(1, accepted_B[:, None]).float(), at_place(p_BPV, accepted_B)
        rest_BV = torch.where(accepted_B[:, None] == count_B1, p_BV, residual(weight_B1 * p_BV, at_place(q_BPV, accepted_B)))
        said_B = draw(rest_BV, round_uniforms(stream_B, length_B, 1, RESIDUAL)[:, 0])
        return Verdict(accepted_B, place_P[:N].expand(B, N), said_B)


def _weights(p_BN: Tensor, q_BN: Tensor) -> Tensor:
    """w of every place, float64 [B, P]."""
    weights = [p_BN.new_ones(len(p_BN), 1)]
    for n in range(p_BN.shape[1]):
        ratio_B1 = p_BN[:, n, None] / q_BN[:, n, None].clamp(min=torch.finfo(torch.float32).tiny)
        weights.append((weights[-1] * ratio_B1).clamp(max=1))
    return torch.cat(weights, dim=1)
