"""Which chats of a store are left out together, and that counting them is counting the texts by hand."""

import pytest
import torch
from tiny_run import ragged_chats, write_store

from drafttrain import vocab
from drafttrain.data import token_counts
from drafttrain.data.shards import Chat
from drafttrain.data.token_counts import count
from drafttrain.errors import UserError


def store_of(tmp_path, target, keys):
    chats = [Chat(key, chat.ids, chat.supervised) for key, chat in zip(keys, ragged_chats(len(keys), target.vocab), strict=True)]
    return write_store(tmp_path / "train", chats, target.identity), chats


def test_answers_to_one_question_are_left_out_together(tiny_llama, tmp_path):
    keys = ["a", "b#1", "c", "a#2", "a#greedy", "c@turn1", "c@turn2", "b#1#2", "a#x"]
    store, chats = store_of(tmp_path, tiny_llama, keys)
    texts = [
        tuple(torch.cat([getattr(chats[i], name) for i in together]) for name in ("ids", "supervised"))
        for together in ((0, 3, 4), (1, 7), (2, 5, 6), (8,))
    ]
    wanted, got = vocab.count(*store.counts(), texts), count(store)
    assert torch.equal(got.places_V, wanted.places_V) and got.left_out == wanted.left_out == got.total
    alone = vocab.count(*store.counts(), [(chat.ids, chat.supervised) for chat in chats])
    assert not torch.equal(got.places_V, alone.places_V)


def test_of_many_questions_some_are_left_out_and_all_are_counted(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(token_counts, "LEFT_OUT", 5)
    store, chats = store_of(tmp_path, tiny_llama, [f"q{i}" for i in range(13)])
    seen = []
    got = count(store, visit=lambda index, chat: seen.append((index, chat.key)))
    assert seen == [(i, f"q{i}") for i in range(13)]
    assert got.total == sum(int(chat.supervised.sum()) for chat in chats)
    assert got.left_out == sum(int(chats[i].supervised.sum()) for i in (0, 3, 6, 9, 12))
    assert torch.equal(got.places_V, count(store).places_V) and int(got.places_V.sum()) == got.left_out


def test_a_store_without_chats_is_refused(tiny_llama, tmp_path):
    store, _ = store_of(tmp_path, tiny_llama, [])
    with pytest.raises(UserError, match="holds no chats, so there is nothing to learn from"):
        count(store)
