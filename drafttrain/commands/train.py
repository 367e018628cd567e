"""`drafttrain train`: token store -> checkpoints/, in every process that torchrun started."""

import shlex
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from drafttrain.drafters.save import read_record
from drafttrain.files import RunLock
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.run import Run
from drafttrain.tasks.checkpoints import find_last
from drafttrain.tasks.train import train
from drafttrain.topology import read_topology
from drafttrain.trainer_section import require_deepspeed, trainer_arguments


def run(recipe: Recipe, options: Options) -> None:
    """Train, or go on training. Raises UserError."""
    folder = options.run
    topology = read_topology(recipe.trainer.get("strategy"))
    require_deepspeed(recipe.trainer.get("strategy"))
    trainer = trainer_arguments(recipe.trainer, folder.logs)
    with RunLock(folder.folder) if topology.rank == 0 else nullcontext():
        if topology.rank == 0:
            print(f"training in {topology}")
        train(
            run_folder=folder.folder,
            target=recipe.target,
            drafter=recipe.drafter,
            objective=recipe.objective,
            data=recipe.data,
            optimizer=recipe.optimizer,
            checkpoint=recipe.checkpoint,
            trainer=trainer,
            topology=topology,
            speed=recipe.speed,
            lora=recipe.lora,
            on_policy=recipe.on_policy if recipe.task == "on_policy" else None,
            # A recipe that is refused, or finds the run finished, is not the one that the later stages are to be given.
            begins=partial(folder.record, "train", recipe.plain(), topology.world) if topology.rank == 0 else None,
        )
        if topology.rank == 0:
            for line in closing(folder, trainer["max_steps"]):
                print(line)


def closing(run: Run, steps: int) -> list[str]:
    """How a training ended, in two lines at most: which drafter is the best, and the command to run next.

    Behind a stop the same command goes on, as was said when it stopped.
    """
    saved = find_last(run.checkpoints)
    done = saved is not None and saved.position.step >= steps
    lines = []
    if (run.best / "drafter.json").exists():
        facts = read_record(run.best)["facts"]
        step, tau = (facts.get("position") or {}).get("step"), (facts.get("held_out") or {}).get("tau")
        best = f"{run.best}/: the best drafter{'' if done else ' so far'}"
        if tau is None:
            lines.append(f"{best}, the newest one, since tau was not measured")
        elif done and step == steps:
            lines.append(f"{best}, final held-out tau {tau:.3f}")
        elif step == 0:
            more = "; training did not improve on it" if done else ""
            lines.append(
                f"{best}, held-out tau {tau:.3f} at step 0 of {steps}: the one that this run began from, unchanged{more}"
            )
        else:
            lines.append(
                f"{best}, held-out tau {tau:.3f} at step {step} of {steps}{'; the last was not above it' if done else ''}"
            )
    if done:
        elsewhere = [] if run.folder.parent == Path("runs") else ["--runs", str(run.folder.parent)]
        lines.append(
            "next: "
            + shlex.join(["python", "-m", "drafttrain", "export", "--config", str(run.folder / "recipe.yaml"), *elsewhere])
        )
    return lines
