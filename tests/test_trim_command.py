"""`drafttrain trim` on a run folder: a run of its own that export, validate and generate take, and nothing that was there is touched."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import make_run, ragged_chats, write_store

from drafttrain.cli import main
from drafttrain.data.store import TokenStore
from drafttrain.data.token_counts import count
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import save_drafter
from drafttrain.errors import UserError
from drafttrain.recipe import load_recipe
from drafttrain.vocab import choose, describe

SIZE = 200


@pytest.fixture(scope="module")
def trained(tiny_llama, target_folders, tmp_path_factory):
    """(recipe, runs folder) of a run with data and a drafter in checkpoints/best/."""
    folder = tmp_path_factory.mktemp("trim")
    run = make_run(folder / "runs" / "tiny", tiny_llama)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"""\
name: tiny
target: {{path: {target_folders("llama")}}}
prepare: {{prompts: [{{class_path: SelfPrompts, init_args: {{count: 4}}}}]}}
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 1, 3], depth: 2, draft_vocab: {SIZE}}}}}
objective: {{class_path: Distillation}}
optimizer: {{lr: 1e-3}}
trainer: {{max_steps: 2}}
validate: {{drafts: 2, max_tokens: 12}}
""")
    counts = torch.randint(1, 50, (tiny_llama.vocab,), generator=torch.Generator().manual_seed(0))
    vocabulary = choose(counts, SIZE, always=tiny_llama.end_ids)
    torch.manual_seed(0)
    net = Eagle3(taps=[0, 1, 3], depth=2, draft_vocab=SIZE).build(tiny_llama, vocabulary)
    facts = {"position": {"step": 7, "tokens": 900, "best_tau": 1.5}, "held_out": None}
    save_drafter(run / "checkpoints" / "best", net, net.config, tiny_llama.identity, facts)
    return recipe, folder / "runs"


@pytest.fixture
def copy(trained, tmp_path):
    """The same, to be changed."""
    shutil.copytree(trained[1], tmp_path / "runs")
    return trained[0], tmp_path / "runs"


def flags(made) -> list[str]:
    return ["--config", str(made[0]), "--runs", str(made[1])]


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with its time of change."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_training_anew_does_not_replace_what_trim_made(copy, capsys):
    assert main(["trim", *flags(copy), "--size", "120"]) == 0
    place = copy[1] / "tiny-120"
    before, trim = content(place / "checkpoints"), ["--config", str(place / "recipe.yaml"), "--runs", str(copy[1])]
    assert main(["train", *trim]) == 2
    assert "holds a drafter that trim made" in capsys.readouterr().err and content(place / "checkpoints") == before
    (copy[1] / "on").mkdir()
    (copy[1] / "on" / "data").symlink_to(copy[1] / "tiny" / "data")
    small = ["--data.length", "48", "--trainer.max_steps", "1", "--checkpoint.tau_prompts", "0"]
    assert main(["train", *trim, "--name", "on", "--checkpoint.start", str(place / "checkpoints" / "best"), *small]) == 0


def test_a_trimmed_run_is_exported_validated_and_used(copy, capsys):
    before = content(copy[1] / "tiny")
    assert main(["trim", *flags(copy), "--size", "120"]) == 0
    said = capsys.readouterr().out
    place = copy[1] / "tiny-120"
    assert content(copy[1] / "tiny") == before
    assert sorted(path.name for path in copy[1].iterdir()) == ["tiny", "tiny-120"]
    assert "before, draft vocabulary: 200 of 320 tokens" in said and "now, draft vocabulary: 120 of 320 tokens" in said
    with_it = ["--config", str(place / "recipe.yaml"), "--runs", str(copy[1])]
    assert " ".join(with_it) in said and load_recipe([place / "recipe.yaml"])[0].name == "tiny-120"

    assert main(["export", *with_it]) == 0
    made = json.loads((place / "export" / "drafttrain.json").read_text())
    assert made["config"]["draft_vocab"] == 120 and made["facts"] | {"data": {}} == {"steps": 7, "tokens seen": 900, "data": {}}
    assert main(["validate", *with_it]) == 0
    report = json.loads((place / "report" / "validation.json").read_text())
    assert report["lossless"] and report["draft_vocabulary"]["size"] == 120
    assert report["export_hash"] == made["weights"]["sha256"]
    capsys.readouterr()
    assert main(["generate", *with_it, "--prompt", "hello"]) == 0
    assert "with 2 drafts" in " ".join(capsys.readouterr().out.split())
    after = content(copy[1] / "tiny")
    assert {name: after[name] for name in before} == before


def test_new_answers_are_expected_without_the_knowledge_of_the_answers_left_out(copy, tiny_llama, capsys):
    """A head that was chosen by the store's own answers has all their words; what it is expected to cover must not show that."""
    counts = count(TokenStore.open(copy[1] / "tiny" / "data" / "train"))
    vocabulary = choose(counts.supervised_V, 280, counts.other_V, always=tiny_llama.end_ids)
    own = Eagle3(taps=[0, 1, 3], depth=2, draft_vocab=280).build(tiny_llama, vocabulary)
    save_drafter(copy[1] / "tiny" / "checkpoints" / "best", own, own.config, tiny_llama.identity, {})
    assert main(["trim", *flags(copy), "--size", "150"]) == 0
    said = capsys.readouterr().out
    assert counts.expected(torch.tensor([280]))[0] < 0.95 < count_among(copy, vocabulary).expected(torch.tensor([280]))[0]
    assert f"before, {describe(vocabulary, counts)}" in said
    kept = choose(counts.supervised_V, 150, counts.other_V, always=tiny_llama.end_ids)
    assert f"now, {describe(kept, counts)}" in said
    tensors = load_file(copy[1] / "tiny-150" / "checkpoints" / "best" / "drafter.safetensors")
    assert torch.equal(torch.arange(150) + tensors["d2t"], kept.ids)


def count_among(made, vocabulary):
    return count(TokenStore.open(made[1] / "tiny" / "data" / "train"), vocabulary.t2d)


def test_rows_are_the_old_ones(copy):
    assert main(["trim", *flags(copy), "--size", "0.5"]) == 0
    [place] = [path for path in copy[1].iterdir() if path.name != "tiny"]
    old, new = (load_file(folder / "checkpoints" / "best" / "drafter.safetensors") for folder in (copy[1] / "tiny", place))
    old_ids, new_ids = ((torch.arange(len(t["d2t"])) + t["d2t"]).tolist() for t in (old, new))
    assert place.name == f"tiny-{len(new_ids)}" and len(new_ids) in (64, 128)
    for row, token in enumerate(new_ids):
        assert torch.equal(new["lm_head.weight"][row], old["lm_head.weight"][old_ids.index(token)])
    assert all(torch.equal(value, old[name]) for name, value in new.items() if name not in ("d2t", "lm_head.weight"))


def test_an_export_is_trimmed_by_the_answers_of_another_store(copy, tiny_llama, tmp_path):
    """Answers that say the ids 100 to 160 alone: these are kept, as far as the head can say them, and the ends of turn."""
    assert main(["export", *flags(copy)]) == 0
    chats = ragged_chats(8, 160)
    for chat in chats:
        chat.ids[chat.supervised] = 100 + chat.ids[chat.supervised] % 60
    write_store(tmp_path / "other", chats, tiny_llama.identity)
    export = copy[1] / "tiny" / "export"
    out = tmp_path / "elsewhere" / "small"
    extra = ["--draft", str(export), "--counts", str(tmp_path / "other"), "--out", str(out), "--size", "32"]
    assert main(["trim", *flags(copy), *extra]) == 0
    tensors = load_file(out / "checkpoints" / "best" / "drafter.safetensors")
    kept = set((torch.arange(32) + tensors["d2t"]).tolist())
    assert (
        len([token for token in kept if 100 <= token < 160]) >= 32 - len(tiny_llama.end_ids) and set(tiny_llama.end_ids) <= kept
    )
    assert main(["validate", "--config", str(out / "recipe.yaml"), "--runs", str(out.parent)]) == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([], "draft_vocab 200 means 200 tokens, but the trained head has 200"),
        (["--size", "201"], "trimming only takes tokens away"),
        (["--size", "many"], "got 'many'"),
        (["--size", "0"], "at least 2"),
        (["--size", "64", "--out", "TAKEN"], "is there already, and nothing is overwritten"),
        (["--size", "64", "--draft", "/no/such"], "no exported drafter"),
        (["--size", "64", "--counts", "/no/such"], "does not exist"),
        (["--size", "64", "--out", "/tmp/a b"], "becomes a folder"),
    ],
)
def test_refusals_leave_everything_as_it_was(copy, capsys, tmp_path, extra, words):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    before = content(tmp_path)
    extra = [str(tmp_path / "taken") if word == "TAKEN" else word for word in extra]
    assert main(["trim", *flags(copy), *extra]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert content(tmp_path) == before and {path.name for path in copy[1].iterdir()} == {"tiny"}


@pytest.mark.parametrize(
    ("chosen_by", "extra", "words"),
    [
        (SIZE, [], "draft_vocab 200 means 200 tokens, but the trained head has 200"),
        (SIZE, ["--size", "null"], "draft_vocab null means 200 tokens"),
        ("best", ["--size", "best"], "trim needs --size: drafter.init_args.draft_vocab is best, by which the 200 tokens of the trained head were"),
        (0.9, ["--size", "0.9"], "drafter.init_args.draft_vocab is 0.9, by which the 200 tokens of the trained head were chosen; give fewer"),
        (0.9, ["--size", "0.5"], None),
        ("best", ["--size", "best", "--counts", "STORE"], None),
    ],
)  # fmt: skip
def test_a_head_that_would_stay_as_it_is_is_refused_before_the_target_is_loaded(
    copy, capsys, monkeypatch, chosen_by, extra, words
):
    file = copy[1] / "tiny" / "checkpoints" / "best" / "drafter.json"
    record = json.loads(file.read_text())
    record["init_args"]["draft_vocab"] = chosen_by
    file.write_text(json.dumps(record))

    def load(config):
        raise UserError("loaded")

    monkeypatch.setattr("drafttrain.commands.trim.load", load)
    extra = [str(copy[1] / "tiny" / "data" / "train") if word == "STORE" else word for word in extra]
    assert main(["trim", *flags(copy), *extra]) == 2
    assert (words or "error: loaded") in capsys.readouterr().err


def test_without_a_drafter_the_stage_is_named(copy, capsys):
    shutil.rmtree(copy[1] / "tiny" / "checkpoints")
    assert main(["trim", *flags(copy), "--size", "64"]) == 2
    assert "run train first" in capsys.readouterr().err


def test_a_killed_trim_leaves_no_run_and_the_next_one_works(copy, monkeypatch):
    rename = os.replace

    def killed(source, place):
        if Path(place).name == "tiny-64":  # all is written, the last step is missing
            raise KeyboardInterrupt
        rename(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert main(["trim", *flags(copy), "--size", "64"]) == 130
    assert sorted(path.name for path in copy[1].iterdir()) == [".tiny-64.tmp", "tiny"]
    assert main(["trim", *flags(copy), "--size", "64"]) == 0
    assert sorted(path.name for path in copy[1].iterdir()) == ["tiny", "tiny-64"]
