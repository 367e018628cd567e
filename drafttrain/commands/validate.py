"""`drafttrain validate`: a drafter against plain decoding, prompt lookup and an untrained drafter, on held-out prompts.

The run's export, or the drafter that --draft names, whose report lies beside the run's own (drafts.py)."""

import torch

from drafttrain.commands.drafts import Draft, load, refresh_card
from drafttrain.data.store import TokenStore
from drafttrain.files import RunLock
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import command_line
from drafttrain.validation.hardware import commit
from drafttrain.validation.validate import validate


def run(recipe: Recipe, options: Options) -> None:
    """Measure and write the report, then the model card of the run's export. Raises UserError, also if the output is not lossless."""
    folder = options.run
    held_out = TokenStore.open(folder.data / "held_out")
    draft = Draft.of(recipe, options)
    target = load(recipe.target)
    held_out.require(target.identity)
    net, told = draft.load(target, recipe)
    torch.manual_seed(recipe.data.seed)
    untrained = net.config.build(target, net.vocabulary).eval()
    facts = {
        "name": recipe.name,
        "command": command_line(),
        "commit": commit(),
        **told,
        **({"training_log": folder.logs} if draft.own else {}),
    }
    with RunLock(folder.folder):
        folder.record("validate", recipe.plain())
        try:
            validate(
                target,
                net,
                held_out.requests(recipe.validate.max_tokens),
                recipe.validate,
                draft.report,
                untrained_net=untrained,
                facts=facts,
            )
        finally:
            if draft.own:
                refresh_card(folder)
