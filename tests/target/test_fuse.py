"""Fused norms against the model's own, and norms that are something else."""

import copy

import pytest
import torch
from tiny import ARCHITECTURES
from torch import nn

from drafttrain.target.fuse import fuse_norms


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
