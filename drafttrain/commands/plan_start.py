"""What `drafttrain plan` can tell of `checkpoint.start` before anything is downloaded or loaded: that it is there, can be read and fits."""

import os
import warnings
from dataclasses import replace
from pathlib import Path

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.save import read_record
from drafttrain.drafters.warm_start import WarmStart
from drafttrain.errors import UserError
from drafttrain.files import LONGEST_ID, typed_path
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.target.target import Target
from drafttrain.tasks.checkpoints import find_last
from drafttrain.tasks.on_policy_start import require_trained
from drafttrain.types import Identity

TABLES = ("embed_tokens.weight", "lm_head.weight")
"""Tables that a checkpoint may share with its target. Training compares them; a plan has no weights to compare them with."""


def find_start(recipe: Recipe, run: Run, target: Target, made_with: Identity | None) -> tuple[WarmStart | None, list[str]]:
    """The trained drafter that training would begin from, and what there is to say where it is not read.

    Args:
        made_with: Identity of the target that made the token store; None before there is one.

    Raises:
        UserError: as training would: a folder that is damaged or holds another net.
    """
    where = recipe.checkpoint.start
    if where is None:
        return None, []
    if find_last(run.checkpoints) is not None:
        return None, [f"checkpoint.start {where} is not read again: the run goes on from its own checkpoint"]
    folder = typed_path(where)
    if not os.path.exists(folder):
        if _may_be_hub_id(where):
            return None, [
                f"checkpoint.start {where}: no such folder, so a Hub id; it is fetched and checked when training starts"
            ]
        return None, [f"checkpoint.start {where}: no such folder yet; what follows is of a drafter as the recipe builds it"]
    outlined = target.identity
    try:
        target.identity = made_with or _as_recorded(folder, outlined)
        return WarmStart.open(where, recipe.checkpoint.start_pickle, recipe.drafter, target), []
    except NotImplementedError:  # of torch: an outline has no embeddings whose scale could be measured
        return None, [f"checkpoint.start {where} can be read; whether it fits is seen when training starts"]
    finally:
        target.identity = outlined


def require_start(recipe: Recipe, run: Run) -> None:
    """UserError where training has no drafter to begin from: the folder is not there, or on-policy training is given none. Asked last, since
    the plan of what comes behind it is of use before."""
    where = recipe.checkpoint.start
    if find_last(run.checkpoints) is not None:
        return
    if recipe.task == "on_policy":
        require_trained(recipe.on_policy, where)
    if where is None or os.path.exists(typed_path(where)) or _may_be_hub_id(where):
        return
    name = _run_of(Path(where))
    first = "" if name is None else f"train the recipe named {name} first, which makes it, or "
    raise UserError(
        f"checkpoint.start is {where}, but there is no such folder; {first}give an existing folder or a Hub id (owner/name)."
    )


def start_tau(recipe: Recipe) -> float | None:
    """Held-out tau of the drafter that training begins from, where its training measured it."""
    where = recipe.checkpoint.start
    if where is None or not os.path.exists(typed_path(where) / "drafter.json"):
        return None
    return (read_record(typed_path(where))["facts"].get("held_out") or {}).get("tau")


def filled(start: WarmStart, net: DrafterNet) -> list[str]:
    """What loading says, tried on a net without memory. UserError that lists every tensor which is missing, unknown or of another shape."""
    tensors = {name: tensor for name, tensor in start.found.tensors.items() if name not in TABLES or not start.found.skips(name)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nothing is copied into such a net
        return replace(start, found=replace(start.found, tensors=tensors)).fill(net)


def _as_recorded(folder: Path, outlined: Identity) -> Identity:
    """The target as a drafter of ours recorded it, in all that the recipe alone does not tell (revision, tokenizer, template)."""
    if not (folder / "drafter.json").exists():
        return outlined
    recorded = Identity(**read_record(folder)["identity"])
    return replace(recorded, layers=outlined.layers, hidden=outlined.hidden, vocab=outlined.vocab)


def _may_be_hub_id(where: str) -> bool:
    return where.count("/") == 1 and not where.startswith((".", "/", "~")) and len(where) <= LONGEST_ID


def _run_of(folder: Path) -> str | None:
    """The name of the run whose drafter or export stands there; None for any other place."""
    if folder.parent.name == "checkpoints":
        return folder.parent.parent.name or None
    return folder.parent.name or None if folder.name == "export" else None
