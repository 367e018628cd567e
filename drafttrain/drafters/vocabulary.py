"""The draft vocabulary that a recipe asks for, and the weights that a draft of its drafter reads: known before anything is trained.

Weights are counted by running one round, on a net that says one token: whatever a pass calls comes from memory once, however many rows it has.
So blocks and P-EAGLE are read once for all their drafts, a head of Medusa's or Hydra's once for its own, and a step of EAGLE's again and again.
"""

from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.target.target import Target
from drafttrain.types import Features
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
    """Weights that a draft and a pass of the target read. A net that says one token is built on the target's device, and drafts a chain.

    Of the target's embedding a pass reads one row, so the table counts only as its head. All experts of a mixture count: a batch of a few
    sequences, each with its drafts to verify, reaches most of them.
    """
    with target.device:
        net = config.build(target, config.least_vocabulary(target)).eval()
        outside, head = weights_read(net, target)
    body = sum(weight.numel() for weight in target.body.parameters()) - target.embedding_weight.numel()
    drafts = net.needs.depth
    return Cost(outside / drafts, head / drafts, body + target.head_weight.numel(), drafts)


def weights_read(net: DrafterNet, target: Target) -> tuple[int, int]:
    """Weights that a chain of `needs.depth` drafts reads outside the head, and in it, of a net that says one token. Tables of which a token
    looks up a row (embeddings) do not count."""
    names, read = {id(weight): name for name, weight in net.named_parameters()}, Counter[str]()

    def note(module: nn.Module, args: tuple, output: Tensor) -> None:
        read.update({names[id(weight)]: weight.numel() for weight in module.parameters(recurse=False)})

    # The target's head is no module of the net: what it has for a token beyond weights of its own is what `per_word` says.
    own = sum(weight.shape[1] for name, weight in net.named_parameters() if name in net.words)
    handles = [module.register_forward_hook(note) for module in net.modules() if not isinstance(module, nn.Embedding)]
    try:
        products = _draft(net, target)
    finally:
        for handle in handles:
            handle.remove()
    head = sum(read[name] for name in net.words)
    return sum(read.values()) - head, head + products * (net.per_word - own)


@torch.no_grad()
def _draft(net: DrafterNet, target: Target) -> int:
    """One round of one row, as chains do it; its tokens mean nothing. Returns how many times the head met states."""
    drafts, token_11 = net.needs.depth, torch.zeros(1, 1, dtype=torch.long)
    final_11D = torch.zeros(1, 1, target.hidden, dtype=target.dtype)
    taps_11AD = final_11D[:, :, None].repeat(1, 1, len(net.needs.taps), 1)
    state = net.begin(1, drafts + 2, drafts)
    hidden_1H = net.commit(state, None, Features(taps_11AD, final_11D), token_11, torch.ones(1, dtype=torch.long), drafts + 2)
    if net.parallel and not net.reads_last:
        net.logits(net.ahead(state)[0, :drafts], token_11[0].expand(drafts))
        return 1
    score = partial(net.logits, hidden_1H)
    known = net.known(net.ahead(state)[0, :drafts]) if net.parallel else None
    for depth in range(drafts):
        if depth:
            score = partial(net.logits, net.step(state, token_11, token_11 + depth - 2)[0])
        if known is not None:
            score = partial(net.logits_given, [part[depth, None] for part in known])
        score(token_11[0])
    return drafts if known is None else 1
