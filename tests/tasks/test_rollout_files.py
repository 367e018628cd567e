"""Saved rollouts come back as they were, on any number of processes, or are refused by name."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafttrain import files
from drafttrain.data.sealed import read_sealed, write_sealed
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import Decoded
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.rollout_buffer import PromptOrder, RolloutBuffer, RolloutPlan, number_of, requests
from drafttrain.tasks.rollout_files import MadeWith, RolloutFiles, bytes_of
from drafttrain.types import DraftRounds, Identity, Request, Rollout
from drafttrain.vocab import DraftVocabulary

IDENTITY = Identity("hub/target", "rev", "tok", "tpl", "{}", layers=6, hidden=4, vocab=64)
MADE_WITH = MadeWith(IDENTITY, taps=(1, 3), drafts=3)
CONFIG = OnPolicyConfig(rollouts=8, batch=4, buffer=16)
PLAN = RolloutPlan(CONFIG, seed=0)
WAY_OUT = "delete last/ to begin anew"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def some_features(shape: tuple[int, ...], draw: random.Random, dtype: torch.dtype) -> Tensor:
    """Random numbers with what a type has besides them: nothing is to be changed on the way."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(10**6)))
    if x.numel() > 2:
        x.view(-1)[:2] = torch.tensor([float("nan"), -0.0])
    return x.to(dtype)


def some_rounds(draw: random.Random, dtype: torch.dtype, count: int) -> DraftRounds:
    K, D = 3, 4
    numbers = [torch.tensor([draw.randrange(20) for _ in range(count)], dtype=torch.long) for _ in range(6)]
    drafted_RK = torch.tensor([[draw.randrange(-1, 64) for _ in range(K)] for _ in range(count)], dtype=torch.long)
    anchor, proposed, accepted, said, kept, within = numbers
    final_RPD = some_features((count, K + 1, D), draw, dtype)
    return DraftRounds(anchor, drafted_RK.reshape(count, K), proposed, accepted, said, kept, within, final_RPD)


def some_rollout(number: int, draw: random.Random, dtype: torch.dtype) -> Rollout:
    """With or without features and rounds; of the class that the engine gives."""
    T, kind = draw.randrange(2, 9), draw.randrange(4)
    rounds = None if kind == 0 else some_rounds(draw, dtype, 0 if kind == 1 else draw.randrange(1, 5))
    with_features = kind != 3
    return Decoded(
        key=f"{number}/gsm8k/ä",
        ids=torch.tensor([draw.randrange(64) for _ in range(T)]),
        prompt_len=draw.randrange(1, T),
        accepted=[draw.randrange(4) for _ in range(draw.randrange(3))],
        cut=draw.randrange(3),
        stopped=draw.random() < 0.5,
        beyond=torch.arange(draw.randrange(2)),
        taps_TAD=some_features((T, 2, 4), draw, dtype) if with_features else None,
        final_TD=some_features((T, 4), draw, dtype) if with_features else None,
        failed="it was too long" if kind == 3 else None,
        rounds=rounds,
        tried=[],
    )


def filled(refresh: int, rank: int = 0, world: int = 1, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> RolloutBuffer:
    """What a process keeps behind a refresh; every rollout follows from its number and the seed."""
    buffer = RolloutBuffer(PLAN, rank, world)
    for lane in buffer.lanes:
        for number in PLAN.kept(lane, refresh):
            buffer.add(number, some_rollout(number, random.Random(1000 * seed + number), dtype))
    return buffer


def in_folder(folder: Path, plan: RolloutPlan = PLAN, made_with: MadeWith = MADE_WITH) -> RolloutFiles:
    return RolloutFiles(folder, plan, made_with, WAY_OUT)


def saved(folder: Path, refresh: int = 3, world: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[RolloutBuffer]:
    buffers = [filled(refresh, rank, world, dtype) for rank in range(world)]
    for buffer in buffers:
        in_folder(folder).save(buffer, refresh)
    in_folder(folder).finish(refresh)
    return buffers


def restored(folder: Path, refresh: int = 3, rank: int = 0, world: int = 1) -> RolloutBuffer:
    buffer = RolloutBuffer(PLAN, rank, world)
    in_folder(folder).restore(buffer, refresh)
    return buffer


def as_bytes(x):
    """Anything, comparable bit by bit."""
    return (x.dtype, x.shape, x.contiguous().view(torch.uint8).tolist() if x.numel() else []) if isinstance(x, Tensor) else x


def parts(rollout: Rollout) -> dict:
    found = {field.name: as_bytes(getattr(rollout, field.name)) for field in fields(Rollout) if field.name != "rounds"}
    rounds = rollout.rounds
    return found | {"rounds": rounds and {field.name: as_bytes(getattr(rounds, field.name)) for field in fields(DraftRounds)}}


def contents(buffer: RolloutBuffer) -> dict[int, dict]:
    return {number: parts(buffer[number]) for number in buffer}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rollouts_come_back_bit_by_bit_in_their_types(tmp_path, dtype):
    (buffer,) = saved(tmp_path, dtype=dtype)
    found = restored(tmp_path)
    assert contents(found) == contents(buffer) and len(found) == 16
    rollouts = [found[number] for number in found]
    assert {rollout.rounds is None for rollout in rollouts} == {rollout.taps_TAD is None for rollout in rollouts} == {True, False}
    assert 0 in {len(rollout.rounds.anchor_R) for rollout in rollouts if rollout.rounds is not None}
    assert {rollout.final_TD.dtype for rollout in rollouts if rollout.final_TD is not None} == {dtype}
    assert type(rollouts[0]) is Rollout


def test_what_the_engine_says_comes_back(tmp_path, targets):
    """Of requests that the plan numbered, through a buffer."""
    target = targets("llama")
    prompts = [Request(f"p{i}", tuple(range(3, 6 + i)), limit=6) for i in range(5)]
    drafter = Eagle3(taps=[0, 1, 3], depth=3).build(target, DraftVocabulary.full(target.vocab))
    engine = Engine(target, proposer=ChainProposer(drafter, 3), slots=4, taps=(0, 1, 3), keep_features=True, keep_rounds=True)
    buffer = RolloutBuffer(PLAN, 0, 1)
    for refresh in range(2):
        for rollout in engine.generate(requests(prompts, PromptOrder(5, seed=0), buffer.missing(refresh))):
            buffer.add(number_of(rollout), rollout)
    in_folder(tmp_path).save(buffer, 1)
    in_folder(tmp_path).finish(1)
    found = restored(tmp_path, 1)
    assert contents(found) == contents(buffer) and len(found) == 16
    assert sum(len(found[number].rounds.anchor_R) for number in found) > 16


def test_views_of_one_tensor_are_saved_too(tmp_path):
    buffer = filled(3)
    both = torch.randn(5, 3, 4)
    for number in buffer:
        rollout = replace(buffer[number], taps_TAD=both[:, :2], final_TD=both[:, 2], beyond=buffer[number].ids[:1])
        buffer.add(number, rollout)
    in_folder(tmp_path).save(buffer, 3)
    in_folder(tmp_path).finish(3)
    assert contents(restored(tmp_path)) == contents(buffer)


@pytest.mark.parametrize(("before", "now"), [(1, 1), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_another_number_of_processes_goes_on_from_them(tmp_path, before, now):
    whole = {number: part for buffer in saved(tmp_path, world=before) for number, part in contents(buffer).items()}
    shares = [contents(restored(tmp_path, rank=rank, world=now)) for rank in range(now)]
    assert sum(map(len, shares)) == len(whole) and {n: part for share in shares for n, part in share.items()} == whole


@pytest.mark.parametrize(("refresh", "rollouts"), [(0, 8), (1, 16)])
def test_the_first_rollouts_come_back(tmp_path, refresh, rollouts):
    """When the buffer is not full yet; and 1 and 13 share a lane."""
    (buffer,) = saved(tmp_path, refresh)
    assert len(buffer) == rollouts and contents(restored(tmp_path, refresh)) == contents(buffer)


def data_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_any_file_missing_or_cut_short_is_named(tmp_path):
    saved(tmp_path / "whole")
    names = [path.relative_to(tmp_path / "whole") for path in data_files(tmp_path / "whole")]
    assert len(names) == 9 and {name.parent.name for name in names} == {"refresh_00000003"}
    for name in names:
        whole = (tmp_path / "whole" / name).read_bytes()
        for kept in (None, 0, 1, len(whole) // 2, len(whole) - 1):
            folder = tmp_path / "broken"
            shutil.copytree(tmp_path / "whole", folder)
            if kept is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(whole[:kept])
            found = error_or_contents(folder)
            if isinstance(found, str):
                damage = "bytes instead of" if name.suffix == ".safetensors" else "is damaged"
                assert name.name in found and ("is missing" if kept is None else damage) in found
            else:
                assert kept == len(whole) - 1 and name.suffix == ".json", "the last line break may go"
            shutil.rmtree(folder)


def error_or_contents(folder: Path):
    try:
        return contents(restored(folder))
    except UserError as error:
        return str(error)


def test_any_flipped_bit_is_named_or_changes_nothing(tmp_path):
    saved(tmp_path)
    wanted, draw = contents(restored(tmp_path)), random.Random(0)
    for path in data_files(tmp_path):
        whole = path.read_bytes()
        for at in draw.sample(range(len(whole)), 60):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
            found = error_or_contents(tmp_path)
            if isinstance(found, str):
                assert path.name in found, found
            else:
                assert path.suffix == ".json" and found == wanted  # white space between two values
        path.write_bytes(whole)
    assert error_or_contents(tmp_path) == wanted


def test_the_error_says_what_to_do(tmp_path):
    saved(tmp_path)
    lane = tmp_path / "refresh_00000003" / "lane_00002.safetensors"
    lane.write_bytes(lane.read_bytes()[:-1] + b"x")
    with pytest.raises(
        UserError, match=r"lane_00002.safetensors is damaged \(its sha256 .* in lane_00002.json\); delete last/ to begin anew\."
    ):
        restored(tmp_path)
    assert restored(tmp_path, rank=1, world=2), "the lanes of another process are whole"
    lane.unlink()
    with pytest.raises(UserError, match=r"lane_00002.safetensors is missing, but the checkpoint needs it; delete last/"):
        restored(tmp_path)


def test_lanes_that_changed_places_are_refused(tmp_path):
    saved(tmp_path)
    place = tmp_path / "refresh_00000003"
    for suffix in (".json", ".safetensors"):
        shutil.copy(place / f"lane_00000{suffix}", place / f"lane_00001{suffix}")
    with pytest.raises(UserError, match=r"lane_00001.json is damaged \(its rollouts are not those of its lane\)"):
        restored(tmp_path)
    saved(tmp_path / "other", refresh=4)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "other" / "refresh_00000004", place)
    with pytest.raises(UserError, match=r"manifest.json is damaged \(it is of refresh 4\)"):
        restored(tmp_path)


def test_another_format_is_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "refresh_00000003" / "manifest.json"
    write_sealed(path, read_sealed(path, "it", "so") | {"format": 2})
    with pytest.raises(UserError, match=r"manifest.json is of format 2, but this version reads 1; delete last/ to begin anew\."):
        restored(tmp_path)


@pytest.mark.parametrize(
    ("config", "made_with", "words"),
    [
        ({"batch": 8}, {}, r"on_policy.batch \(4 there, 8 in the recipe\)"),
        ({"buffer": 24}, {}, r"on_policy.buffer \(16 there, 24 in the recipe\)"),
        ({"rollouts": 16}, {}, r"on_policy.rollouts \(8 there, 16 in the recipe\)"),
        ({}, {"taps": (1, 2)}, r"the tapped layers \(\[1, 3\] there, \[1, 2\] in the recipe\)"),
        ({}, {"drafts": None}, r"the depth of the rounds \(3 there, None in the recipe\)"),
        (
            {},
            {"identity": replace(IDENTITY, revision="new")},
            r"the revision of the target's weights \(rev there, new in the recipe\)",
        ),
    ],
)
def test_rollouts_of_another_run_are_refused_with_every_difference(tmp_path, config, made_with, words):
    saved(tmp_path)
    plan = RolloutPlan(replace(CONFIG, **config), seed=0)
    with pytest.raises(UserError, match=words):
        in_folder(tmp_path, plan, replace(MADE_WITH, **made_with)).restore(RolloutBuffer(plan, 0, 1), 3)


def test_where_the_target_lies_does_not_matter(tmp_path):
    saved(tmp_path)
    moved = replace(MADE_WITH, identity=replace(IDENTITY, path="/elsewhere"))
    in_folder(tmp_path, made_with=moved).restore(RolloutBuffer(PLAN, 0, 1), 3)


def test_a_newer_state_stands_beside_the_older_one_until_that_is_let_go(tmp_path):
    (older,), (newer,) = saved(tmp_path, refresh=3), saved(tmp_path, refresh=7)
    assert contents(restored(tmp_path, 3)) == contents(older) and contents(restored(tmp_path, 7)) == contents(newer)
    in_folder(tmp_path).remove_others(7)
    assert [path.name for path in tmp_path.iterdir()] == ["refresh_00000007"]
    with pytest.raises(UserError, match=r"refresh_00000003/manifest.json is missing"):
        restored(tmp_path, 3)


def test_a_state_is_not_finished_before_every_process_saved(tmp_path):
    in_folder(tmp_path).save(filled(3, rank=0, world=2), 3)
    with pytest.raises(ValueError, match="lane 1 is not saved yet"):
        in_folder(tmp_path).finish(3)
    with pytest.raises(UserError, match="manifest.json is missing"):
        restored(tmp_path)


def test_a_lane_that_is_being_written_again_does_not_pass_for_the_one_before(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr(files.os, "fsync", lambda handle: os.stat("/not/there"))
    with pytest.raises(FileNotFoundError):
        in_folder(tmp_path).save(filled(3), 3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="lane 0 is not saved yet"):
        in_folder(tmp_path).finish(3)


def test_a_refresh_that_is_not_answered_yet_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="rollout 32 of lane 0 is not in the buffer, so refresh 4 cannot be saved"):
        in_folder(tmp_path).save(filled(3), 4)


def test_a_state_on_disk_is_not_written_again(tmp_path):
    def times():
        return {path: path.stat().st_mtime_ns for path in data_files(tmp_path)}

    rollouts, buffer = in_folder(tmp_path), filled(3)
    rollouts.save(buffer, 3)
    rollouts.finish(3)
    before = times()
    rollouts.save(buffer, 3)
    rollouts.finish(3)
    again = in_folder(tmp_path)
    again.restore(found := RolloutBuffer(PLAN, 0, 1), 3)
    again.save(found, 3)
    again.finish(3)
    assert times() == before
    in_folder(tmp_path).save(buffer, 3)  # a process that does not know what is there
    assert not (tmp_path / "refresh_00000003" / "manifest.json").exists()


def test_a_state_made_again_behind_a_kill_replaces_the_one_before(tmp_path):
    saved(tmp_path)
    other = filled(3, seed=5)
    in_folder(tmp_path).save(other, 3)
    in_folder(tmp_path).finish(3)
    assert contents(restored(tmp_path)) == contents(other)


@pytest.mark.parametrize("writes", range(9))
def test_a_full_disk_at_any_write_leaves_the_older_state(tmp_path, monkeypatch, writes):
    (older,) = saved(tmp_path, refresh=3)
    real, left = files.os.write, [writes]

    def write(handle, data):
        left[0] -= 1
        if left[0] < 0:
            real(handle, bytes(data)[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(files.os, "write", write)
    rollouts = in_folder(tmp_path)
    with pytest.raises(OSError, match="No space"):
        rollouts.save(filled(4), 4)
        rollouts.finish(4)
    monkeypatch.undo()
    assert contents(restored(tmp_path, 3)) == contents(older)
    with pytest.raises(UserError, match="is missing"):
        restored(tmp_path, 4)
    rollouts.save(filled(4), 4)
    rollouts.finish(4)
    assert contents(restored(tmp_path, 4)) == contents(filled(4)) and not list(tmp_path.rglob("*.tmp"))


KILLED = """
    import os, signal, sys
    sys.path[:0] = [{root!r}, {tests!r}]
    from pathlib import Path
    from tasks import test_rollout_files as here
    from drafttrain import files
    real, left = os.replace, [{renames}]
    def replace(*paths):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*paths)
    os.replace = replace
    rollouts = here.in_folder(Path({folder!r}))
    rollouts.save(here.filled(4, seed=1), 4)
    rollouts.finish(4)
"""


@pytest.mark.parametrize("renames", [0, 3, 8])
def test_a_kill_at_any_file_leaves_the_older_state(tmp_path, renames):
    (older,) = saved(tmp_path, refresh=3)
    saved(tmp_path, refresh=4)  # of a process that was killed before a checkpoint named it
    tests = Path(__file__).resolve().parents[1]
    code = textwrap.dedent(KILLED).format(root=str(tests.parent), tests=str(tests), renames=renames, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert contents(restored(tmp_path, 3)) == contents(older)
    with pytest.raises(UserError, match=r"manifest.json is missing"):
        restored(tmp_path, 4)
    saved(tmp_path, refresh=4)
    assert contents(restored(tmp_path, 4)) == contents(filled(4))


@pytest.mark.parametrize("drafts", [None, 3])
def test_bytes_are_those_of_the_longest_answers(tmp_path, drafts):
    """One token a round, and every answer at its limit: the bound is what is in the tensors."""
    made_with, config, prompt, limit = replace(MADE_WITH, drafts=drafts), replace(CONFIG, max_tokens=9), 5, 9
    total = 0
    for _ in range(config.buffer):
        rounds = None if drafts is None else some_rounds(random.Random(0), torch.bfloat16, limit - 1)
        T = prompt + limit
        tensors = [torch.zeros(T, dtype=torch.long), torch.zeros(T, 2, 4).bfloat16(), torch.zeros(T, 4).bfloat16()]
        tensors += [] if rounds is None else [getattr(rounds, field.name) for field in fields(DraftRounds)]
        total += sum(x.numel() * x.element_size() for x in tensors)
    assert bytes_of(config, made_with, prompt_len=prompt, tau=1, element_bytes=2) == total
    assert (bytes_of(config, made_with, prompt, tau=2, element_bytes=2) < total) == (drafts is not None)
    assert bytes_of(config, made_with, prompt, tau=1, element_bytes=4) > total
