"""The records that cross floors. They look up, and compute nothing.

Row t is what the target computed while reading token t: `taps[t]`, `final[t]`, and `target.logits(final[t])` is its
distribution for token t+1. `supervised[t]` marks the *token* t: true if the target generated it. The anchor A is the last
committed token, which the target has not read yet: a draft from A may use feature rows < A only. Depth k = 1, 2, ... counts
drafted tokens, so the label of depth k is token A+k and its teacher is row A+k-1.

Shapes: B batch rows, T tokens, A taps (in Features) , D target width, N scored elements, M teacher rows, H drafter width,
Q rows that draft, V vocabulary (in Features: rows of branches).
"""

from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Packed chats. A document is one chat; tokens of different documents never see each other."""

    ids_BT: Tensor
    """Token ids, int64."""
    supervised_BT: Tensor
    """True where the target generated the token."""
    position_BT: Tensor
    """Position inside the document, int64."""
    document_BT: Tensor
    """Which packed chat a token belongs to, int64; -1 is padding."""

    def to(self, device) -> "Sequences":
        return Sequences(
            *(x.to(device, non_blocking=True) for x in (self.ids_BT, self.supervised_BT, self.position_BT, self.document_BT))
        )


@dataclass(frozen=True)
class Features:
    """What the target computed while reading tokens."""

    taps_BTAD: Tensor
    """Outputs of the tapped layers (0-based layer numbers, ascending), before the final norm."""
    final_BTD: Tensor
    """Hidden state after the final norm: what the target's LM head reads."""
    branch_VD: Tensor | None = None
    """Final states of rows that stand in no text: what the target computed while it verified drafts. None where nothing is replayed."""

    def to(self, device, dtype=None) -> "Features":
        branch_VD = None if self.branch_VD is None else self.branch_VD.to(device, dtype, non_blocking=True)
        taps_BTAD, final_BTD = (x.to(device, dtype, non_blocking=True) for x in (self.taps_BTAD, self.final_BTD))
        return Features(taps_BTAD, final_BTD, branch_VD)

    def pool(self, pool_M: Tensor) -> Tensor:
        """Final states [M, D] of the rows that a layout names: b*T+t is a row of the text, B*T+v one of the branches."""
        text_ND = self.final_BTD.flatten(0, 1)
        return (text_ND if self.branch_VD is None else torch.cat([text_ND, self.branch_VD]))[pool_M]


@dataclass(frozen=True)
class Layout:
    """The elements that are scored, known from the data alone. Flat rows are b*T+t. Nothing here depends on the target."""

    anchor_N: Tensor
    """Flat row of the anchor token A."""
    depth_N: Tensor
    """k = 1, 2, ...: the element predicts token A+k. 0: it counts nothing, and only fills the layout up (`layouts.filled`)."""
    label_N: Tensor
    """Token id A+k, over the target's vocabulary."""
    teacher_N: Tensor
    """Index into `pool_M` of row A+k-1, whose distribution teaches the element."""
    draft_N: Tensor
    """Which draft the element belongs to: the flat place b*Q+q of its drafting row in `query_BQ`."""
    pool_M: Tensor
    """Rows whose distributions teach anything at all, as `Features.pool` counts them."""
    query_BQ: Tensor
    """Feature rows (A-1) in each batch row that draft at all; -1 pads."""
    cell_N: Tensor
    """Index of the element in the flattened grid [depth, B, Q]."""
    dropped_K: Tensor
    """Elements left out of depth k+1 because their label is outside the draft vocabulary."""

    def to(self, device) -> Self:
        return type(self)(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))

    def tokens(self, ids_BT: Tensor, step: int) -> Tensor:
        """What every drafting row reads just before depth step+1 [B, Q]: the anchor at step 0, then the text's own tokens. Past the end of a
        packed row, where nothing is scored, its last token."""
        row_BQ = self.query_BQ.clamp(min=0) + 1 + step
        return ids_BT.gather(1, row_BQ.clamp(max=ids_BT.shape[1] - 1))

    def prev(self, ids_BT: Tensor) -> Tensor:
        """The token read just before each element [N]."""
        return ids_BT.flatten()[self.anchor_N + self.depth_N - 1]

    def shown(self) -> Tensor | None:
        """How many tokens behind its anchor every drafting row sees [B, Q]; None where none sees any."""
        return None

    def streams(self) -> Tensor | None:
        """Which stream each element belongs to [N], as in `Drafted`; None where there is only one."""
        return None


class Selector(Protocol):
    """A second, smaller head, which knows the token before and chooses among the likeliest tokens of the first."""

    candidates: int
    """Tokens among which it chooses, C."""

    def base_logits(self, hidden_NH: Tensor) -> Tensor:
        """Of the first head alone [N, V]."""

    def added(self, hidden_NH: Tensor, prev_N: Tensor, token_NC: Tensor) -> Tensor:
        """What it adds to the logits of these candidates (draft ids) [N, C]."""


@dataclass(frozen=True)
class Drafted:
    """Rows to be scored: the hinge between drafters and objectives. Elements that do not count are not in it."""

    hidden_NH: Tensor
    """What the head reads, after the drafter's own last norm."""
    teacher_MD: Tensor
    """Final hidden states of the target, a pool that `row_N` indexes."""
    row_N: Tensor
    label_N: Tensor
    """Target-vocabulary id of the token to be predicted."""
    prev_N: Tensor
    """Token read just before (A+k-1)."""
    draft_N: Tensor
    """Which draft the element belongs to, below `drafts`; the elements of a draft have distinct depths within a stream."""
    drafts: int
    """An upper bound of the drafts: the drafting rows, padding included."""
    depth_N: Tensor
    vocabulary_V: Tensor
    """Target id of each column of the student's and teacher's logits."""
    stream_N: Tensor | None = None
    """0 clean or accepted, 1 rejected; None where every element is clean."""
    extra: dict[str, Tensor] = field(default_factory=dict)
    """What else the drafter says of each element, by name [N, ...]."""
    selector: Selector | None = None
    """Where it speaks by two heads: then the logits that are scored are those of the first one alone."""
    frozen_head: bool = False
    """Whether nothing that makes logits of `hidden_NH` is trained."""


@dataclass(frozen=True)
class Term:
    """One summand of a loss: sum / count. The count for the whole accumulation window is known from the data."""

    sum: Tensor
    count: Tensor
    """Of these elements alone."""


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens behind each row's anchor, as a tree of N nodes; a chain is the tree whose every node has one child.

    A node stands behind its parent, so `parents_BN[b, n] < n`, and siblings have different tokens. *Place* 0 is the anchor and
    place n+1 is node n: the target's distribution at a place is the one for the token behind it.
    """

    tokens_BN: Tensor
    """Target-vocabulary ids."""
    parents_BN: Tensor
    """Index of the node that each one follows; -1 is the anchor."""
    valid_BN: Tensor | None = None
    """False for nodes that do not exist (a row proposed fewer); None where all do."""
    q_BPV: Tensor | None = None
    """For each place the distribution from which its children were drawn, over target ids, after temperature, top-k and top-p
    [B, N+1, V]; rows of places without children are not read. None where the proposal is deterministic."""


@dataclass(frozen=True)
class Verdict:
    """What verification kept of a proposal."""

    accepted_B: Tensor
    """Accepted nodes of each row, r."""
    path_BK: Tensor
    """Indices of the accepted nodes, from the anchor on, K the greatest depth; behind the first r they mean nothing, but are valid indices."""
    said_B: Tensor
    """The token behind the last accepted one: the target's own."""


@dataclass(frozen=True)
class Identity:
    """Which target something was made with. Stores, checkpoints and exports carry it, and refuse another one."""

    path: str
    """As the recipe names it; for people, not compared."""
    revision: str
    """Hub commit, or a hash of the weight files."""
    tokenizer: str
    """Hash of the tokenizer's vocabulary and merges."""
    template: str
    """Hash of the chat template."""
    template_arguments: str
    """JSON of the arguments given to the template."""
    layers: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class Request:
    """A prompt to be answered."""

    key: str
    """Stable name of the prompt; it also seeds the prompt's own random stream."""
    ids: tuple[int, ...]
    """Rendered prompt, generation prompt included."""
    limit: int
    """Most tokens to emit."""
    ends: tuple[int, ...] = ()
    """Token ids that end this answer besides the target's own ends of turn."""
    messages: tuple[dict, ...] | None = None
    """The chat that `ids` is the rendering of; None where there is none. Only a server that renders chats itself reads it."""
    tools: tuple[dict, ...] | None = None
    """JSON schemas of functions in that chat."""


@dataclass(frozen=True)
class DraftRounds:
    """Every round of an answer that drafted chains: what was drafted, and what the target computed while it checked that.

    On the CPU. R rounds in order, K drafts at most, P = K+1 places: place 0 is the anchor, place k the drafted token d_k. The target read
    d_1, ..., d_K behind the anchor whether or not it kept them, so place k-1 teaches depth k *in the drafted branch*, also behind the
    first rejection, where no row of the text does.
    """

    anchor_R: Tensor
    """Index in the rollout's `ids` of the last token that was committed when the round began; the next anchor is accepted + 1 further."""
    drafted_RK: Tensor
    """d_k = [r, k-1], target-vocabulary ids; -1 where the chain had ended before."""
    proposed_R: Tensor
    """Length of the chain: K, or less where it ended early."""
    accepted_R: Tensor
    """Drafts that were verified, r, whether or not the answer ended among them."""
    said_R: Tensor
    """The token behind d_r: the target's own. At depth r+1, it stands where d_{r+1} was rejected."""
    kept_R: Tensor
    """How many of d_1, ..., d_r and the token said are in the answer: ids[anchor+1 : anchor+1+kept]. r+1 in all rounds but the last,
    which the limit or an end of turn may cut."""
    within_R: Tensor
    """Drafted tokens that lie within the answer's reach: d_k behind `within` were drafted past the limit, or past a drafted end of turn
    (accepted or not), and teach nothing that counts."""
    final_RPD: Tensor
    """Final hidden states of the target at the places, as `Features.final_BTD`, in its dtype; 0 behind the chain's end. [r, k-1] teaches
    d_k; [r, accepted] says the token said."""


@dataclass
class Rollout:
    """An answered prompt. `1 + sum(accepted + 1) - cut = emitted tokens`: the first one comes from the prefill."""

    key: str
    ids: Tensor
    """Prompt and answer, int64 on the CPU [T]; nothing behind the end of turn or the limit."""
    prompt_len: int
    accepted: list[int]
    """Accepted drafts of every round (verified, whether or not cut)."""
    cut: int
    """Tokens verified but discarded behind an end of turn or the limit; non-zero only in the last round."""
    stopped: bool
    """True if the answer ended with an end-of-turn token, False at the limit."""
    beyond: Tensor
    """Up to `overrun` tokens that the target would have said after the end; [] unless asked for."""
    taps_TAD: Tensor | None = None
    """Features of every row the target read. The last token is not read: its row is zero and nothing that counts uses it."""
    final_TD: Tensor | None = None
    failed: str | None = None
    """Why nobody answered: then `ids` is the prompt alone. None for an answer."""
    rounds: DraftRounds | None = None
    """What every round drafted, where the engine was asked to keep it."""

    @property
    def answer(self) -> Tensor:
        return self.ids[self.prompt_len :]
