"""Reading recipes: YAML with line numbers, files merged from left to right, `--section.key value` on top.

Every value remembers where it was written (`recipes/x.yaml line 12`, or the flag as typed), so that an error can point there.
A *place* is a dotted path such as `drafter.init_args.taps`; the items of a list are `prepare.prompts[0]`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drafttrain.errors import UserError

CLASS_KEYS = {"class_path", "init_args"}
SHOWN = 40
"""Characters of a value that a sentence shows."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but `6e-4` is a number (plain YAML 1.1 wants `6.0e-4`); dates and `1:30` stay text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML does, which lets Python's own errors through where a value is not what its tag says (`!!int abc`)."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:SHOWN]!r} is no {tag}", problem_mark=node.start_mark
            ) from error


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "float", "int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:\d[\d_]*)\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.inf|\.nan)$", re.I
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F]+)$"), list("-+0123456789")
)


class Endless(str):
    """A whole number with more digits than Python reads or writes (4,300 of them), as it was written: its place refuses it, in a sentence."""


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int | Endless:
    try:
        number = loader.construct_yaml_int(node)
        str(number)  # one in hexadecimal digits is read, and cannot be shown
    except ValueError as error:
        if "limit" not in str(error):  # of digits; else it is no number, whatever its tag says
            raise
        return Endless(node.value)
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


@dataclass
class Written:
    """What the user wrote: nested dicts, and where each place was written."""

    tree: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)
    """Values from the command line as typed: a text field takes `123` as it stands."""
    flags: dict[str, str] = field(default_factory=dict)
    """Places that were set by a flag of another name, and that flag (`--max-tokens`)."""
    notes: list[str] = field(default_factory=list)
    """What the merge did that nobody asked for by name: announced, never silent."""

    def origin(self, place: str) -> str:
        """` (file line n)` of a place or of its nearest written ancestor; empty if unknown."""
        while place:
            if place in self.where:
                return f" ({self.where[place]})"
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return ""


def load_value(text: str) -> Any:
    """One YAML value, as typed after a flag.

    Raises:
        UserError: broken YAML, a key written twice.
    """
    try:
        return _loaded(text, text[:SHOWN], {})
    except yaml.YAMLError as error:
        raise UserError(
            f"{text!r} is not a YAML value ({_problem(error)}); put quotes around text with brackets or colons."
        ) from None


def _loaded(text: str, source: Path | str, where: dict[str, str]) -> Any:
    """The values of a text; fills `where`. Raises YAMLError for what is none, UserError for a key written twice."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, "", source, where)
    except (ValueError, OverflowError) as error:  # of chr(), which PyYAML gives whatever an escape says
        raise yaml.MarkedYAMLError(problem="an escape stands for no character", problem_mark=loader.get_mark()) from error
    except RecursionError as error:
        raise yaml.YAMLError("it holds itself, or is nested too deeply") from error
    finally:
        loader.dispose()


def read_file(path: Path) -> Written:
    """One recipe file.

    Raises:
        UserError: missing file, broken YAML, a key written twice, not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: it is not UTF-8 text; give the path of a recipe.") from None
    except OSError as error:
        raise UserError(
            f"--config {path}: {error.strerror.lower() if error.strerror else error}; give the path of a recipe."
        ) from None
    written = Written()
    try:
        value = _loaded(text, path, written.where)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {_problem(error)}.") from None
    if value is not None and not isinstance(value, dict):
        got = "int" if isinstance(value, Endless) else type(value).__name__
        raise UserError(f"{path} should hold sections such as 'target:' and 'drafter:', got {got}.")
    written.tree = value or {}
    return written


def read_all(configs: Sequence[Path], overrides: Sequence[tuple[str, str]], typed: Mapping[str, str] | None = None) -> Written:
    """Merge files from left to right, then the flags (`place`, `value as typed`). `typed`: as `Written.flags`.

    Raises:
        UserError: as `read_file` and `load_value`; a flag that goes through something that is not a section.
    """
    result = Written(flags=dict(typed or {}))
    for path in configs:
        read = read_file(path)
        result.where.update(read.where)
        merge(result.tree, read.tree, "", str(path), result.notes)
    for place, text in overrides:
        value = load_value(text)
        layer = value
        for key in reversed(place.split(".")):
            layer = {key: layer}
        for below in [p for p in result.where if p.startswith((f"{place}.", f"{place}["))]:
            del result.where[below]
        flag = result.flags.get(place, f"--{place}")
        merge(result.tree, layer, "", flag, result.notes)
        result.where[place] = flag
        result.raw[place] = text
    return result


def merge(base: dict[str, Any], top: dict[str, Any], place: str, source: str, notes: list[str]) -> None:
    """Lay `top` over `base` in place. Lists are replaced whole. A class's arguments go with the class, and a note says so."""
    for key, value in top.items():
        here = f"{place}.{key}" if place else key
        old = base.get(key)
        if isinstance(value, str) and isinstance(old, dict) and CLASS_KEYS & old.keys():
            value = {"class_path": value}  # `--drafter Eagle3`: a class by name
        if isinstance(old, str) and isinstance(value, dict) and CLASS_KEYS & value.keys():
            old = base[key] = {"class_path": old}  # `positions: Decay` in a file, its arguments on top
        if isinstance(old, dict) and isinstance(value, dict):
            new_class = value.get("class_path")
            if new_class is not None and _last(new_class) != _last(old.get("class_path")):
                if old.get("init_args"):
                    notes.append(
                        f"{here} is now {new_class} ({source}): the arguments of {old.get('class_path')} are dropped "
                        f"({', '.join(old['init_args'])})."
                    )
                base[key] = value
                continue
            merge(old, value, here, source, notes)
        else:
            base[key] = value


def _last(class_path: Any) -> str:
    return str(class_path).rpartition(".")[2]


def _construct(loader: _Loader, node: yaml.Node, place: str, source: Path | str, where: dict[str, str]) -> Any:
    """Plain values of a YAML node; fills `where`; refuses a key written twice."""
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node, place, source)
        loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node))
            here = f"{place}.{key}" if place else key
            where[here] = f"{source} line {key_node.start_mark.line + 1}"
            result[key] = _construct(loader, value_node, here, source, where)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            where[f"{place}[{i}]"] = f"{source} line {item.start_mark.line + 1}"
            items.append(_construct(loader, item, f"{place}[{i}]", source, where))
        return items
    return loader.construct_object(node)


def _refuse_twice(node: yaml.MappingNode, place: str, source: Path | str) -> None:
    """PyYAML lets the last of two equal keys win in silence."""
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if (key := str(key_node.value)) in lines:
            here = f"{place}.{key}" if place else key
            raise UserError(f"{source}: '{here}' is written twice, in lines {lines[key]} and {line}; keep one.")
        lines[key] = line


def _problem(error: yaml.YAMLError) -> str:
    """What PyYAML says, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())
