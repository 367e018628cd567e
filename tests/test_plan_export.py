"""How large `plan` says an export will be, against the file that `export` writes."""

import pytest
import torch
from drafters.test_faces import DRAFTERS
from planning import MEDUSA, line, planner, warnings
from safetensors.torch import load_file
from tiny_run import ragged_chats, write_store

from drafttrain.commands.plan import outline
from drafttrain.commands.plan_export import exported
from drafttrain.data.token_counts import count
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.files import human_bytes
from drafttrain.vocab import DraftVocabulary

SEEN = ["eagle3", "eagle3 low-rank", "eagle1", "medusa", "medusa own heads", "hydra", "dflash", "dflash2", "dspark", "p-eagle"]
HEAD = {"class_path": "Medusa", "init_args": {"heads": 3, "draft_vocab": 200}}


def written(net, target, config, folder) -> str:
    """Bytes of the tensors that are on disk, in words; "none" and the sentence of a refusal."""
    try:
        export_drafter(net, target, folder, config, None, {})
    except UserError as error:
        return f"none: {error}"
    return human_bytes(sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_is_as_large_as_was_planned(tmp_path, targets, target_folders, capsys, architecture, reduced, dtype):
    """Exactly, wherever no value decides: of a target that scales its embeddings some formats cannot be told."""
    recipe, _ = planner(tmp_path, target_folders(architecture), capsys)()
    target, (sketch, _) = targets(architecture), outline(recipe)
    vocabulary = DraftVocabulary(torch.arange(0, 320, 2), 320) if reduced else DraftVocabulary.full(320)
    exact = 0
    for name in SEEN:
        for engine in (None, "sglang", "speculators") if dtype == "bfloat16" else (None,):
            config = ExportConfig(format=engine, base_model="owner/name", dtype=dtype)
            with torch.device("meta"):
                net = DRAFTERS[name].build(sketch, vocabulary)
            net.take_vocabulary(vocabulary)
            said, warned = exported(sketch, net.to("meta"), config)
            made = written(DRAFTERS[name].build(target, vocabulary), target, config, tmp_path / "export")
            exact += not said.startswith("at least ")
            if said == "none":
                assert warned == [f"warning: export would refuse: {made.removeprefix('none: ')}"], (name, engine)
            elif not said.startswith("at least "):
                assert (said, warned) == (made, []), (name, engine)
            else:
                assert architecture == "gemma3" and warned == []
    assert exact >= (6 if architecture == "gemma3" else 10)


@pytest.mark.parametrize("drafter", [HEAD, MEDUSA], ids=["the target's head", "heads of its own"])
def test_the_plan_of_medusa_counts_the_head_that_its_export_holds(tmp_path, target_folders, tiny_llama, capsys, drafter):
    """Once there are chats, to the token: 200 of them are said, and the head is a third of the file."""
    store = write_store(tmp_path / "tiny" / "data" / "train", ragged_chats(20, tiny_llama.vocab), tiny_llama.identity)
    recipe, lines = planner(tmp_path, target_folders("llama"), capsys)(drafter)
    net = recipe.drafter.build(tiny_llama, choose_vocabulary(recipe.drafter, tiny_llama, count(store))[0])
    made = written(net, tiny_llama, recipe.export, tmp_path / "export")
    assert line(lines, "disk, checkpoints: ").endswith(f"; export: {made}")


def test_an_export_that_would_be_refused_is_said_and_nothing_else_is(tmp_path, target_folders, capsys):
    plan = planner(tmp_path, target_folders("llama"), capsys)
    quiet = {"optimizer": {"warmup_steps": 0}, "prepare": {"held_out": 3}, "bench": {"methods": ["Lookup"]}}
    _, lines = plan(HEAD, export={"format": "sglang"}, **quiet)
    [said] = warnings(lines)
    assert said.startswith(
        "warning: export would refuse: export.format is sglang, but drafters of class Medusa cannot be written for SGLang"
    )
    assert line(lines, "disk, checkpoints: ").endswith("; export: none")
    assert not warnings(plan(HEAD, export={"format": "native"}, **quiet)[1])
