"""`python -m data_prep --config RECIPE`: prompts in, token stores out, into runs/<name>/data/."""

import sys

from data_prep.pipeline import prepare
from drafttrain.cli import guarded, parse
from drafttrain.target.load import load_target


def main() -> None:
    """Parse the same recipe as every other command and prepare its data. Raises UserError."""
    parsed = parse("data_prep", "python -m data_prep", sys.argv[1:])
    if parsed is None:
        return
    recipe, options = parsed
    target = load_target(recipe.target)
    taps = recipe.drafter.taps_of(target) if recipe.data.features == "stored" else None
    options.run.record("data_prep", recipe.plain())
    prepare(recipe.prepare, target, options.run.data, taps=taps, draft_vocab=getattr(recipe.drafter, "draft_vocab", None))


if __name__ == "__main__":
    sys.exit(guarded(main))
