"""`draft_vocab: best` from the recipe on: plan, training, the data report and trimming find the same optimum."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import ragged_chats, start, write_store

from data_prep.__main__ import main as data_prep
from drafttrain.cli import main
from drafttrain.data.shards import Chat
from drafttrain.data.store import TokenStore
from drafttrain.data.token_counts import count
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter
from drafttrain.drafters.vocabulary import draft_cost
from drafttrain.errors import UserError
from drafttrain.vocab import best_size

DRAFTER = {"taps": [0, 2, 3], "depth": 3, "draft_vocab": "best"}


def recipe_text(target: Path, size: str = "best") -> str:
    return f"""\
name: tiny
target: {{path: {target}}}
prepare:
  prompts: [{{class_path: JsonlPrompts, init_args: {{path: prompts.jsonl}}}}]
  held_out: 3
  max_prompt: 96
  max_tokens: 16
  held_out_max_tokens: 16
  near_duplicate: 1.0
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 2, 3], depth: 3, draft_vocab: {size}}}}}
objective: {{class_path: Distillation}}
optimizer: {{lr: 1e-3}}
trainer: {{max_steps: 2}}
"""


@pytest.fixture
def made(tiny_llama, target_folders, tmp_path):
    """(flags, run folder, the best size)."""
    run = tmp_path / "runs" / "tiny"
    chats = ragged_chats(60, 1001)  # few tokens are frequent: a high power of an even draw
    chats = [Chat(c.key, 3 + (316 * (c.ids / 1000) ** 12).long(), c.supervised) for c in chats]
    write_store(run / "data" / "train", chats, tiny_llama.identity)
    write_store(run / "data" / "held_out", chats[:4], tiny_llama.identity)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(target_folders("llama")))
    size = best_size(count(TokenStore.open(run / "data" / "train")), draft_cost(Eagle3(**DRAFTER), tiny_llama))
    assert 64 < size < tiny_llama.vocab
    return ["--config", str(recipe), "--runs", str(tmp_path / "runs")], run, size


def arithmetic_in(text: str) -> list[str]:
    return re.findall(r"^best size of the draft vocabulary: .*$", text, re.M)


def test_plan_and_training_print_the_same_optimum_and_train_it(made, tiny_llama, target_folders, capsys):
    flags, run, size = made
    assert main(["plan", *flags]) == 0
    [planned] = arithmetic_in(capsys.readouterr().out)
    start(run, target_folders("llama"), drafter=DRAFTER)
    [said] = arithmetic_in(capsys.readouterr().out)
    assert planned == said and f"32 x {size} weights" in said
    net, record = load_drafter(run / "checkpoints" / "best", tiny_llama)
    assert len(net.vocabulary.ids) == size and record["init_args"]["draft_vocab"] == "best"
    start(run, target_folders("llama"), drafter=DRAFTER, trainer={"max_steps": 6})  # resumes: the same choice again
    assert torch.equal(load_drafter(run / "checkpoints" / "best", tiny_llama)[0].vocabulary.ids, net.vocabulary.ids)


def test_plan_before_the_data_says_so(made, tmp_path, capsys):
    flags, *_ = made
    assert main(["plan", *flags[:3], str(tmp_path / "none")]) == 0
    assert "draft vocabulary: best, a size that is known after data_prep" in capsys.readouterr().out


def test_plan_shows_a_share_and_refuses_what_training_would(made, capsys):
    flags, *_ = made
    assert main(["plan", *flags, "--drafter.init_args.draft_vocab", "0.5"]) == 0
    assert "draft vocabulary: 64 of 320 tokens, which are" in capsys.readouterr().out
    few = ["--drafter.init_args.draft_vocab", "4", "--drafter.init_args.least_coverage", "0.9"]
    assert main(["plan", *flags, *few]) == 2
    assert "least_coverage" in capsys.readouterr().err


def test_the_data_report_shows_the_best_vocabulary(made, tiny_llama, tmp_path, monkeypatch):
    flags, *_ = made
    rows = [{"messages": [{"role": "user", "content": f"what is {i} plus {7 * i % 13}{'?' * i}"}]} for i in range(15)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    assert data_prep([*flags[:3], str(tmp_path / "new")]) == 0
    data = tmp_path / "new" / "tiny" / "data"
    size = best_size(count(TokenStore.open(data / "train")), draft_cost(Eagle3(**DRAFTER), tiny_llama))
    shown = json.loads((data / "report" / "summary.json").read_text())["draft_vocabulary"]
    assert shown["best"] and shown["size"] == size


def test_trim_to_the_best_size(made, tiny_llama, target_folders, capsys):
    flags, run, _ = made
    start(run, target_folders("llama"), drafter=DRAFTER | {"draft_vocab": None})
    net, _ = load_drafter(run / "checkpoints" / "best", tiny_llama)
    counts = count(TokenStore.open(run / "data" / "train"), net.vocabulary.t2d)
    size = best_size(counts, draft_cost(replace(net.config), tiny_llama))
    assert 64 < size < tiny_llama.vocab
    assert main(["trim", *flags, "--size", "best"]) == 0
    assert len(load_drafter(run.parent / f"tiny-{size}" / "checkpoints" / "best", tiny_llama)[0].vocabulary.ids) == size


@pytest.mark.parametrize("size", ["bset", "Best", "''"])
def test_a_misspelt_best_is_a_sentence(made, capsys, size):
    assert main(["plan", *made[0], "--drafter.init_args.draft_vocab", size]) == 2
    assert "should be int or float or best or null" in capsys.readouterr().err
    with pytest.raises(UserError, match="best, or null"):
        Eagle3(draft_vocab=0)
