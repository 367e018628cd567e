"""Who am I among how many: the one place that reads the environment.

`torchrun` says how many processes there are and which one this is; a recipe never does. Lightning notices a mismatch late, inside
`fit`, and DeepSpeed on a CPU only when everything is loaded. So this is asked first, before anything loads.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import UserError
from drafttrain.tasks.strategy import uses_deepspeed

VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")


@dataclass(frozen=True)
class Topology:
    """The processes of a run."""

    world: int = 1
    """Processes in all."""
    local: int = 1
    """Processes on this machine."""
    rank: int = 0
    """Number of this process among all, from 0."""
    local_rank: int = 0
    """Number of this process on this machine."""
    accelerator: str = "cpu"
    """cpu or gpu."""
    store: tuple[str, int] | None = None
    """Host and port at which all processes reach a store of the launcher or of rank 0; None for one process."""

    @property
    def nodes(self) -> int:
        """Machines, each with the same number of processes."""
        return self.world // self.local

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cuda", self.local_rank) if self.accelerator == "gpu" else torch.device("cpu")

    def __str__(self) -> str:
        return f"{self.world} process(es) on {self.nodes} machine(s), {self.accelerator}"


def read_topology(strategy: Any = "auto", environ: Mapping[str, str] = os.environ, gpus: int | None = None) -> Topology:
    """The topology of this process, checked.

    Args:
        strategy: `trainer.strategy` as written in the recipe (a name, or class_path and init_args).
        environ: What torchrun has set.
        gpus: GPUs of this machine; None counts them.

    Raises:
        UserError: values that contradict each other, more processes than GPUs, DeepSpeed without a GPU.
    """
    world, local, rank, local_rank = (_number(environ, name) for name in VARIABLES)
    world = 1 if world is None else world
    local = world if local is None else local
    rank = 0 if rank is None else rank
    local_rank = rank % max(local, 1) if local_rank is None else local_rank
    way_out = "start it with torchrun, which sets both, or unset them"
    if world < 1 or local < 1 or world % local:
        raise UserError(
            f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE is {local}, but every machine must run the same number of processes "
            f"(WORLD_SIZE a multiple of LOCAL_WORLD_SIZE): {way_out}."
        )
    if not 0 <= rank < world:
        raise UserError(f"RANK is {rank} and WORLD_SIZE is {world}, but ranks go from 0 to {world - 1}: {way_out}.")
    if not 0 <= local_rank < local:
        raise UserError(
            f"LOCAL_RANK is {local_rank} and LOCAL_WORLD_SIZE is {local}, but ranks go from 0 to {local - 1}: {way_out}."
        )
    gpus = torch.cuda.device_count() if gpus is None else gpus
    require_gpu(strategy, "gpu" if gpus else "cpu")
    if gpus and local > gpus:
        raise UserError(
            f"{local} processes were started on this machine, which shows {gpus} GPUs: torchrun --nproc-per-node {gpus}."
        )
    port = _number(environ, "MASTER_PORT")
    store = (environ["MASTER_ADDR"], port) if world > 1 and port is not None and "MASTER_ADDR" in environ else None
    return Topology(world, local, rank, local_rank, "gpu" if gpus else "cpu", store)


def require_gpu(strategy: Any, accelerator: str) -> None:
    """UserError for DeepSpeed on a machine without a GPU. `strategy` as written in the recipe, `accelerator` as in `Topology`."""
    if uses_deepspeed(strategy) and accelerator != "gpu":
        raise UserError(
            "trainer.strategy is DeepSpeed, which needs an NVIDIA GPU, and this machine shows none: "
            "use --config recipes/hardware/cpu.yaml or ddp.yaml instead."
        )


def rank(environ: Mapping[str, str] = os.environ) -> str:
    """RANK as it stands in the environment, for messages."""
    return environ.get("RANK", "0")


def speaks(environ: Mapping[str, str] = os.environ) -> bool:
    """May this process print what all of them would? False on ranks 1, 2, ...; True if the environment makes no sense."""
    try:
        return not 0 < int(environ.get("RANK", "0")) < int(environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return True


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where torchrun looks for what ended this process, to say it at its own end; None without torchrun."""
    return Path(name) if (name := environ.get("TORCHELASTIC_ERROR_FILE")) else None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{name} is {text!r} in the environment, but must be a number: start it with torchrun, or unset it."
        ) from None
