"""Signs of life while the target answers, and the last word of a run that is stopped from outside."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from fake_target import small_config

from data_prep import progress
from data_prep.pipeline import LocalSpeaker
from data_prep.progress import Watched, kept, stoppable
from drafttrain.types import Request, Rollout

ROOT = Path(__file__).parents[2]


def slow(seconds, tokens=7, fails=None):
    def ask(requests, temperature, top_p, taps):
        for number, request in enumerate(requests):
            time.sleep(seconds)
            if number == fails:
                raise RuntimeError("broken here")
            yield Rollout(request.key, torch.arange(2 + tokens), 2, [], 0, True, torch.empty(0))

    return ask


REQUESTS = [Request(f"k{n}", (1, 2), 7) for n in range(6)]


def threads() -> int:
    return sum(thread.name == "progress" for thread in threading.enumerate())


def test_who_takes_long_says_how_far_it_is(monkeypatch, said):
    monkeypatch.setattr(progress, "PERIOD_S", 0.05)
    begun = time.perf_counter()
    rollouts = list(Watched(slow(0.04), "train: shard 3 of 9", said.append)(REQUESTS, 0.0, 1.0, None))
    seconds = time.perf_counter() - begun
    assert [rollout.key for rollout in rollouts] == [request.key for request in REQUESTS]
    found = [re.fullmatch(r"train: shard 3 of 9: (\d) of 6 answers, ([\d,]+) tokens/s", line) for line in said]
    assert 1 <= len(found) <= seconds / 0.05 and all(found)
    done = [int(match[1]) for match in found]
    assert done == sorted(done) and 0 < done[-1] <= 6
    assert 7 * done[-1] / seconds <= int(found[-1][2]) <= 7 / 0.04  # a rate that is not above what was slept for
    before = len(said)
    time.sleep(0.12)
    assert len(said) == before and not threads()


def test_answers_under_way_are_in_the_rate(monkeypatch, said):
    monkeypatch.setattr(progress, "PERIOD_S", 0.05)
    ask = slow(0.2)
    ask.under_way = lambda: 7_000
    list(Watched(ask, "train", said.append)(REQUESTS[:1], 0.0, 1.0, None))
    first = re.fullmatch(r"train: 0 of 1 answers, ([\d,]+) tokens/s", said[0])
    assert 7_000 / 0.2 < int(first[1].replace(",", "")) <= 7_000 / 0.05


def test_who_is_quick_says_nothing(said):
    list(Watched(slow(0), "train", said.append)(REQUESTS, 0.0, 1.0, None))
    assert said == [] and progress.PERIOD_S == 30


def test_a_failure_and_a_reader_that_goes_away_end_the_lines(monkeypatch, said):
    monkeypatch.setattr(progress, "PERIOD_S", 0.01)
    with pytest.raises(RuntimeError, match="broken here"):
        list(Watched(slow(0.02, fails=2), "train", said.append)(REQUESTS, 0.0, 1.0, None))
    assert not threads()
    answers = Watched(slow(0.02), "train", said.append)(REQUESTS, 0.0, 1.0, None)
    next(answers)
    answers.close()
    assert not threads()

    def unread(line):
        raise BrokenPipeError("of stdout")

    assert len(list(Watched(slow(0.02), "train", unread)(REQUESTS, 0.0, 1.0, None))) == 6


def test_tokens_of_unfinished_answers_count(tiny_llama):
    """What the engine has said at any moment against what it hands out in the end."""
    speaker = LocalSpeaker(tiny_llama, small_config(slots=3))
    requests = [Request(f"k{n}", (1, 5, 9), 4 + 3 * n) for n in range(5)]
    handed, most = 0, sum(request.limit for request in requests)
    assert speaker.under_way() == 0
    begun = 0
    for rollout in speaker(requests, 1.0, 1.0, None):
        handed += len(rollout.answer)
        assert handed + speaker.under_way() <= most
        begun += speaker.under_way() > 0
    assert begun and speaker.under_way() == 0 and handed <= most


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "nothing is finished yet; the same command begins anew"),
        (["attempts/self-00000.json"], "the prompts sampled so far in {}/ are kept; the same command goes on from there"),
        (["attempts/self-00000.json", "prompts.json"], "the prompts in {}/ are kept; the same command goes on from there"),
        (
            ["prompts.json", "held_out/shard-00000.json"],
            "1 finished shard and the prompts in {}/ are kept; the same command goes",
        ),
        (["prompts.json", "held_out/shard-00000.json", "train/shard-00001.json"], "2 finished shards and the prompts in {}/ are"),
    ],
)
def test_what_is_kept(tmp_path, files, words):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert kept(tmp_path).startswith(words.format(tmp_path))


def test_the_handler_of_others_comes_back(tmp_path, said):
    before = signal.getsignal(signal.SIGTERM)
    with stoppable(tmp_path, said.append):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before and said == []
    with pytest.raises(SystemExit) as other, stoppable(tmp_path, said.append):
        sys.exit(3)
    assert other.value.code == 3 and said == []


def command(folder: Path, target: Path) -> list[str]:
    """Of a run with 20 shards."""
    with open(folder / "prompts.jsonl", "w") as file:
        for n in range(42):
            file.write(json.dumps({"prompt": f"what is {n} plus {7 * n % 13}{'?' * n}"}) + "\n")
    prompts = {"class_path": "JsonlPrompts", "init_args": {"path": str(folder / "prompts.jsonl")}}
    recipe = {
        "name": "stopped",
        "target": {"path": str(target)},
        "prepare": {
            "prompts": [prompts],
            "held_out": 2,
            "near_duplicate": 1.0,
            "chunk": 2,
            "max_prompt": 96,
            "max_tokens": 60,
            "held_out_max_tokens": 8,
        },
        "drafter": {"class_path": "Eagle3", "init_args": {"draft_vocab": 200}},
        "objective": {"class_path": "Distillation"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return [sys.executable, "-m", "data_prep", "--config", str(folder / "recipe.yaml"), "--runs", str(folder)]


def heed_interrupts() -> None:
    """A shell's background jobs, these tests among them, are started deaf to Ctrl-C, and so is what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_says_what_is_kept_and_the_same_command_goes_on(tmp_path, target_folders, how, code):
    words = command(tmp_path, target_folders("llama"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, cwd=ROOT, preexec_fn=heed_interrupts) as process:
        for line in process.stdout:
            if line.startswith("train: shard 3 of 20"):
                break
        process.send_signal(how)
        rest = process.stdout.read()
        assert process.wait(60) == code and "Traceback" not in rest
        data = tmp_path / "stopped" / "data"
        before = {file: file.read_bytes() for file in data.glob("*/shard-*.json")}
        assert 4 <= len(before) < 21
        assert process.stderr.read() == (
            f"stopped: {len(before)} finished shards and the prompts in {data}/ are kept; the same command goes on from there\n"
        )
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and "train: shard 3 of 20" not in done.stdout and "train: shard 20 of 20" in done.stdout
    assert {file: file.read_bytes() for file in before} == before
