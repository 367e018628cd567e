"""One optimizer step's numbers: what the loss is divided by, agreed by all ranks, and what is logged.

A window opens with one all-reduce of a small vector: what sums are divided by, tokens, dropped labels, and whether anybody was
told to stop. The loss uses the vector where it is (on the device); the host reads its copy at the end of the window, when the
numbers have long arrived, so a GPU is never drained for them.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(vector: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
    """In place over all ranks. (Lightning's `strategy.reduce` adds a barrier, which stops the host.)"""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector, op=op)
    return vector


def scored_elements(totals: dict[str, float]) -> float:
    """How many elements were scored, over all depths."""
    return sum(total for name, total in totals.items() if name.startswith("depth_"))


class Window:
    """The counts of one window over all ranks, from this rank's, which have the same names everywhere: those that an objective divides
    by, `tokens` and `dropped`. Most are whole numbers below 2^24, which float32 adds exactly."""

    def __init__(self, local: dict[str, float], stop: bool, device: torch.device):
        self.names = (*local, "stop")
        vector = torch.tensor([*local.values(), float(stop)], dtype=torch.float32)
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            vector = vector.pin_memory().to(device, non_blocking=True)
        else:
            vector = vector.to(device)
        self.vector = all_reduce(vector)
        self._host = self.vector
        if device.type == "cuda":
            self._host = torch.empty(len(self.names), dtype=torch.float32, pin_memory=True).copy_(self.vector, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self.place = {name: i for i, name in enumerate(self.names)}
        """Where each count lies in `divisors`; the same in every window of a run."""
        self.divisors = torch.where(self.vector > 0, self.vector, 1.0)
        """Counts over the whole window, on the device; 1 where one is 0, since what it divides is 0 too."""

    def totals(self) -> dict[str, float]:
        """All numbers on the host. Waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return dict(zip(self.names, self._host.tolist(), strict=True))


class Meter:
    """Sums since the last log: local ones on the device (no host sync), window totals on the host."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._totals: dict[str, float] = {}
        self._windows = 0
        self.start()

    def start(self) -> None:
        """Starts the clock: what came before was not training."""
        self._since = time.monotonic()

    def add(self, sums: dict[str, Tensor]) -> None:
        """Adds one micro-step's detached sums of this rank: as one vector, since each addition is a kernel that the host has to launch."""
        names, vector = tuple(sums), torch.stack([value.detach().float() for value in sums.values()])
        self._sums[names] = self._sums[names] + vector if names in self._sums else vector

    def close_window(self, totals: dict[str, float]) -> None:
        """Adds one window's totals over all ranks."""
        self._windows += 1
        for name, value in totals.items():
            self._totals[name] = self._totals.get(name, 0.0) + value

    def skip_time(self, seconds: float) -> None:
        """Leaves time out that was not spent training (measuring tau, saving)."""
        self._since += seconds

    def read(self) -> dict[str, float]:
        """Means since the last call, the same on every rank, and starts anew. One all-reduce and one wait for the device.

        `loss` is the mean of the windows' losses; any other is a sum over the count whose name it ends in, the longest such.
        """
        added: dict[str, Tensor] = {}
        for names, vector in self._sums.items():
            for name, value in zip(names, vector.unbind(), strict=True):
                added[name] = added[name] + value if name in added else value
        ordered = sorted(added)
        values = all_reduce(torch.stack([added[name] for name in ordered])).tolist()
        sums, totals = dict(zip(ordered, values, strict=True)), self._totals
        means = {"loss": sums.pop("loss") / max(self._windows, 1)}
        for name, value in sums.items():
            counts = [
                count for count in totals if name.endswith(f"_{count}")
            ]  # top1_accepted_depth_2 -> accepted_depth_2, depth_2
            means[name] = value / (totals[max(counts, key=len)] or 1.0)
        counted = scored_elements(totals)
        means["dropped_labels"] = totals.get("dropped", 0.0) / max(counted + totals.get("dropped", 0.0), 1.0)
        means["seconds"] = max(time.monotonic() - self._since, 1e-9)
        means["tokens_per_second"] = totals.get("tokens", 0.0) / means["seconds"]
        self._sums, self._totals, self._windows, self._since = {}, {}, 0, time.monotonic()
        return means
