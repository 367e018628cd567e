"""EAGLE-3 drafter: one decoder block that predicts the next tokens from the target's own features (Li et al. 2025, arXiv 2503.01840).

    g_i = W [taps of some layers]_i                          # fused feature of row i = A-1, A the anchor
    a_i^1 = Block(e(x_A), g_i),  a_i^k = Block(e(x_{A+k-1}), a_i^{k-1})   # then a stands in for g: training-time test
    q_k = head(norm(a_i^k))                                  # predicts x_{A+k} over the draft vocabulary

The state fed back is the un-normed a. Embedding frozen from the target; own LM head over a draft vocabulary. How steps are unrolled
stands in unrolled.py.

EAGLE-3.1 (`fc_norm`, `norm_output`) norms each tap on its own before they are fused, and feeds norm(a) back, so that states keep one scale
however far a draft goes.

Shapes: B batch, T tokens, A taps, D target width, H width, N scored rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterConfig, Frozen, Needs
from drafttrain.drafters.decoder import DecoderShape, FusedInputLayer, RMSNorm
from drafttrain.drafters.head import begin_as_target, make_head
from drafttrain.drafters.unrolled import UnrolledNet
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Features
from drafttrain.vocab import DraftVocabulary, Size


@dataclass(frozen=True)
class Eagle3(DrafterConfig):
    """EAGLE-3 in the form that vLLM and SGLang both load: one layer, residual before the norm, taps as 0-based layer outputs."""

    taps: list[int] = field(default_factory=list)
    """Layers whose outputs are fused, 0-based, ascending. Empty: [1, n//2-1, n-4] of the target's n layers."""
    depth: int = 5
    """Steps that training unrolls (training-time test)."""
    draft_vocab: Size = 32000
    """Tokens the head can say, chosen by counts on the training answers: how many, or (0.99) the share of those answers that they
    must cover, or best, the size with the largest expected speed-up; null for the full vocabulary."""
    least_coverage: float = 0.0
    """Smallest share of the training answers' tokens that the draft vocabulary must cover."""
    head_rank: int | None = None
    """Rank of a factored head (SlimSpec), which reads head_rank / width of the weights for each token; null for a dense one."""
    fc_norm: bool = False
    """Norm each tap before they are fused (EAGLE-3.1)."""
    norm_output: bool = False
    """Feed the normed state back (EAGLE-3.1)."""
    window: int | None = None
    """Positions that a step sees, its own counted: a long text costs no more than this, in memory and time; null: all."""

    def __post_init__(self):
        if self.depth < 1:
            raise UserError(f"drafter.init_args.depth is {self.depth}, but a drafter drafts at least 1 token.")
        self._check_window(self.window)
        self._check_vocabulary()
        self._check_taps(self.taps)
        if self.head_rank is not None and self.head_rank < 1:
            raise UserError(f"drafter.init_args.head_rank is {self.head_rank}, but must be at least 1, or null for a dense head.")

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """The taps asked for, or the defaults for this target; raises UserError if the target has no such layers."""
        taps = tuple(self.taps) or target.default_taps
        target.check_taps(taps)
        return taps

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "Eagle3Net":
        if self.head_rank is not None and self.head_rank >= target.hidden:
            raise UserError(
                f"drafter.init_args.head_rank is {self.head_rank}, but this target's states are {target.hidden} wide, so a dense head would be "
                "cheaper; give a smaller rank, or null."
            )
        embedding = Frozen(target.model.get_input_embeddings())
        net = Eagle3Net(self, DecoderShape.of(target), self.taps_of(target), vocabulary, embedding)
        begin_as_target(net.lm_head, target, vocabulary)
        return net.to(target.device)


class Eagle3Net(UnrolledNet):
    """The trainable weights; tensor names are those of the serving format."""

    def __init__(
        self, config: Eagle3, shape: DecoderShape, taps: tuple[int, ...], vocabulary: DraftVocabulary, embedding: Frozen
    ):
        super().__init__(shape, vocabulary, embedding)
        self.config, self.needs, self.window = config, Needs(taps, config.depth), config.window
        if config.fc_norm:
            self.fc_norm: Any = nn.ModuleList(RMSNorm(shape.target_hidden, shape.rms_eps) for _ in taps)
        self.fc = nn.Linear(len(taps) * shape.target_hidden, shape.hidden, bias=False)
        self.midlayer = FusedInputLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.lm_head: Any = make_head(shape.hidden, len(vocabulary.ids), config.head_rank)
        if config.head_rank is not None:
            self.words = ("lm_head.up.weight",)

    @property
    def layer(self) -> FusedInputLayer:
        return self.midlayer

    def fuse(self, features: Features) -> Tensor:
        taps_BTAD = features.taps_BTAD.to(self.dtype)
        if self.config.fc_norm:
            taps_BTAD = torch.stack([norm(taps_BTAD[:, :, i]) for i, norm in enumerate(self.fc_norm)], dim=2)
        return self.fc(taps_BTAD.flatten(2))

    def read(self, embedding_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.mix_inputs(embedding_BTH, hidden_BTH), hidden_BTH

    def said(self, state_BTH: Tensor) -> Tensor:
        return self.norm(state_BTH)

    def feed(self, state_BTH: Tensor) -> Tensor:
        return self.norm(state_BTH) if self.config.norm_output else state_BTH

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.lm_head(hidden_NH)
