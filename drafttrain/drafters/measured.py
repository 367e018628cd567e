"""A published drafter as it is: the net that its own folder describes, to be measured or to answer with, not to be trained.

    own = AsPublished.open("owner/name", pickle=False, like=Eagle3(...), target=target)
    net, lines = own.build()

Its config.json says what it is: the class, the options, and the sizes and rotary base of its block, which need not be the target's. What it does not
say is the recipe's where that names the same class, and else the class's own default. Of the target it takes what drafters read: embeddings, head,
features.
"""

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.source import Source, rope_of
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary

SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
"""Fields of a block that may be other than the target's."""
EPS = 1e-6
"""rms_norm_eps where config.json leaves it out, as transformers has it."""


@dataclass(frozen=True)
class AsPublished(Source):
    """A drafter that a command was given, and what to call it by."""

    asked, using = "--draft", "drafting with"
    way_out = "Give a whole checkpoint that was trained for this target."

    like: DrafterConfig
    """The recipe's drafter."""

    @staticmethod
    def open(where: str, pickle: bool, like: DrafterConfig, target: Target, folder: Path | None = None) -> "AsPublished":
        """Find (where `folder` does not say that it was), read and recognise it. UserError where it is missing, damaged, of an unknown layout, or no net of ours for this target."""
        own = AsPublished.read(where, pickle, target, folder, like=like)
        if faults := own.misfits({"hidden_size": target.hidden, "vocab_size": target.vocab, "hidden_act": "silu"}):
            raise UserError(
                f"{own.what} ({own.found.layout}) is no net that can be built here: {'; '.join(faults)}; give another checkpoint."
            )
        return own

    @property
    def config(self) -> DrafterConfig:
        """Its class and options. The recipe's say what its folder does not."""
        cls = known_drafters()[self.found.drafter]
        base = self.like if type(self.like) is cls else cls()
        known = {field.name for field in fields(cls)}
        said = {name: value for name, value in (self.found.trained | self.found.options).items() if name in known}
        said["draft_vocab"] = None if self.spoken is None or self.spoken.is_full else len(self.spoken.ids)
        if "taps" in said:
            said["taps"] = list(said["taps"] or [])
        return replace(base, **said)

    def build(self) -> tuple[DrafterNet, list[str]]:
        """The net with its weights in fp32, in eval mode on the target's device, and what was done, for people. UserError that lists every
        tensor which is missing, unknown or of another shape."""
        vocabulary = self.spoken or DraftVocabulary.full(self.target.vocab)
        net = self.config.build(_with_block_of(self.target, self.found.config), vocabulary)
        lines = self.fill(net)
        return net.eval(), lines


class _Overlaid:
    """A configuration with other values in some of its fields."""

    def __init__(self, config: Any, values: dict[str, Any]):
        self._config, self._values = config, values

    def __getattr__(self, name: str) -> Any:
        return self._values[name] if name in self._values else getattr(self._config, name)


def _with_block_of(target: Target, config: dict[str, Any]) -> Target:
    """The target as a drafter is built for it, which takes the sizes of its block from there: with those of config.json, where it has a block."""
    if "num_attention_heads" not in config:
        return target
    heads = config["num_attention_heads"]
    values = {
        "num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads, "rms_norm_eps": EPS, "rope_parameters": rope_of(config),
        **{name: config[name] for name in SIZES if config.get(name) is not None},
    }  # fmt: skip
    seen = copy.copy(target)
    seen.config = _Overlaid(target.config, values)
    return seen
