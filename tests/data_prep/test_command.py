"""What `python -m data_prep` asks of the stage below it: what the recipe's drafter reads is what is kept, and what the report speaks of."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data_prep import __main__ as command
from drafttrain.data.store import TokenStore

RECIPE = """
name: r
target: {{path: {target}}}
prepare:
  prompts: [{{class_path: JsonlPrompts, init_args: {{path: {prompts}}}}}]
  held_out: 2
  max_tokens: 8
  held_out_max_tokens: 4
  max_prompt: 80
  chunk: 4
drafter: {drafter}
objective: {{class_path: Distillation}}
data: {{features: stored, length: 64, feature_dtype: float8_e4m3fn}}
optimizer: {{lr: 1.0e-3}}
"""
DRAFTERS = {
    "{class_path: Eagle3, init_args: {taps: [0, 1], draft_vocab: 100}}": ([0, 1], "taught"),
    "{class_path: Eagle, init_args: {draft_vocab: 100}}": ([], "all"),
    "{class_path: Medusa, init_args: {draft_vocab: 100}}": ([], "all"),
    "{class_path: Independent, init_args: {layers: 1, hidden: 32}}": ([], "taught"),
}


READ = {
    "Eagle3": "2 taps of the tokens that drafts see, and the final state of those that teach: ",
    "Eagle": "The final state of the tokens that teach or are seen: ",
    "Medusa": "The final state of the tokens that teach or are seen: ",
    "Independent": "The final state of the tokens that teach: ",
}


def prepared(folder: Path, target: Path, drafter: str, *flags: str) -> Path:
    """The data folder that the command makes."""
    (folder / "p.jsonl").write_text(
        "".join(f'{{"prompt": "what is {a} and {b}?"}}\n' for a in ("one", "two", "three") for b in ("dog", "fox"))
    )
    (folder / "r.yaml").write_text(RECIPE.format(target=target, prompts=folder / "p.jsonl", drafter=drafter))
    assert command.main(["--config", str(folder / "r.yaml"), "--runs", str(folder / "runs"), *flags]) == 0
    return folder / "runs" / "r" / "data"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_store_keeps_what_the_drafter_reads(tmp_path, target_folders, drafter):
    store = TokenStore.open(prepared(tmp_path, target_folders("llama"), drafter) / "train")
    taps, final = DRAFTERS[drafter]
    store.require(store.manifest.identity, taps, "float8_e4m3fn", final)
    seen = store.chat(0, features=True).features.final_BTD
    assert seen.isnan().any() == (final == "taught")


@pytest.mark.parametrize("features", ["stored", "online"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_report_speaks_of_what_the_drafter_reads(tmp_path, target_folders, drafter, features):
    """And tells its bytes before anything is stored: those of the tensors on disk where they are."""
    data = prepared(tmp_path, target_folders("llama"), drafter, "--data.features", features)
    said = (data / "report" / "README.md").read_text().split("## Stored features")[1].strip()
    [words] = [words for name, words in READ.items() if f"class_path: {name}," in drafter]
    assert said.startswith(words)
    sizes = json.loads((data / "report" / "summary.json").read_text())["feature_bytes"]
    files = list((data / "train").glob("features-*.safetensors"))
    assert bool(files) == (features == "stored")
    if files:
        assert sizes["float8_e4m3fn"] == sum(x.nbytes for file in files for x in load_file(file).values())


@pytest.mark.parametrize("start", [False, True])
def test_whose_coverage_is_told_is_said_where_the_drafter_brings_its_own_vocabulary(tmp_path, target_folders, capsys, start):
    drafter = "{class_path: Eagle3, init_args: {taps: [0, 1], draft_vocab: 100}}"
    flags = ["--checkpoint.start", str(tmp_path / "drafter")] if start else []
    prepared(tmp_path, target_folders("llama"), drafter, "--data.features", "online", *flags)
    assert ("note: a drafter that is begun from (checkpoint.start) keeps its own" in capsys.readouterr().out) == start


def test_a_recipe_is_recorded_where_it_makes_something_and_not_where_it_is_refused_or_finds_its_work_done(
    tmp_path, target_folders
):
    """An export by the recipe that was refused would look for a drafter of another target."""
    drafter = "{class_path: Eagle3, init_args: {taps: [0, 1], draft_vocab: 100}}"
    data = prepared(tmp_path, target_folders("llama"), drafter)
    flags = ["--config", str(tmp_path / "r.yaml"), "--runs", str(tmp_path / "runs")]
    files = [data.parent / "recipe.yaml", data.parent / "versions.json"]

    def leaves_them(code: int, *change: str) -> bool:
        before = [file.read_bytes() for file in files]
        assert command.main([*flags, *change]) == code
        return [file.read_bytes() for file in files] == before

    assert leaves_them(0, "--validate.drafts", "1")  # all of it is there
    assert leaves_them(2, "--prepare.seed", "5")
    assert not leaves_them(0, "--data.feature_dtype", "bfloat16")  # features are made anew
    shutil.rmtree(data)
    assert leaves_them(2, "--prepare.held_out", "99")  # refused when prompts are gathered
    assert not leaves_them(0, "--prepare.seed", "5")
