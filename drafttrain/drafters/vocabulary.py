"""The draft vocabulary that a recipe asks for, and the weights that a draft of its drafter reads: known before anything is trained."""

from dataclasses import replace

import torch

from drafttrain.drafters.base import DrafterConfig
from drafttrain.target.target import Target
from drafttrain.vocab import Cost, Counts, DraftVocabulary, arithmetic, best_size, choose, describe


def choose_vocabulary(config: DrafterConfig, target: Target, counts: Counts) -> tuple[DraftVocabulary, list[str]]:
    """The tokens that the drafter will say, and the arithmetic of that choice, one sentence a line.

    The target may be on the meta device, without weights. Raises UserError if the size does not fit or covers too little.
    """
    size, lines = config.draft_vocab, []
    if size == "best":
        cost = draft_cost(config, target)
        size = best_size(counts, cost, config.least_coverage)
        lines = [f"best size of the draft vocabulary: {arithmetic(counts, cost, size)}"]
    vocabulary = choose(counts.supervised_V, size, counts.other_V, config.least_coverage, target.end_ids)
    return vocabulary, [describe(vocabulary, counts), *lines]


def draft_cost(config: DrafterConfig, target: Target) -> Cost:
    """Weights that a draft and a pass of the target read. A net that says one token is built on the target's device, and counted.

    The head has `per_word` weights for each token. Of the target's embedding a pass reads one row, so the table counts only as its head.
    All experts of a mixture count: a batch of a few sequences, each with its drafts to verify, reaches most of them.
    """
    with target.device:
        net = replace(config, draft_vocab=1).build(target, DraftVocabulary(torch.arange(1, device="cpu"), target.vocab))
    width = net.per_word
    body = sum(weight.numel() for weight in target.body.parameters()) - target.embedding_weight.numel()
    outside = sum(weight.numel() for weight in net.parameters()) - (width if net.words else 0)
    return Cost(outside, width, body + target.head_weight.numel(), net.needs.depth)
