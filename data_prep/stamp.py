"""What a data folder is made with, kept in `settings.json`: a restart goes on with the same and never with something else."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.config import PrepareConfig
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json_atomic

FREE = ("slots",)
"""Fields of the recipe that do not decide what the data is."""


def settings(config: PrepareConfig, target) -> dict[str, Any]:
    """Dotted name, as the user typed it -> value. UserError if a prompt file cannot be read."""
    found: dict[str, Any] = {f"prepare.{k}": v for k, v in asdict(config).items() if k not in ("prompts", "engine", *FREE)}
    found["prepare.engine"] = type(config.engine).__name__
    found |= {f"prepare.engine.{name}": value for name, value in config.engine.decides().items()}
    for number, source in enumerate(config.prompts):
        here = f"prepare.prompts[{number}]"
        found[here] = type(source).__name__
        found |= {f"{here}.{name}": value for name, value in source.decides().items()}
        found |= {f"{here} {name}": value for name, value in source.content().items()}
    found |= {f"target {name}": value for name, value in asdict(target.identity).items() if name != "path"}
    found["target.dtype"] = str(target.dtype).removeprefix("torch.")
    return found


def require_same(folder: Path, wanted: dict[str, Any]) -> None:
    """Writes `settings.json` into a new data folder, or checks it. UserError that names each difference and the way out."""
    path = folder / "settings.json"
    if not path.exists():
        write_json_atomic(path, wanted)
        return
    made = read_json(path, "the data folder")
    names = [*wanted, *(name for name in made if name not in wanted)]
    other = [
        f"{name} was {_show(made, name)} and is now {_show(wanted, name)}" for name in names if made.get(name) != wanted.get(name)
    ]
    if other:
        raise UserError(
            f"{folder}/ was made with other settings: {'; '.join(other)}. Set them back to go on with it, give the run another "
            "`name`, or delete that folder."
        )


def _show(values: dict[str, Any], name: str) -> str:
    return "absent" if name not in values else "null" if values[name] is None else str(values[name])
