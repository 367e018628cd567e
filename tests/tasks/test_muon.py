"""Muon beside AdamW: who is stepped by which, that both together are what they are apart, that a stopped run goes on as if nothing had been."""

from functools import partial

import pytest
import torch
from drafters.test_faces import DRAFTERS
from lightning.pytorch.strategies import DeepSpeedStrategy
from tiny_run import logged, make_run, start
from torch import nn

from drafttrain.cli import main
from drafttrain.drafters.save import load_drafter
from drafttrain.errors import UserError
from drafttrain.tasks.muon import BatchedMuon
from drafttrain.tasks.optimizer import OptimizerConfig, make_optimizer
from drafttrain.vocab import DraftVocabulary

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")
CONFIG = OptimizerConfig(lr=1e-2, muon_lr=3e-2, weight_decay=0.1)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 50, bias=False))


def teach(net, optimizer, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for weight in net.parameters():
            weight.grad = torch.randn(weight.shape, generator=g)
        optimizer.step()


def test_matrices_go_to_muon_and_tables_norms_and_biases_to_adamw():
    net = small_net()
    adamw, muon = make_optimizer(CONFIG, net, False, tokens={50})._parts
    assert [id(w) for group in muon.param_groups for w in group["params"]] == [id(net[0].weight)]
    plain = {id(w) for group in adamw.param_groups for w in group["params"]}
    assert plain == {id(w) for w in (net[0].bias, net[1].weight, net[1].bias, net[2].weight)}


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_table_of_tokens_is_turned(tiny_llama, name):
    net = DRAFTERS[name].build(tiny_llama, DraftVocabulary(torch.arange(0, 320, 2), 320))
    optimizer = make_optimizer(CONFIG, net, False, tokens={320, 160})
    muon = optimizer._parts[1]
    turned = {id(w) for group in muon.param_groups for w in group["params"]}
    names = {name for name, w in net.named_parameters() if id(w) in turned}
    assert names and not any(
        "lm_head.weight" in name or "codebook" in name or "markov" in name or "norm" in name for name in names
    )
    together = [id(w) for part in optimizer._parts for group in part.param_groups for w in group["params"]]
    assert sorted(together) == sorted(id(w) for w in net.parameters())


def test_both_together_are_what_they_are_apart():
    one, other = small_net(), small_net()
    teach(one, make_optimizer(CONFIG, one, False, tokens={50}), 4)
    adamw = torch.optim.AdamW(
        [
            {"params": [other[2].weight], "weight_decay": 0.1},
            {"params": [other[0].bias, other[1].weight, other[1].bias], "weight_decay": 0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    teach(other, adamw, 4)
    muon, third = torch.optim.Muon, small_net()
    teach(third, muon([third[0].weight], lr=3e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), 4)
    for place in (0, 1, 2):
        for name, weight in one[place].named_parameters():
            wanted = (third if (place, name) == (0, "weight") else other)[place].get_parameter(name)
            assert torch.equal(weight, wanted), (place, name)


def test_a_first_step_is_nearly_orthogonal_and_as_large_as_adamws():
    net = nn.Linear(40, 64, bias=False)
    before = net.weight.detach().clone()
    optimizer = make_optimizer(OptimizerConfig(muon_lr=3e-2), net, False, tokens={999})
    net.weight.grad = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    values = torch.linalg.svdvals((before - net.weight).detach()) / (3e-2 * 0.2 * 64**0.5)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3  # five Newton-Schulz steps come that near to 1


def test_all_matrices_of_a_shape_at_once_are_what_they_are_one_by_one():
    """Against torch's own, from whose state it goes on: what differs is rounding in bf16."""
    shapes = [(24, 24), (24, 60), (60, 24), (24, 60), (24, 24), (1, 9), (24, 60)]
    torch.manual_seed(3)
    start = [torch.randn(shape) for shape in shapes]
    options = {"lr": 3e-2, "weight_decay": 0.1}
    found, state = [], None
    for kind in (partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"), BatchedMuon):
        weights = [nn.Parameter(weight.clone()) for weight in start]
        optimizer = kind(weights, **options)
        if state is not None:
            optimizer.load_state_dict(state)
        g = torch.Generator().manual_seed(4)
        for step in range(4):
            for number, weight in enumerate(weights):
                weight.grad = None if (step, number) == (2, 3) else torch.randn(weight.shape, generator=g) * 10 ** (number - 3)
            if step == 0 and state is None:
                optimizer.step()  # torch's own makes the state from which both then learn
                state = {"state": {k: {n: t.clone() for n, t in v.items()} for k, v in optimizer.state_dict()["state"].items()}}
                state["param_groups"] = optimizer.state_dict()["param_groups"]
                start = [weight.detach().clone() for weight in weights]
            elif step:
                optimizer.step()
        found.append(
            [
                (weight.detach() - old, optimizer.state[weight]["momentum_buffer"])
                for weight, old in zip(weights, start, strict=True)
            ]
        )
    for (one, momentum), (other, own_momentum) in zip(*found, strict=True):
        assert torch.equal(momentum, own_momentum)
        assert float((one - other).norm() / one.norm()) < 0.02


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_been():
    whole, parts = small_net(), small_net()
    teach(whole, optimizer := make_optimizer(CONFIG, whole, False, tokens={50}), 3)
    teach(whole, optimizer, 3, seed=1)
    teach(parts, optimizer := make_optimizer(CONFIG, parts, False, tokens={50}), 3)
    saved = optimizer.state_dict()
    again = make_optimizer(OptimizerConfig(lr=1.0, muon_lr=1.0), parts, False, tokens={50})
    again.load_state_dict(saved)
    teach(parts, again, 3, seed=1)
    for wanted, found in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(wanted, found)


def test_learning_rates_are_scheduled_apart():
    optimizer = make_optimizer(CONFIG, small_net(), False, tokens={50})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [5e-3, 1.5e-2]
    assert [group["lr"] for group in optimizer._parts[1].param_groups] == [1.5e-2]


def test_a_training_run_that_was_stopped_equals_one_that_was_not(tmp_path, tiny_llama, target_folders, capsys):
    optimizer = {"muon_lr": 1e-2}
    trainer = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    whole, parts = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "parts"))
    start(whole, target_folders("llama"), optimizer=optimizer, trainer=trainer | {"max_steps": 6})
    weights = load_drafter(whole / "checkpoints" / "best", tiny_llama)[0].named_parameters()
    sizes = {name: weight.numel() for name, weight in weights if "lm_head" not in name and "norm" not in name}
    assert f"Muon trains {sum(sizes.values()):,} of " in capsys.readouterr().out
    checkpoint = {"every": 3}
    start(
        parts,
        target_folders("llama"),
        optimizer=optimizer | {"schedule": "constant"},
        trainer=trainer | {"max_steps": 3},
        checkpoint=checkpoint,
    )
    constant = make_run(tmp_path / "constant", tiny_llama)
    start(constant, target_folders("llama"), optimizer=optimizer | {"schedule": "constant"}, trainer=trainer | {"max_steps": 6})
    start(
        parts,
        target_folders("llama"),
        optimizer=optimizer | {"schedule": "constant"},
        trainer=trainer | {"max_steps": 6},
        checkpoint=checkpoint,
    )
    assert logged(parts) == logged(constant) != logged(whole)


def test_with_deepspeed_it_is_refused(tmp_path, tiny_llama, target_folders):
    run = make_run(tmp_path / "run", tiny_llama)
    for strategy in ("deepspeed_stage_2", DeepSpeedStrategy):
        with pytest.raises(UserError, match=r"optimizer.muon_lr is 0.01, but trainer.strategy is DeepSpeed"):
            made = strategy if isinstance(strategy, str) else object.__new__(strategy)
            start(run, target_folders("llama"), optimizer={"muon_lr": 1e-2}, trainer={"strategy": made})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="optimizer.muon_lr is .*, but must be a finite number above 0"):
        OptimizerConfig(muon_lr=value)


def test_plan_refuses_it_with_deepspeed_too(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    recipe = "recipes/smollm2-135m/dflash.yaml"
    rest = ["--config", "recipes/hardware/zero2.yaml", "--optimizer.muon_lr", "2e-3"]
    assert main(["plan", "--config", recipe, *rest]) == 2
    assert "optimizer.muon_lr is 0.002, but trainer.strategy is DeepSpeed" in capsys.readouterr().err
