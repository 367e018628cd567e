"""Every key of a recipe that a message, a help or a page of documentation spells exists, and so does every command of the pages.

Read are string literals that are not docstrings, what `plan --help` prints, recipes with their comments, and the two READMEs.
"""

import ast
import inspect
import re
import shlex
from pathlib import Path

import lightning.pytorch as pl
import pytest

from data_prep import show
from drafttrain.cli import FOLDERS, main, parse, parse_folders
from drafttrain.recipe import BASES, Recipe, sections_help
from drafttrain.recipe_build import fields_of, places

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md"]
SECTIONS = [name for name in fields_of(Recipe) if name not in ("name", "task")]
SPELT = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})(?:\.[a-z_][a-z_0-9]*)+")
FILES = ("json", "jsonl", "yaml", "md", "py", "sh", "safetensors", "png")
"""Endings of files that are called like a section."""
KNOWN = [*places(Recipe, "", BASES), *(f"trainer.{name}" for name in inspect.signature(pl.Trainer.__init__).parameters)]


def spelt(text: str) -> set[str]:
    """Keys that a text names."""
    return {key for key in SPELT.findall(text) if key.rpartition(".")[2] not in FILES}


def exists(key: str) -> bool:
    """Whether it is a place of the recipe, leads to one, or lies in what a place may hold freely."""
    return any(place == key or place.startswith(f"{key}.") for place in KNOWN) or re.match(r"trainer\.\w+\.", key) is not None


def literals(source: str) -> list[str]:
    """String literals of a program, parts of formatted ones included, docstrings left out."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [
        "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
    ]
    return found + [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    ]


def texts() -> dict[str, str]:
    """Place -> what users read there."""
    programs = [*(ROOT / "drafttrain").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): "\n".join(literals(file.read_text())) for file in programs}
    pages = [*PAGES, *(ROOT / "recipes").rglob("*.yaml")]
    return found | {str(file.relative_to(ROOT)): file.read_text() for file in pages} | {"plan --help": sections_help()}


def test_keys_that_are_spelt_exist():
    wrong = {f"{where}: {key}" for where, text in texts().items() for key in spelt(text) if not exists(key)}
    assert not wrong


def test_a_key_that_does_not_exist_is_noticed():
    assert spelt("what data_prep kept on disk (prepare.features).") == {"prepare.features"} and not exists("prepare.features")
    assert spelt("see data.jsonl, runs/x/data.features and the_target.path") == set()
    assert exists("trainer.strategy.init_args.stage") and exists("drafter.init_args") and not exists("trainer.max_epoch")
    source = 'def f():\n    """prepare.features"""\n    raise E(f"data.{name} is not optimizer.lr")\n'
    assert spelt("\n".join(literals(source))) == {"optimizer.lr"}


# ---- commands of the pages ---------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Lines of the pages' bash blocks that start something of ours, what is optional in them included."""
    blocks = [block for page in PAGES for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)]
    lines = [line.replace("[", "").replace("]", "") for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if re.match(r"(python|torchrun|launch/|make) ?", line)})


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_pages_exist_with_their_flags(line, tmp_path, monkeypatch, capsys):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    monkeypatch.chdir(ROOT)
    (tmp_path / "R.yaml").write_text((ROOT / "recipes" / "smollm2-135m" / "eagle3.yaml").read_text())
    words = [str(tmp_path / word) if word == "R.yaml" else word for word in words]
    if words[0].startswith("launch/"):
        assert (ROOT / words[0]).stat().st_mode & 0o100
        command, rest = "data_prep", ["--config", *words[1:]]
    else:
        module = words.index("-m")
        command, *rest = words[module + 1 :] if words[module + 1] == "data_prep" else words[module + 2 :]
        assert words[module + 1] in ("data_prep", "drafttrain")
    if command == "data_prep" and rest[0] == "show":
        options, left = show.parse(rest[1:])
        assert options.file and not left
        return
    if "--help" in rest:
        assert main([command, *rest]) == 0
    elif command in FOLDERS:
        assert parse_folders(command, "", rest) is not None
    else:
        assert parse(command, "", rest) is not None
