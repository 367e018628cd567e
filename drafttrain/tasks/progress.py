"""What a person sees while it trains: a bar on a terminal, one plain line per log interval elsewhere. Rank 0 only.

docs/metrics.md says what the numbers are, and what else is logged.
"""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PHASES = "rollout", "train", "sync"
"""What the time of an on-policy run goes into."""


def describe(metrics: dict[str, float]) -> str:
    """`loss 3.214  accepts 0.41 0.28 0.20  1,234 tokens/s  lr 5.0e-04`, and on policy

    `loss 0.512 (accepted 0.401, rejected 0.622)  rollout tau 2.413  staleness 3.5 steps  time 41% rollout, 57% train, 2% sync  ...`
    """
    streams = ", ".join(f"{name} {metrics[f'loss_{name}']:.3f}" for name in ("accepted", "rejected") if f"loss_{name}" in metrics)
    parts = [f"loss {metrics['loss']:.3f}{f' ({streams})' if streams else ''}"]
    if top1 := sorted((int(name.rpartition("_")[2]), value) for name, value in metrics.items() if name.startswith("top1_depth_")):
        parts.append(f"accepts {' '.join(f'{value:.2f}' for _, value in top1)}")
    if "rollout/tau" in metrics:  # not where nothing was answered since the last line
        parts.append(f"rollout tau {metrics['rollout/tau']:.3f}")
    if "rollout/staleness" in metrics:
        parts.append(f"staleness {metrics['rollout/staleness']:.1f} steps")
        parts.append("time " + ", ".join(f"{metrics['time/' + name]:.0%} {name}" for name in PHASES))
    return "  ".join([*parts, f"{metrics['tokens_per_second']:,.0f} tokens/s", f"lr {metrics['lr']:.1e}"])


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
