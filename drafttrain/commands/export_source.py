"""Which drafter `drafttrain export` writes: the run's best one, its newest training state, or what stands at a path (`export.checkpoint`)."""

import os
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafttrain.data.store import TokenStore
from drafttrain.data.token_counts import count
from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.save import load_drafter, read_record
from drafttrain.drafters.start_files import unlike
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.drafters.warm_start import kept_vocabulary
from drafttrain.errors import UserError
from drafttrain.files import typed_path
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.target.target import Target
from drafttrain.tasks.checkpoints import differences, find_last
from drafttrain.tasks.sections import facts_of
from drafttrain.tasks.state_weights import TrainingState
from drafttrain.vocab import DraftVocabulary

SAVED = "drafter.json"


def find_source(recipe: Recipe, run: Run) -> Path | TrainingState:
    """A folder of a saved drafter, or a training state: looked for before the target is loaded. UserError if it is not there, or its record is damaged."""
    asked = recipe.export.checkpoint
    if asked == "last":
        return TrainingState.newest(run.checkpoints)
    if asked == "best" or os.path.exists(typed_path(asked) / SAVED):
        folder = run.best if asked == "best" else typed_path(asked)
        read_record(folder)
        return folder
    return TrainingState.at(asked, run.checkpoints, recipe.export.pickle)


def require_finished(recipe: Recipe, run: Run) -> None:
    """UserError while the run's training has steps to do: it exits 0 where it was told to stop, as schedulers want it."""
    saved, steps = find_last(run.checkpoints), str(recipe.trainer.get("max_steps"))  # Lightning takes "500" too
    done = 0 if saved is None else saved.position.step
    if not steps.isdecimal() or done < int(steps):
        raise UserError(
            f"training in {run.folder}/ stopped at step {done} of {steps}, so there is no finished drafter to export; start it again (train, or "
            "launch/pipeline.sh), and it goes on from there, or leave out --finished to export the best drafter so far."
        )


def trained_here(source: Path | TrainingState, run: Run) -> bool:
    """Whether it lies in the run's checkpoints, so that the run's data and log are its own."""
    place = source if isinstance(source, Path) else source.place
    return place.resolve().is_relative_to(run.checkpoints.resolve())


def class_of(source: Path | TrainingState, recipe: Recipe) -> type[DrafterConfig]:
    """What was trained, as far as that can be told without the target."""
    named = read_record(source)["class_path"] if isinstance(source, Path) and (source / SAVED).exists() else None
    return known_drafters().get(str(named), type(recipe.drafter))


def load_source(source: Path | TrainingState, recipe: Recipe, run: Run, target: Target) -> tuple[DrafterNet, dict[str, Any]]:
    """The net in eval mode, and what is known of its training. UserError for what is damaged, or no net of this recipe."""
    if isinstance(source, Path):
        net, record = load_drafter(source, target)
        return net, record["facts"]
    _require_same(source, recipe, target)
    weights = source.weights()
    if any(".lora_" in name for name in weights):
        raise UserError(
            f"export.checkpoint {source.where} holds LoRA's adapters, which are merged in the drafters that training saves; set it to best, or to the path "
            "of checkpoints/last_drafter, which is as new."
        )
    net = recipe.drafter.build(target, _vocabulary(source, recipe, run, target))
    if faults := unlike(weights, net.state_dict()):
        raise UserError(
            f"export.checkpoint {source.where} holds another drafter than the recipe's {type(recipe.drafter).__name__}: {'; '.join(faults)}; give the "
            "recipe that it was trained with."
        )
    net.load_state_dict(weights)
    position = source.facts.get("position") or {}
    return net.eval(), {"position": position | {"best_tau": None}}  # that tau is of the best one


def _require_same(source: TrainingState, recipe: Recipe, target: Target) -> None:
    """UserError where train.json beside the state says another drafter or target."""
    before = source.facts.get("recipe")
    if before is None:
        return
    now = {"drafter": facts_of(recipe.drafter), "target": {name: getattr(target.identity, name) for name in before["target"]}}
    if changed := differences({name: before[name] for name in now}, now):
        raise UserError(
            f"export.checkpoint {source.where} was made with another recipe ({'; '.join(changed)}); give the recipe that it was trained with."
        )


def _vocabulary(source: TrainingState, recipe: Recipe, run: Run, target: Target) -> DraftVocabulary:
    """The tokens of its head, which a training state does not say: as a drafter that was saved beside it has them, else chosen as training does."""
    if recipe.drafter.draft_vocab is None:
        return DraftVocabulary.full(target.vocab)
    checkpoints = next(
        (folder for folder in source.place.resolve().parents if folder.name == run.checkpoints.name), run.checkpoints
    )
    for name in ("last_drafter", "best"):
        file = checkpoints / name / "drafter.safetensors"
        if file.exists():
            with safe_open(str(file), "pt") as tensors:
                return DraftVocabulary.from_d2t(tensors.get_tensor("d2t"), target.vocab)
    if recipe.checkpoint.start is not None:
        return kept_vocabulary(checkpoints, target.vocab)
    return choose_vocabulary(recipe.drafter, target, count(TokenStore.open(run.data / "train")))[0]
