"""What follows from a proposal's parents alone: who stands above whom, and how deep.

A chain is a tree like any other. Everything but `check` has static shapes and never waits for the device, so it may stand
inside a CUDA graph.

Letters: B rows, N nodes, P = N + 1 places (0 is the anchor, n + 1 is node n).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.types import Proposal


@dataclass(frozen=True, kw_only=True)
class Branched(Proposal):
    """A proposal with what follows from its parents, worked out once for all who need it."""

    seen_BNN: Tensor
    """`ancestors` of its nodes."""


def branched(proposal: Proposal) -> Branched:
    """The same proposal with its ancestors."""
    if isinstance(proposal, Branched):
        return proposal
    tokens_BN, parents_BN, valid_BN, q_BPV = proposal.tokens_BN, proposal.parents_BN, proposal.valid_BN, proposal.q_BPV
    return Branched(tokens_BN, parents_BN, valid_BN, q_BPV, seen_BNN=ancestors(parents_BN))


def ancestors(parents_BN: Tensor) -> Tensor:
    """True at [b, n, m] where m is n itself or stands between n and the anchor, bool [B, N, N].

    Pointer doubling: once each node knows its nearest 2^i, it learns as many again from the 2^i-th above it.
    """
    B, N = parents_BN.shape
    P = N + 1
    anchor = parents_BN.new_zeros(B, 1)
    above_BP = torch.cat([anchor, parents_BN + 1], dim=1)  # the anchor is its own parent
    known_BPP = torch.eye(P, dtype=torch.bool, device=parents_BN.device).expand(B, P, P)
    for _ in range(N.bit_length()):
        known_BPP = known_BPP | known_BPP.gather(1, above_BP[:, :, None].expand(B, P, P))
        above_BP = above_BP.gather(1, above_BP)
    return known_BPP[:, 1:, 1:]


def depths(ancestors_BNN: Tensor) -> Tensor:
    """Depth of each node, 1 for a child of the anchor, int64 [B, N]."""
    return ancestors_BNN.sum(-1)


def place_depths(ancestors_BNN: Tensor) -> Tensor:
    """Depth of each place, 0 for the anchor, int64 [B, P]: a place at depth d of a row whose anchor stands at position a stands
    at position a + d."""
    return torch.nn.functional.pad(depths(ancestors_BNN), (1, 0))


def check(proposal: Proposal, *, replacement: bool = False) -> None:
    """Raise ValueError that names the first fault. Reads values on the host: for tests and debugging.

    `replacement` says that siblings were drawn independently, so that two of them may be equal.
    """
    tokens_BN, parents_BN, valid_BN, q_BPV = proposal.tokens_BN, proposal.parents_BN, proposal.valid_BN, proposal.q_BPV
    B, N = tokens_BN.shape
    for name, tensor, dtype in (
        ("tokens", tokens_BN, torch.long),
        ("parents", parents_BN, torch.long),
        ("valid", valid_BN, torch.bool),
    ):
        if tensor is not None and (tensor.shape != (B, N) or tensor.dtype != dtype):
            raise ValueError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}, wanted {dtype} {(B, N)}")
    exists_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if valid_BN is None else valid_BN
    index_N = torch.arange(N, device=tokens_BN.device)
    _refuse((parents_BN >= index_N) | (parents_BN < -1), "has a parent that is neither the anchor (-1) nor an earlier node")
    if not replacement:
        same_BNN = (parents_BN[:, :, None] == parents_BN[:, None]) & (tokens_BN[:, :, None] == tokens_BN[:, None])
        earlier_BNN = same_BNN & exists_BN[:, None] & (index_N < index_N[:, None])
        _refuse(earlier_BNN.any(-1) & exists_BN, "says the same token as a sibling before it")
    if q_BPV is not None:
        _check_draws(q_BPV, tokens_BN, parents_BN, exists_BN)


def _check_draws(q_BPV: Tensor, tokens_BN: Tensor, parents_BN: Tensor, exists_BN: Tensor) -> None:
    B, N = tokens_BN.shape
    if q_BPV.dim() != 3 or q_BPV.shape[:2] != (B, N + 1):
        raise ValueError(f"q has shape {tuple(q_BPV.shape)}, wanted a row for each of [{B}, {N + 1}] places")
    q_BNV = q_BPV.gather(1, (parents_BN + 1)[..., None].expand(B, N, q_BPV.shape[-1])).double()
    _refuse(exists_BN & ((q_BNV < 0).any(-1) | ((q_BNV.sum(-1) - 1).abs() > 1e-3)), "was drawn from a q that is no distribution")
    _refuse(exists_BN & (q_BNV.gather(2, tokens_BN[..., None])[..., 0] <= 0), "says a token that its q excludes")


def _refuse(fault_BN: Tensor, words: str) -> None:
    found = fault_BN.nonzero()
    if len(found):
        b, n = found[0].tolist()
        raise ValueError(f"node {n} of row {b} {words}")
