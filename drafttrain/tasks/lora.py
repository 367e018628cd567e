"""Training adapters beside the matrices of a trained drafter, which stay as they are (LoRA, Hu et al. 2021, arXiv 2106.09685; the library is peft).

    y = W x + (alpha / r) B A x          A [r, in] drawn, B [out, r] zero, so that training begins where the drafter is
    W' = W + (alpha / r) B A             what is measured, saved and exported: one matrix again, as whole as any other drafter's

Only A and B are trained, so the optimizer, the processes and the resume state know nothing else:

    checkpoints/lora_base/                the drafter that is adapted, cut to the draft vocabulary: a drafter like any other
    checkpoints/best/                     the merged drafter (and last_drafter/ likewise)
    checkpoints/best/adapter/             A and B in peft's own form; peft.PeftModel.from_pretrained puts them beside lora_base
    checkpoints/last/step_.../            A, B and their optimizer

W is merged from its fp32 copy in memory, not from the net: DeepSpeed may hold the net's in bf16, or cut over the processes.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.save import read_record, require_unaltered, save_drafter
from drafttrain.errors import UserError, install
from drafttrain.files import write_tensors_atomic
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.tasks.optimizer import token_sides
from drafttrain.types import Identity

BASE, ADAPTER = "lora_base", "adapter"
NAME = "default"
"""What peft calls the only adapter of a net."""


@dataclass(frozen=True)
class Adapters:
    """What is known of a net's adapters beside their weights."""

    config: Any
    """peft's."""
    base: dict[str, Tensor]
    """Every weight of the drafter that is adapted, fp32, on the CPU."""

    def whole(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The merged weights by the names of a drafter without adapters, from those of A and B (fp32, on any device)."""
        scale = self.config.lora_alpha / self.config.r
        merged = {}
        for name, B in trained.items():
            if f".lora_B.{NAME}." in name:
                matrix, A = name.replace(f".lora_B.{NAME}", ""), trained[name.replace(".lora_B.", ".lora_A.")]
                merged[matrix] = self.base[matrix].to(B.device) + scale * (B.detach() @ A.detach())
        return self.base | merged

    def save(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """adapter_model.safetensors and adapter_config.json, as peft reads them."""
        folder.mkdir()
        tensors = {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": value.detach().cpu() for name, value in trained.items()}
        write_tensors_atomic(folder / "adapter_model.safetensors", tensors)
        self.config.save_pretrained(str(folder))


def begin(
    net: DrafterNet,
    config: LoraConfig,
    drafter: DrafterConfig,
    identity: Identity,
    seed: int,
    checkpoints: Path,
    resumed: bool,
    rank: int,
) -> list[str]:
    """Puts adapters into a net that holds the drafter to adapt, or will be given it as it was where the run goes on. Returns what to say.

    UserError where `layers` names no matrix, peft is missing, or a run that goes on has lost the drafter that it adapts.
    """  # fmt: skip
    if resumed:
        _load_base(net, checkpoints)
    elif rank == 0:
        save_drafter(checkpoints / BASE, net, drafter, identity, {})
    base = {name: weight.detach().float().cpu().clone() for name, weight in net.named_parameters()}
    torch.manual_seed(seed)
    made, line = insert(net, config)
    net.adapters = Adapters(made, base)
    return [line]


def insert(net: DrafterNet, config: LoraConfig) -> tuple[Any, str]:
    """Puts fresh adapters beside the matrices that `config` names, and freezes everything else. Returns peft's config, and what to say.

    UserError as `begin` says.
    """
    try:
        import peft
    except ImportError:
        raise UserError(
            f"lora.rank is {config.rank}, but the library peft, which makes the adapters, is not installed; run {install('peft')}, or set it to null."
        ) from None
    names = matrices(net, config.layers, token_sides(net))
    sides = [min(net.get_parameter(f"{name}.weight").shape) for name in names]
    if config.rank is not None and names and config.rank > max(sides):
        raise UserError(
            f"lora.rank is {config.rank:,}, but none of the {len(names)} matrices has a rank above {max(sides):,}, so adapters would only be larger than "
            f"the matrices; set it to {max(sides)} or less, or to null to train the drafter's own weights."
        )
    exactly = "|".join(re.escape(name) for name in names)  # a list of names would be read as one of endings
    made = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=exactly)
    peft.inject_adapter_in_model(made, net, adapter_name=NAME)
    return made, f"LoRA: adapters of rank {made.r} beside {len(names)} matrices, scaled by {made.lora_alpha / made.r:g}"


def matrices(net: nn.Module, ends: Collection[str], tokens: Collection[int]) -> list[str]:
    """Names of the linear matrices that end so, by whole parts of a name; without ends all but those with a side among `tokens`. UserError for an end
    of no name."""
    linear = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    if not ends:
        return [name for name, module in linear.items() if not set(module.weight.shape) & set(tokens)]
    found = {end: [name for name in linear if f".{name}".endswith(f".{end}")] for end in ends}
    if missing := [end for end, names in found.items() if not names]:
        raise UserError(
            f"lora.layers names {', '.join(missing)}, but no matrix of this drafter is called so; it has {', '.join(linear)}."
        )
    return [name for name in linear if any(name in names for names in found.values())]


def _load_base(net: DrafterNet, checkpoints: Path) -> None:
    """Gives a net the weights of the drafter that is adapted. UserError where they are lost, or another drafter's."""
    file = checkpoints / BASE / "drafter.safetensors"
    try:
        tensors = load_file(str(file))
        net.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "d2t"})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{file}, which holds the drafter that this run adapts, cannot be read ({' '.join(str(error).split())[:240]}); restore it, or delete "
            f"{checkpoints} to begin anew from checkpoint.start."
        ) from error
    require_unaltered(file.parent, read_record(file.parent))
