"""Several proposers for one target: all of their drafts under one anchor, or for each row those of the surer one.

This is how drafters that were trained for different kinds of text work together (TAPS: merged trees, and routing by confidence), and how
a lookup in the row's own text is grafted onto a drafter's tree (RASD). All of them read what the target accepts.

Letters: B rows in play, R rows admitted now, K greatest depth, N nodes, M slots, T rows read by the target, A taps, D target width,
V vocabulary, P places.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.decoding.merge import merged
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.proposer import Proposer
from drafttrain.types import Features, Proposal


class _Several(Proposer):
    """Hands everything on to each member; a target's taps to those who read them."""

    def __init__(self, members: Sequence[Proposer]):
        if len(members) < 2:
            raise ValueError("there is nothing to choose from")
        self.members = tuple(members)
        self.drafts = max(member.drafts for member in members)
        self.taps = tuple(sorted({tap for member in members for tap in member.taps}))

    @property
    def reach(self) -> int:
        return max(member.reach for member in self.members)

    def begin(self, batch: int, capacity: int) -> None:
        for member in self.members:
            member.begin(batch, capacity)

    def forget_texts(self) -> None:
        for member in self.members:
            member.forget_texts()

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, features: Features, extent: int) -> None:
        for member in self.members:
            member.admit(rows_R, tokens_RM, counts_R, self._features_of(member, features), extent)

    def commit(self, features: Features, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        for member in self.members:
            member.commit(self._features_of(member, features), tokens_BT, counts_B, extent)

    def observe(self, logits_BPV: Tensor, ids_BP: Tensor) -> None:
        for member in self.members:
            member.observe(logits_BPV, ids_BP)

    def keep(self, rows: Tensor) -> None:
        for member in self.members:
            member.keep(rows)

    def widen(self) -> None:
        for member in self.members:
            member.widen()

    def _features_of(self, member: Proposer, features: Features) -> Features:
        if member.taps == self.taps:
            return features
        parts = [features.taps_BTAD[:, :, self.taps.index(tap)] for tap in member.taps]
        return Features(torch.stack(parts, dim=2) if parts else features.taps_BTAD[:, :, :0], features.final_BTD)


class MergedProposer(_Several):
    """All members' drafts under one anchor, equal siblings merged (TAPS; RASD, Quan et al. 2025, arXiv 2503.03434)."""

    @property
    def nodes(self) -> int:
        return sum(member.nodes for member in self.members)

    @property
    def chain(self) -> bool:
        return False

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        first, *others = self.members
        proposal = first.propose(tokens_BM, length_B, stream_B, extent)
        for member in others:
            proposal = merged(proposal, member.propose(tokens_BM, length_B, stream_B, extent), member.drafts)
        return proposal


class RoutedProposer(_Several):
    """For each row the tree of the member that expects most of its own to be accepted (TAPS: confidence routing)."""

    members: tuple[TreeProposer, ...]

    def __init__(self, members: Sequence[TreeProposer]):
        """The members are equally large and deep, and work out `expected_B`."""
        super().__init__(members)
        if len({(member.nodes, member.drafts) for member in members}) > 1:
            raise ValueError("a row can only be routed between trees of one size")

    @property
    def nodes(self) -> int:
        return self.members[0].nodes

    @property
    def chain(self) -> bool:
        return False

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        proposals = [member.propose(tokens_BM, length_B, stream_B, extent) for member in self.members]
        surest_B = torch.stack([member.expected_B for member in self.members]).argmax(0)
        return Proposal(
            _chosen([p.tokens_BN for p in proposals], surest_B), _chosen([p.parents_BN for p in proposals], surest_B),
            None if proposals[0].valid_BN is None else _chosen([p.valid_BN for p in proposals], surest_B),
        )  # fmt: skip


def _chosen(parts: Sequence[Tensor | None], index_B: Tensor) -> Tensor:
    """Each row of the part that it chose [B, N]."""
    rows_MBN = torch.stack([part for part in parts if part is not None])
    return rows_MBN[index_B, torch.arange(len(index_B), device=index_B.device)]
