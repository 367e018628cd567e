"""The run folder: everything that one recipe made, in one place.

runs/<name>/recipe.yaml     the resolved recipe of the last command that made data or a drafter; what the later stages are given
            recipe-export.yaml, ...   likewise of each command that made something of them (export, validate, bench)
            versions.json   per command: versions, commit, world size, command line
            data/           token stores, prompts, ledger          (data_prep)
            checkpoints/    last/ to resume, best/ by tau          (train)
            logs/           metrics                                (train)
            export/         folder for an engine, or our own       (export; its card also by validate and bench)
            report/         validation.json, tokens.jsonl, plots   (validate); report/bench/ likewise (bench)
"""

import platform
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafttrain.files import read_json, write_atomic, write_json_atomic
from drafttrain.validation import hardware

LATER = ("export", "validate", "bench")
"""Commands that make something of a drafter, and none."""


@dataclass(frozen=True)
class Run:
    """A run folder. Properties are paths; nothing is made until something is written."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def best(self) -> Path:
        return self.checkpoints / "best"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def export(self) -> Path:
        return self.folder / "export"

    @property
    def report(self) -> Path:
        return self.folder / "report"

    def record(self, command: str, recipe: dict[str, Any], world: int = 1) -> None:
        """Write the resolved recipe, and what ran `command`. Stages may run on different machines, so each has its own entry.

        What a later command was told once (export.push, bench.count) stays out of recipe.yaml: it would be told to all that follow."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / f"recipe-{command}.yaml" if command in LATER else self.folder / "recipe.yaml"
        write_atomic(own, dump_yaml(recipe))
        path = self.folder / "versions.json"
        entries = read_json(path, "the record of versions") if path.exists() else {}
        entries[command] = stamp(world)
        write_json_atomic(path, entries)


def dump_yaml(recipe: dict[str, Any]) -> str:
    """A recipe as YAML, sections in the order of the recipe, short lists on one line."""
    return yaml.dump(recipe, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def stamp(world: int) -> dict[str, Any]:
    """What a result depends on besides the recipe."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "packages": hardware.versions(),
        "commit": hardware.commit(),
        "world": world,
        "command": command_line(),
    }


def command_line() -> str:
    """The command as it was typed, near enough to be typed again."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return shlex.join([*name.split(), *sys.argv[1:]])


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line; floats so that plain YAML reads them as floats again."""


def _list(dumper: yaml.SafeDumper, items: list) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=all(isinstance(x, int | float) for x in items))


_Dumper.add_representer(list, _list)
