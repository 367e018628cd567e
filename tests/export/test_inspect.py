"""`drafttrain inspect`: what it says of sound folders, ours and others', of a folder that is not for the target at hand, and how it ends."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafters.test_faces import DRAFTERS, net_for, shaken
from drafters.test_measured import EAGLE3
from drafters.test_published import PUBLISHED, source, write
from drafters.test_published_blocks import PUBLISHED as PUBLISHED_BLOCKS
from safetensors.torch import save_file
from tiny import ARCHITECTURES

from drafttrain.cli import main
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.language_model import Checkpoint
from drafttrain.drafters.save import save_drafter
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.export.inspect import inspect_folder
from drafttrain.export.inspect_target import read_target
from drafttrain.export.registry import FORMATS
from drafttrain.vocab import DraftVocabulary
from export.hub_standin import HubStandin, Repo

ROOT = Path(__file__).resolve().parents[2]


def export(target, name, folder, asked=None):
    if name == "medusa":  # an engine loads it with a full vocabulary only
        net = DRAFTERS[name].build(target, DraftVocabulary.full(target.vocab)).eval()
    else:
        net = net_for(target, DRAFTERS[name])
    export_drafter(net, target, folder, ExportConfig(format=asked), None)
    return folder


def said(folder, **more) -> dict[str, str]:
    """What is printed, of several lines of one name all."""
    lines: dict[str, str] = {}
    for name, words in inspect_folder(str(folder), **more).lines:
        last = name or list(lines)[-1]
        lines[last] = "\n".join(filter(None, [lines.get(last), words]))
    return lines


# ---- sound folders -----------------------------------------------------------------------------------------------------------


def forms(target, net, folder):
    """Every form in which a drafter leaves the house: name -> folder."""
    found = {}
    for asked in ("vllm", "sglang", "speculators", "native"):
        try:
            export_drafter(net, target, folder / asked, ExportConfig(format=asked), None)
        except UserError:  # which drafter has which form is test_round_trip's business
            continue
        found[asked] = folder / asked
    save_drafter(folder / "best", net, net.config, target.identity, {})
    return found | {"checkpoint": folder / "best"}


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_what_we_write_is_sound_with_and_without_our_record(tiny_llama, target_folders, tmp_path, name):
    """Also against its target, and as a folder that anybody might have made."""
    net, sizes = net_for(tiny_llama, DRAFTERS[name]), read_target(str(target_folders("llama")))
    for folder in forms(tiny_llama, net, tmp_path).values():
        found = inspect_folder(str(folder), sizes)
        assert not found.faults and not found.notes
        lines = dict(found.lines)
        assert type(net.config).__name__ in lines["what"] and Path(tiny_llama.identity.path).name in lines["target"]
        assert lines.get("layers read", "").split(" counted")[0] == ", ".join(map(str, net.needs.taps))
        assert "256 of the target's 320 tokens" in lines["says"]
        (folder / "drafttrain.json").unlink(missing_ok=True)
        alone = inspect_folder(str(folder), sizes)
        assert not alone.faults and not alone.notes


@pytest.mark.parametrize("name", sorted(PUBLISHED | PUBLISHED_BLOCKS))
def test_what_others_publish_is_recognised_and_has_no_fault(tiny_llama, target_folders, tmp_path, name):
    config, make, layout = (PUBLISHED | PUBLISHED_BLOCKS)[name]
    fields, tensors = make(source(tiny_llama, config))
    if "num_attention_heads" in fields:  # some of these are shorter than what is published
        fields = {"max_position_embeddings": 512} | fields
    if "transformer_layer_config" in fields:
        fields["transformer_layer_config"] = {"max_position_embeddings": 512} | fields["transformer_layer_config"]
    found = inspect_folder(str(write(tmp_path, fields, tensors)), read_target(str(target_folders("llama"))))
    assert not found.faults
    lines = said(tmp_path)
    assert lines["what"] == f"{layout} ({type(config).__name__})" and "checkpoint.start" in lines["loaded by"]
    if config.draft_vocab:
        assert f"{config.draft_vocab} of the target's 320 tokens" in lines["says"]


def test_who_loads_it_and_how(tiny_llama, tmp_path):
    """The engines of the registry, the method's word, the number of drafts, for one of each kind."""
    for name, words in {
        "eagle3": [
            "vLLM (0.26 and later): method eagle3, num_speculative_tokens N",
            "SGLang (0.5.23): --speculative-algorithm EAGLE3",
        ],
        "eagle1": ["SGLang (0.5.23): --speculative-algorithm EAGLE,"],
        "p-eagle": ["vLLM (0.26 and later): method eagle3, num_speculative_tokens 5, parallel_drafting true"],
        "dflash": ["method dflash, num_speculative_tokens 4"],
        "dspark": ["method dspark, num_speculative_tokens 5"],
        "medusa": ["vLLM (up to 0.26: Medusa was removed later): method medusa, num_speculative_tokens 4"],
        "hydra": [],
    }.items():
        folder = export(tiny_llama, name, tmp_path / name)
        loaded = said(folder)["loaded by"].splitlines()
        made = json.loads((folder / "drafttrain.json").read_text())
        assert len(loaded) == len(FORMATS[made["format"]].engines) + 1 and loaded[-1].startswith("drafttrain: validate")
        assert all(any(line.startswith(word) or word in line for line in loaded) for word in words), (name, loaded)


def test_a_block_drafter_tells_its_layout(tiny_llama, tmp_path):
    assert said(export(tiny_llama, "dflash", tmp_path / "a"))["block"] == "5 slots, 1+N (slot 0 is the anchor); masked token 319"
    assert said(export(tiny_llama, "dspark", tmp_path / "b"))["block"].startswith("5 slots, sampled from the anchor")
    assert said(tmp_path / "a")["layers read"] == "0, 2 counted from 0 (as vLLM counts: 1, 3)"


def test_a_language_model_drafts_by_itself(target_folders):
    lines = said(target_folders("llama"))
    assert lines["what"] == "a language model of its own" and "320 tokens" in lines["says"]
    assert all(word in lines["loaded by"] for word in ("assistant_model", "method draft_model", "STANDALONE"))


def test_a_block_of_sizes_of_its_own(tmp_path):
    """Heads that do not divide the width, which Llama's own configuration refuses."""
    fields, tensors = EAGLE3 | {"num_attention_heads": 3}, {}
    shapes = {"fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (70, 32)}
    shapes |= {f"midlayer.{name}.weight": (32,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {
        f"midlayer.self_attn.{name}_proj.weight": size
        for name, size in {"q": (36, 64), "k": (12, 64), "v": (12, 64), "o": (32, 36)}.items()
    }
    shapes |= {
        f"midlayer.mlp.{name}_proj.weight": size for name, size in {"gate": (40, 32), "up": (40, 32), "down": (32, 40)}.items()
    }
    tensors = {name: torch.randn(size) for name, size in shapes.items()} | {"d2t": torch.arange(70) * 3}
    assert not inspect_folder(str(write(tmp_path, fields, tensors))).faults
    (fault,) = inspect_folder(str(write(tmp_path, fields | {"head_dim": 8}, {**tensors, "midlayer.self_attn.q_proj.weight": torch.randn(24, 64), "midlayer.self_attn.k_proj.weight": torch.randn(8, 64), "midlayer.self_attn.v_proj.weight": torch.randn(8, 64)}))).faults  # fmt: skip
    assert "o_proj.weight is [32, 36] instead of [32, 24]" in fault


# ---- others' faults ----------------------------------------------------------------------------------------------------------


def published(tiny_llama, tmp_path, name, change):
    """A published layout, changed."""
    config, make, _ = (PUBLISHED | PUBLISHED_BLOCKS)[name]
    fields, tensors = make(source(tiny_llama, config))
    fields = {"max_position_embeddings": 512} | fields
    change(fields, tensors)
    return write(tmp_path, fields, tensors)


CHANGES = {
    "eagle3": [
        (lambda c, x: x.pop("norm.weight"), ["norm.weight [32] is missing"], []),
        (lambda c, x: c.pop("max_position_embeddings"), ["max_position_embeddings is missing"], []),
        (lambda c, x: c.update(draft_vocab_size=100), ["draft_vocab_size is 100, but the head has 200 rows"], []),
        (lambda c, x: c.update(architectures=["LlamaForCausalLMEagle"]), ["those of a drafter of class Eagle3"], []),
        (lambda c, x: c.update(architectures=["LlamaForCausalLM"]), [], []),  # vLLM puts the method's word before it
        (lambda c, x: c.update(pard_token=319), ["mask_hidden is missing"], []),
        (lambda c, x: c.update(rope_theta=500000.0), [], ["RoPE is said in rope_theta alone"]),
        (lambda c, x: c.pop("eagle_config"), [], ["so SGLang takes layers 2, n//2 and n-3"]),
        (lambda c, x: c.update(norm_before_residual=True), [], ["drafttrain cannot go on training it: norm_before_residual is true"]),
        (lambda c, x: x.update({"a": torch.ones(2)}), ["a is not a tensor of this kind"], []),
        (lambda c, x: x.update({"fc.weight": x["fc.weight"][:, :64]}), ["it reads 2 layers, and config.json names 3"], []),
        (lambda c, x: x.update({"midlayer.mlp.up_proj.weight": torch.zeros(48, 32)}), [], ["up_proj.weight is nothing but zeros, as before training"]),
        (lambda c, x: x.update({n: torch.ones(32) for n in x if "norm" in n}), [], ["every weight of its norms is exactly 1"]),
    ],
    "eagle3 full": [
        (lambda c, x: x.update(d2t=torch.zeros(320, dtype=torch.int64)), [], ["d2t is there, but the head has all 320"]),
        (lambda c, x: x.update(d2t=torch.ones(320, dtype=torch.int64)), ["d2t is there, but the head has all 320"], []),
    ],
    "z-lab dflash": [
        (lambda c, x: c["dflash_config"].pop("mask_token_id"), ["mask_token_id is missing"], []),
        (lambda c, x: c["dflash_config"].update(sample_from_anchor=True), ["but DFlash is 1+N only"], []),
        (lambda c, x: c["dflash_config"].update(target_layer_ids=[2, 0]), ["names the layers [2, 0]"], []),
        (lambda c, x: c.pop("block_size"), ["block_size is missing"], []),
        (lambda c, x: x.pop("layers.0.self_attn.k_norm.weight"), ["k_norm.weight [8] is missing"], []),
    ],
    "vllm dspark": [(lambda c, x: c.update(dspark_bonus_anchor=True), ["does not say sample_from_anchor true throughout"], [])],
    "medusa of vllm": [(lambda c, x: x.update(token_map=x["token_map"] + 200), ["token_map is wrong (row"], [])],
    "hydra": [(lambda c, x: x.pop("hydra_mlp.1.1.linear.weight"), ["hydra_mlp.1.1.linear.weight [32, 32] is missing"], [])],
}  # fmt: skip
LISTED = [(name, number) for name, changes in CHANGES.items() for number in range(len(changes))]


@pytest.mark.parametrize(("name", "number"), LISTED)
def test_faults_and_notes_of_others(tiny_llama, tmp_path, name, number):
    """A fault is what makes it draft rubbish; what only another reader would trip over is a note."""
    change, faults, notes = CHANGES[name][number]
    before = inspect_folder(str(published(tiny_llama, tmp_path / "before", name, lambda c, x: None)))
    found = inspect_folder(str(published(tiny_llama, tmp_path / "after", name, change)))
    told = [note for note in found.notes if note not in before.notes]
    assert all(any(word in sentence for sentence in found.faults) for word in faults), found.faults
    assert all(any(word in sentence for sentence in told) for word in notes), told
    assert len(found.faults) - len(before.faults) <= max(len(faults), 1 if number == 5 else 0) and bool(found.faults) >= bool(
        faults
    )
    if not faults:
        assert found.faults == before.faults


def test_a_folder_of_no_drafter_lists_what_it_holds(tmp_path):
    write(tmp_path, {"architectures": ["BertModel"]}, {"encoder.weight": torch.randn(2, 2)})
    (fault,) = inspect_folder(str(tmp_path)).faults
    assert "BertModel" in fault and "encoder.weight" in fault


def test_an_empty_folder(tmp_path):
    assert [fault.split(",")[0] for fault in inspect_folder(str(tmp_path)).faults] == [
        f"{tmp_path} has no config.json", "there are no weights (*.safetensors)",
    ]  # fmt: skip


def test_a_checkpoint_of_ours_that_lost_something(tiny_llama, tmp_path):
    net = net_for(tiny_llama, DRAFTERS["eagle3"])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    tensors = {name: x for name, x in net.state_dict().items() if name != "norm.weight"}
    save_file(tensors, tmp_path / "best" / "drafter.safetensors")
    faults = inspect_folder(str(tmp_path / "best")).faults
    assert len(faults) == 3 and "is not the file that was saved" in faults[0]
    assert "d2t is missing" in faults[1] and "norm.weight [32] is missing" in faults[2]
    record = json.loads((tmp_path / "best" / "drafter.json").read_text())
    for change, words in (({"class_path": "Sparrow"}, "it is a Sparrow, which this version does not know"), ({"init_args": {"wings": 2}}, "no Eagle3 can be built")):  # fmt: skip
        (tmp_path / "best" / "drafter.json").write_text(json.dumps(record | change))
        assert any(words in fault for fault in inspect_folder(str(tmp_path / "best")).faults)
    (tmp_path / "best" / "drafter.json").write_text("{}")
    assert any("drafter.json has no class_path" in fault for fault in inspect_folder(str(tmp_path / "best")).faults)


def test_a_checkpoint_is_looked_at_without_the_model_that_it_began_as(tiny_llama, target_folders, tmp_path, monkeypatch):
    """Which may be gone, be another one by now, or lie where a stranger's folder says."""
    net = shaken(Independent(model=str(target_folders("llama"))).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)))
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    monkeypatch.setattr(Checkpoint, "open", lambda *_: pytest.fail("the model's own folder was opened"))
    found = inspect_folder(str(tmp_path / "best"))
    assert not found.faults and not found.notes and "(Independent)" in dict(found.lines)["what"]

    file = tmp_path / "best" / "drafter.json"
    record = json.loads(file.read_text())
    shape = record["own_sizes"]["shape"]
    for sizes, words in (
        (record["own_sizes"] | {"shape": shape | {"intermediate": 40}}, "down_proj.weight is .* instead of .32, 40."),
        ({"layers": 2}, "no Independent can be built from what it says of itself"),
    ):
        file.write_text(json.dumps(record | {"own_sizes": sizes}))
        assert any(re.search(words, fault) for fault in inspect_folder(str(tmp_path / "best")).faults)
    del record["own_sizes"]
    file.write_text(json.dumps(record))
    found = inspect_folder(str(tmp_path / "best"))
    assert not found.faults and "whose sizes an earlier version did not save" in found.notes[0] and len(found.notes) == 1


# ---- the target ------------------------------------------------------------------------------------------------------------------


def test_a_drafter_of_another_target(tiny_llama, tmp_path, target_folders):
    """Width, vocabulary, layers, positions and RoPE by the target's config.json alone: its weights are not there."""
    folder = export(tiny_llama, "dflash", tmp_path / "export")
    target = tmp_path / "target"
    target.mkdir()
    config = json.loads((target_folders("llama") / "config.json").read_text())
    for change, words in (
        ({}, []),
        ({"hidden_size": 64}, ["whose width is 32, but that of .* is 64"]),
        ({"vocab_size": 321}, ["whose vocabulary is 320, but that of .* is 321"]),
        ({"num_hidden_layers": 6}, [r"whose number of layers \(num_target_layers\) is 5, but that of .* is 6"]),
        ({"num_hidden_layers": 2}, ["number of layers", r"layers are \[0, 2\], but the target has layers 0 to 1"]),
        ({"max_position_embeddings": 8192}, ["max_position_embeddings is 512, but .* has 8,192"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, [r"RoPE is .*10000.*, but .* has .*500000"]),
    ):
        (target / "config.json").write_text(json.dumps(config | change))
        faults = inspect_folder(str(folder), read_target(str(target))).faults
        assert len(faults) == len(words) and all(re.search(word, " ".join(faults)) for word in words), faults


def test_the_target_of_the_folder_and_the_one_it_is_held_against_have_a_line_each(tiny_llama, target_folders, tmp_path):
    """Of a drafter whose config.json says no number of layers its own target's stand in our record."""
    folder = export(tiny_llama, "eagle3", tmp_path / "export")
    target = tmp_path / "other"
    target.mkdir()
    config = json.loads((target_folders("llama") / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    alone, beside = said(folder), said(folder, target=read_target(str(target)))
    assert "--target" not in alone and beside["target"] == alone["target"]
    assert "320 tokens, 5 layers" in beside["target"] and str(target) not in beside["target"]
    assert beside["--target"] == f"{target}: width 32, 320 tokens, 6 layers, 512 positions"


def test_every_architecture_can_be_asked(target_folders):
    for name in ARCHITECTURES:
        sizes = read_target(str(target_folders(name)))
        assert (sizes.hidden, sizes.vocab, sizes.layers, sizes.max_positions) == (32, 320, 5, 512) and "rope_theta" in sizes.rope


def test_a_target_that_is_not_there(tiny_llama, tmp_path, capsys):
    folder = export(tiny_llama, "medusa", tmp_path / "export")
    assert main(["inspect", str(folder), "--target", "/does/not/exist"]) == 2
    assert capsys.readouterr().err == (
        "error: --target is /does/not/exist, but there is no such folder; give an existing folder, a .gguf file or a Hub id (owner/name).\n"
    )


# ---- the command -----------------------------------------------------------------------------------------------------------------


def test_a_sound_folder_ends_with_0_and_a_broken_one_with_2_behind_everything(tiny_llama, tmp_path, capsys):
    folder = export(tiny_llama, "eagle3", tmp_path / "export")
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "no fault can be seen from the folder alone" in out and "loaded by" in out and "layers read  0, 1, 3" in out
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert main(["inspect", str(folder)]) == 2
    seen = capsys.readouterr()
    assert seen.out.startswith(f"{folder}:\n  what") and "loaded by" in seen.out and "no fault" not in seen.out
    assert [line[:12] for line in seen.err.splitlines()] == ["error: RoPE ", "error: max_p"]


def test_it_needs_no_trainer_and_leaves_the_folder_as_it_was(tiny_llama, tmp_path):
    folder = export(tiny_llama, "dspark", tmp_path / "export")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    program = f"import sys; from drafttrain.cli import main; code = main(['inspect', {str(folder)!r}]); sys.exit(code or 'lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_id_that_cannot_be_had(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["inspect", "nobody/nothing-of-this-name"]) == 2
    said = capsys.readouterr().err
    assert (
        "nobody/nothing-of-this-name could not be downloaded" in said and "No such folder is here" in said
    )  # a path that is mistyped
    assert main(["inspect", ""]) == 2
    assert capsys.readouterr().err == "error: the drafter is empty; give an existing folder or a Hub id (owner/name).\n"
    assert main(["inspect", "./nothing"]) == 2
    assert (
        capsys.readouterr().err
        == "error: the drafter is ./nothing, but there is no such folder; give an existing folder or a Hub id (owner/name).\n"
    )


@pytest.mark.slow
def test_a_folder_of_the_hub(tiny_llama, tmp_path):
    """Fetched by its id: our record and the index of its shards too, whatever else lies there."""
    folder = export(tiny_llama, "eagle3", tmp_path / "export")
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"training_args.bin": b"pickle"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode()
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        env.pop(name, None)
    command = [sys.executable, "-m", "drafttrain", "inspect", "me/eagle3"]
    with HubStandin({}) as hub:
        hub.repos["me/eagle3"] = Repo(private=False, files=files, large={"model.safetensors"})
        done = subprocess.run(command, env=env | {"HF_ENDPOINT": hub.endpoint}, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2 and "drafttrain's form eagle3" in done.stdout and "training_args" not in done.stdout
    assert "names gone.safetensors, which is not there" in done.stderr
    again = subprocess.run(command, env=env | {"HF_HUB_OFFLINE": "1"}, cwd=ROOT, text=True, capture_output=True)
    assert (again.returncode, again.stdout) == (2, done.stdout)


def test_a_pickle_beside_safetensors_is_named_and_left_alone(tiny_llama, tmp_path):
    folder = export(tiny_llama, "eagle3", tmp_path / "export")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    found = inspect_folder(str(folder))
    assert not found.faults and "pytorch_model.bin: a pickle beside the safetensors" in found.notes[0]
    shutil.copytree(export(tiny_llama, "hass", tmp_path / "hass", "sglang"), tmp_path / "copy")
    assert (tmp_path / "copy" / "hot_token_id.pt").exists() and not inspect_folder(str(tmp_path / "copy")).notes
