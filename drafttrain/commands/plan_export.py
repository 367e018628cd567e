"""How large an export will be: the tensors that the format would write, without memory, and what they would take on disk.

Some formats hold more than was trained (rows of the target's head or embeddings), or something else (a factored head multiplied out).
"""

import copy
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.export.card import base_model
from drafttrain.export.config import ExportConfig
from drafttrain.export.registry import choose_format
from drafttrain.files import human_bytes, public_place
from drafttrain.target.origin import origin_of
from drafttrain.target.target import Target


def exported(target: Target, net: DrafterNet, config: ExportConfig) -> tuple[str, list[str]]:
    """The size of an export in words, and a warning where `export` would refuse.

    Args:
        target, net: outlines, on `meta`.
    """
    outlined = copy.copy(target)
    outlined.tokenizer = ()  # no token is known by its text
    dtype = getattr(torch, config.dtype)
    called = base_model(asdict(target.identity), config.base_model) or origin_of(target.identity).repository
    try:
        with _WithoutMemory():
            format, _ = choose_format(net, outlined, config.format)
            written = format.write(net, outlined, dtype, called or public_place(target.identity.path))
            return human_bytes(sum(tensor.nbytes for tensor in written.rounded(dtype).values())), []
    except UserError as error:
        return "none", [f"warning: export would refuse: {error}"]
    except RuntimeError:  # of torch: a format looks at a value, of which an outline has none
        return f"at least {human_bytes(dtype.itemsize * sum(weight.numel() for weight in net.parameters()))}", []


class _WithoutMemory(TorchFunctionMode):
    """A tensor without memory that is asked onto the CPU stays what it is: torch would refuse, since there is nothing to copy."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.cpu) and args[0].is_meta:
            dtypes = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
            return args[0].to(*dtypes) if dtypes else args[0]
        return func(*args, **kwargs)
