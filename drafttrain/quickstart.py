"""`python -m drafttrain.quickstart RECIPE [flags]`: launch/pipeline.sh, the machine's speed before it, time and memory after.

Speed is that of a 2048 x 2048 x 2048 product in fp32 on the CPU, so that a duration can be compared with another machine's.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from drafttrain.validation.hardware import cpu_model, matrix_gflops

PIPELINE = Path(__file__).resolve().parents[1] / "launch" / "pipeline.sh"


def main() -> int:
    """Run the pipeline and print what it took; its exit code."""
    print("measuring this machine's speed; then data_prep, train, export and validate", flush=True)
    print(f"machine: {cpu_model()}, {os.cpu_count()} cores, {matrix_gflops('cpu'):.0f} GFLOP/s (2048^3 fp32 product)", flush=True)
    began = time.monotonic()
    code = subprocess.run([str(PIPELINE), *sys.argv[1:]], env=os.environ | {"PYTHON": sys.executable}).returncode
    seconds = time.monotonic() - began
    print(f"total: {seconds:.0f} s ({seconds / 60:.1f} minutes), peak memory {peak_bytes() / 1e9:.2f} GB (largest process)")
    return code


def peak_bytes() -> int:
    """Largest resident size among all finished processes below this one."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())
