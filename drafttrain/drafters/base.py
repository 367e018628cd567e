"""The two faces of a drafter. Nothing above this floor asks which class it is.

Training:  `layout(sequences)` says which elements count (data only, on the CPU); `rows(...)` turns them into rows to score.
Decoding:  `begin(batch, capacity, nodes)` makes an empty state; `commit(state, ...)` reads the features of newly accepted rows and
           the tokens behind them, the anchor last; `step(state, tokens, parents)` reads drafted tokens, one level of a tree
           (of a chain: one token). Both return what the head reads for the token behind.
A parity test holds the two together; the decoding face may never call `rows`.

Shapes: B batch rows in play, R rows of this call, W nodes of this call, T feature rows, H what the head reads, N rows, Vd draft vocabulary.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafttrain.drafters.decoder import DecoderShape
from drafttrain.errors import UserError
from drafttrain.files import public_place
from drafttrain.target.target import Target
from drafttrain.types import Drafted, Features, Layout, Sequences
from drafttrain.vocab import DraftVocabulary, Size

WIDEST = (1 << 31) - 1
"""Positions of a window at most: engines keep it in 32 bits."""
PLACES = ("model",)
"""Options that name a place: a folder, or a Hub id."""


@dataclass(frozen=True)
class DrafterConfig:
    """Base of the classes that a recipe may name as its drafter."""

    draft_vocab: Size = field(default=None, kw_only=True)
    """Tokens the head can say: how many, or (a float up to 1.0) the share of the training answers to cover, or best, the size with the
    largest expected speed-up; null for all."""
    least_coverage: float = field(default=0.0, kw_only=True)
    """Smallest share of the training answers' tokens that the draft vocabulary must cover."""

    def taps_of(self, target: Target) -> tuple[int, ...]:
        """Layers of this target that the drafter reads; raises UserError if the target has no such layers."""
        raise NotImplementedError

    def _check_taps(self, taps: list[int]) -> None:
        if list(taps) != sorted(set(taps)) or any(tap < 0 for tap in taps):
            raise UserError(f"drafter.init_args.taps is {list(taps)}, but must be distinct ascending 0-based layer numbers.")

    def _check_window(self, window: int | None) -> None:
        """Also of a published config.json, where it may be anything."""
        if window is not None and (type(window) is not int or not 1 <= window <= WIDEST):
            raise UserError(
                f"drafter.init_args.window is {window!r}, but must be a number from 1 to {WIDEST:,}, or null to see all."
            )

    def _check_vocabulary(self) -> None:
        size = self.draft_vocab
        if not 0 <= self.least_coverage <= 1:
            raise UserError(f"drafter.init_args.least_coverage is {self.least_coverage}, but is a share between 0 and 1.")
        if size is None or size == "best":
            return
        # A head of one token is always right, and learns nothing.
        if not (0 < size <= 1 if isinstance(size, float) else size >= 2):
            raise UserError(
                f"drafter.init_args.draft_vocab is {size}, but must be a number of tokens (at least 2), a share of the answers to cover "
                "(above 0, up to 1.0), best, or null for the full vocabulary."
            )

    def least_vocabulary(self, target: Target) -> DraftVocabulary:
        """The smallest one that a net can be built with, to be asked something and thrown away."""
        return DraftVocabulary(torch.arange(1, device="cpu"), target.vocab)

    def build(self, target: Target, vocabulary: DraftVocabulary) -> "DrafterNet":
        """A fresh net on the target's device, its weights initialised from the target where that helps."""
        raise NotImplementedError

    def rebuild(self, target: Target, vocabulary: DraftVocabulary, sizes: dict[str, Any]) -> "DrafterNet":
        """A net like another one, whose weights are then filled in. `sizes`: what that one's `own_sizes` told."""
        return self.build(target, vocabulary)


def public_arguments(config: DrafterConfig) -> dict[str, Any]:
    """The drafter's options as an export holds them. Its files have all of the model that it began with, so nothing reads that one's place again."""
    plain = json.loads(json.dumps(asdict(config)))
    return plain | {name: public_place(plain[name]) for name in PLACES if plain.get(name) is not None}


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the target."""

    taps: tuple[int, ...]
    """Layers whose outputs it reads; () for none."""
    depth: int
    """Depths that training scores."""
    final: bool = False
    """Whether it reads final states, and not only learns from them."""


class Frozen:
    """Holds a module of the target without registering it: it is neither trained, nor saved, nor broadcast."""

    def __init__(self, module: Any):
        self.module = module


class DrafterNet(nn.Module):
    """A net that only computes: no loss, optimizer, logging, ranks or files."""

    config: Any
    shape: DecoderShape
    embedding: Frozen
    """The target's table of embeddings."""
    vocabulary: DraftVocabulary
    needs: Needs
    speakable_V: Tensor
    """Target id of each draft id (a buffer on the net's device)."""
    deepest: int | None = None
    """Most drafts that it can propose in a row; None: any number."""
    parallel: bool = False
    """Whether the states of all depths are known before anything is drafted: see `ahead`."""
    fused: bool = False
    """Whether blocks attend in kernels that hold no scores in training, where the drafter has such."""
    fused_rows: bool = False
    """Whether rows of a text do."""
    recomputes: bool = False
    """Whether the backward pass computes the inside of each layer, or of each unrolled step, anew instead of keeping it."""
    reads_last: bool = False
    """Whether `logits` looks at the token before."""
    frozen_head: bool = False
    """Whether `logits` is made of nothing that is trained but the states: the target's head alone."""
    unsaid: tuple[int, ...] = ()
    """Tokens that no training text may hold."""
    words: tuple[str, ...] = ("lm_head.weight",)
    """Weights with a row for each token of the draft vocabulary; () where it speaks with the target's head."""
    adapters: Any = None
    """What a training of adapters alone keeps to merge them (tasks/lora.py); None where the weights themselves are trained."""

    def take_vocabulary(self, vocabulary: DraftVocabulary) -> None:
        """What layouts and proposers look up of it."""
        self.vocabulary, self.speaks_V = vocabulary, vocabulary.t2d
        self.register_buffer("speakable_V", vocabulary.ids, persistent=False)

    def own_sizes(self) -> dict[str, Any]:
        """Sizes that follow neither from the options nor from the target, as JSON can hold them: those of a model that it began with, which nobody
        should have to find again. {} where there are none."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained weights."""
        raise NotImplementedError

    def embed(self, ids: Tensor) -> Tensor:
        """What the target's first layer reads, frozen, in the type of the trained weights: [..., H]."""
        with torch.no_grad():
            return self.embedding.module(ids).to(self.dtype)

    @property
    def fixed_queries(self) -> bool:
        """Whether every layout of a training has as many places for drafting rows, so that kernels can be compiled for that number."""
        return False

    @property
    def per_word(self) -> int:
        """Weights that its head reads for each token it can say."""
        weights = dict(self.named_parameters())
        return sum(weights[name].shape[1] for name in self.words) or self.shape.target_hidden

    def piece(self, compute: Callable[..., Any], *args: Any) -> Any:
        """A layer or an unrolled step of the training face, without randomness: of it the backward pass keeps either all, or what it reads."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return compute(*args)
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False)

    def require_drafts(self, drafts: int, what: str) -> None:
        """UserError, naming `what` asks for them, where the drafter cannot propose so many drafts in a row."""
        if self.deepest is not None and drafts > self.deepest:
            raise UserError(
                f"{what} asks for {drafts} drafts in a row, but this {type(self.config).__name__} drafts at most {self.deepest}; ask for no more, or "
                "train one that goes deeper (heads, depth or block of drafter.init_args)."
            )

    def layout(self, sequences: Sequences, depth: int | None = None, numbers: list[tuple[int, ...]] | None = None) -> Layout:
        """The elements that count, from the data alone (on the CPU). A drafter that learns from a part of them draws it by `numbers`, one
        for each packed row; None: all of them."""
        raise NotImplementedError

    def rows(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        raise NotImplementedError

    def forward(self, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        return self.rows(sequences, features, layout)

    def drafted(self, grid_KBQH: Tensor, sequences: Sequences, features: Features, layout: Layout) -> Drafted:
        """The scored elements of a grid of all depths of all drafting rows."""
        return Drafted(
            hidden_NH=grid_KBQH.flatten(0, 2)[layout.cell_N],
            teacher_MD=features.pool(layout.pool_M),
            row_N=layout.teacher_N,
            label_N=layout.label_N,
            prev_N=layout.prev(sequences.ids_BT),
            draft_N=layout.draft_N,
            drafts=layout.query_BQ.numel(),
            depth_N=layout.depth_N,
            vocabulary_V=self.speakable_V,
            stream_N=layout.streams(),
            frozen_head=self.frozen_head,
        )

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        """[N, Vd]"""
        raise NotImplementedError

    def known(self, hidden_NH: Tensor) -> tuple[Tensor, ...]:
        """All of `logits` that does not depend on the token before, as tensors of N rows: of a drafter that is `parallel` and `reads_last`,
        so that one product with the head serves all depths."""
        raise NotImplementedError

    def logits_given(self, known: Sequence[Tensor], prev_N: Tensor) -> Tensor:
        """`logits` from what `known` said: [N, Vd]."""
        raise NotImplementedError

    def confidence(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor | None:
        """How likely the draft is kept if all before it are, as a logit [N], known before it is chosen; None where the drafter has not
        learnt to tell."""
        return None

    def begin(self, batch: int, capacity: int, nodes: int) -> Any:
        """Empty buffers for rows of up to `capacity` slots, of which a round's `nodes` stepped tokens take some. The state has
        `length_B`, `keep(rows)` and `widen()`, as the target's cache has them, and `forget(extent)`: a new round begins, which no
        row leaves."""
        raise NotImplementedError

    def commit(
        self, state: Any, rows_R: Tensor | None, features: Features, tokens_RT: Tensor, counts_R: Tensor, extent: int
    ) -> Tensor:
        """Read feature rows [R, T, ...] and the token behind each; the last of `counts_R` tokens is the anchor. Returns hidden [R, H].

        Rows beyond `counts_R` are padding, and a row with a count of 0 is idle: neither leaves a trace. `extent` bounds the slots that these rows reach.
        """
        raise NotImplementedError

    def step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor) -> Tensor:
        """Read W drafted tokens in every row, all of one depth. `parents_BW` counts the tokens stepped since the last commit, in their
        order; -1 is the anchor. Returns hidden [B, W, H]."""
        raise NotImplementedError

    def ahead(self, state: Any) -> Tensor:
        """States of all depths behind every anchor [B, K, H], of a drafter that is `parallel`."""
        raise NotImplementedError
