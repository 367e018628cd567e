"""The card of a run's export through the commands: export, validate and bench bring in what they measured of these very weights, and nothing else."""

import json
import re
import shutil

import pytest
from tiny_command import flags, save_untrained, write_data, write_recipe
from tiny_run import make_run, start

from drafttrain.cli import main
from drafttrain.commands.export import public_start
from drafttrain.commands.train import closing
from drafttrain.run import Run

LOG = "tokens_seen,train/loss,held_out/tau\n100,5.0,\n200,4.0,1.25\n"
QUESTIONS = [{"category": "qa", "turns": ["what is two"]}, {"category": "talk", "turns": ["the quick brown fox"]}]


@pytest.fixture(scope="module")
def made(target_folders, tiny_llama, tmp_path_factory):
    """(recipe file, runs folder) as training leaves it, with its data and its log."""
    folder = tmp_path_factory.mktemp("card-command")
    recipe = write_recipe(folder, target_folders("llama"))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    run = folder / "runs" / "tiny"
    write_data(run, tiny_llama)
    for name in ("best", "../../elsewhere"):
        save_untrained(run / "checkpoints" / name, tiny_llama, {"position": {"step": 2, "tokens": 200}}, seed=len(name))
    (run / "logs" / "version_0").mkdir(parents=True)
    (run / "logs" / "version_0" / "metrics.csv").write_text(LOG)
    return recipe, folder / "runs"


def call(made, command: str, *more) -> int:
    return main([command, *flags(made), *map(str, more)])


def card(made) -> str:
    """The card; what it shows lies beside it, and nothing else of the kind does."""
    export = made[1] / "tiny" / "export"
    text = (export / "README.md").read_text()
    shown = re.findall(r"\]\((plots/[^)]+)\)", text)
    assert {path.relative_to(export).as_posix() for path in export.rglob("*.png")} == set(shown)
    assert all((export / path).read_bytes().startswith(b"\x89PNG") for path in shown)
    return text


def shown(made) -> list[str]:
    return re.findall(r"\(plots/(\w+)\.png\)", card(made))


def test_each_command_brings_in_what_it_measured(made, capsys):
    assert call(made, "export") == 0
    assert shown(made) == ["training"]
    text = card(made)
    assert "has gone from 5 to 4" in text and "These weights are those after 200 tokens." in text
    assert "The data: 4 chats of " in text and "Not validated yet" in text
    assert call(made, "validate") == 0
    assert shown(made) == ["acceptance", "training"] and "Benchmarked" not in card(made)

    assert call(made, "bench") == 0
    assert shown(made) == ["acceptance", "speed", "training"]
    assert "4 questions of the run's held-out prompts" in card(made)
    questions = made[0].parent / "questions.jsonl"
    assert call(made, "bench", "--bench.prompts", questions) == 0
    text = card(made)
    assert shown(made) == ["acceptance", "categories", "speed", "training"]
    assert "2 questions of questions.jsonl" in text and str(made[0].parent) not in text
    found = json.loads((made[1] / "tiny" / "report" / "bench" / "bench.json").read_text())
    method = found["temperatures"][0]["methods"]["chain 2"]
    assert f"| chain 2 | {method['tau']:.3f} | {method['tokens_per_second']:.1f} | {method['speedup']:.2f} |" in text
    assert f"| talk | 1 | {method['categories']['talk']['tau']:.3f} |" in text

    capsys.readouterr()
    assert main(["inspect", str(made[1] / "tiny" / "export")]) == 0
    assert "plots" not in capsys.readouterr().out  # figures are no fault of a folder
    assert call(made, "validate", "--draft", made[1] / "tiny" / "export") == 0  # it loads as before
    before = (made[1] / "tiny" / "export" / "model.safetensors").read_bytes()
    assert call(made, "export") == 0  # the same weights: both reports still speak of them
    assert (made[1] / "tiny" / "export" / "model.safetensors").read_bytes() == before
    assert shown(made) == ["acceptance", "categories", "speed", "training"]


def test_reports_and_log_of_other_weights_are_not_shown(made, tmp_path):
    shutil.copytree(made[1], tmp_path / "runs")
    here = made[0], tmp_path / "runs"
    for command in ("export", "validate", "bench"):
        assert call(here, command) == 0
    assert shown(here) == ["acceptance", "speed", "training"]
    assert call(here, "export", "--checkpoint", tmp_path / "runs" / "elsewhere") == 0  # of another run, as far as anybody knows
    assert shown(here) == [] and "Not validated yet" in card(here) and "The data" not in card(here)
    assert call(here, "bench", "--draft", tmp_path / "runs" / "tiny" / "checkpoints" / "best") == 0
    assert shown(here) == [] and "Benchmarked" not in card(here)  # the run's best is not what was exported


def test_a_log_or_data_that_cannot_be_read_keeps_nobody_from_exporting(made, tmp_path):
    shutil.copytree(made[1], tmp_path / "runs")
    here, run = (made[0], tmp_path / "runs"), tmp_path / "runs" / "tiny"
    shutil.rmtree(run / "report", ignore_errors=True)
    shutil.rmtree(run / "logs")
    (run / "data" / "train" / "manifest.json").write_text("{")
    assert call(here, "export") == 0
    assert shown(here) == [] and "The data" not in card(here)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_that_began_from_another_drafter_says_so_and_that_nothing_better_came_of_it(
    tmp_path, target_folders, tiny_llama, capsys, rank
):
    """Measured before the first step, and not above it behind steps that change nothing."""
    if rank is not None:
        pytest.importorskip("peft")
    here, llama = (write_recipe(tmp_path, target_folders("llama")), tmp_path / "runs"), target_folders("llama")
    first = start(make_run(tmp_path / "secret" / "first", tiny_llama), llama, trainer={"max_steps": 1})
    run = make_run(tmp_path / "runs" / "tiny", tiny_llama)
    tau = {"tau_prompts": 2, "tau_tokens": 8, "start": str(first)}
    lora = None if rank is None else {"rank": rank}
    start(run, llama, checkpoint=tau, optimizer={"lr": 1e-12}, trainer={"max_steps": 2}, lora=lora)
    line = closing(Run(run), 2)[0]
    assert line.endswith("at step 0 of 2: the one that this run began from, unchanged; training did not improve on it")
    assert closing(Run(run), 9)[0].endswith("at step 0 of 9: the one that this run began from, unchanged")
    capsys.readouterr()

    def exported(*more) -> str:
        assert call(here, "export", *more) == 0
        return card(here)

    text = exported()
    assert "note: the best drafter is that of step 0: best, which this run began from, unchanged" in capsys.readouterr().out
    assert "\n- begun from: best\n" in text and "Training did not improve on" in text and "secret" not in text
    [told] = re.findall(r"held-out tau while training: ([\d.]+)", text)
    assert f"{told} at best. These weights are those that training began from." in text
    assert "LoRA" not in text  # of which these weights have nothing
    newest = exported("--checkpoint", run / "checkpoints" / "last_drafter")
    assert (
        "begun from: best" in newest and "did not improve" not in newest and ("- LoRA: rank 2, merged" in newest) == (rank == 2)
    )
    shutil.rmtree(run / "checkpoints" / "last")  # large, so some delete it
    assert exported("--checkpoint.start", first) == text
    assert "begun from" not in exported()  # the recipe at hand names none
    shutil.rmtree(run / "checkpoints" / "best")
    save_untrained(run / "checkpoints" / "best", tiny_llama, {"position": {"step": 0}, "trimmed_from": "elsewhere"})
    assert "begun from" not in exported("--checkpoint.start", first)


def test_no_place_of_this_machine_is_what_a_drafter_began_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("runs/first/checkpoints/best", "runs/first/export", "drafters/mine"):
        (tmp_path / place).mkdir(parents=True)
    assert public_start("owner/name") == "owner/name" and public_start("./drafters/mine/") == "mine"
    assert public_start(str(tmp_path / "drafters" / "mine")) == public_start("drafters/mine") == "mine"
    assert public_start("runs/first/export") == "export"
    (tmp_path / "runs" / "first" / "recipe.yaml").touch()
    assert public_start("runs/first/export") == "export of the run first"
    assert public_start(str(tmp_path / "runs" / "first" / "checkpoints" / "best")) == "best of the run first"
