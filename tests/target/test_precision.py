"""A target with rounded matrices: as exact as its bits allow, another target to everything made with it, and never rounded where it may not be."""

import copy
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from planning import EAGLE3, line, planner
from recipe_targets import ROOT
from safetensors.torch import load_file, save_file
from tasks.test_speed import TAPS, packed
from tiny_run import logged, make_run, start
from torch import nn
from transformers import AutoConfig

from drafttrain.errors import UserError
from drafttrain.export.card import _precision
from drafttrain.files import human_bytes
from drafttrain.recipe import load_recipe
from drafttrain.target.config import TargetConfig
from drafttrain.target.fuse import TOGETHER, merge_projections
from drafttrain.target.load import _check_layers, load_target
from drafttrain.target.precision import bytes_of, revision_of, rounded_to
from drafttrain.target.quantised import require_unpacked
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.shared_target import require_no_answers
from drafttrain.tasks.speed_config import SpeedConfig

HALF_A_STEP = {"int8": 0.5 / 127, "fp8": 2**-4}
"""Largest error of an entry: of the row's largest magnitude, or of its own (3 bits behind the leading one)."""


def rounded(folder: Path, weights: str, dtype: str = "float32"):
    pytest.importorskip("torchao")
    return load_target(TargetConfig(path=str(folder), weights=weights, dtype=dtype), device="cpu")


def matrices(target) -> dict[str, nn.Linear]:
    return {name: module for name, module in target.body.layers.named_modules() if type(module) is nn.Linear}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weights", HALF_A_STEP)
def test_every_matrix_of_the_layers_is_rounded_to_a_byte_a_number(target_folders, weights, dtype):
    folder = target_folders("llama")
    plain, found = load_target(TargetConfig(path=str(folder), dtype=dtype), device="cpu"), rounded(folder, weights, dtype)
    pairs = [(module.weight.float(), matrices(found)[name].weight) for name, module in matrices(plain).items()]
    assert len(pairs) == 7 * plain.layers
    for whole, stored in pairs:
        assert stored.qdata.element_size() == 1
        error = (stored.dequantize().float() - whole).abs()
        allowed = HALF_A_STEP[weights] * (whole.abs().amax(1, keepdim=True) if weights == "int8" else whole.abs())
        bfloat16 = 2**-8 * whole.abs() if dtype == "bfloat16" else 0  # of the scales, and of the product
        assert error.max() > 0 and (error <= 1.02 * allowed + 2 * bfloat16 + 1e-3 * whole.abs().amax(1, keepdim=True)).all()
    assert torch.equal(found.head_weight, plain.head_weight) and torch.equal(found.embedding_weight, plain.embedding_weight)
    assert found.dtype == plain.dtype


@pytest.mark.parametrize("weights", HALF_A_STEP)
def test_features_are_those_of_a_plain_target_with_the_rounded_numbers(target_folders, weights):
    folder = target_folders("llama")
    plain, found = load_target(TargetConfig(path=str(folder)), device="cpu"), rounded(folder, weights)
    with torch.no_grad():
        for name, module in matrices(plain).items():
            module.weight.copy_(matrices(found)[name].weight.dequantize())
    sequences = packed(0)
    wanted, got = plain.read_packed(sequences, TAPS), found.read_packed(sequences, TAPS)
    torch.testing.assert_close(got.taps_BTAD, wanted.taps_BTAD, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got.final_BTD, wanted.final_BTD, rtol=1e-3, atol=1e-3)


def test_it_trains_and_refuses_what_was_made_with_the_target_as_it_came(tmp_path, tiny_llama, target_folders):
    folder = target_folders("llama")
    target = rounded(folder, "int8")
    assert target.identity == replace(tiny_llama.identity, revision=f"{tiny_llama.identity.revision}+int8")
    other, own = make_run(tmp_path / "other", tiny_llama), make_run(tmp_path / "own", target)
    with pytest.raises(UserError, match=r"the revision of the target's weights \(\w+ there, \w+\+int8 in the recipe\)"):
        start(other, folder, target={"weights": "int8"})
    with pytest.raises(UserError, match=r"the revision of the target's weights \(\w+\+int8 there, \w+ in the recipe\)"):
        start(own, folder)
    start(own, folder, target={"weights": "int8"})
    start(other, folder)
    losses, plain = logged(own), logged(other)
    assert len(losses) == 4 and losses == pytest.approx(plain, rel=0.1) and losses != plain


def test_an_identity_and_a_card_say_what_weights_were_rounded_to():
    assert (revision_of("ab12", None), revision_of("ab12", "fp8")) == ("ab12", "ab12+fp8")
    assert (rounded_to("ab12"), rounded_to("ab12+fp8")) == (None, "fp8")
    assert _precision({"revision": "ab12"}) == "" and "rounded to int8" in _precision({"revision": "ab12+int8"})


def test_without_the_library_one_sentence_says_what_to_install(target_folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(
        UserError, match="target.weights is int8, but torchao, .* is not installed; run `pip install -e .*torchao.*`"
    ):
        load_target(TargetConfig(path=str(target_folders("llama")), weights="int8"), device="cpu")


def test_who_else_cannot_round_says_so(tmp_path):
    with pytest.raises(UserError, match="target.weights is 'int4', but must be int8 or fp8, or null"):
        TargetConfig(path="x", weights="int4")
    served = {"class_path": "OpenAIServer", "init_args": {"urls": ["http://host:8000/v1"]}}
    recipe = yaml.safe_load((ROOT / "recipes/smollm2-135m/eagle3.yaml").read_text())
    (tmp_path / "served.yaml").write_text(yaml.safe_dump(recipe | {"prepare": recipe["prepare"] | {"engine": served}}))
    load_recipe([tmp_path / "served.yaml"])
    with pytest.raises(UserError, match="target.weights is fp8, but prepare.engine is a server"):
        load_recipe([tmp_path / "served.yaml"], [("target.weights", "fp8")])
    with pytest.raises(UserError, match="speed.shard_target is true and target.weights is int8"):
        require_no_answers(SpeedConfig(shard_target=True), CheckpointConfig(tau_prompts=0), False, "int8")


def test_plan_counts_the_bytes_that_loading_leaves(tmp_path, target_folders, tiny_llama, capsys):
    folder = target_folders("llama")
    planned, sections = planner(tmp_path, folder, capsys), {"target": {"weights": "int8"}}
    stored = {name: module.weight for name, module in matrices(rounded(folder, "int8")).items()}
    others = {weight.data_ptr(): weight.nbytes for weight in tiny_llama.model.parameters()}
    others = sum(others.values()) - sum(module.weight.nbytes for module in matrices(tiny_llama).values())
    held = others + sum(weight.qdata.nbytes + weight.scale.nbytes for weight in stored.values())
    _, lines = planned(EAGLE3, **sections)
    assert f"each process: target {human_bytes(held)} + drafter" in line(lines, "device (cpu)")
    told = float(re.search(r"target's weights ([\d.]+) kB", line(lines, "memory of a step"))[1])
    assert 0 <= told - held / 1000 < 8  # its buffers, and what torch rounds up


def test_shared_matrices_are_counted_by_their_part(tiny_llama):
    matrix_bytes = sum(module.weight.nbytes for module in matrices(tiny_llama).values())
    config = TargetConfig(path="t")
    whole = bytes_of(tiny_llama.model, config, 1)
    assert whole == sum(weight.nbytes for weight in tiny_llama.model.parameters())
    assert bytes_of(tiny_llama.model, config, 2) == whole - matrix_bytes // 2


# ---- targets that came quantised ---------------------------------------------------------------------------------------------


def test_a_target_that_came_in_fp8_is_read_with_its_scales(target_folders, tmp_path):
    """A scale for each block of 16 x 16, made here. Read as they stand the numbers would be hundreds of times too large, and a target with them says
    something as well."""
    plain = load_target(TargetConfig(path=str(target_folders("llama"))), device="cpu")
    folder = shutil.copytree(target_folders("llama"), tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        if "_proj" in name:
            rows, columns = weight.shape
            blocks = weight.float().view(rows // 16, 16, columns // 16, 16)
            scales = blocks.abs().amax((1, 3)) / 448
            stored[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    told = TargetConfig(path=str(folder))
    found = load_target(told, device="cpu")
    plain.model.config.quantization_config = method  # an outline has plain weights
    assert bytes_of(plain.model, told, 1) == sum(weight.nbytes for name, weight in stored.items() if "scale" not in name)
    for name, module in matrices(plain).items():
        error = (matrices(found)[name].weight - module.weight).abs()
        assert error.max() > 0 and (error <= HALF_A_STEP["fp8"] * module.weight.abs() + 1e-4 * module.weight.abs().max()).all()


class Packed(torch.Tensor):
    """Stands in for a library's."""


def test_packed_numbers_are_not_merged():
    """Of a type of their own, which need not know how to be put together."""

    def group(packed: bool) -> nn.Module:
        block = nn.Module()
        for name in TOGETHER[0]:
            layer = nn.Linear(4, 4, bias=False)
            data = layer.weight.data.as_subclass(Packed) if packed else layer.weight.data
            layer.weight = nn.Parameter(data, requires_grad=False)
            setattr(block, name, layer)
        return block

    assert merge_projections(group(packed=False)) == 1 and merge_projections(group(packed=True)) == 0


def copied(folder: Path, to: Path, said, change=lambda stored: None) -> str:
    """A target folder with this quantization_config and changed weights."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    stored = load_file(to / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", {"format": "pt"})
    return str(to)


@pytest.mark.parametrize("said", ["fp8", 8, False, ["fp8"], {"bits": 4}])
def test_a_config_that_does_not_say_how_weights_are_quantised_is_refused(target_folders, tmp_path, capsys, said):
    folder = copied(target_folders("llama"), tmp_path / "t", said)
    sentence = "quantization_config in its config.json is no object with a quant_method"
    with pytest.raises(UserError, match=sentence):
        load_target(TargetConfig(path=folder), device="cpu")
    assert [each for each in planner(tmp_path, folder, capsys)()[1] if sentence in each]


GROUPS = {"group_0": {"weights": {"num_bits": 8}}, "group_1": {"weights": None}}


@pytest.mark.parametrize(
    ("said", "bits"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.0", "o_proj"]}, 8),
        ({"quant_method": "gptq", "bits": 4, "modules_to_not_convert": None}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True, "llm_int8_skip_modules": ["o_proj"]}, 4),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["lm_head", "re:.*o_proj$"]}, 8),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, None),
        ({"quant_method": "torchao", "bits": "four", "config_groups": [], "modules_to_not_convert": 7}, None),
    ],
)
def test_weights_that_came_quantised_are_counted_by_their_bits(tmp_path, capsys, target_folders, tiny_llama, said, bits):
    left = {"fp8": r"layers\.0\.|o_proj", "mxfp4": "self_attn", "bitsandbytes": "o_proj", "compressed-tensors": "o_proj"}
    packed = [
        weight.numel()
        for name, weight in tiny_llama.model.named_parameters()
        if "_proj" in name and not re.search(left.get(said["quant_method"], "none"), name)
    ]
    assert packed
    whole = sum(weight.nbytes for weight in tiny_llama.model.parameters())
    held = whole if bits is None else whole - sum(packed) * (32 - bits) // 8
    lines = planner(tmp_path, copied(target_folders("llama"), tmp_path / "t", said), capsys)()[1]
    assert f"each process: target {human_bytes(held)} + drafter" in line(lines, "device (cpu)")
    step = line(lines, "memory of a step")
    told = float(re.search(r"target's weights ([\d.]+) kB", step)[1])
    assert 0 <= told - held / 1000 < 8
    assert ("counted as plain ones" in step) == (bits is None)


@pytest.mark.parametrize("said", [{}, None])
def test_a_config_that_says_nothing_of_its_weights_is_one_of_plain_weights(tiny_llama, target_folders, tmp_path, said):
    found = load_target(TargetConfig(path=copied(target_folders("llama"), tmp_path / "plain", said)), device="cpu")
    assert found.identity.revision == tiny_llama.identity.revision
    for name, module in matrices(tiny_llama).items():
        assert torch.equal(matrices(found)[name].weight, module.weight)


def test_weights_quantised_in_a_way_that_nobody_knows_are_refused(target_folders, tmp_path):
    """transformers warns of them, and reads the packed numbers as they stand."""
    path = copied(target_folders("llama"), tmp_path / "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"})
    for refuse in (
        lambda: load_target(TargetConfig(path=path), device="cpu"),
        lambda: require_unpacked(AutoConfig.from_pretrained(path), path),
    ):
        with pytest.raises(UserError, match="its weights are quantised by 'modelopt' .*, which transformers does not know"):
            refuse()


def test_weights_that_are_not_there_or_stand_beside_unknown_scales_are_refused(target_folders, tmp_path):
    """transformers reports both, draws the first at random, and reads the second as they stand."""
    name = "model.layers.0.mlp.up_proj.weight"

    def pack(stored):
        stored[name], stored[f"{name}_scale"] = (stored[name] * 100).to(torch.float8_e4m3fn), torch.tensor(0.01)

    for said, change in (
        (rf"1 of its weights are in none of its files \({name}\)", lambda stored: stored.pop(name)),
        (f"{name}_scale", pack),
    ):
        path = copied(target_folders("llama"), tmp_path / change.__name__.strip("<>"), None, change)
        with pytest.raises(UserError, match=said):
            load_target(TargetConfig(path=path), device="cpu")


@pytest.mark.parametrize("end", ["get_output_embeddings", "get_input_embeddings"])
def test_a_packed_head_or_embedding_is_refused(tiny_llama, end):
    """With a reduced draft vocabulary the first step asked such a head for some of its rows, and ended in the library's own error."""
    model = copy.deepcopy(tiny_llama.model)
    _check_layers(model, "owner/name")
    module = getattr(model, end)()
    module.weight = nn.Parameter(module.weight.data.as_subclass(Packed), requires_grad=False)
    with pytest.raises(
        UserError, match=r"of target owner/name came quantised \(Packed\), but drafters and objectives read its rows"
    ):
        _check_layers(model, "owner/name")
