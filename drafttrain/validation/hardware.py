"""Where a number was measured: the machine, the versions and the commit that stand next to it."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

PACKAGES = ("drafttrain", "torch", "transformers", "lightning", "deepspeed", "safetensors")


def describe_hardware(device) -> dict:
    """Processor, cores, threads, GPU, and how fast this machine multiplies two 2048 x 2048 fp32 matrices (in GFLOP/s)."""
    device = torch.device(device)
    facts = {
        "device": device.type,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gflops_2048_fp32": round(matrix_gflops(device), 1),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def cpu_model() -> str:
    """The processor's name, as /proc/cpuinfo or the platform gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def matrix_gflops(device, size: int = 2048) -> float:
    """Speed of one fp32 product of two size x size matrices, the best of three."""
    a = torch.ones(size, size, device=device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        product = a @ a
        float(product[0, 0])  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def versions() -> dict[str, str]:
    """Versions of the packages that matter, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of this checkout, with '+changes' if tracked files differ from it; None outside a checkout of our own."""
    root = Path(__file__).resolve().parents[2]
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root:
            return None  # installed inside somebody else's repository
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        return _git(root, "rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
