"""One run under changing numbers of processes: every text once an epoch, and the numbers of a run that was never interrupted."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tasks.warm_ranks import train_in
from tiny_run import logged, make_run, ragged_chats, start

from drafttrain.tasks.checkpoints import find_last

STEPS = 8
PHASES = [(2, 2, 2), (1, 4, 1), (4, STEPS, 1)]
"""Processes, steps when they stop, and accumulated micro-batches: a step always has four rows."""


def texts_in_order(run: Path) -> list[tuple[int, ...]]:
    """What was trained, row after row as the run's order is: by step, micro-batch and rank."""
    lines = [json.loads(line) for file in run.glob("seen_*.jsonl") for line in file.read_text().splitlines()]
    lines.sort(key=lambda line: (line["step"], line["micro"], line["rank"]))
    return [tuple(text) for line in lines for row in line["rows"] for text in row]


def optimizer_of(run: Path) -> dict[str, torch.Tensor]:
    state = torch.load(find_last(run / "checkpoints").state, weights_only=True)["optimizer_states"][0]["state"]
    return {f"{number} {name}": value for number, values in state.items() for name, value in values.items()}


def test_two_then_one_then_four_processes(tmp_path, tiny_llama, target_folders):
    target = target_folders("llama")
    whole, moved = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "moved"))
    trainer = {"max_steps": STEPS, "log_every_n_steps": 1}
    start(whole, target, trainer=trainer, data={"rows": 4})
    for ranks, stop, accumulate in PHASES:
        strategy = {"strategy": "ddp"} if ranks > 1 else {}
        sections = {"trainer": trainer | strategy | {"accumulate_grad_batches": accumulate}}
        train_in(moved, target, ranks, sections | {"data": {"rows": 4 // (ranks * accumulate)}}, stop_at=stop)
        assert find_last(moved / "checkpoints").position.step == stop
    seen = texts_in_order(moved)
    chats = Counter(tuple(chat.ids.tolist()) for chat in ragged_chats(23, len(tiny_llama.tokenizer)))
    epochs = len(seen) // len(chats)
    assert epochs >= 2
    for epoch in range(epochs):
        assert Counter(seen[epoch * len(chats) : (epoch + 1) * len(chats)]) == chats, epoch
    assert logged(moved) == pytest.approx(logged(whole), rel=1e-5)
    mine, theirs = optimizer_of(moved), optimizer_of(whole)
    assert mine.keys() == theirs.keys() and all(torch.allclose(mine[n], theirs[n], rtol=1e-4, atol=1e-7) for n in mine)
    drafters = [load_file(run / "checkpoints/best/drafter.safetensors") for run in (moved, whole)]
    assert all(torch.allclose(value, drafters[1][name], rtol=1e-4, atol=1e-6) for name, value in drafters[0].items())
