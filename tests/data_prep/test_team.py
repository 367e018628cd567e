"""Several processes on one data folder make what one process makes, also when they are killed and started again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.pipeline import prepare
from data_prep.team import Team
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError

HERE = Path(__file__).parent


def start(folder, world: int, name: str, slow: float = 0.01) -> list[subprocess.Popen]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(HERE / "fake_target.py"), str(folder), str(slow)]
    return [
        subprocess.Popen(
            [*program, str(rank), str(world), name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for rank in range(world)
    ]


def files(folder: Path, chunks: int = 5) -> dict[str, bytes]:
    """Without the attempts that nobody needed: a process may run a round ahead of the leader."""
    skipped = (".lock", "started.json")
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in skipped)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.parent.name != "attempts" or int(path.stem[-5:]) < chunks
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "data"
    target = FakeTarget()
    prepare(small_config(), target, folder, taps=(1, 3), draft_vocab=16, ask=FakeSpeech(target), say=lambda text: None)
    return folder


def test_three_processes_make_what_one_makes(tmp_path, whole):
    processes = start(tmp_path / "data", 3, "first")
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert files(tmp_path / "data") == files(whole)
    made = [text.count("train: shard") for text in said]
    assert sum(made) == TokenStore.open(whole / "train").manifest.shards and all(made)


def test_a_killed_helper_and_a_second_start(tmp_path, whole):
    folder = tmp_path / "data"
    processes = start(folder, 3, "first", slow=0.05)
    for line in processes[1].stdout:  # its first shard is done: kill it in the next, and the others as torchrun would
        if line.startswith("train: shard"):
            break
    for process in (processes[1], processes[0], processes[2]):
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (folder / "train" / "manifest.json").exists()
    processes = start(folder, 2, "second")
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert files(folder) == files(whole)


def test_helpers_of_a_finished_folder_return(tmp_path, whole):
    target = FakeTarget()
    given = dict(taps=(1, 3), draft_vocab=16, ask=FakeSpeech(target, stop_after=0), say=lambda text: None)
    for rank in range(2):
        assert len(prepare(small_config(), target, whole, team=Team(rank, 2, "again"), **given)) > 5
    (whole / "started.json").unlink()


def test_processes_of_two_starts_do_not_mix(tmp_path):
    Team(0, 4, "job").announce(tmp_path)
    with pytest.raises(UserError, match="worked on by 4 processes"):
        Team(1, 3, "job").await_leader(tmp_path)
    assert Team.of(1, 2, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}).start == "a/1"
