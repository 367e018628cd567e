"""A stand-alone language model as the drafter: it reads tokens alone, and nothing of the target (DistillSpec: Zhou et al. 2023, arXiv 2310.08461;
speculative decoding as Leviathan et al. 2022, arXiv 2211.17192, have it).

    h_t = norm(Layers(e(x_0), ..., e(x_t))_t)        # e: its own embedding; layers as Llama's or Qwen3's, at positions 0 .. t
    q_t = W h_t                                      # W: its own head, or e's table; predicts x_{t+1}

An element (anchor A, depth k) is h_{A+k-1}, read behind x_A, d_1, ..., d_{k-1}. Where the drafts are the text, one causal pass over a packed row
gives the elements of all depths, and those of depth 1 are all of it: the divergences of DistillSpec over q_t are then those of `depth: 1`.
Replayed drafts leave the text, so their steps stand beside it: each sees the text up to its anchor and the steps of its own draft.

Row t of the target goes with the token behind it, x_{t+1}, so a drafter is never told x_0. All chats of a target begin with the same token (its
bos, or the mark of a turn); that one is read in its place, in training and in drafting, and exported weights read it like any other.

Shapes: B batch, T tokens, Q drafting rows, K depths, E elements (T of the text, then Q of each depth behind the first), H width, R rows of a call,
U tokens of a call (x_0, then those given), W nodes of a call, S slots seen (slot t holds token t), N scored rows.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Needs
from drafttrain.drafters.block import BlockAttention
from drafttrain.drafters.decoder import DecoderShape, PlainLayer, RMSNorm
from drafttrain.drafters.language_model import Checkpoint, LanguageModel, first_token
from drafttrain.drafters.tree_state import ContextState, TreeState, last_of
from drafttrain.errors import UserError
from drafttrain.layouts import RowRule, chain_layout, every_row
from drafttrain.ops.attention import attend, attend_depths
from drafttrain.ops.rotary import Rotary, rotate
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary

SPREAD = 0.02
"""Standard deviation of fresh weights."""
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "tied", "qk_norm")


@dataclass(frozen=True)
class Independent(DrafterConfig):
    """A small language model with the target's tokens, which drafts by itself."""

    model: str | None = None
    """Folder or Hub id of a causal language model (Llama's or Qwen3's form, safetensors) with the target's tokenizer, whose sizes and weights the
    drafter begins with; null: fresh weights of the sizes below."""
    depth: int = 1
    """Depths that training scores. In a text 1 is every token; replayed drafts (on_policy) have as many as a round drafts."""
    layers: int = 4
    """Decoder layers of a fresh one."""
    hidden: int = 192
    """Width of a fresh one."""
    heads: int = 3
    """Query heads of a fresh one."""
    kv_heads: int = 3
    """Key and value heads of a fresh one."""
    head_dim: int = 64
    """Width of a head of a fresh one."""
    intermediate: int = 512
    """Inner width of the MLPs of a fresh one."""
    tied: bool = True
    """Whether a fresh one speaks with its table of embeddings, and not with a head besides."""
    qk_norm: bool = False
    """Whether a fresh one has norms on queries and keys: Qwen3's form, and not Llama's."""

    def __post_init__(self):
        for name in ("depth", *SIZES[:6]):
            if getattr(self, name) < 1:
                raise UserError(f"drafter.init_args.{name} is {getattr(self, name)}, but must be at least 1.")
        if self.heads % self.kv_heads:
            raise UserError(
                f"drafter.init_args.heads is {self.heads}, but must be a multiple of kv_heads, which is {self.kv_heads}."
            )
        if self.head_dim % 2:
            raise UserError(
                f"drafter.init_args.head_dim is {self.head_dim}, but positions turn pairs of numbers; give an even one."
            )
        default = {field.name: field.default for field in fields(self)}
        said = [name for name in SIZES if getattr(self, name) != default[name]]
        if self.model is not None and said:
            raise UserError(
                f"drafter.init_args.model is {self.model}, which has sizes of its own, but {', '.join(said)} {'is' if len(said) == 1 else 'are'} set "
                "too; leave them out, or set model to null for a fresh drafter."
            )
        self._check_vocabulary()

    def taps_of(self, target: Target) -> tuple[int, ...]:
        return ()

    def least_vocabulary(self, target: Target) -> DraftVocabulary:
        """All tokens, where one table is both embedding and head."""
        return super().least_vocabulary(target) if self.model is None and not self.tied else DraftVocabulary.full(target.vocab)

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "IndependentNet":
        """A fresh net, or the model named. UserError where that is not to be had, or has other tokens than the target; and for a part of the
        vocabulary where one table is both embedding and head."""
        start = None if self.model is None else Checkpoint.open(self.model, target)
        sizes = self._fresh(target) if start is None else start.sizes
        self._check_head(sizes, vocabulary)
        said = vocabulary if start is None else DraftVocabulary.full(target.vocab)
        net = IndependentNet(self, sizes, DecoderShape.of(target), said, first_token(target))
        if start is None:
            net.begin_anew()
        elif target.device.type != "meta":
            net.load_state_dict(start.weights(net.state_dict()))
        net.cut(vocabulary)
        return net.to(target.device)

    def rebuild(self, target: Target, vocabulary: DraftVocabulary, sizes: dict[str, Any]) -> "IndependentNet":
        """Without the model that it began with, which may be gone."""
        if not sizes:
            return self.build(target, vocabulary)
        own = LanguageModel(**sizes | {"shape": DecoderShape(**sizes["shape"])})
        self._check_head(own, vocabulary)
        return IndependentNet(self, own, DecoderShape.of(target), vocabulary, first_token(target)).to(target.device)

    def _check_head(self, sizes: LanguageModel, vocabulary: DraftVocabulary) -> None:
        if sizes.tied and not vocabulary.is_full:
            raise UserError(
                "drafter.init_args.draft_vocab asks for a part of the tokens, but this drafter speaks with its table of all of them (tied); set "
                "draft_vocab to null"
                + (", or tied to false." if self.model is None else ", or give a model with a head of its own.")
            )

    def _fresh(self, target: Target) -> LanguageModel:
        """Its own sizes; positions and norms as the target has them."""
        own = {name: getattr(self, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")}
        shape = replace(DecoderShape.of(target), **own)
        return LanguageModel(shape, self.layers, self.tied, self.qk_norm)


class LMLayer(PlainLayer):
    """A layer of Llama, or with norms on queries and keys of Qwen3."""

    def __init__(self, shape: DecoderShape, qk_norm: bool):
        super().__init__(shape)
        if qk_norm:
            self.self_attn = BlockAttention(shape)


class TextState(TreeState):
    """Keys and values of all tokens of all layers. A row of the context holds the token behind it, so slot 0 is left for the first token of the
    text, which stands before them."""

    @staticmethod
    def of(batch: int, capacity: int, nodes: int, sizes: LanguageModel, like: Tensor) -> "TextState":
        """Buffers with the type and device of `like`."""
        shape = sizes.shape
        return TextState(
            **vars(TreeState.empty(batch, capacity + 1, nodes, sizes.layers * shape.kv_heads, shape.head_dim, 0, like))
        )

    def forget(self, extent: int) -> None:
        super().forget(min(extent, self.keys.shape[2] - 1))

    def of_layer(self, number: int, heads: int) -> ContextState:
        """A view of one layer, in slots of tokens."""
        part = slice(number * heads, (number + 1) * heads)
        return ContextState(
            keys=self.keys[:, part],
            values=self.values[:, part],
            length_B=self.length_B,
            width=self.width,
            extent=self.extent + 1,
        )


class IndependentNet(DrafterNet):
    """The trainable weights; but for `tokens` and the word `model.` tensor names are transformers'."""

    config: Independent

    def __init__(self, config: Independent, sizes: LanguageModel, shape: DecoderShape, vocabulary: DraftVocabulary, begins: int):
        """`sizes` are its own; `shape` is the target's, by which an export knows for whom it drafts. All texts begin with the token `begins`."""
        super().__init__()
        own = sizes.shape
        self.config, self.sizes, self.shape, self.begins = config, sizes, shape, begins
        self.needs = Needs((), config.depth)
        self.tokens = nn.Embedding(own.vocab, own.hidden)
        self.layers: Any = nn.ModuleList(LMLayer(own, sizes.qk_norm) for _ in range(sizes.layers))
        self.norm = RMSNorm(own.hidden, own.rms_eps)
        if sizes.tied:
            self.words = ()
        else:
            self.lm_head = nn.Linear(own.hidden, len(vocabulary.ids), bias=False)
        self.rotary = Rotary(own.head_dim, own.max_positions, own.rope_parameters)
        self.take_vocabulary(vocabulary)

    def begin_anew(self) -> None:
        """Fresh weights, as language models begin."""
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=SPREAD)

    def cut(self, vocabulary: DraftVocabulary) -> None:
        """Say these tokens alone, of all or of the same."""
        if len(vocabulary.ids) < len(self.vocabulary.ids):
            self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach()[vocabulary.ids.to(self.lm_head.weight.device)])
            self.lm_head.out_features = len(vocabulary.ids)
        self.take_vocabulary(vocabulary)

    def own_sizes(self) -> dict[str, Any]:
        return {} if self.config.model is None else asdict(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        return self.tokens.weight.dtype

    @property
    def per_word(self) -> int:
        """Weights read for each token it can say."""
        return self.sizes.shape.hidden

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return linear(hidden_NH, self.tokens.weight) if self.sizes.tied else self.lm_head(hidden_NH)

    # ---- training face -------------------------------------------------------------------------------------------------

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        return chain_layout(sequences, depth or self.needs.depth, self.speaks_V)

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """The text in one pass, and behind every anchor what was drafted, where that is another text."""
        ids_BT, T, depths = sequences.ids_BT, sequences.ids_BT.shape[1], len(layout.dropped_K)
        anchor_BQ = layout.query_BQ.clamp(min=0) + 1
        replayed = range(1, depths) if layout.streams() is not None else range(0)
        fed = [layout.tokens(ids_BT, step) for step in replayed]
        read_BE = torch.cat([ids_BT.where(sequences.position_BT > 0, self.begins), *fed], dim=1)
        at_BQ = sequences.position_BT.gather(1, anchor_BQ)
        position_BE = torch.cat([sequences.position_BT, *(at_BQ + step for step in replayed)], dim=1)
        text, behind = (RowRule(sequences, rows, fused=self.fused_rows).mask() for rows in (every_row(ids_BT), anchor_BQ))
        state, turn, widths = self.tokens(read_BE), self.rotary(position_BE, self.dtype), [T, *(anchor_BQ.shape[1] for _ in fed)]

        def through(layer: LMLayer, state: Tensor) -> Tensor:
            query, key, value = _projected(layer, state, turn)
            queries, keys, values = (x.split(widths, dim=2) for x in (query, key, value))
            return layer.finish(state, attend_depths(queries, keys, values, text, lambda width: behind))

        for layer in self.layers:
            state = self.piece(through, layer, state)
        text_BTH, *drafts = self.norm(state).split(widths, dim=1)
        along = range(depths - len(drafts))
        grid = [_rows_at(text_BTH, (anchor_BQ + step).clamp(max=T - 1)) for step in along]
        return self.drafted(torch.stack([*grid, *drafts]), sequences, features, layout)

    # ---- decoding face -------------------------------------------------------------------------------------------------

    def begin(self, batch: int, capacity: int, nodes: int) -> TextState:
        return TextState.of(batch, capacity, nodes, self.sizes, self.tokens.weight)

    @torch.no_grad()
    def commit(
        self, state: TextState, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        """Read tokens; the first of the text is read again with every call, for nobody asks the device whether it was. Tokens beyond `counts_R`
        are padding: they land behind the row's length, where nothing that counts looks, and are overwritten by what comes next."""
        rows = state.rows if rows_R is None else rows_R
        slots_RU = pad(state.ahead(rows, tokens_RT.shape[1]) + 1, (1, 0))
        state.length_B[rows] += counts_R
        state.forget(extent)
        slots_S = torch.arange(state.extent + 1, device=slots_RU.device)
        read_RU = pad(tokens_RT, (1, 0), value=self.begins)
        hidden_RUH = self._read(state, rows_R, read_RU, slots_RU, slots_RU, slots_S <= slots_RU[..., None])
        (asked_R1H,) = last_of(counts_R, hidden_RUH[:, 1:])
        return asked_R1H[:, 0]

    @torch.no_grad()
    def step(self, state: TextState, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        node = state.grow(parents_BW)
        position_BW = state.length_B[: state.width, None] + node.depth_BW
        visible_BWS = pad(state.visible(node), (1, 0), value=True)
        return self._read(state, None, tokens_BW, node.slots_BW + 1, position_BW, visible_BWS)

    def _read(
        self,
        state: TextState,
        rows_R: Tensor | None,
        read_RU: Tensor,
        slots_RU: Tensor,
        position_RU: Tensor,
        visible_RUS: Tensor,
    ) -> Tensor:
        """Tokens put into their slots; what the head reads behind each: [R, U, H]."""
        hidden, turn = self.tokens(read_RU), self.rotary(position_RU, self.dtype)
        rows, heads = state.rows if rows_R is None else rows_R, self.sizes.shape.kv_heads
        for number, layer in enumerate(self.layers):
            query, key, value = _projected(layer, hidden, turn)
            own = state.of_layer(number, heads)
            own.write(rows, slots_RU, key, value)
            hidden = layer.finish(hidden, attend(query, *own.context(rows_R), visible_RUS[:, None]))
        return self.norm(hidden)


def _projected(layer: LMLayer, state_BEH: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a layer, turned to their positions: three of [B, heads, E, D]."""
    query, key, value = layer.self_attn.queries_keys_values(layer.input_layernorm(state_BEH))
    return rotate(query, *turn), rotate(key, *turn), value


def _rows_at(x_BTH: Tensor, index_BQ: Tensor) -> Tensor:
    return x_BTH.gather(1, index_BQ[..., None].expand(-1, -1, x_BTH.shape[2]))
