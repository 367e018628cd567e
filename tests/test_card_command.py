"""The card of a run's export through the commands: export, validate and bench bring in what they measured of these very weights, and nothing else."""

import json
import re
import shutil

import pytest
import torch
from tiny_run import ragged_chats, write_store

from drafttrain.cli import main
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import save_drafter
from drafttrain.vocab import DraftVocabulary

RECIPE = """\
name: tiny
target: {{path: {target}}}
prepare: {{prompts: [{{class_path: SelfPrompts, init_args: {{count: 8}}}}]}}
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 1, 3], depth: 3, draft_vocab: null}}}}
objective: {{class_path: Distillation}}
bench: {{max_tokens: 6, methods: [{{class_path: Chain, init_args: {{drafts: 2}}}}], temperatures: [0], repeats: 1, batches: [2], longest: null}}
validate: {{drafts: 3, max_tokens: 8}}
trainer: {{max_steps: 1}}
"""
LOG = "tokens_seen,train/loss,held_out/tau\n100,5.0,\n200,4.0,1.25\n"
QUESTIONS = [{"category": "qa", "turns": ["what is two"]}, {"category": "talk", "turns": ["the quick brown fox"]}]


@pytest.fixture(scope="module")
def made(target_folders, tiny_llama, tmp_path_factory):
    """(recipe file, runs folder) as training leaves it, with its data and its log."""
    folder = tmp_path_factory.mktemp("card-command")
    (folder / "recipe.yaml").write_text(RECIPE.format(target=target_folders("llama")))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    run = folder / "runs" / "tiny"
    for part, seed in (("train", 0), ("held_out", 1)):
        write_store(run / "data" / part, ragged_chats(4, tiny_llama.vocab, seed=seed, longest=16), tiny_llama.identity)
    for name in ("best", "../../elsewhere"):
        torch.manual_seed(len(name))
        config = Eagle3(taps=[0, 1, 3], depth=3, draft_vocab=None)
        net = config.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
        save_drafter(run / "checkpoints" / name, net, config, tiny_llama.identity, {"position": {"step": 2, "tokens": 200}})
    (run / "logs" / "version_0").mkdir(parents=True)
    (run / "logs" / "version_0" / "metrics.csv").write_text(LOG)
    return folder / "recipe.yaml", folder / "runs"


def call(made, command: str, *more) -> int:
    return main([command, "--config", str(made[0]), "--runs", str(made[1]), *map(str, more)])


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
