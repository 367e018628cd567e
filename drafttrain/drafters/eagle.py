"""EAGLE-1 and EAGLE-2 drafters, and HASS: one block that predicts the target's next final state, spoken by the target's own head
(Li et al. 2024, arXiv 2401.15077; 2406.16858; Zhang et al. 2024, arXiv 2408.15766).

    x_t = W [e(x_{t+1}); f_t]                       # f_t: final state of the target, after its last norm
    fhat_{t+1} = Block(x)_t                         # no norm before the attention, none at the end
    q = head(fhat_{t+1})                            # the target's head, frozen

Training on one step (`depth: 1`) with the target's own states is EAGLE-1; EAGLE-2 is the same weights with dynamic trees (method Tree). Three
steps that each read the drafter's last state and learn alone are HASS (`depth: 3`). The objective is theirs as well: smooth L1
between fhat and f beside the cross-entropy (`SmoothL1`, `TopKCrossEntropy`).

Shapes: B batch, T tokens, D target width, H width (= D), N scored rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterConfig, Frozen, Needs
from drafttrain.drafters.decoder import DecoderShape, Layer
from drafttrain.drafters.head import TargetHead
from drafttrain.drafters.unrolled import UnrolledNet
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Features
from drafttrain.vocab import DraftVocabulary

NOISE_LENGTH = 512
"""Row length at which the noise has its stated width."""


@dataclass(frozen=True)
class Eagle(DrafterConfig):
    """EAGLE-1, EAGLE-2 and HASS in the form that engines load as `eagle`."""

    depth: int = 1
    """Steps that training unrolls: 1 is EAGLE-1, 3 is HASS."""
    noise: float = 0.1
    """Half-width of the uniform noise on the states that training reads, for rows of 512 tokens; less for longer ones."""
    bias: bool = False
    """Whether the fusing layer has a bias. Published EAGLE-1 checkpoints do; vLLM ignores it in silence."""

    def __post_init__(self):
        if self.depth < 1:
            raise UserError(f"drafter.init_args.depth is {self.depth}, but a drafter drafts at least 1 token.")
        if not 0 <= self.noise < math.inf:
            raise UserError(f"drafter.init_args.noise is {self.noise}, but must be a number: 0 (none) or more.")
        self._check_vocabulary()

    def taps_of(self, target: Target) -> tuple[int, ...]:
        return ()

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "EagleNet":
        embedding = Frozen(target.model.get_input_embeddings())
        return EagleNet(self, DecoderShape.of(target), vocabulary, embedding, TargetHead(target, vocabulary)).to(target.device)


class EagleNet(UnrolledNet):
    """The trainable weights; tensor names are those of the serving format."""

    words = ()
    frozen_head = True
    alone = True

    def __init__(self, config: Eagle, shape: DecoderShape, vocabulary: DraftVocabulary, embedding: Frozen, head: TargetHead):
        super().__init__(shape, vocabulary, embedding)
        self.config, self.needs, self.head = config, Needs((), config.depth, final=True), head
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=config.bias)
        self.layers = nn.ModuleList([Layer(shape, inputs=shape.hidden)])

    @property
    def layer(self) -> Layer:
        return self.layers[0]  # type: ignore[return-value]

    def fuse(self, features: Features) -> Tensor:
        final_BTD = features.final_BTD.to(self.dtype)
        if not (self.training and self.config.noise):
            return final_BTD
        width = 2 * self.config.noise * NOISE_LENGTH / final_BTD.shape[1]
        return final_BTD + (torch.rand_like(final_BTD) - 0.5) * width

    def read(self, embedding_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        x_BTH = self.fc(torch.cat([embedding_BTH, hidden_BTH], dim=-1))
        return x_BTH, x_BTH

    def said(self, state_BTH: Tensor) -> Tensor:
        return state_BTH

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.head(hidden_NH)
