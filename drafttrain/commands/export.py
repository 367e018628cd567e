"""`drafttrain export`: a drafter that was trained -> export/, and to the Hub if `export.push` names a repository."""

import os
from pathlib import Path
from typing import Any

from drafttrain.commands.drafts import data_facts, load, refresh_card, training_facts
from drafttrain.commands.export_source import class_of, find_source, load_source, require_finished, trained_here
from drafttrain.drafters.save import MADE_FILE
from drafttrain.drafters.warm_start import KEPT
from drafttrain.errors import UserError, printable
from drafttrain.export.card import served_by
from drafttrain.export.card_figures import BEGUN, is_unchanged
from drafttrain.export.card_licence import licence_warning
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.export.hub import preview, push
from drafttrain.export.registry import format_named, require_form
from drafttrain.files import RunLock, public_place, read_json, typed_path
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.tasks.checkpoints import find_last
from drafttrain.tasks.train_checks import MADE_BY


def run(recipe: Recipe, options: Options) -> None:
    """Export the drafter that `export.checkpoint` names. Raises UserError."""
    folder, asked = options.run, recipe.export.checkpoint
    if options.finished:
        require_finished(recipe, folder)
    source = find_source(recipe, folder)
    require_form(class_of(source, recipe), recipe.export.format)
    target = load(recipe.target)
    net, facts = load_source(source, recipe, folder, target)
    with RunLock(folder.folder):
        folder.record("export", recipe.plain())
        told = training_facts(facts) | ({} if asked == "best" else {"checkpoint": Path(asked).name})  # a card is public
        if trained_here(source, folder):
            told |= begun_facts(facts, recipe, folder) | data_facts(folder)
        if folder.export.exists():
            print(
                f"{folder.export}/ holds an earlier export ({_earlier(folder.export)}); the new one takes its place once it is whole"
            )
        made = export_drafter(net, target, folder.export, recipe.export, None, told)
        refresh_card(folder)
    format = format_named(made, str(folder.export))
    print(f"{format.title}, {served_by(format)}")
    if warning := licence_warning(made):
        print(f"warning: {printable(warning)}")
    if is_unchanged(told):
        print(f"note: the best drafter is that of step 0: {printable(told[BEGUN])}, which this run began from, unchanged")
    for note in made["notes"]:
        print(f"note: {note}")
    size, check = made["weights"]["bytes"], made["check"]
    gap = "" if check["against_trained"] is None else f", logits within {check['against_trained']:.1e} of the trained drafter's"
    same = f"the trained drafter's first choice in {check['same_first_choice']:.1%} of {check['rows']} places"
    print(f"{folder.export}/: {size:,} bytes in {made['dtype']}; read back: {same}{gap}")
    _push(folder.export, recipe.export)


def begun_facts(facts: dict, recipe: Recipe, run: Run) -> dict[str, Any]:
    """What a drafter of this run began from and whether adapters were trained, for the model card, by the newest training state; without one that can
    be read by the recipe, where a draft vocabulary was kept, as of every run that began so. {} for what `trim` or `adapt` made."""
    if MADE_BY.keys() & facts.keys():
        return {}
    try:
        saved = find_last(run.checkpoints)
    except UserError:  # the best drafter is as whole without it
        saved = None
    if saved is not None:
        start, rank = saved.recipe.get("checkpoint.start"), (saved.recipe.get("lora") or {}).get("rank")
    else:
        start, rank = recipe.checkpoint.start if (run.checkpoints / KEPT).exists() else None, recipe.lora.rank
    if start is None:
        return {}
    found = {BEGUN: public_start(start)}
    trained = (facts.get("position") or {}).get("step") != 0
    return found | ({"LoRA": f"rank {rank}, merged"} if rank is not None and trained else {})


def public_start(start: str) -> str:
    """A drafter's place as a card may tell it; of a drafter in a run's folder, whose last part says nothing, with the run's name."""
    name, place = public_place(start), Path(os.path.abspath(typed_path(start)))
    run = place.parent.parent if place.parent.name == "checkpoints" else place.parent
    return f"{name} of the run {run.name}" if name == place.name and (run / "recipe.yaml").is_file() else name


def _earlier(folder: Path) -> str:
    """What an export that is there already is, in words. It is replaced whatever it is, so one that cannot be read is no error."""
    try:
        made = read_json(folder / MADE_FILE, "the export")
        format, steps = format_named(made, str(folder)), made["facts"].get("steps")
        return f"{format.title} in {printable(str(made['dtype']))}{'' if steps is None else printable(f', {steps} steps')}, {served_by(format)}"
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return f"with no {MADE_FILE} that this version can read"


def _push(folder: Path, config: ExportConfig) -> None:
    """To the Hub, or what would go there, where the recipe names a repository. Raises UserError."""
    if config.push is None:
        return
    where = (folder, config.push, config.private, config.revision, config.tag)
    if config.dry_run:
        print(*preview(*where), sep="\n")
    else:
        print(f"pushed: {push(*where)}")
