"""The command line: `python -m drafttrain COMMAND --config RECIPE [--config HARDWARE] [--section.key value]`.

Each command is one file in `commands/` that composes what it needs. Only the file that is asked for is imported, so that
validating on a laptop never imports Lightning or DeepSpeed. Every error that a user can mend is printed as `error: ...`, and the
exit code is 2. `inspect` and `compare` are given folders of drafters instead of a recipe.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import io
import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from drafttrain.commands.folder_options import CompareOptions, InspectOptions
from drafttrain.commands.trim_options import TrimOptions
from drafttrain.errors import UserError, printable
from drafttrain.options import Options
from drafttrain.recipe import Recipe, load_recipe, sections_help
from drafttrain.run import Run
from drafttrain.topology import error_file, rank, read_topology, speaks

COMMANDS = {
    "train": "train the drafter (under torchrun for several processes); goes on from the last checkpoint",
    "export": "write the best drafter (or --checkpoint) as a folder for vLLM, SGLang or speculators, else our own; --push REPO sends it to the Hub",
    "validate": "prove the export on held-out prompts: losslessness, acceptance, speed; writes report/",
    "bench": "time every method of drafting against plain decoding, by question category; writes report/bench/",
    "generate": "answer a --prompt, the tokens that the drafter guessed in colour",
    "adapt": "answer --prompts and keep the drafter learning from them, guarded; goes on from where it was stopped",
    "trim": "cut a trained drafter's head down to --size tokens without training, as a run of its own",
    "plan": "print the resolved recipe and its arithmetic; starts nothing",
    "inspect": "say what the folder of a drafter is (PATH, ours or anybody's), who loads it, and what is wrong with it; needs no recipe",
    "compare": "set two drafters (A B) side by side: configuration, tensors and, with --config RECIPE, tau on the same prompts",
}
FOLDERS = {"inspect": "PATH [--target TARGET]", "compare": "A B [--config RECIPE [--section.key value]] [--json FILE]"}
"""Commands that are given folders or Hub ids, and how they are called."""
ABOUT = COMMANDS | {
    "data_prep": "Prompts in, token stores out: runs/NAME/data/. To see which tokens of a file of chats, or of a token store, are "
    "supervised: python -m data_prep show --help"
}
"""What the help of a program begins with."""
UNREAD = 141
"""Exit code where the reader of our output has gone, as a shell gives it to a program that SIGPIPE (13) ended."""
GRACE_S = 3.0
"""How long a rank other than 0 waits before it speaks; torchrun looks after its processes every 0.1 s."""
REFUSED = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
}  # fmt: skip
"""What a machine refuses that its owner can mend: no room, no right, or a file where a folder should be."""
SHOWN = 60
"""Characters of a path that is too long that are shown."""
EXAMPLE = "recipes/smollm2-135m/eagle3.yaml"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    return guarded(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def guarded(run: Callable[[], None]) -> int:
    """Run something; a UserError becomes lines on stderr and exit code 2, Ctrl-C 130, and `| head` ends it in silence with 141.

    Lines are sent as they are said, also where they go into a file or a pipe: else minutes would pass without a word there.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # a character that its encoding lacks ends nothing
    try:
        try:
            return _answered(run)
        finally:  # also where argparse ends the program behind its help
            if sys.stdout is not None:  # closed from the start
                sys.stdout.flush()
    except BrokenPipeError:
        gone = [stream.fileno() for stream in (sys.stdout, sys.stderr) if _unread(stream.fileno())]
        if not gone:  # a pipe or socket of the program's own
            raise
        for number in gone:  # Python flushes once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return UNREAD


def _unread(number: int) -> bool:
    """Whether an output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _answered(run: Callable[[], None]) -> int:
    """The exit code of a run, its errors said.

    Of an error that all ranks share only rank 0 speaks: torchrun ends the others within their grace. One that a single rank has
    would otherwise be lost, so that rank speaks after it.
    """
    try:
        try:
            run()
        except OSError as error:
            if (told := _explained(error)) is None:
                raise
            raise told from error
    except UserError as error:
        if not speaks():
            time.sleep(GRACE_S)
        if speaks():
            for note in error.notes:
                print(f"note: {printable(note)}", file=sys.stderr)
        who = "error" if speaks() else f"error (rank {rank()})"
        lines = [f"{who}: {printable(sentence)}" for sentence in str(error).splitlines()]
        print(*lines, sep="\n", file=sys.stderr)
        _tell_launcher("\n".join(lines))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _explained(error: OSError) -> UserError | None:
    """What the machine refuses (a full disk, `ulimit -f`, permissions, a file in the way) as a sentence; None of any other error."""
    if error.errno == errno.ENAMETOOLONG:
        return UserError(
            f"the path {str(error.filename)[:SHOWN]}... is longer than this machine lets paths be (mostly 255 characters from / to /); give a shorter one."
        )
    if error.errno not in REFUSED:
        return None
    what = "a file" if error.filename is None else str(error.filename)
    return UserError(
        f"{what} could not be read or written ({error.strerror}); what was finished before is kept: mend that and run the same command again."
    )


def _tell_launcher(told: str) -> None:
    """torchrun ends with a traceback of its own, under which an error would be buried, and with what it finds in this file, in this form."""
    if (file := error_file()) is not None:
        data = {"message": {"message": told, "extraInfo": {"py_callstack": told, "timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):  # it has been said once
            file.write_text(json.dumps(data))


def _main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return
    command, *rest = argv
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        raise UserError(
            f"no command {command!r}: " + (f"did you mean {close[0]}?" if close else f"choose from {', '.join(COMMANDS)}.")
        )
    program = f"python -m drafttrain {command}"
    if command in FOLDERS:
        given = parse_folders(command, program, rest)
        if given is not None:
            importlib.import_module(f"drafttrain.commands.{command}").run(*given)
        return
    parsed = parse(command, program, rest)
    if parsed is not None:
        recipe, options = parsed
        if command in ("train", "plan"):  # before Lightning reads the same variables in its own way
            # A plan may be made elsewhere than the training: what this machine lacks for a strategy, it says itself.
            read_topology(recipe.trainer.get("strategy", "auto") if command == "train" else "auto")
        importlib.import_module(f"drafttrain.commands.{command}").run(recipe, options)


def parse(command: str, program: str, argv: Sequence[str]) -> tuple[Recipe, Options] | None:
    """Recipe and options of a command; None after printing its help.

    Raises:
        UserError: everything that is wrong with the flags or the recipe.
    """
    parser = _options_parser(command, program)
    known, rest = parser.parse_known_args(argv)
    if known.help:
        print(parser.format_help())
        print(sections_help())
        return None
    overrides = pairs(rest, tuple(vars(known)))
    spelt = {key: f"--{key}" for key, _ in overrides}
    stands_for = {
        "push": "export.push", "checkpoint": "export.checkpoint", "dry_run": "export.dry_run", "size": "drafter.init_args.draft_vocab",
        "max_tokens": "validate.max_tokens",
    }  # fmt: skip
    typed = {}
    for flag, key in stands_for.items():
        if (value := getattr(known, flag, None)) == "":
            raise UserError(
                f"--{flag.replace('_', '-')} is an empty word, such as a variable that is not set; give it a value, or leave it out."
            )
        if value:
            overrides.append((key, value))
            typed[key] = f"--{flag.replace('_', '-')}"
    recipe = _recipe(known.config, overrides, typed)
    kind = TrimOptions if command == "trim" else Options
    extra = {
        name: getattr(known, name) for name in ("prompt", "prompts", "draft", "counts", "out", "finished") if hasattr(known, name)
    }
    return recipe, kind(Run(known.runs / recipe.name), typed=spelt | typed, **extra)


def _recipe(configs: Sequence[str], overrides: Sequence[tuple[str, str]], typed: Mapping[str, str] | None = None) -> Recipe:
    recipe, notes = load_recipe(configs, overrides, typed)
    if speaks():
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    return recipe


def parse_folders(command: str, program: str, argv: Sequence[str]) -> tuple[object, ...] | None:
    """What `run` of a command that is given folders takes: its options and, of compare, the recipe or None; None after printing its help.

    Raises:
        UserError: everything that is wrong with the flags or the recipe.
    """
    folders = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    usage = f"{program} {FOLDERS[command]}"
    parser = _Parser(prog=program, usage=usage, description=ABOUT[command], allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="this text")
    if command == "inspect":
        parser.add_argument("--target", metavar="TARGET", help="check it against this target too: folder, Hub id or .gguf file")
    else:
        parser.add_argument(
            "--config",
            action="append",
            default=[],
            metavar="YAML",
            help="a recipe: measure tau with its target and held-out prompts",
        )
        parser.add_argument(
            "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are (default: runs)"
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the same there as JSON")
    known, rest = parser.parse_known_args(argv[len(folders) :])
    if known.help:
        print(parser.format_help())
        return None
    wanted = FOLDERS[command].partition(" [")[0].split()
    if len(folders) != len(wanted):
        raise UserError(
            f"{command} is first given {' and '.join(wanted)}, folders of drafters or Hub ids, and got {len(folders)} of them: {usage}."
        )
    overrides = pairs(rest, tuple(vars(known)))
    if command == "inspect":
        if overrides:
            raise UserError(f"inspect reads no recipe, so --{overrides[0][0]} means nothing to it; see {program} --help.")
        return (InspectOptions(folders[0], known.target),)
    if overrides and not known.config:
        raise UserError(f"--{overrides[0][0]} is a key of a recipe, and none is given; add --config RECIPE, or leave it out.")
    recipe = _recipe(known.config, overrides) if known.config else None
    return CompareOptions(folders[0], folders[1], known.runs, known.json), recipe


def _options_parser(command: str, program: str) -> _Parser:
    usage = f"{program} --config RECIPE [--config MORE] [--section.key value]"
    parser = _Parser(prog=program, usage=usage, description=ABOUT[command], allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="this text")
    parser.add_argument(
        "--config", action="append", default=[], metavar="YAML", help="a recipe; several are merged, later ones win"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders are (default: runs)")
    if command == "generate":
        parser.add_argument("--max-tokens", metavar="N", help="most tokens of the answer (same as --validate.max_tokens)")
        parser.add_argument("--prompt", metavar="TEXT", help="what the user says")
    if command in ("generate", "validate", "bench"):
        told = "another drafter than the run's own: a folder or Hub id (owner/name), ours or as others publish theirs"
        parser.add_argument("--draft", type=Path, metavar="DRAFTER", help=told)
    if command == "adapt":
        parser.add_argument("--prompts", metavar="FILE", help="a line of JSON each, with messages or prompt; - reads stdin")
        parser.add_argument(
            "--draft", type=Path, metavar="DIR", help="an export or a checkpoint to begin with, instead of the run's own"
        )
        parser.add_argument("--out", type=Path, metavar="FILE", help="where answers are added (default: stdout)")
    if command == "trim":
        parser.add_argument(
            "--size", metavar="SIZE", help="tokens, share to cover, or best (same as --drafter.init_args.draft_vocab)"
        )
        parser.add_argument("--draft", type=Path, metavar="DIR", help="a checkpoint or an export, instead of the run's best")
        parser.add_argument("--counts", type=Path, metavar="STORE", help="token store to count in, instead of the run's own")
        parser.add_argument("--out", type=Path, metavar="DIR", help="run folder to make (default: NAME-SIZE beside the run's)")
    if command == "export":
        parser.add_argument("--push", metavar="OWNER/NAME", help="send it to this Hub repository (same as --export.push)")
        told = "best (default), last, or the path of a drafter or of a training state (same as --export.checkpoint)"
        parser.add_argument("--checkpoint", metavar="WHICH", help=told)
        told = "export nothing while training has steps to do, as launch/pipeline.sh asks"
        parser.add_argument("--finished", action="store_true", help=told)
        told = "with --push: list what would go, and send nothing (same as --export.dry_run true)"
        parser.add_argument("--dry-run", action="store_const", const="true", help=told)
    return parser


def pairs(rest: Sequence[str], flags: Sequence[str] = ()) -> list[tuple[str, str]]:
    """`--section.key value` and `--section.key=value` as pairs. Raises UserError for anything else.

    `flags`: those that are no keys, as argparse names them (dry_run of --dry-run).
    """
    found, words = [], list(rest)
    while words:
        flag = words.pop(0)
        if not flag.startswith("--") or flag == "--":
            recipe = flag.endswith((".yaml", ".yml")) and os.path.isfile(flag)
            way_out = f"did you mean --config {flag}?" if recipe else "a key of the recipe is set with --section.key value."
            raise UserError(f"{flag!r} belongs to no flag; {way_out}")
        name, equals, value = flag[2:].partition("=")
        if "_" in name and name in flags:
            raise UserError(f"there is no --{name}: did you mean --{name.replace('_', '-')}?")
        if not equals:
            if not words or (words[0].startswith("--") and len(words[0]) > 2):
                raise UserError(f"{flag} needs a value: {flag} VALUE (or {flag}=VALUE).")
            value = words.pop(0)
        found.append((name, value))
    return found


def _overview() -> str:
    lines = [
        "usage: python -m drafttrain COMMAND --config RECIPE [--config MORE] [--section.key value] [--runs DIR]",
        "",
        *(f"  {name:<9} {text}" for name, text in COMMANDS.items()),
        "",
        f"Of folders: {', '.join(f'{name} {words}' for name, words in FOLDERS.items())}",
        "First make the data: python -m data_prep --config RECIPE. All of it in order: launch/pipeline.sh RECIPE.",
        f"Keys of a recipe: python -m drafttrain plan --help. An example: {EXAMPLE}",
    ]
    return "\n".join(lines)
