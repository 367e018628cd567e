"""Token store: what is written comes back, and what was damaged or made otherwise is refused."""

import pickle
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from drafttrain.data import store as store_module
from drafttrain.data.features import FEATURE_DTYPES, decode, encode, feature_bytes, rounded, vector_bytes
from drafttrain.data.shards import Chat, ShardRecord, features_name, read_record, tokens_name, write_shard
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.errors import UserError
from drafttrain.types import Features, Identity

IDENTITY = Identity("hub/model", "rev1", "tok1", "tpl1", "{}", layers=6, hidden=4, vocab=50)
TAPS = [1, 3]


def chat(key: str, length: int, prompt: int, features: bool = True) -> Chat:
    g = torch.Generator().manual_seed(length)
    made = (
        Features(torch.randn(length, 2, 4, generator=g).bfloat16(), torch.randn(length, 4, generator=g).bfloat16())
        if features
        else None
    )
    return Chat(key, torch.randint(0, 50, (length,), generator=g), torch.arange(length) >= prompt, made)


CHATS = [[chat("a", 7, 3), chat("b", 5, 1)], [], [chat("c", 9, 8), chat("d", 1, 0), chat("e", 4, 2)]]

TAUGHT = {"a": [3, 4, 5], "b": [1, 2, 3], "c": [], "d": [], "e": [2]}
"""Rows that teach: by hand, from the lengths and prompts above."""


def write(folder, shards=CHATS, **changes) -> list[ShardRecord]:
    dtype = changes.get("feature_dtype") or "bfloat16"
    records = [
        write_shard(folder, index, chats, {"in": len(chats) + 1, "kept": len(chats), "dropped": {"why": 1}}, dtype)
        for index, chats in enumerate(shards)
    ]
    kept = sum(map(len, shards))
    values = {
        "identity": IDENTITY,
        "taps": TAPS,
        "feature_dtype": "bfloat16",
        "rows": {"in": kept + 3, "kept": kept, "dropped": {"why": 3}},
        "shards": len(shards),
        "tokens": sum(record.tokens for record in records),
        "supervised_tokens": sum(record.supervised_tokens for record in records),
        "facts": {"temperature": 0.7},
    }
    Manifest(**{**values, **changes}).write(folder)
    return records


def test_chats_come_back(tmp_path):
    write(tmp_path)
    store = TokenStore.open(tmp_path)
    expected = [c for chats in CHATS for c in chats]
    assert len(store) == 5 and store.keys == list("abcde")
    assert store.lengths.dtype == np.int64 and store.lengths.tolist() == [7, 5, 9, 1, 4]
    for index, made in enumerate(expected):
        bare, full = store.chat(index), store.chat(index, features=True)
        assert bare.key == full.key == made.key and bare.features is None
        assert bare.ids.dtype == torch.int64 and torch.equal(bare.ids, made.ids) and torch.equal(bare.supervised, made.supervised)
        for name, rows in zip(
            ("taps_BTAD", "final_BTD"), (slice(max(TAUGHT[made.key], default=0)), TAUGHT[made.key]), strict=True
        ):
            assert torch.equal(getattr(full.features, name)[rows], getattr(made.features, name)[rows])
        assert full.features.taps_BTAD.dtype == torch.bfloat16
    assert store.manifest.identity == IDENTITY and store.manifest.taps == TAPS and store.manifest.facts == {"temperature": 0.7}
    assert (store.manifest.tokens, store.manifest.supervised_tokens) == (26, 4 + 4 + 1 + 1 + 2)
    with pytest.raises(IndexError):
        store.chat(5)


def test_counts_and_requests(tmp_path):
    write(tmp_path)
    store = TokenStore.open(tmp_path)
    supervised_V, other_V = store.counts()
    plain = torch.zeros(2, 50, dtype=torch.int64)
    for made in (c for chats in CHATS for c in chats):
        for token, is_answer in zip(made.ids.tolist(), made.supervised.tolist(), strict=True):
            plain[int(is_answer), token] += 1
    assert torch.equal(supervised_V, plain[1]) and torch.equal(other_V, plain[0])
    request = store.requests(17)[1]
    assert (request.key, request.ids, request.limit) == ("b", tuple(CHATS[0][1].ids[:1].tolist()), 17)


def test_store_travels_to_workers_and_keeps_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "OPEN_FILES", 1)
    write(tmp_path)
    store = TokenStore.open(tmp_path)
    store.chat(0, features=True)
    other = pickle.loads(pickle.dumps(store))
    for index in (4, 0, 4):
        assert torch.equal(other.chat(index, features=True).ids, store.chat(index, features=True).ids)
    assert len(store._mapped) == 1


@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_bytes_of_features_are_as_announced(tmp_path, dtype):
    record = write(tmp_path, feature_dtype=dtype)[0]
    data = record.files["features-00000.safetensors"]["bytes"]
    vectors = 2 * (5 + 3) + 3 + 3  # two taps of the rows before the last that teaches, and a final state of each that does
    assert 0 <= data - vectors * vector_bytes(4, dtype) < 500  # the rest is the header


def test_float8_features_are_near_and_half_as_large(tmp_path):
    """e4m3 has 3 bits of mantissa: a value is off by at most 1/16 of itself, or by half a step at the small end."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 576, generator=g) * torch.logspace(-3, 3, 5)[:, None, None]
    x[0, 0] = 0
    stored, scale = encode(x, "float8_e4m3fn")
    found = decode(stored, scale).float()
    assert found.shape == x.shape and torch.equal(found[0, 0], x[0, 0])
    allowed = x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 * 2**-10 + x.abs() * 2**-8
    assert ((found - x).abs() <= allowed).all()
    assert feature_bytes(3, 576, "float8_e4m3fn") < 0.51 * feature_bytes(3, 576)
    features = Features(x, x[:, 0])
    once = rounded(features, "float8_e4m3fn")
    write(tmp_path, [[Chat("a", torch.arange(5), torch.ones(5, dtype=torch.bool), features)]], feature_dtype="float8_e4m3fn")
    back = TokenStore.open(tmp_path).chat(0, features=True).features
    assert torch.equal(back.taps_BTAD[:3], once.taps_BTAD[:3]) and torch.equal(back.final_BTD[1:4], once.final_BTD[1:4])


def test_unfinished_and_missing_stores_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"does not exist. Run `python -m data_prep`"):
        TokenStore.open(tmp_path / "nowhere")
    write(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"is not finished: it has no manifest.json"):
        TokenStore.open(tmp_path)


def test_half_written_shard_is_never_read(tmp_path):
    write(tmp_path)
    (tmp_path / "shard-00002.json").unlink()  # killed before the JSON: the other two files do not count
    assert read_record(tmp_path, 2) is None
    with pytest.raises(UserError, match="lacks shard 2 of 3"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize("name", ["tokens-00000.safetensors", "features-00002.safetensors"])
def test_truncated_file_is_refused_by_name(tmp_path, name):
    write(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-3])
    with pytest.raises(
        UserError, match=rf"{name} is damaged \({len(data) - 3} bytes instead of {len(data)}\); delete .* and run data_prep again"
    ):
        TokenStore.open(tmp_path)


def test_missing_tokens_are_a_damaged_shard_and_missing_features_can_be_made_anew(tmp_path):
    write(tmp_path)
    (tmp_path / features_name(2)).unlink()
    store = TokenStore.open(tmp_path)
    assert torch.equal(store.chat(4).ids, CHATS[2][2].ids) and store.chat(0, features=True).features is not None
    with pytest.raises(UserError, match=r"lacks features-00002.safetensors; run data_prep again: it keeps the answers"):
        store.require(IDENTITY, TAPS)
    with pytest.raises(UserError, match="no features that can be read"):
        store.chat(4, features=True)
    (tmp_path / tokens_name(2)).unlink()
    with pytest.raises(UserError, match="tokens-00002.safetensors is damaged .0 bytes"):
        TokenStore.open(tmp_path)


def flip_last_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_flipped_bit_is_refused_by_name(tmp_path):
    write(tmp_path)
    flip_last_byte(tmp_path / "features-00000.safetensors")
    store = TokenStore.open(tmp_path)
    assert torch.equal(store.chat(0).ids, CHATS[0][0].ids)
    with pytest.raises(
        UserError, match=r"features-00000.safetensors is damaged .its sha256.*run data_prep again: it keeps the answers"
    ):
        store.chat(1, features=True)
    flip_last_byte(tmp_path / "tokens-00002.safetensors")
    with pytest.raises(UserError, match=r"tokens-00002.safetensors is damaged .its sha256"):
        TokenStore.open(tmp_path)


def test_ledger_that_does_not_add_up_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="does not add up"):
        write(tmp_path, rows={"in": 9, "kept": 5, "dropped": {"why": 3}})
    assert not (tmp_path / "manifest.json").exists()


def test_require_names_each_difference(tmp_path):
    write(tmp_path)
    store = TokenStore.open(tmp_path)
    store.require(IDENTITY, (1, 3))
    store.require(replace(IDENTITY, path="elsewhere/same-weights"))
    for name, value in asdict(IDENTITY).items():
        if name == "path":
            continue
        other = value + 1 if isinstance(value, int) else "other"
        with pytest.raises(UserError, match=rf"\({value} there, {other} in the recipe\)"):
            store.require(replace(IDENTITY, **{name: other}))
    with pytest.raises(UserError) as error:
        store.require(replace(IDENTITY, tokenizer="t9", template="c9"))
    assert "the tokenizer (tok1 there, t9" in str(error.value) and "the chat template (tpl1 there, c9" in str(error.value)
    with pytest.raises(
        UserError,
        match=r"holds features of layers \[1, 3\], but the recipe taps \[2, 3\].*set drafter.init_args.taps to \[1, 3\], or give the run a data folder",
    ):
        store.require(IDENTITY, (2, 3))


def test_store_without_features_says_so(tmp_path):
    write(tmp_path, [[chat("a", 5, 2, features=False)]], taps=None, feature_dtype=None)
    store = TokenStore.open(tmp_path)
    store.require(IDENTITY)
    with pytest.raises(UserError, match=r"holds no features, but the recipe says data.features: stored"):
        store.require(IDENTITY, (1, 3))
    with pytest.raises(UserError, match="holds no features"):
        store.chat(0, features=True)


def test_shard_is_all_with_features_or_all_without(tmp_path):
    with pytest.raises(ValueError, match="some chats"):
        write_shard(tmp_path, 0, [chat("a", 3, 1), chat("b", 3, 1, features=False)], {"in": 2, "kept": 2, "dropped": {}})
    assert read_record(tmp_path, 0) is None
