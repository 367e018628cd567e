"""Rounds of decoding replayed as CUDA graphs: a small target is bound by launches, a thousand of them in a step.

A graph holds addresses and shapes, so there is one for every number of rows in play and every extent. The first round of a shape runs
plainly (libraries choose their kernels then), the second is recorded, and from then on it is replayed.
"""

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter

import torch

from drafttrain.decoding.batch import Batch
from drafttrain.decoding.recorded import RoundBuffers


@dataclass
class StageClock:
    """Seconds spent in each stage, and rounds; read after `settle`."""

    seconds: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    _marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def time(self, name: str, stage: Callable[[], None], cuda: bool) -> None:
        """Run a stage and note how long it takes, on a GPU without waiting for it."""
        if cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            stage()
            stop.record()
            self._marks.append((name, start, stop))
        else:
            began = perf_counter()
            stage()
            self._add(name, perf_counter() - began)

    def settle(self) -> None:
        """Wait for the device, and add up."""
        if self._marks:
            torch.cuda.synchronize()
        for name, start, stop in self._marks:
            self._add(name, start.elapsed_time(stop) / 1e3)
        self._marks.clear()

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True)
class _Launched:
    said_BX: torch.Tensor
    drafted: RoundBuffers | None
    done: torch.cuda.Event | None
    shape: int
    began: float
    typical: bool
    """Whether it takes as long as others of its shape will: no other round was in flight, and nothing had to be recorded."""


@dataclass(frozen=True)
class Collected:
    """What the host learns of a finished round."""

    rows: list[list[int]]
    """For each row in play, `Batch.said_BX`."""
    drafted: RoundBuffers | None
    """What it drafted, on the host and the caller's own; None where that is not kept."""
    shape: int
    """The proposer's number for the shape of this round."""
    seconds: float | None
    """How long it took; None if rounds overlapped, or it was not replayed where others will be."""


class Rounds:
    """Runs the stages of a round, plainly or as graphs."""

    def __init__(self, batch: Batch, graphs: bool):
        self.batch = batch
        self.graphs = graphs and batch.target.device.type == "cuda"
        self.clock: StageClock | None = None
        self.refused: str | None = None
        """Why the stages could not be recorded; None as long as they could."""
        self._recorded: dict[tuple[int, int, int], dict[str, torch.cuda.CUDAGraph]] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._launched: deque[_Launched] = deque()
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    @torch.no_grad()
    def launch(self, extent: int) -> None:
        """Start one round; a GPU goes on by itself."""
        began, shape, typical = monotonic(), self._shape, not self.graphs or self._key(extent) in self._recorded
        typical = typical and not self._launched
        for name, stage in self._stages(extent).items():
            if self.clock is None:
                stage()
            else:
                self.clock.time(name, stage, self.batch.target.device.type == "cuda")
        if self.clock is not None:
            self.clock.rounds += 1
        buffers, done = self.batch.round_buffers, None
        said_BX, drafted = self._fetch(self.batch.said_BX), None if buffers is None else buffers.each(self._fetch)
        if self.batch.said_BX.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._launched.append(_Launched(said_BX, drafted, done, shape, began, typical))

    def _fetch(self, x_BX: torch.Tensor) -> torch.Tensor:
        """A copy on the host of the rows in play, before the next round overwrites them; from a GPU it is there once the device has come
        so far."""
        x_BX = x_BX[: self.batch.width]
        if not x_BX.is_cuda:
            return x_BX.clone()
        copy = torch.empty(x_BX.shape, dtype=x_BX.dtype, pin_memory=True)
        return copy.copy_(x_BX, non_blocking=True)

    @torch.no_grad()
    def record(self, extent: int) -> None:
        """Record the rounds of this extent, in every shape that they may have, for the rows in play, which must hold no prompt."""
        proposer = self.batch.proposer
        before = self._shape
        for shape in proposer.round_shapes if proposer else (before,):
            if proposer:
                proposer.take_round_shape(shape)
            while self.graphs and self._key(extent) not in self._recorded:
                for stage in self._stages(extent).values():  # plainly; at the second time they are recorded first, and replayed
                    stage()
        if proposer:
            proposer.take_round_shape(before)

    @property
    def known(self) -> int:
        """Shapes of rounds that were met, and of those that were recorded; it stays the same where nothing was new."""
        return len(self._seen) + len(self._recorded)

    @property
    def in_flight(self) -> int:
        """Rounds launched and not collected."""
        return len(self._launched)

    def collect(self) -> Collected:
        """Wait for the oldest round in flight."""
        first = self._launched.popleft()
        if first.done is not None:
            first.done.synchronize()
        rows, drafted = first.said_BX.tolist(), first.drafted
        seconds = monotonic() - first.began if first.typical and not self._launched else None
        if drafted is not None and first.done is not None:
            drafted = drafted.each(torch.clone)  # an answer lasts longer than pinned memory should be held
        return Collected(rows, drafted, first.shape, seconds)

    @property
    def _shape(self) -> int:
        return self.batch.proposer.round_shape if self.batch.proposer else 0

    def _key(self, extent: int) -> tuple[int, int, int]:
        return self.batch.width, extent, self._shape

    def _stages(self, extent: int) -> dict[str, Callable[[], None]]:
        key = self._key(extent)
        if self.graphs and key in self._seen and key not in self._recorded:
            self._record(key, extent)
        self._seen.add(key)
        if key in self._recorded:
            return {name: graph.replay for name, graph in self._recorded[key].items()}
        return {name: partial(stage, extent) for name, stage in self.batch.stages.items()}

    def _record(self, key: tuple[int, int, int], extent: int) -> None:
        """Record all stages; nothing runs meanwhile. What one stage hands to the next keeps its address in the shared pool."""
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        torch.cuda.synchronize()
        try:
            for name, stage in self.batch.stages.items():
                graphs[name] = torch.cuda.CUDAGraph()
                # Other threads (pinning batches, watching NCCL) go on calling CUDA meanwhile.
                with torch.cuda.graph(graphs[name], pool=self._pool, capture_error_mode="thread_local"):
                    stage(extent)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.graphs, self.refused = False, str(error).splitlines()[0]
            warnings.warn(
                f"decoding goes on without CUDA graphs, which is slower: this model cannot be recorded ({self.refused})"
            )
            return
        self._recorded[key] = graphs
