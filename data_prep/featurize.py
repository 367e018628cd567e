"""Features by one pass of the target over finished shards: for answers that a server gave, or for other layers than were kept.

The same numbers as the engine keeps while it answers, up to the order of sums. Works shard by shard: a run that is killed goes on with
the first shard that lacks them.

Shapes: B chats, T tokens, A taps, D target width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from data_prep.team import Team
from drafttrain.data.shards import Chat, ShardRecord, add_features, has_features, read_record
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.errors import UserError
from drafttrain.files import explain_full_disk, require_space
from drafttrain.target.target import Target
from drafttrain.types import Features, Sequences

BATCH_TOKENS = 16_384
"""Tokens read at once, padding included."""


@dataclass(frozen=True)
class Stored:
    """What is kept of the target's states."""

    taps: tuple[int, ...]
    """Layers whose outputs are kept; none where a drafter reads final states alone."""
    dtype: str
    final: str
    """Whose final states are kept: `taught`, or `all` (see kept_rows.py)."""

    def check(self, target: Target) -> None:
        """UserError if the target has no such layers."""
        if self.taps:
            target.check_taps(self.taps)


def featurize(
    folder: Path,
    target: Target,
    stored: Stored,
    team: Team,
    say: Callable[[str], None] = print,
    begins: Callable[[], None] = lambda: None,
) -> TokenStore:
    """Makes `folder` a store that keeps these features in every shard, whatever it kept before, and returns it. `begins` is called where a shard lacks them.

    UserError: an unfinished store, one of another target, no space, a full disk (finished shards stay).
    """
    store = TokenStore.open(folder)
    store.require(target.identity)
    taps, dtype, final = stored.taps, stored.dtype, stored.final
    stored.check(target)
    records = [_record(folder, index) for index in range(store.manifest.shards)]
    missing = [index for index, record in enumerate(records) if not has_features(record, index, dtype, taps, final)]
    require_space(folder, store.bytes_of_features(len(taps), dtype, final, missing), f"features of {len(missing)} shards")
    if missing:
        begins()
    if team.leads and store.manifest.taps is not None and missing:
        replace(store.manifest, taps=None, feature_dtype=None).write(folder)  # until all shards agree again
    for number, index in enumerate(missing):
        first_chat = sum(len(record.keys) for record in records[:index])
        if team.mine(index):
            began = perf_counter()
            chats = range(first_chat, first_chat + len(records[index].keys))
            with explain_full_disk(folder, f"{number} of {len(missing)} shards have their features and keep them."):
                read = list(_read(target, store, chats, taps))
                records[index] = add_features(folder, index, records[index], read, dtype, taps, final)
            rate = records[index].tokens / (perf_counter() - began)
            say(f"{folder.name}: features of shard {index + 1} of {len(records)}, {rate:,.0f} tokens/s")
    if team.leads:
        for index in missing:
            team.wait_until(lambda index=index: has_features(_record(folder, index), index, dtype, taps, final))  # type: ignore[misc]
        replace(store.manifest, taps=list(taps), feature_dtype=dtype).write(folder)
    team.wait_until(lambda: Manifest.read(folder).taps == list(taps))
    return TokenStore.open(folder)


def _record(folder: Path, index: int) -> ShardRecord:
    record = read_record(folder, index)
    if record is None:
        raise UserError(f"{folder}/ lacks shard {index}; run data_prep again: it makes it anew.")
    return record


def _read(target: Target, store: TokenStore, chats: Sequence[int], taps: tuple[int, ...]) -> Iterator[Chat]:
    """The chats with their features, in their order."""
    order = sorted(chats, key=lambda index: int(store.lengths[index]))
    found: dict[int, Features] = {}
    while order:
        longest, count = 0, 0
        while count < len(order) and max(longest, int(store.lengths[order[count]])) * (count + 1) <= BATCH_TOKENS:
            longest = max(longest, int(store.lengths[order[count]]))
            count += 1
        batch, order = order[: max(count, 1)], order[max(count, 1) :]
        found |= dict(zip(batch, _read_batch(target, store, batch, taps), strict=True))
    for index in chats:
        yield replace(store.chat(index), features=found[index])


def _read_batch(target: Target, store: TokenStore, batch: Sequence[int], taps: tuple[int, ...]) -> Iterator[Features]:
    lengths = [int(store.lengths[index]) for index in batch]
    T = max(lengths)
    ids_BT, document_BT = torch.zeros(len(batch), T, dtype=torch.int64), torch.full((len(batch), T), -1)
    for row, (index, length) in enumerate(zip(batch, lengths, strict=True)):
        ids_BT[row, :length] = store.chat(index).ids
        document_BT[row, :length] = 0
    position_BT = torch.arange(T).expand(len(batch), -1)
    sequences = Sequences(ids_BT, torch.zeros_like(ids_BT, dtype=torch.bool), position_BT, document_BT).to(target.device)
    features = target.read_packed(sequences, taps).to("cpu", torch.bfloat16)
    for row, length in enumerate(lengths):
        yield Features(features.taps_BTAD[row, :length].clone(), features.final_BTD[row, :length].clone())
