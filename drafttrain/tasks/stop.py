"""A wish to stop, heard at once and acted upon at the end of an optimizer step.

Lightning's own TERM handler stops behind *any* micro-batch (the gradients of half a window are lost), broadcasts from inside the
signal handler (which mismatches collectives when one rank alone is told), and synchronises the host at every micro-batch to look
for the flag. Here the flag travels with the counts that a window all-reduces anyway, so all ranks agree on the same step.
"""

import signal
import sys
import threading
import time

DOUBLE_PRESS_S = 2.0
"""torchrun passes Ctrl-C on to processes that already had it from the terminal, within milliseconds; a person needs longer."""


class StopSignal:
    """Context manager: SIGTERM and SIGINT set `requested`. A second Ctrl-C, seconds later, interrupts at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # Python lets only the main thread set handlers
            self._before = {number: signal.signal(number, self._hear) for number in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _hear(self, number: int, _frame) -> None:
        if self.requested and number == signal.SIGINT and time.monotonic() - self._since > DOUBLE_PRESS_S:
            raise KeyboardInterrupt
        if not self.requested:
            self._since = time.monotonic()
            print(f"{signal.Signals(number).name}: stopping at the end of this step, after saving", file=sys.stderr, flush=True)
        self.requested = True


def take_over_signals(trainer) -> None:
    """Keeps Lightning 2.6 from registering its handlers and from broadcasting a flag before every micro-batch.

    Lightning has no public switch for either. Both names are checked, so that a release that renames them is noticed.
    """
    for owner, name in (
        (trainer._signal_connector, "register_signal_handlers"),
        (trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
    ):
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(
                f"Lightning has no {name} any more: look at how it handles SIGTERM now, and adapt drafttrain/tasks/stop.py."
            )
        setattr(owner, name, lambda: None)
