"""Trains on policy, run after run, in one of several processes: `torchrun ... on_policy_process.py TARGET RUNS.json`.

RUNS.json lists runs with their `folder`, `form` (on_policy_forms.py), `changes` of its sections, `trouble`, and a free `port` at which the
processes meet anew: to start processes takes longer than to train a tiny run. With DS_ACCELERATOR=cpu in the environment DeepSpeed runs on the
CPU, as in train_process.py. `time_limit` among the changes is how many seconds the trainer's processes wait for each other.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from on_policy_forms import form_of, trouble  # noqa: E402
from tiny_run import start  # noqa: E402
from train_process import allow_deepspeed_on_cpu  # noqa: E402

from drafttrain.topology import read_topology  # noqa: E402


def run(target: Path, folder: str, form: str, port: int, changes: dict, trouble_of: dict) -> None:
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    sections = form_of(form)
    sections["on_policy"] |= changes.pop("on_policy", {})
    topology = read_topology(gpus=0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else None)
    if patience := changes.pop("time_limit", None):
        changes["trainer"]["strategy"] = DDPStrategy(timeout=timedelta(seconds=patience))
    with trouble(topology.rank, **trouble_of):
        start(Path(folder), target, topology=topology, **sections, **changes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        allow_deepspeed_on_cpu()
    target, runs = sys.argv[1:]
    for one in json.loads(Path(runs).read_text()):
        run(Path(target), one["folder"], one["form"], one["port"], one["changes"], one["trouble"])
