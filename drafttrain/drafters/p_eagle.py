"""P-EAGLE: EAGLE-3 that drafts all its tokens in one pass (arXiv 2602.01469).

    elements of feature row i = A-1, A the anchor:
      depth 1:        e(x_A),    g_i = W [taps]_i             # these elements, of all rows, are also the context
      depth k >= 2:   e(MASK),   g_* = W m                    # m, a learned vector in the place of the taps
    all elements go through all layers; position of depth k is i+k-1
    the element of row i and depth k sees the depth-1 elements of rows <= i, and its own draft's elements of depths <= k
    q_k = head(norm(h_i^k))                                   # predicts x_{A+k} over the draft vocabulary

The first layer reads [norm(e); norm(g)] as EAGLE-3's does, those behind it are ordinary. Embedding frozen from the target; own LM head over a
draft vocabulary. The context is deep: what layer l sees of a row is that row's state behind layer l-1, so every layer keeps keys of its own.

Conditional drop of tokens (from PARD, arXiv 2504.18583): in training, depth k is computed and scored for the share max(ratio^(k-1), least) of a
row's anchors, drawn anew each time the row comes, and nested, so that all that a kept element sees is there. The drafting rows stand in the
order of the draw, so those of depth k are the first of them and nothing has to be gathered.

The published objective divides the soft cross-entropy of all kept elements by their number: SoftCrossEntropy, Uniform, reduction weights.

Shapes: B batch, T tokens, Q drafting rows, K depths, E elements (T of depth 1, then those of depth 2, 3, ...), H width, A taps, D target width,
R rows of a call, M masked elements of a draft (K-1), S slots seen, G key/value heads, N scored rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from drafttrain.drafters.base import DrafterConfig, Frozen, Needs
from drafttrain.drafters.decoder import DecoderShape, FusedInputLayer, PlainLayer, RMSNorm
from drafttrain.drafters.head import begin_as_target
from drafttrain.drafters.mask_token import mask_token
from drafttrain.drafters.parallel import DraftState, ParallelNet
from drafttrain.drafters.tree_state import last_of
from drafttrain.errors import UserError
from drafttrain.layouts import RowRule, ThinnedLayout, chain_layout, every_row, thinned_layout, thinned_width
from drafttrain.ops.attention import attend, attend_depths
from drafttrain.ops.rotary import Rotary, rotate
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary, Size


@dataclass(frozen=True)
class PEagle(DrafterConfig):
    """P-EAGLE: four layers, eight drafts in one pass."""

    taps: list[int] = field(default_factory=list)
    """Layers whose outputs are fused, 0-based, ascending. Empty: [1, n//2-1, n-4] of the target's n layers."""
    depth: int = 8
    """Tokens of a draft, all said in one pass."""
    layers: int = 4
    """Decoder layers; the first reads embeddings beside states."""
    cod_ratio: float = 0.7
    """Share of the elements of each depth that training keeps at the next (conditional drop of tokens); 1.0 keeps all."""
    cod_least: float = 0.2
    """Smallest share of the anchors that a depth keeps."""
    draft_vocab: Size = 32000
    """Tokens the head can say, chosen by counts on the training answers: how many, or (0.99) the share of those answers that they
    must cover, or best, the size with the largest expected speed-up; null for the full vocabulary."""
    mask_token: int | None = None
    """Token whose embedding stands for a draft not known yet. null: a padding row of the target's embedding, else a reserved special token."""
    fc_norm: bool = False
    """Norm each tap before they are fused (as EAGLE-3.1 does)."""

    def __post_init__(self):
        for name in ("depth", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.init_args.{name} is {getattr(self, name)}, but must be at least 1.")
        for name in ("cod_ratio", "cod_least"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"drafter.init_args.{name} is {getattr(self, name)}, but is a share: above 0, up to 1.0.")
        self._check_taps(self.taps)
        self._check_vocabulary()

    def share(self, depth: int) -> float:
        """Of the anchors, at this depth of a training draft."""
        return max(self.cod_ratio ** (depth - 1), self.cod_least)

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """The taps asked for, or the defaults for this target; raises UserError if the target has no such layers."""
        taps = tuple(self.taps) or target.default_taps
        target.check_taps(taps)
        return taps

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "PEagleNet":
        embedding, mask = Frozen(target.model.get_input_embeddings()), mask_token(target, self.mask_token)
        net = PEagleNet(self, DecoderShape.of(target), self.taps_of(target), mask, vocabulary, embedding)
        begin_as_target(net.lm_head, target, vocabulary)
        return net.to(target.device)


class PEagleNet(ParallelNet):
    """The trainable weights; tensor names are those of the serving format."""

    def __init__(
        self, config: PEagle, shape: DecoderShape, taps: tuple[int, ...], mask: int, vocabulary: DraftVocabulary, embedding: Frozen
    ):  # fmt: skip
        super().__init__()
        self.config, self.shape, self.embedding, self.mask = config, shape, embedding, mask
        self.needs, self.deepest, self.unsaid = Needs(taps, config.depth), config.depth, (mask,)
        # As large as the rows of a normed tap: the first norm divides by this scale, and gradients with it.
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(taps) * shape.target_hidden))
        if config.fc_norm:
            self.fc_norm: Any = nn.ModuleList(RMSNorm(shape.target_hidden, shape.rms_eps) for _ in taps)
        self.fc = nn.Linear(len(taps) * shape.target_hidden, shape.hidden, bias=False)
        further = (PlainLayer(shape) for _ in range(config.layers - 1))
        self.layers: Any = nn.ModuleList([FusedInputLayer(shape), *further])
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden, len(vocabulary.ids), bias=False)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope_parameters)
        self.take_vocabulary(vocabulary)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.fc.weight.dtype

    def fuse(self, taps_BTAD: Tensor) -> Tensor:
        """g [B, T, H]"""
        taps_BTAD = taps_BTAD.to(self.dtype)
        if self.config.fc_norm:
            taps_BTAD = torch.stack([norm(taps_BTAD[:, :, i]) for i, norm in enumerate(self.fc_norm)], dim=2)
        return self.fc(taps_BTAD.flatten(2))

    def inputs(self, behind_BT: Tensor, features: Features, masked: int) -> tuple[Tensor, Tensor]:
        """Embeddings and states of the depth-1 elements, which read these tokens, and of so many masked ones behind them: two of [B, E, H]."""
        state_BTH = self.fuse(features.taps_BTAD)
        unknown_11H = self.fuse(self.mask_hidden.unflatten(2, features.taps_BTAD.shape[2:]))
        state_BEH = torch.cat([state_BTH, unknown_11H.expand(len(state_BTH), masked, -1)], dim=1)
        return self.embed(pad(behind_BT, (0, masked), value=self.mask)), state_BEH

    def read(self, number: int, embedding_BEH: Tensor, state_BEH: Tensor) -> Tensor:
        """What the attention of a layer reads."""
        layer = self.layers[number]
        return layer.input_layernorm(state_BEH) if number else layer.mix_inputs(embedding_BEH, state_BEH)

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.lm_head(hidden_NH)

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        depth = depth or self.needs.depth
        self.require_drafts(depth, "a layout")
        if numbers is None or self.config.cod_ratio == 1:
            return chain_layout(sequences, depth, self.speaks_V)
        return thinned_layout(sequences, [self.config.share(k) for k in range(1, depth + 1)], self.speaks_V, numbers)

    def widths(self, layout: Layout) -> list[int]:
        """Of the drafting rows, how many are computed at depths 2, 3, ..."""
        Q, depths = layout.query_BQ.shape[1], range(2, len(layout.dropped_K) + 1)
        return [thinned_width(Q, self.config.share(k)) if isinstance(layout, ThinnedLayout) else Q for k in depths]

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """Depth 1 of every row, for it is the context; the depths behind it of the rows that draft so far."""
        ids_BT, T = sequences.ids_BT, sequences.ids_BT.shape[1]
        row_BQ, widths = layout.query_BQ.clamp(min=0), self.widths(layout)
        behind_BT = torch.cat([ids_BT[:, 1:], ids_BT[:, -1:]], dim=1)  # the token that row t reads: t+1
        embedding, state = self.inputs(behind_BT, features, sum(widths))
        position_BQ = sequences.position_BT.gather(1, row_BQ)
        deeper = [position_BQ[:, :width] + k for k, width in enumerate(widths, start=1)]
        turn = self.rotary(torch.cat([sequences.position_BT, *deeper], dim=1), state.dtype)
        text = RowRule(sequences, every_row(ids_BT), fused=self.fused_rows).mask()
        seen = RowRule(sequences, layout.query_BQ, fused=self.fused_rows).of_first(widths)

        def through(number: int, state: Tensor) -> Tensor:
            layer, read = self.layers[number], self.read(number, embedding, state)
            query, key, value = layer.self_attn.queries_keys_values(read)
            query, key = rotate(query, *turn), rotate(key, *turn)
            queries, keys, values = (x.split([T, *widths], dim=2) for x in (query, key, value))
            return layer.finish(state, attend_depths(queries, keys, values, text, seen.__getitem__))

        for number in range(len(self.layers)):
            state = self.piece(through, number, state)
        first, *others = self.norm(state).split([T, *widths], dim=1)
        first = first.gather(1, row_BQ[..., None].expand(-1, -1, first.shape[2]))
        grid_KBQH = torch.stack([first, *(pad(x, (0, 0, 0, row_BQ.shape[1] - x.shape[1])) for x in others)])
        return self.drafted(grid_KBQH, sequences, features, layout)

    # ---- decoding face -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(
        self, state: DraftState, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        """Append context rows and draft behind the last that counts, in one pass. Rows beyond `counts_R` are padding: they land behind
        the row's length, where nothing that counts looks, and are overwritten by what comes next."""
        rows, T, M, G = state.rows if rows_R is None else rows_R, tokens_RT.shape[1], self.config.depth - 1, self.shape.kv_heads
        slots_RT = state.ahead(rows, T)
        state.length_B[rows] += counts_R
        state.forget(extent)
        last_R1 = state.length_B[rows][:, None] - 1
        embedding, hidden = self.inputs(tokens_RT, features, M)
        depth_M = torch.arange(1, M + 1, device=rows.device)
        turn = self.rotary(torch.cat([slots_RT, (last_R1 + depth_M).clamp(min=0)], dim=1), hidden.dtype)
        # A context row sees the slots up to its own; a masked element those up to the last one, and its draft up to itself.
        seen_RES = state.slots() <= torch.cat([slots_RT, last_R1.expand(-1, M)], dim=1)[..., None]
        own_EM = pad(torch.ones(M, M, dtype=torch.bool, device=rows.device).tril(), (0, 0, T, 0))
        visible_R1EX = torch.cat([seen_RES, own_EM.expand(len(rows), -1, -1)], dim=2)[:, None]
        for number, layer in enumerate(self.layers):
            attention, read = layer.self_attn, self.read(number, embedding, hidden)
            key, value = attention.keys_values(read)
            query, key, heads = rotate(attention.queries(read), *turn), rotate(key, *turn), slice(number * G, (number + 1) * G)
            known = state.append(heads, rows_R, slots_RT, key[:, :, :T], value[:, :, :T])
            keys, values = (torch.cat([old, own[:, :, T:]], dim=2) for old, own in zip(known, (key, value), strict=True))
            hidden = layer.finish(hidden, attend(query, keys, values, visible_R1EX))
        said_REH = self.norm(hidden)
        draft_RKH = torch.cat([*last_of(counts_R, said_REH[:, :T]), said_REH[:, T:]], dim=1)
        state.drafts_BKH[rows] = draft_RKH
        return draft_RKH[:, 0]
