"""The decoding loop: propose -> target reads the drafts -> verify -> commit, for ragged batches with continuous refill.

Greedy, or with the verifier `match`, the output is that of plain decoding token for token: a position's token is a function of the
target's logits there (its argmax, or the inverse distribution function at the row's own random number for that position), and a draft is
kept exactly where it equals that token. Other verifiers keep the distribution, not the tokens. Plain decoding is the same loop with no drafts.

`1 + sum(accepted + 1) - cut = tokens emitted`: the first token of an answer comes from the prefill.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from drafttrain.decoding.batch import Batch, whole_blocks
from drafttrain.decoding.graphs import Rounds, StageClock
from drafttrain.decoding.measure import Decoded
from drafttrain.decoding.proposer import Proposer
from drafttrain.decoding.recorded import RowRound, draft_rounds
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.verify import Match, Verifier
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout


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
    """Answer prompts with an engine made for them; see `Engine.generate`."""
    engine = Engine(target, proposer=proposer, sampling=sampling, slots=slots, taps=taps, keep_features=keep_features)
    yield from engine.generate(requests, overrun=overrun)


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


OVERLAP_FROM = 64
"""Rows from which noting a round takes the host long enough to let a GPU go on meanwhile. It costs every answer one round."""


@dataclass
class _Row:
    """What the host knows of one row."""

    request: Request
    ends: frozenset[int]
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)
    rounds: list[RowRound] = field(default_factory=list)
    """Where they are kept, those up to the answer's end."""
    verified: int = 0
    cut: int = 0
    stopped: bool = False
    ended: bool = False

    @property
    def read(self) -> int:
        """Tokens that the target has read: all but the anchor."""
        return len(self.request.ids) + self.verified - 1

    def note(self, tokens: list[int], tried: int) -> None:
        """Verified tokens of a round, and the depth at which drafts were tried."""
        if self.ended:
            self.verified += len(tokens)
            self.beyond.extend(tokens)
        else:
            self.accepted.append(len(tokens) - 1)
            self.tried.append(tried)
            self.take(tokens)

    def take(self, tokens: list[int]) -> None:
        """Emit verified tokens up to an end of turn or the limit; the rest is cut."""
        self.verified += len(tokens)
        for i, token in enumerate(tokens):
            self.emitted.append(token)
            self.stopped = token in self.ends
            if self.stopped or len(self.emitted) == self.request.limit:
                self.ended, self.cut = True, len(tokens) - i - 1
                return


class Engine:
    """Decodes for one target. Buffers and CUDA graphs are kept from call to call."""

    def __init__(
        self,
        target: Target,
        *,
        proposer: Proposer | None = None,
        verify: Verifier | None = None,
        sampling: Sampling = Sampling(),
        slots: int = 16,
        taps: tuple[int, ...] = (),
        keep_features: bool = False,
        keep_rounds: bool = False,
        graphs: bool = True,
        debug: bool = False,
    ):
        """
        Args:
            verify: what keeps drafts; None keeps those that say what the target says.
            slots: rows that decode at the same time.
            taps: layers whose outputs are kept, without a proposer; a proposer says itself which it reads.
            keep_features: hand out taps and final states of every row the target read.
            keep_rounds: hand out what every round drafted and the target's final states behind it (chains only).
            graphs: replay rounds as CUDA graphs where the target is on a GPU.
            debug: after every round, hold the batch's lengths and tokens, and the drafter's lengths, against what the host knows; slow.

        Raises:
            UserError: rounds are to be kept, but the proposer drafts trees.
        """
        if proposer is not None and keep_features and taps != proposer.taps:
            raise ValueError("one pass hands out one set of taps")
        if keep_rounds and proposer is not None and not proposer.chain:
            raise UserError(
                f"rounds are to be kept (keep_rounds), but {type(proposer).__name__} drafts trees of {proposer.nodes} nodes, of which only "
                "chains are kept so far; draft a chain."
            )
        self.target, self.proposer, self.sampling, self.slots = target, proposer, sampling, slots
        self.verify = verify or (Match(proposer.drafts, proposer.chain) if proposer else Match(0, chain=True))
        self.taps, self.keep_features = taps if proposer is None else proposer.taps, keep_features
        self.use_graphs, self.debug, self.keep_rounds = graphs, debug, keep_rounds
        self.clock: StageClock | None = None
        """Set one to have the stages of every round timed."""
        self.rows: list[_Row | None] = []
        self._rounds: Rounds | None = None
        # What a round may touch behind a row's length: the anchor, the nodes, and what the proposer steps.
        self._ahead = 1 + (max(proposer.nodes, proposer.reach) if proposer else 0)
        self._advance = 1 + (proposer.drafts if proposer else 0)
        """Most tokens that a round commits in a row."""
        self._overlap_from = OVERLAP_FROM if target.device.type == "cuda" else None

    @property
    def graphs_refused(self) -> str | None:
        """Why rounds could not be recorded as graphs; None where they could, or were not asked to be."""
        return self._rounds.refused if self._rounds else None

    def generate(self, requests: Sequence[Request], overrun: int = 0) -> Iterator[Rollout]:
        """Answer prompts, at most `slots` at once; a finished row's slot takes the next prompt. Yields in order of completion.

        The longest answers begin first, among equals the shortest prompts: so rows end together, and neighbours are padded little.
        `overrun` goes on that many tokens behind each end (plain decoding only), so that a simulation can score drafts that reach past it.

        Raises:
            UserError: a prompt that does not fit the target, before anything is decoded.
        """
        if overrun and self.proposer is not None:
            raise ValueError("overrun is for plain decoding")
        for request in requests:
            _check(self.target, request, self.slots)
        if not requests:
            return
        waiting = deque(sorted(requests, key=lambda r: (-r.limit, len(r.ids))))
        batch = self._begin(requests, overrun)
        while waiting or any(row is not None for row in self.rows):
            free = [b for b, row in enumerate(self.rows) if row is None]
            # Prefilling interrupts everybody. A GPU waits until several rows can share one; a CPU is busy with any, and idle rows cost.
            enough = len(self.rows) // 8 if self.target.device.type == "cuda" else 1
            admits = bool(waiting) and len(free) >= max(1, min(len(waiting), enough))
            narrows = not waiting and self._narrows(batch)
            if (admits or narrows) and self._rounds is not None and self._rounds.in_flight:
                self._note_round()  # rows are about to change places, and what is on its way is of the old ones
            elif admits:
                self._admit(batch, free[: len(waiting)], waiting)
            else:
                if narrows:
                    self._narrow(batch)
                self._round()
            yield from self._finished(batch, overrun)

    def record(self, requests: Sequence[Request]) -> None:
        """Have every round recorded that answering these prompts one at a time may need, buffers that suffice, and each prompt read once,
        since libraries plan anew for every length: then none of it happens while somebody times them. Nothing to do where no graphs are used.

        Raises:
            UserError: a prompt that does not fit the target.
        """
        if not self.graphed:
            return
        longest = max(requests, key=lambda r: len(r.ids) + r.limit)
        list(self.generate([longest]))
        assert self._rounds is not None
        for extent in sorted({self.extent(len(r.ids) + said) for r in requests for said in range(r.limit)}):
            self._rounds.record(min(extent, self._rounds.batch.capacity))
        for request in requests:
            list(self.generate([replace(request, limit=1)]))

    @property
    def rounds_known(self) -> int:
        """How many shapes of rounds were met and recorded so far."""
        return self._rounds.known if self._rounds else 0

    def extent(self, read: int) -> int:
        """Slots that a round looks at, if the buffers hold as many, where the target has read `read` tokens in the longest row: what a
        graph is recorded for."""
        return whole_blocks(read + 1 + self._ahead)

    # ---- rows ----------------------------------------------------------------------------------------------------------

    def _begin(self, requests: Sequence[Request], overrun: int) -> Batch:
        """Buffers large enough, with no row in use; those of the last call where they will do."""
        width = min(self.slots, len(requests))
        # A row that has ended may be in one more round before the host knows.
        capacity = whole_blocks(max(len(r.ids) + r.limit for r in requests) + self._ahead + self._advance + overrun)
        if self._rounds is None or self._rounds.batch.rows < width or self._rounds.batch.capacity < capacity:
            keeps = self.keep_features, self.keep_rounds
            batch = Batch(self.target, self.proposer, self.verify, self.sampling, width, capacity, self.taps, *keeps)
            self._rounds = Rounds(batch, self.use_graphs)
        batch = self._rounds.batch
        while self._rounds.in_flight:  # of a call that nobody read to its end
            self._rounds.collect()
        batch.clear(self._width(batch, width))
        self._rounds.clock = self.clock
        self.rows = [None] * batch.width
        return batch

    def _width(self, batch: Batch, needed: int) -> int:
        """Rows to have in play. A GPU keeps to halves of the batch, since every other number is another graph."""
        if not self.graphed:
            return needed
        width = batch.rows
        while width >= 2 * needed and width % 2 == 0:
            width //= 2
        return width

    @property
    def graphed(self) -> bool:
        """Whether rounds are recorded as CUDA graphs."""
        return self.use_graphs and self.target.device.type == "cuda"

    def _admit(self, batch: Batch, free: list[int], waiting: deque[Request]) -> None:
        requests = [waiting.popleft() for _ in free]
        extent = whole_blocks(max(len(r.ids) for r in requests) + self._ahead)
        for b, request, token in zip(free, requests, batch.admit(free, requests, min(extent, batch.capacity)), strict=True):
            row = _Row(request, frozenset((*self.target.end_ids, *request.ends)))
            row.take([token])
            self.rows[b] = row

    def _round(self) -> None:
        """One round; of many rows, the host notes what the round before it said while the device is busy with this one."""
        rounds = self._rounds
        assert rounds is not None
        longest = max(row.read for row in self.rows if row is not None) + rounds.in_flight * self._advance
        rounds.launch(min(self.extent(longest), rounds.batch.capacity))
        if self._overlap_from is None or rounds.in_flight > 1 or len(self.rows) < self._overlap_from:
            self._note_round()

    def _note_round(self) -> None:
        assert self._rounds is not None
        said = self._rounds.collect()
        kept = []
        for b, (row, (accepted, tried, *tokens)) in enumerate(zip(self.rows, said.rows, strict=True)):
            if row is not None:
                if said.drafted is not None and not row.ended:
                    drafted = said.drafted
                    row.rounds.append(RowRound(accepted, tokens[accepted], drafted.drafted_BX[b], drafted.final_BPD[b]))
                row.note(tokens[: accepted + 1], tried)
                kept.append(accepted)
        if self.proposer is not None:
            self.proposer.heard(kept, said.shape, said.seconds)
        if self.debug and not self._rounds.in_flight:
            self._hold_books(self._rounds.batch)

    def _finished(self, batch: Batch, overrun: int) -> Iterator[Rollout]:
        ended = [b for b, row in enumerate(self.rows) if row is not None and row.ended and len(row.beyond) >= overrun]
        if not ended:
            return
        rollouts = [_rollout(batch, b, self.rows[b], overrun) for b in ended]
        for b in ended:
            self.rows[b] = None
        batch.release(ended)
        yield from rollouts

    def _narrows(self, batch: Batch) -> bool:
        """Whether fewer rows will do, where no prompt waits for the others."""
        live = sum(row is not None for row in self.rows)
        return 0 < self._width(batch, live) < batch.width and live * 4 <= batch.width * 3

    def _narrow(self, batch: Batch) -> None:
        live = [b for b, row in enumerate(self.rows) if row is not None]
        idle = [b for b, row in enumerate(self.rows) if row is None]
        rows = (live + idle)[: self._width(batch, len(live))]
        batch.keep(rows)
        self.rows = [self.rows[b] for b in rows]

    def _hold_books(self, batch: Batch) -> None:
        """Raises RuntimeError where a length on the device is not the row's committed length."""
        lengths = [0 if row is None else row.read for row in self.rows]
        found = batch.length_B[: batch.width].tolist()
        if found != lengths:
            raise RuntimeError(f"rows have read {lengths} tokens, but the batch holds {found}; the engine's records are wrong")
        for row, tokens in zip(self.rows, batch.tokens_BM[: batch.width].tolist(), strict=True):
            said = [] if row is None else [*row.request.ids, *row.emitted]
            if tokens[: len(said)] != said:
                raise RuntimeError(f"prompt {row and row.request.key}: the batch holds other tokens than were emitted")
        for state in [member.state for member in getattr(self.proposer, "members", [self.proposer]) if hasattr(member, "state")]:
            held = [n for n, row in zip(state.length_B[: batch.width].tolist(), self.rows, strict=True) if row is not None]
            if held != [row.read for row in self.rows if row is not None]:
                raise RuntimeError(f"the drafter holds {held} rows, but the target has read {lengths}")


def _rollout(batch: Batch, b: int, row: _Row | None, overrun: int) -> Rollout:
    assert row is not None
    ids = torch.tensor((*row.request.ids, *row.emitted))
    rollout = Decoded(
        key=row.request.key, ids=ids, prompt_len=len(row.request.ids), accepted=row.accepted, cut=row.cut, stopped=row.stopped,
        beyond=torch.tensor(row.beyond[:overrun], dtype=torch.long), tried=row.tried,
    )  # fmt: skip
    if batch.round_buffers is not None:
        rollout.rounds = draft_rounds(
            row.rounds, batch.round_buffers, ids, rollout.prompt_len, row.request.limit, tuple(row.ends)
        )
    if batch.features is not None:
        rows = len(ids) - 1  # the last token was said, not read
        taps, final = batch.features.taps_BTAD[b, : rows + 1].clone(), batch.features.final_BTD[b, : rows + 1].clone()
        taps[rows:], final[rows:] = 0, 0
        rollout.taps_TAD, rollout.final_TD = taps.cpu(), final.cpu()
    return rollout
