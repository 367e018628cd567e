"""Imports only go down the floors, packages on one floor leave each other alone, and nothing of ours is imported inside a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    ("types", "errors"),
    ("ops", "layouts", "divergences", "position_weights", "losses", "replay_loss", "vocab", "files", "plots", "markdown"),
    ("target", "drafters"),
    ("decoding", "data", "replay"),
    ("tasks", "export", "validation", "data_prep"),
    (
        "recipe",
        "recipe_build",
        "recipe_files",
        "trainer_section",
        "topology",
        "run",
        "options",
        "commands",
        "cli",
        "quickstart",
        "__main__",
    ),
)
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
TOP = len(FLOORS) - 1
NEIGHBOURS = {
    ("drafters", "target"),  # a drafter is built for a target
    ("layouts", "ops"),  # masks in the form that kernels read
    ("losses", "divergences"),  # an objective is composed of both
    ("losses", "position_weights"),
    ("replay_loss", "losses"),  # another objective of the same parts
    ("replay_loss", "divergences"),
    ("replay_loss", "position_weights"),
    ("replay", "data"),  # rollouts share rows as chats do
}
"""What may import a neighbour on its own floor, one way only."""


def unit_of(module: str) -> str | None:
    """The part of the house that a dotted module belongs to; None for what is not ours."""
    parts = module.split(".")
    if parts[0] == "data_prep":
        return "__main__" if parts[1:] == ["__main__"] else "data_prep"
    if parts[0] != "drafttrain" or len(parts) == 1:
        return None
    return parts[1]


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    """(dotted module, line) of everything that a syntax tree imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module in ("drafttrain", "data_prep"):
                found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((node.module or "", node.lineno))
    return found


def faults(module: str, source: str) -> list[str]:
    """Sentences about every import of `module` that breaks a rule."""
    tree, own = ast.parse(source), unit_of(module)
    assert own is not None
    found = []
    for name, line in imports(tree):
        other = unit_of(name)
        if other is None or other == own:
            continue
        here, there = FLOOR_OF[own], FLOOR_OF[other]
        if there > here:
            found.append(f"{module} line {line}: {own} (floor {here}) imports {other} (floor {there})")
        elif there == here and 0 < here < TOP and (own, other) not in NEIGHBOURS:
            found.append(f"{module} line {line}: {own} imports {other}, its neighbour on floor {here}")
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [(name, line) for name, line in imports(function) if unit_of(name) is not None]
            found += [f"{module} line {line}: imports {name} inside a function" for name, line in inner]
    return found


def modules() -> list[str]:
    files = [*(ROOT / "drafttrain").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name != "__init__.py"]
    return sorted(names)


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module):
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert not faults(module, source), "\n".join(faults(module, source))


def test_every_unit_has_a_floor():
    assert {unit_of(module) for module in modules()} == set(FLOOR_OF)


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("drafttrain.losses", "from drafttrain.target.target import Target", "floor 1) imports target (floor 2)"),
        ("drafttrain.tasks.train", "import drafttrain.export.card", "neighbour"),
        ("drafttrain.tasks.train", "from drafttrain import cli", "floor 5"),
        ("drafttrain.target.load", "def f():\n    from drafttrain.errors import UserError", "inside a function"),
        ("data_prep.pipeline", "from drafttrain.recipe import Recipe", "floor 5"),
    ],
)
def test_a_climbing_import_is_noticed(module, source, words):
    assert any(words in fault for fault in faults(module, source))


def test_downward_imports_pass():
    assert not faults(
        "drafttrain.tasks.train", "import torch\nfrom drafttrain import vocab\nfrom drafttrain.data.store import TokenStore"
    )


def test_recipes_and_launch_hold_no_python():
    assert not [path for folder in ("recipes", "launch") for path in (ROOT / folder).rglob("*.py")]
