"""A rank that is stopped, or hangs, ends the job by its name; one that is slow is waited for."""

import json
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from tasks.test_processes import launch
from tasks.warm_ranks import Job
from tiny_run import logged, make_run

from drafttrain.errors import UserError
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.checkpoints import find_last
from drafttrain.tasks.watch import ENDED, KEY, PATIENCE, REMIND_S, SILENT_S, Lookout, Sign, Watch, meet
from drafttrain.topology import Topology, read_topology

HUNG_S = 1000.0


class Ranks:
    """Signs of life as time goes by: each second every rank gives a new beat, and moves if it is told to."""

    def __init__(self, world: int):
        self.signs: list[Sign | None] = [Sign(0, 0, 7, f"step {7 + r}", "f.py:1", f"process {r}") for r in range(world)]
        self.now, self.lookout, self.said = 0.0, Lookout(world, HUNG_S, 0.0), []

    def change(self, rank: int, **fields) -> None:
        self.signs[rank] = replace(self.signs[rank], **fields)

    def pass_time(self, seconds: int, beating=(), moving=(), stepping=(), reached=True) -> str:
        """What is said when the job ends; empty if it goes on."""
        for _ in range(seconds):
            self.now += 1
            for rank in range(len(self.signs)):
                sign = self.signs[rank]
                if sign is not None:
                    self.change(rank, beat=sign.beat + (rank in beating), stack=sign.stack + (rank in moving))
                    self.change(rank, place=sign.place + (rank in stepping))
            text, ended = self.lookout.look(self.signs, self.now, reached)
            if ended:
                return text
            self.said += [text] if text else []
        return ""


def test_a_rank_without_a_beat_is_named_even_while_others_move():
    ranks = Ranks(3)
    assert not ranks.pass_time(100, beating=(0, 1, 2), moving=(0, 1, 2))
    ranks.change(0, place=9)
    said = ranks.pass_time(1000, beating=(1, 2), moving=(1, 2))
    assert said.startswith("rank 0 (process 0): it was last at step 7 (f.py:1). It gave no sign of life for 300 s")
    assert 0 <= ranks.now - 100 - SILENT_S <= 2 and ranks.lookout.speaker() == 1


def test_a_rank_that_hangs_is_the_one_that_is_behind():
    ranks = Ranks(3)
    ranks.pass_time(3, beating=(0, 1, 2), stepping=(0, 2))
    said = ranks.pass_time(2000, beating=(0, 1, 2))
    assert said.startswith("rank 1 (process 1): it stands at step 8") and "did not move for 1,000 s" in said
    assert "rank 0" not in said and 0 <= ranks.now - 3 - HUNG_S <= 2 and ranks.lookout.speaker() == 0


def test_ranks_that_hang_at_the_same_place_are_all_named():
    said = Ranks(2).pass_time(2000, beating=(0, 1))
    assert "rank 0" in said and "rank 1" in said and "They did not move" in said


def test_of_those_at_the_same_place_the_one_outside_of_torch_is_named():
    ranks = Ranks(3)
    for rank in (0, 2):
        ranks.change(rank, in_torch=True, place=8)
    ranks.change(1, place=8)
    said = ranks.pass_time(2000, beating=(0, 1, 2))
    assert said.startswith("rank 1 (process 1)") and "rank 0" not in said and "rank 2" not in said


@pytest.mark.parametrize("moves", ["moving", "stepping"])
def test_a_slow_rank_is_waited_for_and_named_now_and_then(moves):
    ranks = Ranks(2)
    assert not ranks.pass_time(10_000, beating=(0, 1), **{moves: (1,)})
    assert 10 <= len(ranks.said) <= 10_000 / REMIND_S
    assert set(ranks.said) == {"still waiting for rank 1 (process 1): it is at step 8 (f.py:1)"}


def test_a_rank_that_has_not_begun_is_waited_for_as_long_as_others_move():
    ranks = Ranks(2)
    ranks.signs[0] = None
    assert not ranks.pass_time(3000, beating=(1,), moving=(1,))
    assert ranks.pass_time(2000, beating=(1,)).startswith("rank 0, which has told nothing yet. It did not move")


@pytest.mark.parametrize("left", [{}, {"done": True}])
def test_what_a_killed_attempt_left_in_the_store_is_no_sign_of_life(left):
    """The launcher's store may outlive the ranks; a rank is known from its second beat on."""
    ranks = Ranks(2)
    ranks.change(0, **left)
    assert not ranks.pass_time(5000, beating=(1,), moving=(1,))
    assert not ranks.pass_time(100, beating=(0, 1), moving=(0, 1))
    assert ranks.pass_time(5000, beating=(1,), moving=(1,)).startswith("rank 0 (process 0)") or left


def test_those_that_are_done_are_no_longer_asked():
    ranks = Ranks(2)
    ranks.pass_time(2, beating=(0, 1))
    ranks.change(1, done=True)
    assert not ranks.pass_time(5000, beating=(0,), moving=(0,))
    ranks.change(0, done=True)
    assert not ranks.pass_time(5000)


@pytest.mark.parametrize(
    ("strategy", "accelerator", "backend", "limit"),
    [
        ("ddp", "cpu", "gloo", PATIENCE),
        ("ddp", "gpu", "nccl", PATIENCE),
        (DDPStrategy(), "gpu", "nccl", PATIENCE),
        (DDPStrategy(timeout=timedelta(seconds=6), process_group_backend="gloo"), "gpu", "gloo", timedelta(seconds=6)),
    ],
)
def test_time_limits_of_the_recipe_are_kept_and_others_put_out_of_the_way(monkeypatch, strategy, accelerator, backend, limit):
    found = {}
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **given: found.update(backend=backend, **given))
    meet(1, 2, accelerator, strategy)
    assert found == {"backend": backend, "rank": 1, "world_size": 2, "timeout": limit}


def test_where_the_store_is_out_of_reach_its_machine_is_named():
    ranks = Ranks(3)
    assert not ranks.pass_time(10, beating=(0, 1, 2), moving=(0, 1, 2))
    said = ranks.pass_time(1000, beating=(1,), moving=(1,), reached=False)
    assert said.startswith("rank 0 (process 0): it was last at") and "rank 2" not in said and ranks.lookout.speaker() == 1


def test_the_store_is_where_torchrun_says():
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    started = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert read_topology(environ=world | started, gpus=0) == Topology(2, 2, 1, 1, "cpu", ("node1", 29500))
    assert read_topology(environ=world, gpus=0).store is None
    assert read_topology(environ=started, gpus=0).store is None


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_behind_an_error_there_is_no_farewell(error):
    """So a process that then hangs instead of ending is one without a beat."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with nullcontext() if error is None else pytest.raises(error), Watch(("127.0.0.1", store.port), 1, 2, 50.0) as watch:
        watch.at("the forward pass")
        if error is not None:
            raise error
    sign = Sign(**json.loads(store.get(KEY.format(1))))
    assert sign.done == (error is None) and sign.place == 1
    assert sign.doing == ("the forward pass" if error is None else "its end, behind ZeroDivisionError")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_seconds_that_are_none_are_refused(seconds):
    with pytest.raises(UserError, match="checkpoint.hung_s is"):
        CheckpointConfig(hung_s=seconds)


# ---- in processes ----------------------------------------------------------------------------------------------------------


def sections(hung_s: float, steps: int = 6, **trainer) -> dict:
    return {
        "trainer": {"max_steps": steps, "log_every_n_steps": 1, "strategy": "ddp"} | trainer,
        "checkpoint": {"hung_s": hung_s, "every": 1},
    }


@pytest.mark.slow  # a machine that is busy with something else may itself keep a process from beating for a second
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("stopped", ["rank 1 (process ", "it was last at", "It gave no sign of life for 1 s"]),
        ("asleep", ["rank 1 (process ", "it stands at the forward pass of step 3, micro-batch 1", "tasks/train_process.py:"]),
    ],
)
def test_a_hung_rank_ends_the_job_by_its_name(tmp_path, tiny_llama, target_folders, trouble, words):
    run = make_run(tmp_path / "run", tiny_llama)
    job = Job(run, target_folders("llama"), 2, sections(2.0), trouble=trouble)
    began = time.monotonic()
    codes = job.finish(60)
    assert codes[0] == ENDED and codes[1] in (ENDED, -signal.SIGTERM, -signal.SIGKILL) and time.monotonic() - began < 40
    assert all(word in job.said(0) for word in words) and "rank 0" not in job.said(0), job.said(0)
    assert find_last(run / "checkpoints").position.step == 2


@pytest.mark.slow
def test_a_slow_rank_outlives_every_time_limit(tmp_path, tiny_llama, target_folders):
    """Rank 0 takes long before training, and for a step: longer than a process that hangs would be waited for."""
    run = make_run(tmp_path / "run", tiny_llama)
    job = Job(run, target_folders("llama"), 2, sections(1.0, steps=3), trouble="slow")
    assert job.finish(60) == [0, 0], job.said(0) + job.said(1)
    assert logged(run).keys() == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["stopped", "asleep", "killed"])
def test_torchrun_starts_the_job_again(tmp_path, tiny_llama, target_folders, trouble):
    """It gives a stopped rank 30 seconds before it kills it; and ranks that start anew may take seconds to meet."""
    run = make_run(tmp_path / "run", tiny_llama)
    process = launch(run, target_folders("llama"), torchrun=True, restarts=1, patience_s=180, trouble=trouble, **sections(20.0))
    said = process.stdout.read()
    assert process.wait(60) == 0, said
    assert logged(run).keys() == set(range(1, 7)) and "resuming from" in said
    assert ("rank 1 (process" in said) == (trouble != "killed")
