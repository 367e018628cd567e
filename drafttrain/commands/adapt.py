"""`drafttrain adapt`: prompts in, answers out, a line of JSON each; and the drafter keeps learning from them (Online Speculative Decoding).

Answers go to --out or stdout, everything else to stderr. TERM, Ctrl-C or the end of the prompts let the answers in hand be finished, save, and end
with exit code 0; where there were lines and none was a prompt, it is an error.
"""

import codecs
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from drafttrain.commands.drafts import load_draft
from drafttrain.commands.prompt_stream import Lines, PromptStream
from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.save import MADE_FILE
from drafttrain.drafters.warm_start import meant
from drafttrain.errors import UserError
from drafttrain.files import RunLock, explain_full_disk, restore_folder
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.target.load import load_target
from drafttrain.target.target import Target
from drafttrain.tasks.adapt import Adapter, Answer
from drafttrain.tasks.adapt_files import AdaptFiles
from drafttrain.tasks.adapt_learner import AdaptSections
from drafttrain.tasks.speed_config import require_compiler
from drafttrain.tasks.stop import StopSignal
from drafttrain.topology import read_topology

STDIN = "-"


def run(recipe: Recipe, options: Options) -> None:
    """Serve `options.prompts` and learn from them. Raises UserError."""
    if not options.prompts:
        raise UserError(
            "adapt needs prompts: --prompts FILE with a line of JSON each, or --prompts - to read them from stdin as they come."
        )
    if (world := read_topology().world) > 1:
        raise UserError(f"adapt serves in one process, but torchrun started {world}; start it with python -m drafttrain adapt.")
    sections = AdaptSections(
        adapt=recipe.adapt,
        objective=recipe.objective,
        optimizer=recipe.optimizer,
        length=recipe.data.length,
        seed=recipe.data.seed,
        speed=recipe.speed,
        clip=recipe.trainer.get("gradient_clip_val"),
    )
    require_compiler(recipe.speed)
    folder = options.run
    with _opened(options.prompts) as handle, _written(options.out) as out, RunLock(folder.folder), StopSignal() as stop:
        folder.record("adapt", recipe.plain())
        files = AdaptFiles(folder.checkpoints, folder.logs, _facts(recipe))
        draft = _start(folder, files, options.draft)
        _say(f"loading {recipe.target.path}")
        target = load_target(recipe.target)
        net = load_draft(draft, target)
        for line in _unlike(recipe.drafter, net, target):
            _say(line)
        adapter = Adapter(target, net, sections, files, stop, _say)
        _say(f"adapting {draft}, {adapter.progress.updates} updates so far; answers go to {options.out or 'stdout'}")
        prompts = PromptStream(Lines(handle, stop), target, recipe.adapt.max_tokens, adapter.roller.drafts, _say)
        before = adapter.progress.prompts
        adapter.serve(prompts, _writer(out, options.out or "stdout"))
        done = adapter.progress
        _say(f"{done.prompts - before:,} prompts answered; {done.updates:,} updates and {done.rollbacks:,} rollbacks so far")
        if prompts.left_out and done.prompts == before and not stop.requested:
            raise UserError(
                f"--prompts {options.prompts}: of {prompts.left_out:,} lines none was a prompt that could be answered, so nothing was learnt; mend them "
                "as the lines above say."
            )


def _start(folder: Run, files: AdaptFiles, asked: Path | None) -> Path:
    """The drafter to begin with: the newest one of an earlier start, else the one that was asked for, else the run's own. UserError if there is none."""
    if files.state.exists():
        if asked is not None:
            _say(f"note: --draft {asked} is not read again: the run goes on from its own drafter")
        restore_folder(files.last_drafter)
        return files.last_drafter if files.last_drafter.exists() else files.best  # of either only the shape is needed
    if asked is not None:
        if not os.path.isdir(asked):
            raise UserError(
                f"--draft is {asked}, but there is no such folder; give a drafter of drafttrain (checkpoints/best, or an export)."
            )
        return asked
    for place, sign in ((folder.best, "drafter.json"), (folder.export, MADE_FILE)):  # best is in fp32, an export may be rounded
        if (place / sign).exists():
            return place
    raise UserError(
        f"{folder.folder}/ has no drafter to begin with (checkpoints/best/ or export/): run train with this recipe first, or name one with --draft."
    )


def _unlike(asked: DrafterConfig, net: DrafterNet, target: Target) -> list[str]:
    """Where the recipe says something else of the drafter than the one that learns, whose own options count: by what both come to."""
    loaded = net.config
    if type(asked) is not type(loaded):
        found = [f"the recipe says {type(asked).__name__}, the drafter is {type(loaded).__name__}, which counts"]
    else:
        both = [(key, *_come_to(key, asked, net, target)) for key in vars(asked)]
        found = [
            f"the recipe says {key} {_told(says)}, the drafter has {_told(has)}, which counts"
            for key, says, has in both
            if says != has
        ]
    return [f"note: the drafter that learns is another than the recipe's: {'; '.join(found)}"] if found else []


def _come_to(key: str, asked: DrafterConfig, net: DrafterNet, target: Target) -> tuple[Any, Any]:
    """An option of the recipe and the drafter's own, choices that they leave being made."""
    says, own = vars(asked)[key], vars(net.config)[key]
    if key == "draft_vocab":  # what a share or best comes to was counted when the drafter was made
        size = len(net.vocabulary.ids)
        return (size if says == own else target.vocab if says is None else says), size
    try:
        return meant(asked, key, says, target), meant(net.config, key, own, target)
    except UserError:  # the recipe's does not fit the target, and does not count
        return says, own


def _told(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(list(value) if isinstance(value, tuple) else value)


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What a saved optimizer was made with, and cannot be changed under it (rates and warm-up can)."""
    config = recipe.optimizer
    by_muon = "AdamW alone" if config.muon_lr is None else "Muon beside AdamW"
    return {"optimizer.betas": list(config.betas), "optimizer.weight_decay": config.weight_decay, "optimizer.muon_lr": by_muon}


@contextmanager
def _opened(place: str) -> Iterator[int]:
    """File descriptor of the prompts."""
    if place == STDIN:
        if sys.stdin is None:  # started with `<&-`
            raise UserError("--prompts -: stdin is closed; pipe prompts into it, or give a file.")
        yield sys.stdin.fileno()
        return
    try:
        handle = os.open(place, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"--prompts {place}: {(error.strerror or str(error)).lower()}; give a file of prompts, or - for stdin."
        ) from None
    try:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise UserError(f"--prompts {place}: is a directory; give a file of prompts, or - for stdin.")
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _written(place: Path | None) -> Iterator[TextIO]:
    """Where answers go: behind those that are there."""
    if place is None:
        yield sys.stdout
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        file = place.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {place}: {(error.strerror or str(error)).lower()}; give a file that can be written.") from None
    try:
        yield file
    finally:
        with suppress(OSError):  # a full disk: what could not be written was said when it was tried
            file.close()


def _writer(out: TextIO, place: Path | str) -> Callable[[Answer], None]:
    ascii = codecs.lookup(getattr(out, "encoding", None) or "utf-8").name != "utf-8"  # any other may lack a character

    def write(answer: Answer) -> None:
        with explain_full_disk(place, "what was learnt is saved, and the last answer is missing."):
            print(json.dumps(asdict(answer), ensure_ascii=ascii), file=out, flush=True)

    return write


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
