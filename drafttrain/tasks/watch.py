"""Notices a process that is hung or gone, names it, and ends the job, so that a launcher can start it anew; a slow one is waited for.

Every process tells its signs of life to a store that all of them reach, from a thread of its own, every few seconds:

    beat      a number that goes up each time: a process that is stopped, or whose machine is gone, no longer counts
    stack     where the main thread stands, as a hash: one that computes is somewhere else now and then; one that waits or hangs is not (the time that
              it has computed would not tell: a thread that waits for a GPU spins)
    place     how many events the training has come through, the same ones in the same order in every process

    no new beat for `silent` seconds                                it is gone: end
    no process's stack or place changed for `hung_s` seconds        those with the smallest place are hung, the others wait for them: end. Of several
                                                                    those that stand outside of torch, where one waits for others
    some stand still, others move                                   those that move are slow: wait, and say so every `REMIND_S` seconds

So however long one process reads, compiles or answers prompts, the others wait; and the time limits of the process groups, which know
nothing of all this, are put out of the way.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

PATIENCE = timedelta(days=30)
"""Time limit of process groups that are watched."""
SILENT_S = 300.0
"""A process may hold Python's lock (which its thread needs too) for seconds, while it unpickles or copies: not for minutes."""
REMIND_S = 600.0
TORCH = os.path.dirname(torch.__file__) + os.sep
ENDED = 75
"""Exit code of a process that ended its job so: EX_TEMPFAIL, try again."""
KEY = "drafttrain/watch/{}"
REACH = timedelta(seconds=10)
"""How long a request to the store may take."""


@dataclass(frozen=True)
class Sign:
    """What one process tells the others."""

    beat: int
    stack: int
    place: int
    doing: str
    """In words."""
    where: str
    """File and line at which the main thread stands."""
    process: str
    """Number and machine."""
    in_torch: bool = False
    """Whether that is a file of torch."""
    done: bool = False
    """It has left the training."""


class Lookout:
    """Judges signs of life. Knows no clock and no network."""

    def __init__(self, world: int, hung_s: float, now: float):
        self.hung_s, self.silent_s = hung_s, min(SILENT_S, hung_s / 2)
        self._signs: list[Sign | None] = [None] * world
        self._beaten, self._moved, self._reminded = [now] * world, [now] * world, now
        self._blamed: Sequence[int] = ()
        self._heard = [False] * world
        """Who has beaten since this began: the launcher's store may still hold the signs of ranks that were killed."""

    def look(self, signs: Sequence[Sign | None], now: float, reached: bool = True) -> tuple[str, bool]:
        """(what is to be said, whether the job is to end). `signs`: by rank; None of those that have told nothing yet. `reached`: whether the store
        answers, which is on rank 0's machine."""
        for rank, (new, old) in enumerate(zip(signs, self._signs, strict=True)):
            if new is None:
                continue
            if old is not None and (new.beat != old.beat or (rank and self._heard[rank] and not reached)):
                self._beaten[rank], self._heard[rank] = now, True
            if old is None or (new.stack, new.place) != (old.stack, old.place):
                self._moved[rank] = now
        self._signs = list(signs)
        there = [rank for rank, sign in enumerate(signs) if sign is None or not (sign.done and self._heard[rank])]
        silent = [rank for rank in there if self._heard[rank] and now - self._beaten[rank] > self.silent_s]
        if silent:
            return self._sentence(silent, f"gave no sign of life for {self.silent_s:,.0f} s", "it was last at"), True
        still = [rank for rank in there if now - self._moved[rank] > self.hung_s]
        if there and still == there:
            return self._sentence(self._behind(there), f"did not move for {self.hung_s:,.0f} s", "it stands at"), True
        waiting = [rank for rank in there if now - self._moved[rank] > REMIND_S]
        if waiting and now - self._reminded > REMIND_S:
            self._reminded = now
            moving = [rank for rank in there if rank not in waiting]
            return f"still waiting for {'; '.join(self._name(rank, 'it is at') for rank in moving)}", False
        return "", False

    def speaker(self) -> int:
        """Of those that the last look did not blame, the one that speaks for all."""
        there = [rank for rank, heard in enumerate(self._heard) if heard]
        return next((rank for rank in there if rank not in self._blamed), min(there, default=0))

    def _behind(self, ranks: Sequence[int]) -> list[int]:
        places = {rank: -1 if (sign := self._signs[rank]) is None else sign.place for rank in ranks}
        last = [rank for rank in ranks if places[rank] == min(places.values())]
        return [rank for rank in last if (sign := self._signs[rank]) is None or not sign.in_torch] or last

    def _sentence(self, ranks: Sequence[int], what: str, at: str) -> str:
        self._blamed = ranks
        named = "; ".join(self._name(rank, at) for rank in ranks)
        return (
            f"{named}. {'It' if len(ranks) == 1 else 'They'} {what}, and the others wait, so this job ends here; start it again (torchrun "
            "--max-restarts does), and it goes on from its last checkpoint. If it was only slow, raise checkpoint.hung_s."
        )

    def _name(self, rank: int, at: str) -> str:
        sign = self._signs[rank]
        return (
            f"rank {rank}, which has told nothing yet"
            if sign is None
            else f"rank {rank} ({sign.process}): {at} {sign.doing} ({sign.where})"
        )


class Watch:
    """Context manager, entered on every rank: tells this process's signs of life and looks at those of the others."""

    def __init__(self, store_at: tuple[str, int] | None, rank: int, world: int, hung_s: float):
        """`store_at`: host and port; None watches nothing."""
        self._store_at, self._rank, self._world = store_at, rank, world
        self.hung_s, self._interval = hung_s, min(5.0, hung_s / 5)
        self._place, self._doing = 0, "the start"
        self._main = threading.main_thread().ident
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._left, self._done = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None

    @property
    def watching(self) -> bool:
        return self._world > 1 and self._store_at is not None

    def at(self, doing: str) -> None:
        """The main thread comes to an event that all ranks come to, in the same order."""
        self._doing = doing
        self._place += 1

    def __enter__(self) -> "Watch":
        if self.watching:
            self._store = self._reach()
            self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
            self._thread.start()
        return self

    def __exit__(self, _kind, error: BaseException | None, _trace) -> None:
        """Behind an error it falls silent without a farewell: the others end where this process then hangs instead of ending."""
        self._done = error is None
        if error is not None:
            self._doing = f"its end, behind {type(error).__name__}"
        if self._thread is not None:
            self._left.set()
            self._thread.join()

    def _run(self) -> None:
        beat, lookout = 0, Lookout(self._world, self.hung_s, time.monotonic())
        signs: list[Sign | None] = [None] * self._world
        left = False
        while not left:
            beat += 1
            signs[self._rank] = own = self._sign(beat)
            try:
                self._store = self._store or self._reach()
                self._tell(self._store, own)
                signs = self._ask(self._store)
            except (RuntimeError, OSError):
                self._store = None
            said, ended = lookout.look(signs, time.monotonic(), reached=self._store is not None)
            speaks = self._rank == lookout.speaker()
            if said and speaks:
                print(said, file=sys.stderr, flush=True)
            if ended:
                time.sleep(0 if speaks else 3 * self._interval)  # or it would be torn from its last words by our end
                os._exit(ENDED)  # the main thread waits in a call that nothing interrupts
            left = self._left.wait(self._interval)
        with contextlib.suppress(RuntimeError, OSError):
            if self._store is not None:
                self._tell(self._store, self._sign(beat + 1))

    def _reach(self) -> dist.Store:
        assert self._store_at is not None
        host, port = self._store_at
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=REACH)

    def _tell(self, store: dist.Store, sign: Sign) -> None:
        store.set(KEY.format(self._rank), json.dumps(asdict(sign)))

    def _ask(self, store: dist.Store) -> list[Sign | None]:
        keys = [KEY.format(rank) for rank in range(self._world)]
        there = keys if store.check(keys) else [key for key in keys if store.check([key])]
        found = dict(zip(there, store.multi_get(there), strict=True))
        return [Sign(**json.loads(found[key])) if key in found else None for key in keys]

    def _sign(self, beat: int) -> Sign:
        frame = sys._current_frames().get(self._main or 0)
        file = "nowhere" if frame is None else frame.f_code.co_filename
        where = f"{'/'.join(file.split('/')[-3:])}:{0 if frame is None else frame.f_lineno}"
        return Sign(beat, _hash(frame), self._place, self._doing, where, self._process, file.startswith(TORCH), self._done)


def meet(rank: int, world: int, accelerator: str, strategy: Any) -> None:
    """Opens the processes' group before anything slow, as the trainer's strategy would later: from then on they can watch each other.

    `strategy`: as built, or its name; a time limit or backend that the recipe gives it is kept.
    """
    backend = getattr(strategy, "_process_group_backend", None) or ("nccl" if accelerator == "gpu" else "gloo")
    limit = getattr(strategy, "_timeout", default_pg_timeout)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=PATIENCE if limit == default_pg_timeout else limit)


def _hash(frame: FrameType | None) -> int:
    """Of all functions that are open and the instruction that each is at."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(stack))
