"""A trained drafter as a dynamic tree: its shape follows the drafter's confidence, round by round.

Letters: B rows in play, K the nodes expanded on a level, N nodes, W nodes of a level, C candidates, H drafter width, V draft vocabulary.
"""

import math

import torch
from torch import Tensor

from drafttrain.decoding.proposer import DrafterProposer
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.types import Proposal


class TreeProposer(DrafterProposer):
    """A dynamic tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858): on each level the `top_k` nodes that are most probable as paths
    are expanded into `top_k` children each; of all candidates the `nodes` most probable stay, ties to the shallower.

    A path's probability is the drafter's own estimate that it will be accepted, so the tree maximises the expected number of
    accepted tokens among trees of its size. A child is never more probable than its parent, so parents stay with their children.

    What a node adds to that number is its path's probability. A node that adds less than `least_gain` does not exist: it costs more
    to verify than it brings (OPT-Tree, Wang et al. 2024, arXiv 2406.17276, which stops to grow there).
    """

    expected_B: Tensor
    """Accepted drafts that the drafter expects in the last proposal, the sum of its path probabilities; worked out if asked for."""

    def __init__(
        self, net: DrafterNet, drafts: int, top_k: int = 8, nodes: int = 32, least_gain: float = 0.0, estimates: bool = False
    ):
        """`estimates`: work out `expected_B`."""
        super().__init__(net, drafts)
        candidates, words = top_k + (drafts - 1) * top_k**2, len(net.speakable_V)
        if not 1 <= top_k <= words or not 1 <= nodes <= candidates:
            raise UserError(
                f"a tree of {nodes} nodes from the best {top_k} on each of {drafts} levels cannot be built: the draft vocabulary has {words} tokens, "
                f"and there are {candidates} candidates; lower nodes, or raise top_k or drafts."
            )
        self.top_k, self._nodes, self.least_gain, self.estimates = top_k, nodes, least_gain, estimates
        self.drafts = min(drafts, nodes)  # a path has no more nodes than the tree

    @property
    def nodes(self) -> int:
        return self._nodes

    @property
    def chain(self) -> bool:
        return False

    @property
    def stepped(self) -> int:
        return (self.drafts - 1) * self.top_k

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        self.state.forget(extent)
        k, B, known = self.top_k, len(length_B), self._known(self.drafts)
        prev_B1 = tokens_BM.gather(1, length_B[:, None])
        logits_B1V = self._logits(self.hidden_BH[:B, None], prev_B1, known)
        score_BW, token_BW = self._children(logits_B1V, torch.zeros_like(prev_B1, dtype=torch.float32))
        # Candidates of all levels: token, score, which candidate they follow; and of the last level, which stepped token.
        tokens, scores, parents = [token_BW], [score_BW], [torch.full_like(token_BW, -1)]
        behind_BW, offset = parents[0], 0
        for level in range(1, self.drafts):
            best_BK, pick_BK = scores[-1].topk(k, dim=1)
            chosen_BK, stepped_BK = tokens[-1].gather(1, pick_BK), behind_BW.gather(1, pick_BK)
            hidden_BKH = self.net.step(self.state, chosen_BK, stepped_BK)
            score_BW, token_BW = self._children(self._logits(hidden_BKH, chosen_BK, known, level), best_BK)
            tokens.append(token_BW)
            scores.append(score_BW)
            parents.append((pick_BK + offset).repeat_interleave(k, dim=1))
            offset += k if level == 1 else k * k
            number_K = torch.arange((level - 1) * k, level * k, device=token_BW.device)
            behind_BW = number_K.repeat_interleave(k).expand(B, -1)
        return self._best(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))

    def _children(self, logits_BWV: Tensor, score_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability as a path, and target id, of the best k children of W nodes: two of [B, W*k]."""
        logp_BWV = logits_BWV.float().log_softmax(-1)
        best_BWK, index_BWK = logp_BWV.topk(self.top_k, dim=-1)
        return (score_BW[..., None] + best_BWK).flatten(1), self.net.speakable_V[index_BWK].flatten(1)

    def _best(self, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor) -> Proposal:
        """The most probable candidates, renumbered in the order in which they were found."""
        order_BC = scores_BC.sort(dim=1, descending=True, stable=True).indices
        chosen_BN = order_BC[:, : self.nodes].sort(dim=1).values
        taken_BC = torch.zeros_like(tokens_BC).scatter(1, chosen_BN, 1)
        number_BC = taken_BC.cumsum(1) - 1
        parent_BN = parents_BC.gather(1, chosen_BN)
        renumbered_BN = torch.where(parent_BN < 0, -1, number_BC.gather(1, parent_BN.clamp(min=0)))
        logp_BN = scores_BC.gather(1, chosen_BN)
        if self.estimates:
            self.expected_B = logp_BN.exp().sum(1)
        exists_BN = logp_BN >= math.log(self.least_gain) if self.least_gain else None
        return Proposal(tokens_BC.gather(1, chosen_BN), renumbered_BN, exists_BN)
