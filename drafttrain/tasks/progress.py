"""What a person sees while it trains: a bar on a terminal, one plain line per log interval elsewhere. Rank 0 only."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def describe(metrics: dict[str, float]) -> str:
    """`loss 3.214  accepts 0.41 0.28 0.20  1,234 tokens/s  lr 5.0e-04`"""
    top1 = " ".join(f"{value:.2f}" for name, value in sorted(metrics.items()) if name.startswith("top1_depth_"))
    return f"loss {metrics['loss']:.3f}  accepts {top1}  {metrics['tokens_per_second']:,.0f} tokens/s  lr {metrics['lr']:.1e}"


class Reporter:
    """Shows steps, loss, teacher-forced acceptance by depth, speed and time left. `closing` says what is still done behind the last step."""

    def __init__(self, step: int, max_steps: int, closing: str, shown: bool):
        self.max_steps, self.closing, self.shown = max_steps, closing, shown
        self._first, self._since = step, time.monotonic()
        self._bar: Progress | None = None
        if shown and Console(file=sys.stderr).is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=2)
            self._task = self._bar.add_task("", total=max_steps, completed=step)
            self._bar.start()

    def step(self, step: int) -> None:
        """One optimizer step was done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """A log interval's means; the last step always ends one."""
        if self._bar is not None:
            self._bar.update(self._task, description=describe(metrics))
        else:
            self.say(f"step {step}/{self.max_steps}  {describe(metrics)}  {self._time_left(step)} left")
        if step >= self.max_steps:
            self.say(self.closing)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        elif self.shown:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _time_left(self, step: int) -> str:
        done = max(step - self._first, 1)
        seconds = (time.monotonic() - self._since) / done * (self.max_steps - step)
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
