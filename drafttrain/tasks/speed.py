"""Faster training steps that compute the same: the drafter's side compiled, the target's side as a CUDA graph, and one beside the other.

Small drafters are bound by launches: a 30-layer target takes a thousand of them, an unrolled drafter with its backward pass two
thousand more, each tens of microseconds on the host.

Shapes: B rows, T tokens, N scored elements, M teacher rows, Q drafting rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from drafttrain.data.stream import MicroBatch
from drafttrain.divergences import Teacher
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.layouts import widened
from drafttrain.losses import Objective
from drafttrain.replay import ReplayLayout
from drafttrain.target.target import Target
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.types import Features, Layout, Sequences, Term

Scored = tuple[dict[str, Term], dict[str, Tensor]]
Score = Callable[[Sequences, Features, Layout], Scored]
"""A micro-batch's terms and metric sums."""


def make_score(
    net: DrafterNet, objective: Objective, teacher: Teacher, depth: int, compile: bool, cpp_wrapper: bool = False
) -> Score:
    """The drafter's forward pass and the objective as one function, compiled if asked.

    Batch and row length never change in a run; how many elements are scored does, so those sizes stay symbolic and nothing is
    compiled twice. How many places there are for drafting rows is a plain number, of which there are few (`widened`); so are the widths of a thinned layout.
    """

    def score(sequences: Sequences, features: Features, layout: Layout) -> Scored:
        drafted = net.rows(sequences, features, layout)
        return objective.terms(drafted, net.logits, teacher, depth)

    if not compile:
        return score
    compiled = torch.compile(score, options={"cpp_wrapper": True} if cpp_wrapper else None)

    def with_symbols(sequences: Sequences, features: Features, layout: Layout) -> Scored:
        if not (net.fixed_queries or isinstance(layout, ReplayLayout)):
            layout = widened(layout, sequences.ids_BT.shape[1])
        for name in ("anchor_N", "depth_N", "label_N", "teacher_N", "draft_N", "cell_N", "pool_M"):
            torch._dynamo.maybe_mark_dynamic(getattr(layout, name), 0)
        if isinstance(layout, ReplayLayout):
            torch._dynamo.maybe_mark_dynamic(layout.stream_N, 0)
            for rows in [layout.fed_BQK] if net.fixed_queries else [layout.fed_BQK, layout.query_BQ]:
                torch._dynamo.maybe_mark_dynamic(rows, 1)
        else:
            torch._dynamo.mark_static(layout.query_BQ, 1)
        if features.branch_VD is not None:
            torch._dynamo.maybe_mark_dynamic(features.branch_VD, 0)
        return compiled(sequences, features, layout)

    return with_symbols


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    sequences: Sequences
    features: Features


class GraphedRead:
    """`target.read_packed` as one CUDA graph for each shape of batch. What it returns is overwritten by the next call, unless it `copies`."""

    def __init__(self, target: Target, taps: tuple[int, ...], copies: bool = False):
        self.target, self.taps, self.copies = target, taps, copies
        self._captured: dict[torch.Size, _Captured] = {}

    def __call__(self, sequences: Sequences) -> Features:
        shape = sequences.ids_BT.shape
        if shape not in self._captured:
            self._captured[shape] = self._capture(sequences)
        captured = self._captured[shape]
        for name in Sequences.__dataclass_fields__:
            getattr(captured.sequences, name).copy_(getattr(sequences, name), non_blocking=True)
        captured.graph.replay()
        found = captured.features
        return Features(found.taps_BTAD.clone(), found.final_BTD.clone()) if self.copies else found

    def _capture(self, sequences: Sequences) -> _Captured:
        own = Sequences(*(getattr(sequences, name).clone() for name in Sequences.__dataclass_fields__))
        refused = f"speed.graph_target: the forward pass of {type(self.target.model).__name__}", "set speed.graph_target to false"
        graph, features = record(lambda: self.target.read_packed(own, self.taps), *refused)
        return _Captured(graph, own, features)


T = TypeVar("T")


def record(compute: Callable[[], T], what: str, way_out: str, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """What `compute` launches on the device, as a CUDA graph, and what it returned: tensors that each replay overwrites. `pool`: memory of another graph
    to be shared. UserError where something cannot be recorded."""
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream() if current == torch.cuda.default_stream() else current  # the default stream cannot be recorded
    side.wait_stream(current)
    # A run that goes on records anew where one that was not stopped does not: what is drawn here may not be missing behind it.
    with torch.cuda.stream(side), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        for _ in range(2):  # compiles, and lets libraries choose their kernels and workspaces, before anything is recorded
            compute()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads (pinning batches, watching NCCL) go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            found = compute()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{what} cannot be recorded as a CUDA graph ({reason}); {way_out}.") from None
    return graph, found


Loss = Callable[[Sequences, Features, Layout, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""A micro-batch's part of its window's loss, given the window's divisors, and its metric sums."""


def records_steps(speed: SpeedConfig, device: torch.device) -> bool:
    """Are loss and gradients replayed as CUDA graphs?"""
    return speed.records and device.type == "cuda"


@contextmanager
def own_stream(speed: SpeedConfig, device: torch.device) -> Iterator[None]:
    """A stream for all of a training that records its steps, else nothing. Autograd adds gradients up on the stream where it first met a weight, in the
    steps before too whose graphs are still there; were that the default one, none could be recorded behind them."""
    if not records_steps(speed, device):
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(before)  # weights may still be on their way to the device
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        before.wait_stream(own)


class GraphedStep:
    """A micro-batch's loss and the gradients of the trained weights as one CUDA graph for each set of sizes (`layouts.filled` keeps them few).

    To autograd it is one function of the weights, whose way back multiplies gradients that are there already: whatever waits for gradients (DDP, DeepSpeed,
    accumulation) sees them as ever, though not before all are there. Of what a graph computes nothing outlives it but copies in memory outside, so all
    graphs share the memory of the largest.
    """

    def __init__(self, loss: Loss, net: DrafterNet):
        self._loss, self._net = loss, net
        self._recorded: dict[tuple, _Recorded] = {}
        self._kept: dict[tuple, list[Tensor]] = {}
        """Sequences and features, which are large: one copy for all graphs that read such sizes."""
        self._addresses: list[int] = []
        self.gradients: list[Tensor] = []
        """Of the trained weights, overwritten by each replay."""

    def __call__(
        self, sequences: Sequences, features: Features, layout: Layout, divisors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not len(layout.label_N):
            return self._loss(sequences, features, layout, divisors)
        weights = [weight for weight in self._net.parameters() if weight.requires_grad]
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addresses:  # a graph reads weights where they were when it was recorded
            self._recorded.clear()
            self._addresses, self._pool = addresses, None
            self.gradients = [torch.empty_like(weight) for weight in weights]
        records = sequences, features, layout
        given = [*(x for record in records for x in _tensors(record)), divisors]
        sizes = type(layout), *(x.shape for x in given)
        recorded = self._recorded.get(sizes)
        if recorded is None:
            recorded = self._recorded[sizes] = self._record(records, divisors, weights)
        for own, new in zip(recorded.given, given, strict=True):
            own.copy_(new, non_blocking=True)
        said = _Replay.apply(recorded, self.gradients, *weights)
        return said[0], dict(zip(recorded.names, said.detach()[1:].unbind(), strict=True))

    def _record(self, records: tuple[Sequences, Features, Layout], divisors: Tensor, weights: Sequence[Tensor]) -> "_Recorded":
        sequences, features, layout = records
        large = [*_tensors(sequences), *_tensors(features)]
        kept = self._kept.setdefault(tuple(x.shape for x in large), [x.clone() for x in large])
        for own, new in zip(kept, large, strict=True):
            own.copy_(new)
        given = [*kept, *(x.clone() for x in _tensors(layout)), divisors.clone()]
        left = iter(given)
        own_sequences, own_features, own_layout = (_like(record, left) for record in records)
        recorded = _Recorded(given)

        def compute() -> None:
            loss, metrics = self._loss(own_sequences, own_features, own_layout, given[-1])
            torch._foreach_copy_(self.gradients, torch.autograd.grad(loss, weights))
            said = torch.stack([loss.detach(), *(value.detach().float() for value in metrics.values())])
            if recorded.said is None:  # the first time, which is not recorded: memory outside the graph
                recorded.names, recorded.said = list(metrics), said.clone()
            recorded.said.copy_(said)

        what = f"speed.graph_step: the step of this {type(self._net.config).__name__}"
        recorded.graph, _ = record(compute, what, "set speed.graph_step to false", self._pool)
        self._pool = recorded.graph.pool()
        return recorded


@dataclass
class _Recorded:
    given: list[Tensor]
    """What the graph reads, to be overwritten."""
    graph: Any = None
    names: list[str] = field(default_factory=list)
    """Of the metrics."""
    said: Tensor | None = None
    """Loss and metrics, overwritten by each replay."""


class _Replay(torch.autograd.Function):
    """Loss and metrics [1 + metrics] of a recorded step; only the loss has a gradient."""

    @staticmethod
    def forward(ctx, recorded: _Recorded, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        recorded.graph.replay()
        ctx.gradients = gradients
        assert recorded.said is not None
        return recorded.said.clone()

    @staticmethod
    def backward(ctx, grad_said: Tensor):
        return None, None, *torch._foreach_mul(ctx.gradients, grad_said[0])


def _tensors(record: Sequences | Features | Layout) -> list[Tensor]:
    """Those of its fields that there are."""
    fields = (getattr(record, name) for name in record.__dataclass_fields__)
    return [x for x in fields if x is not None]


def _like(record: Any, tensors: Iterator[Tensor]) -> Any:
    """Such a record of other tensors."""
    fields = (getattr(record, name) for name in record.__dataclass_fields__)
    return type(record)(*(None if x is None else next(tensors) for x in fields))


def reads_ahead(speed: SpeedConfig, device: torch.device) -> bool:
    """Does the target read the next micro-batch while the drafter learns from this one?"""
    return speed.overlap_target and not speed.shard_target and device.type == "cuda"


class ReadAhead:
    """Features of micro-batches, read on a stream of the target's own.

        main stream      drafter and optimizer, n-1      drafter and optimizer, n      ...
        side stream      target, n                       target, n+1                   ...

    Where the drafter's kernels are too small to fill the device, the target's run beside them.
    """

    def __init__(self, read: Callable[[Sequences], Features], device: torch.device):
        """`read`: what it returns may not be overwritten by the next call."""
        self._read, self._device, self._side = read, device, torch.cuda.Stream(device)

    def begin(self, batch: MicroBatch) -> None:
        """Queues the read of a micro-batch, which keeps the features. Waits for nothing.

        It runs behind what the main stream was given so far. That is what makes the allocator's work right: what it hands out here is memory of
        features that were freed before now, so all that read them is in the main stream already.
        """
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            batch.features = self._read(batch.sequences.to(self._device))

    def features(self, batch: MicroBatch) -> Features:
        """Those of a micro-batch on the device, begun now if not before. The main stream waits for them, the host does not."""
        if batch.features is None:
            self.begin(batch)
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        assert batch.features is not None
        return batch.features
