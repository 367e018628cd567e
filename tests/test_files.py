"""Atomic files, the run lock and the disk checks."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from drafttrain import files
from drafttrain.errors import UserError


def fail_writes(monkeypatch, after: int = 0, code: int = errno.ENOSPC) -> None:
    """os.write writes half a block and then reports a full disk, from the given call on."""
    real, calls = os.write, [0]

    def write(handle, data):
        calls[0] += 1
        if calls[0] > after:
            real(handle, bytes(data)[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)


def test_a_failed_write_leaves_the_old_file_and_no_leftover(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "x.json"
    files.write_atomic(path, "old")
    fail_writes(monkeypatch)
    with pytest.raises(OSError):
        files.write_atomic(path, "new and longer")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:3]))
    files.write_atomic(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_json_refuses_what_json_does_not_know(tmp_path):
    files.write_json_atomic(tmp_path / "x.json", {"b": "ü", "a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"b": "ü", "a": 1}
    with pytest.raises(ValueError):
        files.write_json_atomic(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text())["a"] == 1


def test_tensors_come_back_with_their_digest(tmp_path):
    path = tmp_path / "x.safetensors"
    facts = files.write_tensors_atomic(path, {"a": torch.arange(6).view(2, 3).T})
    assert torch.equal(load_file(path)["a"], torch.arange(6).view(2, 3).T)
    assert facts == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert files.sha256_file(path) == facts["sha256"]


def test_lock_refuses_a_second_process_and_is_freed_by_a_kill(tmp_path):
    program = textwrap.dedent(f"""
        import sys, time
        from drafttrain.files import RunLock
        with RunLock({str(tmp_path)!r}):
            print("held", flush=True)
            time.sleep(60)
    """)
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"{tmp_path}/ is in use by another process .pid {holder.pid}"):
            files.RunLock(tmp_path).__enter__()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with files.RunLock(tmp_path), pytest.raises(UserError):
        files.RunLock(tmp_path).__enter__()
    with files.RunLock(tmp_path):
        pass


def test_space_is_checked_on_the_disk_of_a_folder_that_is_not_there_yet(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=10_000))
    files.require_space(tmp_path / "a" / "b", 10_000, "features")
    assert asked == [tmp_path]
    with pytest.raises(UserError, match=r"features needs up to 10.0 kB.* has 10.0 kB free"):
        files.require_space(tmp_path, 10_001, "features")


def test_full_disk_becomes_a_sentence_and_other_errors_do_not(tmp_path, monkeypatch):
    fail_writes(monkeypatch)
    with (
        pytest.raises(UserError, match=r"disk is full .*: 3 shards are kept"),
        files.explain_full_disk(tmp_path, "3 shards are kept."),
    ):
        files.write_atomic(tmp_path / "x", "data")
    with pytest.raises(PermissionError), files.explain_full_disk(tmp_path, ""):
        raise PermissionError(errno.EACCES, "no")


def test_leftovers_are_removed(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.tmp", "sub/b.json.tmp", "sub/keep.json"):
        (tmp_path / name).touch()
    assert files.remove_leftovers(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["keep.json", "sub"]


def test_reading_names_the_file(tmp_path):
    with pytest.raises(UserError, match=r"m.json is missing"):
        files.read_json(tmp_path / "m.json", "the store")
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(UserError, match=r"m.json is damaged"):
        files.read_json(tmp_path / "m.json", "the store")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match=r"folder.json cannot be read \(Is a directory\)"):
        files.read_json(tmp_path / "folder.json", "the store")


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e13, "30.0 TB")])
def test_human_bytes(count, text):
    assert files.human_bytes(count) == text
