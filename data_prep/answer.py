"""Answers by the target, chunk by chunk, into a token store.

Prompts are sorted by length and cut into fixed chunks; one chunk is one shard. What a chunk holds depends on its prompts, their
keys and the seed only, so a run that was killed starts at the first chunk without a shard and ends with the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

from data_prep.dialogue import Answering, Question, Rules, Speech, question_key
from data_prep.featurize import Stored
from data_prep.progress import Watched
from data_prep.sources import Work
from data_prep.team import ALONE, Team
from drafttrain.data.features import vector_bytes
from drafttrain.data.shards import TOKEN_BYTES, Chat, ShardRecord, read_record, record_name, write_shard
from drafttrain.errors import UserError
from drafttrain.files import explain_full_disk


@dataclass(frozen=True)
class Chunk:
    """Questions of one shard, and how they are answered."""

    questions: list[Question]
    speech: Speech


@dataclass
class Answered:
    """What one pass over the prompts left behind."""

    records: list[ShardRecord]
    tokens: int = 0
    """Answer tokens made by this process, not those found in finished shards."""
    seconds: float = 0.0


def in_chunks(questions: Sequence[Question], size: int, speech: Speech) -> list[Chunk]:
    """Fixed groups of neighbours in length, so that a batch pads little."""
    ordered = sorted(questions, key=lambda question: (len(question.ids), question.key))
    return [Chunk(ordered[start : start + size], speech) for start in range(0, len(ordered), size)]


def expected_bytes(chunks: Sequence[Chunk], folder: Path, rules: Rules, hidden: int) -> int:
    """Most bytes that the chunks without a shard can take: every answer as long as it may be, each chat in one row, and the later
    questions of a chat not counted."""
    total = 0
    for index, chunk in enumerate(chunks):
        if not (folder / record_name(index)).exists():
            lengths = [len(question.ids) + rules.limit * len(question.turns) for question in chunk.questions]
            total += sum(lengths) * TOKEN_BYTES
            if (stored := chunk.speech.stored) is not None:
                context = sum(length - 2 for length in lengths)  # see kept_rows.py
                answers = sum(1 if rules.last_turn else len(question.turns) for question in chunk.questions)
                final = (rules.limit - 1) * answers if stored.final == "taught" else context + len(lengths)
                total += (len(stored.taps) * context + final) * vector_bytes(hidden, stored.dtype)
    return total


def answer(work: Work, chunks: Sequence[Chunk], folder: Path, rules: Rules, team: Team = ALONE) -> Answered:
    """Makes the shards of this process that are not there yet, and waits for those of others if it leads.

    UserError on a full disk (finished shards stay) or a damaged shard.
    """
    done = Answered([])
    records: dict[int, ShardRecord] = {}
    for index in sorted(range(len(chunks)), key=lambda index: not team.mine(index)):  # its own first
        chunk = chunks[index]
        if not team.mine(index):
            if not team.leads:
                break
            team.wait_until(partial(_is_made, folder, index))
        record = read_record(folder, index)
        if record is None:
            kept = f"{index} of {len(chunks)} shards in {folder}/ are finished and kept."
            start = perf_counter()
            shard = f"{folder.name}: shard {index + 1} of {len(chunks)}"
            answering = Answering(replace(work, ask=Watched(work.ask, shard, work.say)), rules, chunk.speech)
            chats = answering.run(chunk.questions)
            facts = {**answering.ledger.facts(len(chats)), "asked": len(chunk.questions), "notes": dict(answering.ledger.notes)}
            with explain_full_disk(folder, kept):
                record = _write(folder, index, chats, facts, chunk.speech.stored)
            tokens, seconds = sum(int(chat.supervised.sum()) for chat in chats), perf_counter() - start
            done.tokens += tokens
            done.seconds += seconds
            work.say(f"{shard}, {len(chats)} chats, {tokens / seconds:,.0f} answer tokens/s")
        elif not _belongs(record, chunk):
            raise UserError(
                f"{folder / record_name(index)} belongs to other prompts than {folder.parent}/ has; "
                f"delete {folder}/ and run data_prep again."
            )
        records[index] = record
    done.records = [records[index] for index in sorted(records)]
    return done


def _write(folder: Path, index: int, chats: Sequence[Chat], facts: dict, stored: Stored | None) -> ShardRecord:
    if stored is None:
        return write_shard(folder, index, chats, facts)
    return write_shard(folder, index, chats, facts, stored.dtype, stored.taps, stored.final)


def _is_made(folder: Path, index: int) -> bool:
    return (folder / record_name(index)).exists()


def _belongs(record: ShardRecord, chunk: Chunk) -> bool:
    keys = {question.key for question in chunk.questions}
    return record.rows.get("asked") == len(keys) and {question_key(key) for key in record.keys} <= keys
