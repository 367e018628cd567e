"""The stage of ZeRO, read from a strategy as it is written, against what Lightning makes of the same."""

import importlib.util
import json

import pytest

from drafttrain.errors import UserError
from drafttrain.tasks.speed_config import SpeedConfig, require_recordable
from drafttrain.tasks.strategy import zero_stage
from drafttrain.trainer_section import trainer_arguments

CLASS = "lightning.pytorch.strategies.DeepSpeedStrategy"
THIRD = {"zero_optimization": {"stage": 3}}
FORMS = [
    ("deepspeed", 2),
    ("deepspeed_stage_1", 1),
    ("deepspeed_stage_3_offload", 3),
    ({"class_path": CLASS}, 2),
    ({"class_path": CLASS, "init_args": None, "dict_kwargs": None}, 2),
    ({"class_path": CLASS, "init_args": {"stage": 3}}, 3),
    ({"class_path": CLASS, "init_args": {"stage": "3"}}, 3),
    ({"class_path": CLASS, "init_args": {"stage": " 3"}}, 3),
    ({"class_path": CLASS, "init_args": {"stage": "0b11"}}, 3),
    ({"class_path": CLASS, "init_args": {"stage": 3, "zero_optimization": "no"}}, 0),
    ({"class_path": CLASS, "init_args": {"config": json.dumps(THIRD)}}, 3),
    ({"class_path": CLASS, "init_args": {"config": "null", "stage": 3}}, 3),
    ({"class_path": CLASS, "dict_kwargs": {"stage": 3}}, 3),
    ({"class_path": CLASS, "init_args": {"stage": 3}, "dict_kwargs": {"stage": 1}}, 1),
    ({"class_path": CLASS, "init_args": {"stage": 3, "zero_optimization": False}}, 0),
    ({"class_path": CLASS, "init_args": {"config": THIRD}}, 3),
    ({"class_path": CLASS, "init_args": {"stage": 2}, "dict_kwargs": {"config": THIRD}}, 3),
    ({"class_path": CLASS, "init_args": {"config": {}, "stage": 3}}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("written", "stage"), FORMS)
def test_the_stage_of_a_strategy(tmp_path, written, stage):
    assert zero_stage(written) == stage
    if isinstance(written, dict) and importlib.util.find_spec("deepspeed"):
        built = trainer_arguments({"strategy": written}, tmp_path)["strategy"]
        assert zero_stage(built) == stage and built.zero_stage_3 == (stage == 3)


def test_a_file_of_deepspeeds(tmp_path):
    file = tmp_path / "third.json"
    written = {"class_path": CLASS, "init_args": {"config": str(file)}}
    assert zero_stage(written) == 2  # it is not there, which is said by whoever builds it
    file.write_text(json.dumps(THIRD))
    assert zero_stage(written) == 3
    with pytest.raises(UserError, match="ZeRO-3"):
        require_recordable(SpeedConfig(compile=True, graph_step=True), {"strategy": written})


@pytest.mark.parametrize(
    ("written", "stage"), [("deepspeed", 3), ("deepspeed_stage_1", 3), ({"class_path": CLASS, "init_args": {"stage": 1}}, 3), FORMS[-1], ("ddp", 0)]
)  # fmt: skip
def test_a_file_of_deepspeeds_that_the_environment_names(tmp_path, monkeypatch, written, stage):
    """It counts where the strategy is given none, whatever else that says."""
    file = tmp_path / "third.json"
    file.write_text(json.dumps(THIRD))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(file))
    test_the_stage_of_a_strategy(tmp_path, written, stage)


@pytest.mark.parametrize("strategy", [None, "auto", "ddp", {"class_path": "DDPStrategy", "init_args": {"stage": 3}}])
def test_what_is_no_deepspeed_divides_nothing(strategy):
    assert zero_stage(strategy) == 0


@pytest.mark.parametrize("given", ["x", []])
@pytest.mark.parametrize("name", ["init_args", "dict_kwargs"])
def test_what_are_no_arguments_is_said_of_them_and_not_of_the_class(tmp_path, name, given):
    """It ended in the sentence that no such class can be imported."""
    with pytest.raises(UserError, match=rf"'trainer.strategy.{name}' should be arguments by their names, got .*; leave it out"):
        trainer_arguments({"strategy": {"class_path": CLASS, name: given}}, tmp_path)


@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs DeepSpeed")
def test_a_file_that_is_no_configuration_is_refused_in_a_whole_sentence(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    written = {"class_path": CLASS, "init_args": {"config": str(tmp_path / "list.json")}}
    with pytest.raises(UserError, match="could not be built from .*: it does not take these arguments"):
        trainer_arguments({"strategy": written}, tmp_path)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("fsdp", "divides the weights in a way in which no drafter can be saved here: got 'fsdp'"),
        ({"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, "divides the weights in a way"),
        ({"class_path": "ModelParallelStrategy", "init_args": {}}, "divides the weights in a way"),
        ("zero2", "is no strategy of Lightning: got 'zero2', known are auto, (?!.*fsdp).*"),
        ({"init_args": {"stage": 2}}, "names no class: got {'init_args': {'stage': 2}}, wanted its class_path too"),
    ],
)
def test_a_strategy_that_cannot_be_is_answered_with_the_files_for_several_gpus(tmp_path, written, sentence):
    """FSDP ended in Lightning's own traceback, and plan let it through."""
    with pytest.raises(UserError, match=rf"^'trainer.strategy' {sentence}.*--config recipes/hardware/zero2.yaml"):
        trainer_arguments({"strategy": written}, tmp_path)


@pytest.mark.parametrize("written", ["auto", "ddp", "ddp_find_unused_parameters_true", {"class_path": "DDPStrategy"}])
def test_other_strategies_are_left_alone(tmp_path, written):
    assert trainer_arguments({"strategy": written}, tmp_path)["strategy"]
