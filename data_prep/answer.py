"""Answers by the target, chunk by chunk, into a token store.

Prompts are sorted by length and cut into fixed chunks; one chunk is one shard. What a chunk holds depends on its prompts, their
keys and the seed only, so a run that was killed starts at the first chunk without a shard and ends with the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from data_prep.ledger import Ledger
from data_prep.sources import Work
from drafttrain.data.shards import (
    FEATURE_DTYPE,
    TOKEN_BYTES,
    Chat,
    ShardRecord,
    feature_bytes,
    read_record,
    record_name,
    write_shard,
)
from drafttrain.errors import UserError
from drafttrain.files import explain_full_disk
from drafttrain.types import Features, Request, Rollout

ANSWER = "/answer"


@dataclass(frozen=True)
class Speech:
    """How the target answers."""

    temperature: float
    top_p: float
    taps: tuple[int, ...] | None
    """Layers whose features are kept; None for none."""


@dataclass(frozen=True)
class Chunk:
    """Requests of one shard, and how they are answered."""

    requests: list[Request]
    speech: Speech


@dataclass
class Answered:
    """What one pass over the prompts left behind."""

    records: list[ShardRecord]
    tokens: int = 0
    """Answer tokens made by this process, not those found in finished shards."""
    seconds: float = 0.0


def in_chunks(requests: Sequence[Request], size: int, speech: Speech) -> list[Chunk]:
    """Fixed groups of neighbours in length, so that a batch pads little."""
    ordered = sorted(requests, key=lambda request: (len(request.ids), request.key))
    return [Chunk(ordered[start : start + size], speech) for start in range(0, len(ordered), size)]


def expected_bytes(chunks: Sequence[Chunk], folder: Path, hidden: int) -> int:
    """Most bytes that the chunks without a shard can take: every answer as long as it may be."""
    total = 0
    for index, chunk in enumerate(chunks):
        if not (folder / record_name(index)).exists():
            taps = chunk.speech.taps
            tokens = sum(len(request.ids) + request.limit for request in chunk.requests)
            total += tokens * (TOKEN_BYTES + (0 if taps is None else feature_bytes(len(taps), hidden)))
    return total


def answer(work: Work, chunks: Sequence[Chunk], folder: Path) -> Answered:
    """Makes the shards that are not there yet. UserError on a full disk (finished shards stay) or a damaged shard."""
    done = Answered([])
    for index, chunk in enumerate(chunks):
        record = read_record(folder, index)
        if record is None:
            kept = f"{index} of {len(chunks)} shards in {folder}/ are finished and kept."
            start = perf_counter()
            chats, ledger = _answer_chunk(work, chunk.requests, chunk.speech)
            with explain_full_disk(folder, kept):
                record = write_shard(folder, index, chats, ledger.facts(len(chats)))
            tokens, seconds = sum(int(chat.supervised.sum()) for chat in chats), perf_counter() - start
            done.tokens += tokens
            done.seconds += seconds
            work.say(
                f"{folder.name}: shard {index + 1} of {len(chunks)}, {len(chats)} chats, {tokens / seconds:,.0f} answer tokens/s"
            )
        elif record.rows["in"] != len(chunk.requests) or not set(record.keys) <= {request.key for request in chunk.requests}:
            raise UserError(
                f"{folder / record_name(index)} belongs to other prompts than {folder.parent}/ has; "
                f"delete {folder}/ and run data_prep again."
            )
        done.records.append(record)
    return done


def _answer_chunk(work: Work, chunk: Sequence[Request], speech: Speech) -> tuple[list[Chat], Ledger]:
    """Chats in the order of the chunk, whatever order they were finished in."""
    ledger = Ledger(read=len(chunk))
    ends = torch.tensor(work.target.end_ids)
    chats: dict[str, Chat] = {}
    # A stream of its own: an answer must not repeat the random numbers with which its question was sampled.
    spoken = [replace(request, key=request.key + ANSWER) for request in chunk]
    for rollout in work.ask(spoken, speech.temperature, speech.top_p, speech.taps):
        key = rollout.key.removesuffix(ANSWER)
        if len(rollout.answer) == 0:
            ledger.drop("no supervised token", key)
        elif bool(torch.isin(rollout.answer, ends).all()):
            ledger.drop("empty answer", key)
        else:
            chats[key] = _chat(key, rollout)
    return [chats[request.key] for request in chunk if request.key in chats], ledger


def _chat(key: str, rollout: Rollout) -> Chat:
    features = None
    if rollout.taps_TAD is not None and rollout.final_TD is not None:
        features = Features(rollout.taps_TAD.to("cpu", FEATURE_DTYPE), rollout.final_TD.to("cpu", FEATURE_DTYPE))
    return Chat(key, rollout.ids, torch.arange(len(rollout.ids)) >= rollout.prompt_len, features)
