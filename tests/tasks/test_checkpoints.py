"""The resume state is whole or not there, wherever a process is killed."""

import contextlib
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.tasks.checkpoints import damaged, differences, find_last, require_readable, save_state
from drafttrain.tasks.distill import Position
from drafttrain.tasks.zero_state import saved_by

RECIPE = {"drafter": {"class": "Eagle3", "depth": 3}}
SHARE = {"world": 1, "accumulate": 2, "rows": 1}


class Strategy:
    def barrier(self, name):
        pass


class OneFile:
    """Saves like Lightning's trainer; or like DeepSpeed's strategy, a folder."""

    strategy = Strategy()

    def __init__(self, folder: bool = False, fails: bool = False, rank: int = 0):
        self.folder, self.fails, self.global_rank = folder, fails, rank
        self.is_global_zero = rank == 0

    def save_checkpoint(self, path: Path):
        if self.folder:
            (path / "checkpoint").mkdir(parents=True, exist_ok=True)
            if self.is_global_zero:
                (path / "latest").write_text("checkpoint")
                (path / "checkpoint" / "mp_rank_00_model_states.pt").write_bytes(b"names")
            path = path / "checkpoint" / f"bf16_zero_pp_rank_{self.global_rank}_mp_rank_00_optim_states.pt"
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


def test_no_changed_byte_of_a_state_is_loaded_as_another_number(tmp_path):
    file, weights = tmp_path / "state", torch.arange(50.0)
    torch.save({"net.weight": weights}, file)
    whole = file.read_bytes()
    found = 0
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 128]) + whole[at + 1 :])
        if damaged(file):
            found += 1
            continue
        with contextlib.suppress(RuntimeError, pickle.UnpicklingError):  # the name of a record: it is not found
            assert torch.equal(torch.load(file, weights_only=True)["net.weight"], weights)
    assert found > 100


@pytest.fixture
def pieces(tmp_path):
    """A state of two processes of DeepSpeed's: as rank 1 leaves it, then as rank 0 publishes it."""
    (tmp_path / "last" / "writing_00000004").mkdir(parents=True)
    (tmp_path / "last" / "writing_00000004" / "old").write_text("")
    both = [OneFile(folder=True, rank=rank) for rank in (0, 1)]
    save = both[0].save_checkpoint
    both[0].save_checkpoint = lambda path: (save(path), save_state(both[1], tmp_path, Position(4), RECIPE, SHARE))
    save_state(both[0], tmp_path, Position(4), RECIPE, SHARE)
    saved = find_last(tmp_path)
    assert not (saved.folder / "old").exists()
    return saved, sorted((saved.state / "checkpoint").glob("*.pt"))


def test_each_process_sums_its_own_pieces_so_that_anybody_can_check_them(pieces):
    saved, files = pieces
    assert len(files) == 3 == len(list(saved.state.rglob("*.sha256")))
    for file in files:
        check = ["sha256sum", "--check", "--strict", f"{file.name}.sha256"]
        assert subprocess.run(check, cwd=file.parent, capture_output=True).returncode == 0
    require_readable(saved)


def test_a_piece_that_was_harmed_is_named_by_the_process_whose_share_it_is(pieces):
    saved, files = pieces
    for number, file in enumerate(files):
        whole = file.read_bytes()
        for harm, what in (
            (whole[:-1], "damaged or cut short"),
            (bytes([whole[0] ^ 1]) + whole[1:], "damaged or cut short"),
            (None, "gone"),
        ):
            file.unlink() if harm is None else file.write_bytes(harm)
            for rank, world in ((0, 1), (number % 2, 2)):
                with pytest.raises(UserError, match=rf"{file.name} is {what}, .* or delete .*step_00000004/ to begin"):
                    require_readable(saved, rank, world)
            if harm is not None:  # what is gone the others see too
                require_readable(saved, 1 - number % 2, 2)
        file.write_bytes(whole)


def test_pieces_of_an_earlier_version_have_no_sums_and_are_believed(pieces):
    saved, files = pieces
    for file in saved.state.rglob("*.sha256"):
        file.unlink()
    files[0].write_bytes(b"nobody knows")
    require_readable(saved)


def test_a_piece_of_an_earlier_version_that_was_cut_short_is_no_state(pieces):
    saved, files = pieces
    for file in saved.state.rglob("*.sha256"):
        file.unlink()
    torch.save({"weights": torch.arange(1000.0)}, files[1])
    require_readable(saved)
    os.truncate(files[1], files[1].stat().st_size // 2)
    for length in (files[1].stat().st_size // 2, 0):
        os.truncate(files[1], length)
        with pytest.raises(UserError, match=rf"{files[1].name} is damaged or cut short, .* or delete .*step_00000004/ to begin"):
            require_readable(saved)


def test_a_piece_that_is_gone_with_its_sum_is_named(pieces):
    saved, files = pieces
    for file in (files[0], files[2]):  # rank 0's, and the names
        both = file, file.with_name(file.name + ".sha256")
        whole = [each.read_bytes() for each in both]
        for each in both:
            each.unlink()
        name = file.name if "optim" in file.name else "zero_pp_rank_0_mp_rank_00_model_states.pt"
        for rank in (0, 1):
            with pytest.raises(
                UserError, match=rf"state/ lacks {name}.*, so the run cannot go on from it; restore it, or delete"
            ):
                require_readable(saved, rank, 2)
        for each, content in zip(both, whole, strict=True):
            each.write_bytes(content)
    for latest in ("", "elsewhere", None):
        file = saved.state / "latest"
        file.unlink() if latest is None else file.write_text(latest)
        with pytest.raises(UserError, match="state/ lacks a file `latest` that names a folder in it"):
            require_readable(saved)


def test_the_last_process_s_piece_is_missed_by_the_number_that_the_others_tell(tmp_path):
    """Without it, the files look like those of fewer processes."""
    pytest.importorskip("deepspeed")
    (tmp_path / "checkpoint").mkdir()
    for counted in ([2, 2], 2):
        piece = {"optimizer_state_dict": {"partition_count": counted, "zero_stage": 2}}
        torch.save(piece, tmp_path / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        with pytest.raises(UserError, match=r"holds the pieces of 1 process\(es\), but was saved by 2"):
            saved_by(tmp_path)
    torch.save(piece, tmp_path / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert saved_by(tmp_path) == (2, 2)


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
