"""A pass over finished shards gives what the engine keeps while it answers."""

import json

import pytest
import torch
from tiny_run import ragged_chats, with_features, write_store

from data_prep.config import PrepareConfig
from data_prep.featurize import featurize
from data_prep.pipeline import prepare
from data_prep.sources import JsonlPrompts
from data_prep.team import Team
from drafttrain.data.shards import features_name, read_record
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
            left, right = getattr(found.features, name)[:-1].float(), getattr(wanted.features, name)[:-1].float()
            torch.testing.assert_close(left, right, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_pass_gives_the_features_of_each_chat_read_alone(tmp_path, any_target, dtype, monkeypatch):
    monkeypatch.setattr("data_prep.featurize.BATCH_TOKENS", 100)  # several batches, and some of one chat
    chats = ragged_chats(11, any_target.vocab, longest=120)
    write_store(tmp_path / "bare", chats, any_target.identity)
    wanted = write_store(tmp_path / "full", with_features(any_target, chats, TAPS), any_target.identity, TAPS, "bfloat16")
    store = featurize(tmp_path / "bare", any_target, TAPS, dtype, Team(), nothing)
    store.require(any_target.identity, TAPS, dtype)
    if dtype == "bfloat16":
        compare(store, wanted)
    for index in range(len(store)):
        assert not store.chat(index, features=True).features.taps_BTAD[-1].any()


def test_other_layers_replace_those_that_were_kept(tmp_path, tiny_llama):
    chats = ragged_chats(9, tiny_llama.vocab)
    write_store(tmp_path / "a", with_features(tiny_llama, chats, (1, 3)), tiny_llama.identity, (1, 3))
    wanted = write_store(tmp_path / "b", with_features(tiny_llama, chats, TAPS), tiny_llama.identity, TAPS)
    compare(featurize(tmp_path / "a", tiny_llama, TAPS, "bfloat16", Team(), nothing), wanted)


def test_a_killed_pass_goes_on_and_repeats_no_shard(tmp_path, tiny_llama, monkeypatch):
    chats = ragged_chats(9, tiny_llama.vocab)
    write_store(tmp_path / "a", chats, tiny_llama.identity)

    class Killed(Exception):
        pass

    def die(text):
        raise Killed

    with pytest.raises(Killed):
        featurize(tmp_path / "a", tiny_llama, TAPS, "bfloat16", Team(), die)  # after the first shard
    assert features_name(0) in read_record(tmp_path / "a", 0).files
    assert TokenStore.open(tmp_path / "a").manifest.taps is None  # still a whole store of tokens
    before = (tmp_path / "a" / features_name(0)).stat().st_mtime_ns
    said = []
    featurize(tmp_path / "a", tiny_llama, TAPS, "bfloat16", Team(), said.append)
    assert len(said) == 1 and (tmp_path / "a" / features_name(0)).stat().st_mtime_ns == before
    featurize(tmp_path / "a", tiny_llama, TAPS, "bfloat16", Team(), said.append)
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
        featurize(tmp_path / "a", tiny_llama, TAPS, "bfloat16", Impatient(1, 2, "s"), said.append)
    assert said == [text for text in said if "shard 2 of 2" in text] and len(said) == 1
    featurize(tmp_path / "a", tiny_llama, TAPS, "bfloat16", Impatient(0, 2, "s"), said.append)
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


def test_another_target_is_refused(tmp_path, tiny_llama, targets):
    write_store(tmp_path / "a", ragged_chats(4, tiny_llama.vocab), tiny_llama.identity)
    with pytest.raises(UserError, match="another target"):
        featurize(tmp_path / "a", targets("qwen3"), TAPS, "bfloat16", Team(), nothing)
