"""Learning rates at chosen steps, worked out by hand; what is decayed; sections that cannot hold nonsense."""

import lightning.pytorch as pl
import pytest
import torch
from tiny_run import logged, make_run, start
from torch import nn

from drafttrain.errors import UserError
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.optimizer import OptimizerConfig, make_optimizer


def test_warm_up_rises_to_the_peak_behind_it():
    config = OptimizerConfig(warmup_steps=4, schedule="constant")
    assert [config.lr_fraction(step, 100) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_final_fraction():
    config = OptimizerConfig(warmup_steps=20, schedule="cosine", final_lr_fraction=0.1)
    assert config.lr_fraction(20, 120) == pytest.approx(1.0)
    assert config.lr_fraction(70, 120) == pytest.approx(0.55)
    assert config.lr_fraction(120, 120) == pytest.approx(0.1)


def test_wsd_stays_and_then_falls_in_a_straight_line():
    config = OptimizerConfig(warmup_steps=10, schedule="wsd", decay_fraction=0.2, final_lr_fraction=0.0)
    assert [config.lr_fraction(step, 100) for step in (10, 79, 80, 90, 95, 100)] == pytest.approx([1, 1, 1, 0.5, 0.25, 0])


def test_a_run_shorter_than_its_warm_up_does_not_fail():
    config = OptimizerConfig(warmup_steps=50, schedule="cosine")
    assert 0 < config.lr_fraction(2, 3) < 1


def test_only_trainable_matrices_are_decayed():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    net[2].requires_grad_(False)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), net, fused=False)
    decayed, plain = ({id(weight) for weight in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed == {id(net[0].weight)}
    assert plain == {id(net[0].bias), id(net[1].weight), id(net[1].bias)}


def test_a_step_of_decay_shrinks_a_matrix_and_leaves_a_bias():
    net = nn.Linear(2, 2)
    before = [weight.detach().clone() for weight in net.parameters()]
    optimizer = make_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.1), net, fused=False)
    for weight in net.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.allclose(net.weight, before[0] * 0.95) and torch.equal(net.bias, before[1])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"lr": 0.0}, "optimizer.lr is 0.0"),
        ({"betas": [0.9]}, r"optimizer.betas is \[0.9\]"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay is -1.0"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps is -1"),
        ({"schedule": "linear"}, "must be one of cosine, wsd, constant"),
        ({"decay_fraction": 1.5}, "optimizer.decay_fraction is 1.5"),
    ],
)
def test_an_optimizer_section_cannot_hold_nonsense(values, sentence):
    with pytest.raises(UserError, match=sentence):
        OptimizerConfig(**values)


@pytest.mark.parametrize(
    ("values", "sentence"), [({"every": 0}, "checkpoint.every is 0"), ({"tau_prompts": -1}, "checkpoint.tau_prompts is -1")]
)
def test_a_checkpoint_section_cannot_hold_nonsense(values, sentence):
    with pytest.raises(UserError, match=sentence):
        CheckpointConfig(**values)


def optimizers_of(run, target, folder, precision):
    """Its optimizer's groups, and the logged losses, of four steps whose gradients are clipped."""
    kept = []

    class Keep(pl.Callback):
        def on_train_start(self, trainer, task):
            kept.append(trainer.optimizers[0])

    make_run(run, target)
    trainer = {"max_steps": 4, "log_every_n_steps": 1, "gradient_clip_val": 0.1, "precision": precision, "callbacks": [Keep()]}
    start(run, folder, trainer=trainer)
    return kept[0], logged(run)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_adamw_is_one_kernel_though_gradients_are_clipped(tmp_path, tiny_llama, target_folders, monkeypatch, precision):
    """Lightning's own rule would be an optimizer of many small kernels and temporary tables as large as the weights."""
    one, losses = optimizers_of(tmp_path / "one", tiny_llama, target_folders("llama"), precision)
    assert all(group["fused"] for group in one.param_groups)
    plain = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **named: plain(*args, **named | {"fused": False}))
    many, wanted = optimizers_of(tmp_path / "many", tiny_llama, target_folders("llama"), precision)
    assert not any(group["fused"] for group in many.param_groups)
    assert losses == pytest.approx(wanted, rel=1e-4) and len(losses) == 4
