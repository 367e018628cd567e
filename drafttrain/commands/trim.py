"""`drafttrain trim`: a trained drafter with a smaller head, as a run of its own, runs/<name>-<size>/.

    runs/<name>-<size>/recipe.yaml          the recipe with that name and size: what export, validate and generate are given
                       checkpoints/best/    the trimmed drafter
                       data                 a link to the data of the run that it comes from, held-out prompts included

The run that it comes from is only read. The new folder takes its place whole, and none that is there is replaced.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from drafttrain.commands.drafts import load, load_draft
from drafttrain.commands.trim_options import TrimOptions
from drafttrain.data import token_counts
from drafttrain.data.store import TokenStore
from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.save import WEIGHTS, read_record, save_drafter
from drafttrain.drafters.trim import choose_kept, require_fewer, trim
from drafttrain.errors import UserError
from drafttrain.files import sync
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.target.target import Target
from drafttrain.vocab import Counts, choose, describe


def run(recipe: Recipe, options: TrimOptions) -> None:
    """Trim the run's best drafter to `drafter.init_args.draft_vocab` tokens. Raises UserError."""
    draft = options.draft or options.run.best
    if options.draft is None or (draft / "drafter.json").exists():  # what is missing is said before the target is loaded
        _require_cut(recipe, draft, counted_elsewhere=options.counts is not None)
    store = TokenStore.open(options.counts or options.run.data / "train")
    target = load(recipe.target)
    store.require(target.identity)
    net = load_draft(draft, target)
    counts = _counts(store, net, target)
    kept = choose_kept(net, target, counts, recipe.drafter.draft_vocab, recipe.drafter.least_coverage)
    place = options.out or options.run.folder.with_name(f"{recipe.name}-{len(kept.ids)}")
    made = replace(recipe, name=place.name, drafter=replace(recipe.drafter, draft_vocab=len(kept.ids)))
    if os.path.lexists(place):
        raise UserError(f"{place}/ is there already, and nothing is overwritten; remove it, or name another folder with --out.")
    _write(place, made, trim(net, target, kept), target, draft, options.run)
    print(f"before, {describe(net.vocabulary, counts)}")
    print(f"now, {describe(kept, counts)}")
    flags = f"--config {place / 'recipe.yaml'} --runs {place.parent}"
    print(f"{place}/: go on with `python -m drafttrain export {flags}`, then validate with the same flags")


def _require_cut(recipe: Recipe, draft: Path, counted_elsewhere: bool) -> None:
    """UserError where the files of a trained drafter tell that its head would stay as large as it is, or that there is no drafter."""
    record, size = read_record(draft), recipe.drafter.draft_vocab
    try:
        with safe_open(str(draft / WEIGHTS), framework="pt") as file:
            (head,) = file.get_slice("d2t").get_shape()
    except (OSError, ValueError, SafetensorError):  # who loads it says what is wrong
        return
    if not isinstance(size, str | float):
        require_fewer(size, head if size is None else size, head)
        return
    chosen_by = record["init_args"].get("draft_vocab"), record["init_args"].get("least_coverage")
    if chosen_by == (size, recipe.drafter.least_coverage) and not counted_elsewhere:
        raise UserError(
            f"trim needs --size: drafter.init_args.draft_vocab is {size}, by which the {head:,} tokens of the trained head were chosen; give fewer, "
            f"such as --size {head // 2}."
        )


def _counts(store: TokenStore, net: DrafterNet, target: Target) -> Counts:
    """Counts to choose by, among the tokens that the net can say.

    If the head was chosen by these very answers, it has all words of an answer that is left out, and would be expected to cover any new
    one. Then its tokens are the first of all in their order, and what they cover of new answers is counted in that order.
    """
    counts = token_counts.count(store)
    vocabulary = net.vocabulary
    chosen = choose(counts.supervised_V, len(vocabulary.ids), counts.other_V, always=target.end_ids)
    return counts if torch.equal(chosen.ids, vocabulary.ids.cpu()) else token_counts.count(store, vocabulary.t2d)


def _write(place: Path, recipe: Recipe, net: DrafterNet, target: Target, draft: Path, source: Run) -> None:
    """The new run folder, whole or not at all."""
    making = Run(place.with_name(f".{place.name}.tmp"))  # no run's name begins with a dot
    shutil.rmtree(making.folder, ignore_errors=True)
    making.record("trim", recipe.plain())
    before = read_record(draft)["facts"] if (draft / "drafter.json").exists() else {}
    position = (before.get("position") or {}) | {"best_tau": None}  # that was the tau of the whole head
    facts = {"position": position, "held_out": None, "trimmed_from": str(draft)}
    save_drafter(making.best, net, net.config, target.identity, facts)
    if source.data.is_dir():
        os.symlink(os.path.relpath(source.data.resolve(), making.folder.resolve()), making.data)
    os.replace(making.folder, place)
    sync(place.parent)
