"""Plans of small recipes, and trainings of the same: writes one, runs `plan`, reads its lines."""

import pytest
import yaml
from on_policy_forms import SMALL
from tiny_run import make_run, start

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.recipe import load_recipe

EAGLE3 = {"class_path": "Eagle3", "init_args": {"taps": [0, 1, 3], "depth": 2, "draft_vocab": 200}}
EAGLE = {"class_path": "Eagle", "init_args": {"draft_vocab": 200}}
HYDRA = {"class_path": "Hydra", "init_args": {"heads": 3, "prefix": True}}
MEDUSA = {"class_path": "Medusa", "init_args": {"heads": 3, "own_heads": True, "draft_vocab": 200}}
DRAFTERS = pytest.mark.parametrize("drafter", [EAGLE3, EAGLE, HYDRA, MEDUSA], ids=lambda drafter: drafter["class_path"])
BOTH = {"class_path": "OnPolicyDistillation"}
QUIET = {"prepare": {"held_out": 3, "max_prompt": 30}, "optimizer": {"warmup_steps": 0}, "data": {"features": "online"}}
"""Sections that nothing is warned of."""


def planner(folder, target, capsys):
    """A function that writes a recipe, plans it, and returns (recipe, the lines behind the recipe)."""

    def plan(drafter=EAGLE3, code=0, **sections):
        tree = {
            "name": "tiny",
            "target": {"path": str(target)},
            "prepare": {
                "prompts": [{"class_path": "SelfPrompts", "init_args": {"count": 10}}],
                "max_prompt": 30,
                "max_tokens": 20,
            },
            "drafter": drafter,
            "objective": {"class_path": "Distillation"},
            "data": {"features": "stored", "length": 48, "rows": 2},
            "checkpoint": {"drafts": 2},
            "validate": {"drafts": 2},
            "trainer": {"max_steps": 2},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
        assert main(["plan", "--config", str(folder / "recipe.yaml"), "--runs", str(folder)]) == code
        said = capsys.readouterr()
        return load_recipe([folder / "recipe.yaml"])[0], (said.out + said.err).splitlines()

    return plan


def on_policy_planner(folder, target, capsys):
    """As `planner`, for an on-policy recipe without warnings."""
    plan = planner(folder, target, capsys)

    def on_policy(drafter=EAGLE3, code=0, task="on_policy", **sections):
        merged = {"on_policy": SMALL, "objective": BOTH, **QUIET} if task == "on_policy" else dict(QUIET)
        for name, values in sections.items():
            merged[name] = {**merged.get(name, {}), **values}
        return plan(drafter, code, task=task, **merged)

    return on_policy


def trainer_of(folder, target, target_folder):
    """A function that trains in the run folder of the plan (which it makes), and returns what training refuses; "" for nothing.

    Args:
        target: that of the folder, loaded.
    """

    def begin(on_policy=SMALL, **sections) -> str:
        if not (folder / "tiny").exists():
            make_run(folder / "tiny", target)
        drafter = {"taps": [0, 1, 3], "depth": 2, "draft_vocab": 200}
        try:
            start(folder / "tiny", target_folder, drafter=drafter, on_policy=on_policy, **sections)
        except UserError as error:
            return str(error)
        return ""

    return begin


def line(lines, start) -> str:
    [found] = [each for each in lines if each.startswith(start)]
    return found


def warnings(lines) -> list[str]:
    return [each for each in lines if each.startswith("warning: ")]


def notes(lines) -> list[str]:
    return [each for each in lines if each.startswith(("warning: ", "note: "))]


def refusal_of(ask, *args) -> str:
    """What a check says against a drafter and its objective; "" for nothing."""
    try:
        assert not ask(*args)
    except UserError as error:
        return str(error)
    return ""
