"""Which elements are scored: layouts are data, built on the CPU before the target runs.

An element (anchor A, depth k) exists iff tokens A, A+1, ..., A+k are all supervised and of one document: a draft from a
prompt token, past an end of turn, or across a turn is never served. One whose label is outside the draft vocabulary is
dropped, and counted.

Shapes: B batch rows, T tokens, Q drafting rows, N scored elements, K depths, M teacher rows, A anchors of a row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from drafttrain.ops.rows import stretch_mask
from drafttrain.types import Layout, Sequences

QUERY_MULTIPLE = 32
"""Drafting rows are padded to a multiple of this, so that shapes repeat and kernels and allocations are reused."""
WIDTHS = 4
"""How many numbers of drafting rows a compiled step may have."""
FILLS = 16
"""How many sizes the elements and the teacher rows of a layout that is filled up may have: what fills up is computed too, where a size costs one
recording."""
PREFIXES = 1
"""Last number of the seed by which prefixes are drawn, apart from the anchors of the same row."""


def one_chat(ids_T: Tensor, prompt_len: int) -> Sequences:
    """A single chat as a packed row of its own; the tokens behind the prompt are supervised."""
    ids_BT = ids_T[None]
    position_BT = torch.arange(ids_BT.shape[1], device=ids_T.device)[None]
    return Sequences(ids_BT, position_BT >= prompt_len, position_BT, torch.zeros_like(ids_BT))


def run_lengths(sequences: Sequences) -> Tensor:
    """[B, T]: how many tokens from t on are supervised without a gap, inside t's document (0 where t is not)."""
    supervised, document = sequences.supervised_BT, sequences.document_BT
    B, T = supervised.shape
    ends = ~supervised
    ends[:, 1:] |= document[:, 1:] != document[:, :-1]  # a run may start here, but none goes on across
    # The run from t on ends before the first stop behind t: the smallest stop index in t+1..T.
    index = torch.arange(T).expand(B, T)
    stop = torch.where(ends, index, T)
    behind = torch.cat([stop[:, 1:], torch.full((B, 1), T)], dim=1).flip(1).cummin(1).values.flip(1)
    return torch.where(supervised, behind - index, 0)


def chain_layout(
    sequences: Sequences,
    depth: int,
    speakable_V: Tensor,
    keep_BT: Tensor | None = None,
    least_queries: int = 0,
    shown_BT: Tensor | None = None,
) -> Layout:
    """Elements of a drafter that drafts `depth` tokens from every anchor: row A-1 drafts A+1, ..., A+depth.

    `speakable_V` marks the draft vocabulary. The anchor needs a feature row before it, so A is never a document's first token.
    `keep_BT` marks the anchors that draft; None: all. There are places for `least_queries` drafting rows in each packed row, filled or not: a kernel
    that is compiled for its shapes is then compiled once. `shown_BT`: how many tokens behind each anchor stand open and are not drafted
    (a `PrefixLayout`); None: none.
    """
    run_BT = run_lengths(sequences)
    anchors_BT = _anchors(sequences, run_BT) if keep_BT is None else _anchors(sequences, run_BT) & keep_BT
    anchors = [row.nonzero()[:, 0] for row in anchors_BT]
    layout = Layout(*_elements(sequences, run_BT, anchors, [1.0] * depth, speakable_V, least_queries, shown_BT))
    if shown_BT is None:
        return layout
    shown_BQ = shown_BT.gather(1, layout.query_BQ + 1)  # padding has that of row 0, which is no anchor
    return PrefixLayout(**vars(layout), shown_BQ=shown_BQ)


@dataclass(frozen=True)
class PrefixLayout(Layout):
    """A layout of which each draft begins behind some tokens of the text, which the drafter sees (variable prefix: D2SD, arXiv 2606.04446).

    An element's anchor is the last token that is seen, and its depth counts from there, so weights by the place in the draft begin anew. Its
    cell is the one of its place behind the drafting row.
    """

    shown_BQ: Tensor
    """Tokens that are seen behind each drafting row's own, A; 0 in padding."""

    def shown(self) -> Tensor:
        return self.shown_BQ


def drawn_prefixes(sequences: Sequences, depth: int, base: float, numbers: Sequence[Sequence[int]]) -> Tensor:
    """[B, T]: how many tokens behind each anchor are seen, m of them with a chance proportional to base^m, 0 < base <= 1, cut so that at least one
    supervised token of the `depth` is left to draft. 0 for what is no anchor. `numbers[b]` seed the draw of row b, as in `some_anchors`."""
    run_BT = run_lengths(sequences)
    reach_BT = (run_BT - 1).clamp(max=depth).where(_anchors(sequences, run_BT), 1).numpy()
    uniform_BT = np.stack([np.random.default_rng([*number, PREFIXES]).random(reach_BT.shape[1]) for number in numbers])
    if base == 1:
        place_BT = uniform_BT * reach_BT
    else:  # the inverse of P(m or fewer) = (1 - base^(m+1)) / (1 - base^reach)
        place_BT = np.log1p(-uniform_BT * (1 - base**reach_BT)) / math.log(base)
    return torch.from_numpy(np.minimum(np.floor(place_BT).astype(np.int64), reach_BT - 1))


@dataclass(frozen=True)
class ThinnedLayout(Layout):
    """A layout whose deeper elements belong to fewer drafting rows: those of depth k are all among the first `thinned_width` of them. There are as many
    places for drafting rows as tokens in a packed row: how wide every depth is then never changes, and is a plain number to a compiler."""


def thinned_layout(
    sequences: Sequences, share_K: Sequence[float], speakable_V: Tensor, numbers: Sequence[Sequence[int]]
) -> ThinnedLayout:
    """`chain_layout` of which depth k keeps the share `share_K[k-1]` of each packed row's anchors (rounded up), nested: an element that is
    kept has all its shallower ones kept (conditional drop of tokens: An et al. 2025, arXiv 2504.18583).

    Shares do not grow with depth. `numbers[b]` seed the draw of row b, as in `some_anchors`.
    """
    run_BT = run_lengths(sequences)
    drawn = _drawn(_anchors(sequences, run_BT), numbers)
    return ThinnedLayout(*_elements(sequences, run_BT, drawn, share_K, speakable_V, least=sequences.ids_BT.shape[1]))


def thinned_width(queries: int, share: float) -> int:
    """Of `queries` drafting rows, how many to compute where this share of them is kept: a multiple of QUERY_MULTIPLE, known from a shape alone."""
    return padded(math.ceil(share * queries))


def padded(count: int) -> int:
    """As many drafting rows, and places that fill up to a multiple of QUERY_MULTIPLE."""
    return -(-count // QUERY_MULTIPLE) * QUERY_MULTIPLE


def widened(layout: Layout, tokens: int) -> Layout:
    """The same elements, with places for as many drafting rows as make the next quarter of the most that there could be. A step is compiled for each such
    number: torch (2.11, 2.13) cannot compile one for all, since it takes the strides of what the way back reads for plain numbers. `tokens`: of a packed
    row. Not for layouts of replayed rounds."""
    Q = layout.query_BQ.shape[1]
    wide = _next(WIDTHS, Q, padded(tokens))
    return layout if wide == Q or isinstance(layout, ThinnedLayout) else type(layout)(**_of_width(layout, wide))


def filled(layout: Layout, tokens: int, fixed_queries: bool = False) -> Layout:
    """The same elements and drafting rows, and behind them such as count nothing, so that few sizes recur: a step that is recorded for its sizes is then
    recorded a few times. `tokens`: of a packed row. Not for layouts of replayed rounds.

    Elements and teacher rows are filled up to the next sixteenth of the most that there could be, drafting rows (but not with `fixed_queries`) as
    `widened` does. An element that fills is the first one again, but of depth 0: what it says is as finite as what that one says. A layout
    without elements stays as it is.
    """
    if not len(layout.label_N):
        return layout
    layout = layout if fixed_queries else widened(layout, tokens)
    (B, Q), N, M, K = layout.query_BQ.shape, len(layout.label_N), len(layout.pool_M), len(layout.dropped_K)
    more = {"N": _next(FILLS, N, K * B * Q) - N, "M": _next(FILLS, M, B * tokens) - M}
    fields = dict(vars(layout))
    for name, value in fields.items():
        letters = name.rpartition("_")[2]
        if letters in more:
            fields[name] = torch.cat([value, value[:1].expand(more[letters])])
    fields["depth_N"][N:] = 0
    return type(layout)(**fields)


def _of_width(layout: Layout, wide: int) -> dict[str, Tensor]:
    """The fields of a layout with places for so many drafting rows."""
    fields, Q = dict(vars(layout)), layout.query_BQ.shape[1]
    for name in ("draft_N", "cell_N"):  # both count drafting rows
        fields[name] = fields[name] // Q * wide + fields[name] % Q
    for name, value in fields.items():
        if name.endswith("_BQ"):
            fields[name] = pad(value, (0, wide - Q), value=-1 if name == "query_BQ" else 0)
    return fields


def _next(parts: int, count: int, most: int) -> int:
    """Up to the next of so many parts of the most."""
    step = padded(-(-most // parts))
    return -(-count // step) * step


def _elements(
    sequences: Sequences,
    run_BT: Tensor,
    anchors: list[Tensor],
    share_K: Sequence[float],
    speakable_V: Tensor,
    least: int = 0,
    shown_BT: Tensor | None = None,
) -> list[Tensor]:
    """The fields of a layout. `anchors[b]` [A]: those of row b, in the order that they have in `query_BQ`; depth k has the first of them.
    Behind an anchor with `shown` open tokens, place k is depth k - shown of a draft that begins at the last of them."""
    B, T = sequences.ids_BT.shape
    shown_BT = torch.zeros_like(run_BT) if shown_BT is None else shown_BT
    Q = padded(max(1, least, *(len(at_A) for at_A in anchors)))
    query_BQ = torch.full((B, Q), -1)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("anchor", "depth", "label", "teacher", "draft", "cell")}
    dropped_K = torch.zeros(len(share_K), dtype=torch.long)
    for b, at_A in enumerate(anchors):
        query_BQ[b, : len(at_A)] = at_A - 1
        for k, share in enumerate(share_K, start=1):
            kept = at_A[: math.ceil(share * len(at_A))]
            reaches = ((run_BT[b, kept] > k) & (shown_BT[b, kept] < k)).nonzero()[:, 0]
            anchor = kept[reaches] + shown_BT[b, kept[reaches]]
            depth = kept[reaches] + k - anchor
            label = sequences.ids_BT[b, anchor + depth]
            said = speakable_V[label]
            dropped_K += torch.bincount(depth[~said] - 1, minlength=len(share_K))
            columns["anchor"].append(b * T + anchor[said])
            columns["depth"].append(depth[said])
            columns["label"].append(label[said])
            columns["teacher"].append(b * T + (anchor + depth)[said] - 1)
            columns["draft"].append(b * Q + reaches[said])
            columns["cell"].append(((k - 1) * B + b) * Q + reaches[said])
    flat = {name: torch.cat(parts) for name, parts in columns.items()}
    pool_M, teacher_N = torch.unique(flat["teacher"], return_inverse=True)
    return [flat["anchor"], flat["depth"], flat["label"], teacher_N, flat["draft"], pool_M, query_BQ, flat["cell"], dropped_K]


def some_anchors(sequences: Sequences, most: int, numbers: Sequence[Sequence[int]]) -> Tensor:
    """[B, T]: up to `most` anchors of each packed row, drawn without replacement from all that have a draft to learn.

    `numbers[b]` seed the draw of row b, so that it depends on the row alone, and not on who trains it.
    """
    anchors_BT = _anchors(sequences, run_lengths(sequences))
    keep_BT = torch.zeros_like(anchors_BT)
    for b, at_A in enumerate(_drawn(anchors_BT, numbers)):
        keep_BT[b, at_A[:most]] = True
    return keep_BT


def _drawn(anchors_BT: Tensor, numbers: Sequence[Sequence[int]]) -> list[Tensor]:
    """The anchors of each row [A], in an order that the row's own numbers seed."""
    places = [row.nonzero()[:, 0] for row in anchors_BT]
    orders = [np.random.default_rng(list(number)).permutation(len(at_A)) for at_A, number in zip(places, numbers, strict=True)]
    return [at_A[torch.from_numpy(order)] for at_A, order in zip(places, orders, strict=True)]


def _anchors(sequences: Sequences, run_BT: Tensor) -> Tensor:
    """[B, T]: tokens that a draft can start from: supervised, with a supervised one behind and a feature row before."""
    return (run_BT >= 2) & (sequences.position_BT > 0)


def chain_visibility(sequences: Sequences, query_BQ: Tensor) -> Tensor:
    """[B, Q, T]: a row that drafts sees the feature rows up to and including its own, in its document. Padding sees row 0."""
    T = sequences.ids_BT.shape[1]
    row = query_BQ.clamp(min=0)
    document_Q = sequences.document_BT.gather(1, row)
    keys_T = torch.arange(T, device=row.device)
    return (keys_T <= row[:, :, None]) & (sequences.document_BT[:, None, :] == document_Q[:, :, None])


@dataclass(frozen=True)
class RowRule:
    """Who sees whom where rows of a text look back at it: row r, asked for the depth that stands `step` places on, sees the rows of its document up to
    its own, of them those within the window of its position r + step.

    Of the one rule are made a dense mask and the block mask of a fused kernel.
    """

    sequences: Sequences
    query_BQ: Tensor
    """Rows that look; -1 pads, and looks as row 0 does."""
    window: int | None = None
    """Positions that a query sees, its own counted; None: all."""
    fused: bool = False
    """Whether masks are for a kernel that holds no scores (ops/rows.py)."""

    def mask(self, step: int = 0) -> Tensor | BlockMask:
        """Which rows are seen: [B, Q, T], or the same for the kernel."""
        return self.block_mask(step) if self.fused else self.dense(step)

    def of_first(self, widths: Iterable[int]) -> dict[int, Tensor | BlockMask]:
        """The masks of the first so many queries, by their number; dense ones are views of one."""
        if self.fused:
            return {width: replace(self, query_BQ=self.query_BQ[:, :width]).mask() for width in set(widths)}
        dense_BQT = self.dense()
        return {width: dense_BQT[:, :width] for width in set(widths)}

    def dense(self, step: int = 0) -> Tensor:
        """[B, Q, T]"""
        seen_BQT = chain_visibility(self.sequences, self.query_BQ)
        if self.window is None:
            return seen_BQT
        position_BT = self.sequences.position_BT
        position_BQ = position_BT.gather(1, self.query_BQ.clamp(min=0)) + step
        return seen_BQT & within(self.window, position_BT[:, None], position_BQ[..., None])

    def block_mask(self, step: int = 0) -> BlockMask:
        T = self.sequences.document_BT.shape[1]
        return stretch_mask([_stretch(self.sequences, self.query_BQ.clamp(min=0), self.window, step)], T)


def _stretch(sequences: Sequences, row_BQ: Tensor, window: int | None, step: int | Tensor) -> tuple[Tensor, Tensor]:
    """First and last row that is seen from each `row_BQ` by what stands `step` places on. A document is one stretch of a packed row, its positions ascend
    by one, so what a row sees is a stretch too."""
    document_BT = sequences.document_BT
    row_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    begins_BT = pad(document_BT[:, 1:] != document_BT[:, :-1], (1, 0), value=True)
    first_BQ = torch.where(begins_BT, row_T, 0).cummax(1).values.gather(1, row_BQ)
    if window is not None:
        first_BQ = first_BQ.maximum(row_BQ + step - window + 1)
    return first_BQ, row_BQ


def every_row(ids_BT: Tensor) -> Tensor:
    """[B, T]: all rows of a text, as `RowRule` has those that look."""
    return torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)


@dataclass(frozen=True)
class BlockRule:
    """Who sees whom where a block of S slots stands behind each drafting row: slot s sees the feature rows that its drafting row sees, of them
    those within the window of its own position, and of its own block all slots (`causal`: those up to s).

    Of the one rule are made a dense mask and the block mask of a fused kernel.
    """

    sequences: Sequences
    query_BQ: Tensor
    """Feature row of each block, A-1; -1 pads."""
    slots: int
    causal: bool = False
    window: int | None = None
    """Positions that a slot sees, its own counted; None: all."""

    @property
    def position_BQS(self) -> Tensor:
        """Position of every slot: the anchor stands behind its row, at slot 0."""
        slot_S = torch.arange(self.slots, device=self.query_BQ.device)
        return self.sequences.position_BT.gather(1, self.query_BQ.clamp(min=0))[..., None] + 1 + slot_S

    def context(self) -> Tensor:
        """[B, Q, S, T] (or one slot for all of a block, where there is no window): which rows a slot sees."""
        seen_BQ1T = chain_visibility(self.sequences, self.query_BQ)[:, :, None]
        if self.window is None:
            return seen_BQ1T
        return seen_BQ1T & within(self.window, self.sequences.position_BT[:, None, None], self.position_BQS[..., None])

    def own(self) -> Tensor:
        """[S, S]: which slots of its block a slot sees."""
        return own_slots(self.slots, self.causal, self.query_BQ.device)

    def block_mask(self) -> BlockMask:
        """For `attend_blocks_fused`: queries are slots, block after block; keys the context, then all slots. A slot sees two stretches of the keys."""
        (B, Q), S, T = self.query_BQ.shape, self.slots, self.sequences.document_BT.shape[1]
        slot_N = torch.arange(Q * S, device=self.query_BQ.device)
        row_BN = self.query_BQ.clamp(min=0).repeat_interleave(S, 1)
        begins_N = slot_N - slot_N % S
        ends_N = slot_N if self.causal else begins_N + S - 1
        own_BN = (T + begins_N).expand(B, -1), (T + ends_N).expand(B, -1)
        return stretch_mask([_stretch(self.sequences, row_BN, self.window, 1 + slot_N % S), own_BN], T + Q * S)


def within(window: int, key_position: Tensor, position: Tensor) -> Tensor:
    """Which keys stand among the last `window` positions, its own counted, of what looks at them."""
    return key_position > position - window


def own_slots(slots: int, causal: bool, device: torch.device) -> Tensor:
    """[S, S]: which slots of its own block a slot sees."""
    all_SS = torch.ones(slots, slots, dtype=torch.bool, device=device)
    return all_SS.tril() if causal else all_SS
