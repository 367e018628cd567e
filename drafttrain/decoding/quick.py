"""tau on held-out prompts while training."""

from collections.abc import Sequence

from drafttrain.decoding.engine import generate
from drafttrain.decoding.measure import Counts, count
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target
from drafttrain.types import Request


def held_out_tau(target: Target, net: DrafterNet, requests: Sequence[Request], drafts: int, slots: int = 16) -> Counts:
    """Greedy speculative decoding of held-out prompts: what training watches. Leaves the net in the mode it was in."""
    training = net.training
    try:
        return count(generate(target, requests, proposer=ChainProposer(net, drafts), slots=slots), drafts)
    finally:
        net.train(training)
