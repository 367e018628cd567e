"""What the recipe's `adapt` section amounts to, where it is set, and whether `adapt` would refuse the rest of the recipe."""

from drafttrain.errors import UserError
from drafttrain.recipe import Recipe
from drafttrain.tasks.adapt_config import AdaptConfig
from drafttrain.tasks.adapt_learner import AdaptSections

LEARNT = {
    "first_rejection": "the places of first rejected drafts",
    "rounds": "every round",
    "text": "the text",
    "anchors": "the text behind the anchors of rounds",
}


def adapted(recipe: Recipe) -> list[str]:
    """Nothing where the section is as it is by default: then nobody asked."""
    config = recipe.adapt
    if config == AdaptConfig():
        return []
    learnt = LEARNT[config.replay]
    found = [
        f"adapt: learns {config.steps} step(s) from {learnt} of every {config.every} answers; 1 prompt in {config.hold_out_every} is held out, and the "
        f"newest {config.guard_prompts} of them undo what loses more than {config.fall:.0%} of tau, looked at every {config.guard_every} updates"
    ]
    if config.buffer is not None and config.steps == 1:
        found.append(
            f"warning: no step of adapt reads its buffer of {config.buffer:,} answers, for the first one of an update learns from the new ones; raise "
            "adapt.steps above 1, or set adapt.buffer to null"
        )
    try:
        clip = recipe.trainer.get("gradient_clip_val")
        AdaptSections(config, recipe.objective, recipe.optimizer, recipe.data.length, recipe.data.seed, clip=clip)
    except UserError as error:
        found.append(f"warning: adapt would refuse: {error}")
    return found
