"""The proposers of trained drafters, gathered: what an engine is given. Those without a model stand in `propose_ngram` and
`propose_recycling`, those made of others in `propose_merged`."""

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_drawn import DrawnProposer
from drafttrain.decoding.propose_ngram import LookupProposer
from drafttrain.decoding.propose_static import StaticTreeProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.proposer import DrafterProposer, Proposer, chain_of

__all__ = [
    "ChainProposer",
    "DrafterProposer",
    "DrawnProposer",
    "LookupProposer",
    "Proposer",
    "StaticTreeProposer",
    "TreeProposer",
    "chain_of",
]
