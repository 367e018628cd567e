"""What a target's own files say of it for people: its licence, and the Hub's repository that a GGUF was made from. Nothing is asked of a network.

    a folder       front matter (YAML) of its README.md
    a Hub id       the same of README.md in the cached snapshot that was loaded, if it happens to lie there
    a GGUF file    general.license, .name and .link; general.source.huggingface.repository, general.source.repo_url or general.source.url

Files that cannot be read, or say nothing that makes sense, say nothing: of a licence that is not known only a person can find out.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafttrain.errors import UserError
from drafttrain.target.load import locate
from drafttrain.types import Identity

CARD = "README.md"
FRONT = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.S)
LONGEST_CARD = 1 << 20
"""Bytes of a model card that are read."""
LONGEST = 200
"""Characters of a name or a link at most."""
MOST_LICENCES = 8
OTHER = "other"
"""What the Hub calls a licence that it has no word for."""
REPOSITORY = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")
BESIDE = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*")
"""A link to a file in the same repository."""
SOURCES = ("general.source.huggingface.repository", "general.source.repo_url", "general.source.url")
"""Where a GGUF says what it was converted from. `general.base_model` is no such place: it names what the target was tuned from."""

TEXT, ARRAY = 8, 9
"""Kinds of values in a GGUF."""
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Kind -> bytes of a number."""


@dataclass(frozen=True)
class Origin:
    """What was found; None for what was not."""

    license: str | list[str] | None = None
    """As the Hub spells it; a list where several are named."""
    license_name: str | None = None
    """Of a licence that the Hub calls `other`."""
    license_link: str | None = None
    """Where that one's text is: an address, or a file of the target's repository."""
    repository: str | None = None
    """Hub id of what a GGUF was converted from."""

    def address(self, repository: str | None) -> str | None:
        """The link as it works from anywhere, where the target's repository is known or not needed."""
        link = self.license_link
        if link is None or link.startswith(("https://", "http://")):
            return link
        return f"https://huggingface.co/{repository}/blob/main/{link}" if repository and BESIDE.fullmatch(link) else None


def origin_of(identity: Identity) -> Origin:
    """What the files of this target say."""
    try:
        where, gguf = locate(identity.path)
    except UserError:  # it is not there any more
        return Origin()
    if gguf is not None:
        return _of_gguf(Path(where) / gguf)
    card = Path(where) / CARD if Path(where).is_dir() else _cached(where, identity.revision.partition("+")[0])
    return Origin() if card is None else _of_card(card)


def _cached(repository: str, commit: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, CARD, revision=commit)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _of_card(card: Path) -> Origin:
    try:
        with open(card, "rb") as file:
            text = file.read(LONGEST_CARD).decode("utf-8-sig", errors="replace")
    except OSError:
        return Origin()
    front = FRONT.match(text)
    try:
        said = yaml.safe_load(front[1]) if front else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return Origin()
    return _licensed(said, ("license", "license_name", "license_link")) if isinstance(said, dict) else Origin()


def _of_gguf(file: Path) -> Origin:
    names = ("general.license", "general.license.name", "general.license.link")
    try:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            said = _texts(data, {*names, *SOURCES})
    except (OSError, ValueError, OverflowError, struct.error):  # loading says what is wrong with the file
        return Origin()
    found = _licensed(said, names)
    repository = next((match[1] for name in SOURCES if (match := REPOSITORY.fullmatch(_text(said.get(name)) or ""))), None)
    return Origin(found.license, found.license_name, found.license_link, repository)


def _texts(data: mmap.mmap, wanted: set[str]) -> dict[str, str]:
    """These fields of a GGUF's header, those that are text. The gguf library reads every token of the vocabulary, which takes seconds; here they are
    stepped over. Raises ValueError or struct.error where this is no header."""
    magic, version, _, fields = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("no GGUF file of a known version")
    at, found = struct.calcsize("<4sIQQ"), {}
    for _ in range(fields):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        name = key.decode(errors="replace")
        if kind == TEXT and name in wanted:
            value, at = _string(data, at)
            found[name] = value.decode(errors="replace")
        elif kind == ARRAY:
            kind, count = struct.unpack_from("<IQ", data, at)
            at = _behind(data, at + 12, kind, count)
        else:
            at = _behind(data, at, kind, 1)
    return found


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    """A string, and where the next thing begins."""
    (length,) = struct.unpack_from("<Q", data, at)
    if length > len(data) - at:
        raise ValueError("a string longer than the file")
    return data[at + 8 : at + 8 + length], at + 8 + length


def _behind(data: mmap.mmap, at: int, kind: int, count: int) -> int:
    """Where the next thing begins behind so many values of a kind."""
    if kind in WIDTHS:
        return at + WIDTHS[kind] * count
    if kind != TEXT:
        raise ValueError("a kind of value that no GGUF has, or lists of lists")
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", data, at)[0]
    return at


def _licensed(said: Mapping[Any, Any], names: tuple[str, str, str]) -> Origin:
    """A name and a link belong to a licence that the Hub has no word for."""
    named, name, link = _texts_of(said.get(names[0])), _text(said.get(names[1])), _text(said.get(names[2]))
    named = [OTHER if each.lower() == OTHER else each for each in named]
    license = named[0] if len(named) == 1 else named or None
    return Origin(license, name, link) if OTHER in named else Origin(license)


def _texts_of(value: Any) -> list[str]:
    """The different ones of a list, or one by itself; [] where one of them makes no sense, for the others alone would say too little."""
    values = value if isinstance(value, list) else [value]
    found = [text for each in values[: MOST_LICENCES + 1] if (text := _text(each)) is not None]
    different: dict[str, str] = {}
    for text in found:
        different.setdefault(text.lower(), text)
    return list(different.values()) if len(values) == len(found) <= MOST_LICENCES else []


def _text(value: Any) -> str | None:
    """One line of text, also where it stands in a list by itself."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST or not value.strip().isprintable():
        return None
    return value.strip()
