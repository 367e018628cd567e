"""Which of Lightning's strategies is which, in whatever form it is at hand. Imports nothing: it is asked before anything loads."""

from typing import Any


def uses_deepspeed(strategy: Any) -> bool:
    """Does a `trainer.strategy`, as written (a name, or a class with arguments) or built, mean DeepSpeed?"""
    if isinstance(strategy, dict):
        strategy = strategy.get("class_path", "")
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return "deepspeed" in name.lower()
