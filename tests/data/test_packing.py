"""The row plan: every chat once an epoch, rows never too long, the same plan in every process."""

import numpy as np
import pytest
import torch

from drafttrain.data.packing import Chats, RowPlan, pack, read_chats
from drafttrain.data.shards import Chat
from drafttrain.errors import UserError

LENGTHS = [7, 3, 12, 5, 5, 9, 2, 16, 4, 11, 6, 6, 3, 8]


class ListStore:
    """Chats in memory with the two things that reading them needs."""

    def __init__(self, masks):
        self.masks = [torch.tensor(mask, dtype=torch.bool) for mask in masks]

    def __len__(self):
        return len(self.masks)

    def chat(self, index, features=False):
        mask = self.masks[index]
        return Chat(str(index), torch.arange(len(mask)), mask)


def chats_of(lengths) -> Chats:
    return Chats(np.arange(len(lengths)), np.asarray(lengths), 0, 0, 0, 0)


def test_every_chat_is_in_one_row_and_no_row_overflows():
    rows = pack(LENGTHS, room=16, open_rows=3)
    assert sorted(item for row in rows for item in row) == list(range(len(LENGTHS)))
    assert max(sum(LENGTHS[item] for item in row) for row in rows) <= 16


def test_a_chat_goes_back_into_an_open_row_that_has_room():
    assert pack([10, 10, 6, 6], room=16) == [[0, 2], [1, 3]]
    assert pack([10, 10, 6, 6], room=16, open_rows=1) == [[0], [1, 2], [3]]


def test_packing_wastes_little_where_chats_are_several_to_a_row():
    lengths = np.random.default_rng(0).integers(20, 200, 1000)
    rows = pack(lengths.tolist(), room=512)
    assert lengths.sum() / (len(rows) * 512) > 0.95


def test_an_epoch_holds_every_chat_once_and_epochs_differ():
    plan = RowPlan(chats_of(LENGTHS), length=16, seed=3)
    orders = []
    for epoch in range(3):
        order = np.concatenate(plan.epoch(epoch)).tolist()
        assert sorted(order) == list(range(len(LENGTHS)))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


def test_rows_run_on_across_epochs_without_a_gap():
    plan = RowPlan(chats_of(LENGTHS), length=16, seed=3)
    epochs = [row.tolist() for epoch in range(3) for row in plan.epoch(epoch)]
    assert [plan[g].tolist() for g in range(len(epochs))] == epochs
    assert plan.find(len(plan.epoch(0))) == (1, 0)


def test_a_row_is_the_same_whoever_asks_first():
    walked, jumped = (RowPlan(chats_of(LENGTHS), length=16, seed=3) for _ in range(2))
    rows = [walked[g].tolist() for g in range(40)]
    assert jumped[39].tolist() == rows[39]
    assert jumped[0].tolist() == rows[0]
    other = RowPlan(chats_of(LENGTHS), length=16, seed=4)
    assert [other[g].tolist() for g in range(40)] != rows


def test_what_is_cut_and_left_out_is_counted():
    masks = [
        [0, 0, 1, 1, 1],  # fits
        [0, 1, 1, 1, 1, 1, 0, 1],  # 3 tokens behind the cut, 2 of them supervised
        [0, 0, 0, 0, 0, 1, 1],  # supervised tokens only behind the cut
        [0, 1, 0, 1, 0],  # no two neighbours: no draft could be scored
    ]
    chats = read_chats(ListStore(masks), limit=5)
    assert chats.which_N.tolist() == [0, 1] and chats.length_N.tolist() == [5, 5]
    assert (chats.left_out, chats.cut, chats.cut_tokens, chats.cut_supervised) == (2, 2, 5, 4)


def test_no_supervised_token_at_all_is_an_error():
    with pytest.raises(UserError, match="no supervised tokens"):
        read_chats(ListStore([[0, 0, 0], [0, 1, 0]]), limit=8)
