"""Verification: which drafts the target keeps, and the token that it says behind them. Here what verifiers share, and `Match`;
those that weigh the target's probabilities against the drafter's stand in `verify_chain` and `verify_tree`.

`Match` asks what the target itself says at each place (its argmax, or the inverse distribution function at the row's own
random number for that position) and keeps the drafts that say the same. The output is then plain decoding's token for token,
sampled or greedy, whoever drafted, and no draft probabilities are needed. With deterministic drafts it also keeps as many as
any verifier could at one place: a draft d survives with the target's probability p(d).

Static shapes, no waiting for the device, so that a round fits into a CUDA graph.

Letters: B rows, N nodes, P = N + 1 places (0 the anchor, n + 1 node n), K greatest depth, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.decoding.sampling import Sampling, choose_tokens
from drafttrain.decoding.tree import branched, place_depths
from drafttrain.errors import UserError
from drafttrain.types import Proposal, Verdict


class Verifier(Protocol):
    """Every verifier is exact: the tokens said follow the target's own distribution, whatever the drafts."""

    def __call__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Verdict:
        """`logits_BPV` are the target's, raw, at each place; `length_B` is the anchor's position, so that a token at depth k
        stands at position length + k; `stream_B` names each row's random numbers."""


@dataclass(frozen=True)
class Match:
    """Keep the path that says what the target says (sample-then-match; greedy prefix match at temperature 0)."""

    depth: int
    """Greatest depth of any proposal, K."""
    chain: bool = False
    """Every proposal is a chain, node n behind node n-1: the same verdict in a quarter of the operations."""

    def __call__(self, logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Verdict:
        if self.chain:
            position_BP = length_B[:, None] + torch.arange(1, logits_BPV.shape[1] + 1, device=length_B.device)
            return self.of(choose_tokens(logits_BPV, sampling, stream_B, position_BP), proposal)
        proposal = branched(proposal)
        return self.of(said_at(logits_BPV, proposal, sampling, stream_B, length_B), proposal)

    def of(self, said_BP: Tensor, proposal: Proposal) -> Verdict:
        """The verdict where the target's token at every place is known already."""
        N = proposal.tokens_BN.shape[1]
        if self.chain:
            agrees_BN = proposal.tokens_BN == said_BP[:, :-1]
            if proposal.valid_BN is not None:
                agrees_BN = agrees_BN & proposal.valid_BN
            accepted_B = agrees_BN.long().cumprod(1).sum(1)
            path_BK = torch.arange(N, device=said_BP.device).expand(len(said_BP), -1)
            return Verdict(accepted_B, path_BK, said_BP.gather(1, accepted_B[:, None])[:, 0])
        agrees_BN = proposal.tokens_BN == said_BP.gather(1, proposal.parents_BN + 1)
        if proposal.valid_BN is not None:
            agrees_BN = agrees_BN & proposal.valid_BN
        # At most one child of a place agrees, so the nodes that agree all the way up form one path; parents have lower indices.
        kept_BN = (agrees_BN[:, None] | ~branched(proposal).seen_BNN).all(-1)
        accepted_B = kept_BN.sum(-1)
        node_N = torch.arange(N, device=said_BP.device)
        path_BK = torch.where(kept_BN, node_N, N).sort(-1).values[:, : self.depth].clamp(max=max(N - 1, 0))
        last_B = torch.where(kept_BN, node_N + 1, 0).amax(-1) if N else torch.zeros_like(accepted_B)
        return Verdict(accepted_B, path_BK, said_BP.gather(1, last_B[:, None])[:, 0])


def said_at(logits_BPV: Tensor, proposal: Proposal, sampling: Sampling, stream_B: Tensor, length_B: Tensor) -> Tensor:
    """The target's own token behind every place, as plain decoding would choose it there, [B, P]."""
    return choose_tokens(logits_BPV, sampling, stream_B, length_B[:, None] + place_depths(branched(proposal).seen_BNN) + 1)


def drawn_from(proposal: Proposal, sampling: Sampling) -> Tensor:
    """The q_BPV that is weighed against the target's p. UserError where there is nothing to weigh."""
    if sampling.temperature == 0:
        raise UserError(
            "temperature is 0, where the target says its most probable token, but this verifier weighs probabilities and needs more than 0; "
            "raise temperature, or verify by match."
        )
    if proposal.q_BPV is None:
        raise UserError(
            "the drafts were chosen, not drawn, but this verifier weighs the probabilities that they were drawn with; draw them, or verify by match."
        )
    return proposal.q_BPV


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """norm(max(p - q, 0)): what the target has to say beyond what drafts from q have covered. p itself where nothing is left, which
    happens only where p and q are equal but for rounding."""
    left_BV = (p_BV - q_BV).clamp(min=0)
    total_B1 = left_BV.sum(-1, keepdim=True)
    return torch.where(total_B1 > 0, left_BV / total_B1, p_BV)


def at_place(x_BPV: Tensor, place_B: Tensor) -> Tensor:
    """Each row's vector at one place, [B, V]."""
    return x_BPV.gather(1, place_B[:, None, None].expand(-1, 1, x_BPV.shape[-1]))[:, 0]
