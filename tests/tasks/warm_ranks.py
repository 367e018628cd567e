"""Ranks of a training without torchrun: forked from a process that has imported everything, so that a start takes a second and not ten.

What torchrun does when a rank fails is done here too: the others get SIGTERM, and SIGKILL where they do not end within `GRACE_S`.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tasks import train_process

HERE = Path(__file__).parent
GRACE_S = 2.0
_CONTEXT = multiprocessing.get_context("forkserver")


def _warm_up() -> None:
    """Starts the server from which ranks are forked, if it does not run yet. It finds modules by the environment alone."""
    path = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    before = os.environ.copy()
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        _CONTEXT.set_forkserver_preload(["tasks.train_process", "drafttrain.tasks.train"])
        _CONTEXT.Process(target=_nothing).start()
    finally:
        os.environ.clear()
        os.environ |= before


def _nothing() -> None:
    pass


def _rank(environment: dict[str, str], said: Path, run: Path, target: Path, sections: dict[str, Any], more: dict) -> None:
    os.environ |= environment
    file = said.open("a", buffering=1)
    sys.stdout = sys.stderr = file  # to the end of the process, which tells of its errors behind this function
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    train_process.main(run, target, sections, **more)


class Job:
    """The ranks of one start."""

    def __init__(self, run: Path, target: Path, ranks: int, sections: dict[str, Any], deepspeed_on_cpu: bool = False, **more):
        _warm_up()
        with socket.socket() as s:
            s.bind(("", 0))
            port = s.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "warm", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        shared |= {"DS_ACCELERATOR": "cpu"} if deepspeed_on_cpu else {}
        self.run = run
        self._said_before = [len(self._all_said(rank)) for rank in range(ranks)]
        self.ranks: list[BaseProcess] = [
            _CONTEXT.Process(
                target=_rank,
                args=(shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, self._file(r), run, target, sections, more),
                daemon=True,
            )
            for r in range(ranks)
        ]
        for rank in self.ranks:
            rank.start()

    def _file(self, rank: int) -> Path:
        return self.run / f"rank_{rank}.txt"

    def _all_said(self, rank: int) -> str:
        return self._file(rank).read_text() if self._file(rank).exists() else ""

    def said(self, rank: int = 0) -> str:
        """What a rank printed since this start."""
        return self._all_said(rank)[self._said_before[rank] :]

    def tell(self, rank: int, number: int) -> bool:
        """Sends a signal. False if that rank has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.ranks[rank].pid, number)
            return self.ranks[rank].is_alive()
        return False

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """True once the condition holds; False if a rank ended or the time is over before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if any(not rank.is_alive() for rank in self.ranks):
                return False
            time.sleep(0.002)
        return False

    def finish(self, seconds: float = 120.0) -> list[int]:
        """Exit codes of all ranks, negative for signals. AssertionError if they do not end in time: then they are killed."""
        end = time.monotonic() + seconds
        while any(rank.is_alive() for rank in self.ranks):
            if any(rank.exitcode for rank in self.ranks):
                self._end_others()
                break
            if time.monotonic() > end:
                self._end_others()
                raise AssertionError(
                    f"still running after {seconds} s:\n" + "\n".join(self.said(r) for r in range(len(self.ranks)))
                )
            time.sleep(0.005)
        return [rank.exitcode for rank in self.ranks]  # type: ignore[misc]

    def _end_others(self) -> None:
        for rank in self.ranks:
            rank.terminate()
        for rank in self.ranks:
            rank.join(GRACE_S)
            if rank.is_alive():
                rank.kill()
                rank.join()


def train_in(run: Path, target: Path, ranks: int, sections: dict[str, Any], **more) -> None:
    """Trains in so many processes to the end. AssertionError with what they said if one fails."""
    job = Job(run, target, ranks, sections, **more)
    codes = job.finish()
    assert codes == [0] * ranks, (codes, [job.said(r) for r in range(ranks)])
