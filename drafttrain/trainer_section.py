"""The `trainer:` section of a recipe: arguments of Lightning's Trainer, passed through, checked against its signature.

Only `train` and `plan` import this file: Lightning alone takes seconds to import, and a laptop that validates needs none of it.
Classes (`class_path`, `init_args`) may stand for a strategy, loggers, callbacks, plugins; they are built here.
"""

import copy
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from drafttrain.errors import UserError, install
from drafttrain.recipe import FROM_TORCHRUN
from drafttrain.recipe_build import choices, describe, nearest
from drafttrain.tasks.strategy import uses_deepspeed
from drafttrain.tasks.train_checks import OURS, ours_refused, require_positive

ARGUMENTS = ("init_args", "dict_kwargs")
"""Keys that hold a class's arguments."""
HARDWARE = "several GPUs are what recipes/hardware has files for: --config recipes/hardware/zero2.yaml, ddp.yaml, zero3.yaml"


def require_deepspeed(strategy: Any) -> None:
    """UserError where a strategy, as written in the recipe, is DeepSpeed and that is not installed; Lightning alone would end with a traceback."""
    if uses_deepspeed(strategy) and importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"trainer.strategy is DeepSpeed, which is not installed on this machine; run {install('deepspeed')}, or use --config "
            "recipes/hardware/ddp.yaml."
        )


def trainer_arguments(section: dict[str, Any], logs: Path, elsewhere: bool = False) -> dict[str, Any]:
    """What the recipe says of Lightning's Trainer, checked, with classes built.

    Args:
        section: `trainer` as written in the recipe.
        logs: Where loggers write that the recipe gives no folder.
        elsewhere: Whether another machine trains. Then DeepSpeed's strategy is held to its signature, and not built where DeepSpeed is not installed.

    Raises:
        UserError: unknown key, wrong type, unknown class or argument; all of them.
    """
    hints = {key: hint for key, hint in get_type_hints(Trainer.__init__).items() if key not in ("return", *FROM_TORCHRUN, *OURS)}
    errors, arguments = [], {}
    for key, value in section.items():
        if (refusal := _refusal(key, value, hints)) is not None:
            errors.append(refusal)
            continue
        if key == "logger":
            value = _with_save_dir(value, logs)
        try:
            parsed_alone = elsewhere and key == "strategy" and uses_deepspeed(value) and not importlib.util.find_spec("deepspeed")
            arguments[key] = _build(hints[key], value, not parsed_alone)
        except (ArgumentError, ValueError, TypeError, ImportError) as error:
            errors.append(_sentence(f"trainer.{key}", hints[key], value, error))
    if errors:
        raise UserError("\n".join(errors))
    require_positive(arguments)
    return arguments


def _refusal(key: str, value: Any, hints: dict[str, Any]) -> str | None:
    """Why a key cannot be there, a strategy's name is none, or a class is given no arguments but something else; None if all is well."""
    if key in OURS:
        return ours_refused(key)
    if key not in hints:
        return f"unknown key 'trainer.{key}': {nearest(f'trainer.{key}', hints, [f'trainer.{known}' for known in hints])}"
    if key == "strategy" and (refusal := _strategy_refusal(value)) is not None:
        return refusal
    if isinstance(value, dict) and "class_path" in value:
        for name in ARGUMENTS:
            if not isinstance(value.get(name), dict | None):
                return f"'trainer.{key}.{name}' should be arguments by their names, got {value[name]!r}; leave it out where there are none."
    return None


def _strategy_refusal(value: Any) -> str | None:
    """Why a strategy, as written, cannot be trained with; None if its name or class may be."""
    if isinstance(value, dict) and "class_path" not in value:
        return f"'trainer.strategy' names no class: got {value}, wanted its class_path too; {HARDWARE}."
    name = str(value["class_path"] if isinstance(value, dict) else value)
    if _unfit(name):
        return (
            f"'trainer.strategy' divides the weights in a way in which no drafter can be saved here: got {value!r}; {HARDWARE}."
        )
    names = ["auto", *(known for known in StrategyRegistry.available_strategies() if not _unfit(known))]
    if isinstance(value, str) and value not in names:
        return f"'trainer.strategy' is no strategy of Lightning: got {value!r}, known are {', '.join(names)}; {HARDWARE}."
    return None


def _unfit(strategy: str) -> bool:
    """Is this one of Lightning's for other devices, or that keeps whole weights nowhere and is not DeepSpeed (weights.py)?"""
    return any(word in strategy.lower().replace("_", "") for word in ("fsdp", "modelparallel", "xla", "tpu"))


def _build(hint: Any, value: Any, instantiate: bool) -> Any:
    """Parse against the hint; a class that is named is built where asked. (A copy: jsonargparse writes into what it parses.)"""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    if isinstance(value, dict):
        # A key with nothing behind is a class without arguments.
        value = {key: given for key, given in value.items() if given is not None or key not in ARGUMENTS}
    parsed = parser.parse_object({"value": copy.deepcopy(value)})
    return (parser.instantiate(parsed) if instantiate else parsed).value


def _with_save_dir(value: Any, logs: Path) -> Any:
    """Loggers write into the run folder unless the recipe says where."""
    if isinstance(value, list):
        return [_with_save_dir(item, logs) for item in value]
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    cls = choices(Logger).get(str(value["class_path"]).rpartition(".")[2])
    if cls is None or "save_dir" not in inspect.signature(cls).parameters:
        return value
    defaults = {"save_dir": str(logs)} | ({"name": ""} if cls is CSVLogger else {})
    return {"class_path": f"{cls.__module__}.{cls.__name__}", "init_args": defaults | (value.get("init_args") or {})}


NOISE = re.compile(r"(Does not validate|Subtypes:|Errors:|Given value|- Expected a|- Problem with|Parser key \"value\")")
"""Lines of jsonargparse's nested reports that only repeat the types that were tried."""


def _sentence(place: str, hint: Any, value: Any, error: Exception) -> str:
    """One sentence out of jsonargparse's nested report."""
    if not isinstance(value, dict) or "class_path" not in value:
        return f"'{place}' should be {describe(hint)}, got {value!r} ({type(value).__name__})."
    text, name = str(error), value["class_path"]
    if found := re.search(r"Option '([\w.]+)' is not accepted", text):
        return f"'{place}.init_args.{found[1]}' is no argument of {name}; see the signature of that class."
    if "dot import path" in text or "No module named" in text or "has no attribute" in text:
        base = {"trainer.strategy": Strategy, "trainer.logger": Logger}.get(place)
        known = f"; known are {', '.join(choices(base))}" if base else ""
        return f"'{place}.class_path' names no class that can be imported: got {name!r}{known}."
    reasons = [line.strip(" -") for line in text.splitlines() if not NOISE.match(line.strip())]
    return f"'{place}' could not be built from {name}: {' '.join(reasons)[:300] or 'it does not take these arguments.'}"
