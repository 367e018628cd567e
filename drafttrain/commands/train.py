"""`drafttrain train`: token store -> checkpoints/, in every process that torchrun started."""

from contextlib import nullcontext

from drafttrain.files import RunLock
from drafttrain.options import Options
from drafttrain.recipe import Recipe
from drafttrain.tasks.train import train
from drafttrain.topology import read_topology
from drafttrain.trainer_section import trainer_arguments


def run(recipe: Recipe, options: Options) -> None:
    """Train, or go on training. Raises UserError."""
    folder = options.run
    topology = read_topology(recipe.trainer.get("strategy"))
    trainer = trainer_arguments(recipe.trainer, folder.logs)
    with RunLock(folder.folder) if topology.rank == 0 else nullcontext():
        if topology.rank == 0:
            print(f"training in {topology}")
            folder.record("train", recipe.plain(), topology.world)
        best = train(
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
        )
        if topology.rank == 0 and best.exists():
            print(f"{best}/: the best drafter so far; next: python -m drafttrain export")
