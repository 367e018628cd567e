"""Ways of drafting that a recipe can name: what is proposed, and how it is verified. Each makes an engine's two parts."""

from dataclasses import dataclass

from drafttrain.decoding.batch import Verifier
from drafttrain.decoding.propose import ChainProposer, LookupProposer, Proposer, TreeProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError


@dataclass(frozen=True)
class Method:
    """Base of the ways of drafting that a recipe may name."""

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        """Who guesses, with a trained drafter."""
        raise NotImplementedError

    def verifier(self, sampling: Sampling) -> Verifier | None:
        """What keeps drafts; None keeps those that say what the target says."""
        return None

    @property
    def label(self) -> str:
        """A short name for tables: the class and its options."""
        raise NotImplementedError

    def _at_least_one(self, **values: int) -> None:
        for name, value in values.items():
            if value < 1:
                raise UserError(f"{type(self).__name__}.{name} is {value}, but must be at least 1.")


@dataclass(frozen=True)
class Chain(Method):
    """One draft behind another, each the drafter's most probable token."""

    drafts: int = 5

    def __post_init__(self) -> None:
        self._at_least_one(drafts=self.drafts)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return ChainProposer(net, self.drafts)

    @property
    def label(self) -> str:
        return f"chain {self.drafts}"


@dataclass(frozen=True)
class Tree(Method):
    """A dynamic tree (EAGLE-2): the most probable paths by the drafter's own estimate."""

    drafts: int = 6
    """Greatest depth."""
    top_k: int = 8
    """Nodes expanded on each level, and children of each."""
    nodes: int = 40
    """Nodes that the target reads in a round."""

    def __post_init__(self) -> None:
        self._at_least_one(drafts=self.drafts, top_k=self.top_k, nodes=self.nodes)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return TreeProposer(net, self.drafts, self.top_k, self.nodes)

    @property
    def label(self) -> str:
        return f"tree {self.drafts}x{self.top_k}, {self.nodes} nodes"


@dataclass(frozen=True)
class Lookup(Method):
    """Prompt lookup, without a drafter."""

    drafts: int = 5
    longest: int = 3
    """Longest run of tokens that is looked for."""

    def __post_init__(self) -> None:
        self._at_least_one(drafts=self.drafts, longest=self.longest)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return LookupProposer(self.drafts, self.longest)

    @property
    def label(self) -> str:
        return f"lookup {self.drafts}"
