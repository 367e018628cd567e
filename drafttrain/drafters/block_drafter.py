"""What block drafters that tie their slots together share: options, the target's frozen embedding and head, and logits in two parts.

The backbone knows the states of all slots before a token is drafted (block.py); a small head then reads the token before each one. So the product
with the large head serves all slots of a block at once, and only the small one is left to do token by token:

    known_k       = f(h_k)                    # one product for all depths k
    q_k(. | prev) = g(known_k, prev)          # a token at a time

Letters: N rows, H width, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, Frozen, Needs
from drafttrain.drafters.block import BlockLayer, BlockNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.dflash import spread_taps
from drafttrain.drafters.head import TargetHead
from drafttrain.drafters.mask_token import mask_token
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary


@dataclass(frozen=True)
class _BlockDrafter(DrafterConfig):
    """Options of the family."""

    least_block: ClassVar[int] = 2
    """Slots of a block that drafts one token."""

    block: int = 8
    """Slots of a block."""
    layers: int = 5
    """Decoder layers."""
    taps: list[int] = field(default_factory=list)
    """Layers whose outputs are fused, 0-based, ascending. Empty: as many as the drafter has layers, evenly from 1 to n-3 of the target's n."""
    anchors: int | None = 512
    """Anchors drawn at random from each packed row, every time it comes; null: all."""
    mask_token: int | None = None
    """Token whose embedding stands for a masked one. null: a padding row of the target's embedding, else a reserved special token."""
    window: int | None = None
    """Context rows that a slot sees, its own position and those of the block counted; null: all."""
    rank: int = 256
    """Numbers by which the small head knows a token."""

    def __post_init__(self):
        for name, least in (("block", self.least_block), ("layers", 1), ("anchors", 1), ("window", 1), ("rank", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"drafter.init_args.{name} is {value}, but must be at least {least}.")
        if list(self.taps) != sorted(set(self.taps)) or any(tap < 0 for tap in self.taps):
            raise UserError(f"drafter.init_args.taps is {list(self.taps)}, but must be distinct ascending 0-based layer numbers.")
        self._check_vocabulary()

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """The taps asked for, or the defaults for this target; raises UserError if the target has no such layers."""
        taps = tuple(self.taps) or spread_taps(target.layers, self.layers)
        target.check_taps(taps)
        return taps


class TiedBlockNet(BlockNet):
    """A block whose slots speak with the target's head, corrected by what the token before was."""

    reads_last = True

    def __init__(
        self, config: _BlockDrafter, target: Target, vocabulary: DraftVocabulary,
        make_layer: Callable[[DecoderShape], BlockLayer] = BlockLayer,
    ):  # fmt: skip
        taps, mask = config.taps_of(target), mask_token(target, config.mask_token)
        embedding = Frozen(target.model.get_input_embeddings())
        super().__init__(
            DecoderShape.of(target), taps, config.layers, config.block, mask, config.anchors, config.window, vocabulary, embedding, make_layer
        )  # fmt: skip
        self.config, self.needs = config, Needs(taps, config.block - self.first)
        self.head = TargetHead(target, vocabulary)

    @property
    def per_word(self) -> int:
        """Weights read for each token it can say: the small head's, and the target's."""
        return super().per_word + self.shape.target_hidden

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.logits_given(self.known(hidden_NH), prev_N)

    def known(self, hidden_NH: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def logits_given(self, known: Sequence[Tensor], prev_N: Tensor) -> Tensor:
        raise NotImplementedError
