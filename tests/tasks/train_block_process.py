"""Trains a block drafter in a process of its own: `python train_block_process.py RUN TARGET CASE '{"trainer": {...}}'`, alone or under torchrun."""

import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from tiny_run import start  # noqa: E402

from drafttrain.divergences import HardCrossEntropy, Selection  # noqa: E402
from drafttrain.drafters.dflash2 import DFlash2  # noqa: E402
from drafttrain.drafters.dspark import DSpark  # noqa: E402
from drafttrain.errors import UserError  # noqa: E402
from drafttrain.topology import read_topology  # noqa: E402

BLOCK = {"block": 4, "layers": 1, "taps": [1], "rank": 4, "anchors": None}
CASES = {
    "dspark without confidence": (DSpark(**BLOCK, confidence=False), [HardCrossEntropy()]),
    "dspark untaught": (DSpark(**BLOCK), [HardCrossEntropy()]),
    "dflash2": (DFlash2(**BLOCK, group=8, candidates=4), [HardCrossEntropy(), Selection()]),
}
"""Drafter and divergences."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    run, target, case, changes = sys.argv[1:]
    drafter, divergences = CASES[case]
    sections = json.loads(changes)
    topology = read_topology(sections["trainer"].get("strategy"), gpus=0)
    try:
        start(Path(run), Path(target), topology, drafter=drafter, objective={"divergences": divergences}, **sections)
    except UserError as error:
        sys.exit(str(error))
