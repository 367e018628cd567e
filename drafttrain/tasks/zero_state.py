"""What DeepSpeed saved for one number of processes (or one stage), put together and cut anew for another.

    ZeRO-1, -2   a group's weights stand one behind the other, and process r has a piece of that row:   whole = its slices in all processes, in order
    ZeRO-3       every weight is cut by itself, ceil(numel / processes) each, the last filled up:      whole = all pieces in order, without the rest

Both hold for the fp32 masters and for either average of Adam. The pieces stay on disk and are read one weight at a time, by an unpickler that knows
three harmless classes of DeepSpeed and no others. They are laid where the new engine keeps its own pieces.

    state/checkpoint/*_optim_states.pt     a file for each process
    state/checkpoint/*_model_states.pt     what Lightning adds (loops, schedules), the same in all
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import UserError

TAG = "checkpoint"
"""What Lightning calls the folder in DeepSpeed's."""
OPTIMIZERS = "*_optim_states.pt"
MASTER, AVERAGES = "fp32", ("exp_avg", "exp_avg_sq")
"""Parts of a weight's state."""


class ZeroState:
    """A folder of DeepSpeed's, of any stage and number of processes. UserError for one that is of another form."""

    def __init__(self, folder: Path):
        self._pieces = [_piece(file) for file in _by_rank(folder / TAG, OPTIMIZERS)]
        self._model = _load(_by_rank(folder / TAG, "*_model_states.pt")[0])
        self.stage, self.world = int(self._pieces[0]["zero_stage"]), len(self._pieces)
        _require_all(folder, self._pieces[0], self.world)
        if len(self._rows(self._pieces[0])) != len(self._model["param_shapes"]):
            raise UserError(
                f"{folder} was saved with sub_group_size below the drafter's size, which cannot be cut anew; start {self.world} processes."
            )
        self._shapes: dict[str, torch.Size] = {
            name: shape for group in self._model["param_shapes"] for name, shape in group.items()
        }
        self._slices = [dict(self._slices_of(piece)) for piece in self._pieces]

    @property
    def steps(self) -> float:
        """How often Adam has stepped."""
        return float(next(iter(self._adam(self._pieces[0])["state"].values()))["step"])

    @property
    def rates(self) -> list[float]:
        """The learning rate of every group of weights. (A schedule sets it when it steps, not when it is loaded.)"""
        return [group["lr"] for group in self._adam(self._pieces[0])["param_groups"]]

    @property
    def client(self) -> dict[str, Any]:
        """What Lightning saved with it."""
        return {name: value for name, value in self._model.items() if name != "module"}

    def names(self) -> list[str]:
        """Of the trained weights, as the module calls them."""
        return list(self._shapes)

    def whole(self, name: str, part: str) -> Tensor:
        """A weight's master or one of its averages, fp32, in the weight's shape."""
        shape, slices = self._shapes[name], []
        for piece, places in zip(self._pieces, self._slices, strict=True):
            if name in places:
                group, start, count = places[name]
                slices.append(self._flat(piece, group, part)[start : start + count])
        return torch.cat(slices)[: shape.numel()].reshape(shape).float()

    def _slices_of(self, piece: dict) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """Name -> group, where the slice begins in this process's piece of the group, how long it is."""
        if self.stage < 3:
            for group, places in enumerate(piece["param_slice_mappings"]):
                yield from ((name, (group, place.start, place.numel)) for name, place in places.items())
            return
        for group, shapes in enumerate(self._model["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                count = math.ceil(shape.numel() / self.world)
                yield name, (group, start, count)
                start += count

    def _adam(self, piece: dict) -> dict[str, Any]:
        return piece["base_optimizer_state" if self.stage < 3 else "optimizer_state_dict"]

    def _flat(self, piece: dict, group: int, part: str) -> Tensor:
        return self._rows(piece)[group] if part == MASTER else self._adam(piece)["state"][group][part]

    def _rows(self, piece: dict) -> list[Tensor]:
        """The masters of every group of weights, flat."""
        return piece["single_partition_of_fp32_groups" if self.stage < 3 else "fp32_flat_groups"]


def cut_anew(strategy: Any, task: nn.Module, state: ZeroState) -> None:
    """Has the trainer go on from `state`, whatever number of processes and stage its DeepSpeed strategy has.

    The weights are laid into the module now, before DeepSpeed takes it over and makes masters of them; masters (the module's weights may be rounded),
    averages and the number of steps where the trainer would load the folder. Called on every rank.
    """
    parameters = dict(task.named_parameters())
    with torch.no_grad():
        for name in state.names():
            parameters[name].copy_(state.whole(name, MASTER))

    def load_checkpoint(checkpoint_path: str, weights_only: bool | None = None) -> dict[str, Any]:
        optimizer, third = strategy.deepspeed_engine.optimizer, strategy.zero_stage_3
        rows = optimizer.fp32_partitioned_groups_flat if third else optimizer.single_partition_of_fp32_groups
        _begin_adam(optimizer.optimizer, rows, state)
        lay = _lay_whole_pieces if third else _lay_slices
        for name in state.names():
            for part in (MASTER, *AVERAGES):
                lay(optimizer, parameters[name], part, state.whole(name, part))
        return state.client

    strategy.load_checkpoint = load_checkpoint


def _begin_adam(adam: torch.optim.Optimizer, rows: list[Tensor], state: ZeroState) -> None:
    """Adam's state for these masters, as its first step would make it, but with its number of steps and its learning rates."""
    for group, rate in zip(adam.param_groups, state.rates, strict=True):
        group["lr"] = rate
    for row in rows:
        device = row.device if adam.defaults.get("fused") else None
        averages = {name: torch.zeros_like(row) for name in AVERAGES}
        adam.state[row] = {"step": torch.tensor(state.steps, dtype=torch.float32, device=device), **averages}


def _lay_slices(optimizer: Any, weight: nn.Parameter, part: str, whole: Tensor) -> None:
    """ZeRO-1, -2: the weight's slice in this process's row, if it has one."""
    mapping = weight._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return
    flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    row = flat if part == MASTER else optimizer.optimizer.state[flat][part]
    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
    row.data[here.start : here.start + here.numel].copy_(whole.flatten()[there.start : there.start + there.numel])


def _lay_whole_pieces(optimizer: Any, weight: nn.Parameter, part: str, whole: Tensor) -> None:
    """ZeRO-3: this process's piece of the weight, filled up at the end."""
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    count = weight.ds_tensor.numel()  # type: ignore[attr-defined]
    start = count * torch.distributed.get_rank()
    piece = whole.new_zeros(count)
    mine = whole.flatten()[start : start + count]
    piece[: len(mine)] = mine
    if part == MASTER:
        safe_set_local_fp32_param(weight, piece)
    else:
        safe_set_local_optimizer_state(weight, piece, part)


def saved_by(folder: Path) -> tuple[int, int]:
    """(processes, stage) that a folder of DeepSpeed's was saved by, of which one file is read. UserError if it lacks pieces of some."""
    files = _by_rank(folder / TAG, OPTIMIZERS)
    first = _piece(files[0])
    _require_all(folder, first, len(files))
    return len(files), int(first["zero_stage"])


def _require_all(folder: Path, piece: dict[str, Any], found: int) -> None:
    counts = piece["partition_count"]
    count = max(counts) if isinstance(counts, list) else counts
    if found != count:
        raise UserError(f"{folder} holds the pieces of {found} process(es), but was saved by {count}; restore what was saved.")


def _piece(file: Path) -> dict[str, Any]:
    """What a process saved of the optimizer."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return _load(file)["optimizer_state_dict"]


def _load(file: Path) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Files by the number of the process that wrote them. UserError if there are none."""
    found = {int(number[1]) if (number := re.search(r"pp_rank_(\d+)_", file.name)) else 0: file for file in folder.glob(pattern)}
    if not found:
        raise UserError(f"{folder}/ has no {pattern}: it is not whole, or of a DeepSpeed that saves otherwise; restore it.")
    return [found[rank] for rank in sorted(found)]
