"""Signs of life: a line now and then while the target answers, and one where the work is stopped from outside."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import FrameType

from data_prep.prompt import Ask
from drafttrain.types import Request, Rollout

PERIOD_S = 30.0
"""Between two lines."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code where TERM ended the work, as a shell gives it."""


class Watched:
    """An `Ask` that says every half minute how far it is, from a thread of its own: the others are deep in arithmetic.

    Args:
        ask: who answers. One that has `under_way()` tells how many tokens of unfinished answers there are.
        name: what is answered, for the beginning of each line.
    """

    def __init__(self, ask: Ask, name: str, say: Callable[[str], None]):
        self.ask, self.name, self.say = ask, name, say
        self.under_way: Callable[[], int] = getattr(ask, "under_way", lambda: 0)

    def __call__(
        self, requests: Sequence[Request], temperature: float, top_p: float, taps: tuple[int, ...] | None
    ) -> Iterator[Rollout]:
        done, tokens, begun = 0, 0, perf_counter()

        def tell() -> None:
            rate = (tokens + self.under_way()) / (perf_counter() - begun)
            self.say(f"{self.name}: {done:,} of {len(requests):,} answers, {rate:,.0f} tokens/s")

        with _every(PERIOD_S, tell):
            for rollout in self.ask(requests, temperature, top_p, taps):
                done, tokens = done + 1, tokens + len(rollout.answer)
                yield rollout


@contextmanager
def _every(seconds: float, do: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        try:
            while not over.wait(seconds):
                do()
        except OSError:  # nobody reads our lines any more, which the main thread finds out by itself
            return

    thread = threading.Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Terminated(SystemExit):
    """TERM was heard."""


@contextmanager
def stoppable(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Within it, TERM and Ctrl-C end the program behind a line on what is kept in `folder` (a run's data/). TERM asks for exit code 143.

    A second TERM ends it at once.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _Terminated(TERMINATED)

    mine = threading.current_thread() is threading.main_thread()  # Python lets no other set handlers
    before = signal.signal(signal.SIGTERM, stop) if mine else None
    try:
        yield
    except (_Terminated, KeyboardInterrupt):
        say(f"stopped: {kept(folder)}")
        raise
    finally:
        if mine:
            signal.signal(signal.SIGTERM, before)


def kept(folder: Path) -> str:
    """What a data folder holds that no later start makes again, in words."""
    shards, attempts = len(list(folder.glob("*/shard-*.json"))), len(list(folder.glob("attempts/*.json")))
    found = [f"{shards:,} finished shard{'s' if shards > 1 else ''}"] if shards else []
    if (folder / "prompts.json").exists():
        found.append("the prompts")
    elif attempts:
        found.append("the prompts sampled so far")
    if not found:
        return "nothing is finished yet; the same command begins anew"
    return f"{' and '.join(found)} in {folder}/ are kept; the same command goes on from there"
