"""The data stage from end to end with a stand-in target: what is kept, what a kill leaves, what is refused."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_target import FakeSpeech, FakeTarget, check_kept, features_of, small_config
from safetensors.torch import load_file

from data_prep.pipeline import HELD_OUT, prepare
from data_prep.sources import JsonlPrompts, SelfPrompts
from drafttrain import files
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError
from drafttrain.files import RunLock
from drafttrain.types import Request

TAPS = (1, 3)


def run(folder, config=None, ask=None, target=None, taps=TAPS, say=lambda text: None) -> TokenStore:
    target = target or FakeTarget()
    return prepare(config or small_config(), target, folder, taps=taps, draft_vocab=16, ask=ask or FakeSpeech(target), say=say)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A data folder made without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    run(folder)
    return folder


def test_stores_hold_the_targets_answers_and_features(whole):
    training, held_out = TokenStore.open(whole / "train"), TokenStore.open(whole / "held_out")
    target = FakeTarget()
    assert len(held_out) == 4 and held_out.manifest.taps is None and training.manifest.taps == [1, 3]
    by_key = {}
    for name in ("prompts.jsonl", "held_out.jsonl"):
        by_key |= {(row := json.loads(line))["key"]: row["messages"] for line in (whole / name).read_text().splitlines()}
    for store, temperature, limit in ((training, 0.7, 12), (held_out, 0.0, 8)):
        for index in range(len(store)):
            chat = store.chat(index, features=store is training)
            prompt = target.render(by_key[chat.key])
            again = FakeSpeech(target)._rollout(Request(chat.key + "/answer", tuple(prompt), limit), temperature, None)
            assert torch.equal(chat.ids, again.ids)
            assert chat.supervised.tolist() == [t >= len(prompt) for t in range(len(chat.ids))]
            if chat.features:
                check_kept(chat, *features_of(chat.ids, TAPS))
    assert set(training.keys).isdisjoint(held_out.keys)


def test_ledger_adds_up_over_the_whole_pipeline(whole):
    rows = TokenStore.open(whole / "train").manifest.rows
    attempts = sum(len(json.loads(path.read_text())["rows"]) for path in (whole / "attempts").iterdir())
    assert rows["in"] == attempts == rows["kept"] + sum(rows["dropped"].values())
    assert rows["kept"] == len(TokenStore.open(whole / "train")) and rows["dropped"][HELD_OUT] == 4
    assert not list(whole.rglob("*.tmp"))


def test_several_answers_to_a_prompt_differ_and_are_all_accounted_for(tmp_path):
    target = FakeTarget()
    store = run(tmp_path / "data", small_config(samples=2, greedy=True), target=target)
    chats = {chat.key: chat.ids.tolist() for chat in map(store.chat, range(len(store)))}
    first = [key for key in chats if "#" not in key]
    assert len(first) > 5 and len(chats) == 3 * len(first)
    prompts = {row["key"]: row["messages"] for row in map(json.loads, (tmp_path / "data/prompts.jsonl").read_text().splitlines())}
    for key in first:
        request = Request(f"{key}#greedy/answer", tuple(target.render(prompts[key])), 12)
        assert chats[f"{key}#greedy"] == FakeSpeech(target)._rollout(request, 0.0, None).ids.tolist()
    assert sum(chats[key] != chats[f"{key}#2"] for key in first) == len(first)
    rows = store.manifest.rows
    assert rows["kept"] == len(chats) and rows["in"] == rows["kept"] + sum(rows["dropped"].values())


def test_ids_that_look_like_further_answers_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": name, "messages": [{"role": "user", "content": f"kaban {name} lodor"}]} for name in ("a", "a#2", "b", "c")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_config(prompts=[JsonlPrompts(str(path))], held_out=1, samples=2, near_duplicate=1.0)
    with pytest.raises(UserError, match="rename ids"):
        for seed in range(9):  # until neither of the two is held out
            run(tmp_path / str(seed), replace(config, seed=seed))


def test_questions_and_answers_do_not_share_random_streams(tmp_path):
    ask = FakeSpeech(FakeTarget())
    run(tmp_path / "data", ask=ask)
    keys = [request.key for request in ask.requests]
    assert len(set(keys)) == len(keys) > 24


@pytest.mark.parametrize("calls", range(0, 10, 2))
def test_killed_between_chunks_and_started_again_gives_the_same_bytes(tmp_path, whole, calls):
    """Batches in order: sampling (5 of them), held-out answers (1), training answers (4)."""
    folder = tmp_path / "data"
    target = FakeTarget()
    with pytest.raises(RuntimeError, match="killed here"):
        run(folder, ask=FakeSpeech(target, stop_after=calls), target=target)
    assert not (folder / "train" / "manifest.json").exists()
    ask = FakeSpeech(target)
    run(folder, ask=ask, target=target)
    assert contents(folder) == contents(whole)


def test_finished_chunks_are_not_answered_again(tmp_path, whole):
    total = FakeSpeech(FakeTarget())
    run(tmp_path / "once", ask=total)
    folder = tmp_path / "data"
    with pytest.raises(RuntimeError):
        run(folder, ask=FakeSpeech(FakeTarget(), stop_after=total.calls - 2))
    rest = FakeSpeech(FakeTarget())
    run(folder, ask=rest)
    assert rest.calls == 2 and contents(folder) == contents(whole)


@pytest.mark.parametrize(
    ("how", "waits_for"), [(signal.SIGKILL, "train: shard 2"), (signal.SIGTERM, "train: shard 1"), (signal.SIGKILL, "self:")]
)
def test_process_killed_from_outside_and_started_again(tmp_path, whole, how, waits_for):
    folder = tmp_path / "data"
    program = [sys.executable, str(Path(__file__).parent / "fake_target.py"), str(folder), "0.03"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as process:
        for line in process.stdout:
            if line.startswith(waits_for):
                break
        process.send_signal(how)
        assert process.wait(20) == -how and process.stderr.read() == ""
    assert not (folder / "train" / "manifest.json").exists()
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "tokens-00003.safetensors.tmp").write_bytes(b"half")
    (folder / "train" / "features-00003.safetensors").write_bytes(b"half, without its JSON")
    run(folder)
    assert contents(folder) == contents(whole)


def test_complete_folder_is_recognised(tmp_path):
    run(tmp_path / "data")
    before, said = contents(tmp_path / "data"), []
    ask = FakeSpeech(FakeTarget(), stop_after=0)
    store = run(tmp_path / "data", ask=ask, say=said.append)
    assert len(store) == len(TokenStore.open(tmp_path / "data" / "train")) and ask.calls == 0
    assert said == [f"{tmp_path / 'data'}/ is complete: {len(store)} training chats, 4 held-out chats."]
    assert contents(tmp_path / "data") == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"config": small_config(max_tokens=11)}, "prepare.max_tokens was 12 and is now 11"),
        (
            {"config": small_config(prompts=[SelfPrompts(count=23, max_tokens=30)])},
            "prepare.prompts[0].count was 24 and is now 23",
        ),
        ({"target": FakeTarget(revision="r2")}, "target revision was r1 and is now r2"),
    ],
)
def test_folder_made_otherwise_is_refused(whole, change, sentence):
    with pytest.raises(UserError) as error:
        run(whole, **change)
    assert sentence in str(error.value) and "or delete that folder" in str(error.value)


def test_slots_may_change_between_restarts(whole):
    run(whole, small_config(slots=3), ask=FakeSpeech(FakeTarget(), stop_after=0))


def test_changed_prompt_file_is_refused(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", [f"kaban lodor {word}" for word in "abcdef"])
    config = small_config(prompts=[JsonlPrompts(path)], held_out=1)
    run(tmp_path / "data", config)
    write_prompts(tmp_path / "p.jsonl", ["other words here", "and some more"])
    with pytest.raises(UserError, match=r"prompts\[0\] content \(sha256\) was"):
        run(tmp_path / "data", config)
    (tmp_path / "p.jsonl").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        run(tmp_path / "data", config)


def test_two_runs_into_one_folder_are_refused(tmp_path):
    with RunLock(tmp_path / "data"), pytest.raises(UserError, match="data/ is in use by another process"):
        run(tmp_path / "data")


def write_prompts(path: Path, texts) -> str:
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    return str(path)


def test_every_reason_to_drop_a_prompt_or_an_answer(tmp_path):
    distinct = [f"w{i} x{i} y{i} z{i}" for i in range(12)]
    held = write_prompts(tmp_path / "held.jsonl", ["one two three four five six"])
    texts = [*distinct, distinct[0].upper() + " ?", "forbidden words here", "long " * 80, "one two, three four five six seven"]
    path = write_prompts(tmp_path / "p.jsonl", texts)
    with open(path, "a") as file:
        file.write(json.dumps({"id": "000002", "messages": [{"role": "user", "content": "same id"}]}) + "\n{broken\n")
    target = FakeTarget()
    ask = FakeSpeech(target)
    ask.scripted = {"p-000003/answer": [2], "p-000004/answer": []}
    config = small_config(prompts=[JsonlPrompts(path), JsonlPrompts(held)], held_out=1, held_out_source="held")
    store = run(tmp_path / "data", config, ask, target, taps=None)
    assert store.manifest.rows == {
        "in": 19,
        "kept": 10,
        "dropped": {
            "close to a held-out prompt": 1,
            "duplicate": 1,
            "empty answer": 1,
            "id used twice": 1,
            "no supervised token": 1,
            "not JSON": 1,
            "prompt longer than 60 tokens": 1,
            "refused by the chat template": 1,
            HELD_OUT: 1,
        },
    }
    assert {"p-000003", "p-000004"}.isdisjoint(store.keys) and "p-000001" in store.keys
    dropped = [json.loads(line) for line in (tmp_path / "data" / "dropped.jsonl").read_text().splitlines()]
    assert {"row": "p-000016", "reason": "close to a held-out prompt"} in dropped and {
        "row": f"{path} line 18",
        "reason": "not JSON",
    } in dropped
    assert store.manifest.facts["sources"]["p"] == {"in": 18, "kept": 17, "dropped": {"not JSON": 1}}


def test_target_that_says_nothing_is_refused(tmp_path):
    target = FakeTarget()
    ask = FakeSpeech(target)
    path = write_prompts(tmp_path / "p.jsonl", [f"w{i} x{i} y{i}" for i in range(6)])
    ask.scripted = {f"p-{i:06d}/answer": [2] for i in range(9)}
    with pytest.raises(UserError, match=r"no chat with a supervised token .1 empty answer"):
        run(tmp_path / "data", small_config(prompts=[JsonlPrompts(path)], held_out=1), ask, target)


def test_all_prompts_too_long_is_refused(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", ["long " * 80, "longer " * 81])
    with pytest.raises(
        UserError, match=r"None of 2 prompts can be asked .*prompt longer than 60 tokens.*raise prepare.max_prompt"
    ):
        run(tmp_path / "data", small_config(prompts=[JsonlPrompts(path)], held_out=1))


def test_limits_beyond_the_targets_window_and_layers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"max_prompt 250 . prepare.max_tokens 12 is longer than the 256 positions"):
        run(tmp_path / "data", small_config(max_prompt=250))
    with pytest.raises(UserError, match="outside the layers"):
        run(tmp_path / "data", taps=(1, 9))
    assert not (tmp_path / "data").exists()


def test_no_template_is_one_error_and_not_one_dropped_row_each(tmp_path, monkeypatch):
    def render(self, messages):
        raise UserError("tokenizer without a chat template")

    monkeypatch.setattr(FakeTarget, "render", render)
    with pytest.raises(UserError, match="without a chat template"):
        run(tmp_path / "data")


def test_disk_that_fills_up_keeps_finished_shards(tmp_path, whole, monkeypatch):
    folder, real = tmp_path / "data", os.write

    def write(handle, data):
        if (folder / "train" / "features-00001.safetensors.tmp").exists():
            real(handle, bytes(data)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(
        UserError, match=r"disk is full .*train.*: 1 of 4 shards in .*train/ are finished and kept. Free some space"
    ):
        run(folder)
    monkeypatch.undo()
    names = {path.name for path in (folder / "train").iterdir()}
    assert names == {"tokens-00000.safetensors", "features-00000.safetensors", "shard-00000.json", "tokens-00001.safetensors"}
    run(folder)
    assert contents(folder) == contents(whole)


def test_space_is_asked_for_before_the_first_answer(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("data_prep.pipeline.require_space", lambda folder, size, what: asked.append(size))
    run(tmp_path / "data")
    size = sum(path.stat().st_size for name in ("train", "held_out") for path in (tmp_path / "data" / name).glob("*.safetensors"))
    assert len(asked) == 1 and 0.5 * size < asked[0] < 4 * size
    (tmp_path / "data" / "train" / "manifest.json").unlink()
    run(tmp_path / "data")
    assert asked[1] == 0  # nothing is left to write
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr("data_prep.pipeline.require_space", files.require_space)
    with pytest.raises(UserError, match=r"features of 20 chats needs up to .* has 1.0 kB free"):
        run(tmp_path / "full")


@pytest.mark.parametrize(("dtype", "final"), [("bfloat16", "taught"), ("float8_e4m3fn", "all")])
def test_the_space_asked_for_is_taken_where_every_answer_is_as_long_as_it_may_be(tmp_path, monkeypatch, dtype, final):
    asked, target = [], FakeTarget()
    monkeypatch.setattr("data_prep.pipeline.require_space", lambda folder, size, what: asked.append(size))

    class Talker(FakeSpeech):
        def _rollout(self, request, temperature, taps):
            if request.key.endswith("/answer"):
                self.scripted[request.key] = [7 + len(self.scripted) % 9] * request.limit
            return super()._rollout(request, temperature, taps)

    given = dict(taps=TAPS, feature_dtype=dtype, final=final, draft_vocab=None, say=lambda text: None)
    store = prepare(small_config(), target, tmp_path / "data", ask=Talker(target), **given)
    assert store.manifest.feature_dtype == dtype and store.manifest.rows["kept"] == 20
    taken = 0
    for path in (tmp_path / "data").glob("*/*.safetensors"):
        taken += sum(x.nbytes for name, x in load_file(path).items() if name != "offsets")
    assert asked[0] == taken


def test_features_are_kept_in_the_wanted_type_while_answering_and_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.featurize._read", lambda *args: pytest.fail("the target reads the shards once more"))
    target = FakeTarget()
    given = dict(taps=(), feature_dtype="float8_e4m3fn", final="all", draft_vocab=None, say=lambda text: None)
    store = prepare(small_config(), target, tmp_path / "data", ask=FakeSpeech(target), **given)
    store.require(target.identity, (), "float8_e4m3fn", "all")
    for index in range(len(store)):
        found, (_, final_TD) = (
            store.chat(index, features=True).features.final_BTD.float(),
            features_of(store.chat(index).ids, (0,)),
        )
        torch.testing.assert_close(found[:-1], final_TD[:-1], rtol=1 / 16, atol=1)
        assert not found[-1].any()


def test_damaged_shard_stops_a_restart_and_is_made_again(tmp_path, whole):
    folder = tmp_path / "data"
    run(folder)
    damaged = folder / "train" / "tokens-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"tokens-00002.safetensors is damaged"):
        run(folder)
    (folder / "train" / "shard-00002.json").unlink()
    (folder / "train" / "manifest.json").unlink()
    ask = FakeSpeech(FakeTarget())
    run(folder, ask=ask)
    assert ask.calls == 1 and contents(folder) == contents(whole)


def test_changed_list_of_prompts_is_refused(tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(RuntimeError):
        run(folder, ask=FakeSpeech(FakeTarget(), stop_after=7))
    lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(UserError, match=r"prompts.jsonl was changed or removed"):
        run(folder)


def test_what_was_written_is_said(tmp_path):
    said: list[str] = []
    store = run(tmp_path / "data", say=said.append)
    text = "\n".join(said)
    assert f"{store.manifest.rows['in']} rows in, 20 kept for training" in text and f"4 {HELD_OUT}" in text
    assert f"{store.manifest.tokens:,} tokens" in text and "features of layers [1, 3] in bfloat16" in text and "tokens/s" in text
    counts, held = store.counts()[0], TokenStore.open(tmp_path / "data" / "held_out").counts()[0]
    top = counts.argsort(descending=True, stable=True)[:16]
    assert f"draft vocabulary of 16 ids ({int((counts > 0).sum())} distinct" in text
    assert f"covers {held[top].sum() / held.sum():.2%} of held-out" in text


def test_seed_changes_split_and_words(tmp_path, whole):
    target = FakeTarget()
    run(tmp_path / "data", small_config(seed=1), FakeSpeech(target, seed=1), target)
    assert (tmp_path / "data" / "held_out.jsonl").read_text() != (whole / "held_out.jsonl").read_text()


def test_replacing_the_config_keeps_its_checks():
    with pytest.raises(UserError):
        replace(small_config(), slots=0)
