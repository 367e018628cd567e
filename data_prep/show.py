"""`python -m data_prep show FILE`: what a drafter is trained on, token by token, the supervised tokens set apart.

FILE is a file of chats (they are rendered and masked here, `drafttrain/target/masks.py`) or a token store (its own ids and mask are
shown). Nothing of a target but its tokenizer is loaded, and never code of its own.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NoReturn
from unicodedata import category

from rich.console import Console
from rich.text import Text

from data_prep.chat_rows import FORMS, chat_of, rows
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import locate
from drafttrain.target.masks import supervise
from drafttrain.target.template import ChatTemplate

SUPERVISED = "bold black on green"
OPEN, CLOSE = "⟦", "⟧"
"""Around supervised stretches where there is no colour."""
STORED = "token store"
MOST_NAMED = 5
"""Rows that are named of those with one fault."""


@dataclass(frozen=True)
class Shown:
    """A chat of T tokens, ready to be shown."""

    name: str
    """Row of the file, or key in the store."""
    tokens: list[tuple[str, bool]]
    """Text of each token and whether it is supervised [T]; the texts joined are the chat."""
    method: str
    notes: list[str]


@dataclass(frozen=True)
class Refused:
    """A row that cannot be masked."""

    number: int
    why: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def parser() -> argparse.ArgumentParser:
    """The flags of `show`. Errors are UserErrors."""
    found = _Parser(
        prog="python -m data_prep show",
        allow_abbrev=False,
        description="Show the tokens of chats, the supervised ones in colour (or between ⟦ ⟧ where there is no colour).",
        epilog="A character that is made of several tokens (an emoji, say) is shown at one of them, and the others are empty. "
        "With --config, keys of the recipe can be set as usual: --target.template_arguments '{enable_thinking: false}'.",
    )
    found.add_argument("file", type=Path, metavar="FILE", help=f"JSONL or JSON of chats, {FORMS}; or the folder of a token store")
    found.add_argument("--tokenizer", metavar="PATH", help="a model's folder, a tokenizer.json, a .gguf file or a Hub id")
    found.add_argument("--config", action="append", default=[], metavar="YAML", help="a recipe: its target's tokenizer is taken")
    found.add_argument("--template", type=Path, metavar="JINJA", help="a chat template, instead of the tokenizer's own")
    found.add_argument("--json", action="store_true", help="one JSON object per chat and line, with [text, supervised] per token")
    found.add_argument("--last-turn-only", action="store_true", help="supervise the last answer alone")
    found.add_argument("--no-reasoning", action="store_true", help="do not supervise reasoning")
    found.add_argument("--limit", type=_count, metavar="N", help="show the first N chats")
    return found


def show(options: argparse.Namespace, target: TargetConfig | None) -> None:
    """Print the chats of `options.file` with the tokenizer of `--tokenizer`, else of `target`, else of the store's target.

    Raises:
        UserError: nothing can be read, or some chats could not be masked (each fault is named on stderr, once; the others are printed first).
    """
    found = _stored(options, target) if options.file.is_dir() else _masked(options, target)
    console = Console(highlight=False)
    write = _json_line if options.json else _printer(console)
    shown, faults = 0, dict[str, list[int]]()
    try:
        for chat in islice(found, options.limit):
            if isinstance(chat, Shown):
                write(chat)
                shown += 1
            else:
                faults.setdefault(chat.why, []).append(chat.number)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except UserError:  # it cannot be read on
        sys.stdout.flush()
        for why, numbers in faults.items():
            _name(options.file, numbers, why)
        raise
    if faults:
        raise _explained(options.file, faults, shown)
    if not shown:
        raise UserError(f"{options.file} holds no chat; give rows like {FORMS}.")


def _explained(file: Path, faults: dict[str, list[int]], shown: int) -> UserError:
    """What is wrong with a file's rows (fault -> their numbers). Where it is that of all of them, that is the error; else faults are printed before it."""
    refused = sum(map(len, faults.values()))
    for why, (first, *others) in faults.items():
        if not shown and refused == 1 + len(others):
            like = f", like all {refused:,} rows that were read" if others else ""
            return UserError(f"{file} row {first}{like}: {why}")
        _name(file, [first, *others], why)
    return UserError(f"{refused:,} of {refused + shown:,} chats of {file} could not be masked; they are named above.")


def _name(file: Path, rows: list[int], why: str) -> None:
    """Says what is wrong with these rows."""
    first, *others = rows
    named, left = others[: MOST_NAMED - 1], len(others[MOST_NAMED - 1 :])
    more = ", ".join([*map(str, named), *([f"{left:,} more"] if left else [])])
    print(f"error: {file} row {first}" + (f" (and {more})" if more else "") + f": {why}", file=sys.stderr)


# --- chats from a file --------------------------------------------------------------------------------------------------------


def _masked(options: argparse.Namespace, target: TargetConfig | None) -> Iterator[Shown | Refused]:
    """Chats of a file, rendered; why, in place of one that cannot be masked."""
    if not options.file.exists():
        raise UserError(f"there is no {options.file}; give a file of chats or the folder of a token store.")
    chat = load_template(_wanted(options, target), options.template)
    if not chat.tokenizer.chat_template:
        raise UserError(f"the tokenizer {chat.path} has no chat template; give one with --template FILE.jinja.")
    for number, row in rows(options.file):
        try:
            messages, tools = chat_of(row)
            found = supervise(chat, messages, tools, last_turn_only=options.last_turn_only, reasoning=not options.no_reasoning)
        except UserError as error:
            yield Refused(number, str(error))
        else:
            yield Shown(f"row {number}", list(zip(found.pieces, found.mask, strict=True)), found.method, found.notes)


# --- chats from a store -------------------------------------------------------------------------------------------------------


def _stored(options: argparse.Namespace, target: TargetConfig | None) -> Iterator[Shown]:
    """Chats of a token store, decoded. The store's mask is shown as it is, so flags that make another one are refused."""
    for given, flag in (
        (options.last_turn_only, "--last-turn-only"),
        (options.no_reasoning, "--no-reasoning"),
        (options.template, "--template"),
    ):
        if given:
            raise UserError(f"{options.file}/ is a token store, whose mask is finished, so {flag} says nothing; leave it out.")
    inside = [options.file / name for name in ("train", "held_out") if (options.file / name / "manifest.json").exists()]
    if inside and not (options.file / "manifest.json").exists():
        raise UserError(f"{options.file}/ is a data folder, not a token store; give {' or '.join(map(str, inside))}.")
    store = TokenStore.open(options.file)
    made = store.manifest.identity.path
    tokenizer = load_template(_wanted(options, target or TargetConfig(made)), None).tokenizer
    notes = [] if len(tokenizer) <= store.manifest.identity.vocab else ["the tokenizer has more tokens than the store's target"]
    for index in range(len(store)):
        chat = store.chat(index)
        pieces = decoded(tokenizer, chat.ids.tolist())
        yield Shown(chat.key, list(zip(pieces, chat.supervised.tolist(), strict=True)), STORED, notes)


def decoded(tokenizer, ids: list[int]) -> list[str]:
    """The text of each token; a character of several tokens stands at the last of them. Joined they are the decoded ids."""
    pieces = []
    begin, done = 0, 0  # text of ids[begin:done] is out already; it is decoded again because the next text may depend on it
    for t in range(len(ids)):
        said = tokenizer.decode(ids[begin:done], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = tokenizer.decode(ids[begin : t + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and t + 1 < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(said) :])
        begin, done = done, t + 1
    return pieces


# --- tokenizers ---------------------------------------------------------------------------------------------------------------


def _wanted(options: argparse.Namespace, target: TargetConfig | None) -> TargetConfig:
    if options.tokenizer:
        return replace(target, path=options.tokenizer, revision=None) if target else TargetConfig(options.tokenizer)
    if target is None:
        raise UserError("show needs a tokenizer: --tokenizer PATH (a folder, a tokenizer.json or a Hub id), or --config RECIPE.")
    return target


def load_template(target: TargetConfig, template: Path | None) -> ChatTemplate:
    """Tokenizer and chat template of a target, without its weights and without code of its own.

    `template` is a file that stands in for the tokenizer's own. Raises UserError.
    """
    tokenizer, ends = _load_tokenizer(target)
    if template is not None:
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(f"--template is {template}, which cannot be read ({why}); give a .jinja file.") from None
        if not tokenizer.chat_template.strip():
            raise UserError(f"--template is {template}, which is empty; give a .jinja file.")
    return ChatTemplate(tokenizer, target.template_arguments, str(template or target.path), ends)


def _load_tokenizer(target: TargetConfig) -> tuple[Any, list[int]]:
    """The tokenizer, and the ids that the generation config beside it names as ends of an answer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place = Path(target.path).expanduser()
    try:
        if (file := _bare_tokenizer(place)) is not None:
            return PreTrainedTokenizerFast(tokenizer_file=str(file)), []
        if place.is_file() and place.suffix == ".json":
            place = place.parent
        where, gguf = (str(place), None) if place.is_dir() else locate(target.path)
        kwargs = {"gguf_file": gguf} if gguf else {}
        tokenizer = AutoTokenizer.from_pretrained(where, revision=target.revision, trust_remote_code=False, **kwargs)
        return tokenizer, [] if gguf else _ends(where, target.revision)
    except UserError as error:
        raise UserError(str(error).replace("target.path", "the tokenizer", 1)) from None
    except Exception as error:  # transformers and tokenizers raise whatever they like
        text = " ".join(str(error).split())[:240]
        raise UserError(
            f"the tokenizer {target.path} could not be loaded ({text}); give a model's folder, a tokenizer.json or a Hub id."
        ) from error


def _ends(where: str, revision: str | None) -> list[int]:
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(where, revision=revision).eos_token_id
    except OSError:  # there is none
        return []
    return [ends] if isinstance(ends, int) else list(ends or [])


def _bare_tokenizer(place: Path) -> Path | None:
    """A tokenizer.json that stands alone, with no settings beside it."""
    file = place / "tokenizer.json" if place.is_dir() else place
    alone = not any((file.parent / name).exists() for name in ("tokenizer_config.json", "config.json"))
    return file if file.is_file() and file.suffix == ".json" and (alone or file.name != "tokenizer.json") else None


# --- output -------------------------------------------------------------------------------------------------------------------


def _json_line(chat: Shown) -> None:
    print(json.dumps({"name": chat.name, "tokens": chat.tokens, "method": chat.method, "notes": chat.notes}, ensure_ascii=False))


def _printer(console: Console) -> Callable[[Shown], None]:
    """Writes a chat for people, in colour where the terminal has any."""
    colour = console.is_terminal and not console.no_color

    def write(chat: Shown) -> None:
        if colour:
            console.print(coloured(chat), soft_wrap=True)
        else:
            print(bracketed(chat))
        print(summary(chat), end="\n\n")

    return write


def coloured(chat: Shown) -> Text:
    """The chat, supervised tokens with a background."""
    text = Text()
    for piece, supervised in chat.tokens:
        text.append(_visible(piece), style=SUPERVISED if supervised else "")
    return text


def bracketed(chat: Shown) -> str:
    """The chat, supervised stretches between brackets."""
    stretches = [
        (supervised, _visible("".join(piece for piece, _ in group)))
        for supervised, group in groupby(chat.tokens, key=lambda token: token[1])
    ]
    return "".join(f"{OPEN}{text}{CLOSE}" if supervised else text for supervised, text in stretches)


def summary(chat: Shown) -> str:
    """One line: tokens, supervised, method, notes."""
    supervised = sum(kept for _, kept in chat.tokens)
    notes = f"; {'; '.join(chat.notes)}" if chat.notes else ""
    return f"{chat.name}: {len(chat.tokens)} tokens, {supervised} supervised, by {chat.method}{notes}"


def _visible(text: str) -> str:
    """Newlines are seen, and control characters cannot steer the terminal."""
    shown = {"\n": "↵\n", "\t": "⇥\t"}
    return "".join(shown.get(sign) or (repr(sign)[1:-1] if category(sign) == "Cc" else sign) for sign in text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and what is left for the recipe (nothing is, without --config). Raises UserError."""
    options, rest = parser().parse_known_args(argv)
    if rest and not options.config:
        raise UserError(f"{rest[0]!r} is no flag of show; see python -m data_prep show --help.")
    return options, rest
