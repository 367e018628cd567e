"""Verification of drafts that were drawn at random, child by child down a tree. (Chains are verified faster in `verify_chain`.)

At each place the children x_1, x_2, ... drawn from q are weighed against the target's p, in the order of their indices. One of
them is accepted and the walk goes on behind it; or none is, and the token said is drawn from what is left of p. Either way the
token follows p exactly, so the whole output does.

`Rejection` tries one child after the other: x is accepted with probability min(1, p(x)/q(x)); if it is not, p becomes
norm(max(p - q, 0)) (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). Where children were drawn
without replacement, x then leaves q too, which is normalised again (recursive rejection sampling, Jeon et al. 2024, arXiv
2402.14160); where they were drawn independently, q stays (Miao et al. 2024, SpecInfer, arXiv 2305.09781).

`KSeq` takes k independent children together (k-sequential selection, Sun et al. 2023, SpecTr, arXiv 2310.15141): x is accepted
with probability min(1, p(x)/(rho q(x))). With beta = sum_x min(q(x), p(x)/rho), any is with a = 1 - (1 - beta)^k, each time x
with probability min(q(x), p(x)/rho)/beta; what is left of p is p - min(q, p/rho) a/beta, which is nowhere negative if and only if
a <= rho beta. The least such rho in [1, k] accepts most, and any greater one is exact as well.

Exactness asks of the proposal that a node exists (`valid_BN`) for reasons that were known before its token was drawn, and that
of drawn siblings only the last ones are left out. A node whose token q excludes was not drawn, and is passed over. Two siblings
that say the same token share their children.

Static shapes, no waiting for the device, so that a round fits into a CUDA graph.

Letters: B rows, N nodes, P = N + 1 places (0 the anchor, n + 1 node n), W children, X children of all depths, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.sampling import ACCEPT, RESIDUAL, Sampling, draw, probabilities, round_uniforms
from drafttrain.decoding.verify import at_place, drawn_from, residual
from drafttrain.types import Proposal, Verdict

BISECTIONS = 12
"""Steps that narrow down KSeq's rho. They decide how many drafts are accepted in the fourth digit, never whether it is exact."""


@dataclass(frozen=True)
class _Walk:
    """Down the tree for as long as a child is accepted."""

    widths: tuple[int, ...]
    """Most children of a node at each depth that are tried; (1, 1, 1) is a chain of three. Others are ignored, exactly."""

    def __call__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Verdict:
        q_BPV, tokens_BN, parents_BN = drawn_from(proposal, sampling), proposal.tokens_BN, proposal.parents_BN
        widths = self.widths[: tokens_BN.shape[1]]
        uniform_BX = round_uniforms(stream_B, length_B, sum(widths), ACCEPT)
        place_B = accepted_B = torch.zeros_like(length_B)
        walking_B1 = torch.ones_like(length_B, dtype=torch.bool)[:, None]
        left_BV = torch.zeros_like(logits_BPV[:, 0], dtype=torch.float32)
        children_BN, path = parents_BN < 0, [accepted_B[:, None][:, :0]]
        for width, uniform_BW in zip(widths, uniform_BX.split(widths, dim=1), strict=True):
            if proposal.valid_BN is not None:
                children_BN = children_BN & proposal.valid_BN
            node_BW, there_BW = _first(children_BN, width)
            p_BV, q_BV = probabilities(at_place(logits_BPV, place_B), sampling), at_place(q_BPV, place_B).float()
            tokens_BW = tokens_BN.gather(1, node_BW)
            there_BW = there_BW & (q_BV.gather(1, tokens_BW) > 0)
            choice_B1, rest_BV = self.couple(p_BV, q_BV, tokens_BW, there_BW, uniform_BW)
            left_BV = torch.where(walking_B1, rest_BV, left_BV)
            walking_B1 = choice_B1 >= 0
            node_B1 = node_BW.gather(1, choice_B1.clamp(min=0))
            path.append(node_B1)
            place_B = torch.where(walking_B1, node_B1 + 1, place_B[:, None])[:, 0]
            accepted_B = accepted_B + walking_B1[:, 0]
            said_BN = children_BN & (tokens_BN == tokens_BN.gather(1, node_B1)) & walking_B1
            children_BN = said_BN.gather(1, parents_BN.clamp(min=0)) & (parents_BN >= 0)
        left_BV = torch.where(walking_B1, probabilities(at_place(logits_BPV, place_B), sampling), left_BV)
        said_B = draw(left_BV, round_uniforms(stream_B, length_B, 1, RESIDUAL)[:, 0])
        return Verdict(accepted_B, torch.cat(path, dim=1), said_B)

    def couple(
        self, p_BV: Tensor, q_BV: Tensor, tokens_BW: Tensor, there_BW: Tensor, uniform_BW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which child is accepted, -1 for none [B, 1], and what is left of p where none is [B, V]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rejection(_Walk):
    """Speculative sampling, and recursive rejection where there are siblings."""

    replacement: bool = False
    """Whether siblings were drawn independently of each other, so that they may be equal."""

    def couple(
        self, p_BV: Tensor, q_BV: Tensor, tokens_BW: Tensor, there_BW: Tensor, uniform_BW: Tensor
    ) -> tuple[Tensor, Tensor]:
        choice_B1 = torch.full_like(tokens_BW[:, :1], -1)
        for w in range(tokens_BW.shape[1]):
            token_B1, tried_B1 = tokens_BW[:, w, None], there_BW[:, w, None] & (choice_B1 < 0)
            accepted_B1 = tried_B1 & _accepted(p_BV, q_BV, token_B1, uniform_BW[:, w, None])
            choice_B1 = torch.where(accepted_B1, w, choice_B1)
            p_BV = torch.where(tried_B1, residual(p_BV, q_BV), p_BV)  # read only if it was not accepted
            if not self.replacement and w + 1 < tokens_BW.shape[1]:
                others_BV = q_BV.scatter(1, token_B1, 0.0)
                mass_B1 = others_BV.sum(-1, keepdim=True)
                q_BV = torch.where(tried_B1 & (mass_B1 > 0), others_BV / mass_B1, q_BV)
        return choice_B1, p_BV


@dataclass(frozen=True)
class KSeq(_Walk):
    """SpecTr's k-sequential selection, for children drawn independently."""

    def couple(
        self, p_BV: Tensor, q_BV: Tensor, tokens_BW: Tensor, there_BW: Tensor, uniform_BW: Tensor
    ) -> tuple[Tensor, Tensor]:
        count_B1 = there_BW.sum(-1, keepdim=True).double()
        rho_B1 = _least_rho(p_BV, q_BV, count_B1)
        covered_BV = torch.minimum(q_BV, p_BV / rho_B1.float())
        beta_B1 = covered_BV.sum(-1, keepdim=True).double().clamp(max=1)
        share_B1 = _any_of(count_B1, beta_B1) / beta_B1.clamp(min=torch.finfo(torch.float32).tiny)
        accepted_BW = there_BW & _accepted(p_BV, q_BV, tokens_BW, uniform_BW * rho_B1)
        first_B1 = accepted_BW.int().argmax(-1, keepdim=True)
        choice_B1 = torch.where(accepted_BW.any(-1, keepdim=True), first_B1, -1)
        return choice_B1, residual(p_BV, covered_BV * share_B1.float())


def _least_rho(p_BV: Tensor, q_BV: Tensor, count_B1: Tensor) -> Tensor:
    """The least rho in [1, k] with 1 - (1 - beta)^k <= rho beta, from above, float64 [B, 1]."""
    low_B1, high_B1 = torch.ones_like(count_B1), count_B1.clamp(min=1)
    for _ in range(BISECTIONS):
        rho_B1 = (low_B1 + high_B1) / 2
        beta_B1 = torch.minimum(q_BV, p_BV / rho_B1.float()).sum(-1, keepdim=True).double().clamp(max=1)
        enough_B1 = _any_of(count_B1, beta_B1) <= rho_B1 * beta_B1
        low_B1, high_B1 = torch.where(enough_B1, low_B1, rho_B1), torch.where(enough_B1, rho_B1, high_B1)
    return high_B1


def _any_of(count_B1: Tensor, beta_B1: Tensor) -> Tensor:
    """Probability that any of k independent events happens that have probability beta each."""
    return 1 - (1 - beta_B1) ** count_B1


def _accepted(p_BV: Tensor, q_BV: Tensor, tokens_BW: Tensor, uniform_BW: Tensor) -> Tensor:
    """True with probability min(1, p/q) of each token. In float64, where a number in [0, 1) stays below 1."""
    return uniform_BW * q_BV.gather(1, tokens_BW).double() < p_BV.gather(1, tokens_BW).double()


def _first(marked_BN: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Indices of each row's first `width` marked nodes, and whether there are as many: int64 and bool [B, W]."""
    rank_BN = torch.where(marked_BN, marked_BN.cumsum(1), 0)
    hit_BNW = rank_BN[..., None] == torch.arange(1, width + 1, device=marked_BN.device)
    return hit_BNW.int().argmax(1), hit_BNW.any(1)
