"""Token Recycling (Luo et al. 2024, arXiv 2408.08696): the target's own guesses of earlier passes, used again.

A matrix holds for each token of the vocabulary the k tokens that the target found most probable behind it when it read it last, drafts
that were not kept included. The tree has a fixed shape; the node of rank r behind token x is the matrix's [x, r]. All rows share the
matrix, so that what one learns serves the others; what is said does not depend on it.

Letters: B rows in play, P places, N = B P tokens read, W nodes of a level, C guesses of each, k tokens kept behind each, V vocabulary.
"""

import torch
from torch import Tensor

from drafttrain.decoding.proposer import FixedShape
from drafttrain.decoding.tree_shape import TreeShape, grow
from drafttrain.types import Proposal


def assumed_shape(nodes: int, top_k: int, depth: int) -> TreeShape:
    """The best tree where the guess of rank r is right with probability 0.35 / (r + 1)^1.3 at every depth: 76% for eight guesses."""
    return grow([[0.35 / (rank + 1) ** 1.3 for rank in range(top_k)]] * depth, nodes)


class RecyclingProposer(FixedShape):
    """Guesses behind a token what the target guessed there last time."""

    def __init__(self, shape: TreeShape, vocab: int, device: torch.device):
        self.take_shape(shape, device)
        self.behind_VK = torch.full((vocab, min(shape.best, vocab)), -1, device=device)
        """-1 behind tokens that were not read yet."""

    def forget_texts(self) -> None:
        self.behind_VK.fill_(-1)

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        token_BW, tokens = tokens_BM.gather(1, length_B[:, None]), []
        for level in self._levels:
            guesses_BWC = self.behind_VK[token_BW.clamp(min=0)][..., : level.best]
            guesses_BWC = torch.where(token_BW[..., None] >= 0, guesses_BWC, -1)
            tokens.append(guesses_BWC.flatten(1)[:, level.pick])
            token_BW = tokens[-1][:, level.expand]
        token_BN = torch.cat(tokens, dim=1)
        return Proposal(token_BN.clamp(min=0), self._parents_N.expand(len(length_B), -1), token_BN >= 0)

    def observe(self, logits_BPV: Tensor, ids_BP: Tensor) -> None:
        best_NK = logits_BPV.flatten(0, 1).topk(self.behind_VK.shape[1], dim=-1).indices
        # A token may have been read in several places; whole rows are taken from the last, or siblings could be equal.
        number_N = torch.arange(len(best_NK), device=ids_BP.device)
        last_V = torch.full_like(self.behind_VK[:, 0], -1).scatter_reduce(0, ids_BP.flatten(), number_N, "amax")
        self.behind_VK.copy_(torch.where(last_V[:, None] >= 0, best_NK[last_V.clamp(min=0)], self.behind_VK))
