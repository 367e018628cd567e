"""Trees of a fixed shape: each node is the r-th best guess behind its parent, by a drafter or by whoever else can rank tokens.

Letters: B rows in play, N nodes, W nodes of a level, C guesses of each, H drafter width, V draft vocabulary.
"""

import torch
from torch import Tensor

from drafttrain.decoding.proposer import DrafterProposer, FixedShape
from drafttrain.decoding.tree_shape import TreeShape
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.types import Proposal


class StaticTreeProposer(FixedShape, DrafterProposer):
    """A trained drafter as a tree of a fixed shape (Medusa, Cai et al. 2024, arXiv 2401.10774)."""

    def __init__(self, net: DrafterNet, shape: TreeShape):
        super().__init__(net, shape.depth)
        words = len(net.speakable_V)
        if shape.best > words:
            raise UserError(
                f"a static tree asks for {shape.best} guesses at one place, but the draft vocabulary has {words} tokens; give another tree."
            )
        self.take_shape(shape, net.speakable_V.device)

    @property
    def stepped(self) -> int:
        return len(self.shape.expanded)

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        self.state.forget(extent)
        B, known = len(length_B), self._known(self.drafts)
        token_BW, hidden_BWH, tokens = tokens_BM.gather(1, length_B[:, None]), self.hidden_BH[:B, None], []
        for depth, level in enumerate(self._levels):
            if depth:
                hidden_BWH = self.net.step(self.state, token_BW, level.behind.expand(B, -1))
            best_BWC = self._logits(hidden_BWH, token_BW, known, depth).topk(level.best, dim=-1).indices
            tokens.append(self.net.speakable_V[best_BWC.flatten(1)[:, level.pick]])
            token_BW = tokens[-1][:, level.expand]
        return Proposal(torch.cat(tokens, 1), self._parents_N.expand(B, -1))
