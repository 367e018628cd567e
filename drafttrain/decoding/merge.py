"""Two proposals under one anchor: where both say the same path, one node stands for it.

Letters: B rows, N nodes of the first, X nodes of the second, V vocabulary.
"""

import torch
from torch import Tensor

from drafttrain.types import Proposal


def merged(first: Proposal, second: Proposal, depth: int) -> Proposal:
    """The N nodes of the first, then the X of the second [B, N + X]. `depth` is the second's greatest.

    A node of the second that the first has too does not exist, and its children follow the first's. Only for drafts that were chosen: a
    union of draws follows no q that a verifier could weigh.
    """
    if first.q_BPV is not None or second.q_BPV is not None:
        raise ValueError("drawn drafts cannot be merged")
    N = first.tokens_BN.shape[1]
    same_BXN = _same(first, second, depth)
    twin_BX, has_twin_BX = same_BXN.int().argmax(-1), same_BXN.any(-1)
    above_BX = second.parents_BN.clamp(min=0)
    under_twin_BX = has_twin_BX.gather(1, above_BX)
    parent_BX = torch.where(under_twin_BX, twin_BX.gather(1, above_BX), above_BX + N)
    parent_BX = torch.where(second.parents_BN < 0, -1, parent_BX)
    return Proposal(
        torch.cat([first.tokens_BN, second.tokens_BN], 1),
        torch.cat([first.parents_BN, parent_BX], 1),
        torch.cat([_exists(first), _exists(second) & ~has_twin_BX], 1),
    )


def _exists(proposal: Proposal) -> Tensor:
    return torch.ones_like(proposal.tokens_BN, dtype=torch.bool) if proposal.valid_BN is None else proposal.valid_BN


def _same(first: Proposal, second: Proposal, depth: int) -> Tensor:
    """Whether node x of the second and node n of the first exist and say the same path, bool [B, X, N]."""
    B, N = first.tokens_BN.shape
    X = second.tokens_BN.shape[1]
    alike_BXN = second.tokens_BN[:, :, None] == first.tokens_BN[:, None]
    alike_BXN = alike_BXN & _exists(second)[:, :, None] & _exists(first)[:, None]
    same_BXN = alike_BXN & (second.parents_BN < 0)[:, :, None] & (first.parents_BN < 0)[:, None]
    deeper_BXN = alike_BXN & (second.parents_BN >= 0)[:, :, None] & (first.parents_BN >= 0)[:, None]
    above_BXN = second.parents_BN.clamp(min=0)[:, :, None].expand(B, X, N)
    beside_BXN = first.parents_BN.clamp(min=0)[:, None].expand(B, X, N)
    for _ in range(depth - 1):  # each turn settles one level more
        same_BXN = same_BXN | (deeper_BXN & same_BXN.gather(1, above_BXN).gather(2, beside_BXN))
    return same_BXN
