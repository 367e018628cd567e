"""Our own layout, for any drafter: its class and options in config.json, its weights under their own names.

drafttrain's loop is the runtime. No engine reads it, and nothing is lost in it: what is trained is what is read back.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, public_arguments
from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.registry import known_drafters
from drafttrain.errors import UserError
from drafttrain.export.block_format import require_layout
from drafttrain.export.format import (
    Format,
    Table,
    Written,
    dtype_words,
    fill,
    map_table,
    map_tensors,
    read_map,
    require_target,
    state_of,
)
from drafttrain.target.target import Target

FIELDS = {"class_path", "init_args", "tensors", "hidden_size", "vocab_size", "draft_vocab_size"}


class NativeFormat(Format):
    """What `drafttrain validate`, `bench` and `generate` run."""

    name = "native"
    title = "Drafter"
    method = "drafttrain"
    architecture = "drafttrain"

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        weights = state_of(net)
        config = {
            "architectures": [self.architecture],
            "model_type": "drafttrain",
            "class_path": type(net.config).__name__,
            "init_args": public_arguments(net.config),
            **({"own_sizes": sizes} if (sizes := net.own_sizes()) else {}),
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
            "draft_vocab_size": len(net.vocabulary.ids),
            **_layout(net),
            "tensors": {name: list(weight.shape) for name, weight in weights.items()},
            **dtype_words(dtype),
        }
        return Written(config, weights | map_tensors(net.vocabulary))

    def table(self, config: dict[str, Any], where: str) -> Table:
        if missing := sorted(FIELDS - config.keys()):
            raise UserError(
                f"{where}/config.json has no {', '.join(missing)}, so it is damaged; export the drafter again."
            ) from KeyError(*missing)
        own: Table = {name: (tuple(shape), None) for name, shape in config["tensors"].items()}
        return own | map_table(config["draft_vocab_size"], config["vocab_size"])

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        require_target(config["vocab_size"], config["hidden_size"], target, where)
        classes, name = known_drafters(), config["class_path"]
        if name not in classes:
            raise UserError(
                f"{where} holds a {name}, which this version does not know ({', '.join(classes)}); update drafttrain."
            )
        weights = dict(tensors)
        vocabulary = read_map(weights, target.vocab, where)
        try:
            net = classes[name](**config["init_args"]).rebuild(target, vocabulary, config.get("own_sizes") or {})
            if isinstance(net, BlockNet):
                require_layout(config, net.first, name, where)
            return fill(net, weights, target)
        except (TypeError, RuntimeError) as error:
            raise UserError(
                f"{where} does not fit its own config.json ({str(error).splitlines()[0]}); export the drafter again."
            ) from error

    def about(self, made: dict[str, Any]) -> str:
        options = ", ".join(f"{name} {value}" for name, value in made["init_args"].items() if value not in (None, False, []))
        return f"It is a `{made['class_path']}` ({options}). No serving engine loads this folder: drafttrain's own loop is the runtime."


def _layout(net: DrafterNet) -> dict[str, bool]:
    """Which slot of a block says the first draft."""
    return {"sample_from_anchor": net.first == 0} if isinstance(net, BlockNet) else {}
