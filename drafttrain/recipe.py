"""The recipe: one YAML that says everything about a run.

The fields of `Recipe` are the sections, the fields of their dataclasses the keys; there is no second schema. Files given later
win, flags (`--section.key value`) win over files. `trainer:` is Lightning's own and is checked against its signature where a
trainer is made (`trainer_section.py`), because importing Lightning takes seconds.
"""

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jsonargparse

from data_prep.config import PrepareConfig
from data_prep.engines import Engine, OpenAIServer
from data_prep.sources import PromptSource
from drafttrain.data.stream import DataConfig
from drafttrain.decoding.methods import Method
from drafttrain.divergences import Divergence
from drafttrain.drafters.base import DrafterConfig
from drafttrain.drafters.registry import known_drafters
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.losses import Distillation, Objective
from drafttrain.position_weights import PositionWeight
from drafttrain.recipe_build import Builder, choices, places, plain
from drafttrain.recipe_files import Written, read_all
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.target.config import TargetConfig
from drafttrain.tasks.adapt_config import AdaptConfig
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.optimizer import OptimizerConfig
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.config import ValidateConfig

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
known_drafters()  # reads every file in drafters/, so that a new one is known by its class name

OBJECTIVES = Distillation, OnPolicyDistillation
"""Known by their class names because they are imported here."""
BASES: dict[type, str] = {
    DrafterConfig: "drafter",
    Objective: "objective",
    Divergence: "divergence",
    PositionWeight: "position weight",
    PromptSource: "prompt source",
    Engine: "engine",
    Method: "method",
}
"""Classes that a recipe chooses by name, and what one is called."""

TASKS = "distill", "on_policy"
FROM_TORCHRUN = "accelerator", "devices", "num_nodes", "use_distributed_sampler"


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe: every section built, every default filled in."""

    name: str
    """Decides the run folder, runs/<name>/."""
    target: TargetConfig
    prepare: PrepareConfig
    drafter: DrafterConfig
    objective: Objective
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    export: ExportConfig
    validate: ValidateConfig
    task: str = "distill"
    """distill: learn from the stored answers. on_policy: from answers that the target gives with the drafter as it is, see on_policy."""
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of lightning.pytorch.Trainer, passed through (max_steps, precision, strategy, logger, ...)."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", self.name):
            raise UserError(
                f"name is {self.name!r}, but it becomes a folder: use letters, digits, '.', '_' and '-', at most 200, e.g. smollm2-eagle3."
            )
        if self.task not in TASKS:
            raise UserError(f"task is {self.task!r}, but must be one of {', '.join(TASKS)}.")
        if self.target.weights is not None and isinstance(self.prepare.engine, OpenAIServer):
            raise UserError(
                f"target.weights is {self.target.weights}, but prepare.engine is a server, whose weights are not rounded so; set it to null, or let this "
                "process answer (leave prepare.engine out)."
            )
        if not isinstance(self.trainer, dict):
            raise UserError(
                f"trainer is {self.trainer!r}, but must hold arguments of Lightning's Trainer, such as max_steps; write them below it."
            )
        for key in FROM_TORCHRUN:
            if key in self.trainer:
                raise UserError(
                    f"trainer.{key} cannot be set in a recipe: the number of processes and machines comes from torchrun "
                    f"(torchrun --nproc-per-node N -m drafttrain train ...), the kind of device from the machine; remove it."
                )

    def plain(self) -> dict[str, Any]:
        """As YAML can hold it; parsing it again gives an equal recipe."""
        return plain(self, BASES)


def load_recipe(
    configs: Sequence[str | Path], overrides: Sequence[tuple[str, str]] = (), typed: Mapping[str, str] | None = None
) -> tuple[Recipe, list[str]]:
    """Read, merge and build a recipe.

    Args:
        configs: YAML files; later ones win.
        overrides: `("optimizer.lr", "6e-4")` pairs, over the files.
        typed: Place -> the flag that was typed for it, where that has another name (`--max-tokens`).

    Returns:
        The recipe, and notes on what the merge dropped.

    Raises:
        UserError: one sentence per fault, all faults found.
    """
    if not configs:
        raise UserError("no recipe: pass --config, e.g. --config recipes/smollm2-135m/eagle3.yaml.")
    written = read_all([Path(c) for c in configs], overrides, typed)
    return build_recipe(written), written.notes


def build_recipe(written: Written) -> Recipe:
    """Check names and types of what was written, and build every section. Raises UserError with all faults."""
    builder = Builder(written, BASES, places(Recipe, "", BASES))
    recipe = builder.build(Recipe, written.tree, "")
    if recipe is None:
        raise UserError("\n".join(builder.errors), written.notes)
    return recipe


def sections_help() -> str:
    """All keys of a recipe with their types, defaults and docstrings, as jsonargparse reads them from the signatures."""
    texts = []
    for section in fields(Recipe):
        if section.type in BASES:
            for name, cls in choices(section.type).items():
                texts.append(_class_help(cls, f"{section.name}.init_args", f"{section.name}.class_path: {name}"))
        elif isinstance(section.type, type) and section.name not in ("name", "task", "trainer"):
            texts.append(_class_help(section.type, section.name, section.name))
    for name, cls in choices(Divergence).items():
        texts.append(
            _class_help(cls, "init_args", f"objective.init_args.divergences (accepted, rejected), an item of class_path: {name}")
        )
    for key in (
        "positions",
        "accepted_positions",
        "rejected_positions",
    ):  # of Distillation, and of the two streams of OnPolicyDistillation
        for name, cls in choices(PositionWeight).items():
            texts.append(
                _class_help(cls, f"objective.init_args.{key}.init_args", f"objective.init_args.{key}.class_path: {name}")
            )
    for name, cls in choices(PromptSource).items():
        texts.append(_class_help(cls, "init_args", f"prepare.prompts, an item of class_path: {name}"))
    for name, cls in choices(Engine).items():
        texts.append(_class_help(cls, "prepare.engine.init_args", f"prepare.engine.class_path: {name}"))
    for name, cls in choices(Method).items():
        texts.append(_class_help(cls, "init_args", f"bench.methods, an item of class_path: {name}"))
    texts.insert(0, "name (str): the run folder is runs/<name>/\ntask (str): distill or on_policy (default: distill)")
    texts.append(
        "trainer: arguments of lightning.pytorch.Trainer, except "
        + ", ".join(FROM_TORCHRUN)
        + " (torchrun and the machine decide)"
    )
    return "\n\n".join(texts)


def _class_help(cls: type, place: str, title: str) -> str:
    parser = jsonargparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    parser.add_class_arguments(cls, place)
    for action in parser._actions:
        if action.dest == place or action.dest.endswith(".help"):
            action.help = argparse.SUPPRESS  # jsonargparse's own extras, which our reader of flags does not take
        action.option_strings = [flag for flag in action.option_strings if not flag.endswith("+")]
    lines = parser.format_help().strip().splitlines()
    about = (
        lines[0] if lines else (inspect.getdoc(cls) or "").partition("\n")[0]
    )  # jsonargparse is silent about a class without keys
    return "\n".join([f"{title}: {about.rstrip(':')}", *lines[1:]])
