"""Faster training steps that compute the same: the drafter's side compiled, the target's side as a CUDA graph, and one beside the other.

Small drafters are bound by launches: a 30-layer target takes a thousand of them, an unrolled drafter with its backward pass two
thousand more, each tens of microseconds on the host.

Shapes: B rows, T tokens, N scored elements, M teacher rows, Q drafting rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.data.stream import MicroBatch
from drafttrain.divergences import Teacher
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.layouts import ThinnedLayout
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
    compiled twice. (Widths of a thinned layout do not change either; made symbolic, they cost the compiler minutes. Nor do places for a drawn number of
    anchors, and attention to a symbolic number of blocks is slower.)
    """

    def score(sequences: Sequences, features: Features, layout: Layout) -> Scored:
        drafted = net.rows(sequences, features, layout)
        return objective.terms(drafted, net.logits, teacher, depth)

    if not compile:
        return score
    compiled = torch.compile(score, options={"cpp_wrapper": True} if cpp_wrapper else None)

    def with_symbols(sequences: Sequences, features: Features, layout: Layout) -> Scored:
        for name in ("anchor_N", "depth_N", "label_N", "teacher_N", "draft_N", "cell_N", "pool_M"):
            torch._dynamo.maybe_mark_dynamic(getattr(layout, name), 0)
        if not (isinstance(layout, ThinnedLayout) or net.fixed_queries):
            torch._dynamo.maybe_mark_dynamic(layout.query_BQ, 1)
        if isinstance(layout, ReplayLayout):
            torch._dynamo.maybe_mark_dynamic(layout.stream_N, 0)
            torch._dynamo.maybe_mark_dynamic(layout.fed_BQK, 1)
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
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose their kernels and workspaces before they are recorded
                self.target.read_packed(own, self.taps)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (pinning batches, watching NCCL) go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                features = self.target.read_packed(own, self.taps)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"speed.graph_target: the forward pass of {type(self.target.model).__name__} cannot be recorded as a CUDA graph "
                f"({reason}); set speed.graph_target to false."
            ) from None
        return _Captured(graph, own, features)


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
