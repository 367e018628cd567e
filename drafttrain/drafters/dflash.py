"""DFlash: a block-diffusion drafter that denoises its whole block in one pass (arXiv 2602.06036).

Qwen3-style layers over the block [anchor, MASK, ...] with the target's fused features injected as keys and values (block.py); slot k predicts
x_{A+k}, the layout 1+N that engines serve. Embedding and head are the target's, frozen. In training every packed row draws some of its anchors
at random, anew each time it comes; the published objective is HardCrossEntropy with Exponential weights (gamma 7 for blocks of 16, 5 for 10, 4 for 8),
divided by the sum of the weights.

Shapes: N scored rows, H width.
"""

from dataclasses import dataclass

from torch import Tensor

from drafttrain.drafters.block import BlockNet, _BlockDrafter
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary


@dataclass(frozen=True)
class DFlash(_BlockDrafter):
    """DFlash in the form that vLLM and SGLang load: slot 0 is the anchor, so a block of 16 drafts 15 tokens."""

    block: int = 16
    """Slots of a block, the anchor's included."""

    def __post_init__(self):
        if self.block < 2:
            raise UserError(
                f"drafter.init_args.block is {self.block}, but a block holds the anchor and at least one draft: 2 or more."
            )
        super().__post_init__()

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "DFlashNet":
        return DFlashNet(self, *self.parts(target, vocabulary)).to(target.device)


class DFlashNet(BlockNet):
    """The trainable weights; tensor names are those of the serving format."""

    frozen_head = True

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.head(hidden_NH)
