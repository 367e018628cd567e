"""The commands: from a recipe to a report on a tiny target, what each imports, and how errors leave the house."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from data_prep.__main__ import main as data_prep
from drafttrain.cli import main, pairs
from drafttrain.commands.plan_start import find_start, require_start
from drafttrain.decoding.engine import generate
from drafttrain.errors import UserError
from drafttrain.files import RunLock
from drafttrain.recipe import load_recipe
from drafttrain.run import Run
from drafttrain.validation.samples import Piece

ROOT = Path(__file__).resolve().parents[1]
HEAVY = "lightning", "deepspeed", "datasets", "torchmetrics"


def recipe_text(target: Path, prompts: Path) -> str:
    """A run that takes seconds."""
    return f"""\
name: tiny
target: {{path: {target}}}
prepare:
  prompts: [{{class_path: JsonlPrompts, init_args: {{path: {prompts}}}}}]
  held_out: 3
  max_prompt: 96
  max_tokens: 16
  held_out_max_tokens: 16
  near_duplicate: 1.0
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 1, 3], depth: 2, draft_vocab: 200}}}}
objective: {{class_path: Distillation}}
data: {{features: stored, length: 96, rows: 2}}
optimizer: {{lr: 1e-3, warmup_steps: 1}}
checkpoint: {{tau_every: 2, tau_tokens: 8, drafts: 2}}
trainer: {{max_steps: 2, strategy: auto}}
validate: {{drafts: 2, max_tokens: 16}}
"""


@pytest.fixture(scope="module")
def made(target_folders, tmp_path_factory):
    """(recipe file, runs folder), with data, a trained drafter and its export."""
    folder = tmp_path_factory.mktemp("cli")
    rows = [{"messages": [{"role": "user", "content": f"what is {i} plus {7 * i % 13}{'?' * i}"}]} for i in range(15)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe_text(target_folders("llama"), folder / "prompts.jsonl"))
    flags = ["--config", str(recipe), "--runs", str(folder / "runs")]
    assert data_prep(flags) == 0
    assert main(["train", *flags]) == 0
    assert main(["export", *flags]) == 0
    return recipe, folder / "runs"


def flags(made) -> list[str]:
    return ["--config", str(made[0]), "--runs", str(made[1])]


def loaded_after(command: list[str], code: int = 0) -> tuple[set[str], str]:
    """Top-level packages in a fresh process behind a command of ours, and what it printed."""
    program = f"import sys; from drafttrain.cli import main; code = main({command!r}); print('|' + ' '.join(sys.modules)); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stderr
    printed, _, names = done.stdout.rpartition("|")
    return {name.split(".")[0] for name in names.split()}, printed + done.stderr


def test_from_recipe_to_report(made):
    loaded, printed = loaded_after(["validate", *flags(made)])
    assert "drafter:" in printed and "lightning" not in loaded and "deepspeed" not in loaded
    folder = made[1] / "tiny"
    report = json.loads((folder / "report" / "validation.json").read_text())
    assert report["lossless"] and report["prompts"] == 3 and len(report["acceptance_by_depth"]) == 2
    assert report["methods"].keys() >= {"drafter", "lookup", "untrained"}
    weights = json.loads((folder / "export" / "drafttrain.json").read_text())["weights"]["sha256"]
    assert report["export_hash"] == weights
    assert f"{report['tau']:.3f}" in (folder / "export" / "README.md").read_text()


def test_run_folder_tells_what_made_it(made):
    folder = made[1] / "tiny"
    assert load_recipe([folder / "recipe.yaml"])[0].plain() == load_recipe([made[0]])[0].plain()
    entries = json.loads((folder / "versions.json").read_text())
    assert entries.keys() >= {"data_prep", "train", "export"}


@pytest.mark.parametrize(
    ("change", "code"), [(["--trainer.log_every_n_steps", "7"], 0), (["--trainer.max_steps", "99", "--data.length", "40"], 2)]
)
def test_a_training_that_is_finished_or_refused_leaves_what_the_later_stages_are_given(made, change, code):
    """An export by the recipe that was refused would look for a drafter of another target."""
    folder = made[1] / "tiny"
    files = [folder / "recipe.yaml", folder / "versions.json"]
    before = [file.read_bytes() for file in files]
    assert main(["train", *flags(made), *change]) == code
    assert [file.read_bytes() for file in files] == before


def test_card_forgets_a_report_about_other_weights(made):
    card = made[1] / "tiny" / "export" / "README.md"
    assert main(["validate", *flags(made)]) == 0
    assert "Not validated yet" not in card.read_text()
    assert main(["export", *flags(made)]) == 0  # the same weights: the report still speaks of them
    assert "Not validated yet" not in card.read_text()
    assert main(["export", *flags(made), "--export.dtype", "float32"]) == 0
    assert "Not validated yet" in card.read_text()
    assert main(["export", *flags(made)]) == 0


@pytest.mark.parametrize("draft", [None, "checkpoints/best", "export"])
def test_generate_answers_and_counts(made, capsys, draft):
    extra = [] if draft is None else ["--draft", str(made[1] / "tiny" / draft)]
    assert main(["generate", *flags(made), "--prompt", "hello there", *extra]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens in" in out and "tau" in out and "with 2 drafts" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_generate_shows_which_tokens_were_guessed_with_and_without_a_terminal(made, capsys, monkeypatch, terminal):
    words = "[b]red[/b] " * 40  # longer than a line, and no markup
    monkeypatch.setattr(
        "drafttrain.commands.generate.pieces", lambda *_: [Piece("the sky", False), Piece(words, True), Piece("end", False)]
    )
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    else:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(["generate", *flags(made), "--prompt", "hello"]) == 0
    out = capsys.readouterr().out
    if terminal:
        assert "\x1b[1;32m" in out and "⟦" not in out
        out = re.sub(r"\x1b\[[\d;]*m", "", out)
    opens, closes = ("", "") if terminal else ("⟦", "⟧")
    assert f"\nthe sky{opens}{words}{closes}end\n" in out
    assert f"; {opens}guessed by the drafter{closes}, the rest said by the target\n" in out


@pytest.mark.parametrize("stopped", [False, True])
def test_generate_says_when_it_stopped_at_its_limit_and_what_lifts_it(made, tmp_path, capsys, monkeypatch, stopped):
    def answer(*args, **kwargs):
        for rollout in generate(*args, **kwargs):
            yield replace(rollout, stopped=stopped)

    monkeypatch.setattr("drafttrain.commands.generate.generate", answer)
    short = tmp_path / "short.yaml"
    short.write_text("validate: {max_tokens: 5}")
    for asked, named in (
        (["--max-tokens", "5"], "--max-tokens"),
        (["--validate.max_tokens", "5"], "--validate.max_tokens"),
        (["--config", str(short)], "validate.max_tokens"),
    ):
        assert main(["generate", *flags(made), "--prompt", "hello", *asked]) == 0
        said = f"stopped at its limit of 5 tokens ({named}); for a longer answer give --max-tokens 20\n"
        assert capsys.readouterr().out.endswith(said) != stopped


def test_generate_needs_words(made, capsys):
    assert main(["generate", *flags(made)]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_words_that_are_no_utf8_are_a_sentence(made, capsys):
    assert main(["generate", *flags(made), "--prompt", os.fsdecode(b"caf\xe9")]) == 2
    assert "--prompt is a prompt with half of a surrogate pair" in capsys.readouterr().err


def test_plan_prints_arithmetic_and_starts_nothing(made, tmp_path, capsys):
    assert (
        main(["plan", "--config", str(made[0]), "--runs", str(tmp_path / "runs"), "--trainer.accumulate_grad_batches", "4"]) == 0
    )
    out = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert "4 accumulations x 2 rows x 96 tokens = 768" in out and "epochs are known after data_prep" in out
    shown = yaml.safe_load(out[: out.index("\nrun folder:")])
    assert shown == yaml.safe_load(Path(made[1] / "tiny" / "recipe.yaml").read_text()) | {"trainer": shown["trainer"]}

    assert main(["plan", *flags(made)]) == 0
    out = capsys.readouterr().out
    tokens = json.loads((made[1] / "tiny" / "data" / "train" / "manifest.json").read_text())["tokens"]
    assert re.search(r"disk, features: [\d,]+ states of 3 taps", out) and f"epochs of 12 chats, {tokens:,} tokens" in out


def test_plan_counts_the_parameters_that_are_trained(made, capsys):
    from safetensors import safe_open

    with safe_open(made[1] / "tiny" / "checkpoints" / "best" / "drafter.safetensors", "pt") as file:
        trained = sum(file.get_tensor(name).numel() for name in file.keys() if name != "d2t")  # noqa: SIM118
    assert main(["plan", *flags(made)]) == 0
    assert f"parameters: {trained:,} trained, " in capsys.readouterr().out


# ---- errors ------------------------------------------------------------------------------------------------------------


def test_errors_are_sentences_with_exit_code_2_and_cost_no_heavy_import(made):
    loaded, printed = loaded_after(["train", *flags(made), "--optimizer.lrr", "1"], code=2)
    assert printed == "error: unknown key 'optimizer.lrr' (--optimizer.lrr): did you mean 'optimizer.lr'?\n"
    assert not loaded & set(HEAVY)


def test_a_note_beside_an_error_is_a_note(made, capsys):
    assert main(["plan", *flags(made), "--drafter", "Hydra", "--optimizer.lrr", "1"]) == 2
    note, error = capsys.readouterr().err.splitlines()
    assert note.startswith("note: drafter is now Hydra (--drafter): the arguments of Eagle3 are dropped")
    assert error.startswith("error: unknown key 'optimizer.lrr'")


def test_help_costs_no_heavy_import():
    loaded, printed = loaded_after(["plan", "--help"])
    assert not loaded & set(HEAVY)
    assert "--optimizer.lr" in printed and "--runs DIR" in printed


def test_overview_and_unknown_command(capsys):
    assert main([]) == 0 and "validate" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: no command 'trian': did you mean train?\n"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("trainer.max_stps", "3", "did you mean 'trainer.max_steps'?"),
        ("trainer.max_steps", "many", "'trainer.max_steps' should be int, got 'many' (str)"),
        ("trainer.strategy", "ddq", "got 'ddq', known are auto, ddp"),
        ("trainer.strategy", "{class_path: NoStrategy}", "known are DDPStrategy"),
        (
            "trainer.strategy",
            "{class_path: DDPStrategy, init_args: {bucket: 3}}",
            "'trainer.strategy.init_args.bucket' is no argument",
        ),
        (
            "trainer.strategy",
            "{class_path: DeepSpeedStrategy, init_args: {stag: 2}}",
            "'trainer.strategy.init_args.stag' is no argument",
        ),
        ("trainer.logger", "NoLogger", "known are"),
        ("trainer.max_epochs", "3", "training ends by trainer.max_steps"),
        ("trainer.devices", "2", "torchrun"),
    ],
)
def test_trainer_section_is_checked_before_anything_loads(made, capsys, monkeypatch, flag, value, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["plan", *flags(made), f"--{flag}", value]) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("error: ") and err.count("\n") == 1


STAGE_2 = "{class_path: lightning.pytorch.strategies.DeepSpeedStrategy, init_args: {stage: 2}}"


@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", STAGE_2])
def test_a_cluster_is_planned_for_where_there_is_neither_gpu_nor_deepspeed_and_training_refuses(
    made, capsys, monkeypatch, strategy
):
    lightning = pytest.importorskip("lightning.pytorch.strategies.deepspeed")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(lightning, "_DEEPSPEED_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    asked = [*flags(made), "--trainer.strategy", strategy]
    assert main(["plan", *asked]) == 0
    planned, err = capsys.readouterr()
    here = [line for line in planned.splitlines() if line.startswith("warning: on this machine training would refuse: ")]
    assert ["needs an NVIDIA GPU" in here[0], "not installed" in here[1], len(here), err] == [True, True, 2, ""]
    assert (
        "memory of a step on a GPU" in planned
        and "DeepSpeed adds its buckets, and ZeRO-2 divides optimizer, gradients among" in planned
    )
    assert main(["train", *asked]) == 2
    assert capsys.readouterr().err == here[0].replace("warning: on this machine training would refuse: ", "error: ") + "\n"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["train", *asked]) == 2
    assert capsys.readouterr().err == here[1].replace("warning: on this machine training would refuse: ", "error: ") + "\n"


def test_loggers_write_into_the_run_folder(tmp_path):
    from drafttrain.trainer_section import trainer_arguments

    for logger in ("CSVLogger", {"class_path": "lightning.pytorch.loggers.CSVLogger"}):
        section = {"logger": logger}
        assert trainer_arguments(section, tmp_path / "logs")["logger"].root_dir.startswith(str(tmp_path / "logs"))
        assert section == {"logger": logger}  # the recipe that is written down stays as it was
    elsewhere = {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path / "else")}}
    assert "else" in trainer_arguments({"logger": elsewhere}, tmp_path / "logs")["logger"].root_dir


def test_world_size_that_does_not_match_is_refused_before_loading(made, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["train", *flags(made), "--target.path", "/does/not/exist"]) == 2
    assert "WORLD_SIZE is 3 and LOCAL_WORLD_SIZE is 2" in capsys.readouterr().err


def test_torchrun_ends_with_what_was_said(tmp_path, monkeypatch, capsys):
    """As torch reads the file that a process has left."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    (tmp_path / "r.yaml").write_text("name: x\noptimzer: {lr: $1}\n")
    assert main(["train", "--config", str(tmp_path / "r.yaml")]) == 2
    said = capsys.readouterr().err.splitlines()
    summary = str(ChildFailedError("drafttrain", {0: ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))}))
    assert (
        len(said) > 1
        and [line.strip().removeprefix("traceback : ") for line in summary.splitlines()[-1 - len(said) : -1]] == said
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert main(["train", "--config", str(tmp_path / "r.yaml")]) == 2


def test_rank_0_speaks_first(made, capsys, monkeypatch):
    """The others wait, so that torchrun has ended them when all of them have the same to say."""
    waited = []
    monkeypatch.setattr("drafttrain.cli.time.sleep", waited.append)
    assert main(["train", *flags(made), "--optimizer.lrr", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not waited
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *flags(made), "--optimizer.lrr", "1"]) == 2
    assert capsys.readouterr().err.startswith("error (rank 1): ") and waited


@pytest.mark.parametrize("command", ["train", "export", "validate"])
def test_two_runs_into_one_folder(made, capsys, command):
    with RunLock(made[1] / "tiny"):
        assert main([command, *flags(made)]) == 2
    assert str(made[1] / "tiny") in capsys.readouterr().err


def test_stages_out_of_order_name_the_stage_that_is_missing(made, tmp_path, capsys):
    later = ["--config", str(made[0]), "--runs", str(tmp_path)]
    for command, words in (("train", "data_prep"), ("export", "run train"), ("validate", "data_prep")):
        assert main([command, *later]) == 2
        assert words in capsys.readouterr().err
    assert main(["generate", *later, "--prompt", "x"]) == 2
    assert "run train" in capsys.readouterr().err


def test_taps_outside_the_target(made, capsys):
    for command in (lambda f: main(["plan", *f]), data_prep):
        assert command([*flags(made), "--drafter.init_args.taps", "[1, 99]"]) == 2
        assert "[1, 99]" in capsys.readouterr().err


def test_push_names_a_repository(made, capsys):
    assert main(["export", *flags(made), "--push", "no-owner"]) == 2
    assert "export.push (--push) is 'no-owner'" in capsys.readouterr().err


def test_flags():
    assert pairs(["--a.b", "1", "--c=--x", "--d", "-1"]) == [("a.b", "1"), ("c", "--x"), ("d", "-1")]
    for rest, words in (
        (["--a.b"], "needs a value"),
        (["--a", "--b", "1"], "--a needs a value"),
        (["stray"], "'stray' belongs to no flag"),
    ):
        with pytest.raises(UserError, match=words):
            pairs(rest)


def test_a_recipe_without_its_flag_and_a_flag_with_the_underscores_of_keys_are_guessed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("R.yaml").write_text("name: r")
    assert main(["plan", "R.yaml"]) == 2
    assert capsys.readouterr().err == "error: 'R.yaml' belongs to no flag; did you mean --config R.yaml?\n"
    assert main(["plan", "none.yaml"]) == 2
    assert "'none.yaml' belongs to no flag; a key of the recipe is set with" in capsys.readouterr().err
    for command, flag, meant in (("export", "--dry_run", "--dry-run"), ("generate", "--max_tokens=9", "--max-tokens")):
        assert main([command, "--config", "R.yaml", flag]) == 2
        assert capsys.readouterr().err == f"error: there is no {flag.partition('=')[0]}: did you mean {meant}?\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["inspect"], "inspect is first given PATH, folders of drafters or Hub ids, and got 0 of them"),
        (["inspect", "a", "b"], "and got 2 of them: python -m drafttrain inspect PATH [--target TARGET]."),
        (["compare", "a"], "compare is first given A and B, folders of drafters or Hub ids, and got 1 of them"),
        (["compare", "--json", "x", "a", "b"], "got 0 of them"),
        (["inspect", "a", "--export.dtype", "float32"], "inspect reads no recipe, so --export.dtype means nothing to it"),
        (["compare", "a", "b", "--validate.drafts", "2"], "--validate.drafts is a key of a recipe, and none is given"),
        (["compare", "a", "b", "--config", "none.yaml"], "none.yaml"),
    ],
)
def test_commands_that_are_given_folders_say_how(capsys, command, words):
    assert main(command) == 2
    assert words in capsys.readouterr().err


def test_their_help(capsys):
    for command, flag in (("inspect", "--target"), ("compare", "--json")):
        assert main([command, "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: python -m drafttrain {command} ") and flag in out
        assert main(["--help"]) == 0 and f"\n  {command}" in capsys.readouterr().out


# ---- launch/pipeline.sh ------------------------------------------------------------------------------------------------


def pipeline(tmp_path: Path, fail: str, nproc: str) -> tuple[int, list[str]]:
    """Exit code, and the commands that a stand-in for Python was called with."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in *"{fail}"*) exit 7;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "NPROC": nproc}
    script = ROOT / "launch" / "pipeline.sh"
    done = subprocess.run([script, "r.yaml", "--config", "hw.yaml"], env=environment, capture_output=True)
    return done.returncode, (tmp_path / "calls").read_text().splitlines()


def test_pipeline_runs_the_stages_in_order(tmp_path):
    code, calls = pipeline(tmp_path, "nothing fails", "1")
    rest = "--config r.yaml --config hw.yaml"
    assert code == 0
    stages = "train", "export --finished", "validate"
    assert calls == [f"-m data_prep {rest}", *(f"-m drafttrain {stage} {rest}" for stage in stages)]


def test_pipeline_stops_at_the_first_failure_with_its_code(tmp_path):
    code, calls = pipeline(tmp_path, "drafttrain train", "4")
    assert code == 7 and len(calls) == 2
    assert calls[1].startswith(
        "-m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 0 -m drafttrain train --config r.yaml"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_pipeline_passes_a_stop_on_and_begins_no_further_stage(tmp_path, number, code):
    """The stage saves and exits 0, as training does; the pipeline ends all the same."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\n"
        f"def stop(number, _): open('{tmp_path}/heard', 'a').write(str(number)); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        f"open('{tmp_path}/calls', 'a').write('x')\ntime.sleep(30)\n"
    )
    python.chmod(0o755)
    script = [str(ROOT / "launch" / "pipeline.sh"), "r.yaml"]
    process = subprocess.Popen(
        script,
        env=os.environ | {"PYTHON": str(python)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests may run where it is ignored, behind nohup
    )
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "calls").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal tells everybody
        else:
            process.send_signal(number)
        assert process.wait(20) == code
    finally:
        process.kill()
    assert (tmp_path / "heard").read_text() == str(int(number))
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trainer.accumulate_grad_batches", "0"], "trainer.accumulate_grad_batches is 0, but must be 1 or more"),
        (["--trainer.max_steps", "-1"], "trainer.max_steps is -1, but must be 1 or more"),
        (["--trainer", "null"], "trainer"),
        (["--target.path", ""], "target.path"),
        (["--optimizer.lr", ".inf"], "finite"),
        (["--optimizer.weight_decay", ".nan"], "finite"),
    ],
)
def test_values_that_would_hang_or_fail_late_are_refused_by_plan(made, tmp_path, capsys, flags, words):
    """Zero accumulation once made a window that never ends, deaf to SIGTERM."""
    assert main(["plan", "--config", str(made[0]), "--runs", str(tmp_path / "runs"), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_rank_that_is_no_number_is_a_sentence(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "x")
    assert main(["plan", "--config", str(made[0]), "--runs", str(tmp_path / "runs")]) == 2
    assert "RANK" in capsys.readouterr().err


def test_a_recipe_that_is_not_text_and_runs_that_are_a_file(made, tmp_path, capsys):
    binary = tmp_path / "bin.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert main(["plan", "--config", str(binary)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert main(["train", "--config", str(made[0]), "--runs", str(binary)]) == 2
    assert "--runs" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["export", "--push", ""], ["generate", "--max-tokens", ""]])
def test_a_short_flag_with_an_empty_word_is_refused(command, capsys):
    """`--push "$REPO"` of a variable that is not set would else export and push nothing."""
    assert main([*command, "--config", str(Path(__file__).parents[1] / "recipes/smollm2-135m/eagle3.yaml")]) == 2
    assert f"{command[1]} is an empty word" in capsys.readouterr().err


LONG = "x" * 300
RECIPE = ["--config", str(ROOT / "recipes" / "smollm2-135m" / "eagle3.yaml")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", *RECIPE, "--target.path", LONG], f"target.path is {LONG}, but there is no such folder"),
        (["plan", *RECIPE, "--name", LONG], "at most 200"),
        (["inspect", str(Path(__file__).parent), "--target", LONG], f"--target is {LONG}, but there is no such folder"),
        (["inspect", f"owner/{LONG}"], f"owner/{LONG}, but there is no such folder"),
        (["generate", *RECIPE, "--prompt", "x", "--runs", LONG], "x... is longer than this machine lets paths be"),
        (["export", *RECIPE, "--runs", "y/" * 3000], "/... is longer than this machine lets paths be"),
    ],
)
def test_a_path_that_is_too_long_is_a_sentence(words, said, capsys):
    """Below Python 3.14 pathlib raises, where it is asked whether there is such a file."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1


def test_a_start_whose_name_is_too_long_is_not_there(tmp_path):
    recipe = load_recipe(RECIPE[1:], [("checkpoint.start", f"owner/{LONG}")])[0]
    start, said = find_start(recipe, Run(tmp_path), None, None)
    assert start is None and "no such folder yet" in said[0]
    with pytest.raises(UserError, match="there is no such folder"):
        require_start(recipe, Run(tmp_path))
