"""What a training step holds on its device, before there is one: the step is done with tensors that have shapes and no numbers, and bytes are counted.

    peak = max over time of  sum of the storages that are alive, each rounded up to 512 bytes

which is what `torch.cuda.max_memory_allocated` measures. The step is the task's own: target, drafter, objective, backward pass and optimizer, twice, in
the trainer's order (the gradients of a step live until the next loss is there). No formula knows a drafter or an objective, so none can fall behind.

The device is a CPU, since torch without a GPU cannot differentiate tensors of one; its autocast rounds what a GPU's does. What a GPU computes in one
kernel and a CPU in several is stood in for (at the end), and what an operation holds while it runs is added (`HELD_INSIDE`). Left out: gaps between
allocations, and what a compiled step saves: its kernels hold less, so the number is then an upper bound.

Shapes: B rows, T tokens, H query heads, G key/value heads, Q queries, D head width.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafttrain.data.features import rounded
from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.losses import Objective
from drafttrain.ops import rows
from drafttrain.target.target import ATTENTION, Target, hf_attention
from drafttrain.tasks.optimizer import OptimizerConfig, make_optimizer, token_sides
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.teacher import TargetTeacher, plainly
from drafttrain.types import Features, Identity, Layout, Sequences
from drafttrain.vocab import DraftVocabulary

LIBRARIES = 32 * 2**20
"""Bytes that cuBLAS takes for itself on a Hopper GPU (its default workspace)."""
ROUNDED_TO = 512
"""Bytes: torch hands out multiples of it."""
HELD_INSIDE = {torch.ops.aten.logsumexp.default}
"""Operations that hold a copy of their input while they run."""
KINDS = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
"""trainer.precision without its second half."""
TARGET, DRAFTER, GRADIENTS, OPTIMIZER = "target's weights", "drafter's weights", "gradients", "optimizer"
BATCH, READ, FORWARD, BACKWARD = "batch", "target's reading", "drafter and objective, forward", "backward"
OTHERS, RECORDED = "libraries and DDP", "recorded step's copies"

DIVIDED_FROM = {OPTIMIZER: 1, GRADIENTS: 2, DRAFTER: 3, TARGET: 3}
"""From which stage of ZeRO on a part is divided among the processes."""


@dataclass(frozen=True)
class Step:
    """All that decides what a step holds."""

    target: Target
    """Of which the model's class and config are looked at alone: an outline will do."""
    target_dtype: torch.dtype
    """Of what it computes."""
    drafter: DrafterConfig
    vocabulary: DraftVocabulary
    objective: Objective
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    online: bool = True
    """Whether the target reads in the step."""
    feature_dtype: str = "bfloat16"
    precision: str = "32-true"
    """As trainer.precision has it."""
    accumulate: int = 1
    world: int = 1
    """Processes, of which each keeps a copy of its gradients to be added up (DDP), or among which ZeRO divides what stays."""
    zero: int | None = None
    """Stage of DeepSpeed's ZeRO, whose buckets are left out; None without DeepSpeed."""
    target_bytes: int | None = None
    """Of the target's weights, where they are quantised or shared out; None for all of them in `target_dtype`."""


@dataclass(frozen=True)
class Peak:
    """The most that is alive at once."""

    bytes: int
    parts: dict[str, int]
    """What it is made of."""


def peak_of(step: Step, sequences: Sequences, layout: Layout) -> Peak:
    """The peak of training on this micro-batch, again and again.

    Raises:
        Whatever torch does where a target or drafter looks at numbers: a target that cannot be told without any.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _as_on_a_gpu():
        divided = [part for part, first in DIVIDED_FROM.items() if (step.zero or 0) >= first]
        live = LiveBytes(dict.fromkeys(divided, step.world))
        target = _without_numbers(step.target.model, step.target_dtype)
        if step.target_bytes is not None:
            more = step.target_bytes - sum(weight.nbytes for weight in target.model.parameters())
            live.add(TARGET, more // live.divided.get(TARGET, 1))
        live.hold(TARGET, target.model)
        with patch.object(nn.Module, "to", _stays):
            net = step.drafter.build(target, step.vocabulary).train()
        if step.precision.endswith("-true"):
            _cast(net, KINDS[step.precision.removesuffix("-true")])
        net.fused, net.fused_rows, net.recomputes = (
            step.speed.fused_blocks,
            step.speed.fused_rows,
            step.speed.checkpoint_activations,
        )
        target.fused_rows = step.speed.fused_rows
        live.hold(DRAFTER, net)
        live.add(OTHERS, LIBRARIES)
        if step.world > 1 and step.zero is None:
            live.add(OTHERS, sum(weight.numel() * weight.element_size() for weight in net.parameters() if weight.requires_grad))
        _train(step, target, net, fake, live, sequences, layout)
    return live.peak


def _without_numbers(model: Any, dtype: torch.dtype) -> Target:
    """Another such target, as `load_target` makes one on a GPU."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, hf_attention)
    made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    made.set_attn_implementation(ATTENTION)
    for module in made.modules():  # fuse.py tries them with numbers; nearly all norms pass
        weight = getattr(module, "weight", None)
        if "RMSNorm" in type(module).__name__ and isinstance(weight, Tensor) and weight.dim() == 1:
            module.forward = partial(_norm, shape=weight.shape, weight=weight)
    text = made.config.get_text_config()
    identity = Identity("", "", "", "", "", text.num_hidden_layers, text.hidden_size, text.vocab_size)
    return Target(made, SimpleNamespace(tokenizer=None), identity, ())  # type: ignore[arg-type]


def _stays(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """In the place of `Module.to`, which cannot change such tensors in place: all are on the one device there is."""
    return module


def _cast(net: nn.Module, kind: torch.dtype) -> None:
    for module in net.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(weight, dtype=kind), requires_grad=weight.requires_grad))


def _train(
    step: Step, target: Target, net: DrafterNet, fake: FakeTensorMode, live: "LiveBytes", sequences: Sequences, layout: Layout
) -> None:
    """Two optimizer steps, in the order of the task and its trainer."""
    optimizer = make_optimizer(step.optimizer, net, fused=True, tokens=token_sides(net))
    for weight in net.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: live.relabel(weight.grad, GRADIENTS))
    score = make_score(net, step.objective, TargetTeacher(target, net), net.needs.depth, compile=False)
    cpu = torch.device("cpu")

    def faked(record: Any) -> Any:
        return type(record)(
            *(None if x is None else fake.from_tensor(x) for x in (getattr(record, n) for n in record.__dataclass_fields__))
        )

    def read(batch: Sequences) -> Features:
        live.now = READ
        if not step.online:
            shape = (*batch.ids_BT.shape, len(net.needs.taps) + 1, target.hidden)
            stored = torch.empty(shape, dtype=target.dtype)
            return Features(stored[:, :, :-1], stored[:, :, -1])
        with torch.no_grad(), plainly(cpu):
            return rounded(target.read_packed(batch, net.needs.taps), step.feature_dtype)

    def loss(batch: Sequences, of_batch: Layout, features: Features) -> Tensor:
        live.now = FORWARD
        mixed = step.precision.endswith("-mixed")
        with torch.autocast("cpu", KINDS[step.precision.removesuffix("-mixed")]) if mixed else nullcontext():
            terms, _ = score(batch, features, of_batch)
        return torch.stack([term.sum / term.count for term in terms.values()]).sum()

    with live:
        ahead: Features | None = None
        if step.speed.records:  # of what a replay reads and what it leaves behind
            of_features = sequences.ids_BT.numel() * (len(net.needs.taps) + 1) * target.hidden * target.dtype.itemsize
            of_gradients = sum(weight.numel() * weight.element_size() for weight in net.parameters() if weight.requires_grad)
            live.add(RECORDED, of_features + of_gradients)
        for _ in range(2):
            for micro in range(min(step.accumulate, 2)):
                live.now = BATCH
                batch, of_batch = faked(sequences), faked(layout)
                features = read(batch) if ahead is None else ahead
                ahead = read(batch) if step.speed.overlap_target and step.online else None
                found = loss(batch, of_batch, features)
                del features
                live.now = BACKWARD
                if micro == 0:
                    optimizer.zero_grad()
                found.backward()
                del found
            live.now = OPTIMIZER
            optimizer.step()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, by the part of the step that made them. `divided`: among how many processes a part is."""

    def __init__(self, divided: dict[str, int]) -> None:
        super().__init__()
        self.divided = divided
        self.now = BATCH
        self.alive: Counter[str] = Counter()
        self.total = 0
        self.peak = Peak(0, {})
        self._known: dict[int, list[Any]] = {}

    def hold(self, part: str, module: nn.Module) -> None:
        """Weights and buffers, which were there before."""
        self.now = part
        for tensor in (*module.parameters(), *module.buffers()):
            self._see(tensor)

    def add(self, part: str, size: int) -> None:
        """Bytes that are there from now on."""
        self.alive[part] += size
        self.total += size

    def relabel(self, tensor: Tensor, part: str) -> None:
        """What this tensor holds is of another part than where it was made."""
        entry = self._known.get(id(tensor.untyped_storage()))
        if entry is not None and entry[0] != part:
            self.add(entry[0], -entry[1])
            entry[:] = part, entry[1] // self.divided.get(part, 1)
            self.add(*entry)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._see(x)
        if func in HELD_INSIDE:
            self._note(args[0].numel() * args[0].element_size())
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._known or not (size := storage.nbytes()):
            return
        size = -(-size // ROUNDED_TO) * ROUNDED_TO // self.divided.get(self.now, 1)
        self._known[id(storage)] = [self.now, size]
        weakref.finalize(storage, self._free, id(storage)).atexit = False
        self.alive[self.now] += size
        self.total += size
        self._note()

    def _note(self, inside: int = 0) -> None:
        """A moment at which these bytes more are held."""
        if self.total + inside > self.peak.bytes:
            parts = self.alive + Counter({self.now: inside})
            self.peak = Peak(self.total + inside, {part: size for part, size in parts.items() if size})

    def _free(self, key: int) -> None:
        part, size = self._known.pop(key)
        self.alive[part] -= size
        self.total -= size


# ---- what a GPU does in one kernel ------------------------------------------------------------------------------------------------


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    with (
        patch.object(rows, "run_kernel", _attention),
        patch.object(nn.functional, "rms_norm", _norm),
        patch.object(nn.functional, "grouped_mm", _grouped, create=True),  # torch has it since 2.10
    ):
        yield


def _grouped(x_NK: Tensor, weight_EKM: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """In the place of `grouped_mm`, which experts of a mixture are: without numbers a CPU refuses all types but one."""
    return x_NK.new_empty(len(x_NK), weight_EKM.shape[-1])


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """In the place of `rms_norm`: keeps what it read, and a number for each row."""
    return _Norm.apply(x, weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """In the place of `run_kernel`: what goes in and comes out, and nothing between."""
    return _Attention.apply(query.to(value.dtype), key.to(value.dtype), value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out, sums

    @staticmethod
    def backward(ctx, grad_out: Tensor, grad_sums: Tensor):
        query, key, value, _, sums = ctx.saved_tensors
        delta = torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value) + 0 * delta.sum().to(value.dtype)
