"""`drafttrain inspect` of files whose values are anybody's: whatever a key holds, it is a fault in a sentence or none, and never an error of ours."""

import json
import math

import pytest
from drafters.test_faces import DRAFTERS, net_for

from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.export.inspect import inspect_folder
from drafttrain.export.inspect_values import tidied

ODD = (None, "", -1, 10**30, 1e99, [], {}, "x", True, [1], {"a": 1}, math.nan)


def places(found: dict, path=()):
    """Paths of all keys, those of objects within too."""
    for key, value in found.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def changed(found: dict, path: tuple, value) -> str:
    copy = json.loads(json.dumps(found))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(copy)


@pytest.mark.parametrize(("name", "asked"), [("eagle3", None), ("dspark", None), ("dflash", "speculators"), ("medusa", "native")])
def test_no_value_of_any_key_is_an_error(tiny_llama, tmp_path, name, asked):
    folder = tmp_path / "export"
    export_drafter(net_for(tiny_llama, DRAFTERS[name]), tiny_llama, folder, ExportConfig(format=asked), None)
    looked = 0
    for file in ("config.json", "drafttrain.json"):
        sound = json.loads((folder / file).read_text())
        for number, path in enumerate(places(sound)):
            for value in (ODD[number % len(ODD)], ODD[(number + 5) % len(ODD)]):
                (folder / file).write_text(changed(sound, path, value))
                found = inspect_folder(str(folder))
                assert found.lines and all(sentence.endswith(".") for sentence in found.faults)
                looked += 1
        (folder / file).write_text(json.dumps(sound))
    assert looked > 100 and not inspect_folder(str(folder)).faults
    for text in ("[" * 100_000, "null", "{"):
        (folder / "config.json").write_text(text)
        assert inspect_folder(str(folder)).faults[0].startswith("config.json ")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"vocab_size": "x"}, "c.json: vocab_size is 'x', but must be a whole number from 1 to 2,147,483,647; write what the drafter was made with."),
        ({"a": {"hidden_size": True}}, "c.json: a.hidden_size is True, but must be a whole number"),
        ({"rope_theta": math.inf}, "c.json: rope_theta is inf, but must be a number above 0"),
        ({"dflash_config": {"mask_token_id": -1}}, "c.json: dflash_config.mask_token_id is -1, but must be a whole number from 0"),
        ({"architectures": "X" * 99}, f"c.json: architectures is 'XXX{'X' * 56} ..., but must be a list of names"),
        ({"rope_parameters": [1]}, "c.json: rope_parameters is [1], but must be an object with keys"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_is_told_and_taken_out(found, sentence):
    told: list[str] = []
    taken: set[str] = set()
    kept = tidied(found, "c.json", told.append, taken)
    assert len(told) == 1 and told[0].startswith(sentence)
    assert kept == {} or list(kept.values()) == [{}]


def test_what_may_stand_there_is_left():
    sound = {
        "sliding_window": None,
        "mask_token_id": 0,
        "rope_theta": 1e4,
        "anybody": ["s"],
        "init_args": {"layers": -3},
        "model_type": "llama",
    }
    told: list[str] = []
    assert tidied(sound | {"vocab_size": None}, "c.json", told.append, set()) == sound and not told


@pytest.mark.parametrize(
    ("name", "asked", "key"),
    [
        ("eagle3 window", None, "sliding_window"),
        ("eagle3", None, "draft_vocab_size"),
        ("dflash", None, "hidden_size"),
        ("medusa", "native", "draft_vocab_size"),
    ],
)
def test_what_is_of_a_wrong_kind_is_not_called_missing_too(tiny_llama, tmp_path, name, asked, key):
    folder = tmp_path / "export"
    export_drafter(net_for(tiny_llama, DRAFTERS[name]), tiny_llama, folder, ExportConfig(format=asked), None)
    sound = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sound | {key: [7]}))
    found = inspect_folder(str(folder))
    assert [fault for fault in found.faults if f"config.json: {key} is [7], but must be" in fault]
    assert not [
        sentence for sentence in (*found.faults, *found.notes) if f"has no {key}" in sentence or f"has no '{key}'" in sentence
    ]
    (folder / "config.json").write_text(json.dumps({k: v for k, v in sound.items() if k != key}))
    assert inspect_folder(str(folder)).faults or name == "dflash"  # where it is missing, that is said
