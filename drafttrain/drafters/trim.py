"""A trained drafter's head cut down to fewer tokens, without training (VocabTrim, arXiv 2506.22694).

    W'[d] = W[old draft id of the d-th token that is kept]        (W the weights with a row for each token; a drafter that speaks
                                                                   with the target's head only says fewer of its tokens)

Nothing else changes, so every logit that is left is what it was, and a draft can differ only where the old one's first choice was cut.
What the target says stays the same in any case: it verifies every draft.

Shapes: O tokens of the old head, N tokens that are kept.
"""

from dataclasses import replace

import torch

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.vocabulary import draft_cost
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import Counts, DraftVocabulary, Size, best_size, choose, rounded, size_for


def choose_kept(net: DrafterNet, target: Target, counts: Counts, size: Size, least_coverage: float = 0.0) -> DraftVocabulary:
    """The most frequent of the tokens that the net can say, ends of turn always among them.

    `counts` are counted among those tokens alone, or among all if the net's are the first in that order. `size` is how many, or the share of all training answers that they must cover, or
    "best". Raises UserError where the head has no more tokens than that, or the answers ask for tokens that it cannot say.
    """
    old = net.vocabulary.ids.cpu()
    wanted = _how_many(net, target, counts, size, least_coverage)
    require_fewer(size, wanted, len(old))
    places = {token: place for place, token in enumerate(old.tolist())}
    ends = [places[token] for token in target.end_ids if token in places]
    if wanted < len(ends):
        raise UserError(
            f"drafter.init_args.draft_vocab {size} has no room for the {len(ends)} end-of-turn tokens, without which no answer ends; "
            "give a larger --size."
        )
    kept = DraftVocabulary(
        old[choose(counts.supervised_V[old], wanted, counts.other_V[old], always=ends).ids], net.vocabulary.size
    )
    reached = int(counts.supervised_V[kept.ids].sum()) / max(counts.total, 1)
    if reached < least_coverage:
        raise UserError(
            f"{wanted:,} tokens of the trained head cover {reached:.1%} of the training answers, but drafter.init_args.least_coverage "
            f"asks for {least_coverage:.1%}; give a larger --size or lower the coverage asked for."
        )
    return kept


def require_fewer(size: Size, wanted: int, head: int) -> None:
    """UserError where the trained head has no more tokens than are wanted."""
    if wanted >= head:
        asked = "null" if size is None else size
        raise UserError(
            f"drafter.init_args.draft_vocab {asked} means {wanted:,} tokens, but the trained head has {head:,}: trimming only takes "
            "tokens away, so give a smaller --size, or train with more."
        )


def _how_many(net: DrafterNet, target: Target, counts: Counts, size: Size, least_coverage: float) -> int:
    most, old_O = len(net.vocabulary.ids), counts.supervised_V[net.vocabulary.ids.cpu()]
    if size == "best":
        return best_size(counts, draft_cost(net.config, target), least_coverage, most)
    if isinstance(size, float):
        reachable = int(old_O.sum()) / max(counts.total, 1)
        if size > reachable:
            raise UserError(
                f"drafter.init_args.draft_vocab asks to cover {size:.2%} of the training answers, but all {most:,} tokens of the trained "
                f"head cover {reachable:.2%}; lower --size."
            )
        return rounded(size_for(old_O, size / reachable), most)
    return most if size is None else int(size)


def trim(net: DrafterNet, target: Target, kept: DraftVocabulary) -> DrafterNet:
    """The same net with a head of `kept` tokens, a copy, in eval mode.

    Raises UserError if the net cannot say a token of `kept`, or would lose an end of turn.
    """
    old, weights = net.vocabulary, net.state_dict()
    unknown = kept.ids[~old.t2d[kept.ids]].tolist()
    if unknown:
        raise UserError(
            f"the trained head cannot say {len(unknown):,} of the tokens that are to be kept (such as {unknown[0]}); trimming only takes "
            "tokens away."
        )
    lost = [token for token in target.end_ids if old.t2d[token] and not kept.t2d[token]]
    if lost:
        raise UserError(f"without the end-of-turn tokens {lost} a drafter never ends an answer; keep them.")
    made = replace(net.config, draft_vocab=len(kept.ids)).rebuild(target, kept, net.own_sizes())
    rows_N = torch.searchsorted(old.ids, kept.ids).to(target.device)
    made.load_state_dict(weights | {name: weights[name][rows_N] for name in net.words})
    return made.eval()
