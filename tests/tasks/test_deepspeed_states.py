"""Training states of DeepSpeed on the CPU, over gloo: the weights put together from a state's pieces equal, bit for bit, those that the live run
gathered from its processes for checkpoints/last_drafter at the same step; a state that lacks a piece is refused by its name."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tasks.test_processes import finish, launch
from tiny_run import make_run

from drafttrain.errors import UserError
from drafttrain.tasks.checkpoints import find_last, require_readable
from drafttrain.tasks.state_weights import TrainingState

pytestmark = pytest.mark.slow
CASES = [
    (1, False, "32-true", 1),
    (2, False, "bf16-mixed", 2),
    (3, False, "bf16-mixed", 2),
    (2, True, "32-true", 1),
    (3, True, "bf16-mixed", 2),
]


@pytest.mark.parametrize(("stage", "offloaded", "precision", "ranks"), CASES)
def test_pieces_come_to_the_weights_of_the_live_run(
    tmp_path, tiny_llama, target_folders, monkeypatch, stage, offloaded, precision, ranks
):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    strategy = f"deepspeed_stage_{stage}"
    if offloaded:  # by DeepSpeed's own file: it wants to be told that our optimizer is meant
        cpu = {"device": "cpu"}
        zero = {"stage": stage, "offload_optimizer": cpu} | ({"offload_param": cpu} if stage == 3 else {})
        told = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        (tmp_path / "deepspeed.json").write_text(json.dumps(told))
        monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(tmp_path / "deepspeed.json"))
        strategy = "deepspeed"
    run = make_run(tmp_path / "run", tiny_llama)
    trainer = {"max_steps": 3, "strategy": strategy, "precision": precision}
    finish(launch(run, target_folders("llama"), torchrun=ranks > 1, ranks=ranks, deepspeed_on_cpu=True, trainer=trainer))
    checkpoints = run / "checkpoints"
    live = load_file(checkpoints / "last_drafter" / "drafter.safetensors")
    live.pop("d2t")
    (step,) = (checkpoints / "last").iterdir()
    for state in (
        TrainingState.newest(checkpoints),
        *(TrainingState.at(str(place), checkpoints, False) for place in (step / "state", step / "state" / "checkpoint")),
    ):
        found = state.weights()
        assert found.keys() == live.keys() and all(torch.equal(value, live[name]) for name, value in found.items())
        assert {value.dtype for value in found.values()} == {torch.float32} and state.facts["position"]["step"] == 3
    broken_ones_are_refused(step, tmp_path / "broken", ranks)


def broken_ones_are_refused(step: Path, folder: Path, ranks: int) -> None:
    """Each of its pieces, gone, cut off or changed, to go on from or to take the weights of; outside of the run, on the word for it."""

    def refused() -> str:
        with pytest.raises(UserError, match="was interrupted while it was written, or copied in part") as caught:
            TrainingState.at(str(folder / "state"), folder / "no", pickles=True).weights()
        return str(caught.value)

    with pytest.raises(UserError, match="from outside of this run: it is a pickle"):
        TrainingState.at(str(step / "state"), folder / "no", pickles=False)
    names = sorted(path.name for path in (step / "state" / "checkpoint").glob("*_states.pt"))
    assert len(names) >= ranks + 1
    require_readable(replace(find_last(step.parent.parent), folder=step))
    for name in names:
        for harm in ("gone", "cut", "a bit flipped"):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(step, folder)
            piece = folder / "state" / "checkpoint" / name
            if harm == "gone":
                piece.unlink()
            elif harm == "cut":
                os.truncate(piece, piece.stat().st_size // 2)
            else:
                whole = bytearray(piece.read_bytes())
                whole[3 * len(whole) // 4] ^= 1
                piece.write_bytes(whole)
            with pytest.raises(UserError, match=rf"{name} is (damaged or cut short|gone), so the run cannot go on"):
                require_readable(replace(find_last(step.parent.parent), folder=folder))
            assert str(folder) in refused()
