"""Guessing without a model: what followed the same words earlier in the row's own text.

Letters: B rows in play, K drafts, M slots, S slots looked at.
"""

import torch
from torch import Tensor

from drafttrain.decoding.proposer import Proposer, chain_of
from drafttrain.types import Proposal


class LookupProposer(Proposer):
    """Prompt lookup: copies what followed the latest earlier occurrence of the longest matching suffix (Saxena 2023)."""

    def __init__(self, drafts: int, longest: int = 3):
        self.drafts, self.longest = drafts, longest

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        M = tokens_BM.shape[1]
        end = torch.arange(M, device=tokens_BM.device)  # a match may end at any token before the anchor
        earlier = end < length_B[:, None]
        matched = earlier
        best_B = torch.zeros_like(length_B)  # where the copied text starts; no match copies from the row's start, mostly in vain
        for size in range(1, self.longest + 1):
            wanted = tokens_BM.gather(1, (length_B - size + 1).clamp(min=0)[:, None])
            shifted = tokens_BM.roll(size - 1, dims=1)
            matched = matched & (shifted == wanted) & (end >= size - 1) & (length_B >= size)[:, None]
            latest = torch.where(matched, end, -1).amax(1)
            best_B = torch.where(latest >= 0, latest + 1, best_B)
        source = best_B[:, None] + torch.arange(self.drafts, device=tokens_BM.device)
        return chain_of(tokens_BM.gather(1, torch.minimum(source, length_B[:, None])))


class NGramProposer(Proposer):
    """An n-gram model of the row's own text, with back-off (ANPD, Ou et al. 2024, arXiv 2404.08698).

    Each draft is the token behind the longest earlier occurrence, of up to `longest` tokens, of the words that it follows, drafts before
    it included; among equally long ones behind the latest (the paper counts; the latest needs no table over the vocabulary).

    The chain is as long as the evidence: n matched tokens vouch for `trust` n drafts, so that no match makes no draft.
    """

    def __init__(self, drafts: int, longest: int, trust: float):
        self.drafts, self.longest, self.trust = drafts, longest, trust

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        text_BS = tokens_BM[:, :extent].clone()  # drafts are written behind the anchor, where they can be matched in turn
        end_S = torch.arange(extent, device=text_BS.device)
        last_B1 = length_B[:, None]
        run_BS = torch.zeros_like(text_BS)  # how many tokens up to each slot are those up to the last one
        for back in range(self.longest - 1, -1, -1):  # a run that ends before the last slot is too short to begin before the text
            run_BS = self._longer(run_BS, text_BS, text_BS.gather(1, (last_B1 - back).clamp(min=0)))
        drafts, matched = [], []
        for _ in range(self.drafts):
            # One number orders matches by their length, then by how late they are.
            best_B1 = torch.where(end_S < last_B1, run_BS * extent + end_S, 0).amax(1, keepdim=True)
            matched.append(best_B1 // extent)
            token_B1 = text_BS.gather(1, best_B1 % extent + 1)
            drafts.append(token_B1)
            last_B1 = last_B1 + 1
            text_BS.scatter_(1, last_B1, token_B1)
            run_BS = self._longer(run_BS, text_BS, token_B1)
        chain, matched_BK = chain_of(torch.cat(drafts, dim=1)), torch.cat(matched, dim=1)
        number_K = torch.arange(1, self.drafts + 1, device=text_BS.device)
        exists_BK = (matched_BK > 0) & (number_K <= self.trust * matched_BK[:, :1])
        return Proposal(chain.tokens_BN, chain.parents_BN, exists_BK.long().cumprod(1).bool())

    def _longer(self, run_BS: Tensor, text_BS: Tensor, token_B1: Tensor) -> Tensor:
        """The runs when one more token stands at the end."""
        before_BS = torch.nn.functional.pad(run_BS[:, :-1], (1, 0))
        return torch.where(text_BS == token_B1, (before_BS + 1).clamp(max=self.longest), 0)
