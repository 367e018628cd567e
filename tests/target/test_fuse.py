"""Fused norms against the model's own, and norms that are something else."""

import copy

import pytest
import torch
from tiny import ARCHITECTURES
from torch import nn

from drafttrain.target.fuse import fuse_norms, merge_projections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_model_says_the_same_with_fused_norms(name, dtype):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().to(dtype).eval()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.uniform_(module.weight, 0.5, 1.5)
    ids = torch.randint(3, 300, (2, 20))
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(ids).logits
        wanted = model(ids).logits.float()
        fused = fuse_norms(model)
        found = model(ids).logits.float()
    norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    assert fused == (0 if name == "gemma3" else norms)  # Gemma's weight counts from one
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    else:  # roundings differ, but no more of them
        assert float((found - exact).abs().mean()) < 1.2 * float((wanted - exact).abs().mean())


@pytest.mark.parametrize("fault", ["counts from one", "other eps", "mean taken off"])
def test_a_norm_that_only_looks_alike_stays_as_it_is(fault):
    class LikeRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.rand(16)), 1e-5

        def forward(self, x):
            weight = 1 + self.weight if fault == "counts from one" else self.weight
            x = x - x.mean(-1, keepdim=True) if fault == "mean taken off" else x
            return nn.functional.rms_norm(x, (16,), weight, 1e-3 if fault == "other eps" else 1e-5)

    module = LikeRMSNorm()
    own = module.forward(torch.ones(16).cumsum(0))
    assert fuse_norms(nn.ModuleList([module])) == 0
    assert torch.equal(module(torch.ones(16).cumsum(0)), own)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_model_says_the_same_with_merged_projections(name):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval().requires_grad_(False)
    ids = torch.randint(3, 300, (2, 20))
    names = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = model(ids).logits
    layers = model.config.num_hidden_layers
    stacked = name in ("mixtral", "gpt_oss")  # experts keep weights of their own
    assert merge_projections(model) == (layers if stacked else 2 * layers)
    torch.testing.assert_close(model(ids).logits, wanted, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(value, names[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("bias", [False, True])
def test_merged_layers_do_not_mistake_one_input_for_another(bias):
    group = nn.Module()
    for name, size in (("q_proj", 6), ("k_proj", 4), ("v_proj", 3)):
        setattr(group, name, nn.Linear(8, size, bias=bias).requires_grad_(False))
    own = {name: copy.deepcopy(layer) for name, layer in group.named_children()}
    assert merge_projections(group) == 1
    x, y = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    # In order, out of order, twice, with another input in between, and without the first.
    for name, given in [
        ("q_proj", x),
        ("k_proj", x),
        ("v_proj", x),
        ("v_proj", y),
        ("q_proj", y),
        ("v_proj", x),
        ("k_proj", y),
        ("k_proj", y),
    ]:
        torch.testing.assert_close(getattr(group, name)(given), own[name](given), atol=1e-6, rtol=1e-5)


def test_layers_that_differ_stay_apart():
    group = nn.Module()
    group.gate_proj, group.up_proj = (
        nn.Linear(8, 4, bias=True).requires_grad_(False),
        nn.Linear(8, 4, bias=False).requires_grad_(False),
    )
    assert merge_projections(group) == 0
    group.gate_proj, group.up_proj = nn.Linear(8, 4), nn.Linear(8, 4)  # trained ones too
    assert merge_projections(group) == 0
