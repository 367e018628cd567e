"""Who guesses. The engine asks none of them which it is.

Everything here has static shapes and asks nothing of the host, so that a GPU can replay a round as a graph.

Letters: B rows in play, R rows admitted now, K greatest depth, N nodes, P places, W nodes of a level, M slots, T rows read by the target,
A taps, D target width, H drafter width, V draft vocabulary (of the target's logits: its own).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from drafttrain.decoding.tree_shape import TreeShape
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.types import Features, Proposal


class Proposer:
    """Guesses tokens behind every row's anchor. Base of all that the engine can ask."""

    drafts: int
    """Greatest depth K of what is proposed."""
    taps: tuple[int, ...] = ()
    """Layers of the target that it reads."""

    @property
    def nodes(self) -> int:
        """Tokens proposed in a round, N."""
        return self.drafts

    @property
    def chain(self) -> bool:
        """Whether node n always follows node n-1."""
        return True

    @property
    def reach(self) -> int:
        """Slots behind a row's anchor that it may touch in buffers of its own."""
        return self.drafts

    @property
    def round_shape(self) -> int:
        """A number that tells rounds of different shapes apart, if the next round need not have the shape of the last."""
        return 0

    @property
    def round_shapes(self) -> Sequence[int]:
        """All that `round_shape` may be."""
        return (self.round_shape,)

    def take_round_shape(self, shape: int) -> None:
        """The next round is of this shape, one of `round_shapes`."""

    def begin(self, batch: int, capacity: int) -> None:
        """Forget everything; rows come with `admit`."""

    def forget_texts(self) -> None:
        """Forget what was learnt from texts of other rows than those in play, if anything was."""

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, features: Features, extent: int) -> None:
        """New prompts of `counts_R` tokens in rows `rows_R`; tokens_RM[r, counts_R[r]] is the anchor."""

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        """N nodes behind tokens_BM[b, length_B[b]]. `stream_B` names each row's random numbers, for those who draw; no row reaches
        further than `extent` slots in this round."""
        raise NotImplementedError

    def commit(self, features: Features, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        """Rows of the target along the accepted path, the first `counts_B` of K+1; tokens_BT[b, i] is the token behind row i."""

    def observe(self, logits_BPV: Tensor, ids_BP: Tensor) -> None:
        """What the target says behind the anchor and the nodes, whose tokens are `ids_BP`; between `propose` and `commit`."""

    def heard(self, accepted: Sequence[int], shape: int, seconds: float | None) -> None:
        """What a round of this shape kept in each row, and how long it took (None if that says nothing). Called by the host after it."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order: they become the first of the batch."""

    def widen(self) -> None:
        """All rows of the batch are in play again."""


def chain_of(tokens_BK: Tensor) -> Proposal:
    """A deterministic chain."""
    return Proposal(tokens_BK, (torch.arange(tokens_BK.shape[1], device=tokens_BK.device) - 1).expand_as(tokens_BK))


class FixedShape(Proposer):
    """What trees of a fixed shape share."""

    def take_shape(self, shape: TreeShape, device: torch.device) -> None:
        """The shape, and what is looked up of it in every round, on the device."""
        self.shape, self.drafts = shape, shape.depth
        self._levels, self._parents_N = [level.to(device) for level in shape.levels()], shape.parents().to(device)

    @property
    def nodes(self) -> int:
        return len(self.shape.paths)

    @property
    def chain(self) -> bool:
        return self.nodes == self.shape.depth


class DrafterProposer(Proposer):
    """What chains and trees of a trained drafter share."""

    def __init__(self, net: DrafterNet, drafts: int):
        if drafts < 1:
            raise UserError(f"a drafter was asked for {drafts} drafts in a round, but proposes at least 1.")
        net.require_drafts(drafts, "a round")
        self.net, self.drafts, self.taps = net.eval(), drafts, net.needs.taps

    @property
    def stepped(self) -> int:
        """Tokens that the drafter reads in a round."""
        raise NotImplementedError

    @property
    def reach(self) -> int:
        return max(self.stepped, self.drafts)

    def begin(self, batch: int, capacity: int) -> None:
        self.state = self.net.begin(batch, capacity, self.stepped)
        self.hidden_BH = torch.empty(0)

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, features: Features, extent: int) -> None:
        self.state.length_B[rows_R] = 0
        T = features.final_BTD.shape[1]
        hidden_RH = self.net.commit(self.state, rows_R, features, tokens_RM[:, 1 : T + 1], counts_R, extent)
        if not len(self.hidden_BH):
            self.hidden_BH = hidden_RH.new_zeros(len(self.state.length_B), hidden_RH.shape[1])
        self.hidden_BH[rows_R] = hidden_RH

    def commit(self, features: Features, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        hidden_BH = self.net.commit(self.state, None, features, tokens_BT, counts_B, extent)
        self.hidden_BH[: len(hidden_BH)] = hidden_BH

    def keep(self, rows: Tensor) -> None:
        self.state.keep(rows)
        self.hidden_BH[: len(rows)] = self.hidden_BH[rows]

    def widen(self) -> None:
        self.state.widen()

    def _known(self, count: int) -> list[Tensor] | None:
        """Of a drafter whose states are all known now, all that its logits at depths 1, ..., `count` do not owe to the token before
        [B, K, ...], by one product with its head; None of others."""
        if not (self.net.parallel and self.net.reads_last):
            return None
        hidden_BKH = self.net.ahead(self.state)[:, :count]
        return [part.unflatten(0, hidden_BKH.shape[:2]) for part in self.net.known(hidden_BKH.flatten(0, 1))]

    def _logits(self, hidden_BWH: Tensor, prev_BW: Tensor, known: list[Tensor] | None = None, depth: int = 0) -> Tensor:
        """[B, W, V] over the draft vocabulary, behind tokens at this depth (0: the anchor); of what is `known`, what is not is left to do."""
        if known is None:
            logits_NV = self.net.logits(hidden_BWH.flatten(0, 1), prev_BW.flatten())
        else:
            W = prev_BW.shape[1]
            rows = [part[:, depth, None].expand(-1, W, *part.shape[2:]).flatten(0, 1) for part in known]
            logits_NV = self.net.logits_given(rows, prev_BW.flatten())
        return logits_NV.unflatten(0, prev_BW.shape)

    def _log_sure(self, hidden_BWH: Tensor, prev_BW: Tensor, logits_BWV: Tensor) -> Tensor:
        """How likely a draft behind these tokens is kept, by the drafter's own estimate, log [B, W]: its confidence where it has learnt one,
        else the probability of its likeliest token."""
        told_N = self.net.confidence(hidden_BWH.flatten(0, 1), prev_BW.flatten())
        if told_N is None:
            return logits_BWV.float().log_softmax(-1).amax(-1)
        return logsigmoid(told_N).unflatten(0, prev_BW.shape)
