"""Stored rows are exactly those that drafts see and that teach, and a loss on them is the one on all rows, bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import ragged_chats, with_features, write_store

from drafttrain.data.features import FEATURE_DTYPES, rounded, vector_bytes
from drafttrain.data.kept_rows import FINALS, count_rows, kept_rows, wanted_final
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.data.shards import Chat, features_name, has_features, record_name, write_shard
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.data.stream import Share, WindowStream
from drafttrain.drafters.base import Needs
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout, chain_visibility, one_chat
from drafttrain.types import Features
from drafttrain.vocab import DraftVocabulary

LENGTH, DEPTH, TAPS = 34, 3, (0, 2, 3)
"""Rows are shorter than the longest chats, which are cut."""


def masks(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Ragged masks of 1 to 14 tokens: all kinds of turns, also without an answer, and with an answer at the very start."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.rand(int(torch.randint(1, 15, (), generator=g)), generator=g) < share for share in torch.rand(count, generator=g)
    ]


def test_the_chat_of_the_design_by_hand():
    """0 p, 1 p, 2 a, 3 b, 4 c, 5 eot: rows 2, 3, 4 teach; the last anchor is token 4, and its drafts see rows 0 to 3."""
    supervised = torch.tensor([0, 0, 1, 1, 1, 1]).bool()
    context, final = kept_rows(supervised, "taught")
    assert (context, final.tolist()) == (4, [2, 3, 4])
    assert kept_rows(supervised, "all")[1].tolist() == [0, 1, 2, 3, 4]
    lone, start = torch.tensor([0, 1, 0, 1]).bool(), torch.tensor([1, 1, 0, 0]).bool()
    for nothing in (lone, start, lone[:1]):  # no two neighbours; an anchor without a row before it
        assert [(c, len(f)) for c, f in (kept_rows(nothing, final) for final in FINALS)] == [(0, 0), (0, 0)]


def test_kept_rows_are_those_that_the_layout_names():
    """Against the layout of a drafter that drafts to the end of every answer, and the rows that its drafts see."""
    everything = torch.ones(50, dtype=torch.bool)
    found = 0
    for supervised in masks(200):
        T = len(supervised)
        sequences = replace(one_chat(torch.arange(T), 0), supervised_BT=supervised[None])
        layout = chain_layout(sequences, T, everything)
        drafts = layout.query_BQ[0] >= 0
        seen = chain_visibility(sequences, layout.query_BQ)[0][drafts].any(0).nonzero()[:, 0]
        context, final = kept_rows(supervised, "taught")
        assert final.tolist() == layout.pool_M.tolist() and list(range(context)) == seen.tolist()
        assert kept_rows(supervised, "all")[1].tolist() == sorted({*seen.tolist(), *layout.pool_M.tolist()})
        found += len(final)
    assert found > 200


@pytest.mark.parametrize("final", FINALS)
def test_counting_many_chats_at_once_is_counting_each(final):
    parts = masks(300, seed=1)
    first = np.cumsum([0, *map(len, parts)])
    context_C, final_C = count_rows(torch.cat(parts).numpy(), first, final)
    each = [kept_rows(part, final) for part in parts]
    assert context_C.tolist() == [context for context, _ in each] and final_C.tolist() == [len(rows) for _, rows in each]
    assert [counts.tolist() for counts in count_rows(np.empty(0, bool), np.array([0]), final)] == [[], []]


def test_who_reads_final_states_says_so():
    assert [wanted_final(Needs((), 1, final)) for final in (True, False)] == ["all", "taught"]


# ---- on disk ---------------------------------------------------------------------------------------------------------------------


def store_of(folder, chats: list[Chat], identity, taps, dtype: str, final: str) -> TokenStore:
    """A finished store of two shards, and an empty one between them."""
    folder.mkdir(parents=True)
    half = len(chats) // 2
    parts = (chats[:half], [], chats[half:])
    records = [
        write_shard(folder, index, part, {"in": len(part), "kept": len(part), "dropped": {}}, dtype, taps, final)
        for index, part in enumerate(parts)
    ]
    rows = {"in": len(chats), "kept": len(chats), "dropped": {}}
    tokens, said = (sum(getattr(record, name) for record in records) for name in ("tokens", "supervised_tokens"))
    Manifest(identity, list(taps), dtype, rows, len(parts), tokens, said, {}).write(folder)
    return TokenStore.open(folder)


def odd_chats(target) -> list[Chat]:
    """With chats that nothing can be learnt from among the others, first and last."""
    chats = ragged_chats(9, target.vocab)
    ids = torch.arange(3, 10)
    lone, first = torch.zeros(7, dtype=torch.bool), torch.arange(7) < 2
    lone[3] = True
    return [Chat("lone", ids, lone), *chats[:5], Chat("start", ids, first), *chats[5:], Chat("one", ids[:1], lone[3:4])]


@pytest.mark.parametrize("final", FINALS)
@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
@pytest.mark.parametrize("taps", [TAPS, ()])
def test_what_is_kept_comes_back_and_the_rest_is_marked(tmp_path, tiny_llama, taps, dtype, final):
    chats = with_features(tiny_llama, odd_chats(tiny_llama), taps)
    store = store_of(tmp_path / "a", chats, tiny_llama.identity, taps, dtype, final)
    for index, chat in enumerate(chats):
        found, wanted = store.chat(index, features=True).features, rounded(chat.features, dtype)
        context, rows = kept_rows(chat.supervised, final)
        assert found.taps_BTAD.shape == wanted.taps_BTAD.shape and found.final_BTD.shape == wanted.final_BTD.shape
        assert torch.equal(found.taps_BTAD[:context], wanted.taps_BTAD[:context]) and not found.taps_BTAD[context:].any()
        assert torch.equal(found.final_BTD[rows], wanted.final_BTD[rows])
        rest = torch.ones(len(chat.ids), dtype=torch.bool)
        rest[rows] = False
        assert (found.final_BTD[rest].isnan() if final == "taught" else found.final_BTD[rest] == 0).all()


@pytest.mark.parametrize("final", FINALS)
@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_bytes_are_known_before_anything_is_written(tmp_path, tiny_llama, dtype, final):
    """To the byte, but for the header of each file; and fewer than if every row were kept."""
    bare = odd_chats(tiny_llama)
    write_store(tmp_path / "bare", bare, tiny_llama.identity)
    announced = TokenStore.open(tmp_path / "bare").bytes_of_features(len(TAPS), dtype, final)
    store = store_of(tmp_path / "a", with_features(tiny_llama, bare, TAPS), tiny_llama.identity, TAPS, dtype, final)
    written = 0
    for shard in (0, 2):
        data = (store.folder / features_name(shard)).read_bytes()
        written += len(data) - 8 - int.from_bytes(data[:8], "little")
    assert announced == written == store.bytes_of_features(len(TAPS), dtype, final)
    every = sum(len(chat.ids) for chat in bare) * (len(TAPS) + 1) * vector_bytes(tiny_llama.hidden, dtype)
    assert announced < every * (0.85 if final == "taught" else 0.95)
    assert not (store.folder / features_name(1)).exists()
    assert store.bytes_of_features(len(TAPS), dtype, final, [1]) == 0


# ---- in training -----------------------------------------------------------------------------------------------------------------


DRAFTERS = {
    "eagle3": Eagle3(taps=list(TAPS), depth=DEPTH, draft_vocab=160),
    "eagle": Eagle(depth=DEPTH, noise=0.0, draft_vocab=160),
    "medusa": Medusa(heads=DEPTH, draft_vocab=160),
    "hydra++": Hydra(heads=DEPTH, prefix=True, draft_vocab=160),
}


def make_net(target, name: str = "eagle3"):
    torch.manual_seed(0)
    return DRAFTERS[name].build(target, DraftVocabulary(torch.arange(0, 320, 2), 320))


def loss_and_gradients(net, target, batch, features: Features) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Soft cross-entropy of all elements."""
    net.zero_grad()
    layout, drafted = batch.layout, net.rows(batch.sequences, features, batch.layout)
    teacher_MD = features.final_BTD.flatten(0, 1)[layout.pool_M].float()
    p_NV = target.logits(teacher_MD, net.speakable_V).softmax(-1)[layout.teacher_N]
    loss = -(p_NV * net.logits(drafted.hidden_NH, drafted.prev_N).log_softmax(-1)).sum(-1).mean()
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in net.named_parameters()}


def batches(store: TokenStore, net):
    """Every row of an epoch, two at a time, with its stored features."""
    plan = RowPlan(read_chats(store, LENGTH), LENGTH, seed=5)
    share = Share(rows=2)
    stream = WindowStream(store, plan, share, net.layout, lambda layout: {}, features=True)
    for first in range(0, len(plan.epoch(0)), 2):
        yield stream, range(first, first + 2), next(stream.window(first))


@pytest.mark.parametrize(
    ("name", "final"), [("eagle3", "taught"), ("eagle3", "all"), ("eagle", "all"), ("medusa", "all"), ("hydra++", "all")]
)
@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_stored_and_online_features_give_the_same_loss_bit_for_bit(tmp_path, tiny_llama, dtype, name, final):
    """Online: what the target computes in the packed row, rounded. Stored: the very same numbers by way of a store, less the rows that
    are not kept. Neither what stands in those rows (NaN where final states only teach; any numbers in context, which attention weighs
    with zero) nor their absence changes a bit of the loss or of a gradient."""
    net, bare = make_net(tiny_llama, name), odd_chats(tiny_llama)
    write_store(tmp_path / "bare", bare, tiny_llama.identity)
    tokens = TokenStore.open(tmp_path / "bare")
    plan = RowPlan(read_chats(tokens, LENGTH), LENGTH, seed=5)
    reader = WindowStream(tokens, plan, Share(rows=2), net.layout, lambda layout: {})
    online, chats = {}, {chat.key: with_features(tiny_llama, [chat], TAPS)[0] for chat in bare}
    for first in range(0, len(plan.epoch(0)), 2):
        rows = range(first, first + 2)
        read = tiny_llama.read_packed(reader.sequences(rows), TAPS)
        online[first] = rounded(read, dtype)
        for b, row in enumerate(rows):
            for index, span in reader._spans(row):
                if row < len(plan.epoch(0)):
                    chat, length = chats[tokens.keys[index]], span.stop - span.start
                    chat.features.taps_BTAD[:length] = read.taps_BTAD[b, span]
                    chat.features.final_BTD[:length] = read.final_BTD[b, span]
    store = store_of(tmp_path / "a", [chats[chat.key] for chat in bare], tiny_llama.identity, TAPS, dtype, final)
    assert store.keys == tokens.keys
    whole_rows = 0
    for stream, rows, batch in batches(store, net):
        if rows.stop > len(plan.epoch(0)):
            continue
        whole_rows += 2
        wanted = loss_and_gradients(net, tiny_llama, batch, online[rows.start])
        found = batch.features
        untapped, unstated = (torch.ones(batch.sequences.ids_BT.shape, dtype=torch.bool) for _ in range(2))
        for b, row in enumerate(rows):
            for index, span in stream._spans(row):
                context, kept = kept_rows(store.chat(index).supervised, final)
                untapped[b, span.start : min(span.start + context, span.stop)] = False
                unstated[b, (span.start + kept)[span.start + kept < span.stop]] = False
        g = torch.Generator().manual_seed(1)
        taps, states = (50 * torch.randn(x.shape, generator=g).bfloat16() for x in (found.taps_BTAD, found.final_BTD))
        states[:] = float("nan") if final == "taught" else states
        loud = Features(
            torch.where(untapped[..., None, None], taps, found.taps_BTAD),
            torch.where(unstated[..., None], states, found.final_BTD),
        )
        for features in (found, loud):
            loss, gradients = loss_and_gradients(net, tiny_llama, batch, features)
            assert torch.equal(loss, wanted[0]) and torch.isfinite(loss)
            assert all(torch.equal(gradients[name], wanted[1][name]) for name in gradients)
    assert whole_rows >= 4


def test_who_reads_a_final_state_that_was_not_kept_sees_nan(tmp_path, tiny_llama):
    """So a drafter that is given the wrong store by a fault of ours stops at its first step instead of learning from zeros."""
    net, chats = make_net(tiny_llama), with_features(tiny_llama, odd_chats(tiny_llama), TAPS)
    for final in FINALS:
        store = store_of(tmp_path / final, chats, tiny_llama.identity, TAPS, "bfloat16", final)
        for _, _, batch in batches(store, net):
            read = batch.features.final_BTD.gather(
                1, batch.layout.query_BQ.clamp(min=0)[..., None].expand(-1, -1, tiny_llama.hidden)
            )
            assert bool(read.isnan().any()) == (final == "taught")


# ---- other stores ----------------------------------------------------------------------------------------------------------------


def test_a_store_for_drafters_that_do_not_read_final_states_is_refused_to_one_that_does(tmp_path, tiny_llama):
    chats = with_features(tiny_llama, odd_chats(tiny_llama), TAPS)
    taught = store_of(tmp_path / "taught", chats, tiny_llama.identity, TAPS, "bfloat16", "taught")
    taught.require(tiny_llama.identity, TAPS)
    with pytest.raises(
        UserError, match=r"only where they teach, but this drafter reads them.*or give the run a data folder of its own"
    ):
        taught.require(tiny_llama.identity, TAPS, final="all")
    every = store_of(tmp_path / "all", chats, tiny_llama.identity, TAPS, "bfloat16", "all")
    for final in FINALS:
        every.require(tiny_llama.identity, TAPS, final=final)
        assert has_features(every._records[0], 0, "bfloat16", TAPS, final)
    assert not has_features(taught._records[0], 0, "bfloat16", TAPS, "all")


def test_features_of_an_earlier_version_are_refused_and_its_tokens_read(tmp_path, tiny_llama):
    chats = with_features(tiny_llama, odd_chats(tiny_llama), TAPS)
    store_of(tmp_path / "a", chats, tiny_llama.identity, TAPS, "bfloat16", "taught")
    for name in ("manifest.json", record_name(0), record_name(2)):  # as it was written: without a seal is believed
        values = json.loads((tmp_path / "a" / name).read_text())
        del values["content_sha256"]
        for facts in values.get("files", {}).values():
            facts.pop("final", None)
        (tmp_path / "a" / name).write_text(json.dumps(values | ({"format": 1} if "manifest" in name else {})))
    store = TokenStore.open(tmp_path / "a")
    store.require(tiny_llama.identity)
    assert torch.equal(store.chat(1).ids, chats[1].ids)
    with pytest.raises(UserError, match=r"features as an earlier version kept them.*run data_prep again: it keeps the answers"):
        store.require(tiny_llama.identity, TAPS)
    with pytest.raises(UserError, match=r"holds no features that can be read"):
        store.chat(1, features=True)
    (tmp_path / "a" / "manifest.json").write_text(json.dumps({"format": 7}))
    with pytest.raises(UserError, match=r"is of format 7, but this version reads 1 and 2"):
        TokenStore.open(tmp_path / "a")


def test_files_hold_nothing_else(tmp_path, tiny_llama):
    chats = with_features(tiny_llama, odd_chats(tiny_llama), TAPS)
    store = store_of(tmp_path / "a", chats, tiny_llama.identity, TAPS, "bfloat16", "taught")
    held = [load_file(store.folder / features_name(shard)) for shard in (0, 2)]
    assert {name for tensors in held for name in tensors} == {"taps", "final"}
    assert sum(len(tensors["final"]) for tensors in held) == sum(len(kept_rows(chat.supervised, "taught")[1]) for chat in chats)
