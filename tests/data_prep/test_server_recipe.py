"""The engine in the recipe and in the stamp, and the target without its weights that a server engine needs."""

import json

import pytest
import yaml

from data_prep.config import PrepareConfig
from data_prep.engines import LocalEngine, OpenAIServer
from data_prep.sources import SelfPrompts
from data_prep.stamp import settings
from drafttrain.errors import UserError
from drafttrain.recipe import build_recipe
from drafttrain.recipe_files import Written
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_speaker, load_target


@pytest.fixture(scope="module")
def speaker(target_folders):
    return load_speaker(TargetConfig(path=str(target_folders("llama"))))


RECIPE = """
name: test
target: {path: somewhere}
prepare:
  prompts: [{class_path: SelfPrompts, init_args: {count: 8}}]
drafter: {class_path: Eagle3}
objective: {class_path: Distillation}
optimizer: {lr: 1.0e-3}
"""
SERVER = {"class_path": "OpenAIServer", "init_args": {"urls": ["http://a:8000"], "model": "m"}}


def recipe(engine=None):
    tree = yaml.safe_load(RECIPE)
    if engine is not None:
        tree["prepare"]["engine"] = engine
    return build_recipe(Written(tree=tree))


def test_the_recipe_chooses_an_engine():
    assert recipe().prepare.engine == LocalEngine()
    assert recipe("LocalEngine").prepare.engine == LocalEngine()
    built = recipe(SERVER)
    assert built.prepare.engine == OpenAIServer(["http://a:8000"], model="m")
    for each in (built, recipe()):
        assert build_recipe(Written(tree=each.plain())).prepare == each.prepare
    with pytest.raises(
        UserError, match=r"'prepare.engine.class_path' names no engine: got 'Vllm', known are LocalEngine, OpenAIServer"
    ):
        recipe("Vllm")
    with pytest.raises(UserError, match=r"'prepare.engine.init_args.urls' is missing"):
        recipe("OpenAIServer")
    with pytest.raises(UserError, match=r"'prepare.engine.class_path' is missing"):
        recipe({"init_args": {}})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"urls": []}, "at least one address"),
        ({"urls": ["a:8000"]}, "is a:8000; it must be http://"),
        ({"urls": ["http://a:port"]}, "is http://a:port; it must be http://"),
        ({"urls": ["http://[::1"]}, "is http://[::1; it must be http://"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"urls": ["http://a", "http://a/v1"]}, "different servers"),
        ({"urls": ["http://me:hidden@a"]}, "holds a user name or a password"),
        ({"api": "responses"}, "it must be completions or chat"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"attempts": 0}, "attempts is 0"),
        ({"timeout": 0.0}, "timeout is 0.0"),
        ({"api_key_env": ""}, "name of an environment variable"),
    ],
)
def test_nonsense_is_refused(options, sentence):
    with pytest.raises(UserError) as error:
        OpenAIServer(**{"urls": ["http://a"], **options})
    assert sentence in str(error.value) and "hidden" not in str(error.value)


def test_the_stamp_holds_what_decides_the_data(speaker):
    def stamp(engine_):
        return settings(PrepareConfig([SelfPrompts(3)], engine=engine_), speaker)

    one = stamp(OpenAIServer(["http://a"], model="m"))
    assert one == stamp(
        OpenAIServer(["http://b", "http://c"], model="m", concurrency=1, timeout=1.0, attempts=1, api_key_env="K")
    )
    assert one != stamp(OpenAIServer(["http://a"], model="n")) and one != stamp(OpenAIServer(["http://a"], model="m", api="chat"))
    assert one != stamp(LocalEngine()) and json.loads(json.dumps(one)) == one


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_speaker_is_the_target_without_its_weights(target_folders, name):
    config = TargetConfig(path=str(target_folders(name)), template_arguments={"some": 1})
    light, whole = load_speaker(config), load_target(config, device="cpu")
    assert light.identity == whole.identity
    for field in ("end_ids", "dtype", "layers", "hidden", "vocab", "max_positions"):
        assert getattr(light, field) == getattr(whole, field), field
    messages = [{"role": "user", "content": "what is two plus two?"}]
    assert light.render(messages) == whole.render(messages) and light.user_prefix() == whole.user_prefix()
    with pytest.raises(UserError, match="data.features to online"):
        light.check_taps((1,))


def test_a_speaker_knows_further_ends_and_needs_weights_for_its_name(target_folders, tmp_path):
    for file in target_folders("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    config = TargetConfig(path=str(tmp_path))
    assert load_speaker(config).end_ids == load_target(config, device="cpu").end_ids == (2, 7)
    (tmp_path / "generation_config.json").unlink()
    assert load_speaker(config).end_ids == load_target(config, device="cpu").end_ids == (2,)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="without weights"):
        load_speaker(config)
    with pytest.raises(UserError, match="no such folder"):
        load_speaker(TargetConfig(path="./nowhere"))
