"""DFlash: a block-diffusion drafter that denoises its whole block in one pass (arXiv 2602.06036).

Qwen3-style layers over the block [anchor, MASK, ...] with the target's fused features injected as keys and values (block.py); slot k predicts
x_{A+k}, the layout 1+N that engines serve. Embedding and head are the target's, frozen. In training every packed row draws some of its anchors
at random, anew each time it comes; the published objective is HardCrossEntropy with Exponential weights (gamma 7 for blocks of 16, 5 for 10, 4 for 8),
divided by the sum of the weights.

Shapes: A taps, N scored rows, H width.
"""

from dataclasses import dataclass, field

from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, Frozen, Needs
from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.head import TargetHead
from drafttrain.drafters.mask_token import mask_token
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary


@dataclass(frozen=True)
class DFlash(DrafterConfig):
    """DFlash in the form that vLLM and SGLang load: slot 0 is the anchor, so a block of 16 drafts 15 tokens."""

    block: int = 16
    """Slots of a block, the anchor's included."""
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

    def __post_init__(self):
        if self.block < 2:
            raise UserError(
                f"drafter.init_args.block is {self.block}, but a block holds the anchor and at least one draft: 2 or more."
            )
        for name in ("layers", "anchors", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"drafter.init_args.{name} is {value}, but must be at least 1.")
        if list(self.taps) != sorted(set(self.taps)) or any(tap < 0 for tap in self.taps):
            raise UserError(f"drafter.init_args.taps is {list(self.taps)}, but must be distinct ascending 0-based layer numbers.")
        self._check_vocabulary()

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """The taps asked for, or the defaults for this target; raises UserError if the target has no such layers."""
        taps = tuple(self.taps) or spread_taps(target.layers, self.layers)
        target.check_taps(taps)
        return taps

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "DFlashNet":
        embedding = Frozen(target.model.get_input_embeddings())
        mask = mask_token(target, self.mask_token)
        net = DFlashNet(
            self, DecoderShape.of(target), self.taps_of(target), mask, vocabulary, embedding, TargetHead(target, vocabulary)
        )
        return net.to(target.device)


class DFlashNet(BlockNet):
    """The trainable weights; tensor names are those of the serving format."""

    def __init__(
        self, config: DFlash, shape: DecoderShape, taps: tuple[int, ...], mask: int, vocabulary: DraftVocabulary, embedding: Frozen,
        head: TargetHead,
    ):  # fmt: skip
        super().__init__(shape, taps, config.layers, config.block, mask, config.anchors, config.window, vocabulary, embedding)
        self.config, self.needs, self.head = config, Needs(taps, config.block - 1), head

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.head(hidden_NH)


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` layer numbers spread evenly from 1 to n-3, as published; fewer where the target has not so many."""
    if count == 1 or layers < 5:
        return (max(min(layers // 2, layers - 2), 0),)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))
