"""The window stream: nothing depends on how a window is shared out, and counts come before the window runs."""

import multiprocessing
import os
import time
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from tiny_run import ragged_chats, with_features, write_store
from torch.utils.data._utils.pin_memory import pin_memory

from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.stream import DataConfig, MicroBatch, Share, WindowStream, make_loader
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout, chain_visibility
from drafttrain.losses import Distillation
from drafttrain.tasks.speed_config import SpeedConfig
from drafttrain.tasks.train import _loader

LENGTH, DEPTH, TAPS = 48, 3, (0, 2, 3)
ALONE = Share()
SHARES = {"1x8": (1, 8, 1), "8x1": (8, 1, 1), "1 micro-batch of 8": (1, 1, 8), "2x2x2": (2, 2, 2)}


@pytest.fixture(scope="module")
def speakable(tiny_llama):
    """A draft vocabulary that misses a tenth of the tokens."""
    return torch.arange(tiny_llama.vocab) % 10 != 4


@pytest.fixture(scope="module")
def store(tiny_llama, tmp_path_factory):
    chats = with_features(tiny_llama, ragged_chats(23, tiny_llama.vocab), TAPS)
    return write_store(tmp_path_factory.mktemp("run") / "train", chats, tiny_llama.identity, TAPS)


def make_stream(store, speakable, share=None, start=0, **kwargs):
    plan = RowPlan(read_chats(store, LENGTH), LENGTH, seed=5)
    share = share or Share()

    def layout(sequences, numbers):
        return chain_layout(sequences, DEPTH, speakable)

    return WindowStream(store, plan, share, layout, partial(Distillation().counts, depth=DEPTH), start, **kwargs)


def rows_of(sequences):
    return [tuple(row.tolist()) for row in sequences.ids_BT]


def windows(store, speakable, world, accumulate, rows, count, start=0):
    """Per window: the set of packed rows over all ranks, and the counts summed over the ranks."""
    found = []
    streams = [iter(make_stream(store, speakable, Share(rank, world, accumulate, rows), start)) for rank in range(world)]
    for _ in range(count):
        packed, totals = [], {}
        for stream in streams:
            for batch in islice(stream, accumulate):
                packed += rows_of(batch.sequences)
                for name, value in (batch.window or {}).items():
                    totals[name] = totals.get(name, 0) + value
        found.append((sorted(packed), totals))
    return found


def test_rows_hold_whole_documents_one_after_the_other(store, speakable):
    chats = {tuple(store.chat(i).ids.tolist()): store.chat(i) for i in range(len(store))}
    stream = make_stream(store, speakable)
    seen = []
    for g in range(len(stream.plan.epoch(0))):
        sequences = stream.sequences(range(g, g + 1))
        ids, document = sequences.ids_BT[0], sequences.document_BT[0]
        filled = int((document >= 0).sum())
        assert (document[:filled].diff() >= 0).all() and (document[filled:] == -1).all()
        assert not sequences.supervised_BT[0, filled:].any()
        for number in document[:filled].unique():
            place = document == number
            chat = chats[tuple(ids[place].tolist())]
            assert torch.equal(sequences.supervised_BT[0][place], chat.supervised)
            assert torch.equal(sequences.position_BT[0][place], torch.arange(len(chat.ids)))
            seen.append(chat.key)
    assert sorted(seen) == sorted(chat.key for chat in chats.values())


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES.keys())
def test_a_window_is_the_same_however_it_is_shared_out(store, speakable, share):
    assert windows(store, speakable, *share, count=4) == windows(store, speakable, *SHARES["1x8"], count=4)


def test_another_world_goes_on_where_the_first_stopped(store, speakable):
    whole = windows(store, speakable, 1, 4, 1, count=6)
    assert windows(store, speakable, 2, 1, 2, count=4, start=8) == whole[2:]


def test_window_counts_equal_counting_every_element_by_hand(store, speakable):
    (packed, totals), *_ = windows(store, speakable, 1, 3, 2, count=1)
    assert len(packed) == 6
    stream = make_stream(store, speakable)
    wanted = {"tokens": 0, "dropped": 0} | {f"depth_{k}": 0 for k in range(1, DEPTH + 1)}
    for g in range(6):
        for index, span in stream._spans(g):
            chat = store.chat(index)
            wanted["tokens"] += span.stop - span.start
            for anchor in range(1, len(chat.ids)):
                for k in range(1, DEPTH + 1):
                    if anchor + k < len(chat.ids) and chat.supervised[anchor : anchor + k + 1].all():
                        wanted[f"depth_{k}" if speakable[chat.ids[anchor + k]] else "dropped"] += 1
    assert totals == wanted
    assert wanted["dropped"] > 0 and wanted[f"depth_{DEPTH}"] < wanted["depth_1"]


def test_only_the_first_micro_batch_of_a_window_carries_counts(store, speakable):
    batches = list(islice(make_stream(store, speakable, Share(accumulate=3)), 7))
    assert [batch.window is not None for batch in batches] == [True, False, False, True, False, False, True]
    assert [batch.last for batch in batches] == [False, False, True, False, False, True, False]


def test_a_worker_does_not_change_the_order(store, speakable):
    stream = make_stream(store, speakable, Share(accumulate=2, rows=2))
    here, there = (list(islice(make_loader(stream, workers, pin=False), 5)) for workers in (0, 1))
    assert [rows_of(batch.sequences) for batch in here] == [rows_of(batch.sequences) for batch in there]
    assert [batch.window for batch in here] == [batch.window for batch in there]


def test_stored_features_lie_where_their_tokens_lie(store, speakable, tiny_llama):
    batch = next(iter(make_stream(store, speakable, Share(rows=3), features=True)))
    computed = tiny_llama.read_packed(batch.sequences, TAPS)
    real, taught = batch.sequences.document_BT >= 0, torch.zeros_like(batch.sequences.supervised_BT)
    taught.view(-1)[batch.layout.pool_M] = True
    seen = chain_visibility(batch.sequences, batch.layout.query_BQ)[batch.layout.query_BQ >= 0].view(-1, LENGTH)
    seen = torch.stack([seen[(batch.layout.query_BQ >= 0).nonzero()[:, 0] == b].any(0) for b in range(3)])
    assert torch.allclose(batch.features.taps_BTAD[seen].float(), computed.taps_BTAD[seen], rtol=2e-2, atol=1e-3)
    assert torch.allclose(batch.features.final_BTD[taught].float(), computed.final_BTD[taught], rtol=2e-2, atol=1e-3)
    assert not batch.features.final_BTD[~real].any() and not batch.features.taps_BTAD[~real].any()


def test_a_worker_reads_stored_features_before_they_are_asked_for(store, speakable, monkeypatch):
    """Two micro-batches ahead, and this process reads none."""
    read, pids = multiprocessing.Value("i", 0), multiprocessing.Array("i", 64)
    stored_features = WindowStream.stored_features

    def noted(stream, rows):
        with read.get_lock():
            pids[read.value], read.value = os.getpid(), read.value + 1
        return stored_features(stream, rows)

    monkeypatch.setattr(WindowStream, "stored_features", noted)
    stream = make_stream(store, speakable, features=True)
    batches = iter(make_loader(stream, workers=1, pin=False))
    first, until = next(batches), time.monotonic() + 10
    while read.value < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert read.value == 3 and os.getpid() not in pids[:3]
    here = next(iter(stream))
    assert torch.equal(first.features.taps_BTAD, here.features.taps_BTAD)
    assert torch.equal(first.features.final_BTD.nan_to_num(7), here.features.final_BTD.nan_to_num(7))  # NaN where none is kept


def test_every_tensor_of_a_micro_batch_is_pinned(store, speakable, monkeypatch):
    """By DataLoader's own thread, which asks the micro-batch."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x.clone())
    batch = next(iter(make_stream(store, speakable, features=True)))
    moved = pin_memory(batch)
    records = batch.sequences, batch.features, batch.layout
    held = [x for record in records for x in vars(record).values() if x is not None]
    assert {id(x) for x in pinned} == {id(x) for x in held} and len(held) > 10
    assert (
        isinstance(moved, MicroBatch) and moved.window == batch.window and (moved.micro, moved.last) == (batch.micro, batch.last)
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_training_on_a_gpu_pins(store, speakable, device):
    sections = SimpleNamespace(data=DataConfig(workers=1, features="stored"), speed=SpeedConfig())
    loader = _loader(sections, make_stream(store, speakable), torch.device(device))
    assert (loader.num_workers, loader.pin_memory) == (1, device == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_pinned_is_copied_without_waiting(store, speakable, workers):
    stream = make_stream(store, speakable, features=True)
    loader, wanted = iter(make_loader(stream, workers, pin=True)), iter(stream)
    next(loader).to("cuda")
    next(wanted)
    batch, right = next(loader), next(wanted)
    assert batch.features.taps_BTAD.is_pinned() and batch.features.final_BTD.is_pinned() and batch.layout.pool_M.is_pinned()
    torch.cuda._sleep(2_000_000_000)  # about a second, for which a copy that waits would wait
    began = time.monotonic()
    moved = batch.to("cuda")
    assert time.monotonic() - began < 0.3
    assert torch.equal(moved.features.taps_BTAD.cpu(), right.features.taps_BTAD)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"features": "cached"}, "data.features is 'cached'"),
        ({"length": 1}, "data.length is 1"),
        ({"rows": 0}, "data.rows is 0"),
        ({"workers": 2}, "data.workers is 2"),
        ({"seed": -1}, "data.seed is -1"),
    ],
)
def test_a_data_section_cannot_hold_nonsense(values, sentence):
    with pytest.raises(UserError, match=sentence):
        DataConfig(**values)
