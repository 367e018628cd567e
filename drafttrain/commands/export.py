"""`drafttrain export`: checkpoints/best -> export/, and to the Hub if `export.push` names a repository."""

from drafttrain.commands.drafts import load, refresh_card, training_facts
from drafttrain.drafters.save import load_drafter
from drafttrain.export.card import served_by
from drafttrain.export.export import export_drafter
from drafttrain.export.hub import push
from drafttrain.export.registry import format_named
from drafttrain.files import RunLock
from drafttrain.options import Options
from drafttrain.recipe import Recipe


def run(recipe: Recipe, options: Options) -> None:
    """Export the best drafter of the run. Raises UserError."""
    folder = options.run
    target = load(recipe.target)
    net, record = load_drafter(folder.best, target)
    with RunLock(folder.folder):
        folder.record("export", recipe.plain())
        made = export_drafter(net, target, folder.export, recipe.export, None, training_facts(record))
        refresh_card(folder)
    format = format_named(made, str(folder.export))
    print(f"{format.title}, {served_by(format)}")
    for note in made["notes"]:
        print(f"note: {note}")
    size, check = made["weights"]["bytes"], made["check"]
    gap = "" if check["against_trained"] is None else f", logits within {check['against_trained']:.1e} of the trained drafter's"
    same = f"the trained drafter's first choice in {check['same_first_choice']:.1%} of {check['rows']} places"
    print(f"{folder.export}/: {size:,} bytes in {made['dtype']}; read back: {same}{gap}")
    if recipe.export.push:
        print(f"pushed: {push(folder.export, recipe.export.push, recipe.export.private)}")
