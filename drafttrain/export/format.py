"""What one layout of files must say of itself, so that one exporter can write, check and read any of them.

A format knows which engines load it, why a net cannot be written in it, and both directions: a net to config.json and tensors, and back
from these two and the target, as an engine would build it. Choosing among formats, writing, comparing and pushing are not its business.

Letters: Vd draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary

Table = dict[str, tuple[tuple[int, ...], torch.dtype | None]]
"""Name -> (shape, dtype; None means the export's own). Exactly these tensors are in a file."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators", "transformers": "transformers"}
"""Engine as a recipe spells it -> as its makers do."""


@dataclass(frozen=True)
class Engine:
    """Who loads a format."""

    name: str
    """vllm, sglang, speculators or transformers."""
    versions: str
    """Which releases load it, for people."""
    method: str
    """The engine's own word for this way of drafting."""


@dataclass(frozen=True)
class Written:
    """A net in some format, before it is on disk."""

    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, Tensor]
    """On the CPU, floating ones in fp32."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Name -> content of what else the engine wants."""
    copied: bool = True
    """Whether every weight is a copy of a trained one, and none the result of arithmetic."""
    kept: frozenset[str] = frozenset()
    """Names of tensors that engines hold in fp32: these are not rounded."""

    def rounded(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors as they stand on disk."""
        return {
            name: x.to(dtype).contiguous() if x.is_floating_point() and name not in self.kept else x.contiguous()
            for name, x in self.tensors.items()
        }


class Format:
    """Base of the formats. Nothing above asks which one it is."""

    name: str
    """What drafttrain.json calls it."""
    title: str
    """What the card calls such a drafter."""
    method: str
    """Word that names the way of drafting, a tag on the Hub."""
    architecture: str
    """The only entry of `architectures` in config.json."""
    engines: tuple[Engine, ...] = ()
    whole_block: bool = False
    """Whether engines make the block as long as the number of drafts asked for, so that only the trained number is the trained net."""

    def claims(self, config: dict[str, Any]) -> bool:
        """Whether this config.json is of this format."""
        return config.get("architectures") == [self.architecture]

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        """Why this net cannot be written so, with the nearest choice that can; None if it can."""
        return None

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        """Sentences for the user about what serving will cost or change."""
        return []

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        """The net in this format. `dtype` is only named; rounding comes later. `called` is the target's Hub id, or its path if it has
        none, for readers that load it. Raises UserError if such a reader could not."""
        raise NotImplementedError

    def table(self, config: dict[str, Any], where: str) -> Table:
        """The tensors that an engine reads for this config.json. Raises UserError for a config that is not of this format."""
        raise NotImplementedError

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        """The net that an engine would build from config.json and the tensors of `table`, in fp32, on the target's device.

        `recorded` is the trained drafter's own configuration where it is known: what engines do not need, such as the depth of
        training, is taken from it. Raises UserError.
        """
        raise NotImplementedError

    def about(self, made: dict[str, Any]) -> str:
        """What the drafter is, in a sentence or two for the card. `made` is drafttrain.json."""
        raise NotImplementedError

    def extra_words(self, engine: str) -> dict[str, Any]:
        """What vLLM's speculative configuration needs besides the usual."""
        return {}

    def extra_flags(self, engine: str, made: dict[str, Any], here: str) -> str:
        """What the serving command of an engine needs besides the usual; `here` is the place of the folder."""
        return ""

    @property
    def engine_names(self) -> list[str]:
        """The engines, as a recipe spells them."""
        return [engine.name for engine in self.engines]

    @property
    def loaders(self) -> str:
        """Names of the engines, for a sentence."""
        return " and ".join(NAMES[engine.name] for engine in self.engines) or "drafttrain"


def check_tensors(tensors: Mapping[str, Tensor], table: Table, dtype: torch.dtype, where: str, loaders: str) -> None:
    """Raises UserError that lists every name, shape and dtype in which `tensors` differ from the table."""
    faults = [f"{name} is missing" for name in sorted(table.keys() - tensors.keys())]
    faults += [f"{name} is not one of the format's tensors" for name in sorted(tensors.keys() - table.keys())]
    for name in sorted(table.keys() & tensors.keys()):
        shape, own = table[name]
        got = tensors[name]
        if tuple(got.shape) != shape:
            faults.append(f"{name} is {list(got.shape)} instead of {list(shape)}")
        if got.dtype != (own or dtype):
            faults.append(f"{name} is {word(got.dtype)} instead of {word(own or dtype)}")
    if faults:
        raise UserError(
            f"{where} does not hold what {loaders} read ({'; '.join(faults)}): it would be loaded in silence, and nothing that it drafts "
            "accepted. Export a drafter that this version of drafttrain has trained."
        )


def map_tensors(vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """The vocabulary map; {} where the vocabulary is full (an identity map helps nobody)."""
    return {} if vocabulary.is_full else {"d2t": vocabulary.d2t.cpu(), "t2d": vocabulary.t2d.cpu()}


def map_table(draft_vocab: int, vocab: int) -> Table:
    """What `map_tensors` gives."""
    return {} if draft_vocab == vocab else {"d2t": ((draft_vocab,), torch.int64), "t2d": ((vocab,), torch.bool)}


def read_map(tensors: dict[str, Tensor], vocab: int, where: str) -> DraftVocabulary:
    """Takes d2t and t2d out of `tensors`. Raises UserError if they name different tokens."""
    if "d2t" not in tensors:
        return DraftVocabulary.full(vocab)
    vocabulary = DraftVocabulary.from_d2t(tensors.pop("d2t"), vocab)
    if not torch.equal(tensors.pop("t2d").cpu(), vocabulary.t2d):
        raise UserError(f"{where} has a d2t and a t2d that name different tokens; export the drafter again.")
    return vocabulary


def require_target(vocab: int, hidden: int, target: Target, where: str) -> None:
    """Raises UserError unless the target has this width and vocabulary."""
    if (vocab, hidden) != (target.vocab, target.hidden):
        raise UserError(
            f"{where} drafts for a target of width {hidden} and {vocab} tokens, but {target.identity.path} has "
            f"{target.hidden} and {target.vocab}; use the target that it was trained for."
        )


def fill(net: DrafterNet, tensors: Mapping[str, Tensor], target: Target) -> DrafterNet:
    """The net with these weights in fp32, in eval mode on the target's device. The names must fit, all of them."""
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return net.to(target.device).eval()


def state_of(net: DrafterNet) -> dict[str, Tensor]:
    """What the net has learned: copies on the CPU, in fp32."""
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in net.state_dict().items()}


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_words(dtype: torch.dtype) -> dict[str, str]:
    """The two fields in which readers look for the type of the weights."""
    return {"dtype": word(dtype), "torch_dtype": word(dtype)}
