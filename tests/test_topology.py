"""What the environment says, and what is refused before anything loads."""

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.tasks.strategy import uses_deepspeed
from drafttrain.topology import Topology, read_topology, speaks


def env(world, local, rank=0, local_rank=0):
    return {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "RANK": str(rank), "LOCAL_RANK": str(local_rank)}


def test_one_process_without_torchrun():
    topology = read_topology(environ={}, gpus=0)
    assert topology == Topology(1, 1, 0, 0, "cpu")
    assert topology.nodes == 1 and topology.device == torch.device("cpu")


def test_two_machines_of_four():
    topology = read_topology(environ=env(8, 4, 6, 2), gpus=4)
    assert (topology.world, topology.local, topology.nodes, topology.rank) == (8, 4, 2, 6)
    assert topology.accelerator == "gpu" and topology.device == torch.device("cuda", 2)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (env(3, 2), "WORLD_SIZE is 3 and LOCAL_WORLD_SIZE is 2"),
        (env(2, 4), "multiple"),
        (env(0, 1), "WORLD_SIZE is 0"),
        (env(2, 2, 2), "RANK is 2"),
        (env(2, 2, -1), "RANK is -1"),
        (env(4, 2, 0, 2), "LOCAL_RANK is 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is 1"),
    ],
)
def test_contradictions_are_refused(environ, words):
    with pytest.raises(UserError, match=words):
        read_topology(environ=environ, gpus=0)


def test_more_processes_than_gpus():
    with pytest.raises(UserError, match="4 processes .* 2 GPUs: torchrun --nproc-per-node 2"):
        read_topology(environ=env(4, 4), gpus=2)
    assert read_topology(environ=env(4, 4), gpus=0).accelerator == "cpu"


@pytest.mark.parametrize(
    "strategy",
    [
        "deepspeed",
        "deepspeed_stage_2",
        {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"stage": 1}},
    ],
)
def test_deepspeed_needs_a_gpu(strategy):
    assert uses_deepspeed(strategy)
    with pytest.raises(UserError, match="DeepSpeed"):
        read_topology(strategy, environ={}, gpus=0)
    assert read_topology(strategy, environ={}, gpus=1).accelerator == "gpu"


@pytest.mark.parametrize("strategy", [None, "auto", "ddp", {"class_path": "DDPStrategy"}])
def test_other_strategies_do_not(strategy):
    assert read_topology(strategy, environ={}, gpus=0).accelerator == "cpu"


def test_who_speaks():
    assert speaks({}) and speaks(env(4, 4, 0)) and not speaks(env(4, 4, 3))
    assert speaks({"RANK": "5", "WORLD_SIZE": "2"}) and speaks({"RANK": "x"})  # nonsense is reported, not hushed up
