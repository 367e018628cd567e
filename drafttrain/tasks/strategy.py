"""Which of Lightning's strategies is which, in whatever form it is at hand. No heavy imports: it is asked before anything loads."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

DEFAULT = 2
"""The stage of Lightning's DeepSpeedStrategy where none is named."""
VARIABLE = "PL_DEEPSPEED_CONFIG_PATH"
"""Names a file with DeepSpeed's own configuration, for Lightning, where the strategy is given none."""


def uses_deepspeed(strategy: Any) -> bool:
    """Does a `trainer.strategy`, as written (a name, or a class with arguments) or built, mean DeepSpeed?"""
    if isinstance(strategy, dict):
        strategy = strategy.get("class_path", "")
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    return "deepspeed" in name.lower()


def zero_stage(strategy: Any) -> int:
    """Which stage of DeepSpeed's ZeRO it means, in any of those forms; 0 where nothing is divided.

    A configuration of DeepSpeed's own, given by argument or else by environment, replaces all other arguments, as Lightning has it; a file that cannot be
    read is passed over here, and whoever builds the strategy refuses it.
    """
    if not uses_deepspeed(strategy):
        return 0
    if not isinstance(strategy, str | dict):
        return _stage_in(strategy.config)
    written = strategy if isinstance(strategy, dict) else {}
    arguments: dict[str, Any] = {}
    for key in ("init_args", "dict_kwargs"):  # Lightning is given both, the latter over the former
        given = written.get(key)
        arguments |= {name: _plain(value) for name, value in given.items()} if isinstance(given, dict) else {}
    config = arguments.get("config")
    if (config := _opened(os.environ.get(VARIABLE) if config is None else config)) is not None:
        return _stage_in(config)
    if isinstance(strategy, str):
        return next((int(digit) for digit in strategy if digit.isdigit()), DEFAULT)
    return _number(arguments.get("stage", DEFAULT)) if arguments.get("zero_optimization", True) else 0


def _plain(value: Any) -> Any:
    """Text as what it means: whoever builds the strategy takes '0b11' and ' 3' for numbers, 'no' for false, and JSON for what it holds."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except (yaml.YAMLError, ValueError, RecursionError):
        return value


def _opened(config: Any) -> Any:
    """What a file holds; None for one that cannot be read."""
    if not isinstance(config, str | Path):
        return config
    try:
        return json.loads(Path(config).read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _stage_in(config: Any) -> int:
    """Of a configuration of DeepSpeed's."""
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return _number(zero.get("stage", 0)) if isinstance(zero, dict) else int(bool(zero))  # an old form: true is stage 1


def _number(stage: Any) -> int:
    return int(stage) if str(stage).isdecimal() else DEFAULT
