"""The target as objectives see it: its distribution over the draft vocabulary, and what that vocabulary leaves out.

Shapes: N rows, D target width, V draft vocabulary.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target


def plainly(device: torch.device):
    """The frozen target computes in the type it was loaded in, whatever trainer.precision says of the drafter. (On `meta` nothing says anything.)"""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class TargetTeacher:
    """What the target says of the tokens that `net` can say, computed as the target computes it."""

    def __init__(self, target: Target, net: DrafterNet):
        self.target, self.net = target, net

    def logits(self, final_ND: Tensor) -> Tensor:
        """[N, V], without gradient."""
        ids = None if self.net.vocabulary.is_full else self.net.speakable_V
        with torch.no_grad(), plainly(final_ND.device):
            return self.target.logits(final_ND.to(self.target.dtype), ids)

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        """Log of the draft vocabulary's share of the target's probability [N], fp32; costs the product with the whole head unless full."""
        if self.net.vocabulary.is_full:
            return logits_NV.new_zeros(len(logits_NV), dtype=torch.float32)
        with torch.no_grad(), plainly(final_ND.device):
            whole_NV = self.target.logits(final_ND.to(self.target.dtype)).float()
        return logits_NV.float().logsumexp(-1) - whole_NV.logsumexp(-1)
