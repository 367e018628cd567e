"""From what the user wrote to the recipe's dataclasses: names checked against their signatures, values parsed by jsonargparse.

There is no second schema: the fields of a dataclass are the keys of its section. A *choice* is a class named in the recipe
(`class_path`, `init_args`) among the subclasses of a base. Every fault becomes one sentence, and all of them are collected.
"""

import collections.abc
import dataclasses
import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from drafttrain.errors import UserError
from drafttrain.recipe_files import CLASS_KEYS, Endless, Written

LARGEST = 2**63 - 1
"""The largest whole number that Python's containers and torch count with; both stop at a larger one with an error of their own."""
WRITTEN = 8192
"""Binary digits that Python writes as decimal ones without complaint (it stops at 4,300 of these)."""
PATHS = "export.checkpoint", "bench.prompts", "trainer.default_root_dir"
"""Paths of which nobody asks whether they are there until hours have passed."""


def join(place: str, key: str) -> str:
    """A place inside another."""
    return f"{place}.{key}" if place else key


def fields_of(cls: type) -> dict[str, tuple[Any, bool]]:
    """Key -> (type hint, required?) of a config class, from its signature, in order."""
    hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    parameters = list(inspect.signature(cls).parameters.values())
    return {p.name: (hints.get(p.name, Any), p.default is inspect.Parameter.empty) for p in parameters}


def choices(base: type) -> dict[str, type]:
    """Class name -> class, for every class that a recipe may name where `base` is wanted."""
    found: dict[str, type] = {}
    subclasses: list[type] = type.__subclasses__(base)
    for subclass in subclasses:
        if not inspect.isabstract(subclass) and not subclass.__name__.startswith("_"):
            found[subclass.__name__] = subclass
        found.update(choices(subclass))
    return dict(sorted(found.items()))


def nearest(place: str, siblings: Iterable[str], everywhere: Iterable[str], typed: str | None = None) -> str:
    """The way out for an unknown key: the place that was probably meant, never the one that was typed, or the keys that exist beside it.

    `place` is the first part of `typed` (of itself, unless given) that does not exist, and `siblings` are the keys of its level. A key
    below that level in `everywhere` that none of them leads to is another class's, and no way out here.
    """
    typed = typed or place
    level, _, key = place.rpartition(".")
    siblings, below = list(siblings), typed[len(place) :]
    known = [p for p in everywhere if not _is_below(p, level) or _step(p, level) in siblings]
    if place == typed and not level and (named := [p for p in known if _last(p) == key.replace("-", "_")]):
        return f"did you mean {_either(named)}?"  # `--max-tokens`: a key without its section, which several may have
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    found = [join(level, close[0]) + below] if close and (not below or join(level, close[0]) + below in known) else []
    found += [p for p in known if _last(p) == _last(typed)]
    if level:  # below it, only last words are compared: places that begin alike look alike
        inside = {_last(p): p for p in known if _is_below(p, level)}
        found += [inside[word] for word in difflib.get_close_matches(_last(typed), inside, n=1, cutoff=0.7)]
    else:
        found += difflib.get_close_matches(typed, known, n=1, cutoff=0.7)
    if found:
        return f"did you mean '{found[0]}'?"
    return f"{'keys of ' + level if level else 'the sections'}: {', '.join(siblings)}."


def _either(places: list[str]) -> str:
    """'a', 'b' or 'c'."""
    *others, last = [f"'{place}'" for place in dict.fromkeys(places)]
    return f"{', '.join(others)} or {last}" if others else last


def _last(place: str) -> str:
    return place.rpartition(".")[2]


def _is_below(place: str, level: str) -> bool:
    return bool(level) and place.startswith(f"{level}.")


def _step(place: str, level: str) -> str:
    """The key of `level` that leads to a place below it."""
    return place[len(level) + 1 :].partition(".")[0]


def describe(hint: Any) -> str:
    """A type hint in words."""
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is typing.Literal:
        words = list(map(str, typing.get_args(hint)))
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple and ... not in arguments:
        return f"a list [{', '.join(map(describe, arguments))}]"
    if origin in (list, tuple, collections.abc.Sequence) and arguments:
        return f"a list of {describe(arguments[0])}"
    return {str: "text", dict: "keys and values"}.get(origin or hint, getattr(origin or hint, "__name__", str(hint)))


class Builder:
    """Builds config objects out of what was written; collects sentences in `errors` instead of stopping at the first.

    Args:
        written: The merged recipe.
        bases: Base class -> what one of its subclasses is called ("drafter").
        known: All valid places, to suggest from.
    """

    def __init__(self, written: Written, bases: Mapping[type, str], known: Iterable[str]):
        self.written, self.bases, self.known = written, bases, list(known)
        self.errors: list[str] = []

    def unknown(self, place: str, siblings: Iterable[str]) -> None:
        """Report a key that does not exist, as it was typed."""
        typed = place
        if place not in self.written.where:  # `--optimzer.lr 1` was typed with what follows
            typed = next((longer for longer in self.written.where if longer.startswith(place + ".")), place)
        self.errors.append(f"unknown key '{typed}'{self.written.origin(typed)}: {nearest(place, siblings, self.known, typed)}")

    def build(self, cls: type, given: Any, place: str) -> Any:
        """An instance of a config class, or None after reporting why not."""
        if given is None:
            given = {}
        if not isinstance(given, dict):
            self.errors.append(
                f"'{place}'{self.written.origin(place)} should hold keys ({', '.join(fields_of(cls))}), got {given!r}."
            )
            return None
        before, fields = len(self.errors), fields_of(cls)
        values = {}
        for key in given:
            if key not in fields:
                self.unknown(join(place, key), fields)
        for key, (hint, required) in fields.items():
            if key in given:
                values[key] = self.value(hint, given[key], join(place, key))
            elif self._is_section(hint) and (required or hint not in self.bases):  # a choice may have a default
                values[key] = self.value(hint, {}, join(place, key))  # names the keys that are missing in it, if any
            elif required:
                at = join(place, key)
                flag = "" if "[" in at else f" or pass --{at}"
                self.errors.append(f"'{at}' is missing: add it to the recipe{flag} ({describe(hint)}).")
        if len(self.errors) > before:
            return None
        try:
            return cls(**values)
        except UserError as error:
            self.errors.append(self._with_flag(str(error), place, fields))
        except (ValueError, TypeError) as error:
            self.errors.append(f"'{place}'{self.written.origin(place)}: {error}")
        return None

    def _with_flag(self, sentence: str, place: str, fields: Iterable[str]) -> str:
        """A dataclass's own sentence about a key of it, with the flag that was typed for that where it has another name."""
        for here in (join(place, key) for key in fields):
            if here in self.written.flags and sentence.startswith(f"{here} "):
                return f"{here} ({self.written.flags[here]}){sentence[len(here) :]}"
        return sentence

    def _is_section(self, hint: Any) -> bool:
        return hint in self.bases or (inspect.isclass(hint) and dataclasses.is_dataclass(hint))

    def value(self, hint: Any, given: Any, place: str) -> Any:
        """A value of a field: a choice, a list of choices, a nested config, or anything that jsonargparse can parse."""
        if hint in self.bases:
            return self.choice(hint, given, place)
        arguments = typing.get_args(hint)
        if typing.get_origin(hint) in (list, tuple, collections.abc.Sequence) and arguments and arguments[0] in self.bases:
            if not isinstance(given, list):
                self.errors.append(
                    f"'{place}'{self.written.origin(place)} should be a list of {self.bases[arguments[0]]}s, got {given!r}."
                )
                return None
            return [self.choice(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(given)]
        if self._is_section(hint):
            return self.build(hint, given, place)
        return self._leaf(hint, given, place)

    def choice(self, base: type, given: Any, place: str) -> Any:
        """An instance of the class that the recipe names."""
        what, known = self.bases[base], ", ".join(choices(base))
        if isinstance(given, str):
            given = {"class_path": given}
        if given is None or (isinstance(given, dict) and "class_path" not in given):
            self.errors.append(f"'{place}.class_path' is missing: name the {what}, one of {known}.")
            return None
        if not isinstance(given, dict):
            self.errors.append(
                f"'{place}'{self.written.origin(place)} should be class_path and init_args of a {what}, got {given!r}."
            )
            return None
        cls = find_class(base, given["class_path"])
        for key in given:
            if key not in CLASS_KEYS:
                self.unknown(join(place, key), sorted(CLASS_KEYS))
        if cls is None:
            at, named = self.written.origin(f"{place}.class_path"), given["class_path"]
            self.errors.append(f"'{place}.class_path'{at} names no {what}: got {named!r}, known are {known}{_meant(base, named)}")
            return None
        return self.build(cls, given.get("init_args"), f"{place}.init_args")

    def _leaf(self, hint: Any, given: Any, place: str) -> Any:
        typed, is_text = self.written.raw.get(place), isinstance(given, str) and not isinstance(given, Endless)
        if typed is not None and given is not None and not is_text and takes_text(hint):
            given = typed  # a text field takes `123` as it stands
        elif _holds_endless(given):
            self._require_usable(given, place)
            return None
        if (typing.get_origin(hint) or hint) is dict and isinstance(given, dict):
            self._require_usable(given, place)
            return given  # free content: jsonargparse would look for classes in it
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=hint)
        try:
            if isinstance(given, bool) and not accepts_bool(hint):
                raise TypeError("true and false are no numbers")
            if given is None and hint not in (Any, None, type(None)) and type(None) not in typing.get_args(hint):
                raise TypeError("jsonargparse lets null pass for anything")
            found = parser.parse_object({"value": given}).value
        except (ArgumentError, TypeError, ValueError, OverflowError):
            self.errors.append(
                f"'{place}'{self.written.origin(place)} should be {describe(hint)}, got "
                + ("null." if given is None else f"{given!r} ({type(given).__name__}).")
            )
            return None
        self._require_usable(found, place)
        return found

    def _require_usable(self, value: Any, place: str) -> None:
        """Report whole numbers beyond `LARGEST`, text with a character that ends paths, and paths that are too long, below any keys and in any list."""
        if isinstance(value, dict):
            for key, inner in value.items():
                self._require_usable(inner, join(place, str(key)))
        elif isinstance(value, list | tuple):
            for i, inner in enumerate(value):
                self._require_usable(inner, f"{place}[{i}]")
        elif isinstance(value, Endless) or (isinstance(value, int) and abs(value) > LARGEST):
            told: Any = f"a whole number written in {len(value):,} characters" if isinstance(value, Endless) else value
            if isinstance(value, int) and value.bit_length() > WRITTEN:
                told = f"a whole number of {value.bit_length():,} binary digits"
            self.errors.append(
                f"'{place}'{self.written.origin(place)} is {told}, but whole numbers lie between -2^63 and 2^63 (about 9.2e18) here; give one that does."
            )
        elif isinstance(value, str) and "\0" in value:
            self.errors.append(
                f"'{place}'{self.written.origin(place)} is {value!r}, which holds a NUL character (\\0): no path and no text has one here; take it out."
            )
        elif isinstance(value, str) and place in PATHS and _is_too_long(value):
            self.errors.append(
                f"'{place}'{self.written.origin(place)} is {value[:60]}..., which is longer than paths can be (255 bytes from / to /, 4,095 in all); give a "
                "shorter one."
            )


def _is_too_long(path: str) -> bool:
    written = path.encode(errors="replace")
    return len(written) > 4095 or max(map(len, written.split(b"/"))) > 255


def _holds_endless(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_holds_endless, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Endless)


def accepts_bool(hint: Any) -> bool:
    """Python takes True for 1; a recipe does not."""
    return hint in (bool, Any) or any(accepts_bool(a) for a in typing.get_args(hint)) or hint is dict or hint is object


def takes_text(hint: Any) -> bool:
    """Is this a text field, perhaps one that may be null?"""
    return hint is str or (typing.get_origin(hint) in (typing.Union, types.UnionType) and str in typing.get_args(hint))


def find_class(base: type, name: Any) -> type | None:
    """The subclass of `base` with this name, or at this dotted path (a class of the user's own)."""
    if not isinstance(name, str):
        return None
    if "." not in name:
        return choices(base).get(name)
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last, None)
    except (ImportError, ValueError, TypeError):  # `.b` names no module, and `..b` one beside nobody
        return None
    return found if inspect.isclass(found) and issubclass(found, base) and found is not base else None


def _meant(base: type, name: Any) -> str:
    """End of a sentence about a class that does not exist: which one was probably meant. Dotted paths are of the user's own classes."""
    by_letters = {known.lower(): known for known in choices(base)}
    close = difflib.get_close_matches(str(name).lower(), by_letters, n=1, cutoff=0.7) if "." not in str(name) else []
    return f"; did you mean {by_letters[close[0]]}?" if close else "."


def places(cls: type, place: str, bases: Mapping[type, str]) -> list[str]:
    """All valid places under a section."""
    if cls in bases:
        inner = [p for c in choices(cls).values() for p in places(c, f"{place}.init_args", bases)]
        return [f"{place}.class_path", *dict.fromkeys(inner)]
    found = []
    for key, (hint, _) in fields_of(cls).items():
        if inspect.isclass(hint) and (hint in bases or dataclasses.is_dataclass(hint)):
            found += places(hint, join(place, key), bases)
        else:
            found.append(join(place, key))
    return found


def plain(value: Any, bases: Mapping[type, str]) -> Any:
    """Back to what YAML can hold; a chosen class by its short name where that finds it again."""
    if dataclasses.is_dataclass(value) or isinstance(value, tuple(bases)):
        arguments = {key: plain(getattr(value, key), bases) for key in fields_of(type(value))}
        base = next((b for b in bases if isinstance(value, b)), None)
        if base is None:
            return arguments
        name = type(value).__name__
        in_house = (
            choices(base).get(name) is type(value) and type(value).__module__.split(".")[0] == base.__module__.split(".")[0]
        )
        return {"class_path": name if in_house else f"{type(value).__module__}.{name}", "init_args": arguments}
    if isinstance(value, dict):
        return {key: plain(v, bases) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, bases) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
