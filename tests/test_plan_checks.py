"""What `plan` warns of and refuses, against those that would: bench, data_prep, training, an optimizer."""

import json
import re
import shutil
import sys

import pytest
import torch
from drafters.test_faces import DRAFTERS as EVERY_DRAFTER
from planning import DRAFTERS, EAGLE3, HYDRA, line, planner, refusal_of, warnings
from tiny_run import make_run, ragged_chats, start, write_store
from transformers.quantizers import quantizer_torchao

from data_prep.prompt import Prompt
from data_prep.split import hold_out
from drafttrain.commands import plan_checks
from drafttrain.commands.bench_methods import fitted
from drafttrain.commands.plan_checks import require_room
from drafttrain.data.store import TokenStore
from drafttrain.data.token_counts import count
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.errors import UserError
from drafttrain.files import human_bytes
from drafttrain.layouts import one_chat
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.optimizer import make_optimizer, token_sides
from drafttrain.validation.bench import Benchmark
from drafttrain.validation.bench_questions import Question
from drafttrain.vocab import DraftVocabulary


@pytest.fixture
def planned(tmp_path, target_folders, capsys):
    return planner(tmp_path, target_folders("llama"), capsys)


METHODS = [
    {"class_path": "Chain", "init_args": {"drafts": 4, "draw": True}}, {"class_path": "AdaptiveChain", "init_args": {"most": 4}},
    {"class_path": "Tree", "init_args": {"drafts": 4}}, {"class_path": "DrawnTree", "init_args": {"widths": [2, 1, 1, 1]}},
    {"class_path": "DrawnPaths", "init_args": {"paths": 2, "drafts": 4}}, {"class_path": "Graft", "init_args": {"drafts": 4}},
    {"class_path": "Experts", "init_args": {"drafts": 4, "drafters": ["elsewhere"]}},
]  # fmt: skip
FREE = ["Lookup", "NGram", "Recycling", {"class_path": "StaticTree", "init_args": {"depth": 9}}]
"""Ways of drafting that need no drafter, or take its depth."""


def test_methods_deeper_than_the_drafter_are_named_one_by_one(planned):
    """Against what engines are made of: `bench` builds the same proposers on a net with weights, and stops at the first."""
    quiet = {"optimizer": {"warmup_steps": 0}, "prepare": {"held_out": 3}}
    _, lines = planned(HYDRA, bench={"methods": [METHODS[0], *FREE, *METHODS[1:]]}, **quiet)
    found = warnings(lines)
    assert [int(re.match(r"warning: bench would refuse bench\.methods\[(\d+)\], ", each)[1]) for each in found] == [
        0,
        *range(5, 11),
    ]
    assert all("asks for 4 drafts in a row, but this Hydra drafts at most 3" in each for each in found)
    deeper = {**HYDRA, "init_args": {**HYDRA["init_args"], "heads": 4}}
    for drafter in (deeper, EAGLE3):  # EAGLE-3 goes as deep as it is asked to
        assert not warnings(planned(drafter, bench={"methods": [*METHODS, *FREE]}, **quiet)[1])


def test_methods_that_the_recipe_does_not_name_go_as_deep_as_the_drafter(planned, tiny_llama):
    """For `plan`, which is silent, as for `bench`, which builds them all."""
    for heads, drafts, nodes in ((1, [1, 1], 8), (3, [3, 3], 40), (9, [5, 6], 40)):
        drafter = {"class_path": "Hydra", "init_args": {"heads": heads, "prefix": True}}
        shallow = {"checkpoint": {"drafts": 1}, "validate": {"drafts": 1}}
        recipe, lines = planned(drafter, optimizer={"warmup_steps": 0}, prepare={"held_out": 3}, **shallow)
        assert not warnings(lines)
        net = recipe.drafter.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
        config = fitted(recipe.bench, net.deepest)
        Benchmark(tiny_llama, net, [Question("a", "all", ids=(1, 2))], config)
        assert [method.drafts for method in config.methods[:2]] == drafts and config.methods[1].nodes == nodes
        assert config.methods[2:] == recipe.bench.methods[2:]


def test_bench_does_refuse_what_the_warning_says(planned, tiny_llama):
    recipe, lines = planned(HYDRA, bench={"methods": METHODS[2:3]}, optimizer={"warmup_steps": 0}, prepare={"held_out": 3})
    net = recipe.drafter.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    with pytest.raises(UserError) as refused:
        Benchmark(tiny_llama, net, [Question("a", "all", ids=(1, 2))], recipe.bench)
    assert warnings(lines) == [f"warning: bench would refuse bench.methods[0], tree 4x8, 40 nodes: {refused.value}"]


@pytest.mark.parametrize(("warm_up", "steps", "said"), [(2, 2, True), (3, 2, True), (1, 2, False), (0, 1, False)])
def test_a_warm_up_that_never_ends_is_said(planned, warm_up, steps, said):
    recipe, lines = planned(
        optimizer={"warmup_steps": warm_up, "schedule": "constant"}, trainer={"max_steps": steps}, prepare={"held_out": 3}
    )
    assert [f"warmup_steps is {warm_up}, but trainer.max_steps {steps}" in each for each in warnings(lines)] == [True] * said
    assert (max(recipe.optimizer.lr_fraction(step, steps) for step in range(steps)) < 1) == said


def file_of(folder, lines: int) -> dict:
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "what is {n}"}}\n\n' for n in range(lines)))
    return {"class_path": "JsonlPrompts", "init_args": {"path": str(folder / "prompts.jsonl"), "name": "file"}}


SELF = {"class_path": "SelfPrompts", "init_args": {"count": 4}}


@pytest.mark.parametrize(
    ("lines", "held_out", "source", "said"),
    [
        (5, 8, None, None),
        (5, 9, None, "prepare.held_out is 9, but prepare.prompts gives at most 9, and some must be left to train on"),
        (5, 5, "file", None),
        (5, 6, "file", "prepare.held_out is 6, but file gives at most 5 prompts"),
        (None, 2000, None, None),  # a file that is not here
        (None, 2000, "self", "prepare.held_out is 2,000, but self gives at most 4 prompts"),
    ],
)
def test_more_held_out_prompts_than_prompts_are_said(planned, tmp_path, tiny_llama, lines, held_out, source, said):
    file = file_of(tmp_path, lines or 0)
    if lines is None:
        file["init_args"]["path"] = "elsewhere.jsonl"
    sections = {
        "prepare": {"prompts": [SELF, file], "held_out": held_out, "held_out_source": source},
        "optimizer": {"warmup_steps": 0},
    }
    recipe, printed = planned(**sections)
    found = [each for each in warnings(printed) if "held_out" in each]
    assert found == ([] if said is None else [f"warning: {said}, so data_prep would refuse; lower it or give more prompts"])
    if lines is not None:  # what data_prep says of as many prompts, all of them usable
        prompts = [Prompt(f"{name}-{n}", name, []) for name, count in (("self", 4), ("file", lines)) for n in range(count)]
        assert bool(refusal_of(lambda: hold_out(prompts, held_out, 0, source) and None)) == bool(found)
    write_store(tmp_path / "tiny" / "data" / "train", ragged_chats(20, tiny_llama.vocab), tiny_llama.identity)
    assert not warnings(planned(**sections)[1])  # they were split off


def test_no_line_of_a_file_is_read_behind_those_that_are_held_out(planned, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(plan_checks, "json_lines", lambda *_: (read.append(number) or (number, {}) for number in range(10**9)))
    assert not warnings(planned(prepare={"prompts": [file_of(tmp_path, 1)], "held_out": 7}, optimizer={"warmup_steps": 0})[1])
    assert len(read) == 8


@pytest.mark.parametrize("name", EVERY_DRAFTER)
def test_a_depth_that_no_row_has_room_for_is_refused_as_training_does(tiny_llama, name):
    """Room by the layout of one supervised text as long as a row."""
    net = EVERY_DRAFTER[name].build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    depth = net.needs.depth
    for length in range(3, depth + 5):
        learnt = net.layout(one_chat(torch.full((length,), 5), prompt_len=0)).depth_N
        assert bool(refusal_of(require_room, net, length)) == (depth not in learnt.tolist()), length


def test_plan_and_training_refuse_the_same_depth(planned, tmp_path, tiny_llama, target_folders):
    deep = {**EAGLE3, "init_args": {**EAGLE3["init_args"], "depth": 9}}
    make_run(tmp_path / "tiny", tiny_llama)
    for length, code in ((11, 0), (10, 2)):
        _, lines = planned(deep, code=code, data={"length": length, "features": "online"})
        words = f"a row of data.length {length} tokens has room for at most 8"
        assert (words in lines[-1]) == bool(code)
    with pytest.raises(UserError, match=words):
        start(tmp_path / "tiny", target_folders("llama"), drafter={"depth": 9}, data={"length": 10})


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")
@DRAFTERS
def test_muons_smaller_state_is_what_an_optimizer_holds_after_a_step(planned, tmp_path, tiny_llama, drafter):
    make_run(tmp_path / "tiny", tiny_llama)
    recipe, lines = planned(drafter, optimizer={"muon_lr": 1e-3}, data={"features": "online"})
    store = TokenStore.open(tmp_path / "tiny" / "data" / "train")
    net = recipe.drafter.build(tiny_llama, choose_vocabulary(recipe.drafter, tiny_llama, count(store))[0])
    optimizer = make_optimizer(recipe.optimizer, net, False, token_sides(net))
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = sum(x.nbytes for kept in optimizer.state.values() for x in kept.values() if torch.is_tensor(x) and x.ndim)
    trained = sum(weight.nbytes for weight in net.parameters())
    assert trained < state < 2 * trained
    assert f" + Muon and Adam {human_bytes(state)} " in line(lines, "device (cpu)")
    assert f" {human_bytes(trained + state)} to resume" in line(lines, "disk, checkpoints: ")


def test_rounded_weights_without_their_library_are_said(planned, monkeypatch):
    """A warning, since a plan may be made on another machine."""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    [said] = [each for each in warnings(planned(target={"weights": "int8"})[1]) if "torchao" in each]
    assert said.startswith("warning: on this machine training would refuse: target.weights is int8, but torchao")


TORCHAO = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}


def quantised(folder, into, method):
    """A target that says that it came so."""
    folder = shutil.copytree(folder, into)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return folder


def test_a_quantised_target_without_its_library_is_said_in_the_words_of_loading(tmp_path, capsys, target_folders, monkeypatch):
    """As transformers finds out while it loads, whether the library is there or not."""

    def lacking(*_, **__):
        raise ImportError("No module named 'torchao'")

    monkeypatch.setattr(quantizer_torchao.TorchAoHfQuantizer, "validate_environment", lacking)
    folder = quantised(target_folders("llama"), tmp_path / "packed", {"quant_method": "torchao", "quant_type": TORCHAO})
    with pytest.raises(UserError) as refused:
        load_target(TargetConfig(path=str(folder)), device="cpu")
    assert "quantised in a way that needs something this machine lacks (No module named 'torchao'); install" in str(refused.value)
    [said] = [each for each in warnings(planner(tmp_path, folder, capsys)()[1]) if "quantised" in each]
    assert said == f"warning: on this machine training would refuse: {refused.value}"


def test_what_transformers_does_not_know_to_unpack_is_said_in_the_words_of_loading(tmp_path, capsys, target_folders):
    """It would read the packed numbers as they stand (NVIDIA's ModelOpt)."""
    folder = quantised(target_folders("llama"), tmp_path / "packed", {"quant_method": "none of these"})
    with pytest.raises(UserError, match="quantised by 'none of these'") as refused:
        load_target(TargetConfig(path=str(folder)), device="cpu")
    [said] = [each for each in warnings(planner(tmp_path, folder, capsys)()[1]) if "quantised" in each]
    assert said == f"warning: on this machine training would refuse: {refused.value}"


def test_weights_that_came_quantised_are_not_rounded(tmp_path, capsys, target_folders, monkeypatch):
    """torchao itself ends in an error of its own."""
    monkeypatch.setattr("drafttrain.target.load.require_library", lambda weights: None)
    folder = quantised(target_folders("llama"), tmp_path / "packed", {"quant_method": "torchao", "quant_type": TORCHAO})
    with pytest.raises(UserError, match="target.weights is int8, but the weights of target .* came quantised") as refused:
        load_target(TargetConfig(path=str(folder), weights="int8"), device="cpu")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)  # one cause, one sentence
    lines = planner(tmp_path, folder, capsys)(code=2, target={"weights": "int8"})[1]
    assert lines[-1] == f"error: {refused.value}" and not [each for each in warnings(lines) if "torchao" in each]


def test_a_step_in_c_without_a_compiler_is_said_in_the_words_of_training(
    planned, tmp_path, tiny_llama, target_folders, monkeypatch
):
    both = {"compile": True, "cpp_wrapper": True}
    make_run(tmp_path / "tiny", tiny_llama)
    monkeypatch.setenv("CXX", sys.executable)  # is there, which is all that is asked
    assert not [each for each in warnings(planned(speed=both)[1]) if "compiler" in each or "CXX" in each]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError) as refused:
        start(tmp_path / "tiny", target_folders("llama"), speed=both)
    assert f"warning: on this machine training would refuse: {refused.value}" in warnings(planned(speed=both)[1])
    assert "no-such-compiler is not on this machine" in str(refused.value)
    alone = warnings(planned(speed={**both, "compile": False})[1])
    assert not [each for each in alone if "no-such-compiler" in each]
    assert [each for each in alone if "speed.cpp_wrapper is true, but speed.compile false" in each]


def test_chats_that_are_longer_than_the_target_reads_are_said_in_the_words_of_data_prep(planned, tmp_path, tiny_llama):
    asked = {"max_prompt": tiny_llama.max_positions, "prompts": [{"class_path": "SelfPrompts", "init_args": {"count": 4}}]}
    said = [each for each in warnings(planned(prepare=asked)[1]) if "positions of the target" in each]
    assert len(said) == 1 and "data_prep would refuse: prepare.max_prompt" in said[0]
    make_run(tmp_path / "tiny", tiny_llama)  # made already
    assert not [each for each in warnings(planned(prepare=asked)[1]) if "positions of the target" in each]


FILES = [
    {"class_path": "JsonlPrompts", "init_args": {"path": "{}/a.jsonl"}},
    {"class_path": "StorePrompts", "init_args": {"path": "{}/b"}},
    {"class_path": "DatasetPrompts", "init_args": {"path": "{}/c.parquet"}},
    {"class_path": "SelfPrompts", "init_args": {"count": 4, "topics_file": "{}/d.txt"}},
]


@pytest.mark.parametrize("source", FILES, ids=lambda source: source["class_path"])
def test_a_file_of_prompts_that_is_not_there_is_said_in_the_words_of_data_prep(planned, tmp_path, tiny_llama, source):
    """Against what data_prep asks first of every source, before any prompt is read. Until it has finished: then nobody reads the file."""
    init_args = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in source["init_args"].items()}
    sections = {
        "prepare": {"prompts": [SELF, {**source, "init_args": init_args | {"name": "file"}}]},
        "data": {"features": "online"},
    }
    recipe, lines = planned(**sections)
    with pytest.raises(UserError) as refused:
        recipe.prepare.prompts[1].content()
    assert [each for each in warnings(lines) if "on this machine" in each] == [
        f"warning: on this machine data_prep would refuse: {refused.value}"
    ]
    write_store(tmp_path / "tiny" / "data" / "train", ragged_chats(20, tiny_llama.vocab), tiny_llama.identity)
    assert not [each for each in warnings(planned(**sections)[1]) if "on this machine" in each]


def test_files_of_prompts_that_are_there_are_not_spoken_of(planned, tmp_path):
    (tmp_path / "topics.txt").write_text("rivers\n")
    (tmp_path / "rows.csv").write_text("prompt\nhello\n")
    topics = {"class_path": "SelfPrompts", "init_args": {"count": 4, "topics_file": str(tmp_path / "topics.txt")}}
    rows = {"class_path": "DatasetPrompts", "init_args": {"path": str(tmp_path / "rows.csv")}}
    hub = {"class_path": "DatasetPrompts", "init_args": {"path": "owner/name"}}
    prompts = [topics, rows, hub, file_of(tmp_path, 3)]
    assert not warnings(planned(prepare={"prompts": prompts, "held_out": 3}, optimizer={"warmup_steps": 0})[1])


def test_what_lightning_lets_pass_for_a_count_is_refused(planned):
    assert (
        "trainer.accumulate_grad_batches is null, but must be 1 or more"
        in planned(code=2, trainer={"accumulate_grad_batches": None})[1][-1]
    )


def test_a_step_that_cannot_be_recorded_is_refused_by_the_plan_too(planned):
    _, lines = planned(code=2, speed={"graph_step": True})
    assert lines[-1].startswith("error: speed.graph_step records compiled steps, but speed.compile is false")
