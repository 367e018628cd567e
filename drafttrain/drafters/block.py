"""Drafters that propose a whole block in one pass: what block-diffusion drafters share, both faces.

    C = norm(W [taps])                              # fused once, for all layers; rows before the anchor only
    X = [e(x_A), e(MASK), ..., e(MASK)]             # a block of S slots; slot s stands at position A+s
    each layer:  queries from X;  keys and values from C and from X, by the same matrices        (context is injected, never changed)
    q_k = head(norm(X'))  at the slot of depth k    # predicts x_{A+k}

Slots of a block see each other (or, `causal`, those before them) and the feature rows before the anchor; two blocks never see each other. A *layout*
says which slot predicts which depth: in `1+N` slot 0 is the known anchor and slot k predicts x_{A+k}, so S-1 tokens are drafted; in
`sample from anchor` slot k-1 predicts x_{A+k}, so S are. The two are never confused: the number of a slot is computed in one place (`first`).

States do not depend on drafted tokens, so `step` hands out the next slot, whatever was said before it: trees come from the marginals of the
slots, and a head that looks at the token before (`prev`) is the only thing that ties them together.

Shapes: B batch, T tokens, Q blocks, S slots of a block, K depths, L layers, A taps, D target width, H width, R rows of a call, W nodes of a call,
G key/value heads, M slots of the cache, E slots looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterNet, Frozen
from drafttrain.drafters.decoder import MLP, Attention, DecoderShape, RMSNorm
from drafttrain.drafters.tree_state import ContextState, last_of
from drafttrain.layouts import chain_layout, some_anchors
from drafttrain.ops.attention import attend
from drafttrain.ops.blocks import BlockRule, attend_blocks, attend_blocks_fused
from drafttrain.ops.rotary import Rotary, rotate
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


@dataclass(kw_only=True)
class BlockState(ContextState):
    """The projected context of all layers (L * G heads), and the slots of the block drafted last."""

    block_BKH: Tensor
    level: int = 0
    """Depth of the tokens stepped last."""

    def forget(self, extent: int) -> None:
        super().forget(extent)
        self.level = 0

    def buffers(self) -> list[Tensor]:
        return [*super().buffers(), self.block_BKH]


class BlockNet(DrafterNet):
    """Base of drafters that propose a block in one pass."""

    words: tuple[str, ...] = ()
    parallel = True
    first = 1
    """The slot that predicts depth 1: 1 in the layout 1+N, 0 where the anchor's own slot does."""
    causal = False
    """Whether a slot sees only slots before it, and itself, of its block."""

    def __init__(
        self, shape: DecoderShape, taps: tuple[int, ...], layers: int, slots: int, mask: int, anchors: int | None,
        window: int | None, vocabulary: DraftVocabulary, embedding: Frozen, make_layer: Callable[[DecoderShape], BlockLayer] = BlockLayer,
    ):  # fmt: skip
        super().__init__()
        self.shape, self.embedding, self.slots, self.mask, self.anchors, self.window = (
            shape,
            embedding,
            slots,
            mask,
            anchors,
            window,
        )
        self.fc = nn.Linear(len(taps) * shape.target_hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.layers: Any = nn.ModuleList(make_layer(shape) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope_parameters)
        self.take_vocabulary(vocabulary)
        self.deepest, self.unsaid = slots - self.first, (mask,)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.fc.weight.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Frozen embedding of the target, [..., H]."""
        with torch.no_grad():
            return self.embedding.module(ids).to(self.dtype)

    def fuse(self, features: Features) -> Tensor:
        """C, the context that every layer reads: [B, T, H]."""
        return self.hidden_norm(self.fc(features.taps_BTAD.to(self.dtype).flatten(2)))

    def stream(self, anchor_RQ: Tensor) -> Tensor:
        """X, the blocks behind these anchor tokens: [R, Q, S, H]."""
        ids_RQS = anchor_RQ[..., None].expand(-1, -1, self.slots).clone()
        ids_RQS[..., 1:] = self.mask
        return self.embed(ids_RQS)

    def own_visible(self, device: torch.device) -> Tensor:
        """[S, S]: which slots of its block a slot sees."""
        all_SS = torch.ones(self.slots, self.slots, dtype=torch.bool, device=device)
        return all_SS.tril() if self.causal else all_SS

    def near(self, position_S: Tensor, key_position: Tensor) -> Tensor:
        """Context within the window of each slot."""
        return key_position > position_S - (self.window or self.shape.max_positions + self.slots)

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        depth = depth or self.needs.depth
        self.require_drafts(depth, "a layout")
        keep_BT = None if numbers is None or self.anchors is None else some_anchors(sequences, self.anchors, numbers)
        return chain_layout(sequences, depth, self.speaks_V, keep_BT)

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """One block behind the anchor of every drafting row."""
        ids_BT, row_BQ = sequences.ids_BT, layout.query_BQ.clamp(min=0)
        anchor_BQ = ids_BT.gather(1, (row_BQ + 1).clamp(max=ids_BT.shape[1] - 1))
        rule = BlockRule(sequences.document_BT, sequences.position_BT, row_BQ, self.slots, self.causal, self.window)
        attend_all = self._attention(rule)
        context_BTH, x_BQSH = self.fuse(features), self.stream(anchor_BQ)
        B, Q, S, H = x_BQSH.shape
        context_turn = self.rotary(sequences.position_BT, x_BQSH.dtype)
        turn = self.rotary(rule.position_BQS.flatten(1), x_BQSH.dtype)

        def attended(attention: BlockAttention, read_BNH: Tensor) -> Tensor:
            key, value = attention.keys_values(context_BTH)
            own_key, own_value = attention.keys_values(read_BNH)
            query, own_key = rotate(attention.queries(read_BNH), *turn), rotate(own_key, *turn)
            query, own_key, own_value = (x.unflatten(2, (Q, S)) for x in (query, own_key, own_value))
            mixed = attend_all(query, rotate(key, *context_turn), value, own_key, own_value)
            return attention.output(mixed.flatten(2, 3))

        x_BNH = x_BQSH.flatten(1, 2)
        for layer in self.layers:
            x_BNH = layer(x_BNH, partial(attended, layer.self_attn))
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

    def begin(self, batch: int, capacity: int, nodes: int) -> BlockState:
        shape, like = self.shape, self.fc.weight
        keys = like.new_zeros(batch, len(self.layers) * shape.kv_heads, capacity, shape.head_dim)
        assert self.deepest is not None
        return BlockState(
            keys=keys, values=torch.zeros_like(keys), length_B=torch.zeros(batch, dtype=torch.long, device=like.device), width=batch,
            block_BKH=like.new_zeros(batch, self.deepest, shape.hidden),
        )  # fmt: skip

    @torch.no_grad()
    def commit(
        self, state: BlockState, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
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
        state.block_BKH[rows] = block_RKH
        return block_RKH[:, 0]

    def _block(self, state: BlockState, rows_R: Tensor | None, length_R: Tensor, anchor_R1: Tensor) -> Tensor:
        """States of all drafts behind these anchors [R, K, H]."""
        x_RSH = self.stream(anchor_R1)[:, 0]
        position_RS = length_R[:, None] + torch.arange(self.slots, device=length_R.device)
        turn = self.rotary(position_RS, x_RSH.dtype)
        seen_RSE = (state.slots() < length_R[:, None])[:, None] & self.near(position_RS[..., None], state.slots())
        own_RSS = self.own_visible(length_R.device).expand(len(length_R), -1, -1)
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

    @torch.no_grad()
    def step(self, state: BlockState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        state.level += 1
        return state.block_BKH[: state.width, state.level, None].expand(-1, tokens_BW.shape[1], -1)

    def ahead(self, state: BlockState) -> Tensor:
        return state.block_BKH[: state.width]
