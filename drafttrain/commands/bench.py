"""`drafttrain bench`: every way of drafting against plain decoding, on Spec-Bench's questions or any others."""

from pathlib import Path

from data_prep.dialects import Broken, Reader
from data_prep.rows import json_lines
from drafttrain.commands.bench_methods import fitted
from drafttrain.commands.drafts import Draft, load, refresh_card
from drafttrain.data.store import TokenStore
from drafttrain.decoding.methods import Method
from drafttrain.errors import UserError
from drafttrain.files import RunLock
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run, command_line
from drafttrain.target.target import Target
from drafttrain.types import Request
from drafttrain.validation.bench import bench
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.bench_questions import Question, Skipped

UNSORTED = "all"
"""Category of a question that names none."""
CALIBRATION = 32
"""Prompts for methods that measure something first."""


def run(recipe: Recipe, options: Options) -> None:
    """Measure and write bench/ in the drafter's report (drafts.py), then the model card of the run's export. Raises UserError, also if fp32 output is not lossless."""
    folder, config = options.run, recipe.bench
    questions, skipped = read_questions(config.prompts) if config.prompts is not None else ([], [])
    held_out = TokenStore.open(folder.data / "held_out") if config.prompts is None else None
    draft = Draft.of(recipe, options)
    target = load(recipe.target)
    if held_out is not None:
        questions = _of_store(held_out, target)
    net, told = draft.load(target, recipe)
    config = fitted(config, net.deepest)
    facts = {"name": recipe.name, "command": command_line(), **told}
    calibration = _calibration(folder, config, target)
    with RunLock(folder.folder):
        folder.record("bench", recipe.plain())
        try:
            bench(target, net, questions, config, draft.report / "bench", calibration=calibration, skipped=skipped, facts=facts)
        finally:
            if draft.own:
                refresh_card(folder)


def read_questions(path: str) -> tuple[list[Question], list[Skipped]]:
    """Questions of a file, and the lines that are none.

    Raises:
        UserError: a file that cannot be read, or has no question.
    """
    name = Path(path).name.split(".")[0]
    reader = Reader(name, None)
    questions, skipped = [], []
    for number, row in json_lines(path, "bench.prompts"):
        try:
            if isinstance(row, Broken):
                raise row
            questions.append(_question(reader, number, row))
        except Broken as error:
            skipped.append(Skipped(f"line {number}", str(error)))
    if not questions:
        found = f"{skipped[0].question}: {skipped[0].why}" if skipped else "it is empty"
        raise UserError(
            f"bench.prompts is {path}, which has no question ({found}); each line must look like "
            '{"category": "math", "turns": ["What is 2 + 3?"]}.'
        )
    return questions, skipped


def _question(reader: Reader, number: int, row: dict) -> Question:
    prompt = reader.prompt(number, row)
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise Broken("a category that is not text")
    key = prompt.key.removeprefix(f"{reader.source}-")
    return Question(key, category or UNSORTED, tuple(prompt.messages), tuple(prompt.tools or ()))


def _of_store(held_out: TokenStore, target: Target) -> list[Question]:
    """The held-out prompts of a run, as they were rendered. UserError if they are another target's."""
    held_out.require(target.identity)
    return [Question(request.key, UNSORTED, ids=request.ids) for request in held_out.requests(1)]


def _calibration(folder: Run, config: BenchConfig, target: Target) -> list[Request]:
    """Prompts that are not benchmarked: held-out ones where the questions come from a file, else training ones. [] where there is no
    data, or no method that measures something first."""
    place = folder.data / ("train" if config.prompts is None else "held_out")
    if not (place / "manifest.json").exists() or all(type(method).prepare is Method.prepare for method in config.methods):
        return []
    store, found = TokenStore.open(place), []
    store.require(target.identity)
    for index in range(min(len(store), CALIBRATION)):  # a training store may hold a million chats
        chat = store.chat(index)
        prompt = int(chat.supervised.long().argmax())
        found.append(Request(chat.key, tuple(chat.ids[:prompt].tolist()), config.max_tokens))
    return found
