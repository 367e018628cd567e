"""Who guesses: a trained drafter, as a chain or a tree, or the prompt itself. The engine asks none of them which it is.

Everything here has static shapes and asks nothing of the host, so that a GPU can replay a round as a graph.

Letters: B rows in play, R rows admitted now, K greatest depth, N nodes, W nodes of a level, C candidates, M slots, T rows read by the
target, A taps, D target width, H drafter width, V draft vocabulary.
"""

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.types import Proposal


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

    def begin(self, batch: int, capacity: int) -> None:
        """Forget everything; rows come with `admit`."""

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, taps_RTAD: Tensor, extent: int) -> None:
        """New prompts of `counts_R` tokens in rows `rows_R`; tokens_RM[r, counts_R[r]] is the anchor."""

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        """N nodes behind tokens_BM[b, length_B[b]]. `stream_B` names each row's random numbers, for those who draw; no row reaches
        further than `extent` slots in this round."""
        raise NotImplementedError

    def commit(self, taps_BTAD: Tensor, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        """Rows of the target along the accepted path, the first `counts_B` of K+1; tokens_BT[b, i] is the token behind row i."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order: they become the first of the batch."""

    def widen(self) -> None:
        """All rows of the batch are in play again."""


def chain_of(tokens_BK: Tensor) -> Proposal:
    """A deterministic chain."""
    return Proposal(tokens_BK, (torch.arange(tokens_BK.shape[1], device=tokens_BK.device) - 1).expand_as(tokens_BK))


class DrafterProposer(Proposer):
    """What chains and trees of a trained drafter share."""

    def __init__(self, net: DrafterNet, drafts: int):
        if drafts < 1:
            raise UserError(f"a drafter was asked for {drafts} drafts in a round, but proposes at least 1.")
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

    def admit(self, rows_R: Tensor, tokens_RM: Tensor, counts_R: Tensor, taps_RTAD: Tensor, extent: int) -> None:
        self.state.length_B[rows_R] = 0
        T = taps_RTAD.shape[1]
        hidden_RH = self.net.commit(self.state, rows_R, taps_RTAD, tokens_RM[:, 1 : T + 1], counts_R, extent)
        if not len(self.hidden_BH):
            self.hidden_BH = hidden_RH.new_zeros(len(self.state.length_B), hidden_RH.shape[1])
        self.hidden_BH[rows_R] = hidden_RH

    def commit(self, taps_BTAD: Tensor, tokens_BT: Tensor, counts_B: Tensor, extent: int) -> None:
        hidden_BH = self.net.commit(self.state, None, taps_BTAD, tokens_BT, counts_B, extent)
        self.hidden_BH[: len(hidden_BH)] = hidden_BH

    def keep(self, rows: Tensor) -> None:
        self.state.keep(rows)
        self.hidden_BH[: len(rows)] = self.hidden_BH[rows]

    def widen(self) -> None:
        self.state.widen()

    def _logits(self, hidden_BWH: Tensor, prev_BW: Tensor) -> Tensor:
        """[B, W, V] over the draft vocabulary."""
        logits_NV = self.net.logits(hidden_BWH.flatten(0, 1), prev_BW.flatten())
        return logits_NV.unflatten(0, prev_BW.shape)


class ChainProposer(DrafterProposer):
    """A trained drafter, one token after another, greedily."""

    @property
    def stepped(self) -> int:
        return self.drafts - 1

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        self.state.forget(extent)
        prev_B1 = tokens_BM.gather(1, length_B[:, None])
        hidden_B1H = self.hidden_BH[: len(length_B), None]
        drafts = []
        for depth in range(self.drafts):
            if depth:
                hidden_B1H = self.net.step(self.state, prev_B1, torch.full_like(prev_B1, depth - 2))
            prev_B1 = self.net.speakable_V[self._logits(hidden_B1H, prev_B1).argmax(-1)]
            drafts.append(prev_B1)
        return chain_of(torch.cat(drafts, dim=1))


class TreeProposer(DrafterProposer):
    """A dynamic tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858): on each level the `top_k` nodes that are most probable as paths
    are expanded into `top_k` children each; of all candidates the `nodes` most probable stay, ties to the shallower.

    A path's probability is the drafter's own estimate that it will be accepted, so the tree maximises the expected number of
    accepted tokens among trees of its size. A child is never more probable than its parent, so parents stay with their children.
    """

    def __init__(self, net: DrafterNet, drafts: int, top_k: int = 8, nodes: int = 32):
        super().__init__(net, drafts)
        candidates, words = top_k + (drafts - 1) * top_k**2, len(net.speakable_V)
        if not 1 <= top_k <= words or not 1 <= nodes <= candidates:
            raise UserError(
                f"a tree of {nodes} nodes from the best {top_k} on each of {drafts} levels cannot be built: the draft vocabulary has {words} tokens, "
                f"and there are {candidates} candidates; lower nodes, or raise top_k or drafts."
            )
        self.top_k, self._nodes = top_k, nodes
        self.drafts = min(drafts, nodes)  # a path has no more nodes than the tree

    @property
    def nodes(self) -> int:
        return self._nodes

    @property
    def chain(self) -> bool:
        return False

    @property
    def stepped(self) -> int:
        return (self.drafts - 1) * self.top_k

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        self.state.forget(extent)
        k, B = self.top_k, len(length_B)
        prev_B1 = tokens_BM.gather(1, length_B[:, None])
        score_BW, token_BW = self._children(self.hidden_BH[:B, None], prev_B1, torch.zeros_like(prev_B1, dtype=torch.float32))
        # Candidates of all levels: token, score, which candidate they follow; and of the last level, which stepped token.
        tokens, scores, parents = [token_BW], [score_BW], [torch.full_like(token_BW, -1)]
        behind_BW, offset = parents[0], 0
        for level in range(1, self.drafts):
            best_BK, pick_BK = scores[-1].topk(k, dim=1)
            chosen_BK, stepped_BK = tokens[-1].gather(1, pick_BK), behind_BW.gather(1, pick_BK)
            hidden_BKH = self.net.step(self.state, chosen_BK, stepped_BK)
            score_BW, token_BW = self._children(hidden_BKH, chosen_BK, best_BK)
            tokens.append(token_BW)
            scores.append(score_BW)
            parents.append((pick_BK + offset).repeat_interleave(k, dim=1))
            offset += k if level == 1 else k * k
            number_K = torch.arange((level - 1) * k, level * k, device=token_BW.device)
            behind_BW = number_K.repeat_interleave(k).expand(B, -1)
        return self._best(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))

    def _children(self, hidden_BWH: Tensor, prev_BW: Tensor, score_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability as a path, and target id, of the best k children of W nodes: two of [B, W*k]."""
        logp_BWV = self._logits(hidden_BWH, prev_BW).float().log_softmax(-1)
        best_BWK, index_BWK = logp_BWV.topk(self.top_k, dim=-1)
        return (score_BW[..., None] + best_BWK).flatten(1), self.net.speakable_V[index_BWK].flatten(1)

    def _best(self, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor) -> Proposal:
        """The most probable candidates, renumbered in the order in which they were found."""
        order_BC = scores_BC.sort(dim=1, descending=True, stable=True).indices
        chosen_BN = order_BC[:, : self.nodes].sort(dim=1).values
        taken_BC = torch.zeros_like(tokens_BC).scatter(1, chosen_BN, 1)
        number_BC = taken_BC.cumsum(1) - 1
        parent_BN = parents_BC.gather(1, chosen_BN)
        renumbered_BN = torch.where(parent_BN < 0, -1, number_BC.gather(1, parent_BN.clamp(min=0)))
        return Proposal(tokens_BC.gather(1, chosen_BN), renumbered_BN)


class LookupProposer(Proposer):
    """Prompt lookup: copies what followed the latest earlier occurrence of the longest matching suffix (Saxena 2023)."""

    def __init__(self, drafts: int, longest: int = 3):
        self.drafts, self.longest = drafts, longest

    def propose(self, tokens_BM: Tensor, length_B: Tensor, stream_B: Tensor, extent: int) -> Proposal:
        M = tokens_BM.shape[1]
        end = torch.arange(M, device=tokens_BM.device)  # a match may end at any token before the anchor
        earlier = end < length_B[:, None]
        matched = earlier
        best_B = torch.zeros_like(length_B)  # where the copied text starts; no match copies from the row's start, mostly in vain
        for size in range(1, self.longest + 1):
            wanted = tokens_BM.gather(1, (length_B - size + 1).clamp(min=0)[:, None])
            shifted = tokens_BM.roll(size - 1, dims=1)
            matched = matched & (shifted == wanted) & (end >= size - 1) & (length_B >= size)[:, None]
            latest = torch.where(matched, end, -1).amax(1)
            best_B = torch.where(latest >= 0, latest + 1, best_B)
        source = best_B[:, None] + torch.arange(self.drafts, device=tokens_BM.device)
        return chain_of(tokens_BM.gather(1, torch.minimum(source, length_B[:, None])))
