"""Eight micro-batches of one row give the gradient of one of eight, for every divergence, position weight, reduction and drafter.

Three gradients of the first step, which must be one: of a training in eight micro-batches, of one in a single batch, and of that batch
worked out here, without the training's counts: every sum over the count that the objective gives along with it.
"""

from dataclasses import dataclass, replace

import lightning.pytorch as pl
import pytest
import torch
from drafters.test_faces import DRAFTERS
from on_policy_forms import SMALL, build_easy_target, make_run
from tiny_run import start

from drafttrain import divergences as d
from drafttrain import position_weights as w
from drafttrain.drafters.base import DrafterConfig
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.heads import Hydra
from drafttrain.drafters.registry import known_drafters
from drafttrain.losses import REDUCTIONS, Distillation, Objective
from drafttrain.recipe_build import choices
from drafttrain.replay_loss import REDUCTIONS as STREAM_REDUCTIONS
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.teacher import TargetTeacher

EIGHT = 8


@dataclass(frozen=True)
class Case:
    """What is trained by what; where `replay` is given, on policy."""

    drafter: DrafterConfig
    objective: Objective
    replay: str | None = None

    def __str__(self) -> str:
        objective = self.objective
        if isinstance(objective, OnPolicyDistillation):
            parts = [*objective.accepted, *objective.rejected, objective.accepted_positions, objective.rejected_positions]
        else:
            assert isinstance(objective, Distillation)
            parts = [*objective.divergences, objective.positions]
        names = [type(part).__name__ for part in (self.drafter, *parts)]
        return " ".join([*names, objective.reduction, f"chunk {objective.chunk}", *([self.replay] if self.replay else [])])


def small(name: str) -> DrafterConfig:
    """A drafter of the table, with a draft vocabulary of this target where it has one."""
    config = DRAFTERS[name]
    return replace(config, draft_vocab=config.draft_vocab and 200)


def text(drafter: str | DrafterConfig, divergences: list, positions, reduction: str, chunk: int = 0) -> Case:
    config = small(drafter) if isinstance(drafter, str) else drafter
    return Case(config, Distillation(divergences, positions, reduction, chunk))


# Noise and dropout are drawn anew in every micro-batch, so the drafters here have none.
TEXT = [
    text("eagle3", [d.SoftCrossEntropy()], w.Decay(), "depths"),
    text("eagle3.1", [d.ForwardKL()], w.DPace(), "drafts"),
    text("p-eagle", [d.HardCrossEntropy()], w.Exponential(4.0), "weights"),
    text("eagle3 low-rank", [d.ReverseKL(), d.JSD(0.3)], w.Streak(), "drafts", chunk=7),
    text(Eagle(depth=3, noise=0.0), [d.SmoothL1(), d.SoftCrossEntropy(weight=0.1)], w.Uniform(), "depths"),
    text("dflash", [d.TotalVariation()], w.ValidPrefix(0.9), "depths", chunk=7),
    text("dflash window", [d.LKAlpha()], w.Decay(), "weights", chunk=7),
    text("dflash2", [d.HardCrossEntropy(), d.Selection()], w.Exponential(4.0), "weights"),
    text("dspark", [d.TotalVariation(), d.Confidence(), d.LKLambda()], w.Uniform(), "drafts"),
    text("medusa", [d.TopKCrossEntropy()], w.Decay(), "depths"),
    text("hydra", [d.BernoulliKL()], w.ValidPrefix(), "drafts"),
    text("independent", [d.JSD(), d.ForwardKL()], w.Uniform(), "depths", chunk=7),
    text(Hydra(heads=4, prefix=True), [d.K3(), d.ForwardKL()], w.Streak(), "depths", chunk=7),
]
ON_POLICY = [
    Case(small("eagle3"), OnPolicyDistillation(), "rounds"),
    Case(small("dflash"), OnPolicyDistillation([d.BernoulliKL()], [d.K3()], reduction="pooled", chunk=7), "rounds"),
    Case(
        small("p-eagle"),
        OnPolicyDistillation(accepted_positions=w.DPace(), rejected_positions=w.Streak(), rejected_weight=0.3),
        "rounds",
    ),
    Case(small("hydra"), Distillation([d.SoftCrossEntropy()], w.Decay(), "weights"), "first_rejection"),
    Case(small("eagle3"), Distillation([d.ForwardKL()], w.ValidPrefix(), "drafts"), "text"),
]


def test_every_choice_is_here():
    text_objectives = [case.objective for case in TEXT]
    assert {type(case.drafter).__name__ for case in TEXT} == set(known_drafters())
    assert {type(own) for objective in text_objectives for own in objective.divergences} == set(choices(d.Divergence).values())
    assert {type(objective.positions) for objective in text_objectives} == set(choices(w.PositionWeight).values())
    assert {objective.reduction for objective in text_objectives} == set(REDUCTIONS)
    on_policy = {case.objective.reduction for case in ON_POLICY if isinstance(case.objective, OnPolicyDistillation)}
    assert on_policy == set(STREAM_REDUCTIONS)


class FirstGradient(pl.Callback):
    """The gradient that the optimizer gets, and that of the last micro-batch by itself."""

    def __init__(self):
        self.trained, self.plain, self.elements = torch.zeros(0), torch.zeros(0), []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.batch = batch

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.elements.append(len((task._window[batch.micro] if hasattr(task, "_window") else batch).layout.depth_N))

    def on_before_optimizer_step(self, trainer, task, optimizer):
        weights = list(task.net.parameters())
        self.trained = torch.cat([weight.grad.flatten() for weight in weights])
        batch = task._window[self.batch.micro] if hasattr(task, "_window") else self.batch
        features = task._features(batch)
        drafted = task.net.rows(batch.sequences, features, batch.layout)
        terms, _ = task.objective.terms(drafted, task.net.logits, TargetTeacher(task.target, task.net), task.depth)
        loss = sum(term.sum / term.count for term in terms.values())
        self.plain = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights)])


def hold(folders, target_folder, case: Case) -> None:
    changes = {"drafter": case.drafter, "objective": case.objective}
    if case.replay:
        changes["on_policy"] = SMALL | {"replay": case.replay, "batch": EIGHT, "every": 1}
    narrow, wide = FirstGradient(), FirstGradient()
    shared = {"max_steps": 1}
    start(folders[0], target_folder, **changes, trainer=shared | {"accumulate_grad_batches": EIGHT, "callbacks": [narrow]})
    start(folders[1], target_folder, **changes, trainer=shared | {"callbacks": [wide]}, data={"rows": EIGHT})
    assert len(narrow.elements) == EIGHT and len(set(narrow.elements)) > 1, "the data is ragged"
    assert sum(narrow.elements) == sum(wide.elements)
    scale = wide.plain.norm()
    assert scale > 1e-3
    for name, other in (("8 x 1", narrow.trained), ("1 x 8", wide.trained)):
        assert float((other - wide.plain).norm() / scale) < 1e-6, name


@pytest.mark.parametrize("case", TEXT, ids=str)
def test_stored_answers(tmp_path, tiny_llama, target_folders, case):
    hold([make_run(tmp_path / name, tiny_llama) for name in ("narrow", "wide")], target_folders("llama"), case)


@pytest.fixture(scope="module")
def easy(tmp_path_factory):
    """(folder, loaded) of a target some of whose tokens a drafter guesses."""
    folder = build_easy_target(tmp_path_factory.mktemp("target"))
    return folder, load_target(TargetConfig(path=str(folder)), device="cpu")


@pytest.mark.parametrize("case", ON_POLICY, ids=str)
def test_rollouts(tmp_path, easy, case):
    folder, target = easy
    hold([make_run(tmp_path / name, target) for name in ("narrow", "wide")], folder, case)
