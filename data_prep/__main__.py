"""`python -m data_prep --config RECIPE`: prompts in, token stores out, into runs/<name>/data/."""

import sys
from collections.abc import Sequence

from data_prep.pipeline import prepare
from drafttrain.cli import guarded, parse
from drafttrain.files import RunLock
from drafttrain.target.load import load_target


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data of a recipe; returns the exit code."""
    return guarded(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    parsed = parse("data_prep", "python -m data_prep", argv)
    if parsed is None:
        return
    recipe, options = parsed
    target = load_target(recipe.target)
    taps = recipe.drafter.taps_of(target) if recipe.data.features == "stored" else None
    with RunLock(options.run.folder):
        options.run.record("data_prep", recipe.plain())
        prepare(recipe.prepare, target, options.run.data, taps=taps, draft_vocab=recipe.drafter.draft_vocab)


if __name__ == "__main__":
    sys.exit(main())
