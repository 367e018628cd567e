"""What a training is refused for before its target is loaded, which takes minutes."""

import os
from pathlib import Path
from typing import Any

from drafttrain.drafters.save import read_record
from drafttrain.drafters.start_files import require_place
from drafttrain.errors import UserError
from drafttrain.target.precision import require_library
from drafttrain.tasks.checkpoints import Saved
from drafttrain.tasks.on_policy_start import require_refreshes, require_streams, require_text, require_trained
from drafttrain.tasks.optimizer import require_whole_matrices
from drafttrain.tasks.sections import Sections
from drafttrain.tasks.shared_target import Processes, require_no_answers, require_sharers
from drafttrain.tasks.speed_config import require_compiler, require_recordable
from drafttrain.tasks.strategy import uses_deepspeed

OURS = {"max_epochs": -1, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
"""Trainer arguments that this stage decides: steps end a run, and saving and showing are its own."""


def require_sections(sections: Sections, topology: Processes) -> None:
    """UserError where sections contradict each other, or these processes cannot do what they ask for."""
    speed, checkpoint, target = sections.speed, sections.checkpoint, sections.target
    _require_trainer(sections.trainer)
    require_whole_matrices(sections.optimizer, sections.trainer.get("strategy"))
    require_no_answers(speed, checkpoint, sections.on_policy is not None, target.weights)
    require_sharers(speed, topology)
    sections.lora.require_start(checkpoint.start)
    require_library(target.weights)
    require_compiler(speed)
    if sections.on_policy is None:
        require_recordable(speed, sections.trainer)


def require_start(sections: Sections, saved: Saved | None) -> None:
    """UserError where a run cannot begin so, as far as that needs no target, whose loading takes minutes."""
    start = sections.checkpoint.start
    if saved is None and start is not None:
        require_place(start, "checkpoint.start")
    if sections.on_policy is None or sections.on_policy.as_text:
        require_text(sections.objective)
    if sections.on_policy is not None:
        require_streams(sections.on_policy, sections.objective)
        require_refreshes(sections.on_policy, sections.max_steps)
        if saved is None:
            require_trained(sections.on_policy, sections.checkpoint.start)


MADE_BY = {"trimmed_from": "trim", "adapted": "adapt"}
"""Facts of a saved drafter, and the command that made it."""


def require_no_other_drafter(checkpoints: Path, saved: Saved | None) -> None:
    """UserError where a training that begins anew would replace a drafter that another command made there, and that no training state can bring back."""
    best = checkpoints / "best"
    if saved is not None or not os.path.exists(best / "drafter.json"):
        return
    try:
        facts = read_record(best)["facts"] or {}
    except UserError:  # a damaged one is no loss
        return
    if makers := [command for fact, command in MADE_BY.items() if fact in facts]:
        raise UserError(
            f"{best}/ holds a drafter that {makers[0]} made, and a training that begins anew would replace it; to train it further give the run another "
            f"`name` and set checkpoint.start to {best}, or move that folder away to train without it."
        )


def require_same_keeper(saved: Saved, strategy: Any) -> None:
    """UserError if the state on disk was written by another kind of strategy. `strategy`: as the recipe has it."""
    kinds, deepspeed = {True: "DeepSpeed", False: "a strategy other than DeepSpeed"}, uses_deepspeed(strategy)
    if saved.state.is_dir() != deepspeed:
        raise UserError(
            f"{saved.folder} was saved with {kinds[saved.state.is_dir()]}, but trainer.strategy is now {kinds[deepspeed]}, which cannot read it; "
            "use the hardware recipe of before, or give the run another `name`."
        )


def ours_refused(key: str) -> str:
    """Why a trainer argument of `OURS` cannot be given."""
    return f"trainer.{key} cannot be set: training ends by trainer.max_steps and does its own saving and showing; remove it."


def require_positive(trainer: dict[str, Any]) -> None:
    """UserError where `max_steps` or `accumulate_grad_batches` is below 1: a window of no micro-batches would never end."""
    for key in ("max_steps", "accumulate_grad_batches"):
        value = trainer.get(key)
        if isinstance(value, int) and value < 1:
            raise UserError(f"trainer.{key} is {value}, but must be 1 or more.")
    if "accumulate_grad_batches" in trainer and trainer["accumulate_grad_batches"] is None:
        raise UserError("trainer.accumulate_grad_batches is null, but must be 1 or more; remove it for 1.")


def _require_trainer(trainer: dict[str, Any]) -> None:
    steps = trainer.get("max_steps")
    if not isinstance(steps, int):
        raise UserError(f"trainer.max_steps is {steps}, but training ends by steps: set it to 1 or more.")
    require_positive(trainer)
    for key in OURS:
        if key in trainer:
            raise UserError(ours_refused(key))
