"""`python -m data_prep show`: what is printed for files of chats and token stores, and how broken rows are named."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny import build_tokenizer

from data_prep.__main__ import main
from data_prep.show import Shown, bracketed, coloured, decoded
from drafttrain.data.shards import Chat, write_shard
from drafttrain.data.store import Manifest
from drafttrain.types import Identity

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "it is\nfour 🙂"}]}
SHARED = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}] * 2}
PROMPT = "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
FOUR = "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] ~ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chats(tmp_path):
    """Writes rows as JSONL; strings are lines as they are."""

    def write(*rows, name: str = "chats.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def store(tmp_path, tokenizer):
    """A token store of two chats."""
    fast = build_tokenizer()
    rows = []
    for key, answer in (("x-1", "it is four 🙂<|im_end|>"), ("x-2", "no<|im_end|>")):
        prompt, said = (fast(text, add_special_tokens=False)["input_ids"] for text in (PROMPT, answer))
        rows.append(Chat(key, torch.tensor(prompt + said), torch.tensor([False] * len(prompt) + [True] * len(said))))
    folder = tmp_path / "store"
    folder.mkdir()
    record = write_shard(folder, 0, rows, {"in": 2, "kept": 2, "dropped": {}})
    identity = Identity(tokenizer, "", "", "", "{}", 1, 8, len(fast))
    Manifest(identity, None, None, {"in": 2, "kept": 2, "dropped": {}}, 1, record.tokens, record.supervised_tokens, {}).write(
        folder
    )
    return str(folder)


def run(capsys, *flags: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    code = main(["show", *flags])
    return code, *capsys.readouterr()


def test_chats_are_shown_with_brackets(capsys, chats, tokenizer):
    code, out, err = run(capsys, chats(GOOD, SHARED), "--tokenizer", tokenizer)
    assert (code, err) == (0, "")
    first, second = out.split("\n\n")[:2], out.split("\n\n")[2:4]
    assert first[0] == "<|im_start|>user↵\ntwo?<|im_end|>↵\n<|im_start|>assistant↵\n⟦it is↵\nfour 🙂<|im_end|>⟧↵"
    assert first[1].startswith("row 1: ") and first[1].endswith(" supervised, by renderings")
    assert second[0].count("⟦b<|im_end|>⟧") == 2
    assert second[1].startswith("row 2: ") and " 4 supervised" in second[1]


def test_json_holds_every_token(capsys, chats, tokenizer):
    code, out, _ = run(capsys, chats(GOOD, SHARED), "--tokenizer", tokenizer, "--json", "--last-turn-only")
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0
    assert "".join(text for text, _ in first["tokens"]) == PROMPT + "it is\nfour 🙂<|im_end|>\n"
    assert "".join(text for text, kept in first["tokens"] if kept) == "it is\nfour 🙂<|im_end|>"
    assert [text for text, kept in second["tokens"] if kept] == ["b", "<|im_end|>"]
    assert first["method"] == "renderings" and first["notes"] == []


def test_a_broken_row_is_named_and_the_others_are_shown(capsys, chats, tokenizer):
    rows = (
        GOOD,
        "{broken",
        {"messages": [{"role": "user", "content": "?"}]},
        {"text": "no chat"},
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "",
        SHARED,
    )
    file = chats(*rows)
    code, out, err = run(capsys, file, "--tokenizer", tokenizer)
    assert code == 2
    assert out.count("⟦") == 3 and "row 1: " in out and "row 7: " in out
    lines = err.splitlines()
    for line, number, words in zip(lines, (2, 3, 4, 5), ("not JSON", "no assistant turn", "no chat", "'narrator'"), strict=False):
        assert line.startswith(f"error: {file} row {number}: ") and words in line
    assert lines[4].startswith("error: 4 of 6 chats")


def test_a_fault_of_many_rows_is_said_once(capsys, chats, tokenizer):
    prompt, other = {"prompt": "two?"}, {"text": "no chat"}
    code, out, err = run(capsys, file := chats(*[prompt] * 1200), "--tokenizer", tokenizer)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(
        f"error: {file} row 1, like all 1,200 rows that were read: it is a prompt with no assistant turn, so there"
    )
    _, _, err = run(capsys, file, "--tokenizer", tokenizer, "--limit", "3")
    assert "row 1, like all 3 rows that were read: it is" in err
    assert len(run(capsys, chats(other), "--tokenizer", tokenizer)[2].splitlines()) == 1
    code, out, err = run(capsys, chats(other, *[prompt] * 3, GOOD, *[prompt] * 4), "--tokenizer", tokenizer)
    assert code == 2 and "row 5: " in out
    first, second, count = err.splitlines()
    assert " row 1: it holds no chat;" in first and " row 2 (and 3, 4, 6, 7, 2 more): it is a prompt with no" in second
    assert count == f"error: 8 of 9 chats of {file} could not be masked; they are named above."
    _, _, err = run(capsys, chats(prompt, GOOD, prompt), "--tokenizer", tokenizer)
    assert " row 1 (and 3): it is" in err and "more" not in err


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "two?"},
        {"turns": ["two?", "three?"], "category": "math"},
        {"prompt": [{"role": "user", "content": "two?"}]},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two?"}]},
        {"key": "file-1", "source": "file", "messages": [{"role": "user", "content": "two?"}], "tools": None},  # of a data folder
        [{"role": "user", "content": "two?"}],
    ],
)
def test_prompts_without_answers_are_called_that(capsys, chats, tokenizer, row):
    code, out, err = run(capsys, chats(GOOD, row), "--tokenizer", tokenizer)
    assert code == 2 and "row 1: " in out
    said, count = err.splitlines()
    assert (
        "row 2: it is a prompt with no assistant turn, so there is no answer to be shown; data_prep has the target answer" in said
    )
    assert "no chat" not in err and count.startswith("error: 1 of 2 chats")


def test_limit(capsys, chats, tokenizer):
    code, out, err = run(capsys, chats(GOOD, SHARED, "{broken"), "--tokenizer", tokenizer, "--limit", "2", "--json")
    assert (code, err, len(out.splitlines())) == (0, "", 2)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([GOOD, GOOD]),
        json.dumps([GOOD, GOOD], indent=2),
        "\n".join(json.dumps(GOOD["messages"]) for _ in range(2)),
        "\ufeff" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD),
    ],
)
def test_forms_of_files(capsys, chats, tokenizer, text):
    code, out, _ = run(capsys, chats(text), "--tokenizer", tokenizer, "--json")
    assert code == 0 and len(out.splitlines()) == 2


@pytest.mark.parametrize("value", [GOOD, GOOD["messages"]])
def test_one_chat_in_a_file(capsys, chats, tokenizer, value):
    code, out, _ = run(capsys, chats(json.dumps(value, indent=1)), "--tokenizer", tokenizer, "--json")
    assert code == 0 and len(out.splitlines()) == 1


def test_another_template_and_a_bare_tokenizer_file(capsys, chats, tokenizer, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(FOUR)
    code, out, _ = run(capsys, chats(GOOD), "--tokenizer", tokenizer, "--template", str(template))
    assert code == 0 and out.startswith("<|user|>two?<|im_end|><|assistant|>⟦it is")
    bare = tmp_path / "bare.json"
    bare.write_bytes((Path(tokenizer) / "tokenizer.json").read_bytes())
    template.write_text(FOUR.replace("eos_token", "'<|im_end|>'"))
    assert run(capsys, chats(GOOD), "--tokenizer", str(bare), "--template", str(template))[1] == out
    code, _, err = run(capsys, chats(GOOD), "--tokenizer", str(bare))
    assert code == 2 and err.count("error:") == 1 and "--template FILE.jinja" in err
    template.write_text("{{ messages[0].content | upper }}")
    _, _, err = run(capsys, chats(GOOD), "--tokenizer", tokenizer, "--template", str(template))
    assert f"the chat template of {template}" in err  # what the user gave, not the tokenizer beside it
    template.write_text(" ")
    assert (
        f"--template is {template}, which is empty"
        in run(capsys, chats(GOOD), "--tokenizer", tokenizer, "--template", str(template))[2]
    )


def test_the_tokenizer_of_a_recipe(capsys, chats, tokenizer):
    recipe = str(ROOT / "recipes/smollm2-135m/eagle3.yaml")
    flags = ("--config", recipe, "--target.path", tokenizer)
    assert run(capsys, chats(GOOD), *flags)[1] == run(capsys, chats(GOOD), "--tokenizer", tokenizer)[1]


def test_thoughts_are_left_out(capsys, chats, tokenizer):
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\nsum\n</think>\n\nfour"}]}
    code, out, _ = run(capsys, chats(row), "--tokenizer", tokenizer, "--no-reasoning", "--json")
    assert code == 0
    assert "".join(text for text, kept in json.loads(out)["tokens"] if kept) == "\n\nfour<|im_end|>"


@pytest.mark.parametrize("given", [True, False])
def test_a_store_is_shown_as_it_is(capsys, store, tokenizer, given):
    """Without a flag the tokenizer of the store's own target is taken."""
    code, out, _ = run(capsys, store, "--json", *(("--tokenizer", tokenizer) if given else ()))
    first, second = (json.loads(line) for line in out.splitlines())
    assert code == 0 and (first["name"], first["method"]) == ("x-1", "token store")
    assert "".join(text for text, _ in first["tokens"]) == PROMPT + "it is four 🙂<|im_end|>"
    assert "".join(text for text, kept in second["tokens"] if kept) == "no<|im_end|>"


@pytest.mark.parametrize("flags", [("--last-turn-only",), ("--no-reasoning",), ("--template", "x.jinja")])
def test_a_store_takes_no_other_mask(capsys, store, flags):
    code, _, err = run(capsys, store, *flags)
    assert code == 2 and flags[0] in err and "finished" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "FILE"),
        (("nowhere.jsonl", "--tokenizer", "{tokenizer}"), "there is no nowhere.jsonl"),
        (("{file}",), "needs a tokenizer"),
        (("{file}", "--tokenizer", "./nowhere"), "the tokenizer is ./nowhere, but there is no such folder"),
        (("{file}", "--tokenizer", "{tokenizer}", "--template", "nowhere.jinja"), "--template is nowhere.jinja"),
        (("{file}", "--tokenizer", "{tokenizer}", "--limit", "0"), "above 0"),
        (("{file}", "--tokenizer", "{tokenizer}", "--colour"), "no flag of show"),
        (("{empty}", "--tokenizer", "{tokenizer}"), "holds no chat"),
        (("{text}", "--tokenizer", "{tokenizer}"), "is not JSON"),
        (("{folder}", "--tokenizer", "{tokenizer}"), "no manifest.json"),
    ],
)
def test_errors_are_one_sentence(capsys, chats, tokenizer, tmp_path, flags, words):
    places = {
        "tokenizer": tokenizer,
        "file": chats(GOOD),
        "empty": chats(name="empty.jsonl"),
        "text": chats("hello", name="text.txt"),
        "folder": str(tmp_path),
    }
    code, out, err = run(capsys, *(flag.format(**places) for flag in flags))
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and words in err


def test_help_mentions_show(capsys):
    assert main(["--help"]) == 0
    assert "python -m data_prep show" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["show", "--help"])
    assert left.value.code == 0 and "--last-turn-only" in capsys.readouterr().out


def test_colour_where_there_is_a_terminal():
    chat = Shown("row 1", [("a\n", False), ("b", True)], "renderings", [])
    console = Console(force_terminal=True, color_system="standard", no_color=False, width=20)
    with console.capture() as captured:
        console.print(coloured(chat), soft_wrap=True, end="")
    assert captured.get() == "a↵\n\x1b[1;30;42mb\x1b[0m"


def test_nothing_steers_the_terminal():
    chat = Shown("row 1", [("\x1b[2J\t", False), ("\r\x9b", True)], "renderings", [])
    assert bracketed(chat) == "\\x1b[2J⇥\t⟦\\r\\x9b⟧"


def test_decoded_pieces_join_to_the_text():
    fast = build_tokenizer()
    text = "<|im_start|>naïve 日本 🙂\n\n x<|im_end|>"
    ids = fast(text, add_special_tokens=False)["input_ids"]
    assert "".join(decoded(fast, ids)) == text and len(decoded(fast, ids)) == len(ids)
    assert "".join(decoded(fast, ids[:-10])) == fast.decode(ids[:-10])  # cut inside a character


def test_as_a_command(chats, tokenizer):
    """A process of its own: exit code and both streams."""
    command = [sys.executable, "-m", "data_prep", "show", chats(GOOD, "{broken"), "--tokenizer", tokenizer]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2 and "⟦it is" in done.stdout and "row 2" in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_goes_away(chats, tokenizer):
    """`show ... | head`: no traceback."""
    command = [sys.executable, "-m", "data_prep", "show", chats(*[GOOD] * 2000), "--tokenizer", tokenizer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 0
        assert process.stderr.read() == b""


def test_ends_of_answers_come_from_the_generation_config(capsys, chats, tmp_path):
    """GLM's way: no turn is closed, and what the target says at its end is the next turn's first token."""
    fast = build_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    fast.chat_template = "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    fast.save_pretrained(tmp_path / "model")
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "it is four"}]
    file = chats({"messages": turn * 2})
    show = (file, "--tokenizer", str(tmp_path / "model"))
    assert run(capsys, *show)[1].startswith("<|user|>a<|assistant|>⟦it is four⟧<|user|>a<|assistant|>⟦it is four⟧\n")
    ends = fast.convert_tokens_to_ids(["<|im_end|>", "<|user|>"])
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert run(capsys, *show)[1].startswith("<|user|>a<|assistant|>⟦it is four<|user|>⟧a<|assistant|>⟦it is four⟧\n")


def test_broken_lines_of_a_gzipped_file_are_named_one_by_one(capsys, chats, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl.gz"
    lines = [json.dumps(GOOD).encode(), b"{broken", b'{"messages": "\xff"}', b"\0", json.dumps(SHARED).encode()]
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    code, out, err = run(capsys, str(path), "--tokenizer", tokenizer, "--json")
    assert code == 2 and [json.loads(line)["name"] for line in out.splitlines()] == ["row 1", "row 5"]
    for number, why in ((2, "not JSON"), (3, "not UTF-8"), (4, "a NUL byte")):
        assert f"row {number}: it is {why}; leave it out or mend it." in err


def test_arguments_of_calls_may_be_json_text(capsys, chats, tmp_path):
    """As OpenAI's interface has them; engines parse them before they render a chat."""
    fast = build_tokenizer()
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] ~ ':' ~ (m['content'] or '') }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] ~ c['function']['arguments']['a'] }}{% endfor %}{{ eos_token }}{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
    )
    fast.save_pretrained(tmp_path / "model")

    def calling(arguments: str) -> dict:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    code, out, err = run(capsys, chats(calling('{"a": 2}'), calling("{a")), "--tokenizer", str(tmp_path / "model"))
    assert out.startswith("user:x<|im_end|>assistant:⟦add2<|im_end|>⟧") and code == 2
    assert "row 2: it has a tool call whose arguments are no JSON; mend it." in err


def test_a_system_column_and_a_data_folder(capsys, chats, tokenizer, store):
    out = run(capsys, chats({**SHARED, "system": "be brief"}), "--tokenizer", tokenizer)[1]
    assert out.startswith("<|im_start|>system↵\nbe brief<|im_end|>↵\n<|im_start|>user↵\na<|im_end|>")
    Path(store).rename(Path(store).parent / "train")
    code, _, err = run(capsys, str(Path(store).parent), "--tokenizer", tokenizer)
    assert code == 2 and f"is a data folder, not a token store; give {Path(store).parent / 'train'}." in err


def test_what_is_wrong_with_rows_is_said_where_the_file_breaks_off_behind_them(capsys, tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl.gz"
    rows = [json.dumps({"prompt": random.Random(i).randbytes(2000).hex()}) for i in range(9)]
    whole = gzip.compress("\n".join(rows).encode())
    path.write_bytes(whole[: len(whole) // 2])
    code, _, err = run(capsys, str(path), "--tokenizer", tokenizer)
    assert code == 2 and "row 1 (and 2, 3" in err and "cut short or damaged" in err.splitlines()[-1]


def test_a_gzipped_file_of_bare_chats_that_was_cut_short_is_named(capsys, tokenizer, tmp_path):
    """Such a row is a list, as a whole file may be: it is read once as that."""
    path = tmp_path / "chats.jsonl.gz"
    chat = [{"role": "user", "content": random.Random(0).randbytes(200_000).hex()}, {"role": "assistant", "content": "b"}]
    whole = bytearray(gzip.compress(json.dumps([GOOD["messages"]]).encode()[1:-1] + b"\n" + json.dumps(chat).encode()))
    path.write_bytes(whole[: len(whole) // 2])
    code, _, err = run(capsys, str(path), "--tokenizer", tokenizer)
    assert code == 2 and "a gzipped file that is cut short or damaged" in err
    whole[len(whole) // 2] ^= 255
    path.write_bytes(whole)
    code, _, err = run(capsys, str(path), "--tokenizer", tokenizer)
    assert code == 2 and "a gzipped file that is cut short or damaged" in err
