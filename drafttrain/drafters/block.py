"""Drafters that propose a whole block in one pass: what block-diffusion drafters share, both faces.

    C = norm(W [taps])                              # fused once, for all layers; rows before the anchor only
    X = [e(x_A), e(MASK), ..., e(MASK)]             # a block of S slots; slot s stands at position A+s
    each layer:  queries from X;  keys and values from C and from X, by the same matrices        (context is injected, never changed)
    q_k = head(norm(X'))  at the slot of depth k    # predicts x_{A+k}

Slots of a block see each other (or, `causal`, those before them) and the feature rows before the anchor; two blocks never see each other. A *layout*
says which slot predicts which depth: in `1+N` slot 0 is the known anchor and slot k predicts x_{A+k}, so S-1 tokens are drafted; in
`sample from anchor` slot k-1 predicts x_{A+k}, so S are. The two are never confused: the number of a slot is computed in one place (`first`).

States do not depend on drafted tokens (parallel.py); a head that looks at the token before (`prev`) is the only thing that ties the slots of a block
together.

Shapes: B batch, T tokens, Q blocks, S slots of a block, K depths, L layers, A taps, D target width, H width, R rows of a call, W nodes of a call,
G key/value heads, M slots of the cache, E slots looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterConfig, Frozen, Needs
from drafttrain.drafters.decoder import MLP, Attention, DecoderShape, RMSNorm
from drafttrain.drafters.head import TargetHead
from drafttrain.drafters.mask_token import mask_token
from drafttrain.drafters.parallel import DraftState, ParallelNet
from drafttrain.drafters.tree_state import last_of
from drafttrain.errors import UserError
from drafttrain.layouts import BlockRule, chain_layout, drawn_prefixes, own_slots, some_anchors, within
from drafttrain.ops.attention import attend
from drafttrain.ops.blocks import attend_blocks, attend_blocks_fused
from drafttrain.ops.rotary import Rotary, rotate
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary


class BlockAttention(Attention):
    """Projections with norms on every head's queries and keys (Qwen3)."""

    def __init__(self, shape: DecoderShape):
        super().__init__(shape, inputs=shape.hidden)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def queries(self, x_BTX: Tensor) -> Tensor:
        return self.q_norm(super().queries(x_BTX))

    def keys_values(self, x_BTX: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().keys_values(x_BTX)
        return self.k_norm(key), value

    def queries_keys_values(self, x_BTX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().queries_keys_values(x_BTX)
        return self.q_norm(query), self.k_norm(key), value


class BlockLayer(nn.Module):
    """A pre-norm block; the context that its attention reads comes from outside, normed already."""

    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(self, x_BTH: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Both residual branches [B, T, H]. `attend` is the attention of this layer, from what it reads to what it adds."""
        h = x_BTH + attend(self.input_layernorm(x_BTH))
        return h + self.mlp(self.post_attention_layernorm(h))


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
    prefix_base: float | None = field(default=None, kw_only=True)
    """Training lets a block see m tokens behind its anchor, with a chance that falls as prefix_base^m, and scores those behind (variable prefix: D2SD,
    arXiv 2606.04446, there 0.9); null: none, as when drafts are served."""

    def __post_init__(self):
        for name, least in (("block", self.least_block), ("layers", 1), ("anchors", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"drafter.init_args.{name} is {value}, but must be at least {least}.")
        self._check_window(self.window)
        if self.prefix_base is not None and not 0 < self.prefix_base <= 1:
            raise UserError(
                f"drafter.init_args.prefix_base is {self.prefix_base}, but must be above 0 and at most 1, or null to show no tokens."
            )
        self._check_taps(self.taps)
        self._check_vocabulary()

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """The taps asked for, or the defaults for this target; raises UserError if the target has no such layers."""
        taps = tuple(self.taps) or spread_taps(target.layers, self.layers)
        target.check_taps(taps)
        return taps

    def parts(self, target: Target, vocabulary: DraftVocabulary) -> tuple[Any, ...]:
        """What a net for this target is made of, besides this."""
        embedding, mask = Frozen(target.model.get_input_embeddings()), mask_token(target, self.mask_token)
        return DecoderShape.of(target), self.taps_of(target), mask, vocabulary, embedding, TargetHead(target, vocabulary)


class BlockNet(ParallelNet):
    """Base of drafters that propose a block in one pass; they speak with the target's head."""

    config: _BlockDrafter
    words: tuple[str, ...] = ()
    first = 1
    """The slot that predicts depth 1: 1 in the layout 1+N, 0 where the anchor's own slot does."""
    causal = False
    """Whether a slot sees only slots before it, and itself, of its block."""

    def __init__(
        self, config: _BlockDrafter, shape: DecoderShape, taps: tuple[int, ...], mask: int, vocabulary: DraftVocabulary, embedding: Frozen,
        head: TargetHead,
    ):  # fmt: skip
        super().__init__()
        self.config, self.shape, self.embedding, self.head, self.mask = config, shape, embedding, head, mask
        self.slots, self.deepest, self.unsaid = config.block, config.block - self.first, (mask,)
        self.needs = Needs(taps, self.deepest)
        self.fc = nn.Linear(len(taps) * shape.target_hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.layers = nn.ModuleList(self.make_layer() for _ in range(config.layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope_parameters)
        self.take_vocabulary(vocabulary)

    def make_layer(self) -> BlockLayer:
        """A fresh layer."""
        return BlockLayer(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.fc.weight.dtype

    @property
    def fixed_queries(self) -> bool:
        return bool(self.config.anchors)

    def fuse(self, features: Features) -> Tensor:
        """C, the context that every layer reads: [B, T, H]."""
        return self.hidden_norm(self.fc(features.taps_BTAD.to(self.dtype).flatten(2)))

    def stream(self, anchor_RQ: Tensor) -> Tensor:
        """X, the blocks behind these anchor tokens: [R, Q, S, H]."""
        ids_RQS = anchor_RQ[..., None].expand(-1, -1, self.slots).clone()
        ids_RQS[..., 1:].fill_(self.mask)
        return self.embed(ids_RQS)

    def _shown(self, sequences: Sequences, layout: Layout) -> Tensor:
        """X where a layout may show tokens behind the anchors."""
        shown_BQ, ids_BT = layout.shown(), sequences.ids_BT
        if shown_BQ is None:
            return self.stream(layout.tokens(ids_BT, 0))
        text_BQS = torch.stack([layout.tokens(ids_BT, slot) for slot in range(self.slots)], dim=-1)
        seen_BQS = torch.arange(self.slots, device=shown_BQ.device) <= shown_BQ[..., None]
        return self.embed(torch.where(seen_BQS, text_BQS, self.mask))

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        depth = depth or self.needs.depth
        self.require_drafts(depth, "a layout")
        if numbers is None:
            return chain_layout(sequences, depth, self.speaks_V)
        base, most = self.config.prefix_base, min(self.config.anchors or 0, sequences.ids_BT.shape[1])
        keep_BT = some_anchors(sequences, most, numbers) if most else None
        shown_BT = None if base is None else drawn_prefixes(sequences, depth, base, numbers)
        return chain_layout(sequences, depth, self.speaks_V, keep_BT, most, shown_BT)

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """One block behind the anchor of every drafting row."""
        rule = BlockRule(sequences, layout.query_BQ, self.slots, self.causal, self.config.window)
        attend_all = self._attention(rule)
        context_BTH, x_BQSH = self.fuse(features), self._shown(sequences, layout)
        B, Q, S, H = x_BQSH.shape
        context_turn = self.rotary(sequences.position_BT, x_BQSH.dtype)
        turn = self.rotary(rule.position_BQS.flatten(1), x_BQSH.dtype)

        def attended(attention: BlockAttention, read_BNH: Tensor) -> Tensor:
            key, value = attention.keys_values(context_BTH)
            query, own_key, own_value = attention.queries_keys_values(read_BNH)
            query, own_key = rotate(query, *turn), rotate(own_key, *turn)
            query, own_key, own_value = (x.unflatten(2, (Q, S)) for x in (query, own_key, own_value))
            mixed = attend_all(query, rotate(key, *context_turn), value, own_key, own_value)
            return attention.output(mixed.flatten(2, 3))

        x_BNH = x_BQSH.flatten(1, 2)
        for layer in self.layers:
            x_BNH = self.piece(layer, x_BNH, partial(attended, layer.self_attn))
        said_SBQH = self.norm(x_BNH).unflatten(1, (Q, S)).permute(2, 0, 1, 3)
        return self.drafted(said_SBQH[self.first : self.first + len(layout.dropped_K)], sequences, features, layout)

    def _attention(self, rule: BlockRule) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """How queries meet context and own block, the same in all layers: its mask is made once."""
        if self.fused:
            mask = rule.block_mask()
            return lambda query, key, value, own_key, own_value: attend_blocks_fused(query, key, value, own_key, own_value, mask)
        context, own = rule.context(), rule.own()
        return lambda query, key, value, own_key, own_value: attend_blocks(query, key, value, context, own_key, own_value, own)

    # ---- decoding face -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(
        self, state: DraftState, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        rows = state.rows if rows_R is None else rows_R
        slots_RT = state.ahead(rows, tokens_RT.shape[1])
        context_RTH = self.fuse(features)
        turn = self.rotary(slots_RT, context_RTH.dtype)
        pairs = [layer.self_attn.keys_values(context_RTH) for layer in self.layers]
        state.write(
            rows, slots_RT, torch.cat([rotate(key, *turn) for key, _ in pairs], 1), torch.cat([value for _, value in pairs], 1)
        )
        state.length_B[rows] += counts_R
        state.forget(extent)
        (anchor_R11,) = last_of(counts_R, tokens_RT[..., None])
        block_RKH = self._block(state, rows_R, state.length_B[rows], anchor_R11[..., 0])
        state.drafts_BKH[rows] = block_RKH
        return block_RKH[:, 0]

    def _block(self, state: DraftState, rows_R: Tensor | None, length_R: Tensor, anchor_R1: Tensor) -> Tensor:
        """States of all drafts behind these anchors [R, K, H]."""
        x_RSH = self.stream(anchor_R1)[:, 0]
        position_RS = length_R[:, None] + torch.arange(self.slots, device=length_R.device)
        turn = self.rotary(position_RS, x_RSH.dtype)
        seen_RSE = (state.slots() < length_R[:, None])[:, None].expand(-1, self.slots, -1)
        if self.config.window is not None:
            seen_RSE = seen_RSE & within(self.config.window, state.slots(), position_RS[..., None])
        own_RSS = own_slots(self.slots, self.causal, length_R.device).expand(len(length_R), -1, -1)
        visible_R1SX = torch.cat([seen_RSE, own_RSS], dim=2)[:, None]
        keys, values = state.context(rows_R)
        G = self.shape.kv_heads

        def attended(attention: BlockAttention, heads: slice, read_RSH: Tensor) -> Tensor:
            own_key, own_value = attention.keys_values(read_RSH)
            key = torch.cat([keys[:, heads], rotate(own_key, *turn)], dim=2)
            value = torch.cat([values[:, heads], own_value], dim=2)
            return attention.output(attend(rotate(attention.queries(read_RSH), *turn), key, value, visible_R1SX))

        for number, layer in enumerate(self.layers):
            x_RSH = layer(x_RSH, partial(attended, layer.self_attn, slice(number * G, (number + 1) * G)))
        return self.norm(x_RSH)[:, self.first :]


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` layer numbers spread evenly from 1 to n-3, as published; fewer where the target has not so many."""
    if count == 1 or layers < 5:
        return (max(min(layers // 2, layers - 2), 0),)
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))
