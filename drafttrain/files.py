"""Files that are either whole or not there, one process a folder, and no full disk halfway.

Everything that a later stage reads is written as `x.tmp`, flushed, synced and renamed, so a process killed at any moment
leaves the old file or the new one. safetensors' own `save_file` is not used: it leaves `.tmpAbCdEf` files behind when killed,
sets mode 0600, and reports a full disk as an error of its own class.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from torch import Tensor

from drafttrain.errors import UserError

LOCK = ".lock"
BLOCK = 1 << 22
"""Bytes read or written at once."""
LINES_AT_ONCE = 4096
LONGEST_ID = 96
"""Characters that the Hub lets an id have (owner/name)."""


def write_atomic(path: str | Path, data: bytes | str | Iterable[bytes]) -> None:
    """Writes the file whole or not at all, from one piece or several. Raises OSError, after removing what it had begun."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(path.name + ".tmp")
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    handle = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while len(rest):
                    rest = rest[os.write(handle, rest[:BLOCK]) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(begun, path)
    except BaseException:
        begun.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json_atomic(path: str | Path, value) -> None:
    """Writes indented JSON, keys in the order given. Numbers that JSON does not know (nan, inf) are refused."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl_atomic(path: str | Path, rows: Iterable[dict]) -> None:
    """Writes one JSON object a line, without holding all lines at once."""
    write_atomic(path, _lines(rows))


def _lines(rows: Iterable[dict]) -> Iterator[bytes]:
    """Lines of JSON, many to a piece: a system call for each would be slow."""
    lines: list[bytes] = []
    for row in rows:
        lines.append((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())
        if len(lines) == LINES_AT_ONCE:
            yield b"".join(lines)
            lines = []
    yield b"".join(lines)


def write_tensors_atomic(path: str | Path, tensors: Mapping[str, Tensor]) -> dict:
    """Writes a safetensors file and returns `{"bytes": ..., "sha256": ...}` of it."""
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    write_atomic(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def replace_folder(made: Path, place: Path) -> None:
    """Put a finished folder in its place; the old one exists until the new one is there."""
    old = place.with_name(place.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        os.replace(place, old)
    os.replace(made, place)
    sync(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore_folder(place: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    old = place.with_name(place.name + ".old")
    if not place.exists() and old.exists():
        os.replace(old, place)


def read_json(path: str | Path, what: str):
    """Reads a JSON file that one of our stages wrote. UserError if it is missing or not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing, so {what} is not there or not finished; run the stage that makes it again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it and run the stage that makes {what} again.") from None
    except OSError as error:  # a folder in its place, or no right to read it
        raise UserError(f"{path} cannot be read ({error.strerror}), so {what} cannot be used; mend that.") from None


def sha256_file(path: str | Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def remove_leftovers(folder: str | Path) -> int:
    """Deletes the `*.tmp` that killed processes left under a folder; returns how many. Only for the holder of its lock."""
    leftovers = list(Path(folder).rglob("*.tmp"))
    for path in leftovers:
        path.unlink()
    return len(leftovers)


class RunLock:
    """Context manager: one process works in a folder. The kernel frees the lock when the process ends, however it ends."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._handle: int | None = None

    def __enter__(self) -> "RunLock":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"{self.folder}/ cannot be written ({error.strerror}); give a folder of your own with --runs."
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise UserError(
                f"{self.folder}/ is in use by another process ({holder}), and two runs would overwrite each other; "
                "wait for it to end, or give this run another `name`."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()}\n".encode(), 0)
        self._handle = handle
        return self

    def __exit__(self, *_) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def require_space(folder: str | Path, bytes: int, what: str) -> None:
    """UserError unless the disk that holds `folder` (which need not exist yet) has this many bytes free."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if bytes > free:
        raise UserError(
            f"{what} needs up to {human_bytes(bytes)}, but the disk that holds {folder} has {human_bytes(free)} free; "
            "free some space, or point the run at a larger disk."
        )


@contextmanager
def explain_full_disk(folder: str | Path, kept: str) -> Iterator[None]:
    """Turns 'no space left' inside the block into a UserError which says what of the work so far is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or folder
        raise UserError(f"The disk is full ({where}): {kept} Free some space and run the same command again.") from error


def typed_path(where: str | Path) -> Path:
    """The path that a user typed, `~` read as a home; as it stands where `~name` is nobody's. Ask os.path what is there: of a name that is too long
    pathlib raises."""
    return Path(os.path.expanduser(where))


def public_place(where: str) -> str:
    """A model's place as others may be told it: a local path by its last part alone, which says nothing of the machine; a Hub id, and a file of a
    Python package, whole."""
    if where.startswith("package:"):
        return where
    near = where.startswith((".", "~", os.sep)) or where.endswith(".gguf") or where.count("/") > 1
    if not near and not os.path.exists(typed_path(where)):
        return where
    return os.path.basename(os.path.abspath(typed_path(where))) or "local"


def many(number: int, word: str) -> str:
    """2, 'row' -> '2 rows'."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def human_bytes(count: float) -> str:
    """1_500_000 -> '1.5 MB' (powers of a thousand, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sync(path: Path) -> None:
    """Makes a file, or the renames in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
