"""Adding a drafter touches its file, an export entry, a recipe and a line of a test: no other code names one. Prose may."""

import ast
import re
from pathlib import Path

import pytest

from drafttrain.drafters.registry import known_drafters

ROOT = Path(__file__).resolve().parents[1]
OTHERS_CHECKPOINTS = (
    "drafttrain/drafters/published.py",
    "drafttrain/drafters/published_blocks.py",
    "drafttrain/drafters/published_eagle.py",
    "drafttrain/drafters/published_heads.py",
    "drafttrain/drafters/start_files.py",
)
"""What reads drafters as their own projects publish them: for a method that has no such checkpoints there is nothing to add."""


def code_names(source: str) -> set[str]:
    """Identifiers, imported names and texts of a program, without comments and docstrings."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # a text that stands alone
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found.add(node.value)
        for name in ("id", "attr", "name", "asname", "arg", "module"):
            if isinstance(value := getattr(node, name, None), str):
                found.add(value)
    return found


def naming(drafter: str) -> set[str]:
    """Files whose code names the class."""
    files = [*(ROOT / "drafttrain").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    word = re.compile(rf"(?<![A-Za-z0-9]){drafter}(?![a-z0-9.-])")
    return {str(file.relative_to(ROOT)) for file in files if any(word.search(name) for name in code_names(file.read_text()))}


def home_of(drafter: str) -> str:
    return known_drafters()[drafter].__module__.replace(".", "/") + ".py"


@pytest.mark.parametrize("drafter", sorted(known_drafters()))
def test_nobody_else_names_a_drafter(drafter):
    found = naming(drafter)
    assert home_of(drafter) in found  # the search sees what is there
    elsewhere = [file for file in found - {home_of(drafter), *OTHERS_CHECKPOINTS} if not file.startswith("drafttrain/export/")]
    assert not elsewhere


def test_hydra_is_known_to_its_file_and_its_export_entry():
    """The example of CONTRIBUTING.md."""
    assert naming("Hydra") - {*OTHERS_CHECKPOINTS} == {"drafttrain/drafters/heads.py", "drafttrain/export/registry.py"}


def test_a_name_in_code_is_found_and_one_in_prose_is_not():
    prose = '"""As in Hydra."""\nx = 1\n"""Hydra again."""  # and Hydra\n'
    assert not any("Hydra" in name for name in code_names(prose))
    for code in (
        "from a.heads import Hydra",
        "import a.Hydra as b",
        "y = Hydra()",
        "y = a.Hydra",
        "y = {'Hydra': 1}",
        "def f(Hydra): ...",
    ):
        assert any("Hydra" in name for name in code_names(prose + code)), code


def test_the_places_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("**Adding a drafter**") :]
    section = section[: section.index("\n**")]
    paths = [path for path in re.findall(r"`([\w./-]+/[\w./-]*)`", section) if path != "drafters/"]
    assert len(paths) >= 6
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert all(
        place in section for place in (home_of("Hydra"), "recipes/smollm2-135m/hydra.yaml", "tests/drafters/test_faces.py")
    )
