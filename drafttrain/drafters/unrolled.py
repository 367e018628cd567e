"""Drafters of one block that read their own last state back: the EAGLE family, both faces.

    g_i = fuse(features)_i                                     # state of feature row i = A-1, A the anchor
    a_i^1 = Block(e(x_A), g_i),  a_i^k = Block(e(x_{A+k-1}), feed(a_i^{k-1}))       # then its own state stands in for g
    q_k = head(said(a_i^k))                                    # predicts x_{A+k} over the draft vocabulary

Step k of row i has rotary position i+k-1 and sees the context rows (e(x_{t+1}), g_t) for t <= i and, of later steps, its own alone; of these
with a window of W the last W positions (training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840; the cheap form of HASS's harmonised context, Zhang et al. 2024,
arXiv 2408.15766). The embedding is the target's, frozen.

A family says how features become states (`fuse`), what the block reads (`read`), and what of its output the head reads and the next step
is fed (`said`, `feed`).

Shapes: B batch, T tokens, Q drafting rows, H width, X what the attention reads, R rows of a call, W nodes of a call, S slots seen, N scored rows.
"""

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterNet, Frozen
from drafttrain.drafters.decoder import DecoderShape, Layer
from drafttrain.drafters.tree_state import TreeState, last_of
from drafttrain.layouts import RowRule, chain_layout, within
from drafttrain.ops.attention import attend, attend_chain
from drafttrain.ops.rotary import Rotary, rotate
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary


class UnrolledNet(DrafterNet):
    """Base of drafters that draft step by step from one feature row."""

    alone = False
    """Whether a step learns alone: no gradient goes back into the step before it."""
    window: int | None = None
    """Positions that a query sees, its own counted; None: all."""

    def __init__(self, shape: DecoderShape, vocabulary: DraftVocabulary, embedding: Frozen):
        super().__init__()
        self.shape, self.embedding = shape, embedding
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope_parameters)
        self.take_vocabulary(vocabulary)

    # ---- what a family says --------------------------------------------------------------------------------------------

    @property
    def layer(self) -> Layer:
        """The block."""
        raise NotImplementedError

    def fuse(self, features: Features) -> Tensor:
        """What takes the place of a state before the first step: [B, T, H]."""
        raise NotImplementedError

    def read(self, embedding_BTH: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads [B, T, X], and the residual [B, T, H]."""
        raise NotImplementedError

    def said(self, state_BTH: Tensor) -> Tensor:
        """What the head reads of the block's output."""
        raise NotImplementedError

    def feed(self, state_BTH: Tensor) -> Tensor:
        """What the next step reads of the block's output."""
        return state_BTH

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.layer.self_attn.q_proj.weight.dtype

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        return chain_layout(sequences, depth or self.needs.depth, self.speaks_V)

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """Unroll from every drafting row, each step reading the next token that the layout has for it."""
        ids_BT = sequences.ids_BT
        attention = self.layer.self_attn
        row_BQ = layout.query_BQ.clamp(min=0)
        rule = RowRule(sequences, layout.query_BQ, self.window, self.fused_rows)
        seen = rule.mask()
        position_BQ = sequences.position_BT.gather(1, row_BQ)

        behind_BT = torch.cat([ids_BT[:, 1:], ids_BT[:, -1:]], dim=1)  # the token that row t reads: t+1
        context, residual = self.read(self.embed(behind_BT), self.fuse(features))
        key, value = attention.keys_values(context)
        key = rotate(key, *self.rotary(sequences.position_BT, key.dtype))
        context, residual = (x.gather(1, row_BQ[..., None].expand(-1, -1, x.shape[-1])) for x in (context, residual))

        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs: list[Tensor] = []

        def stepped(step: int, state: Tensor, *own_before: Tensor) -> tuple[Tensor, ...]:
            """The state behind step+1 drafts, what the head reads of it, and from step 1 on its own key and value. `own_before`: the keys of the steps
            before, then the values."""
            turn = self.rotary(position_BQ + step, key.dtype)
            visible = seen if self.window is None else rule.mask(step)
            if not step:
                query = rotate(attention.queries(context), *turn)
                state = self.layer.finish(state, attend_chain(query, key, value, visible, [], []))
                return state, self.said(state)
            inputs, residual = self.read(self.embed(layout.tokens(ids_BT, step)), self.feed(state))
            query, own_key, own_value = attention.queries_keys_values(inputs)
            query, own = rotate(query, *turn), (rotate(own_key, *turn), own_value)
            near = slice(max(step - (self.window or step), 0), step)
            before = own_before[: step - 1], own_before[step - 1 :]
            keys, values = ([*others, mine][near] for others, mine in zip(before, own, strict=True))
            state = self.layer.finish(residual, attend_chain(query, key, value, visible, keys, values))
            return state, self.said(state), *own

        state = residual
        for step in range(len(layout.dropped_K)):
            fed = state.detach() if step and self.alone else state
            state, said, *own = self.piece(stepped, step, fed, *own_keys, *own_values)
            outputs.append(said)
            if own:
                own_keys.append(own[0])
                own_values.append(own[1])
        return self.drafted(torch.stack(outputs), sequences, features, layout)

    # ---- decoding face -------------------------------------------------------------------------------------------------

    def begin(self, batch: int, capacity: int, nodes: int) -> TreeState:
        weight, shape = self.layer.self_attn.q_proj.weight, self.shape
        return TreeState.empty(batch, capacity, nodes, shape.kv_heads, shape.head_dim, shape.hidden, weight)

    @torch.no_grad()
    def commit(
        self, state: TreeState, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        """Append context rows; only the last valid one (it reads the anchor) asks a question. Rows beyond `counts_R` are padding:
        they land behind the row's length and are overwritten by what comes next. A row with a count of 0 is idle and stays as it is."""
        rows = state.rows if rows_R is None else rows_R
        slots_RT = state.ahead(rows, tokens_RT.shape[1])
        inputs, residual = self.read(self.embed(tokens_RT), self.fuse(features))
        key, value = self.layer.self_attn.keys_values(inputs)
        state.write(rows, slots_RT, rotate(key, *self.rotary(slots_RT, key.dtype)), value)
        state.length_B[rows] += counts_R
        state.forget(extent)
        inputs, residual = last_of(counts_R, inputs, residual)
        slot_R1 = (state.length_B[rows] - 1).clamp(min=0)[:, None]
        visible_R1S = state.slots() <= slot_R1[:, :, None]
        if self.window is not None:
            visible_R1S = visible_R1S & within(self.window, state.slots(), slot_R1[:, :, None])
        asked_R1H = self._ask(inputs, residual, slot_R1, *state.context(rows_R), visible_R1S)
        state.hidden_BPH[rows, 0] = self.feed(asked_R1H)[:, 0]
        return self.said(asked_R1H)[:, 0]

    @torch.no_grad()
    def step(self, state: TreeState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        node = state.grow(parents_BW)
        inputs, residual = self.read(self.embed(tokens_BW), state.hidden_of(parents_BW))
        # The feature row's position, and a step for each depth.
        position_BW = state.length_B[: state.width, None] - 1 + node.depth_BW
        key, value = self.layer.self_attn.keys_values(inputs)
        state.write(state.rows, node.slots_BW, rotate(key, *self.rotary(position_BW, key.dtype)), value)
        visible_BWS = state.visible(node)
        if self.window is not None:
            visible_BWS = visible_BWS & within(self.window, state.positions()[:, None], position_BW[..., None])
        asked_BWH = self._ask(inputs, residual, position_BW, *state.context(None), visible_BWS)
        state.hidden_BPH[: state.width, node.places] = self.feed(asked_BWH)
        return self.said(asked_BWH)

    def _ask(
        self, inputs_RWX: Tensor, residual_RWH: Tensor, position_RW: Tensor, keys: Tensor, values: Tensor, visible_RWS: Tensor
    ) -> Tensor:
        """W queries per row: un-normed states [R, W, H]."""
        query = rotate(self.layer.self_attn.queries(inputs_RWX), *self.rotary(position_RW, inputs_RWX.dtype))
        return self.layer.finish(residual_RWH, attend(query, keys, values, visible_RWS[:, None]))
