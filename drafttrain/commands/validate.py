"""`drafttrain validate`: the export against plain decoding, prompt lookup and an untrained drafter, on held-out prompts."""

import torch

from drafttrain.commands.drafts import export_hash, find_draft, load, load_draft, refresh_card
from drafttrain.data.store import TokenStore
from drafttrain.files import RunLock
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import command_line
from drafttrain.validation.hardware import commit
from drafttrain.validation.validate import validate


def run(recipe: Recipe, options: Options) -> None:
    """Measure and write report/, then the model card. Raises UserError, also if the output is not lossless."""
    folder = options.run
    held_out = TokenStore.open(folder.data / "held_out")
    draft = find_draft(folder)
    target = load(recipe.target)
    held_out.require(target.identity)
    net = load_draft(draft, target)
    torch.manual_seed(recipe.data.seed)
    untrained = net.config.build(target, net.vocabulary).eval()
    facts = {
        "name": recipe.name,
        "command": command_line(),
        "commit": commit(),
        "draft": str(draft.relative_to(folder.folder)),
        "export_hash": export_hash(draft),
        "training_log": folder.training_log,
    }
    with RunLock(folder.folder):
        folder.record("validate", recipe.plain())
        try:
            validate(
                target,
                net,
                held_out.requests(recipe.validate.max_tokens),
                recipe.validate,
                folder.report,
                untrained_net=untrained,
                facts=facts,
            )
        finally:
            refresh_card(folder)
