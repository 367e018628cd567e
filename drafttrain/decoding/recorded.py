"""What every round of a chain drafted, kept: on the device until the host fetches the round, then per answer.

Everything comes from the pass that verified the drafts. The anchor of an answer's first round is its first token, which the prefill said;
every next one stands accepted + 1 further:

    a_0 = prompt length,   a_{i+1} = a_i + r_i + 1

Depth k stands at a + k. It is within reach if that is below prompt length + limit, and no end of turn was drafted before it.

Letters: B rows in play, R rounds of an answer, K greatest depth, P = K+1 places (0 the anchor, k the drafted token d_k), D target width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.types import DraftRounds, Proposal


@dataclass(frozen=True)
class RoundBuffers:
    """What the last round drafted. Buffers on the device keep their addresses, and the next round overwrites them."""

    drafted_BX: Tensor
    """Length of the chain, and its K tokens."""
    final_BPD: Tensor
    """Final states of the target at the places, behind the chain's end anything."""

    @staticmethod
    def like(final_BTD: Tensor, rows: int, drafts: int) -> "RoundBuffers":
        """Empty ones for so many rows, of the device and type of the target's final states."""
        drafted_BX = torch.zeros(rows, drafts + 1, dtype=torch.long, device=final_BTD.device)
        return RoundBuffers(drafted_BX, final_BTD.new_zeros(rows, drafts + 1, final_BTD.shape[-1]))

    def take(self, proposal: Proposal, final_BPD: Tensor) -> None:
        """Keep a round of the first rows; its chains may be shorter than the longest."""
        width, N = proposal.tokens_BN.shape
        self.drafted_BX[:width, 0] = N if proposal.valid_BN is None else proposal.valid_BN.long().cumprod(1).sum(1)
        self.drafted_BX[:width, 1 : N + 1] = proposal.tokens_BN
        self.final_BPD[:width, : N + 1] = final_BPD

    def each(self, change: Callable[[Tensor], Tensor]) -> "RoundBuffers":
        return RoundBuffers(change(self.drafted_BX), change(self.final_BPD))


@dataclass(frozen=True)
class RowRound:
    """A round of one row, on the host."""

    accepted: int
    said: int
    drafted_X: Tensor
    final_PD: Tensor


def draft_rounds(
    rounds: Sequence[RowRound], buffers: RoundBuffers, ids: Tensor, prompt_len: int, limit: int, ends: Sequence[int]
) -> DraftRounds:
    """The rounds of one answer. `buffers` tell the shapes, since an answer may have had none; `ids` are prompt and answer [T]."""
    K = buffers.final_BPD.shape[1] - 1
    accepted_R = torch.tensor([r.accepted for r in rounds], dtype=torch.long)
    anchor_R = prompt_len + (accepted_R + 1).cumsum(0) - (accepted_R + 1)
    drafted_RX = _stacked([r.drafted_X for r in rounds], buffers.drafted_BX)
    proposed_R, drafted_RK, depth_K = drafted_RX[:, 0], drafted_RX[:, 1:], torch.arange(1, K + 1)
    gone_RK = depth_K > proposed_R[:, None]
    end_RK = torch.isin(drafted_RK, torch.tensor(ends, dtype=torch.long)).long()
    past_RK = gone_RK | (end_RK.cumsum(1) > end_RK) | (anchor_R[:, None] + depth_K >= prompt_len + limit)
    final_RPD = _stacked([r.final_PD for r in rounds], buffers.final_BPD)
    final_RPD[:, 1:].masked_fill_(gone_RK[..., None], 0)
    return DraftRounds(
        anchor_R=anchor_R,
        drafted_RK=drafted_RK.masked_fill(gone_RK, -1),
        proposed_R=proposed_R.clone(),
        accepted_R=accepted_R,
        said_R=torch.tensor([r.said for r in rounds], dtype=torch.long),
        kept_R=torch.minimum(accepted_R + 1, len(ids) - 1 - anchor_R),
        within_R=(~past_RK).sum(1),
        final_RPD=final_RPD,
    )


def _stacked(rounds: Sequence[Tensor], buffer_BX: Tensor) -> Tensor:
    """[R, ...], a copy; of no rounds, empty."""
    return torch.stack(list(rounds)) if rounds else torch.empty(0, *buffer_BX.shape[1:], dtype=buffer_BX.dtype)
