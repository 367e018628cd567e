"""`python -m data_prep --config RECIPE`: prompts in, token stores out, into runs/<name>/data/.

`python -m data_prep show FILE`: the tokens of chats, the supervised ones in colour.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from data_prep import show
from data_prep.engines import OpenAIServer
from data_prep.pipeline import prepare
from data_prep.progress import stoppable
from data_prep.team import Team
from drafttrain.cli import guarded, pairs, parse
from drafttrain.data.kept_rows import wanted_final
from drafttrain.data.store import TokenStore
from drafttrain.drafters.base import DrafterConfig, Needs
from drafttrain.drafters.vocabulary import draft_cost
from drafttrain.errors import UserError
from drafttrain.files import RunLock
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.run import Run
from drafttrain.target.load import load_speaker, load_target
from drafttrain.target.target import Target
from drafttrain.topology import Topology, read_topology
from drafttrain.vocab import Cost


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data of a recipe, or show some; returns the exit code."""
    return guarded(lambda: _main(sys.argv[1:] if argv is None else argv))


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    """UserError for whatever the machine refuses (quotas, file sizes, permissions, a failing disk): nothing finished is lost."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or place} could not be read or written ({error.strerror or error}); what is finished is kept: mend that "
            "and run the same command again."
        ) from error


def _main(argv: Sequence[str]) -> None:
    if argv and argv[0] == "show":
        _show(argv[1:])
        return
    parsed = parse("data_prep", "python -m data_prep", argv)
    if parsed is None:
        return
    recipe, options = parsed
    topology = read_topology()
    team = Team.of(topology.rank, topology.world)
    with stoppable(options.run.data, partial(print, file=sys.stderr) if team.leads else lambda _: None):
        _prepare(recipe, options.run, topology, team)


def _prepare(recipe: Recipe, run: Run, topology: Topology, team: Team) -> None:
    stored = recipe.data.features == "stored"
    # With a server the weights are needed for features alone.
    served = isinstance(recipe.prepare.engine, OpenAIServer)
    if team.leads:
        print(f"loading {recipe.target.path}")
    target: Any = load_speaker(recipe.target) if served and not stored else load_target(recipe.target, topology.device)
    needs = _needs(recipe.drafter, target) if stored or not served else None
    if stored and needs is not None and run.data.is_symlink() and (run.data / "train" / "manifest.json").exists():
        # The run that lent this folder still reads the features in it.
        lent = TokenStore.open(run.data / "train")
        lent.refuse_features_of_another(needs.taps, recipe.data.feature_dtype, wanted_final(needs))
    with _explained(run.folder), RunLock(run.folder) if team.leads else nullcontext():
        if team.leads and not (run.data / "prompts.json").exists():
            print(f"gathering prompts from {', '.join(type(source).__name__ for source in recipe.prepare.prompts)}")
        prepare(
            recipe.prepare,
            target,
            run.data,
            taps=needs.taps if stored and needs is not None else None,
            draft_vocab=_draft_vocab(recipe, target, has_weights=stored or not served),
            feature_dtype=recipe.data.feature_dtype,
            final="taught" if needs is None else wanted_final(needs),
            tap_count=None if needs is None else len(needs.taps),
            team=team,
            say=print if team.leads else partial(print, f"[{team.rank}]"),
            # As in train: a recipe that is refused, or finds the data finished, is not the one that the later stages are to be given.
            begins=partial(run.record, "data_prep", recipe.plain(), topology.world) if team.leads else lambda: None,
        )


def _needs(drafter: DrafterConfig, target: Target) -> Needs:
    """What the drafter reads of this target: a net that says as few tokens as it can is built and asked."""
    with target.device:
        return drafter.build(target, drafter.least_vocabulary(target)).needs


def _draft_vocab(recipe: Recipe, target: Any, has_weights: bool) -> int | float | Cost | None:
    """What the data report shows: for the best size, what drafts cost, if that can be counted here."""
    size = recipe.drafter.draft_vocab
    if size is not None and recipe.checkpoint.start is not None:
        print(
            "note: a drafter that is begun from (checkpoint.start) keeps its own draft vocabulary; what is said here is of one chosen from these answers, and "
            "`train` says what its own covers"
        )
    if size != "best":
        return size
    if has_weights:
        return draft_cost(recipe.drafter, target)
    print(
        "note: the best draft vocabulary is known to `drafttrain plan`; the data report shows one that covers 99% of the answers"
    )
    return 0.99


def _show(argv: Sequence[str]) -> None:
    options, rest = show.parse(argv)
    recipe = load_recipe(options.config, pairs(rest))[0] if options.config else None
    with _explained(options.file):
        show.show(options, recipe.target if recipe else None)


if __name__ == "__main__":
    sys.exit(main())
