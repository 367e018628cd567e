"""What `drafttrain plan` can tell of the recipe's `lora`: the net as training sees it, adapters and all."""

import torch

from drafttrain.drafters.base import DrafterNet
from drafttrain.recipe import Recipe
from drafttrain.target.target import Target
from drafttrain.tasks.lora import insert


def learner_of(recipe: Recipe, target: Target, net: DrafterNet) -> tuple[DrafterNet, list[str]]:
    """`net` itself, or where adapters are trained another one with adapters in it, without memory either; and what training says of them.

    UserError as training would raise it: for `lora.layers` that are no matrices, or where peft is missing.
    """
    if recipe.lora.rank is None:
        return net, []
    with torch.device("meta"):
        learner = recipe.drafter.build(target, net.vocabulary)
        _, line = insert(learner, recipe.lora)
    return learner, [line]
