"""DSpark: a block drafter whose tokens are tied by a Markov head, and which tells how sure it is of each (arXiv 2607.05147).

    h_1, ..., h_S = Block([e(x_A), e(MASK), ...])         # one pass (block.py); slot k-1 predicts x_{A+k}: sample from anchor
    q_k           = softmax(head(h_k) + W2 W1[x_{A+k-1}])  # a correction by the token before, of rank r
    s_k           = w [h_k; W1[x_{A+k-1}]] + b             # sigmoid(s_k): how likely draft k is kept if those before it are

Every slot drafts, so a block of 7 drafts 7 tokens. In training the token before is the text's own. The published objective adds up
0.1 HardCrossEntropy, 0.9 of the L1 distance between p and q (which is 1.8 TotalVariation: that is half of it) and Confidence (1.0),
with Exponential weights of gamma 4, divided by their sum. Its mask of drafts that are valid without a gap is what a layout is made of:
element k exists only where all tokens up to A+k count.

The confidence learns from Confidence alone. Where an objective does without, `confidence: false` leaves its head out: then nothing untrained is
saved, exported or asked, and chains end by the probabilities of their tokens, as those of other drafters do.

Embedding and head are the target's, frozen. W2 begins at zero, where the net is a plain block drafter. W1 knows all of the target's tokens,
for any of them may be an anchor.

Shapes: N rows, H width, r rank, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafttrain.drafters.tied_block import TiedBlockNet, _TiedBlockDrafter
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary


@dataclass(frozen=True)
class DSpark(_TiedBlockDrafter):
    """DSpark with the vanilla Markov head."""

    least_block: ClassVar[int] = 1
    block: int = 7
    """Slots of a block, each of which drafts a token, the anchor's too."""
    confidence: bool = True
    """Whether a head tells how sure the drafter is of each draft; it learns from the divergence Confidence."""

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "DSparkNet":
        return DSparkNet(self, *self.parts(target, vocabulary)).to(target.device)


class MarkovHead(nn.Module):
    """What the token before adds to the logits: W2 W1[prev]."""

    def __init__(self, before: int, words: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(before, rank)
        self.markov_w2 = nn.Linear(rank, words, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)  # rows of length 1
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Whether a draft will be kept, as a logit."""

    def __init__(self, inputs: int):
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class DSparkNet(TiedBlockNet):
    """The trainable weights; tensor names are those of the serving format."""

    first = 0
    words = ("markov_head.markov_w2.weight",)

    def __init__(self, config: DSpark, *parts: Any):
        super().__init__(config, *parts)
        self.markov_head = MarkovHead(self.shape.vocab, len(self.vocabulary.ids), config.rank)
        self.confidence_head = ConfidenceHead(self.shape.hidden + config.rank) if config.confidence else None

    def known(self, hidden_NH: Tensor) -> tuple[Tensor, ...]:
        return (self.head(hidden_NH),)

    def logits_given(self, known: Sequence[Tensor], prev_N: Tensor) -> Tensor:
        """In fp32: a step of a large logit in bf16 would swallow the correction."""
        markov = self.markov_head
        return known[0].float() + markov.markov_w2(markov.markov_w1(prev_N)).float()

    def confidence(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        seen_NX = torch.cat([hidden_NH, self.markov_head.markov_w1(prev_N).to(hidden_NH.dtype)], dim=-1)
        return self.confidence_head.proj(seen_NX)[..., 0].float()

    def drafted(self, grid_KBQH: Tensor, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        drafted = super().drafted(grid_KBQH, sequences, features, layout)
        told_N = self.confidence(drafted.hidden_NH, drafted.prev_N)
        return drafted if told_N is None else replace(drafted, extra={"confidence": told_N})
