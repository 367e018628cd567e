"""The same target in fewer kernels: a small one is bound by their number, and a third of them belong to norms.

Norms take one kernel each instead of seven. What a norm of some model class computes (is the weight added to one? what is rounded when?)
is not guessed from its name: each is tried, and one that disagrees stays as it is. Projections that read the same input (queries, keys and
values; gate and up) become one product, whose parts are handed out as the model asks for them.
"""

from typing import Any

import torch
from torch import Tensor, nn

EPSILON_NAMES = ("variance_epsilon", "eps")


def fuse_norms(model: nn.Module) -> int:
    """Replace the forward of every RMS norm that `torch.nn.functional.rms_norm` reproduces; returns how many."""
    return sum(_fuse(module) for module in model.modules() if "RMSNorm" in type(module).__name__)


def _fuse(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return False

    def fused(x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    if not _agree(module.forward, fused, weight):
        return False
    module.forward = fused
    return True


@torch.no_grad()
def _agree(own: Any, fused: Any, weight: Tensor) -> bool:
    """Whether both give the same for ordinary, tiny and large inputs, up to the rounding of the dtype."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=g) * torch.tensor([[1.0], [1e-3], [30.0], [1e-6]])
    x = x.to(weight)
    try:
        wanted, found = own(x), fused(x)
    except (TypeError, ValueError, RuntimeError):
        return False
    rounding = 4 * torch.finfo(weight.dtype).eps
    return wanted.dtype == found.dtype and torch.allclose(wanted.float(), found.float(), rtol=rounding, atol=rounding * 1e-3)


TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that transformers' models apply to one input."""


def merge_projections(model: nn.Module) -> int:
    """Let each group of linear layers that read one input compute in one product; returns how many groups.

    The weights stay where they are, as views of the merged ones. Correct whatever the model does with them: a layer that is not
    given the very input of the group's last product computes by itself.
    """
    merged = 0
    for module in model.modules():
        for names in TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers) and _alike(layers):
                _Merged(layers)
                merged += 1
    return merged


def _alike(layers: list[Any]) -> bool:
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.dtype == first.weight.dtype
        and type(layer.weight.data) is Tensor  # no packed numbers, as of a quantised target
        and not layer.weight.requires_grad
        for layer in layers
    )


class _Merged:
    """One product for several layers."""

    def __init__(self, layers: list[Any]):
        self.weight = torch.cat([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self.sizes = [layer.out_features for layer in layers]
        self.input: Tensor | None = None
        self.waiting: dict[int, Tensor] = {}
        start = 0
        for number, layer in enumerate(layers):
            rows = slice(start, start + layer.out_features)
            start = rows.stop
            layer.weight = nn.Parameter(self.weight[rows], requires_grad=False)
            if self.bias is not None:
                layer.bias = nn.Parameter(self.bias[rows], requires_grad=False)
            layer.forward = self._part(number, layer)

    def _part(self, number: int, layer: nn.Linear):
        def forward(x: Tensor) -> Tensor:
            if number == 0:
                first, *others = nn.functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
                self.input, self.waiting = x, dict(enumerate(others, start=1))
                return first
            if x is not self.input or number not in self.waiting:
                return nn.functional.linear(x, layer.weight, layer.bias)
            part = self.waiting.pop(number)
            if not self.waiting:
                self.input = None
            return part

        return forward
