"""Micro-batches for training, in windows of one optimizer step each.

    window w  =  rows  start + [w, w+1) * world * accumulate * rows_per_micro_batch   of the endless row plan
    micro-batch a of rank r  =  its slice number  a * world + r

so a window holds the same chats however it is shared out (1 process x 8 accumulations = 8 processes x 1), and a run continues
rightly with another number of processes. What each term of the loss is divided by is known before the first micro-batch of a
window runs, because layouts follow from the data alone: this rank's counts for the whole window come with that first micro-batch.

Shapes: B rows of a micro-batch, T tokens of a row, A taps, D target width.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from drafttrain.data.features import require_feature_dtype
from drafttrain.data.packing import RowPlan
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError
from drafttrain.types import Features, Layout, Sequences

FEATURES = ("online", "stored")


class MakeLayout(Protocol):
    """What to score of some packed rows, of which `numbers` are the seeds: their numbers in the run, so that a draw depends on the row alone."""

    def __call__(self, sequences: Sequences, *, numbers: list[tuple[int, ...]]) -> Layout: ...


@dataclass(frozen=True)
class DataConfig:
    """How the stored chats become batches."""

    features: str = "online"
    """online: the target reads every row inside the training step. stored: what data_prep kept on disk, for this drafter alone."""
    feature_dtype: str = "bfloat16"
    """What features are rounded to, on disk and in the step: bfloat16, or float8_e4m3fn (half the bytes, a scale for each vector)."""
    length: int = 2048
    """Tokens in a packed row; longer chats are cut at the end."""
    rows: int = 1
    """Packed rows in a micro-batch of one process."""
    seed: int = 0
    """Shuffles the chats, one order for each epoch."""
    workers: int = 0
    """Processes that read ahead: 0 (none) or 1; the order is the same."""

    def __post_init__(self):
        if self.features not in FEATURES:
            raise UserError(f"data.features is {self.features!r}, but must be one of {', '.join(FEATURES)}.")
        require_feature_dtype(self.feature_dtype)
        if self.length < 2:
            raise UserError(f"data.length is {self.length}, but a row needs at least 2 tokens.")
        if self.rows < 1:
            raise UserError(f"data.rows is {self.rows}, but a micro-batch needs at least 1 row.")
        if self.seed < 0:
            raise UserError(f"data.seed is {self.seed}, but must be 0 or more.")
        if self.workers not in (0, 1):
            raise UserError(f"data.workers is {self.workers}, but must be 0 or 1: two would change the order of the rows.")


@dataclass(frozen=True)
class Share:
    """Which part of every window is this process's."""

    rank: int = 0
    world: int = 1
    accumulate: int = 1
    """Micro-batches of one process in a window (trainer.accumulate_grad_batches)."""
    rows: int = 1
    """Packed rows in a micro-batch (data.rows)."""

    @property
    def window_rows(self) -> int:
        """Rows of one optimizer step, over all processes."""
        return self.world * self.accumulate * self.rows

    def micro_rows(self, first: int, micro: int) -> range:
        """Row numbers of this rank's micro-batch, in the window that begins with row `first`."""
        begin = first + (micro * self.world + self.rank) * self.rows
        return range(begin, begin + self.rows)


class MicroBatch:
    """What one micro-step reads. Not a dataclass: Lightning and DeepSpeed would take a dataclass apart and cast its tensors."""

    def __init__(
        self,
        sequences: Sequences,
        features: Features | None,
        layout: Layout,
        micro: int,
        last: bool,
        window: dict[str, float] | None,
        following: "MicroBatch | None" = None,
    ):
        self.sequences, self.features, self.layout = sequences, features, layout
        self.micro = micro
        """Number of this micro-batch in its window."""
        self.last = last
        """True for the last micro-batch of a window: the optimizer steps behind it."""
        self.window = window
        """With micro-batch 0: this rank's counts for the whole window (each term, plus `tokens` and `dropped`); else None."""
        self.following = following
        """The next micro-batch, not moved anywhere yet; None but from `LookAhead`."""

    def to(self, device) -> "MicroBatch":
        """The same on a device; features keep their stored type."""
        features = None if self.features is None else self.features.to(device)
        sequences, layout = self.sequences.to(device), self.layout.to(device)
        return MicroBatch(sequences, features, layout, self.micro, self.last, self.window, self.following)

    def pin_memory(self) -> "MicroBatch":
        """The same in page-locked memory, so that copying to a GPU does not wait for the work queued there. DataLoader calls it."""
        features = None if self.features is None else pinned(self.features)
        return MicroBatch(pinned(self.sequences), features, pinned(self.layout), self.micro, self.last, self.window)


def pinned(record):
    """The same record in page-locked memory."""
    fields = (getattr(record, name) for name in record.__dataclass_fields__)
    return type(record)(*(None if x is None else x.pin_memory() for x in fields))


def window_counts(
    sequences: Iterable[Sequences], layouts: Iterable[Layout], counts: Callable[[Layout], dict[str, float]]
) -> dict[str, float]:
    """What the sums of all micro-batches of a window are divided by, and its `tokens` and `dropped` labels."""
    total: dict[str, float] = {"tokens": 0.0, "dropped": 0.0}
    for sequence, layout in zip(sequences, layouts, strict=True):
        total["tokens"] += float((sequence.document_BT >= 0).sum())
        total["dropped"] += float(layout.dropped_K.sum())
        for name, count in counts(layout).items():
            total[name] = total.get(name, 0.0) + float(count)
    return total


class WindowStream(IterableDataset):
    """Endless micro-batches of one rank.

    `layout(sequences, numbers=...) -> Layout` and `counts(layout) -> {term: count}` come from the drafter and the objective.
    `start`: rows that were trained already. `features`: read the stored features along. `fill`: fills a layout up with what counts nothing.
    """

    def __init__(
        self,
        store: TokenStore,
        plan: RowPlan,
        share: Share,
        layout: MakeLayout,
        counts: Callable[[Layout], dict[str, float]],
        start: int = 0,
        features: bool = False,
        fill: Callable[[Layout], Layout] | None = None,
    ):
        self.store, self.plan, self.share = store, plan, share
        self.layout, self.counts, self.fill = layout, counts, fill
        self.start, self.features = start, features

    def __iter__(self) -> Iterator[MicroBatch]:
        first = self.start
        while True:
            yield from self.window(first)
            first += self.share.window_rows

    def window(self, first: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the window that begins with row `first`."""
        share = self.share
        rows = [share.micro_rows(first, micro) for micro in range(share.accumulate)]
        sequences = [self.sequences(row) for row in rows]
        layouts = [self.layout(s, numbers=[(self.plan.seed, g) for g in row]) for s, row in zip(sequences, rows, strict=True)]
        counts = window_counts(sequences, layouts, self.counts)
        if self.fill is not None:
            layouts = [self.fill(layout) for layout in layouts]
        for micro in range(share.accumulate):
            features = self.stored_features(rows[micro]) if self.features else None
            last = micro == share.accumulate - 1
            yield MicroBatch(sequences[micro], features, layouts[micro], micro, last, counts if micro == 0 else None)

    def sequences(self, rows: range) -> Sequences:
        """The packed rows, padded to the plan's length."""
        shape = (len(rows), self.plan.length)
        ids_BT, position_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        supervised_BT, document_BT = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1, dtype=torch.int64)
        for b, row in enumerate(rows):
            for document, (index, span) in enumerate(self._spans(row)):
                chat, length = self.store.chat(index), span.stop - span.start
                ids_BT[b, span] = chat.ids[:length]
                supervised_BT[b, span] = chat.supervised[:length]
                position_BT[b, span] = torch.arange(length)
                document_BT[b, span] = document
        return Sequences(ids_BT, supervised_BT, position_BT, document_BT)

    def stored_features(self, rows: range) -> Features:
        """The features kept by data_prep, laid out like `sequences(rows)`; padding is zero."""
        taps_BTAD = final_BTD = None
        for b, row in enumerate(rows):
            for index, span in self._spans(row):
                kept, length = self.store.chat(index, features=True).features, span.stop - span.start
                assert kept is not None, "TokenStore.require(identity, taps) is asked before training"
                if taps_BTAD is None or final_BTD is None:
                    shape = (len(rows), self.plan.length)
                    taps_BTAD = kept.taps_BTAD.new_zeros(*shape, *kept.taps_BTAD.shape[-2:])
                    final_BTD = kept.final_BTD.new_zeros(*shape, kept.final_BTD.shape[-1])
                taps_BTAD[b, span] = kept.taps_BTAD[:length]
                final_BTD[b, span] = kept.final_BTD[:length]
        assert taps_BTAD is not None and final_BTD is not None, "every row holds a chat"
        return Features(taps_BTAD, final_BTD)

    def _spans(self, row: int) -> Iterator[tuple[int, slice]]:
        """(index in the store, place in the row) of every chat of row g."""
        begin = 0
        for which in self.plan[row]:
            length = int(self.plan.chats.length_N[which])
            yield int(self.plan.chats.which_N[which]), slice(begin, begin + length)
            begin += length


def make_loader(stream: WindowStream, workers: int, pin: bool) -> DataLoader:
    """The stream behind a DataLoader. `pin`: page-locked memory, for a GPU.

    A worker is forked: it inherits the net (for its layouts) without a copy, and touches no GPU.
    """
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=leave_signals if workers else None,
    )


class LookAhead:
    """A loader's micro-batches, each of which knows the one that comes next."""

    def __init__(self, loader: Iterable[MicroBatch]):
        self.loader = loader

    def __iter__(self) -> Iterator[MicroBatch]:
        batches = iter(self.loader)
        batch = next(batches)
        for following in batches:
            batch.following = following
            yield batch
            batch = following
        yield batch


def leave_signals(worker: int) -> None:
    """Launchers, schedulers and terminals signal every process of a job: a worker that died of it would end the training before it saved.
    It ends with the process that it works for."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def plan_arithmetic(plan: RowPlan, share: Share, max_steps: int) -> list[str]:
    """Sentences that say how many tokens a run will see, and what was left out."""
    chats, length, padding = plan.chats, plan.length, plan.padding
    window, processes = share.window_rows * length, "process" if share.world == 1 else "processes"
    seen = max_steps * window * (1 - padding)
    lines = [
        f"tokens/step: {share.world} {processes} x {share.accumulate} accumulations x {share.rows} rows x {length} tokens = {window:,} "
        f"(of which about {padding:.1%} padding)",
        f"{max_steps:,} steps see about {seen:,.0f} tokens = {seen / chats.tokens:.2f} epochs of {len(chats):,} chats, "
        f"{chats.tokens:,} tokens",
    ]
    if chats.cut:
        lines.append(
            f"{chats.cut:,} chats are longer than a row and were cut: {chats.cut_tokens:,} tokens lost, "
            f"{chats.cut_supervised:,} of them supervised"
        )
    if chats.left_out:
        lines.append(f"{chats.left_out:,} chats have no two neighbouring supervised tokens and are left out")
    return lines
