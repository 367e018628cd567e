"""JSON files that carry their own hash: no bit of a store's records can flip and pass for another value."""

import json
import random

import pytest
import torch

from drafttrain.data.sealed import SEAL, read_sealed, write_sealed
from drafttrain.data.shards import Chat, read_record, write_shard
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.errors import UserError
from drafttrain.types import Identity

IDENTITY = Identity("p", "rev", "tok", "tpl", "{}", layers=6, hidden=4, vocab=64)


def store(folder):
    """A store of two shards of three chats."""
    for index in range(2):
        chats = [Chat(f"k{index}{i}", torch.arange(5 + i), torch.arange(5 + i) > 2) for i in range(3)]
        write_shard(folder, index, chats, {"in": 3, "kept": 3, "dropped": {}, "asked": 3, "notes": {}})
    Manifest(IDENTITY, None, None, {"in": 6, "kept": 6, "dropped": {}}, 2, 36, 18, {"temperature": 0.7}).write(folder)
    return folder


def facts(folder):
    found = TokenStore.open(folder)
    return found.manifest, found.keys, found.lengths.tolist(), [read_record(folder, index) for index in range(2)]


@pytest.mark.parametrize("name", ["manifest.json", "shard-00001.json"])
def test_any_flipped_bit_is_named_or_changes_nothing(tmp_path, name):
    path = store(tmp_path) / name
    whole, wanted, draw = path.read_bytes(), facts(tmp_path), random.Random(0)
    refused = 0
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1 << draw.randrange(8)
        path.write_bytes(broken)
        found = facts_or_error(tmp_path)
        refused += isinstance(found, str)
        if isinstance(found, str):
            assert name in found and ("damaged" in found or "format" in found)
        else:
            assert found == wanted  # white space between two values
    assert refused > 0.7 * len(whole)


def facts_or_error(folder):
    try:
        return facts(folder)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"x"', "{}", '{"format": 1}', '{"format": 1, "identity": {}}'])
def test_other_json_is_refused_by_name(tmp_path, text):
    for name in ("manifest.json", "shard-00001.json"):
        path = store(tmp_path) / name
        path.write_text(text)
        with pytest.raises(UserError, match=name):
            facts(tmp_path)
        store(tmp_path)


def test_records_of_other_lengths_than_their_tokens_are_refused(tmp_path):
    path = store(tmp_path) / "shard-00000.json"
    values = json.loads(path.read_text())
    del values[SEAL]
    path.write_text(json.dumps(values | {"keys": values["keys"][:2]}))
    with pytest.raises(UserError, match=r"shard-00000.json is damaged .2 keys of 3 chats"):
        TokenStore.open(tmp_path)


def test_order_and_spacing_do_not_matter_and_a_file_without_a_seal_is_believed(tmp_path):
    path, values = tmp_path / "x.json", {"b": [1, 2.5, None], "a": {"é": "ü"}}
    write_sealed(path, values)
    assert read_sealed(path, "it", "so") == values
    written = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(written.items())), indent=4))
    assert read_sealed(path, "it", "so") == values
    path.write_text(json.dumps(values))
    assert read_sealed(path, "it", "so") == values
    path.write_text(json.dumps(written | {"b": [1, 2.5, 0]}))
    with pytest.raises(UserError, match=r"x.json is damaged .its content is not what was written there.; so\."):
        read_sealed(path, "it", "so")
