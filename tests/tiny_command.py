"""A tiny run as commands find it: a recipe, the data of `data_prep`, and a drafter that was never trained."""

from pathlib import Path
from typing import Any

import torch
import yaml
from tiny_run import ragged_chats, write_store

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import save_drafter
from drafttrain.vocab import DraftVocabulary

DRAFTER = Eagle3(taps=[0, 1, 3], depth=3, draft_vocab=None)
SECTIONS: dict[str, Any] = {
    "name": "tiny",
    "prepare": {"prompts": [{"class_path": "SelfPrompts", "init_args": {"count": 8}}]},
    "drafter": {"class_path": "Eagle3", "init_args": {"taps": [0, 1, 3], "depth": 3, "draft_vocab": None}},
    "objective": {"class_path": "Distillation"},
    "bench": {
        "max_tokens": 6, "methods": [{"class_path": "Chain", "init_args": {"drafts": 2}}], "temperatures": [0], "repeats": 1, "batches": [2],
        "longest": None,
    },
    "validate": {"drafts": 3, "max_tokens": 8},
    "trainer": {"max_steps": 1},
}  # fmt: skip


def write_recipe(folder: Path, target: Path, **sections: dict[str, Any]) -> Path:
    """`sections`: options that stand in for those of a section."""
    file = folder / "recipe.yaml"
    changed = {name: SECTIONS[name] | options for name, options in sections.items()}
    file.write_text(yaml.safe_dump(SECTIONS | {"target": {"path": str(target)}} | changed))
    return file


def write_data(run: Path, target) -> None:
    """Four chats to train on and four held out."""
    for part, seed in (("train", 0), ("held_out", 1)):
        write_store(run / "data" / part, ragged_chats(4, target.vocab, seed=seed, longest=16), target.identity)


def save_untrained(place: Path, target, facts: dict[str, Any], seed: int = 0) -> None:
    torch.manual_seed(seed)
    net = DRAFTER.build(target, DraftVocabulary.full(target.vocab))
    save_drafter(place, net, DRAFTER, target.identity, facts)


def flags(made: tuple[Path, ...]) -> list[str]:
    """Of a recipe file and a folder of runs, whatever stands behind them."""
    return ["--config", str(made[0]), "--runs", str(made[1])]
