"""Who guesses: a trained drafter, the prompt itself, or nobody. The engine asks none of them which it is.

Letters: B rows of the batch, R rows admitted now, K drafts, M slots, T rows read by the target, A taps, D target width.
"""

from typing import Protocol

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterNet


class Proposer(Protocol):
    """Guesses `drafts` tokens behind every row's anchor."""

    drafts: int
    taps: tuple[int, ...]

    def begin(self, batch: int, capacity: int) -> None:
        """Forget everything; rows come with `admit`."""

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, taps_RTAD: Tensor, extent: int) -> None:
        """New prompts of `counts_R` tokens in rows `rows_R`; tokens_RM[r, counts_R[r]] is the anchor."""

    def propose(self, tokens_BM: Tensor, length_B: Tensor) -> Tensor:
        """[B, K] drafts behind tokens_BM[b, length_B[b]]."""

    def commit(self, taps_BTAD: Tensor, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        """The target read K+1 rows; the first `counts_B` are committed, and tokens_BT[b, i] is the token behind row i."""

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""


class ChainProposer:
    """A trained drafter, one token after another, greedily."""

    hidden_BH: Tensor

    def __init__(self, net: DrafterNet, drafts: int):
        self.net, self.drafts, self.taps = net.eval(), drafts, net.needs.taps

    def begin(self, batch: int, capacity: int) -> None:
        self.state = self.net.begin(batch, capacity)
        self.hidden_BH = torch.empty(0)

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, taps_RTAD: Tensor, extent: int) -> None:
        self.state.length_B[rows_R] = 0
        T = taps_RTAD.shape[1]
        hidden_RH = self.net.commit(self.state, rows_R, taps_RTAD, tokens_RM[:, 1 : T + 1], counts_R, extent)
        if not len(self.hidden_BH):
            self.hidden_BH = hidden_RH.new_zeros(len(self.state.length_B), hidden_RH.shape[1])
        self.hidden_BH[rows_R] = hidden_RH

    @torch.no_grad()
    def propose(self, tokens_BM: Tensor, length_B: Tensor) -> Tensor:
        prev_B = tokens_BM.gather(1, length_B[:, None])[:, 0]
        hidden_BH, drafts = self.hidden_BH, []
        for depth in range(self.drafts):
            if depth:
                hidden_BH = self.net.step(self.state, prev_B)
            prev_B = self.net.speakable_V[self.net.logits(hidden_BH, prev_B).argmax(-1)]
            drafts.append(prev_B)
        return torch.stack(drafts, dim=1)

    def commit(self, taps_BTAD: Tensor, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        self.hidden_BH = self.net.commit(self.state, None, taps_BTAD, tokens_BT, counts_B, extent)

    def select(self, rows: Tensor) -> None:
        self.state.select(rows)
        self.hidden_BH = self.hidden_BH[rows]


class LookupProposer:
    """Prompt lookup: copies what followed the latest earlier occurrence of the longest matching suffix (Saxena 2023)."""

    def __init__(self, drafts: int, longest: int = 3):
        self.drafts, self.longest = drafts, longest
        self.taps: tuple[int, ...] = ()

    def begin(self, batch: int, capacity: int) -> None:
        pass

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, taps_RTAD: Tensor, extent: int) -> None:
        pass

    def propose(self, tokens_BM: Tensor, length_B: Tensor) -> Tensor:
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
        return tokens_BM.gather(1, torch.minimum(source, length_B[:, None]))

    def commit(self, taps_BTAD: Tensor, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        pass

    def select(self, rows: Tensor) -> None:
        pass
