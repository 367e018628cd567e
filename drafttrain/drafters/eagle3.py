"""EAGLE-3 drafter: one decoder block that predicts the next tokens from the target's own features (Li et al. 2025, arXiv 2503.01840).

    g_i = W [taps of some layers]_i                          # fused feature of row i = A-1, A the anchor
    a_i^1 = Block(e(x_A), g_i),  a_i^k = Block(e(x_{A+k-1}), a_i^{k-1})   # then a stands in for g: training-time test
    q_k = head(norm(a_i^k))                                  # predicts x_{A+k} over the draft vocabulary

Step k of row i has rotary position i+k-1, sees the context rows (e(x_{t+1}), g_t) for t <= i and, of later steps, its own alone.
The state fed back is the un-normed a. Embedding frozen from the target; own LM head over a draft vocabulary.

Shapes: B batch, T tokens, Q drafting rows, A taps, D target width, H width, R rows of a call, W nodes of a call, S slots seen, N scored rows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen, Needs
from drafttrain.drafters.decoder import DecoderShape, FusedInputLayer, RMSNorm
from drafttrain.drafters.tree_state import TreeState
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout, chain_visibility
from drafttrain.ops.attention import attend, attend_chain
from drafttrain.ops.rotary import Rotary, rotate
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
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

    def __post_init__(self):
        if self.depth < 1:
            raise UserError(f"drafter.init_args.depth is {self.depth}, but a drafter drafts at least 1 token.")
        self._check_vocabulary()
        if list(self.taps) != sorted(set(self.taps)) or any(tap < 0 for tap in self.taps):
            raise UserError(f"drafter.init_args.taps is {list(self.taps)}, but must be distinct ascending 0-based layer numbers.")
        if not 0 <= self.least_coverage <= 1:
            raise UserError(f"drafter.init_args.least_coverage is {self.least_coverage}, but is a share between 0 and 1.")

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """The taps asked for, or the defaults for this target; raises UserError if the target has no such layers."""
        n = target.layers
        taps = tuple(self.taps) or tuple(sorted({min(1, n - 2), max(n // 2 - 1, 0), max(n - 4, 0)}))
        target.check_taps(taps)
        return taps

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "Eagle3Net":
        net = Eagle3Net(
            self, DecoderShape.of(target), self.taps_of(target), vocabulary, Frozen(target.model.get_input_embeddings())
        )
        with torch.no_grad():
            net.lm_head.weight.copy_(target.head_weight[vocabulary.ids.to(target.device)].float())
        return net.to(target.device)


class Eagle3Net(DrafterNet):
    """The trainable weights; tensor names are those of the serving format."""

    def __init__(
        self, config: Eagle3, shape: DecoderShape, taps: tuple[int, ...], vocabulary: DraftVocabulary, embedding: Frozen
    ):
        super().__init__()
        self.config, self.shape, self.vocabulary = config, shape, vocabulary
        self.needs = Needs(taps, config.depth)
        self.embedding = embedding
        self.fc = nn.Linear(len(taps) * shape.target_hidden, shape.hidden, bias=False)
        self.midlayer = FusedInputLayer(shape)
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden, len(vocabulary.ids), bias=False)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope_parameters)
        self.register_buffer("speakable_V", vocabulary.ids, persistent=False)
        self._speaks = vocabulary.t2d

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Frozen embedding of the target, [..., H]."""
        with torch.no_grad():
            return self.embedding.module(ids).to(dtype)

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.lm_head(hidden_NH)

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None) -> Layout:
        return chain_layout(sequences, depth or self.needs.depth, self._speaks)

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """Unroll from every drafting row, each step reading the text's own next token."""
        ids_BT, T = sequences.ids_BT, sequences.ids_BT.shape[1]
        B, Q = layout.query_BQ.shape
        depth = len(layout.dropped_K)
        dtype = self.fc.weight.dtype
        layer, attention = self.midlayer, self.midlayer.self_attn
        fused_BTH = self.fc(features.taps_BTAD.to(dtype).flatten(2))
        row_BQ = layout.query_BQ.clamp(min=0)
        visible_BQT = chain_visibility(sequences, layout.query_BQ)
        position_BQ = sequences.position_BT.gather(1, row_BQ)

        behind_BT = torch.cat([ids_BT[:, 1:], ids_BT[:, -1:]], dim=1)  # the token that row t reads: t+1
        context = layer.mix_inputs(self.embed(behind_BT, dtype), fused_BTH)
        key, value = attention.keys_values(context)
        key = rotate(key, *self.rotary(sequences.position_BT, key.dtype))

        pick = row_BQ[..., None]
        inputs = context.gather(1, pick.expand(-1, -1, context.shape[-1]))
        hidden = fused_BTH.gather(1, pick.expand(-1, -1, fused_BTH.shape[-1]))
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step in range(depth):
            turn = self.rotary(position_BQ + step, key.dtype)
            if step:
                token_BQ = ids_BT.gather(1, (row_BQ + 1 + step).clamp(max=T - 1))
                inputs = layer.mix_inputs(self.embed(token_BQ, dtype), hidden)
                own_key, own_value = attention.keys_values(inputs)
                own_keys.append(rotate(own_key, *turn))
                own_values.append(own_value)
            query = rotate(attention.queries(inputs), *turn)
            hidden = layer.finish(hidden, attend_chain(query, key, value, visible_BQT, own_keys, own_values))
            outputs.append(self.norm(hidden))
        grid = torch.stack(outputs).flatten(0, 2)  # [depth * B * Q, H]
        return Drafted(
            hidden_NH=grid[layout.cell_N],
            teacher_MD=features.final_BTD.flatten(0, 1)[layout.pool_M],
            row_N=layout.teacher_N,
            label_N=layout.label_N,
            prev_N=ids_BT.flatten()[layout.anchor_N + layout.depth_N - 1],
            draft_N=layout.draft_N,
            depth_N=layout.depth_N,
            vocabulary_V=self.speakable_V,
        )

    # ---- decoding face -------------------------------------------------------------------------------------------------

    def begin(self, batch: int, capacity: int, nodes: int) -> TreeState:
        weight, shape = self.fc.weight, self.shape
        return TreeState.empty(batch, capacity, nodes, shape.kv_heads, shape.head_dim, shape.hidden, weight)

    @torch.no_grad()
    def commit(
        self, state: TreeState, rows_R: Tensor | None, taps_RTAD: Tensor, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        """Append context rows; only the last valid one (it reads the anchor) asks a question. Rows beyond `counts_R` are padding:
        they land behind the row's length and are overwritten by what comes next. A row with a count of 0 is idle and stays as it is."""
        rows = state.rows if rows_R is None else rows_R
        T = tokens_RT.shape[1]
        dtype = self.fc.weight.dtype
        layer, attention = self.midlayer, self.midlayer.self_attn
        slots_RT = state.length_B[rows][:, None] + torch.arange(T, device=rows.device)
        fused = self.fc(taps_RTAD.to(dtype).flatten(2))
        inputs = layer.mix_inputs(self.embed(tokens_RT, dtype), fused)
        key, value = attention.keys_values(inputs)
        state.write(rows, slots_RT, rotate(key, *self.rotary(slots_RT, dtype)), value)
        state.length_B[rows] += counts_R
        state.forget(min(extent, state.keys.shape[2]))
        last = (counts_R - 1).clamp(min=0)[:, None, None]
        inputs, fused = (x.gather(1, last.expand(-1, -1, x.shape[-1])) for x in (inputs, fused))
        slot_R1 = (state.length_B[rows] - 1).clamp(min=0)[:, None]
        keys, values = state.context(rows_R)
        hidden_R1H = self._ask(inputs, fused, slot_R1, keys, values, state.slots() <= slot_R1[:, :, None])
        state.hidden_BPH[rows, 0] = hidden_R1H[:, 0]
        return self.norm(hidden_R1H[:, 0])

    @torch.no_grad()
    def step(self, state: TreeState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        dtype = self.fc.weight.dtype
        node = state.grow(parents_BW)
        hidden_BWH = state.hidden_of(parents_BW)
        inputs = self.midlayer.mix_inputs(self.embed(tokens_BW, dtype), hidden_BWH)
        position_BW = (
            state.length_B[: state.width, None] - 1 + node.depth_BW
        )  # the feature row's position, and a step for each depth
        key, value = self.midlayer.self_attn.keys_values(inputs)
        state.write(state.rows, node.slots_BW, rotate(key, *self.rotary(position_BW, dtype)), value)
        hidden_BWH = self._ask(inputs, hidden_BWH, position_BW, *state.context(None), state.visible(node))
        state.hidden_BPH[: state.width, node.places] = hidden_BWH
        return self.norm(hidden_BWH)

    def _ask(
        self, inputs_RWX: Tensor, hidden_RWH: Tensor, position_RW: Tensor, keys: Tensor, values: Tensor, visible_RWS: Tensor
    ) -> Tensor:
        """W queries per row: un-normed states [R, W, H]."""
        query = rotate(self.midlayer.self_attn.queries(inputs_RWX), *self.rotary(position_RW, inputs_RWX.dtype))
        return self.midlayer.finish(hidden_RWH, attend(query, keys, values, visible_RWS[:, None]))
