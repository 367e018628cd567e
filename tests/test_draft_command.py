"""--draft of validate, bench and generate: a published drafter is measured as it is, and the run's own reports stay as they are."""

import json
import shutil

import pytest
import torch
from drafters.test_measured import dflash, eagle3
from safetensors.torch import load_file
from tiny_command import flags, save_untrained, write_data, write_recipe

from drafttrain.cli import main
from drafttrain.commands.drafts import Draft
from drafttrain.options import Options
from drafttrain.recipe import load_recipe
from drafttrain.run import Run


@pytest.fixture(scope="module")
def made(target_folders, tiny_llama, tmp_path_factory):
    """(recipe file, runs folder with held-out prompts, a drafter of the run's own and a report on it)."""
    folder = tmp_path_factory.mktemp("draft-command")
    found = write_recipe(folder, target_folders("llama")), folder / "runs"
    run = folder / "runs" / "tiny"
    write_data(run, tiny_llama)
    save_untrained(run / "checkpoints" / "best", tiny_llama, {"position": {}})
    assert main(["export", *flags(found)]) == 0
    (run / "report").mkdir()
    (run / "report" / "validation.json").write_text("{}")
    return found


def untouched(made) -> bool:
    """Whether the run's own report and card are as they were."""
    run = made[1] / "tiny"
    card = (run / "export" / "README.md").read_text()
    return (
        (run / "report" / "validation.json").read_text() == "{}"
        and "Not validated yet" in card
        and not (run / "report" / "bench").exists()
    )


@pytest.mark.parametrize(("build", "layout"), [(eagle3, "EAGLE-3, the original's names"), (dflash, "DFlash")])
def test_a_published_drafter_is_validated_beside_the_run_s_own(made, tmp_path, capsys, monkeypatch, build, layout):
    """As it stands in a folder that is named relative to where one is."""
    build(tmp_path / "them-and-it")
    monkeypatch.chdir(tmp_path)
    assert main(["validate", *flags(made), "--draft", "./them-and-it"]) == 0
    out = capsys.readouterr().out
    assert f"drafting with them-and-it: {layout}, " in out
    folder = made[1] / "tiny" / "report" / "drafts" / "them-and-it"
    found = json.loads((folder / "validation.json").read_text())
    assert found["lossless"] and found["prompts"] == 4 and found["export_hash"] is None
    assert found["draft"] == f"them-and-it ({layout})" and f"them-and-it ({layout})" in (folder / "README.md").read_text()
    assert any(line.startswith("drafting with") for line in found["draft_notes"])
    assert untouched(made)


def test_a_published_drafter_is_benchmarked_and_answers(made, tmp_path, capsys):
    folder = dflash(tmp_path / "it")
    assert main(["bench", *flags(made), "--draft", str(folder)]) == 0
    (report,) = (made[1] / "tiny" / "report" / "drafts").glob("*--it/bench/bench.json")
    assert json.loads(report.read_text())["draft"] == f"{folder} (DFlash)" and untouched(made)
    capsys.readouterr()
    assert main(["generate", *flags(made), "--draft", str(folder), "--prompt", "hello", "--validate.drafts", "2"]) == 0
    assert "tau" in capsys.readouterr().out


def test_the_methods_of_bench_itself_go_as_deep_as_a_published_drafter(made, tmp_path):
    folder = dflash(tmp_path / "shallow")
    assert (
        main(
            ["bench", *flags(made), "--draft", str(folder), "--bench.max_tokens", "2", "--bench.methods", "[Chain, Tree, Lookup]"]
        )
        == 0
    )
    (report,) = (made[1] / "tiny" / "report" / "drafts").glob("*--shallow/bench/bench.json")
    (table,) = json.loads(report.read_text())["temperatures"]
    assert list(table["methods"]) == ["plain", "chain 4", "tree 4x8, 40 nodes", "lookup 5"]


def test_more_drafts_than_a_block_has_are_refused(made, tmp_path, capsys):
    assert main(["validate", *flags(made), "--draft", str(dflash(tmp_path / "it")), "--validate.drafts", "5"]) == 2
    assert "validate.drafts asks for 5 drafts in a row, but this DFlash drafts at most 4" in capsys.readouterr().err


def test_a_pickle_is_read_on_an_explicit_word_only(made, tmp_path, capsys):
    folder = eagle3(tmp_path / "it")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    command = ["generate", *flags(made), "--draft", str(folder), "--prompt", "hello"]
    assert main(command) == 2
    assert "holds its weights as a pickle (pytorch_model.bin), which is not read unless you allow it" in capsys.readouterr().err
    assert main([*command, "--checkpoint.start_pickle", "true"]) == 0


@pytest.mark.parametrize("command", ["validate", "bench", "generate"])
def test_a_drafter_that_is_not_there_is_named_before_the_target_is_loaded(made, capsys, command):
    assert main([command, *flags(made), "--draft", "/no/such/folder", *(["--prompt", "x"] if command == "generate" else [])]) == 2
    printed = capsys.readouterr()
    assert "--draft is /no/such/folder, but there is no such folder" in printed.err and "loading" not in printed.out


def test_where_reports_go(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, run = load_recipe([made[0]])[0], Run(made[1] / "tiny")

    def of(draft):
        return Draft.of(recipe, Options(run, draft=draft))

    assert of(None).report == of(run.export).report == of(run.best).report == run.report and of(None).where == "export"
    shutil.copytree(run.export, tmp_path / "owner" / "name")
    assert of((tmp_path / "owner/name").relative_to(tmp_path)).report == run.report / "drafts" / "owner--name"
    long = tmp_path / ("x" * 90) / ("y" * 90)
    shutil.copytree(run.export, long)
    assert of(long).report.name.endswith("y" * 90) and len(of(long).report.name) == 120
