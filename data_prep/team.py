"""Several processes, on one or more machines with a common disk, working on one data folder.

They talk through files alone, so nothing can time out while one of them maps a large file: the leader (rank 0) collects and splits
the prompts and then writes `started.json`; every process answers the shards whose number is its own modulo the number of
processes; the leader waits for the shards of the others and writes the manifests.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json_atomic

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Team:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1
    start: str = ""
    """Differs between two starts of the same job: an old `started.json` counts for nothing."""

    @staticmethod
    def of(rank: int, world: int, environ: Mapping[str, str] = os.environ) -> "Team":
        """As torchrun started it."""
        return Team(rank, world, f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '')}")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mine(self, shard: int) -> bool:
        """Whether this process makes a shard."""
        return shard % self.world == self.rank

    def announce(self, folder: Path) -> None:
        """The leader's word that the prompts are there and nothing of an earlier start is left."""
        if self.world > 1:
            write_json_atomic(folder / "started.json", {"start": self.start, "world": self.world})

    def await_leader(self, folder: Path) -> None:
        """Wait for that word. UserError if the leader was started with another number of processes."""
        path = folder / "started.json"
        self.wait_until(lambda: path.exists() and read_json(path, "the start of data_prep")["start"] == self.start)
        world = read_json(path, "the start of data_prep")["world"]
        if world != self.world:
            raise UserError(
                f"{folder}/ is being worked on by {world} processes, but this one was started as one of {self.world}; start all of "
                "them with one torchrun command."
            )

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Poll. If another process dies, torchrun ends this one."""
        while not ready():
            time.sleep(POLL_SECONDS)


ALONE = Team()
