"""Medusa, Hydra and Hydra++: one small head for each depth, on the target's final state (Cai et al. 2024, arXiv 2401.10774;
Ankner et al. 2024, arXiv 2402.05109).

    u_k = c                                          Medusa: heads do not know what was drafted
    u_k = [c; e(x_A); ...; e(x_{A+k-1})]             Hydra: head k sees the k tokens before its own
    r = P u + SiLU(U_1 u + b_1);  r <- r + SiLU(U_l r + b_l), l = 2..layers         (P = 1 where u is as wide as r)
    q_k = head(r)                                    predicts x_{A+k}

c is the final state of row A-1; with `prefix` (Hydra++) that of one more decoder block over the final states of all rows before
A. A residual layer begins as nothing, so r = c, and without `prefix` training starts from what the target itself says. The head
is the target's own, frozen and shared, or (`own_heads`) a trained one for each depth. Every layer has weights of its own (the
first released codes tie them by accident).

Own heads are one matrix [Vd, K H]: head k reads the k-th block of a row that is zero elsewhere, so `logits` need not be told the depth. With
`head_bias` K columns more hold a constant of each head for every token, and the row has a one for its head in K places more.

Shapes: B batch, T tokens, Q drafting rows, K heads, D target width, H width (= D), U width of u, R rows of a call, W nodes of a call,
P places, S slots seen, N scored rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen, Needs
from drafttrain.drafters.decoder import DecoderShape, PlainLayer, RMSNorm
from drafttrain.drafters.head import TargetHead, begin_as_target
from drafttrain.drafters.tree_state import ContextState, last_of
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout, chain_visibility
from drafttrain.ops.attention import attend
from drafttrain.ops.rotary import Rotary, rotate
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary


@dataclass(frozen=True)
class _Heads(DrafterConfig):
    """What the family shares."""

    heads: int = 4
    """K: most tokens that can be drafted in a row."""
    layers: int = 1
    """Residual layers of each head."""
    own_heads: bool = False
    """Train an output matrix for each head, instead of the target's frozen one for all."""

    def __post_init__(self):
        for name in ("heads", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.init_args.{name} is {getattr(self, name)}, but must be at least 1.")
        self._check_vocabulary()

    def taps_of(self, target: Target) -> tuple[int, ...]:
        return ()

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "HeadsNet":
        embedding = Frozen(target.model.get_input_embeddings())
        net = HeadsNet(self, DecoderShape.of(target), vocabulary, embedding, TargetHead(target, vocabulary))
        if self.own_heads:
            begin_as_target(net.lm_head, target, vocabulary, times=self.heads)
        return net.to(target.device)

    @property
    def sees_drafts(self) -> bool:
        """Whether a head reads the tokens drafted before its own."""
        raise NotImplementedError

    @property
    def prefix_layer(self) -> bool:
        """Whether one block reads all rows before the anchor first."""
        return False

    @property
    def head_dropout(self) -> float:
        return 0.0

    @property
    def constants(self) -> bool:
        """Whether each head of its own has a bias."""
        return False


@dataclass(frozen=True)
class Medusa(_Heads):
    """Medusa-1: heads that guess each depth from the same state, whatever was drafted before."""

    @property
    def sees_drafts(self) -> bool:
        return False


@dataclass(frozen=True)
class Hydra(_Heads):
    """Hydra; with `prefix: true` and `layers: 4` Hydra++."""

    prefix: bool = False
    """Read the rows before the anchor with one decoder block first (Hydra++)."""
    dropout: float = 0.0
    """Share of a layer's outputs left out in training; Hydra++ was published with 0.2."""
    head_bias: bool = False
    """Give each head of its own a constant for every token, as published ones have."""

    def __post_init__(self):
        super().__post_init__()
        if self.head_bias and not self.own_heads:
            raise UserError(
                "drafter.init_args.head_bias is true, but the heads are the target's, which is frozen; set own_heads to true, or head_bias to false."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"drafter.init_args.dropout is {self.dropout}, but is a share: 0 (none) or more, and below 1.")

    @property
    def sees_drafts(self) -> bool:
        return True

    @property
    def prefix_layer(self) -> bool:
        return self.prefix

    @property
    def head_dropout(self) -> float:
        return self.dropout

    @property
    def constants(self) -> bool:
        return self.head_bias


class Head(nn.Module):
    """The residual layers of one depth; the identity on c until trained."""

    def __init__(self, inputs: int, hidden: int, layers: int, dropout: float):
        super().__init__()
        widths = [inputs] + [hidden] * (layers - 1)
        self.layers: Any = nn.ModuleList(nn.Linear(width, hidden) for width in widths)
        self.project: nn.Module = nn.Linear(inputs, hidden, bias=False) if inputs != hidden else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():
            for weight in self.layers.parameters():
                weight.zero_()
            if isinstance(self.project, nn.Linear):
                self.project.weight.copy_(torch.eye(hidden, inputs))

    def forward(self, u_BWU: Tensor) -> Tensor:
        """[B, W, H]"""
        first, *others = self.layers
        r = self.project(u_BWU) + self.dropout(silu(first(u_BWU)))
        for layer in others:
            r = r + self.dropout(silu(layer(r)))
        return r


class PrefixLayer(PlainLayer):
    """One decoder block with its norms before and behind, over final states (Hydra++)."""

    def __init__(self, shape: DecoderShape):
        super().__init__(shape)
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)


@dataclass(kw_only=True)
class HeadsState(ContextState):
    """A context, and the tokens on the way to each place of the tree."""

    base_BH: Tensor
    """c of each row."""
    path_BPK: Tensor
    """The anchor and the drafted tokens up to a place; what stands behind its depth is not read."""
    stepped: int = 0
    level: int = 0
    """Depth of the tokens stepped last."""

    def forget(self, extent: int) -> None:
        super().forget(extent)
        self.stepped, self.level = 0, 0

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), self.base_BH, self.path_BPK]


class HeadsNet(DrafterNet):
    """The trainable weights of any of the three."""

    def __init__(self, config: _Heads, shape: DecoderShape, vocabulary: DraftVocabulary, embedding: Frozen, head: TargetHead):
        super().__init__()
        self.config, self.shape, self.embedding, self.target_head = config, shape, embedding, head
        self.needs, self.deepest = Needs((), config.heads, final=True), config.heads
        H, seen = shape.hidden, int(config.sees_drafts)
        self.heads: Any = nn.ModuleList(
            Head(H * (1 + seen * k), H, config.layers, config.head_dropout) for k in range(1, config.heads + 1)
        )
        self.prefix = PrefixLayer(shape) if config.prefix_layer else None
        if self.prefix is not None:
            self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope_parameters)
        if config.own_heads:
            self.lm_head = nn.Linear(config.heads * H, len(vocabulary.ids), bias=False)
        else:
            self.words, self.frozen_head = (), True
        if config.constants:
            self.head_bias = nn.Linear(config.heads, len(vocabulary.ids), bias=False)
            nn.init.zeros_(self.head_bias.weight)
            self.words += ("head_bias.weight",)
        self.take_vocabulary(vocabulary)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.heads[0].layers[0].weight.dtype

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        if not self.config.own_heads:
            return self.target_head(hidden_NH)
        if not self.config.constants:
            return self.lm_head(hidden_NH)
        state_NX, which_NK = hidden_NH.split([self.lm_head.in_features, self.config.heads], dim=-1)
        return self.lm_head(state_NX) + self.head_bias(which_NK)

    def ask(self, depth: int, base_BWH: Tensor, path_BWK: Tensor) -> Tensor:
        """What head `depth` says of the anchor and the drafted tokens in front of it, path[..., :depth]: [B, W, H], or with own heads
        [B, W, K H] of which one block is not zero, and with constants [B, W, K H + K]."""
        u = base_BWH
        if self.config.sees_drafts:
            u = torch.cat([base_BWH, self.embed(path_BWK[..., :depth]).flatten(2)], dim=-1)
        r_BWH = self.heads[depth - 1](u)
        if not self.config.own_heads:
            return r_BWH
        H, before, behind = self.shape.hidden, depth - 1, self.config.heads - depth
        state_BWX = nn.functional.pad(r_BWH, (before * H, behind * H))
        if not self.config.constants:
            return state_BWX
        one_BW1 = torch.ones_like(r_BWH[..., :1])
        return torch.cat([state_BWX, nn.functional.pad(one_BW1, (before, behind))], dim=-1)

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        depth = depth or self.needs.depth
        self.require_drafts(depth, "a layout")
        return chain_layout(sequences, depth, self.speaks_V)

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """Every head on every drafting row, reading the tokens that the layout has for it."""
        depth = len(layout.dropped_K)
        base_BQH = self._bases(sequences, features, layout)
        path_BQK = torch.stack([layout.tokens(sequences.ids_BT, step) for step in range(depth)], dim=-1)
        grid = torch.stack([self.ask(k, base_BQH, path_BQK) for k in range(1, depth + 1)])
        return self.drafted(grid, sequences, features, layout)

    def _bases(self, sequences: Sequences, features: Features, layout: Layout) -> Tensor:
        """c of the drafting rows [B, Q, H]."""
        final_BTD, row_BQ1 = features.final_BTD.to(self.dtype), layout.query_BQ.clamp(min=0)[..., None]
        own_BQH = final_BTD.gather(1, row_BQ1.expand(-1, -1, final_BTD.shape[-1]))
        layer = self.prefix
        if layer is None:
            return own_BQH
        key, value = layer.self_attn.keys_values(layer.input_layernorm(final_BTD))
        key = rotate(key, *self.rotary(sequences.position_BT, key.dtype))
        visible_B1QT = chain_visibility(sequences, layout.query_BQ)[:, None]
        return self._read(own_BQH, sequences.position_BT.gather(1, row_BQ1[..., 0]), key, value, visible_B1QT)

    def _read(self, own_BQH: Tensor, position_BQ: Tensor, key: Tensor, value: Tensor, visible_B1QS: Tensor) -> Tensor:
        """The prefix block's output for some rows, of which `own` are the final states."""
        layer = self.prefix
        assert layer is not None
        query = layer.self_attn.queries(layer.input_layernorm(own_BQH))
        query = rotate(query, *self.rotary(position_BQ, query.dtype))
        return layer.norm(layer.finish(own_BQH, attend(query, key, value, visible_B1QS)))

    # ---- decoding face -------------------------------------------------------------------------------------------------

    def begin(self, batch: int, capacity: int, nodes: int) -> HeadsState:
        shape, like = self.shape, next(self.parameters())
        keys = like.new_zeros(batch, shape.kv_heads if self.prefix is not None else 0, capacity, shape.head_dim)
        path_BPK = torch.zeros(batch, nodes + 1, self.config.heads, dtype=torch.long, device=like.device)
        return HeadsState(
            keys=keys, values=torch.zeros_like(keys), length_B=path_BPK.new_zeros(batch), width=batch,
            base_BH=like.new_zeros(batch, shape.hidden), path_BPK=path_BPK,
        )  # fmt: skip

    @torch.no_grad()
    def commit(
        self, state: HeadsState, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        rows = state.rows if rows_R is None else rows_R
        final_RTD = features.final_BTD.to(self.dtype)
        slots_RT = state.ahead(rows, tokens_RT.shape[1])
        if self.prefix is not None:
            key, value = self.prefix.self_attn.keys_values(self.prefix.input_layernorm(final_RTD))
            state.write(rows, slots_RT, rotate(key, *self.rotary(slots_RT, key.dtype)), value)
        state.length_B[rows] += counts_R
        state.forget(extent)
        (base_R1H,) = last_of(counts_R, final_RTD)
        if self.prefix is not None:
            slot_R1 = (state.length_B[rows] - 1).clamp(min=0)[:, None]
            visible_R11S = (state.slots() <= slot_R1[:, :, None])[:, None]
            base_R1H = self._read(base_R1H, slot_R1, *state.context(rows_R), visible_R11S)
        state.base_BH[rows] = base_R1H[:, 0]
        (anchor_R11,) = last_of(counts_R, tokens_RT[..., None])
        state.path_BPK[rows, 0, 0] = anchor_R11[:, 0, 0]
        return self.ask(1, base_R1H, anchor_R11)[:, 0]

    @torch.no_grad()
    def step(self, state: HeadsState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        width, W, K = state.width, tokens_BW.shape[1], self.config.heads
        state.level += 1
        path_BWK = state.path_BPK[:width].gather(1, (parents_BW + 1)[:, :, None].expand(-1, -1, K))
        path_BWK[..., state.level] = tokens_BW
        state.path_BPK[:width, state.stepped + 1 : state.stepped + 1 + W] = path_BWK
        state.stepped += W
        return self.ask(state.level + 1, state.base_BH[:width, None].expand(-1, W, -1), path_BWK)
