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
from drafttrain.tasks.zero_state import AVERAGES, ZeroState

STEPS = 8
TRAINER = {"max_steps": STEPS, "log_every_n_steps": 1}
DRAFTER = {"draft_vocab": 201, "head_rank": 5}
"""With a matrix of 201 x 5 weights, which no number of processes shares evenly."""
PHASES = [(2, 2, 2), (1, 4, 1), (4, STEPS, 1)]
"""Processes, steps when they stop, and accumulated micro-batches: a step always has four rows."""


def texts_in_order(run: Path) -> list[tuple[int, ...]]:
    """What was trained, row after row as the run's order is: by step, micro-batch and rank."""
    lines = [json.loads(line) for file in run.glob("seen_*.jsonl") for line in file.read_text().splitlines()]
    lines.sort(key=lambda line: (line["step"], line["micro"], line["rank"]))
    return [tuple(text) for line in lines for row in line["rows"] for text in row]


def require_every_text_once_an_epoch(run: Path, texts: Counter) -> None:
    seen = texts_in_order(run)
    epochs = len(seen) // texts.total()
    assert epochs >= 2
    for epoch in range(epochs):
        assert Counter(seen[epoch * texts.total() : (epoch + 1) * texts.total()]) == texts, epoch


def move(run: Path, target: Path, strategies: list[str], **more) -> None:
    """Trains in changing numbers of processes, with a strategy for each."""
    for (ranks, stop, accumulate), strategy in zip(PHASES, strategies, strict=True):
        trainer = TRAINER | {"accumulate_grad_batches": accumulate, "strategy": strategy} | more
        sections = {"trainer": trainer, "data": {"rows": 4 // (ranks * accumulate)}, "drafter": DRAFTER}
        train_in(run, target, ranks, sections, deepspeed_on_cpu="deepspeed" in strategy, stop_at=stop)
        assert find_last(run / "checkpoints").position.step == stop


def optimizer_of(run: Path) -> dict[str, torch.Tensor]:
    state = torch.load(find_last(run / "checkpoints").state, weights_only=True)["optimizer_states"][0]["state"]
    return {f"{number} {name}": value for number, values in state.items() for name, value in values.items()}


@pytest.fixture(scope="module")
def texts(tiny_llama):
    return Counter(tuple(chat.ids.tolist()) for chat in ragged_chats(23, len(tiny_llama.tokenizer)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_llama, target_folders):
    """The run of one process, never interrupted."""
    run = make_run(tmp_path_factory.mktemp("whole"), tiny_llama)
    start(run, target_folders("llama"), trainer=TRAINER, data={"rows": 4}, drafter=DRAFTER)
    return run


def test_two_then_one_then_four_processes(tmp_path, tiny_llama, target_folders, whole, texts):
    moved = make_run(tmp_path / "moved", tiny_llama)
    move(moved, target_folders("llama"), ["ddp", "auto", "ddp"])
    require_every_text_once_an_epoch(moved, texts)
    assert logged(moved) == pytest.approx(logged(whole), rel=1e-5)
    mine, theirs = optimizer_of(moved), optimizer_of(whole)
    assert mine.keys() == theirs.keys() and all(torch.allclose(mine[n], theirs[n], rtol=1e-4, atol=1e-7) for n in mine)
    drafters = [load_file(run / "checkpoints/best/drafter.safetensors") for run in (moved, whole)]
    assert all(torch.allclose(value, drafters[1][name], rtol=1e-4, atol=1e-6) for name, value in drafters[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "stages",
    ["1 1 1", "2 2 2", "3 3 3", "2 3 1", "2_offload 2_offload 2_offload", "3_offload 3_offload 3_offload", "3 2_offload 3"],
)
def test_the_same_with_deepspeed(tmp_path, tiny_llama, target_folders, whole, texts, stages, precision):
    """Its optimizer in pieces, cut anew for other processes, and for another stage."""
    pytest.importorskip("deepspeed")
    moved = make_run(tmp_path / "moved", tiny_llama)
    move(moved, target_folders("llama"), [f"deepspeed_stage_{stage}" for stage in stages.split()], precision=precision)
    require_every_text_once_an_epoch(moved, texts)
    exact = precision == "32-true"
    assert logged(moved) == pytest.approx(logged(whole), rel=1e-5 if exact else 2e-2)
    state, theirs = ZeroState(find_last(moved / "checkpoints").state), optimizer_of(whole)
    assert state.steps == STEPS
    for part in AVERAGES:
        mine = torch.cat([state.whole(name, part).flatten() for name in state.names()])
        wanted = torch.cat([value.flatten() for name, value in theirs.items() if name.endswith(f" {part}")])
        assert float((mine - wanted).norm() / wanted.norm()) < (1e-4 if exact else 5e-2), part
