"""Shards of a token store on disk.

    tokens-00003.safetensors    ids [N] int32, supervised [N] uint8, offsets [C+1] int64 (chat c has rows offsets[c]:offsets[c+1])
    features-00003.safetensors  taps [P, A, D], final [F, D], in float8 also taps_scale [P, A], final_scale [F];
                                only in a store that keeps features. Which rows these are follows from `supervised` (kept_rows.py)
    shard-00003.json            written last: keys of the chats, bytes and sha256 of the two files, ledger of the chunk

A shard exists if and only if its JSON does. Row t of a chat is what the target computed while reading token t (types.py).

Shapes: C chats, N tokens of all chats of the shard, P of them rows that drafts see, F of them rows whose final state is kept, T tokens of one
chat, A taps, D target width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.data.features import encode
from drafttrain.data.kept_rows import kept_rows
from drafttrain.data.sealed import read_sealed, unreadable, write_sealed
from drafttrain.errors import UserError
from drafttrain.files import sha256_file, write_tensors_atomic
from drafttrain.types import Features


@dataclass(frozen=True)
class Chat:
    """One answered prompt."""

    key: str
    """Stable name of the prompt."""
    ids: Tensor
    """Prompt and answer [T], int64."""
    supervised: Tensor
    """True where the target generated the token [T]."""
    features: Features | None = None
    """taps [T, A, D] and final [T, D] (bfloat16). Read back, rows that were not kept are zero, but NaN in `final` where only those that teach
    were kept: who reads what is not there shall see it."""


@dataclass(frozen=True)
class ShardRecord:
    """What `shard-00003.json` says."""

    keys: list[str]
    files: dict[str, dict]
    """File name -> {"bytes", "sha256"}; of features also "dtype", "taps" and "final" (whose final states: taught, all)."""
    rows: dict
    """Ledger of the chunk: {"in", "kept", "dropped": {reason: n}}."""
    tokens: int
    supervised_tokens: int


def tokens_name(index: int) -> str:
    return f"tokens-{index:05d}.safetensors"


def features_name(index: int) -> str:
    return f"features-{index:05d}.safetensors"


def record_name(index: int) -> str:
    return f"shard-{index:05d}.json"


TOKEN_BYTES = 5
"""Bytes of one token without features: int32 id, uint8 mask."""


def write_shard(
    folder: Path,
    index: int,
    chats: Sequence[Chat],
    rows: Mapping,
    feature_dtype: str = "bfloat16",
    taps: Sequence[int] | None = None,
    final: str = "taught",
) -> ShardRecord:
    """Writes the files of one shard, its JSON last. All chats carry features, or none does; none at all is a shard too.
    `final` says whose final states are kept: `taught` or `all`.

    Raises OSError (a full disk): then the shard does not exist.
    """
    lengths = torch.tensor([0] + [len(chat.ids) for chat in chats])
    none = torch.empty(0, dtype=torch.int64)
    files = {
        tokens_name(index): write_tensors_atomic(
            folder / tokens_name(index),
            {
                "ids": torch.cat([none, *(chat.ids for chat in chats)]).to(torch.int32),
                "supervised": torch.cat([none, *(chat.supervised.long() for chat in chats)]).to(torch.uint8),
                "offsets": lengths.cumsum(0),
            },
        )
    }
    if any(chat.features is not None for chat in chats):
        files[features_name(index)] = _write_features(folder, index, chats, feature_dtype, taps, final)
    supervised = sum(int(chat.supervised.sum()) for chat in chats)
    record = ShardRecord([chat.key for chat in chats], files, dict(rows), int(lengths.sum()), supervised)
    write_sealed(folder / record_name(index), record.__dict__)
    return record


def add_features(
    folder: Path, index: int, record: ShardRecord, chats: Sequence[Chat], dtype: str, taps: Sequence[int], final: str
) -> ShardRecord:
    """Gives a finished shard the features that its chats carry, or others than it has. Raises OSError.

    The JSON is written last: until then the shard is what it was before, or, where it had features already, one without.
    """
    bare = {name: facts for name, facts in record.files.items() if name != features_name(index)}
    if bare != record.files:
        write_sealed(folder / record_name(index), {**record.__dict__, "files": bare})
    files = bare if not chats else bare | {features_name(index): _write_features(folder, index, chats, dtype, taps, final)}
    made = replace(record, files=files)
    write_sealed(folder / record_name(index), made.__dict__)
    return made


def has_features(record: ShardRecord, index: int, dtype: str, taps: Sequence[int], final: str) -> bool:
    """Whether the shard keeps these features, and maybe more final states. One without chats needs none.

    Shards of earlier versions kept every row and did not say so: their features are made anew.
    """
    facts = record.files.get(features_name(index), {})
    same = (facts.get("dtype"), facts.get("taps")) == (dtype, list(taps))
    return not record.keys or (same and facts.get("final") in (final, "all"))


def _write_features(
    folder: Path, index: int, chats: Sequence[Chat], dtype: str, layers: Sequence[int] | None, final: str
) -> dict[str, Any]:
    seen, scored = [], []
    for chat in chats:
        if chat.features is None:
            raise ValueError("some chats of this shard carry features and others do not")
        context, rows = kept_rows(chat.supervised, final)
        seen.append(chat.features.taps_BTAD[:context])
        scored.append(chat.features.final_BTD[rows])
    tensors = {}
    for name, parts in (("taps", seen), ("final", scored)):
        tensors[name], scale = encode(torch.cat(parts), dtype)
        if scale is not None:
            tensors[f"{name}_scale"] = scale
    facts = write_tensors_atomic(folder / features_name(index), tensors)
    return facts | {"dtype": dtype, "taps": None if layers is None else list(layers), "final": final}


def read_record(folder: Path, index: int) -> ShardRecord | None:
    """The record of a finished shard, None if the shard is not finished. UserError if it or a file of it is missing or damaged.

    Features alone may be missing: then this is a shard without them, to which they can be added.
    """
    path = folder / record_name(index)
    if not path.exists():
        return None
    values = read_sealed(path, "the shard", _made_anew(folder, index))
    try:
        record = ShardRecord(**values)
    except TypeError:
        raise unreadable(path, "its keys are not those of a shard", _made_anew(folder, index)) from None
    if not (folder / features_name(index)).exists():
        record.files.pop(features_name(index), None)
    for name, facts in record.files.items():
        file = folder / name
        size = file.stat().st_size if file.exists() else 0
        if size != facts["bytes"]:
            raise damaged(file, index, f"{size:,} bytes instead of {facts['bytes']:,}")
    return record


def verify(folder: Path, index: int, record: ShardRecord, name: str) -> None:
    """UserError unless the file's content is what was written."""
    if sha256_file(folder / name) != record.files[name]["sha256"]:
        raise damaged(folder / name, index, "its sha256 is not the one in the shard's JSON")


def damaged(file: Path, index: int, why: str) -> UserError:
    if file.name == features_name(index):
        return unreadable(file, why, f"delete {file} and run data_prep again: it keeps the answers and makes these features anew")
    return unreadable(file, why, _made_anew(file.parent, index))


def _made_anew(folder: Path, index: int) -> str:
    return (
        f"delete {folder / record_name(index)} and {folder / 'manifest.json'} and run data_prep again: it makes this shard anew and "
        "keeps the others"
    )
