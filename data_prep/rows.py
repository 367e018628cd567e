"""Rows of files and data sets, one at a time, into prompts; what is wrong with a row is said with its number.

Nothing is held but the prompts themselves: a row is read, turned into a prompt or a reason, and let go.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from typing import Any, BinaryIO

from data_prep.dialects import Broken, Reader
from data_prep.ledger import Ledger, reasons
from data_prep.prompt import Prompt, Work
from drafttrain.errors import UserError

LONGEST_LINE = 8 << 20
"""Bytes of a row beyond which it is not a prompt that anybody typed, and is not read into memory."""
SHOWN = 10
"""Broken rows named on the console; all of them stand in dropped.jsonl."""
GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True)
class Table:
    """Rows to be read, and how to speak of them."""

    place: str
    """The file or data set, as people know it."""
    unit: str
    """line or row."""
    rows: Iterable[tuple[int, Any]]
    """Number and row; a Broken in place of a row that could not be read at all."""
    form: str = f"each line must look like {EXAMPLE}"
    """How a row has to look, for the error when none is usable."""
    stored: bool = False
    """Whether the rows are a data folder's own."""


def collect(table: Table, reader: Reader, count: int | None, work: Work, ledger: Ledger) -> list[Prompt]:
    """The first `count` prompts (None = all). UserError if there is none."""
    prompts: list[Prompt] = []
    broken = 0
    for number, row in table.rows:
        if count is not None and len(prompts) == count:
            break
        ledger.read += 1
        try:
            if isinstance(row, Broken):
                raise row
            prompts.append(reader.stored(row) if table.stored else reader.prompt(number, row))
        except Broken as error:
            where = f"{table.place} {table.unit} {number}"
            ledger.drop(str(error), where)
            broken += 1
            if broken <= SHOWN:
                work.say(f"{where}: {error}; left out")
    if broken > SHOWN:
        work.say(f"{table.place}: {broken - SHOWN:,} more such {table.unit}s, all named in dropped.jsonl")
    if reader.dialects:
        work.say(f"{table.place}: {', '.join(f'{n:,} {table.unit}s of {name}' for name, n in reader.dialects.most_common())}")
    for note, chats in reader.notes.items():
        work.say(f"{table.place}: {chats:,} chats {note}")
    ledger.notes.update({f"chats {note}": chats for note, chats in reader.notes.items()})
    if not prompts:
        raise UserError(
            f"{table.place} has no usable prompt among its {ledger.read:,} rows ({reasons(ledger.dropped) or 'it is empty'}); "
            f"{table.form}."
        )
    if count is not None and len(prompts) < count:
        work.say(f"{table.place}: {len(prompts):,} prompts, although the recipe asks for {count:,}")
    return prompts


def json_lines(path: str, option: str) -> Iterator[tuple[int, Any]]:
    """Number and content of each line that is not blank, of a plain or gzipped file. UserError naming `option` if unreadable."""
    try:
        with open(path, "rb") as plain:
            packed = plain.read(len(GZIP)) == GZIP
            plain.seek(0)
            with GzipFile(fileobj=plain) if packed else plain as file:
                for number, line in _lines(file):
                    if isinstance(line, Broken) or line.strip():
                        yield number, _parsed(line)
    except (EOFError, BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{option} is {path}, a gzipped file that is cut short or damaged ({error}); copy it anew, or give it unpacked."
        ) from None
    except OSError as error:
        raise UserError(
            f"{option} is {path}, which cannot be read ({error.strerror or error}); name a file that can be."
        ) from None


def _lines(file: BinaryIO | GzipFile) -> Iterator[tuple[int, bytes | Broken]]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) <= LONGEST_LINE:
            yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE)
        yield number, Broken(f"longer than {LONGEST_LINE >> 20} MiB")


def _parsed(line: bytes | Broken) -> Any:
    if isinstance(line, Broken):
        return line
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        return Broken("not UTF-8")
    except RecursionError:
        return Broken("nested too deeply")
    except ValueError:
        return Broken("a NUL byte" if b"\0" in line else "not JSON")
