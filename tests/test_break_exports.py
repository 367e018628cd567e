"""Folders, flags and sections as no careful person gives them, each of which once ended in a traceback, in a terminal that obeyed, or in silence."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters.test_faces import DRAFTERS, net_for
from safetensors.torch import load_file, save_file
from tiny import COMMON, build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.cli import main
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.save import save_drafter
from drafttrain.drafters.warm_start import WarmStart
from drafttrain.errors import UserError, printable
from drafttrain.export import inspect_tensors
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.export.inspect import inspect_folder
from drafttrain.export.inspect_table import outline
from drafttrain.tasks.lora import BASE, _load_base, insert
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.tasks.state_weights import TrainingState
from drafttrain.vocab import DraftVocabulary

ESCAPE = "a\x1b[31m\nerror: b\udc80"


@pytest.fixture(scope="module")
def sound(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "export"
    export_drafter(net_for(tiny_llama, DRAFTERS["eagle3"]), tiny_llama, folder, ExportConfig(), None)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "export")


def ended(capsys, *words) -> str:
    """What a command that a user can mend says; one sentence a line."""
    assert main([str(word) for word in words]) == 2
    told = capsys.readouterr().err
    assert all(line.startswith("error: ") and line.endswith(".") for line in told.splitlines())
    return told


def config_with(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# ---- inspect and compare ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", [1, None, ["x"], {}, "", ".", "../model.safetensors", "/etc/passwd", "x" * 5000, "x\0", "\ud800", "a\x1b\n"]
)
def test_an_index_may_name_anything(folder, capsys, place):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": place}}))
    told = ended(capsys, "inspect", folder)
    assert "which is no name of a file in the folder" in told or "which is not there" in told
    assert "\x1b" not in told


def test_an_index_of_another_folder_is_a_fault_also_where_the_file_is_there(folder, capsys):
    shutil.copy(folder / "model.safetensors", folder.parent / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}))
    assert "looks for fc.weight in '../other.safetensors', which is no name" in ended(capsys, "inspect", folder)


@pytest.mark.parametrize("begin", ['{"a":', "["])
def test_nested_values_are_refused_before_anything_goes_through_them(folder, begin):
    deep = begin * 500 + "1" + ("}" if begin[0] == "{" else "]") * 500
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(f'{text}, "deep": {deep}}}')
    assert (
        inspect_folder(str(folder)).faults[0].startswith("config.json is not JSON (objects within objects, more than 100 deep)")
    )


def test_names_and_values_cannot_speak_to_the_terminal(folder, capsys):
    config_with(folder, architectures=[ESCAPE], torch_dtype=ESCAPE)
    tensors = load_file(str(folder / "model.safetensors"))
    save_file(tensors | {"a\x1b[2J\nb": torch.ones(1)}, str(folder / "model.safetensors"))
    (folder / "c\x1b\nd.safetensors").write_bytes(b"x")
    told = ended(capsys, "inspect", folder)
    assert "a\\x1b[31m\\nerror: b\\udc80" in told and "a\\x1b[2J\\nb" in told and "c\\x1b\\nd.safetensors" in told
    assert main(["compare", str(folder), str(folder)]) == 2
    assert "\x1b" not in told + "".join(capsys.readouterr())


def test_words_are_left_as_they_are_where_they_are_words():
    assert printable("d'été 100% – 漢字 \\n") == "d'été 100% – 漢字 \\n" and printable("\u202e\t") == "\\u202e\\t"


def test_what_json_does_not_know_is_compared_and_written_as_text(sound, folder, tmp_path, capsys):
    config_with(folder, odd=[float("nan"), ESCAPE], low=-float("inf"))
    assert main(["compare", str(folder), str(sound), "--json", str(tmp_path / "new" / "x.json")]) == 0
    told = {row["field"]: row["a"] for row in json.loads((tmp_path / "new" / "x.json").read_text())["config"]}
    assert told["odd"] == ["nan", "a\x1b[31m\nerror: b\\udc80"] and told["low"] == "-inf"


def test_a_file_for_json_that_cannot_be_is_told_before_anything_else(sound, tmp_path, capsys):
    for place in (tmp_path, sound / "config.json" / "x.json", "", "/proc/x.json"):
        assert "where no file can be written" in ended(capsys, "compare", sound, sound, "--json", place)
        assert "configuration" not in capsys.readouterr().out


def test_an_empty_target_is_not_no_target(sound, capsys):
    assert "--target" in ended(capsys, "inspect", sound, "--target", "")


@pytest.mark.parametrize("where", ["~nobody9/x", "./" + "x" * 5000, "x/" * 2500])
def test_paths_that_no_disk_has(sound, tmp_path, capsys, where):
    for words in (["inspect", where], ["inspect", sound, "--target", where], ["compare", sound, where]):
        ended(capsys, *words)
    with pytest.raises(UserError, match="nothing is there"):
        TrainingState.at(where, tmp_path, False)


def test_maps_of_one_number_and_heads_of_no_size(sound, folder):
    tensors = load_file(str(sound / "model.safetensors"))
    save_file(tensors | {"d2t": torch.tensor(1), "t2d": torch.tensor(1)}, str(folder / "model.safetensors"))
    (folder / "drafttrain.json").unlink()
    faults = inspect_folder(str(folder)).faults
    assert any(fault.startswith("d2t is a single number") for fault in faults)
    assert not any("fit together" in fault for fault in faults)


def test_numbers_are_looked_at_piece_by_piece(sound, folder, monkeypatch):
    """Faults of the last piece are seen too."""
    monkeypatch.setattr(inspect_tensors, "PIECE", 7)
    assert not inspect_folder(str(sound)).faults
    tensors = load_file(str(sound / "model.safetensors"))
    name = next(name for name in tensors if "o_proj" in name)
    tensors[name][-1, -1] = torch.nan
    save_file(tensors | {"fc.weight": torch.ones_like(tensors["fc.weight"])}, str(folder / "model.safetensors"))
    faults = " ".join(inspect_folder(str(folder)).faults)
    assert f"{name} holds 1 numbers that are not finite" in faults and "fc.weight holds one number throughout" in faults


@pytest.mark.parametrize("key", ["identity", "init_args", "facts", "class_path"])
def test_a_record_whose_part_is_null_is_damaged(tiny_llama, tmp_path, key):
    net = net_for(tiny_llama, DRAFTERS["hydra"])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    record = json.loads((tmp_path / "best" / "drafter.json").read_text())
    (tmp_path / "best" / "drafter.json").write_text(json.dumps(record | {key: None}))
    assert inspect_folder(str(tmp_path / "best")).faults == [
        f"drafter.json has no {key}, so it is damaged; train again from checkpoints/last, or restore it."
    ]


# ---- the stand-alone drafter -----------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**COMMON | {"num_hidden_layers": 1})).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_named_model_is_outlined_without_memory(model):
    """As `plan` does."""
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    target = outline({name: COMMON[name] for name in names}, layers=5)
    with torch.device("meta"):
        net = Independent(model=str(model)).build(target, DraftVocabulary.full(target.vocab))
    assert net.tokens.weight.is_meta and not net.vocabulary.ids.is_meta


@pytest.mark.parametrize("text", ["[]", "{", '{"a":' * 5000 + "1" + "}" * 5000, '{"model_type": []}', None, "folder"])
def test_a_named_model_whose_config_is_no_config(tiny_llama, model, text):
    file = model / "config.json"
    file.unlink()
    if text == "folder":
        file.mkdir()
    elif text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match="drafter.init_args.model .*config.json|do not fit together") as raised:
        Independent(model=str(model)).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    assert "delete" not in str(raised.value) and file.exists() == (text is not None)


@pytest.mark.parametrize("name", ["head_dim", "intermediate_size", "num_attention_heads"])
def test_a_named_model_of_no_size(tiny_llama, model, name):
    config_with(model, **{name: -1})
    with pytest.raises(UserError, match=f"{name} is -1, which is no size"):
        Independent(model=str(model)).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))


# ---- adapters --------------------------------------------------------------------------------------------------------------


def test_adapters_larger_than_their_matrices_are_refused(tiny_llama):
    with pytest.raises(UserError, match="lora.rank is 1,000,000, but none of the .* matrices has a rank above 32"):
        insert(net_for(tiny_llama, DRAFTERS["eagle3"]), LoraConfig(rank=1_000_000))


def test_a_base_of_another_drafter_is_refused(tiny_llama, tmp_path):
    other = net_for(tiny_llama, DRAFTERS["hydra"])
    save_drafter(tmp_path / BASE, other, other.config, tiny_llama.identity, {})
    with pytest.raises(UserError, match="lora_base/drafter.safetensors.* cannot be read .*; restore it, or delete") as raised:
        _load_base(net_for(tiny_llama, DRAFTERS["eagle3"]), tmp_path)
    assert "\n" not in str(raised.value)


# ---- shown prefixes --------------------------------------------------------------------------------------------------------


def test_training_with_shown_prefixes_may_begin_from_a_drafter_without(tiny_llama, tmp_path):
    net = net_for(tiny_llama, DRAFTERS["dflash"])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    WarmStart.open(str(tmp_path / "best"), False, replace(net.config, prefix_base=0.9), tiny_llama).require_same_net()
