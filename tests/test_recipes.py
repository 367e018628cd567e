"""Every YAML in recipes/ parses, and what it asks of Lightning exists there."""

import inspect
from pathlib import Path

import pytest

from drafttrain.recipe import Recipe, load_recipe
from drafttrain.recipe_files import read_file

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "hardware")
HARDWARE = sorted((ROOT / "recipes" / "hardware").glob("*.yaml"))


def test_they_are_there():
    assert RECIPES
    assert {path.stem for path in HARDWARE} >= {"cpu", "ddp", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_parses(path):
    recipe, notes = load_recipe([path])
    assert isinstance(recipe, Recipe) and notes == []
    assert recipe.trainer["max_steps"] >= 1


@pytest.mark.parametrize("path", HARDWARE, ids=lambda path: path.stem)
def test_hardware_says_only_what_belongs_to_the_machine_and_fits_lightning(path):
    from lightning.pytorch import Trainer, strategies

    assert set(read_file(path).tree) <= {"trainer", "speed"}
    trainer = load_recipe([RECIPES[0], path])[0].trainer
    assert set(trainer) <= set(inspect.signature(Trainer).parameters)
    strategy = trainer["strategy"]
    if isinstance(strategy, dict):
        cls = getattr(strategies, strategy["class_path"].removeprefix("lightning.pytorch.strategies."))
        known = set(inspect.signature(cls).parameters) | {"find_unused_parameters"}  # DDP hands it on as a keyword
        assert set(strategy["init_args"]) <= known
