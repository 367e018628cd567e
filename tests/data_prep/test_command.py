"""What `python -m data_prep` asks of the stage below it: what the recipe's drafter reads is what is kept."""

from pathlib import Path

import pytest

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
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_store_keeps_what_the_drafter_reads(tmp_path, target_folders, drafter):
    prompts: Path = tmp_path / "p.jsonl"
    prompts.write_text(
        "".join(f'{{"prompt": "what is {a} and {b}?"}}\n' for a in ("one", "two", "three") for b in ("dog", "fox"))
    )
    (tmp_path / "r.yaml").write_text(RECIPE.format(target=target_folders("llama"), prompts=prompts, drafter=drafter))
    assert command.main(["--config", str(tmp_path / "r.yaml"), "--runs", str(tmp_path / "runs")]) == 0
    store = TokenStore.open(tmp_path / "runs" / "r" / "data" / "train")
    taps, final = DRAFTERS[drafter]
    store.require(store.manifest.identity, taps, "float8_e4m3fn", final)
    seen = store.chat(0, features=True).features.final_BTD
    assert seen.isnan().any() == (final == "taught")
