"""Drafts that were really made, replayed: what a drafter learns on its own policy (Draft-OPD, arXiv 2605.29343).

A round of speculative decoding has an anchor A, drafts d_1 .. d_K of which r were accepted, and the rows of the target that verified them. It
becomes one drafting row, which reads [x_A, d_1, ..., d_{K-1}]. Since d_1 .. d_r are the text, one pass gives the states of both streams:

    accepted (0)   depths 1 .. min(r+1, kept)    label x_{A+k}, the verified token
    rejected (1)   depths r+1 .. within          label d_k, the drafted token

Depth r+1 stands in both, with the same state and teacher. The teacher of depth k is place k-1 of the round: the target's row behind
x_A, d_1, ..., d_{k-1}, which for k >= r+2 stands in no text. Text and features are those of the rollout; nothing is read again.

Shapes: G rollouts, B packed rows, T tokens, A taps, D target width, V rows of branches, R rounds, K depths, Q drafting rows, N elements, M teacher
rows, S streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafttrain.data.packing import pack
from drafttrain.layouts import padded
from drafttrain.types import DraftRounds, Features, Layout, Rollout, Sequences


@dataclass(frozen=True)
class ReplayLayout(Layout):
    """The elements of replayed rounds, of which depth k is fed d_{k-1} and not the text."""

    stream_N: Tensor
    """0 accepted, 1 rejected; int64."""
    fed_BQK: Tensor
    """Target ids that the drafting rows read just before depths 1, 2, ...: the anchor, then the drafts; 0 where there is none."""

    def tokens(self, ids_BT: Tensor, step: int) -> Tensor:
        return self.fed_BQK[..., step]

    def prev(self, ids_BT: Tensor) -> Tensor:
        return self.fed_BQK.flatten(0, 1)[self.draft_N, self.depth_N - 1]

    def streams(self) -> Tensor:
        return self.stream_N


@dataclass(frozen=True)
class Packed:
    """Rollouts side by side in rows of equal length, as a chat of a packed row each."""

    sequences: Sequences
    """Answers are supervised."""
    features: Features
    """As the rollouts recorded them; 0 in padding. Branches: every place of every round, rollout after rollout."""
    row_G: Tensor
    """Packed row of each rollout, int64."""
    offset_G: Tensor
    """Where in its row it begins."""
    length_G: Tensor
    """Its tokens, as many as fit."""
    branch_G: Tensor
    """The first of its rows of branches."""


def pack_rollouts(rollouts: Sequence[Rollout], length: int, multiple: int = 1, like: Features | None = None) -> Packed:
    """The rollouts in their order, each in the first row of `length` tokens that has room; longer ones are cut at the end.

    They hold features. There are a `multiple` of rows, the last ones empty, and at least one. Where there are no rollouts, features are 0 and
    as wide as those of `like`, in its type (of no width without it).
    """
    lengths = [min(len(rollout.ids), length) for rollout in rollouts]
    places = _places(lengths, length)
    rows = 1 + max((row for row, _ in places), default=0)
    shape = (-(-rows // multiple) * multiple, length)
    ids_BT, position_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    supervised_BT, document_BT = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1, dtype=torch.int64)
    features = _blank(rollouts, shape, like)
    for number, (rollout, (b, begin), count) in enumerate(zip(rollouts, places, lengths, strict=True)):
        assert rollout.taps_TAD is not None and rollout.final_TD is not None, "the engine keeps features where it is asked to"
        span = slice(begin, begin + count)
        ids_BT[b, span] = rollout.ids[:count]
        position_BT[b, span] = torch.arange(count)
        supervised_BT[b, begin + rollout.prompt_len : begin + count] = True
        document_BT[b, span] = number
        features.taps_BTAD[b, span] = rollout.taps_TAD[:count]
        features.final_BTD[b, span] = rollout.final_TD[:count]
    row_G, offset_G = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
    branches = [0 if r.rounds is None else r.rounds.final_RPD.shape[:2].numel() for r in rollouts]
    branch_G = torch.tensor([0, *branches], dtype=torch.int64).cumsum(0)[:-1]
    sequences = Sequences(ids_BT, supervised_BT, position_BT, document_BT)
    return Packed(sequences, features, row_G, offset_G, torch.tensor(lengths, dtype=torch.int64), branch_G)


def round_anchors(packed: Packed, rollouts: Sequence[Rollout]) -> Tensor:
    """[B, T]: where the rounds of packed rollouts began to draft, as far as the texts reach."""
    keep_BT = torch.zeros_like(packed.sequences.supervised_BT)
    for rollout, row, offset, length in zip(rollouts, packed.row_G, packed.offset_G, packed.length_G, strict=True):
        assert rollout.rounds is not None, "the engine keeps rounds where it is asked to"
        anchor_R = rollout.rounds.anchor_R
        keep_BT[row, offset + anchor_R[anchor_R < length]] = True
    return keep_BT


def _places(lengths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """(row, where it begins) of every rollout: the first row with room."""
    places = [(0, 0)] * len(lengths)
    for row, items in enumerate(pack(lengths, room, open_rows=len(lengths))):
        begin = 0
        for item in items:
            places[item] = row, begin
            begin += lengths[item]
    return places


def _blank(rollouts: Sequence[Rollout], shape: tuple[int, int], like: Features | None) -> Features:
    """Features of no token, and the rows of all branches."""
    rounds = [rollout.rounds.final_RPD.flatten(0, 1) for rollout in rollouts if rollout.rounds is not None]
    branch_VD = torch.cat(rounds) if rounds else None
    if rollouts:
        taps, final = rollouts[0].taps_TAD, rollouts[0].final_TD
        assert taps is not None and final is not None, "the engine keeps features where it is asked to"
    elif like is not None:
        taps, final = like.taps_BTAD, like.final_BTD
    else:
        taps, final = torch.empty(0, 0, 0), torch.empty(0, 0)
    return Features(taps.new_zeros(*shape, *taps.shape[-2:]), final.new_zeros(*shape, final.shape[-1]), branch_VD)


@dataclass(frozen=True)
class _Rounds:
    """Rounds of one or more rollouts, with all that they could teach."""

    row_R: Tensor
    anchor_R: Tensor
    """Place of the anchor in its packed row."""
    fed_RK: Tensor
    teacher_RK: Tensor
    """Row of the branches."""
    label_SRK: Tensor
    there_SRK: Tensor
    """Whether the element exists."""

    @staticmethod
    def of(rounds: Sequence["_Rounds"], depth: int) -> "_Rounds":
        """All of them, ordered by packed row."""
        none_R, none_RK, none_SRK = (torch.zeros(shape, dtype=torch.int64) for shape in ((0,), (0, depth), (2, 0, depth)))
        row_R, order_R = torch.cat([none_R, *(r.row_R for r in rounds)]).sort(stable=True)
        return _Rounds(
            row_R=row_R,
            anchor_R=torch.cat([none_R, *(r.anchor_R for r in rounds)])[order_R],
            fed_RK=torch.cat([none_RK, *(r.fed_RK for r in rounds)])[order_R],
            teacher_RK=torch.cat([none_RK, *(r.teacher_RK for r in rounds)])[order_R],
            label_SRK=torch.cat([none_SRK, *(r.label_SRK for r in rounds)], dim=1)[:, order_R],
            there_SRK=torch.cat([none_SRK.bool(), *(r.there_SRK for r in rounds)], dim=1)[:, order_R],
        )


def replay_layout(
    packed: Packed, rollouts: Sequence[Rollout], depth: int, speakable_V: Tensor, *, streams: tuple[bool, bool] = (True, True),
    first_rejection_only: bool = False, least_queries: int = 0,
) -> ReplayLayout:  # fmt: skip
    """What the recorded rounds of packed rollouts teach, down to `depth`; stream after stream, there depth after depth.

    `streams` says whether the accepted and the rejected one are scored. `first_rejection_only` keeps of the accepted stream the token that the
    target put in the place of a rejected one (Online Speculative Decoding, Liu et al. 2023, arXiv 2310.07177). Rounds whose text reaches past a
    cut are left out, and so are labels outside the draft vocabulary, which are counted. A round without an element does not draft. There are
    places for `least_queries` drafting rows at least.
    """
    parts = [
        _rounds_of(rollout.ids, rollout.rounds, depth, first_rejection_only, *place)
        for rollout, *place in zip(
            rollouts, *(x.tolist() for x in (packed.row_G, packed.offset_G, packed.length_G, packed.branch_G)), strict=True
        )
        if rollout.rounds is not None
    ]
    rounds = _Rounds.of(parts, depth)
    there_SRK = rounds.there_SRK & torch.tensor(streams)[:, None, None]
    said_SRK = there_SRK & speakable_V[rounds.label_SRK]
    drafts_R = said_SRK.any(dim=2).any(dim=0)
    return _layout(packed, rounds, drafts_R, said_SRK, (there_SRK & ~said_SRK).sum((0, 1)), least_queries)


def _rounds_of(
    ids: Tensor, rounds: DraftRounds, depth: int, first_rejection_only: bool, row: int, offset: int, length: int, branch: int
) -> _Rounds:
    """The rounds of one rollout, whose text begins at `offset` of a packed row."""
    R, K = rounds.drafted_RK.shape
    depth_K, round_R1 = torch.arange(1, depth + 1), torch.arange(R)[:, None]
    anchor_R1, accepted_R1, kept_R1 = (x[:, None] for x in (rounds.anchor_R, rounds.accepted_R, rounds.kept_R))
    accepted_RK = (depth_K <= accepted_R1 + 1) & (depth_K <= kept_R1)
    if first_rejection_only:
        accepted_RK &= (depth_K == accepted_R1 + 1) & (accepted_R1 < rounds.proposed_R[:, None])
    rejected_RK = (depth_K > accepted_R1) & (depth_K <= rounds.within_R[:, None])
    drafted_RK = pad(rounds.drafted_RK, (0, max(depth - K, 0)), value=-1)[:, :depth].clamp(min=0)
    verified_RK = ids[(anchor_R1 + depth_K).clamp(max=len(ids) - 1)]
    return _Rounds(
        row_R=torch.full((R,), row),
        anchor_R=offset + rounds.anchor_R,
        fed_RK=torch.cat([ids[rounds.anchor_R][:, None], drafted_RK[:, :-1]], dim=1),
        teacher_RK=branch + round_R1 * rounds.final_RPD.shape[1] + depth_K - 1,
        label_SRK=torch.stack([verified_RK, drafted_RK]),
        there_SRK=torch.stack([accepted_RK, rejected_RK]) & (anchor_R1 + kept_R1 < length),
    )


def _layout(
    packed: Packed, rounds: _Rounds, drafts_R: Tensor, said_SRK: Tensor, dropped_K: Tensor, least_queries: int
) -> ReplayLayout:
    """The elements `said`, of the rounds that draft."""
    B, T = packed.sequences.ids_BT.shape
    depth = len(dropped_K)
    row_R, anchor_R = rounds.row_R[drafts_R], rounds.anchor_R[drafts_R]
    count_B = torch.bincount(row_R, minlength=B)
    Q = padded(max(1, least_queries, int(count_B.max())))
    draft_R = row_R * Q + torch.arange(len(row_R)) - (count_B.cumsum(0) - count_B)[row_R]
    query_BQ, fed_BQK = torch.full((B, Q), -1), torch.zeros(B, Q, depth, dtype=torch.int64)
    query_BQ.view(-1)[draft_R] = anchor_R - 1
    fed_BQK.view(-1, depth)[draft_R] = rounds.fed_RK[drafts_R]
    stream_N, k_N, r_N = said_SRK[:, drafts_R].transpose(1, 2).nonzero(as_tuple=True)
    draft_N = draft_R[r_N]
    pool_M, teacher_N = torch.unique(B * T + rounds.teacher_RK[drafts_R][r_N, k_N], return_inverse=True)
    return ReplayLayout(
        anchor_N=row_R[r_N] * T + anchor_R[r_N],
        depth_N=k_N + 1,
        label_N=rounds.label_SRK[:, drafts_R][stream_N, r_N, k_N],
        teacher_N=teacher_N,
        draft_N=draft_N,
        pool_M=pool_M,
        query_BQ=query_BQ,
        cell_N=k_N * B * Q + draft_N,
        dropped_K=dropped_K,
        stream_N=stream_N,
        fed_BQK=fed_BQK,
    )
