"""`drafttrain adapt` from the outside: lines of prompts in, lines of answers out, bad ones said, stopped and started again."""

import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drafttrain.cli import main
from drafttrain.commands.adapt import _unlike, _writer
from drafttrain.commands.prompt_stream import Lines, PromptStream
from drafttrain.decoding.engine import generate
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.tasks.adapt import Answer
from drafttrain.tasks.stop import StopSignal
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary

ROOT = Path(__file__).resolve().parents[1]


def recipe_text(target: Path) -> str:
    return f"""\
name: tiny
target: {{path: {target}}}
prepare: {{prompts: [{{class_path: JsonlPrompts, init_args: {{path: none.jsonl}}}}]}}
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 2, 3], depth: 3}}}}
objective: {{class_path: Distillation}}
adapt: {{every: 2, max_tokens: 8, hold_out_every: 3, guard_every: 2, guard_prompts: 4, fall: 0.9}}
data: {{length: 128}}
optimizer: {{lr: 1e-3, warmup_steps: 1, schedule: constant}}
checkpoint: {{}}
trainer: {{max_steps: 2, gradient_clip_val: 1.0}}
export: {{}}
validate: {{drafts: 3}}
"""


@pytest.fixture
def made(tiny_llama, target_folders, tmp_path):
    """(flags of the command, run folder) with a drafter as training leaves it."""
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "runs" / "tiny"
    recipe.write_text(recipe_text(target_folders("llama")))
    config = Eagle3(taps=[0, 2, 3], depth=3)
    torch.manual_seed(0)
    net = config.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    save_drafter(run / "checkpoints" / "best", net, config, tiny_llama.identity, {"position": {"step": 3}})
    return ["--config", str(recipe), "--runs", str(tmp_path / "runs")], run


def rows(count: int, first: int = 0) -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"what is {i} plus {7 * i % 13}"}]} for i in range(first, first + count)]


def plain(target, rows: list[dict], limit: int = 8) -> list[list[int]]:
    requests = [Request(str(i), tuple(target.render(row["messages"])), limit) for i, row in enumerate(rows)]
    found = {rollout.key: rollout.answer.tolist() for rollout in generate(target, requests)}
    return [found[request.key] for request in requests]


@pytest.mark.parametrize(("encoding", "said"), [("ascii", b"caf\\u00e9"), ("utf-8", "caf\u00e9".encode())])
def test_an_answer_stays_json_where_the_output_lacks_its_characters(encoding, said):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    _writer(out, "stdout")(Answer("1", "caf\u00e9", [5], 1.0, 0))
    line = out.buffer.getvalue()
    assert said in line and json.loads(line)["text"] == "caf\u00e9"


def written(path: Path, lines: list) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def answers_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_file_is_answered_in_order_and_learnt_from(made, tiny_llama, tmp_path, capsys):
    flags, run = made
    given = rows(11)
    assert main(["adapt", *flags, "--prompts", written(tmp_path / "p.jsonl", given)]) == 0
    out, err = capsys.readouterr()
    answers = answers_of(out)
    assert [answer["tokens"] for answer in answers] == plain(tiny_llama, given)
    assert [answer["id"] for answer in answers] == [str(number) for number in range(1, 12)]
    assert answers[0].keys() == {"id", "text", "tokens", "tau", "update"}
    assert answers[0]["update"] == 0 and answers[-1]["update"] > 0
    assert "11 prompts answered; 4 updates and 0 rollbacks so far" in err
    assert "step,prompts,tokens_seen,lr,train/loss" in (run / "logs" / "version_0" / "metrics.csv").read_text()
    assert json.loads((run / "versions.json").read_text()).keys() == {"adapt"}
    assert load_drafter(run / "checkpoints" / "best", tiny_llama)[1]["facts"]["adapted"]["updates"] == 4
    assert main(["export", *flags]) == 0  # what was adapted is found


def test_started_again_it_goes_on(made, tmp_path, capsys):
    flags, run = made
    prompts, out = written(tmp_path / "p.jsonl", rows(7)), tmp_path / "new" / "answers.jsonl"
    command = ["adapt", *flags, "--prompts", prompts, "--out", str(out)]
    assert main(command) == 0
    before = answers_of(out.read_text())
    assert len(before) == 7 and capsys.readouterr().out == ""
    assert main([*command, "--draft", str(run / "checkpoints" / "best"), "--optimizer.lr", "1e-4"]) == 0
    err = capsys.readouterr().err
    assert "last_drafter, 2 updates so far" in err and "is not read again" in err
    answers = answers_of(out.read_text())
    assert answers[:7] == before and [answer["tokens"] for answer in answers[7:]] == [answer["tokens"] for answer in before]
    assert answers[7]["update"] == 2 and {path.name for path in (run / "logs").iterdir()} == {"version_0", "version_1"}
    assert main([*command, "--optimizer.weight_decay", "0.1"]) == 2
    assert "optimizer.weight_decay: 0.0 before, 0.1 now" in capsys.readouterr().err


def test_a_named_drafter_begins(made, tmp_path, capsys):
    flags, run = made
    elsewhere = tmp_path / "elsewhere"
    (run / "checkpoints" / "best").rename(elsewhere)
    prompts = written(tmp_path / "p.jsonl", rows(2))
    assert main(["adapt", *flags, "--prompts", prompts]) == 2
    assert "has no drafter to begin with" in capsys.readouterr().err
    assert main(["adapt", *flags, "--prompts", prompts, "--draft", str(elsewhere)]) == 0
    assert (run / "checkpoints" / "best" / "drafter.json").exists()  # no update yet: the one it began with


def test_a_drafter_unlike_the_recipes_is_said(made, tmp_path, capsys):
    prompts, unlike = written(tmp_path / "p.jsonl", rows(2)), "is another than the recipe's"
    assert main(["adapt", *made[0], "--prompts", prompts]) == 0
    assert unlike not in capsys.readouterr().err
    assert main(["adapt", *made[0], "--prompts", prompts, "--drafter.init_args.depth", "2"]) == 0
    assert f"{unlike}: the recipe says depth 2, the drafter has 3, which counts\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "own", "said"),
    [
        ({"taps": [0, 1, 2]}, {}, "the recipe says taps [0, 1, 2], the drafter has DEFAULT"),
        ({"taps": "DEFAULT"}, {}, None),
        ({}, {"draft_vocab": "best"}, "the recipe says draft_vocab 32,000, the drafter has 200"),
        ({"draft_vocab": 200}, {"draft_vocab": "best"}, None),
        ({"draft_vocab": "best"}, {"draft_vocab": "best"}, None),
        ({"draft_vocab": 0.9}, {"draft_vocab": 200}, "the recipe says draft_vocab 0.9, the drafter has 200"),
        ({"draft_vocab": None}, {"draft_vocab": 200}, "the recipe says draft_vocab 320, the drafter has 200"),
        ({"taps": [98, 99, 100]}, {}, "the recipe says taps [98, 99, 100], the drafter has []"),
    ],
)  # fmt: skip
def test_options_are_compared_by_what_they_come_to(tiny_llama, recipe, own, said):
    default = list(Eagle3().taps_of(tiny_llama))
    vocabulary = DraftVocabulary(torch.arange(200), tiny_llama.vocab)
    net = Eagle3(**{"draft_vocab": 200} | own).build(tiny_llama, vocabulary)
    same = {} if "draft_vocab" in own else {"draft_vocab": 200}
    asked = Eagle3(**{key: default if value == "DEFAULT" else value for key, value in (same | recipe).items()})
    found = "".join(_unlike(asked, net, tiny_llama))
    assert found.partition("the recipe's: ")[2] == (f"{said.replace('DEFAULT', str(default))}, which counts" if said else "")


def test_a_drafter_of_another_class_is_named(tiny_llama):
    net = Eagle3().build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    assert "the recipe says Eagle, the drafter is Eagle3, which counts" in _unlike(Eagle(), net, tiny_llama)[0]


def test_a_drafter_that_is_not_there_is_refused_before_the_target_is_loaded(made, tmp_path, capsys):
    prompts = written(tmp_path / "p.jsonl", rows(2))
    assert main(["adapt", *made[0], "--prompts", prompts, "--draft", str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --draft is {tmp_path}/none, but there is no such folder") and "loading" not in err


GOOD = {"prompt": "hello there", "id": "mine"}
BAD = [
    ("{", "it is not JSON"),
    ("[1]", "it is no object with keys"),
    ({"text": "x"}, "it has neither messages nor a prompt"),
    ({"messages": []}, "it has neither messages nor a prompt"),
    ({"prompt": ""}, "an empty prompt"),
    ({"prompt": 3}, "a prompt that is not text"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        "its last message is the assistant's",
    ),
    ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
    ({"messages": ["x"]}, "a message without a role"),
    ({"prompt": "x", "id": 1.5}, "its id is neither text nor a whole number"),
    ({"prompt": "word " * 600}, "leave no room for 8 more within the target's 512 positions"),
    ({"prompt": "x" * (9 << 20)}, "it is longer than 8 MiB"),
]


def test_bad_lines_are_said_and_left_out(made, tiny_llama, tmp_path, capsys):
    """A blank line is nothing, and the last one needs no line break."""
    flags, _ = made
    lines = ["", *(line for line, _ in BAD), "  ", GOOD]
    path = Path(written(tmp_path / "p.jsonl", lines))
    path.write_text(path.read_text().rstrip("\n"))
    assert main(["adapt", *flags, "--prompts", str(path)]) == 0
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if "left out" in line]
    assert len(said) == len(BAD)
    for number, (line, (_, words)) in enumerate(zip(said, BAD, strict=True), 2):
        assert line.startswith(f"line {number} of the prompts is left out: ") and words in line and line.endswith("."), line
    [answer] = answers_of(out)
    assert (
        answer["id"] == "mine"
        and answer["tokens"] == plain(tiny_llama, [{"messages": [{"role": "user", "content": "hello there"}]}])[0]
    )


def test_a_stream_in_which_no_line_was_a_prompt_is_an_error(made, tmp_path, capsys):
    flags, run = made
    assert main(["adapt", *flags, "--prompts", written(tmp_path / "p.jsonl", ["", *(line for line, _ in BAD)])]) == 2
    out, err = capsys.readouterr()
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"p.jsonl: of {len(BAD)} lines none was a prompt that could be answered" in error and out == ""
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["best"]


def test_no_prompts_change_nothing(made, tmp_path, capsys):
    flags, run = made
    assert main(["adapt", *flags, "--prompts", written(tmp_path / "p.jsonl", [])]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "0 prompts answered; 0 updates" in err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["best"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "adapt needs prompts: --prompts FILE"),
        (["--prompts", "none.jsonl"], "--prompts none.jsonl: no such file or directory"),
        (["--prompts", "/"], "--prompts /: is a directory"),
        (["--prompts", "-", "--optimizer.schedule", "cosine"], "set it to constant"),
        (["--prompts", "-", "--out", "/proc/none/x"], "--out /proc/none/x: "),
        (["--prompts", "-", "--adapt.fall", "2"], "adapt.fall is 2"),
    ],
)
def test_what_is_refused(made, capsys, monkeypatch, more, words):
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert main(["adapt", *made[0], *more]) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("error: ")


def test_a_limit_that_leaves_no_room_for_any_prompt_is_refused(made, tmp_path, capsys):
    prompts = written(tmp_path / "p.jsonl", rows(1))
    assert main(["adapt", *made[0], "--prompts", prompts, "--adapt.max_tokens", "508"]) == 2
    assert "adapt.max_tokens is 508" in (err := capsys.readouterr().err) and "lower it to 507 at most" in err
    assert main(["adapt", *made[0], "--prompts", prompts, "--adapt.max_tokens", "507"]) == 2  # a prompt of one token would do
    assert "none was a prompt that could be answered" in capsys.readouterr().err


def test_a_closed_stdin_is_said(made, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["adapt", *made[0], "--prompts", "-"]) == 2
    assert "stdin is closed" in capsys.readouterr().err


def test_what_was_learnt_is_saved_where_answers_cannot_be_written(made, tmp_path, capsys, monkeypatch):
    flags, run = made
    prompts = written(tmp_path / "p.jsonl", rows(7))
    command = ["adapt", *flags, "--prompts", prompts]
    assert main([*command, "--out", "/dev/full"]) == 2
    assert "The disk is full (/dev/full): what was learnt is saved" in capsys.readouterr().err
    assert torch.load(run / "checkpoints" / "adapted.pt", weights_only=True)["progress"]["prompts"] == 1
    written_so_far = []

    def write(answer):
        if len(written_so_far) == 4:
            raise ConnectionResetError
        written_so_far.append(answer)

    monkeypatch.setattr("drafttrain.commands.adapt._writer", lambda out, place: write)
    with pytest.raises(ConnectionResetError):
        main(command)
    progress = torch.load(run / "checkpoints" / "adapted.pt", weights_only=True)["progress"]
    assert progress["prompts"] == 6 and progress["updates"] > 0


def test_a_lost_newest_drafter_is_no_loss(made, tmp_path, capsys):
    flags, run = made
    command = ["adapt", *flags, "--prompts", written(tmp_path / "p.jsonl", rows(4))]
    assert main(command) == 0
    shutil.rmtree(run / "checkpoints" / "last_drafter")
    assert main(command) == 0
    assert "4 prompts answered; 2 updates" in capsys.readouterr().err
    assert (run / "checkpoints" / "last_drafter" / "drafter.json").exists()


def test_several_processes_are_refused(made, capsys, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["adapt", *made[0], "--prompts", "none.jsonl"]) == 2
    assert "torchrun started 2" in capsys.readouterr().err


def test_lines_that_come_late_are_waited_for_and_a_stop_ends_the_wait(made, tiny_llama):
    """As a service: each line is answered before the next is sent; TERM saves and is a good end, while the pipe stays open."""
    flags, run = made
    program = "import sys; from drafttrain.cli import main; code = main(sys.argv[1:]); print('modules', *{name.split('.')[0] for name in sys.modules}, file=sys.stderr); sys.exit(code)"
    command = [sys.executable, "-c", program, "adapt", *flags, "--prompts", "-"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    try:
        given, answers = rows(6), []
        for row in given:
            process.stdin.write(json.dumps(row) + "\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 60)[0]
            answers.append(json.loads(process.stdout.readline()))
        assert [answer["tokens"] for answer in answers] == plain(tiny_llama, given)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    err = process.stderr.read()
    assert "6 prompts answered; 2 updates" in err
    assert not {"lightning", "deepspeed", "datasets"} & set(err.rpartition("modules ")[2].split())
    state = torch.load(run / "checkpoints" / "adapted.pt", weights_only=True)
    assert state["progress"]["prompts"] == 6 and state["progress"]["updates"] == 2


# ---- the stream ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tiny_llama):
    """(stream, where to write, what it said, stop)"""
    reader, writer = os.pipe()
    stop, said = StopSignal(), []
    yield PromptStream(Lines(reader, stop), tiny_llama, 8, 3, said.append), writer, said, stop
    os.close(reader)


def line(text: str) -> bytes:
    return json.dumps({"prompt": text}).encode() + b"\n"


def test_what_has_come_is_taken_and_no_more(pipe, tiny_llama):
    stream, writer, said, stop = pipe
    os.write(writer, line("one") + b"{\n" + line("two")[:-4])
    began = time.monotonic()
    assert [request.key for request in stream.take(8)] == ["1"]  # the half of a line is not waited for where there is one
    assert time.monotonic() - began < 2 and said and said[0].startswith("line 2 of the prompts")
    os.write(writer, line("two")[-4:] + line("three") + line("four"))
    found = stream.take(2)
    assert [request.key for request in found] == ["3", "4"]
    assert found[0].ids == tuple(tiny_llama.render([{"role": "user", "content": "two"}]))
    os.write(writer, line("five").rstrip())
    os.close(writer)
    assert [request.key for request in stream.take(8)] == ["5", "6"] and stream.take(8) == []


def test_a_mark_at_the_beginning_of_a_file_is_not_read(pipe, tiny_llama):
    stream, writer, said, _ = pipe
    os.write(writer, b"\xef\xbb\xbf" + line("one") + b"\xef\xbb\xbf" + line("two"))
    os.close(writer)
    [request] = stream.take(8)
    assert request.ids == tuple(tiny_llama.render([{"role": "user", "content": "one"}]))
    assert len(said) == 1 and said[0].startswith("line 2 of the prompts is left out: it is not JSON")


def test_a_stop_is_obeyed_before_the_next_line(pipe):
    stream, writer, _, stop = pipe
    os.write(writer, line("one") + line("two"))
    assert len(stream.take(1)) == 1
    stop.requested = True
    assert stream.take(1) == []
    os.close(writer)


def test_chats_keep_their_answers(pipe, tiny_llama):
    """The earlier answers of a chat are context, whoever gave them."""
    stream, writer, _, _ = pipe
    chat = [
        {"role": "system", "content": "be short"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]  # fmt: skip
    os.write(writer, json.dumps({"messages": chat}).encode() + b"\n")
    os.close(writer)
    [request] = stream.take(4)
    assert request.ids == tuple(tiny_llama.render(chat)) and request.limit == 8
