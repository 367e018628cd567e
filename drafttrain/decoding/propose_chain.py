"""A trained drafter as a chain, always its most probable token.

A draft exists where the product of the drafter's probabilities of the chosen tokens up to it is at least `least_confidence`: the drafter's
own estimate that all of them are kept.

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
        hidden_B1H = self.hidden_BH[: len(length_B), None]
        drafts, logp = [], []
        for depth in range(count):
            if depth:
                hidden_B1H = self.net.step(self.state, prev_B1, torch.full_like(prev_B1, depth - 2))
            logits_B1V = self._logits(hidden_B1H, prev_B1)
            prev_B1 = self.net.speakable_V[logits_B1V.argmax(-1)]
            drafts.append(prev_B1)
            if self.least_confidence:
                logp.append(logits_B1V.float().log_softmax(-1).amax(-1))
        proposal = chain_of(torch.cat(drafts, dim=1))
        if not self.least_confidence:
            return proposal
        exists_BK = torch.cat(logp, dim=1).cumsum(1) >= math.log(self.least_confidence)
        return Proposal(proposal.tokens_BN, proposal.parents_BN, exists_BK)
