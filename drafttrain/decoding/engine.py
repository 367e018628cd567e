"""The decoding loop: propose -> target reads the drafts -> verify -> commit, for ragged batches.

Every row has its own length. Keys and values are written at each row's own offset and read under each row's own mask, so
nothing is ever re-aligned, and the output is that of plain decoding token for token: a position's token is a function of the
target's logits there (its argmax, or the inverse distribution function at the row's own random number for that position), and
a draft is kept exactly where it equals that token. Plain decoding is the same loop with no drafts.

Letters: B rows of the batch, R rows admitted now, K drafts, M slots, T tokens read in a pass, P prompt tokens, A taps, D width.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.decoding.propose import Proposer
from drafttrain.decoding.sampling import Sampling, choose_tokens, stream_of
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Features, Request, Rollout

EXTENT_MULTIPLE = 64
"""Keys are read in whole blocks of slots, so that shapes repeat."""


def generate(
    target: Target,
    requests: Sequence[Request],
    *,
    proposer: Proposer | None = None,
    sampling: Sampling = Sampling(),
    slots: int = 16,
    taps: tuple[int, ...] = (),
    keep_features: bool = False,
    overrun: int = 0,
) -> Iterator[Rollout]:
    """Answer prompts, at most `slots` at once; a finished row's slot takes the next prompt. Yields in order of completion.

    `keep_features` returns taps (of layers `taps`) and final states of every row the target read. `overrun` goes on that many
    tokens behind each end (plain decoding only), so that a simulation can score drafts that reach past it.
    """
    if overrun and proposer is not None:
        raise ValueError("overrun is for plain decoding")
    if proposer is not None and keep_features and taps != proposer.taps:
        raise ValueError("one pass hands out one set of taps")
    for request in requests:
        _check(target, request, slots)
    if requests:
        yield from _Loop(
            target, requests, proposer, sampling, slots, taps if proposer is None else proposer.taps, keep_features, overrun
        ).run()


def _check(target: Target, request: Request, slots: int) -> None:
    room = target.max_positions - len(request.ids)
    if not request.ids or request.limit < 1 or slots < 1:
        raise UserError(
            f"prompt {request.key} has {len(request.ids)} tokens and a limit of {request.limit} with {slots} slots; all must be at least 1."
        )
    if room < request.limit:
        raise UserError(
            f"prompt {request.key} has {len(request.ids)} tokens, which leaves {max(room, 0)} of the target's {target.max_positions} positions for "
            f"an answer of up to {request.limit}; shorten the prompt, or lower the longest answer (max_tokens of the recipe's section)."
        )


@dataclass
class _Row:
    """What the host knows of one row."""

    request: Request
    ends: frozenset[int]
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    cut: int = 0
    stopped: bool = False
    ended: bool = False

    def take(self, tokens: list[int]) -> None:
        """Emit verified tokens up to an end of turn or the limit; the rest is cut."""
        for i, token in enumerate(tokens):
            self.emitted.append(token)
            self.stopped = token in self.ends
            if self.stopped or len(self.emitted) == self.request.limit:
                self.ended, self.cut = True, len(tokens) - i - 1
                return


class _Loop:
    def __init__(self, target, requests, proposer, sampling, slots, taps, keep_features, overrun):
        self.target, self.proposer, self.sampling = target, proposer, sampling
        self.taps, self.keep, self.overrun = taps, keep_features, overrun
        self.drafts = proposer.drafts if proposer else 0
        self.waiting = deque(requests)
        batch = min(slots, len(requests))
        longest = max(len(r.ids) + r.limit for r in requests) + self.drafts + 1 + overrun
        self.capacity = -(-longest // EXTENT_MULTIPLE) * EXTENT_MULTIPLE
        self.rows: list[_Row | None] = [None] * batch
        self.cache = target.new_cache(batch, self.capacity)
        self.tokens_BM = torch.zeros(batch, self.capacity, dtype=torch.long, device=target.device)
        self.length_B = torch.zeros(
            batch, dtype=torch.long, device=target.device
        )  # tokens the target has read; tokens[length] is the anchor
        self.stream_B = torch.zeros(batch, dtype=torch.long, device=target.device)
        self.features: Features | None = None
        if proposer:
            proposer.begin(batch, self.capacity)

    def run(self) -> Iterator[Rollout]:
        while self.waiting or any(self.rows):
            free = [b for b, row in enumerate(self.rows) if row is None]
            # Prefilling interrupts everybody. A GPU waits until several rows can share one; a CPU is busy with any, and idle rows cost.
            enough = len(self.rows) // 8 if self.target.device.type == "cuda" else 1
            if self.waiting and len(free) >= max(1, min(len(self.waiting), enough)):
                self._admit(free[: len(self.waiting)])
                yield from self._finished()
                continue
            if not self.waiting and len(free) * 4 >= len(self.rows) and len(self.rows) > 1:
                self._select([b for b, row in enumerate(self.rows) if row is not None])
            self._round()
            yield from self._finished()

    # ---- admission -----------------------------------------------------------------------------------------------------

    def _admit(self, free: list[int]) -> None:
        """Prefill the next prompts into free rows, right-padded; what is written behind a row's length is overwritten later."""
        device = self.target.device
        requests = [self.waiting.popleft() for _ in free]
        counts = [len(r.ids) for r in requests]
        P = max(counts)
        ids_RP = torch.zeros(len(free), P, dtype=torch.long)
        for r, request in enumerate(requests):
            ids_RP[r, : counts[r]] = torch.tensor(request.ids)
        ids_RP, counts_R, rows_R = ids_RP.to(device), torch.tensor(counts, device=device), torch.tensor(free, device=device)
        streams_R = torch.tensor([stream_of(r.key, self.sampling.seed) for r in requests], device=device)
        features = self._read(ids_RP, torch.zeros_like(counts_R), P, rows_R)
        last_R1D = features.final_BTD.gather(1, (counts_R - 1)[:, None, None].expand(-1, 1, features.final_BTD.shape[-1]))
        first_R1 = choose_tokens(self.target.logits(last_R1D), self.sampling, streams_R, counts_R[:, None])
        self.tokens_BM[rows_R] = 0
        self.tokens_BM[rows_R, :P] = ids_RP
        self.tokens_BM[rows_R, counts_R] = first_R1[:, 0]
        self.length_B[rows_R], self.stream_B[rows_R] = counts_R, streams_R
        self._store(features, torch.zeros_like(counts_R), rows_R)
        for b, request, token in zip(free, requests, first_R1[:, 0].tolist(), strict=True):
            row = _Row(request, frozenset((*self.target.end_ids, *request.ends)))
            row.take([token])
            self.rows[b] = row
        if self.proposer:
            self.proposer.admit(rows_R, self.tokens_BM[rows_R], counts_R, features.taps_BTAD, self._extent())

    # ---- one round -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _round(self) -> None:
        anchor_B1 = self.tokens_BM.gather(1, self.length_B[:, None])
        if self.proposer:
            drafts_BK = self.proposer.propose(self.tokens_BM, self.length_B)
        else:
            drafts_BK = anchor_B1[:, :0]
        features = self._read(torch.cat([anchor_B1, drafts_BK], dim=1), self.length_B, self._extent())
        position_BT = self.length_B[:, None] + torch.arange(self.drafts + 1, device=self.target.device)
        # What the target says at each position; drafts are kept as far as they say the same.
        said_BT = choose_tokens(self.target.logits(features.final_BTD), self.sampling, self.stream_B, position_BT + 1)
        accepted_B = (drafts_BK == said_BT[:, :-1]).long().cumprod(1).sum(1)
        live_B = torch.tensor([row is not None for row in self.rows], device=self.target.device)
        counts_B = torch.where(live_B, accepted_B + 1, 0)
        self._store(features, self.length_B)
        self.tokens_BM.scatter_(1, position_BT + 1, said_BT)
        self.length_B += counts_B
        said, accepted = said_BT.tolist(), accepted_B.tolist()
        for b, row in enumerate(self.rows):
            if row is not None:
                self._note(row, said[b][: accepted[b] + 1])
        if self.proposer:
            self.proposer.commit(features.taps_BTAD, said_BT, counts_B, self._extent())

    def _note(self, row: _Row, tokens: list[int]) -> None:
        if row.ended:
            row.beyond.extend(tokens)
        else:
            row.accepted.append(len(tokens) - 1)
            row.take(tokens)

    def _finished(self) -> Iterator[Rollout]:
        for b, row in enumerate(self.rows):
            if row is not None and row.ended and len(row.beyond) >= self.overrun:
                self.rows[b] = None
                yield self._rollout(b, row)
        # A free row rests at slot 0, where it can do no harm and keeps no one reading far.
        idle = [b for b, row in enumerate(self.rows) if row is None]
        if idle:
            self.length_B[idle] = 0

    # ---- what the target reads -----------------------------------------------------------------------------------------

    def _read(self, ids_RT: Tensor, start_R: Tensor, extent: int, rows_R: Tensor | None = None) -> Features:
        """The target reads T tokens at slots start..start+T-1 of each row; each sees every slot up to its own."""
        slots_RT = start_R[:, None] + torch.arange(ids_RT.shape[1], device=ids_RT.device)
        keys_RS = torch.arange(extent, device=ids_RT.device).expand(len(ids_RT), -1)
        self.cache.address(slots_RT, extent, rows_R)
        return self.target.read(ids_RT, slots_RT, keys_RS[:, None, :] <= slots_RT[:, :, None], keys_RS, self.taps, self.cache)

    def _extent(self) -> int:
        """Slots that the longest row reaches in this round, in whole blocks."""
        longest = max(len(row.request.ids) + len(row.emitted) + row.cut + len(row.beyond) for row in self.rows if row is not None)
        return min(-(-(longest + self.drafts + 1) // EXTENT_MULTIPLE) * EXTENT_MULTIPLE, self.capacity)

    def _store(self, features: Features, start_R: Tensor, rows_R: Tensor | None = None) -> None:
        if not self.keep:
            return
        if self.features is None:
            shape = (len(self.rows), self.capacity)
            taps, final = features.taps_BTAD, features.final_BTD
            self.features = Features(taps.new_zeros(*shape, *taps.shape[2:]), final.new_zeros(*shape, final.shape[-1]))
        rows = torch.arange(len(self.rows), device=start_R.device) if rows_R is None else rows_R
        slots_RT = start_R[:, None] + torch.arange(features.final_BTD.shape[1], device=start_R.device)
        self.features.taps_BTAD[rows[:, None], slots_RT] = features.taps_BTAD
        self.features.final_BTD[rows[:, None], slots_RT] = features.final_BTD

    def _select(self, keep: list[int]) -> None:
        """Go on with fewer rows once no prompt waits for the others."""
        index = torch.tensor(keep, device=self.target.device)
        self.cache.select(index)
        self.tokens_BM, self.length_B, self.stream_B = self.tokens_BM[index], self.length_B[index], self.stream_B[index]
        if self.features is not None:
            self.features = Features(self.features.taps_BTAD[index], self.features.final_BTD[index])
        self.rows = [self.rows[b] for b in keep]
        if self.proposer:
            self.proposer.select(index)

    def _rollout(self, b: int, row: _Row) -> Rollout:
        ids = torch.tensor((*row.request.ids, *row.emitted))
        rollout = Rollout(
            key=row.request.key, ids=ids, prompt_len=len(row.request.ids), accepted=row.accepted, cut=row.cut, stopped=row.stopped,
            beyond=torch.tensor(row.beyond[: self.overrun], dtype=torch.long),
        )  # fmt: skip
        if self.features is not None:
            rows = len(ids) - 1  # the last token was said, not read
            taps, final = self.features.taps_BTAD[b, : rows + 1].clone(), self.features.final_BTD[b, : rows + 1].clone()
            taps[rows:], final[rows:] = 0, 0
            rollout.taps_TAD, rollout.final_TD = taps.cpu(), final.cpu()
        return rollout
