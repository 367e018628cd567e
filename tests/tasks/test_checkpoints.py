"""The resume state is whole or not there, wherever a process is killed."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.tasks.checkpoints import differences, find_last, require_readable, save_state
from drafttrain.tasks.distill import Position

RECIPE = {"drafter": {"class": "Eagle3", "depth": 3}}
SHARE = {"world": 1, "accumulate": 2, "rows": 1}


class Strategy:
    def barrier(self, name):
        pass


class OneFile:
    """Saves like Lightning's trainer; or like DeepSpeed's strategy, a folder."""

    is_global_zero = True
    strategy = Strategy()

    def __init__(self, folder: bool = False, fails: bool = False):
        self.folder, self.fails = folder, fails

    def save_checkpoint(self, path: Path):
        if self.folder:
            (path / "checkpoint").mkdir(parents=True)
            path = path / "checkpoint" / "rank_0.pt"
        path.write_bytes(b"whole" if not self.fails else b"wh")
        if self.fails:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_newer_state_replaces_the_older_one(tmp_path, folder):
    for step in (9, 10):
        save_state(OneFile(folder), tmp_path, Position(step, 4 * step, 100), RECIPE, SHARE)
    found = find_last(tmp_path)
    assert found.position == Position(10, 40, 100) and found.recipe == RECIPE and found.share == SHARE
    assert found.state.is_dir() == folder
    assert [path.name for path in (tmp_path / "last").iterdir()] == ["step_00000010"]


def test_nothing_saved_is_no_state(tmp_path):
    assert find_last(tmp_path) is None


def test_a_state_cut_short_is_never_found_and_is_removed_by_the_next(tmp_path):
    save_state(OneFile(), tmp_path, Position(1), RECIPE, SHARE)
    with pytest.raises(OSError, match="No space"):
        save_state(OneFile(fails=True), tmp_path, Position(2), RECIPE, SHARE)
    assert find_last(tmp_path).position.step == 1 and (tmp_path / "last" / "writing_00000002").exists()
    save_state(OneFile(), tmp_path, Position(3), RECIPE, SHARE)
    assert [path.name for path in (tmp_path / "last").iterdir()] == ["step_00000003"]


@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_killed_before_or_behind_the_rename_one_whole_state_is_found(tmp_path, monkeypatch, call):
    save_state(OneFile(), tmp_path, Position(1), RECIPE, SHARE)

    def die(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os if call == "rename" else shutil, call, die)
    with pytest.raises(KeyboardInterrupt):
        save_state(OneFile(), tmp_path, Position(2), RECIPE, SHARE)
    monkeypatch.undo()
    found = find_last(tmp_path)
    assert found.position.step == (1 if call == "rename" else 2)
    assert found.state.read_bytes() == b"whole"


def test_the_same_step_is_saved_again(tmp_path):
    for tokens in (5, 6):
        save_state(OneFile(), tmp_path, Position(4, 1, tokens), RECIPE, SHARE)
    assert find_last(tmp_path).position.tokens == 6


def test_damaged_facts_are_an_error_that_names_the_file(tmp_path):
    save_state(OneFile(), tmp_path, Position(4), RECIPE, SHARE)
    (tmp_path / "last" / "step_00000004" / "train.json").write_text("{")
    with pytest.raises(UserError, match=r"train.json is damaged"):
        find_last(tmp_path)


@pytest.mark.parametrize("harm", ["cut short", "emptied", "a bit flipped"])
def test_a_state_that_was_harmed_is_one_sentence_and_no_traceback(tmp_path, harm):
    save_state(OneFile(), tmp_path, Position(4), RECIPE, SHARE)
    saved = find_last(tmp_path)
    torch.save({"net.weight": torch.arange(1000.0)}, saved.state)
    require_readable(saved)
    whole = saved.state.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    saved.state.write_bytes({"cut short": whole[:middle], "emptied": b"", "a bit flipped": flipped}[harm])
    with pytest.raises(UserError, match=r"step_00000004/state is damaged or cut short, .* or delete .*step_00000004/ to begin"):
        require_readable(saved)


def test_every_leaf_that_differs_is_named():
    before, now = {"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 1, "y": 5}, "b": 3, "c": 4}
    assert differences(before, now) == ["a.y: 2 before, 5 now", "c: None before, 4 now"]


def test_an_emptied_checkpoint_says_what_to_delete(tmp_path):
    """Not "run the stage again": that stage is the one that just refused."""
    folder = tmp_path / "last" / "step_00000004"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"delete .*step_00000004/ to begin training anew"):
        find_last(tmp_path)
    folder.rmdir()
    assert find_last(tmp_path) is None
