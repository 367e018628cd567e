"""A trained drafter's own draws: chains and trees whose tokens follow q, its distribution after the target's sampling options.

Every node at depth d - 1 has w_d children, drawn without replacement: x_1 ~ q, x_2 ~ q without x_1, and so on, which is what recursive
rejection weighs them by (Jeon et al. 2024, arXiv 2402.14160). Widths 1, 1, 1 are a chain of speculative sampling (Leviathan et al. 2023,
arXiv 2211.17192). With `replacement` siblings are drawn independently of each other, all from q, so that two may be equal: widths k, 1, 1
are k chains from one root (Sun et al. 2023, SpecTr, arXiv 2310.15141). q is zero for tokens outside the draft vocabulary.

A node does not exist where q had no token left for it, where its parent does not, or where the product of the drafter's confidence down to its
own place is below `least_confidence`: all known before the token was drawn, as exact verification demands. Confidence is max_x q(x), unless the
drafter has learnt to tell (DSpark).

The numbers that a draw uses are those of the round's anchor and of the node's index: the same draft, whoever shares the batch.

Letters: B rows in play, N nodes, P places, W nodes of a level, C children of each, H drafter width, V target vocabulary (Vd draft).
"""

from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from drafttrain.decoding.proposer import DrafterProposer
from drafttrain.decoding.sampling import (
    DRAFT,
    Sampling,
    draw_with_replacement,
    draw_without_replacement,
    probabilities,
    round_uniforms,
)
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.types import Proposal


class DrawnProposer(DrafterProposer):
    """`widths[d]` children of every node at depth d, drawn from the drafter."""

    def __init__(
        self,
        net: DrafterNet,
        widths: tuple[int, ...],
        sampling: Sampling,
        least_confidence: float = 0.0,
        replacement: bool = False,
    ):
        if sampling.temperature == 0:
            raise UserError(
                "temperature is 0, where nothing is drawn, but these drafts are draws of the drafter; raise temperature, or use drafts that are "
                "chosen (Chain without draw, Tree)."
            )
        super().__init__(net, len(widths))
        self.widths, self.sampling, self.least_confidence = tuple(widths), sampling, least_confidence
        self._draw = draw_with_replacement if replacement else draw_without_replacement
        self.sizes = tuple(accumulate(widths, mul))

    @property
    def nodes(self) -> int:
        return sum(self.sizes)

    @property
    def chain(self) -> bool:
        return max(self.widths) == 1

    @property
    def stepped(self) -> int:
        return sum(self.sizes[:-1])

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        self.state.forget(extent)
        B, device, known = len(length_B), length_B.device, self._known(self.drafts)
        uniforms = round_uniforms(stream_B, length_B, self.nodes, DRAFT).split(self.sizes, dim=1)
        token_BW, hidden_BWH = tokens_BM.gather(1, length_B[:, None]), self.hidden_BH[:B, None]
        number_BW = torch.full_like(token_BW, -1)  # every node but the deepest is stepped, in order: its number is its index
        sure_BW, exists_BW = torch.ones_like(token_BW, dtype=torch.float32), torch.ones_like(token_BW, dtype=torch.bool)
        tokens: list[Tensor] = []
        parents: list[Tensor] = []
        exists, q = [], []
        for depth, (width, uniform_BW) in enumerate(zip(self.widths, uniforms, strict=True)):
            if depth:
                hidden_BWH = self.net.step(self.state, token_BW, parents[-1])
            q_BWV = probabilities(self._logits(hidden_BWH, token_BW, known, depth), self.sampling)
            index_BWC, left_BWC = self._draw(q_BWV, uniform_BW.unflatten(1, (-1, width)))
            if self.least_confidence:
                sure_BW = sure_BW * self._log_sure(hidden_BWH, token_BW, q_BWV.log()).exp()
            exists_BW = exists_BW & (sure_BW >= self.least_confidence)
            exists.append((left_BWC & exists_BW[..., None]).flatten(1))
            tokens.append(self.net.speakable_V[index_BWC].flatten(1))
            parents.append(number_BW.repeat_interleave(width, dim=1))
            q.append(self._over_target(q_BWV))
            token_BW, exists_BW, sure_BW = tokens[-1], exists[-1], sure_BW.repeat_interleave(width, dim=1)
            first = sum(self.sizes[:depth])
            number_BW = torch.arange(first, first + self.sizes[depth], device=device).expand(B, -1)
        q.append(torch.zeros_like(q[-1][:, :1]).expand(-1, self.sizes[-1], -1))  # leaves have no children
        return Proposal(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(exists, 1), torch.cat(q, 1))

    def _over_target(self, q_BWV: Tensor) -> Tensor:
        """The same distributions over the target's ids."""
        vocabulary = self.net.vocabulary
        if vocabulary.is_full:
            return q_BWV
        return q_BWV.new_zeros(*q_BWV.shape[:2], vocabulary.size).index_copy_(2, self.net.speakable_V, q_BWV)
