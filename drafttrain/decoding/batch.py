"""What a batch of rows keeps on the device, and one round of decoding in three stages: draft, check, commit.

Every row has its own length. Keys and values are written at each row's own offset and read under each row's own mask, so nothing is
ever re-aligned. The target reads the anchor and N proposed nodes in one pass: node n at slot length + 1 + n, at the position of its
depth, seeing the context and its own branch. Of a tree the accepted path is then moved to the front of those slots.

No stage asks the device anything, and every buffer keeps its address, so that the stages can be replayed as CUDA graphs
(`drafttrain.decoding.graphs`). Rows in play are the first `width` of the batch.

Letters: B rows in play, R rows admitted now, K greatest depth, N nodes, P places (the anchor and the nodes), T = K+1 rows along a path,
M slots, S slots looked at, A taps, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.decoding.proposer import Proposer
from drafttrain.decoding.recorded import RoundBuffers
from drafttrain.decoding.sampling import Sampling, choose_tokens, stream_of
from drafttrain.decoding.tree import Branched, branched, place_depths
from drafttrain.decoding.verify import Verifier
from drafttrain.target.target import Target
from drafttrain.types import Features, Proposal, Request, Verdict

SMALLEST_BLOCK = 64


def whole_blocks(slots: int) -> int:
    """Slots rounded up, so that shapes repeat: to 64 while they are few, to an eighth of their own size when they are many."""
    block = max(SMALLEST_BLOCK, 2 ** (slots.bit_length() - 4))
    return -(-slots // block) * block


class Batch:
    """`rows` rows of `capacity` slots."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        verify: Verifier,
        sampling: Sampling,
        rows: int,
        capacity: int,
        taps: tuple[int, ...],
        keep_features: bool,
        keep_rounds: bool,
    ):
        self.target, self.proposer, self.verify, self.sampling = target, proposer, verify, sampling
        self.rows, self.capacity, self.width, self.taps, self.keep_features = rows, capacity, rows, taps, keep_features
        self.drafts, self.nodes = (proposer.drafts, proposer.nodes) if proposer else (0, 0)
        whole: Any = dict(dtype=torch.long, device=target.device)
        self.cache = target.new_cache(rows, capacity)
        self.tokens_BM = torch.zeros(rows, capacity, **whole)
        self.length_B = torch.zeros(rows, **whole)
        """Tokens that the target has read; tokens[length] is the anchor."""
        self.stream_B = torch.zeros(rows, **whole)
        self.live_B = torch.zeros(rows, dtype=torch.bool, device=target.device)
        """Rows that hold a prompt; the others rest at slot 0, where they can do no harm."""
        self.said_BX = torch.zeros(rows, self.drafts + 3, **whole)
        """Of the last round: the accepted count, the depth at which drafts were tried, and the K+1 tokens from the anchor on of which
        accepted+1 count."""
        self.features: Features | None = None
        self.keep_rounds = keep_rounds
        self.round_buffers: RoundBuffers | None = None
        """What the last round drafted, if that is kept; from the first prompt on."""
        self._proposal: Proposal | None = None
        self._read: tuple[Features, Tensor] | None = None
        if proposer:
            proposer.begin(rows, capacity)

    # ---- admission -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def admit(self, free: Sequence[int], requests: Sequence[Request], extent: int) -> list[int]:
        """Prefill prompts into free rows, right-padded; what is written behind a row's length is overwritten later.

        Returns the first token of each answer.
        """
        device = self.target.device
        counts = [len(r.ids) for r in requests]
        P = max(counts)
        ids_RP = torch.zeros(len(free), P, dtype=torch.long)
        for r, request in enumerate(requests):
            ids_RP[r, : counts[r]] = torch.tensor(request.ids)
        ids_RP, counts_R, rows_R = ids_RP.to(device), torch.tensor(counts, device=device), torch.tensor(free, device=device)
        streams_R = torch.tensor([stream_of(r.key, self.sampling.seed) for r in requests], device=device)
        slots_RP = torch.arange(P, device=device).expand(len(free), -1)
        self.cache.address(slots_RP, P, rows_R)
        features = self.target.read(
            ids_RP, slots_RP, slots_RP[:, None, :] <= slots_RP[:, :, None], slots_RP, self.taps, self.cache
        )
        last_R1D = features.final_BTD.gather(1, (counts_R - 1)[:, None, None].expand(-1, 1, features.final_BTD.shape[-1]))
        first_R1 = choose_tokens(self.target.logits(last_R1D), self.sampling, streams_R, counts_R[:, None])
        self.tokens_BM[rows_R] = 0
        self.tokens_BM[rows_R, :P] = ids_RP
        self.tokens_BM[rows_R, counts_R] = first_R1[:, 0]
        self.length_B[rows_R], self.stream_B[rows_R], self.live_B[rows_R] = counts_R, streams_R, True
        self._store(features, slots_RP, rows_R)
        if self.keep_rounds and self.round_buffers is None:
            self.round_buffers = RoundBuffers.like(features.final_BTD, self.rows, self.drafts)
        if self.proposer:
            self.proposer.admit(rows_R, self.tokens_BM[rows_R], counts_R, features, extent)
        return first_R1[:, 0].tolist()

    def release(self, rows: Sequence[int]) -> None:
        """These rows hold no prompt any more."""
        index = torch.tensor(rows, device=self.target.device)
        self.length_B[index], self.live_B[index] = 0, False

    # ---- one round -----------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> dict[str, Callable[[int], None]]:
        """The stages of a round in order; each takes the slots that queries look at."""
        stages = {"draft": self._draft, "check": self._check, "commit": self._commit}
        return {name: stage for name, stage in stages.items() if self.proposer or name != "draft"}

    def _draft(self, extent: int) -> None:
        assert self.proposer is not None
        width = self.width
        self._proposal = self.proposer.propose(self.tokens_BM[:width], self.length_B[:width], self.stream_B[:width], extent)

    def _check(self, extent: int) -> None:
        """The target reads the anchor and the nodes; what it would have said is kept."""
        width = self.width
        nothing_BN = self.tokens_BM[:width, :0]
        proposal = self._proposal if self.proposer and self._proposal else Proposal(nothing_BN, nothing_BN)
        length_B, stream_B = self.length_B[:width], self.stream_B[:width]
        anchor_B1 = self.tokens_BM[:width].gather(1, length_B[:, None])
        slots_BP = length_B[:, None] + torch.arange(proposal.tokens_BN.shape[1] + 1, device=length_B.device)
        keys_BS = torch.arange(extent, device=length_B.device).expand(width, -1)
        if self.proposer is None or self.proposer.chain:
            position_BP, visible_BPS = slots_BP, keys_BS[:, None, :] <= slots_BP[:, :, None]
        else:
            proposal = branched(proposal)
            position_BP, visible_BPS, keys_BS = self._branches(proposal, length_B, keys_BS)
        self.cache.address(slots_BP, extent)
        ids_BP = torch.cat([anchor_B1, proposal.tokens_BN], dim=1)
        features = self.target.read(ids_BP, position_BP, visible_BPS, keys_BS, self.taps, self.cache)
        logits_BPV = self.target.logits(features.final_BTD)
        if self.proposer:
            self.proposer.observe(logits_BPV, ids_BP)
        verdict = self.verify(logits_BPV, proposal, self.sampling, stream_B, length_B)
        said_BT = torch.cat([proposal.tokens_BN.gather(1, verdict.path_BK), verdict.said_B[:, None]], dim=1)
        said_BT.scatter_(1, verdict.accepted_B[:, None], verdict.said_B[:, None])
        self.said_BX[:width, 0], self.said_BX[:width, 1] = verdict.accepted_B, _tried(proposal, verdict)
        self.said_BX[:width, 2 : said_BT.shape[1] + 2] = said_BT
        if self.round_buffers is not None:
            self.round_buffers.take(proposal, features.final_BTD)
        self._read = features, verdict.path_BK

    def _branches(self, proposal: Branched, length_B: Tensor, keys_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of the places, what they see, and the positions of the slots, of a tree."""
        depth_BP = place_depths(proposal.seen_BNN)
        number_BS = keys_BS - length_B[:, None] - 1  # which node stands at a slot
        inside_BS = (number_BS >= 0) & (number_BS < self.nodes)
        index_BS = number_BS.clamp(0, self.nodes - 1)
        seen_BPN = torch.nn.functional.pad(proposal.seen_BNN, (0, 0, 1, 0))
        on_branch = seen_BPN.gather(2, index_BS[:, None].expand(-1, self.nodes + 1, -1)) & inside_BS[:, None]
        keys_BS = torch.where(inside_BS, length_B[:, None] + depth_BP.gather(1, index_BS + 1), keys_BS)
        return length_B[:, None] + depth_BP, (number_BS < 0)[:, None] | on_branch, keys_BS

    def _commit(self, extent: int) -> None:
        assert self._read is not None
        width = self.width
        features, path_BK = self._read
        T = path_BK.shape[1] + 1
        length_B, said_BT = self.length_B[:width], self.said_BX[:width, 2 : T + 2]
        slots_BT = length_B[:, None] + torch.arange(T, device=length_B.device)
        if self.proposer and not self.proposer.chain:
            self.cache.move(slots_BT[:, :1] + 1 + path_BK, slots_BT[:, 1:])
            place_BT = torch.nn.functional.pad(path_BK + 1, (1, 0))
            features = Features(*(_take(x, place_BT) for x in (features.taps_BTAD, features.final_BTD)))
        self._store(features, slots_BT, None)
        self.tokens_BM[:width].scatter_(1, slots_BT + 1, said_BT)
        counts_B = torch.where(self.live_B[:width], self.said_BX[:width, 0] + 1, 0)
        length_B += counts_B
        if self.proposer:
            self.proposer.commit(features, said_BT, counts_B, extent)

    def _store(self, features: Features, slots_RT: Tensor, rows_R: Tensor | None) -> None:
        if not self.keep_features:
            return
        if self.features is None:
            shape = (self.rows, self.capacity)
            taps, final = features.taps_BTAD, features.final_BTD
            self.features = Features(taps.new_zeros(*shape, *taps.shape[2:]), final.new_zeros(*shape, final.shape[-1]))
        rows = torch.arange(self.width, device=slots_RT.device) if rows_R is None else rows_R
        self.features.taps_BTAD[rows[:, None], slots_RT] = features.taps_BTAD
        self.features.final_BTD[rows[:, None], slots_RT] = features.final_BTD

    # ---- rows in play --------------------------------------------------------------------------------------------------

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order: they become the first of the batch."""
        index = torch.tensor(rows, device=self.target.device)
        self.cache.keep(index)
        kept = [self.tokens_BM, self.length_B, self.stream_B, self.live_B]
        if self.features is not None:
            kept += [self.features.taps_BTAD, self.features.final_BTD]
        for buffer in kept:
            buffer[: len(rows)] = buffer[index]
        self.width = len(rows)
        if self.proposer:
            self.proposer.keep(index)

    def clear(self, width: int) -> None:
        """No row holds a prompt; the first `width` are in play."""
        self.cache.widen()
        if self.proposer:
            self.proposer.widen()
        self.length_B.zero_()
        self.live_B.zero_()
        self.width = self.rows
        if width < self.rows:
            self.keep(range(width))


def _tried(proposal: Proposal, verdict: Verdict) -> Tensor:
    """The accepted count, and one more where a draft stood behind the last accepted one [B]."""
    before_B1 = (verdict.accepted_B - 1)[:, None]
    if not proposal.tokens_BN.shape[1]:
        return verdict.accepted_B
    last_B1 = torch.where(before_B1 < 0, -1, verdict.path_BK.gather(1, before_B1.clamp(min=0)))
    behind_BN = proposal.parents_BN == last_B1
    if proposal.valid_BN is not None:
        behind_BN = behind_BN & proposal.valid_BN
    return verdict.accepted_B + behind_BN.any(1)


def _take(x_BPX: Tensor, place_BT: Tensor) -> Tensor:
    """Rows of the places, [B, T, ...]."""
    return x_BPX[torch.arange(len(x_BPX), device=x_BPX.device)[:, None], place_BT]
