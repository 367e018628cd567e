"""No pickle is unpacked from outside without the recipe's explicit word: the sources are read for every way to unpack one.

What may stand in them: `torch.load(..., weights_only=True)`, which unpacks tensors and plain containers only, a training that goes on from its own
state (`fit(..., weights_only=True)`), the exceptions of the module pickle, and the one place that hands a whole pickle to somebody else's code,
which asks for the word first (`EXPLICIT`).
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules whose loaders run what they read."""
EXCEPTIONS = {"PickleError", "UnpicklingError", "PicklingError"}
ONLY_WEIGHTS = {"torch.load", "fit", "validate", "test", "load_from_checkpoint"}
"""Loaders that are harmless where they are told `weights_only=True`; those without a module are Lightning's, which read one for a `ckpt_path`."""
WHOLE = {
    "get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint", "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict", "read_pickle", "torch.jit.load", "torch.hub.load", "add_safe_globals", "safe_globals",
}  # fmt: skip
"""Functions that unpack whatever they are given, or widen what `weights_only` lets through."""
EXPLICIT = {
    ("drafttrain/tasks/state_weights.py", "get_fp32_state_dict_from_zero_checkpoint"),
    ("drafttrain/tasks/zero_state.py", "safe_globals"),
}
"""Where that is done behind the word: of the run's own states, or with export.pickle (tests/test_export_checkpoint.py); and where three classes of
DeepSpeed are let through that hold numbers alone."""


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`torch.load` for whatever the call's function is imported as."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{dotted(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def imported(tree: ast.AST) -> dict[str, str]:
    """Name in the file -> dotted name of what it stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def careful(call: ast.Call) -> bool:
    told = {word.arg: word.value for word in call.keywords}
    return isinstance(told.get("weights_only"), ast.Constant) and told["weights_only"].value is True


def faults(source: str) -> set[str]:
    """The ways to unpack a pickle in a program."""
    tree = ast.parse(source)
    names, found = imported(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name not in EXCEPTIONS}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name in WHOLE}
        if isinstance(node, ast.Attribute):
            name = dotted(node, names)
            module, _, last = name.rpartition(".")
            found |= {name} if module in MODULES and last not in EXCEPTIONS else set()
            found |= {whole for whole in WHOLE if name.endswith(f".{whole}") or name == whole}
        if isinstance(node, ast.Call):
            name, words = dotted(node.func, names), {word.arg for word in node.keywords}
            loads = (
                name == "torch.load"
                or ("ckpt_path" in words and name.rpartition(".")[2] in ONLY_WEIGHTS)
                or name.endswith(".load_from_checkpoint")
            )
            found |= {name} if loads and not careful(node) else set()
            found |= {"allow_pickle"} if "allow_pickle" in words else set()
    return found


def test_no_source_unpacks_a_pickle_unasked():
    files = [file for part in ("drafttrain", "data_prep", "tests/benchmarks", "launch") for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 200
    found = {(str(file.relative_to(ROOT)), name) for file in files for name in faults(file.read_text())}
    assert found == EXPLICIT


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f)",
        "import torch as t\nt.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=word)",
        "from torch import load\nload(f)",
        "from torch import load as read\nread(f, map_location='cpu')",
        "import pickle\npickle.load(f)",
        "import pickle as p\np.Unpickler(f)",
        "from pickle import loads",
        "from dill import load",
        "import joblib\nx = joblib.load",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import pandas\npandas.read_pickle(f)",
        "import torch\ntorch.serialization.add_safe_globals([C])",
        "from torch.serialization import safe_globals",
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get",
        "trainer.fit(task, ckpt_path=path)",
        "Task.load_from_checkpoint(path)",
    ],
)  # fmt: skip
def test_each_way_to_unpack_one_is_seen(source):
    assert faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f, map_location='cpu', weights_only=True)",
        "import pickle\ntry: x()\nexcept pickle.UnpicklingError: pass",
        "trainer.fit(task, loader, ckpt_path=path, weights_only=True)\ntrainer.fit(task)",
        "import safetensors.torch\nsafetensors.torch.load(data)",
        "def find(where, pickle): return f(where, pickle)",
    ],
)
def test_what_unpacks_nothing_is_left_alone(source):
    assert not faults(source)
