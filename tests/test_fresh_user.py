"""What a fresh user met and stumbled over: lines that were missing, help that ended in a traceback, advice that would have cost another run its data."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_run import make_run, start

from data_prep.__main__ import main as data_prep
from drafttrain import quickstart
from drafttrain.cli import UNREAD, guarded, main, parse
from drafttrain.commands.train import closing
from drafttrain.data.store import TokenStore
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.heads import Medusa
from drafttrain.errors import UserError
from drafttrain.recipe import BASES, Recipe, load_recipe
from drafttrain.recipe_build import places
from drafttrain.run import Run

ROOT = Path(__file__).resolve().parents[1]
TAPS = (0, 2, 3)


# ---- a store of another drafter's features -----------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, tiny_llama):
    """Makes a store with features of these layers."""

    def make(taps, final="taught", dtype="bfloat16"):
        return TokenStore.open(make_run(tmp_path / "run", tiny_llama, features=taps, final=final, dtype=dtype) / "data" / "train")

    return make


REFUSED = {
    "other layers": (TAPS, "taught", (1, 2, 3), "taught", "bfloat16"),
    "no layers": (TAPS, "taught", (), "all", "bfloat16"),
    "layers, of a store without": ((), "all", TAPS, "taught", "bfloat16"),
    "final states in every row": (TAPS, "taught", TAPS, "all", "bfloat16"),
    "another type": (TAPS, "taught", TAPS, "taught", "float8_e4m3fn"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_store_sends_nobody_over_features_that_another_run_reads(store, tiny_llama, case):
    made, made_final, taps, final, dtype = REFUSED[case]
    with pytest.raises(UserError) as refused:
        store(made, made_final).require(tiny_llama.identity, taps, dtype, final)
    sentence = str(refused.value)
    assert re.search(r"[Ss]et data\.features to online", sentence)
    assert "a data folder of its own" in sentence and "or run data_prep again" not in sentence
    assert ("drafter.init_args.taps to" in sentence) == (case == "other layers")
    assert "[]" not in sentence and "\n" not in sentence


@pytest.mark.parametrize("drafter", [Medusa(heads=3, own_heads=True, draft_vocab=200), Eagle(draft_vocab=200)])
def test_training_a_drafter_without_taps_on_it_names_the_way_that_works(tmp_path, target_folders, tiny_llama, drafter):
    run = make_run(tmp_path / "run", tiny_llama, features=TAPS)
    with pytest.raises(UserError, match=r"but the recipe's drafter reads no layers\. Set data\.features to online"):
        start(run, target_folders("llama"), drafter=drafter, data={"features": "stored"})
    start(run, target_folders("llama"), drafter=drafter, trainer={"max_steps": 1})


def recipe_of(folder: Path, target: Path, **sections) -> list[str]:
    """Flags of a recipe written there."""
    tree = {
        "name": "lent",
        "target": {"path": str(target)},
        "prepare": {"prompts": [{"class_path": "SelfPrompts", "init_args": {"count": 3}}], "max_prompt": 96, "max_tokens": 8},
        "drafter": {"class_path": "Eagle3", "init_args": {"taps": [1, 2, 3], "draft_vocab": 200}},
        "objective": {"class_path": "Distillation"},
        "data": {"features": "stored"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree | sections))
    return ["--config", str(folder / "recipe.yaml"), "--runs", str(folder)]


def test_data_prep_does_not_replace_features_behind_a_link(tmp_path, target_folders, tiny_llama, capsys):
    lender = make_run(tmp_path / "lender", tiny_llama, features=TAPS)
    before = {file: file.read_bytes() for file in sorted((lender / "data").rglob("*")) if file.is_file()}
    (tmp_path / "lent").mkdir()
    (tmp_path / "lent" / "data").symlink_to(lender / "data")
    assert data_prep(recipe_of(tmp_path, target_folders("llama"))) == 2
    assert "holds features of layers [0, 2, 3], but the recipe taps [1, 2, 3]" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in sorted((lender / "data").rglob("*")) if file.is_file()} == before


# ---- help that nobody reads to its end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["drafttrain --help", "data_prep --help", "data_prep show --help"])
def test_help_behind_head_ends_in_silence(words):
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words.split()], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, text=True, env=buffered
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_a_broken_pipe_of_the_programs_own_is_not_hidden(capfd):
    def lose():
        raise BrokenPipeError("of a server")

    with pytest.raises(BrokenPipeError, match="of a server"):
        guarded(lose)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_what_the_machine_refuses_anywhere_is_a_sentence(number, capfd):
    def refused():
        raise OSError(number, os.strerror(number), "runs/tiny/logs/version_0/metrics.csv")

    assert guarded(refused) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: runs/tiny/logs/version_0/metrics.csv could not be read or written ({os.strerror(number)})")


def test_an_error_of_the_programs_own_is_not_hidden():
    def lose():
        raise FileNotFoundError(errno.ENOENT, "of the program's own")

    with pytest.raises(FileNotFoundError, match="of the program's own"):
        guarded(lose)


def test_lines_leave_a_process_as_they_are_said(tmp_path):
    """In a pipe Python would keep them until 8 kB are together."""
    program = "import os; from drafttrain.cli import guarded; guarded(lambda: (print('loading'), os._exit(0)))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=buffered)
    assert done.stdout == "loading\n"


def test_a_character_that_the_output_lacks_ends_nothing():
    program = "from drafttrain.cli import guarded; raise SystemExit(guarded(lambda: print('\u27e6', 'caf\u00e9')))"
    narrow = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=narrow)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u27e6 caf\\xe9\n", "")


def test_the_help_of_data_prep_begins_with_show_too(capsys):
    assert data_prep(["--help"]) == 0
    assert "python -m data_prep show --help" in " ".join(capsys.readouterr().out.split("options:")[0].split())


# ---- what is said before something takes long --------------------------------------------------------------------------


def test_the_quickstart_speaks_at_once(capsys, monkeypatch):
    def measure(device):
        assert capsys.readouterr().out.startswith("measuring this machine's speed")
        return 1.0

    monkeypatch.setattr(quickstart, "matrix_gflops", measure)
    monkeypatch.setattr(quickstart.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0))
    assert quickstart.main() == 0
    assert capsys.readouterr().out.startswith("machine: ")


def test_data_prep_says_that_it_loads_and_gathers(tmp_path, target_folders, capsys, monkeypatch):
    target, flags = target_folders("llama"), recipe_of(tmp_path, target_folders("llama"))
    monkeypatch.setattr("data_prep.__main__.prepare", lambda *_, **__: None)
    assert data_prep(flags) == 0
    assert capsys.readouterr().out == f"loading {target}\ngathering prompts from SelfPrompts\n"
    (tmp_path / "lent" / "data").mkdir()
    (tmp_path / "lent" / "data" / "prompts.json").write_text("{}")
    assert data_prep(flags) == 0
    assert capsys.readouterr().out == f"loading {target}\n"


# ---- what training says ------------------------------------------------------------------------------------------------


def test_training_says_what_it_does_before_it_takes_long(tmp_path, target_folders, tiny_llama, capsys):
    run = make_run(tmp_path / "run", tiny_llama)
    start(run, target_folders("llama"), trainer={"max_steps": 2}, checkpoint={"tau_prompts": 2, "tau_tokens": 8})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"loading {target_folders('llama')}"
    [measuring] = [
        number for number, line in enumerate(lines) if line.startswith("measuring tau on 2 held-out prompts for the last")
    ]
    assert lines[measuring + 1].startswith("step 2: held-out tau ") and measuring > 1


def test_a_training_that_measures_nothing_does_not_say_that_it_does(tmp_path, target_folders, tiny_llama, capsys):
    run = make_run(tmp_path / "run", tiny_llama)
    start(run, target_folders("llama"), trainer={"max_steps": 1})
    assert "measuring" not in capsys.readouterr().out
    assert closing(Run(run), 1)[0] == f"{run}/checkpoints/best/: the best drafter, the newest one, since tau was not measured"


def test_the_end_of_training_names_tau_the_best_checkpoint_and_the_next_command(tmp_path, target_folders, tiny_llama, capsys):
    run = make_run(tmp_path / "a run", tiny_llama)
    start(run, target_folders("llama"), trainer={"max_steps": 2}, checkpoint={"tau_prompts": 2, "tau_tokens": 8, "tau_every": 1})
    said = dict(re.findall(r"step (\d): held-out tau ([\d.]+),", capsys.readouterr().out))
    best = "2" if float(said["2"]) > float(said["1"]) else "1"
    here, following = closing(Run(run), 2)
    assert here.startswith(f"{run}/checkpoints/best/: the best drafter, ")
    assert (f"final held-out tau {said['2']}" if best == "2" else f"held-out tau {said['1']} at step 1 of 2") in here
    assert following == f"next: python -m drafttrain export --config '{run}/recipe.yaml' --runs {tmp_path}"
    assert closing(Run(run), 9) == [
        f"{run}/checkpoints/best/: the best drafter so far, held-out tau {said[best]} at step {best} of 9"
    ]
    assert closing(Run(tmp_path / "none"), 2) == []


def test_the_command_ends_with_them_and_the_next_command_runs(tmp_path, target_folders, tiny_llama, capsys):
    make_run(tmp_path / "lent", tiny_llama)
    sections = {
        "trainer": {"max_steps": 1},
        "data": {"length": 48},
        "checkpoint": {"tau_prompts": 2, "tau_tokens": 8, "drafts": 2},
    }
    assert main(["train", *recipe_of(tmp_path, target_folders("llama"), **sections)]) == 0
    *_, best, following = capsys.readouterr().out.splitlines()
    assert re.match(rf"{tmp_path}/lent/checkpoints/best/: the best drafter, final held-out tau [\d.]+$", best)
    assert main(following.removeprefix("next: python -m drafttrain ").split()) == 0
    assert (tmp_path / "lent" / "export" / "README.md").exists()
    assert main(["train", *recipe_of(tmp_path, target_folders("llama"), **sections)]) == 0
    *_, finished, best_again, again = capsys.readouterr().out.splitlines()
    assert "is finished: 1 of 1 steps" in finished and (best_again, again) == (best, following)


# ---- words that are almost right ---------------------------------------------------------------------------------------


def refusal(folder, target, *flags) -> str:
    with pytest.raises(UserError) as refused:
        load_recipe([recipe_of(folder, target)[1]], [*zip(flags[::2], flags[1::2], strict=True)])
    return str(refused.value).splitlines()[0]


@pytest.mark.parametrize(("typed", "least"), [("max-tokens", 3), ("max_tokens", 3), ("drafts", 2), ("muon-lr", 1)])
def test_a_key_without_its_section_is_answered_with_every_section_that_has_it(tmp_path, typed, least):
    sections = [place for place in places(Recipe, "", BASES) if place.endswith(f".{typed.replace('-', '_')}")]
    *others, last = [f"'{place}'" for place in dict.fromkeys(sections)]
    assert len(others) + 1 >= least
    meant = f"{', '.join(others)} or {last}" if others else last
    assert refusal(tmp_path, tmp_path, typed, "40") == f"unknown key '{typed}' (--{typed}): did you mean {meant}?"


@pytest.mark.parametrize(
    ("key", "typed", "meant"),
    [
        ("drafter", "Eagel3", "Eagle3"),
        ("drafter", "eagle3", "Eagle3"),
        ("drafter", "medussa", "Medusa"),
        ("drafter", "P-EAGLE", "PEagle"),
        ("objective", "Distilation", "Distillation"),
        ("objective.init_args.divergences", "[HardCrossEntrop]", "HardCrossEntropy"),
        ("objective.init_args.positions", "Dpace", "DPace"),
        ("prepare.prompts", "[JsonPrompts]", "JsonlPrompts"),
        ("prepare.engine", "OpenAiServer", "OpenAIServer"),
        ("bench.methods", "[Chian]", "Chain"),
    ],
)
def test_a_misspelt_class_is_answered_with_the_one_that_was_meant(tmp_path, key, typed, meant):
    sentence = refusal(tmp_path, tmp_path, key, typed)
    assert f"got {typed.strip('[]')!r}, known are " in sentence and sentence.endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("typed", ["Transformer", "my.drafters.Eagel3", "7"])
def test_a_class_like_no_other_gets_the_list_alone(tmp_path, typed):
    said = refusal(tmp_path, tmp_path, "drafter.class_path", typed)  # tests of other files may have added drafters
    assert "known are " in said and "PEagle" in said and "did you mean" not in said


def test_generate_takes_max_tokens_without_its_section(tmp_path, capsys):
    flags = recipe_of(tmp_path, tmp_path)
    for typed in ("--max-tokens 40", "--max-tokens=40", "--validate.max_tokens 40"):
        recipe, _ = parse("generate", "", [*flags, "--prompt", "hello", *typed.split()])
        assert recipe.validate.max_tokens == 40
    assert main(["train", *flags, "--max-tokens", "40"]) == 2
    assert "unknown key 'max-tokens'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "value", "sentence"),
    [
        ("generate", "--max-tokens", "many", "'validate.max_tokens' (--max-tokens) should be int, got 'many' (str)."),
        (
            "generate",
            "--max-tokens",
            "0",
            "validate.max_tokens (--max-tokens) is 0, but must be at least 1: set it to 1 or more.",
        ),
        (
            "generate",
            "--validate.max_tokens",
            "many",
            "'validate.max_tokens' (--validate.max_tokens) should be int, got 'many' (str).",
        ),
        ("generate", "--validate.max_tokens", "0", "validate.max_tokens is 0, but must be at least 1: set it to 1 or more."),
        ("export", "--push", "me", "export.push (--push) is 'me', but a Hub repository is named owner/name."),
        ("trim", "--size", "1", "drafter.init_args.draft_vocab (--size) is 1, but must be a number of tokens (at least 2), "),
    ],
)
def test_a_refused_value_is_told_with_the_flag_that_was_typed(tmp_path, capsys, command, flag, value, sentence):
    assert main([command, *recipe_of(tmp_path, tmp_path), flag, value]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_the_flag_without_its_section_counts_where_both_are_given(tmp_path):
    """So it is the one that a stopped answer advises."""
    both = ["--validate.max_tokens", "5", "--max-tokens", "20"]
    for order in (both, both[2:] + both[:2]):
        assert parse("generate", "", [*recipe_of(tmp_path, tmp_path), *order])[0].validate.max_tokens == 20
