"""torch's Muon, whose iterations take all matrices of a shape at once: one by one, each matrix is some twenty launches too small to fill a device.

Shapes: N matrices, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class BatchedMuon(getattr(torch.optim, "Muon", torch.optim.Optimizer)):  # type: ignore[misc]  # Muon came with torch 2.9
    """Steps as large as AdamW's (torch's adjust_lr_fn="match_rms_adamw"). Its state is torch's own, so that each goes on from what the other saved."""

    def __init__(self, weights: list[Parameter], lr: float, weight_decay: float):
        super().__init__(weights, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if pairs := [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]:
                self._step(group, *map(list, zip(*pairs, strict=True)))
        return loss

    def _step(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        for weight, grad in zip(weights, grads, strict=True):
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(grad)
        momenta = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        alike = defaultdict(list)
        for weight, update in zip(weights, ahead, strict=True):
            alike[weight.shape, weight.dtype].append((weight, update))
        for (shape, dtype), pairs in alike.items():
            turned_NRC = orthogonalized(torch.stack([update for _, update in pairs]), group).to(dtype)
            size = group["lr"] * 0.2 * math.sqrt(max(shape))
            torch._foreach_add_([weight for weight, _ in pairs], list(turned_NRC), alpha=-size)


def orthogonalized(update_NRC: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Each matrix turned into about the nearest one with equal singular values, in bf16: the iteration of Newton and Schulz in its quintic form, with the
    coefficients, steps and eps of a group of torch's Muon (Jordan et al. 2024). Returns [N, R, C]."""
    a, b, c = group["ns_coefficients"]
    x_NRC = update_NRC.bfloat16()
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    if tall:  # the product of the shorter sides is the smaller one
        x_NRC = x_NRC.mT
    x_NRC = x_NRC / x_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        square_NRR = x_NRC @ x_NRC.mT
        polynomial_NRR = torch.baddbmm(square_NRR, square_NRR, square_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, polynomial_NRR, x_NRC, beta=a)
    return x_NRC.mT if tall else x_NRC
