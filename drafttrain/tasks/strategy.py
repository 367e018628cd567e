"""Which of Lightning's strategies is which, in whatever form it is at hand. Imports nothing: it is asked before anything loads."""

from typing import Any


def uses_deepspeed(strategy: Any) -> bool:
    """Does a `trainer.strategy`, as written (a name, or a class with arguments) or built, mean DeepSpeed?"""
    if isinstance(strategy, dict):
        strategy = strategy.get("class_path", "")
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return "deepspeed" in name.lower()


def divides_weights(strategy: Any) -> bool:
    """Does it, in any of those forms, mean DeepSpeed ZeRO-3?"""
    if not uses_deepspeed(strategy):
        return False
    if isinstance(strategy, dict):
        arguments = strategy.get("init_args")
        return isinstance(arguments, dict) and str(arguments.get("stage")) == "3"
    return "stage_3" in strategy if isinstance(strategy, str) else bool(strategy.zero_stage_3)
