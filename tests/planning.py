"""Plans of small recipes: writes one, runs `plan`, reads its lines."""

import pytest
import yaml

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.recipe import load_recipe

EAGLE3 = {"class_path": "Eagle3", "init_args": {"taps": [0, 1, 3], "depth": 2, "draft_vocab": 200}}
EAGLE = {"class_path": "Eagle", "init_args": {"draft_vocab": 200}}
HYDRA = {"class_path": "Hydra", "init_args": {"heads": 3, "prefix": True}}
MEDUSA = {"class_path": "Medusa", "init_args": {"heads": 3, "own_heads": True, "draft_vocab": 200}}
DRAFTERS = pytest.mark.parametrize("drafter", [EAGLE3, EAGLE, HYDRA, MEDUSA], ids=lambda drafter: drafter["class_path"])


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


def line(lines, start) -> str:
    [found] = [each for each in lines if each.startswith(start)]
    return found


def warnings(lines) -> list[str]:
    return [each for each in lines if each.startswith("warning: ")]


def refusal_of(ask, *args) -> str:
    """What a check says against a drafter and its objective; "" for nothing."""
    try:
        assert not ask(*args)
    except UserError as error:
        return str(error)
    return ""
