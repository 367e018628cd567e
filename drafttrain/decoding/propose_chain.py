"""A trained drafter as a chain, always its most probable token.

A draft exists where the product of the drafter's confidence in all drafts up to it is at least `least_confidence`: its own estimate that all of
them are kept. Confidence in a draft is the probability of the chosen token, unless the drafter has learnt to tell (DSpark).

Letters: B rows in play, K drafts, H drafter width, V draft vocabulary.
"""

import math

import torch
from torch import Tensor

from drafttrain.decoding.proposer import DrafterProposer, chain_of
from drafttrain.drafters.base import DrafterNet
from drafttrain.types import Proposal


class ChainProposer(DrafterProposer):
    """A trained drafter, one token after another, greedily."""

    def __init__(self, net: DrafterNet, drafts: int, least_confidence: float = 0.0):
        super().__init__(net, drafts)
        self.least_confidence = least_confidence

    @property
    def stepped(self) -> int:
        return self.drafts - 1

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        return self._chain(self.drafts, tokens_BM, length_B, extent)

    def _chain(self, count: int, tokens_BM: Tensor, length_B: Tensor, extent: int) -> Proposal:
        self.state.forget(extent)
        prev_B1 = tokens_BM.gather(1, length_B[:, None])
        if self.net.parallel and not self.net.reads_last:
            return self._all_at_once(count, prev_B1)
        hidden_B1H, known = self.hidden_BH[: len(length_B), None], self._known(count)
        drafts, logp = [], []
        for depth in range(count):
            if depth:
                hidden_B1H = self.net.step(self.state, prev_B1, torch.full_like(prev_B1, depth - 2))
            logits_B1V = self._logits(hidden_B1H, prev_B1, known, depth)
            if self.least_confidence:
                logp.append(self._log_sure(hidden_B1H, prev_B1, logits_B1V))
            prev_B1 = self.net.speakable_V[logits_B1V.argmax(-1)]
            drafts.append(prev_B1)
        return self._sure(torch.cat(drafts, dim=1), torch.cat(logp, dim=1) if logp else None)

    def _all_at_once(self, count: int, anchor_B1: Tensor) -> Proposal:
        """Of a drafter whose depths do not depend on each other: one product with the head."""
        hidden_BKH = self.net.ahead(self.state)[:, :count]
        prev_BK = anchor_B1.expand(-1, count)
        logits_BKV = self._logits(hidden_BKH, prev_BK)
        logp_BK = self._log_sure(hidden_BKH, prev_BK, logits_BKV) if self.least_confidence else None
        return self._sure(self.net.speakable_V[logits_BKV.argmax(-1)], logp_BK)

    def _sure(self, tokens_BK: Tensor, logp_BK: Tensor | None) -> Proposal:
        """The chain, as far as its probability reaches."""
        proposal = chain_of(tokens_BK)
        if logp_BK is None:
            return proposal
        return Proposal(proposal.tokens_BN, proposal.parents_BN, logp_BK.cumsum(1) >= math.log(self.least_confidence))
