"""Everything before the first answer: collect prompts, drop what cannot be asked, split off the held-out set, write it down.

prompts.jsonl, held_out.jsonl   {"key", "source", "messages", "tools"} a line
dropped.jsonl                   {"row", "reason"} a line
prompts.json                    written last: the ledger so far and what each source gave
"""

import json
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from data_prep.config import PrepareConfig
from data_prep.dialogue import first_turn
from data_prep.ledger import Ledger, reasons
from data_prep.mix import mix
from data_prep.prompt import Prompt, Work, compact
from data_prep.repeats import near_repeats
from data_prep.split import hold_out, near_duplicates
from data_prep.text import fingerprint
from drafttrain.data.sealed import read_sealed, write_sealed
from drafttrain.errors import UserError
from drafttrain.files import sha256_file, write_jsonl_atomic

FACTS = ("read", "dropped", "notes", "sources", "sha256")
"""Keys of prompts.json."""


@dataclass
class Gathered:
    """Prompts to be answered, and the account of those that will not be."""

    training: list[Prompt]
    held_out: list[Prompt]
    ledger: Ledger
    sources: dict[str, dict]
    """Name of each source -> its own {"in", "kept", "dropped"}."""


def gather(config: PrepareConfig, work: Work) -> Gathered:
    """From what an earlier process wrote down, if it got that far. UserError if no prompt is left, or the files were changed."""
    if (work.folder / "prompts.json").exists():
        return _read(work.folder)
    ledger = Ledger()
    sources: dict[str, dict] = {}
    usable = askable(_collected(config, work, ledger, sources), work, config.max_prompt, ledger)
    if config.dedupe == "near":
        usable = _without_repeats(usable, config.near_duplicate, ledger)
    training, held_out = hold_out(usable, config.held_out, config.seed, config.held_out_source, reasons(ledger.dropped))
    close = near_duplicates(training, held_out, config.near_duplicate)
    for prompt in training:
        if prompt.key in close:
            ledger.drop("close to a held-out prompt", prompt.key)
    training = [prompt for prompt in training if prompt.key not in close]
    if not training:
        raise UserError(
            f"Every training prompt is close to a held-out one (prepare.near_duplicate {config.near_duplicate}); raise it, or "
            "use prompts that differ more."
        )
    # The mix comes last: other weights or another count leave the held-out set as it is.
    training = mix(training, config.weights, config.count, config.seed, ledger, work.say)
    gathered = Gathered(training, held_out, ledger, sources)
    _write(work.folder, gathered)
    return gathered


def _collected(config: PrepareConfig, work: Work, ledger: Ledger, sources: dict[str, dict]) -> list[Prompt]:
    """The prompts of all sources, one source after the other; their own ledgers are added up, and written into `sources`."""
    prompts: list[Prompt] = []
    for source in config.prompts:
        own = Ledger()
        found = source.collect(work, own)
        sources[source.name] = own.facts(len(found))
        ledger.add(own)
        prompts += found
    return prompts


def askable(prompts: list[Prompt], work: Work, longest: int, ledger: Ledger) -> list[Prompt]:
    """Prompts that are new, that the chat template takes, and that are short enough; rendered. UserError if none is."""
    work.target.render([{"role": "user", "content": "Hello"}])  # no template at all: the user must hear it, not every row
    keys: set[str] = set()
    texts: set[bytes] = set()
    usable = []
    for prompt in prompts:
        text = _identity(prompt)
        found = "id used twice" if prompt.key in keys else "duplicate" if text in texts else _rendered(prompt, work, longest)
        if isinstance(found, str):
            ledger.drop(found, prompt.key)
            continue
        keys.add(prompt.key)
        texts.add(text)
        usable.append(Prompt(prompt.key, prompt.source, prompt.messages, prompt.tools, found))
    if not usable:
        raise UserError(
            f"None of {len(prompts):,} prompts can be asked ({reasons(ledger.dropped)}); raise prepare.max_prompt, or mend the "
            "prompts."
        )
    return usable


def _identity(prompt: Prompt) -> bytes:
    """Equal for prompts that ask the same: who says what, and with which tools."""
    said = (part for message in prompt.messages for part in (message["role"], message["content"]))
    return fingerprint(*said, *([] if prompt.tools is None else ["tools", json.dumps(prompt.tools, sort_keys=True)]))


def _without_repeats(prompts: list[Prompt], threshold: float, ledger: Ledger) -> list[Prompt]:
    repeats = near_repeats(prompts, threshold)
    for index in sorted(repeats):
        ledger.drop("near-duplicate", prompts[index].key)
    return [prompt for index, prompt in enumerate(prompts) if index not in repeats]


def _rendered(prompt: Prompt, work: Work, longest: int) -> array | str:
    """Token ids of the first turn, or why it cannot be asked."""
    try:
        ids = work.target.render(first_turn(prompt), prompt.tools)
    except UserError:
        return "refused by the chat template"
    if not ids:
        return "rendered to nothing by the chat template"
    return f"prompt longer than {longest} tokens" if len(ids) > longest else compact(ids, work.target.vocab)


def _write(folder: Path, gathered: Gathered) -> None:
    for name, prompts in (("prompts.jsonl", gathered.training), ("held_out.jsonl", gathered.held_out)):
        write_jsonl_atomic(folder / name, map(_row, prompts))
    write_jsonl_atomic(folder / "dropped.jsonl", gathered.ledger.rows)
    ledger = gathered.ledger
    digests = {name: sha256_file(folder / name) for name in ("prompts.jsonl", "held_out.jsonl")}
    facts = (ledger.read, ledger.dropped, ledger.notes, gathered.sources, digests)
    write_sealed(folder / "prompts.json", dict(zip(FACTS, facts, strict=True)))


def _row(prompt: Prompt) -> dict:
    return {"key": prompt.key, "source": prompt.source, "messages": prompt.messages, "tools": prompt.tools}


def _read(folder: Path) -> Gathered:
    anew = "delete it and run data_prep again: it collects the prompts anew"
    facts = read_sealed(folder / "prompts.json", "the list of prompts", anew, FACTS)
    for name, digest in facts["sha256"].items():
        if not (folder / name).exists() or sha256_file(folder / name) != digest:
            raise UserError(
                f"{folder / name} was changed or removed after data_prep wrote it; delete {folder}/ and run data_prep again."
            )
    ledger = Ledger(facts["read"], Counter(facts["dropped"]), Counter(facts["notes"]))
    training, held_out = (_prompts(folder / name) for name in ("prompts.jsonl", "held_out.jsonl"))
    return Gathered(training, held_out, ledger, facts["sources"])


def _prompts(path: Path) -> list[Prompt]:
    with open(path, encoding="utf-8", newline="\n") as file:  # a line separator (U+2028) in a prompt ends no line
        return [Prompt(**json.loads(line)) for line in file]
