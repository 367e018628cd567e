"""`drafttrain validate`: a drafter against plain decoding, prompt lookup and an untrained drafter, on held-out prompts.

The run's export, or the drafter that --draft names, whose report lies beside the run's own (drafts.py)."""

from dataclasses import replace
from typing import Any

import torch

from drafttrain.commands.drafts import Draft, load, refresh_card
from drafttrain.data.store import TokenStore
from drafttrain.drafters.base import PLACES, DrafterConfig, DrafterNet
from drafttrain.errors import UserError
from drafttrain.files import RunLock, public_place
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import command_line
from drafttrain.target.target import Target
from drafttrain.validation.hardware import commit
from drafttrain.validation.validate import validate


def run(recipe: Recipe, options: Options) -> None:
    """Measure and write the report, then the model card of the run's export. Raises UserError, also if the output is not lossless (in fp32: but for ties)."""
    folder = options.run
    held_out = TokenStore.open(folder.data / "held_out")
    draft = Draft.of(recipe, options)
    target = load(recipe.target)
    held_out.require(target.identity)
    net, told = draft.load(target, recipe)
    torch.manual_seed(recipe.data.seed)
    untrained = _untrained(net, target, recipe.drafter)
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


def _untrained(net: DrafterNet, target: Target, asked: DrafterConfig) -> DrafterNet | None:
    """The net with fresh, untrained weights; None, behind a note, where the model that it began with is not to be had. An export tells the last part of that
    one's path alone, and the recipe the whole."""
    options: dict[str, Any] = vars(net.config)
    whole = {name: vars(asked)[name] for name in PLACES if name in options.keys() & vars(asked).keys()}
    known = {name: place for name, place in whole.items() if place is not None and public_place(place) == options[name]}
    try:
        return replace(net.config, **known).build(target, net.vocabulary).eval()
    except UserError as error:
        print(f"note: there is no untrained drafter to compare with: {error}")
        return None
