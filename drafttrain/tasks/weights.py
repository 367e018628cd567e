"""The drafter's whole weights, wherever the strategy keeps them.

DDP holds the whole net in every process. DeepSpeed may hold bf16 copies of weights whose fp32 masters live in its optimizer, cut
over the ranks (ZeRO-1, -2), or hold no whole weight anywhere (ZeRO-3). What is saved and measured is the fp32 master.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterNet
from drafttrain.tasks.strategy import uses_deepspeed


def whole_net(trainer, net: DrafterNet, build: Callable[[], DrafterNet]) -> DrafterNet:
    """The net to save or to measure with: itself, or under DeepSpeed a twin in fp32. Called on every rank."""
    return twin_of(net, build, whole_weights(trainer, net)) if uses_deepspeed(trainer.strategy) else net


def whole_weights(trainer, net: DrafterNet) -> dict[str, Tensor]:
    """The fp32 weights by name: the net's own, or what DeepSpeed keeps, on the CPU. A collective: every rank takes part."""
    return _masters(net) if uses_deepspeed(trainer.strategy) else dict(net.named_parameters())


def twin_of(net: DrafterNet, build: Callable[[], DrafterNet], weights: Mapping[str, Tensor]) -> DrafterNet:
    """Another net with these weights, on the same device. `build()` makes a fresh net of the same shape; the random stream it draws from is put back."""
    with torch.random.fork_rng(devices=[net_device(net)] if net_device(net).type == "cuda" else []):
        twin = build()
    twin.load_state_dict({name: weights.get(name, value) for name, value in twin.state_dict().items()})
    return twin.to(net_device(net))


def _masters(net: nn.Module) -> dict[str, Tensor]:
    """fp32 weights gathered from DeepSpeed's optimizer, and frozen ones as they are. A collective: every rank takes part."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Tensor] = {}
    for name, weight in net.named_parameters():
        master = safe_get_full_fp32_param(weight) if weight.requires_grad else None
        if master is None:
            with deepspeed.zero.GatheredParameters([weight]):
                master = weight.detach().float().clone()
        found[name] = master.detach().cpu()
    return found


def keep_buffers(net: nn.Module) -> dict[str, Tensor]:
    """The net's floating-point buffers as they are now."""
    return {name: buffer.clone() for name, buffer in net.named_buffers() if buffer.is_floating_point()}


def restore_buffers(net: nn.Module, kept: dict[str, Tensor]) -> None:
    """Undoes a cast of buffers. DeepSpeed's bf16 casts them with the weights, and rotary frequencies of 8 bits put far tokens elsewhere.

    A buffer that holds something else by now (from a checkpoint) is left alone.
    """
    for name, buffer in net.named_buffers():
        if name in kept and buffer.dtype != kept[name].dtype and torch.equal(buffer, kept[name].to(buffer)):
            buffer.data = kept[name].to(buffer.device)


def net_device(net: nn.Module) -> torch.device:
    return next(net.parameters()).device
