"""A pass over finished shards gives what the engine keeps while it answers."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import ragged_chats, with_features, write_store

from data_prep.config import PrepareConfig
from data_prep.featurize import Stored, featurize
from data_prep.pipeline import prepare
from data_prep.sources import JsonlPrompts
from data_prep.team import Team
from drafttrain.data.shards import features_name, read_record, tokens_name
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError

TAPS = (0, 2)


def nothing(text: str) -> None:
    pass


def compare(store: TokenStore, other: TokenStore) -> None:
    """bfloat16 has 8 bits: equal up to one of them, since a batch sums in another order."""
    for index in range(len(other)):
        found, wanted = store.chat(index, features=True), other.chat(index, features=True)
        assert torch.equal(found.ids, wanted.ids) and torch.equal(found.supervised, wanted.supervised)
        for name in ("taps_BTAD", "final_BTD"):
            left, right = getattr(found.features, name).float(), getattr(wanted.features, name).float()
            torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_pass_gives_the_features_of_each_chat_read_alone(tmp_path, any_target, dtype, monkeypatch):
    monkeypatch.setattr("data_prep.featurize.BATCH_TOKENS", 100)  # several batches, and some of one chat
    chats = ragged_chats(11, any_target.vocab, longest=120)
    write_store(tmp_path / "bare", chats, any_target.identity)
    wanted = write_store(tmp_path / "full", with_features(any_target, chats, TAPS), any_target.identity, TAPS, "bfloat16")
    store = featurize(tmp_path / "bare", any_target, Stored(TAPS, dtype, "taught"), Team(), nothing)
    store.require(any_target.identity, TAPS, dtype)
    if dtype == "bfloat16":
        compare(store, wanted)


def test_other_layers_replace_those_that_were_kept(tmp_path, tiny_llama):
    chats = ragged_chats(9, tiny_llama.vocab)
    write_store(tmp_path / "a", with_features(tiny_llama, chats, (1, 3)), tiny_llama.identity, (1, 3))
    wanted = write_store(tmp_path / "b", with_features(tiny_llama, chats, TAPS), tiny_llama.identity, TAPS)
    compare(featurize(tmp_path / "a", tiny_llama, Stored(TAPS, "bfloat16", "taught"), Team(), nothing), wanted)


def test_a_killed_pass_goes_on_and_repeats_no_shard(tmp_path, tiny_llama, monkeypatch):
    chats = ragged_chats(9, tiny_llama.vocab)
    write_store(tmp_path / "a", chats, tiny_llama.identity)

    class Killed(Exception):
        pass

    def die(text):
        raise Killed

    with pytest.raises(Killed):
        featurize(tmp_path / "a", tiny_llama, Stored(TAPS, "bfloat16", "taught"), Team(), die)  # after the first shard
    assert features_name(0) in read_record(tmp_path / "a", 0).files
    assert TokenStore.open(tmp_path / "a").manifest.taps is None  # still a whole store of tokens
    before = (tmp_path / "a" / features_name(0)).stat().st_mtime_ns
    said = []
    featurize(tmp_path / "a", tiny_llama, Stored(TAPS, "bfloat16", "taught"), Team(), said.append)
    assert len(said) == 1 and (tmp_path / "a" / features_name(0)).stat().st_mtime_ns == before
    featurize(tmp_path / "a", tiny_llama, Stored(TAPS, "bfloat16", "taught"), Team(), said.append)
    assert len(said) == 1


def test_processes_share_the_shards(tmp_path, tiny_llama):
    chats = ragged_chats(9, tiny_llama.vocab)
    write_store(tmp_path / "a", chats, tiny_llama.identity)
    helper, said = Team(1, 2, "s"), []

    class Impatient(Team):
        def wait_until(self, ready):
            if not ready():
                raise TimeoutError

    with pytest.raises(TimeoutError):  # the helper has done its shard and waits for the leader
        featurize(tmp_path / "a", tiny_llama, Stored(TAPS, "bfloat16", "taught"), Impatient(1, 2, "s"), said.append)
    assert said == [text for text in said if "shard 2 of 2" in text] and len(said) == 1
    featurize(tmp_path / "a", tiny_llama, Stored(TAPS, "bfloat16", "taught"), Impatient(0, 2, "s"), said.append)
    assert len(said) == 2 and helper.mine(1)


def test_data_prep_fills_in_features_that_the_recipe_asks_for_later(tmp_path, tiny_llama):
    """Answered without features, then asked for stored ones; then for other layers: as if they had been kept at once."""
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"name river number {i}"}) + "\n" for i in range(12)))
    path.write_text(path.read_text().replace('"prompt": ', '"messages": [{"role": "user", "content": ').replace('"}', '"}]}'))
    config = PrepareConfig([JsonlPrompts(str(path))], held_out=2, max_tokens=12, held_out_max_tokens=8, max_prompt=100, chunk=4)

    def run(folder, taps, target=tiny_llama, ask=None):
        return prepare(config, target, tmp_path / folder, taps=taps, draft_vocab=None, ask=ask, say=nothing)

    wanted = run("at once", TAPS)
    run("later", None)

    def nobody(*args):
        raise AssertionError("nothing is answered twice")

    compare(run("later", TAPS, ask=nobody), wanted)
    run("later", (1, 3), ask=nobody)
    compare(run("later", TAPS, ask=nobody), wanted)


def test_final_states_of_every_row_are_added_for_a_drafter_that_reads_them(tmp_path, tiny_llama):
    """And not thrown away again for one that does not."""
    chats = ragged_chats(9, tiny_llama.vocab)
    write_store(tmp_path / "a", with_features(tiny_llama, chats, TAPS), tiny_llama.identity, TAPS)
    said: list[str] = []
    taught, every = (Stored(TAPS, "bfloat16", final) for final in ("taught", "all"))
    store = featurize(tmp_path / "a", tiny_llama, taught, Team(), said.append)
    with pytest.raises(UserError, match="this drafter reads them"):
        store.require(tiny_llama.identity, TAPS, final="all")
    store = featurize(tmp_path / "a", tiny_llama, every, Team(), said.append)
    store.require(tiny_llama.identity, TAPS, final="all")
    assert not any(store.chat(index, features=True).features.final_BTD.isnan().any() for index in range(len(store)))
    before = len(said)
    featurize(tmp_path / "a", tiny_llama, taught, Team(), said.append)
    assert len(said) == before


def test_final_states_alone(tmp_path, tiny_llama):
    """For heads, which read no layer."""
    write_store(tmp_path / "a", ragged_chats(9, tiny_llama.vocab), tiny_llama.identity)
    store = featurize(tmp_path / "a", tiny_llama, Stored((), "float8_e4m3fn", "all"), Team(), nothing)
    store.require(tiny_llama.identity, (), "float8_e4m3fn", "all")
    assert store.manifest.taps == [] and store.chat(0, features=True).features.taps_BTAD.shape[1] == 0


def test_space_is_asked_for_to_the_byte_before_the_target_reads(tmp_path, tiny_llama, monkeypatch):
    write_store(tmp_path / "a", ragged_chats(9, tiny_llama.vocab), tiny_llama.identity)
    asked, stored = [], Stored(TAPS, "float8_e4m3fn", "taught")
    monkeypatch.setattr("data_prep.featurize.require_space", lambda folder, size, what: asked.append(size))
    featurize(tmp_path / "a", tiny_llama, stored, Team(), nothing)
    held = [load_file(tmp_path / "a" / features_name(shard)) for shard in range(2)]
    assert asked == [sum(x.nbytes for tensors in held for x in tensors.values())]
    featurize(tmp_path / "a", tiny_llama, stored, Team(), nothing)
    assert asked[1] == 0


def test_another_target_is_refused(tmp_path, tiny_llama, targets):
    write_store(tmp_path / "a", ragged_chats(4, tiny_llama.vocab), tiny_llama.identity)
    with pytest.raises(UserError, match="another target"):
        featurize(tmp_path / "a", targets("qwen3"), Stored(TAPS, "bfloat16", "taught"), Team(), nothing)


def test_a_lost_or_damaged_file_of_features_is_made_anew_and_its_answers_stay(tmp_path, tiny_llama):
    write_store(tmp_path / "a", ragged_chats(9, tiny_llama.vocab), tiny_llama.identity)
    stored, said = Stored(TAPS, "bfloat16", "taught"), []
    store = featurize(tmp_path / "a", tiny_llama, stored, Team(), said.append)
    path, tokens = tmp_path / "a" / features_name(1), tmp_path / "a" / tokens_name(1)
    whole, before = path.read_bytes(), tokens.stat().st_mtime_ns
    path.write_bytes(whole[:-2])
    with pytest.raises(
        UserError, match=r"features-00001.safetensors is damaged .*; delete .*features-00001.safetensors and run data_prep"
    ):
        featurize(tmp_path / "a", tiny_llama, stored, Team(), said.append)
    path.unlink()
    with pytest.raises(UserError, match=r"lacks features-00001.safetensors"):
        TokenStore.open(tmp_path / "a").require(tiny_llama.identity, TAPS)
    featurize(tmp_path / "a", tiny_llama, stored, Team(), said.append).require(tiny_llama.identity, TAPS)
    assert path.read_bytes() == whole and tokens.stat().st_mtime_ns == before
    assert [text.split(",")[0] for text in said] == [
        "a: features of shard 1 of 2",
        "a: features of shard 2 of 2",
        said[1].split(",")[0],
    ]
    assert len(store) == 9
