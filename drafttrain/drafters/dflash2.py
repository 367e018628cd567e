"""DFlash 2: DFlash with convolutions around its sublayers, and a selector that ties its slots together (Inco AI, August 2026; z-lab's code).

    sublayer   x' = norm(x);   k_in, k_out = base + W_k x'           # kernels of two taps, the moving part shared by groups of 16 channels
               u_s = k_in[0] x'_s + k_in[1] x'_{s-1}                 # slot s and the one before it; zero before slot 0
               y = f(u),  f the attention or the MLP
               x_s <- x_s + k_out[0] y_s + k_out[1] y_{s-1}
    selector   C_k = the c likeliest tokens of head(h_k)             # c = 16
               S_k(b | a) = head(h_k)[b] + <A[a] * (P h_k), B[b]>,  b in C_k, a the token before
               q_k(. | a) = softmax over C_k of S_k(. | a)

So a chain is a walk through the candidates of each slot, and the backbone is asked once. Tokens outside C_k stand BELOW nats and more under the least
candidate: never before it, never drawn in practice, and still in an order, which wide trees need.

How it was trained is not published. Here, as most public codes do: the first head learns alone, what logits learn otherwise (HardCrossEntropy, decayed),
and `Selection` teaches S: cross-entropy over C_k, behind the text's own token, the right one put in where it is missing. Two other readings are known:
to leave out elements whose token is missing, and a forward KL for the first head (here: SoftCrossEntropy). Without `Selection` the selector would
learn nothing; such an objective is refused before training.

Kernels begin as the identity and B at zero, where the net is DFlash. Embedding and head are the target's, frozen.

Shapes: B batch, N slots of all blocks, Q blocks, S slots of a block, H width, Y groups of channels, M rows, C candidates, r rank, Vd draft vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from drafttrain.drafters.block import BlockLayer
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.tied_block import TiedBlockNet, _TiedBlockDrafter
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary

TAPS = 2
"""Slots that a kernel reads."""
BELOW = 60.0


@dataclass(frozen=True)
class DFlash2(_TiedBlockDrafter):
    """DFlash 2: slot 0 is the anchor, so a block of 8 drafts 7 tokens."""

    window: int | None = 2048
    """Context rows that a slot sees, its own position and those of the block counted; null: all."""
    candidates: int = 16
    """Likeliest tokens of each slot among which the selector chooses."""
    group: int = 16
    """Neighbouring channels that share the moving part of their kernels."""

    def __post_init__(self):
        super().__post_init__()
        if self.group < 1:
            raise UserError(f"drafter.init_args.group is {self.group}, but must be at least 1.")
        if self.candidates < 2:
            raise UserError(f"drafter.init_args.candidates is {self.candidates}, but a choice is among 2 or more.")

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "DFlash2Net":
        if target.hidden % self.group:
            raise UserError(
                f"drafter.init_args.group is {self.group}, but must divide this target's width of {target.hidden}; try "
                f"{math.gcd(self.group, target.hidden)}."
            )
        return DFlash2Net(self, *self.parts(target, vocabulary)).to(target.device)


class DynamicConv(nn.Module):
    """A sublayer between two convolutions over the slots of a block, whose kernels follow from what it reads."""

    def __init__(self, width: int, slots: int, group: int):
        super().__init__()
        self.slots, self.group = slots, group
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, width))  # before the sublayer, and behind it
        self.kernel_projection = nn.Linear(width, 2 * TAPS * width // group, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def forward(self, x_BNH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, N, H]"""
        moved_BN2TY = self.kernel_projection(x_BNH).unflatten(-1, (2, TAPS, -1))
        kernel_BN2TH = self.base_kernel + moved_BN2TY.repeat_interleave(self.group, dim=-1)
        behind_BNH = sublayer(self._convolved(x_BNH, kernel_BN2TH[:, :, 0]))
        return self._convolved(behind_BNH, kernel_BN2TH[:, :, 1])

    def _convolved(self, x_BNH: Tensor, kernel_BNTH: Tensor) -> Tensor:
        before_BQSH = pad(x_BNH.unflatten(1, (-1, self.slots))[:, :, :-1], (0, 0, 1, 0))
        return kernel_BNTH[:, :, 0] * x_BNH + kernel_BNTH[:, :, 1] * before_BQSH.flatten(1, 2)


class ConvLayer(BlockLayer):
    """A block's layer with a convolution around each of its sublayers."""

    def __init__(self, shape: DecoderShape, slots: int, group: int):
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = (DynamicConv(shape.hidden, slots, group) for _ in range(2))

    def forward(self, x_BTH: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        h = x_BTH + self.attention_conv(self.input_layernorm(x_BTH), attend)
        return h + self.mlp_conv(self.post_attention_layernorm(h), self.mlp)


class CandidateSelector(nn.Module):
    """What the token before adds to the scores of some candidates."""

    def __init__(self, before: int, words: int, hidden: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Embedding(before, rank)
        self.successor_codebook = nn.Embedding(words, rank)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook.weight, std=rank**-0.5)  # rows of length 1
        nn.init.zeros_(self.successor_codebook.weight)

    def forward(self, projected_Mr: Tensor, prev_M: Tensor, token_MC: Tensor) -> Tensor:
        """<A[a] * (P h), B[b]> for candidates that are draft ids: [M, C], fp32."""
        path_Mr = self.predecessor_codebook(prev_M) * projected_Mr
        return (self.successor_codebook(token_MC) @ path_Mr[:, :, None].to(self.successor_codebook.weight.dtype))[..., 0].float()


class DFlash2Net(TiedBlockNet):
    """The trainable weights."""

    words = ("candidate_selector.successor_codebook.weight",)

    config: DFlash2

    def __init__(self, config: DFlash2, *parts: Any):
        super().__init__(config, *parts)
        self.candidates = config.candidates
        self.candidate_selector = CandidateSelector(self.shape.vocab, len(self.vocabulary.ids), self.shape.hidden, config.rank)

    def make_layer(self) -> BlockLayer:
        return ConvLayer(self.shape, self.config.block, self.config.group)

    def known(self, hidden_NH: Tensor) -> tuple[Tensor, ...]:
        """Logits of the first head, its candidates, and the state as the selector reads it."""
        logits_NV = self.base_logits(hidden_NH).float()
        token_NC = logits_NV.topk(min(self.candidates, logits_NV.shape[1])).indices
        return logits_NV, token_NC, self.candidate_selector.hidden_projection(hidden_NH)

    def logits_given(self, known: Sequence[Tensor], prev_N: Tensor) -> Tensor:
        """S on the candidates; all others as the first head orders them, at least BELOW under the least of those."""
        logits_NV, token_NC, projected_Nr = known
        added_NC = self.candidate_selector(projected_Nr, prev_N, token_NC)
        others_NV = logits_NV + (added_NC.amin(-1, keepdim=True).clamp(max=0) - BELOW)
        return others_NV.scatter(1, token_NC, logits_NV.gather(1, token_NC) + added_NC)

    def base_logits(self, hidden_NH: Tensor) -> Tensor:
        return self.head(hidden_NH)

    def added(self, hidden_NH: Tensor, prev_N: Tensor, token_NC: Tensor) -> Tensor:
        return self.candidate_selector(self.candidate_selector.hidden_projection(hidden_NH), prev_N, token_NC)

    def drafted(self, grid_KBQH: Tensor, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        return replace(super().drafted(grid_KBQH, sequences, features, layout), selector=self)
