"""The drafter's whole weights, wherever the strategy keeps them.

DDP holds the whole net in every process. DeepSpeed may hold bf16 copies of weights whose fp32 masters live in its optimizer, cut
over the ranks (ZeRO-1, -2), or hold no whole weight anywhere (ZeRO-3). What is saved and measured is the fp32 master, with adapters merged into
what they adapt (lora.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterNet
from drafttrain.tasks.lora import ADAPTER
from drafttrain.tasks.strategy import uses_deepspeed


def whole_net(trainer, net: DrafterNet, build: Callable[[], DrafterNet]) -> DrafterNet:
    """The net to save or to measure with: itself, or a twin in fp32 under DeepSpeed and where adapters are trained. Called on every rank."""
    if net.adapters is None and not uses_deepspeed(trainer.strategy):
        return net
    return twin_of(net, build, whole_weights(trainer, net))


def whole_weights(trainer, net: DrafterNet) -> dict[str, Tensor]:
    """The fp32 weights by name: the net's own, or what DeepSpeed keeps, on the CPU. A collective: every rank takes part."""
    if net.adapters is not None:
        return net.adapters.whole(trained_weights(trainer, net))
    return _masters(trainer, dict(net.named_parameters()))


def trained_weights(trainer, net: DrafterNet) -> dict[str, Tensor]:
    """Those of them that are trained. A collective: every rank takes part."""
    return _masters(trainer, {name: weight for name, weight in net.named_parameters() if weight.requires_grad})


def adapter_files(trainer, net: DrafterNet) -> Callable[[Path], None] | None:
    """Writes the adapters apart, into a drafter's folder; None where there are none. A collective: every rank takes part."""
    if net.adapters is None:
        return None
    trained = trained_weights(trainer, net)
    return lambda folder: net.adapters.save(folder / ADAPTER, trained)


def twin_of(net: DrafterNet, build: Callable[[], DrafterNet], weights: Mapping[str, Tensor]) -> DrafterNet:
    """Another net with these weights, on the same device. `build()` makes a fresh net of the same shape; the random stream it draws from is put back."""
    with torch.random.fork_rng(devices=[net_device(net)] if net_device(net).type == "cuda" else []):
        twin = build()
    twin.load_state_dict({name: weights.get(name, value) for name, value in twin.state_dict().items()})
    return twin.to(net_device(net))


def _masters(trainer, weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The weights themselves, or under DeepSpeed what its optimizer keeps of them in fp32, and frozen ones as they are. A collective."""
    if not uses_deepspeed(trainer.strategy):
        return dict(weights)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
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
