"""Ways of drafting that a recipe can name: what is proposed, and how it is verified. Each makes an engine's two parts.

Those that need no drafter are the baselines that every trained one has to beat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drafttrain.decoding.calibrate import Acceptance, calibrate
from drafttrain.decoding.propose_adaptive import AdaptiveChainProposer
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_drawn import DrawnProposer
from drafttrain.decoding.propose_merged import MergedProposer, RoutedProposer
from drafttrain.decoding.propose_ngram import LookupProposer, NGramProposer
from drafttrain.decoding.propose_recycling import RecyclingProposer, assumed_shape
from drafttrain.decoding.propose_static import StaticTreeProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.proposer import Proposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.tree_shape import TreeShape
from drafttrain.decoding.verify import Verifier
from drafttrain.decoding.verify_chain import Block, TokenWise
from drafttrain.decoding.verify_tree import KSeq, Rejection
from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.save import load_drafter
from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.types import Request


@dataclass(frozen=True)
class Method:
    """Base of the ways of drafting that a recipe may name."""

    def prepare(self, target: Target, net: DrafterNet, requests: Sequence[Request]) -> "Method":
        """The same way with what it needs besides the drafter: files read, other drafters loaded, acceptance measured on the target's
        answers to `requests`, which must not be what is benchmarked. Most need nothing."""
        return self

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

    def _shares(self, **values: float) -> None:
        for name, value in values.items():
            if not 0 <= value < 1:
                raise UserError(f"{type(self).__name__}.{name} is {value}, but is a probability: at least 0, below 1.")


@dataclass(frozen=True)
class Chain(Method):
    """One draft behind another."""

    drafts: int = 5
    draw: bool = False
    """Draw each draft from the drafter's distribution, instead of taking the most probable token. Needs a temperature above 0."""
    verify: Literal["block", "token_wise"] = "block"
    """How drawn drafts are verified: all together, or one after another. The others are kept where the target says the same."""
    least_confidence: float = 0.0
    """Propose no further where the product of the drafter's highest probabilities falls below this."""

    def __post_init__(self) -> None:
        self._at_least_one(drafts=self.drafts)
        self._shares(least_confidence=self.least_confidence)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        if self.draw:
            return DrawnProposer(net, (1,) * self.drafts, sampling, self.least_confidence)
        return ChainProposer(net, self.drafts, self.least_confidence)

    def verifier(self, sampling: Sampling) -> Verifier | None:
        if not self.draw:
            return None
        return Block() if self.verify == "block" else TokenWise()

    @property
    def label(self) -> str:
        sure = f", from {self.least_confidence:g}" if self.least_confidence else ""
        return f"chain {self.drafts}{sure}" + (f", drawn, {self.verify.replace('_', '-')}" if self.draw else "")


@dataclass(frozen=True)
class AdaptiveChain(Method):
    """A chain as long as pays, by what is accepted and what rounds cost, both measured on the way."""

    most: int = 8
    """Most drafts of a round."""

    def __post_init__(self) -> None:
        self._at_least_one(most=self.most)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return AdaptiveChainProposer(net, self.most)

    @property
    def label(self) -> str:
        return f"chain up to {self.most}"


@dataclass(frozen=True)
class Tree(Method):
    """A dynamic tree (EAGLE-2): the most probable paths by the drafter's own estimate."""

    drafts: int = 6
    """Greatest depth."""
    top_k: int = 8
    """Nodes expanded on each level, and children of each."""
    nodes: int = 40
    """Nodes that the target reads in a round."""
    least_gain: float = 0.0
    """Leave out nodes that add fewer accepted tokens than this, by the drafter's own estimate (OPT-Tree)."""

    def __post_init__(self) -> None:
        self._at_least_one(drafts=self.drafts, top_k=self.top_k, nodes=self.nodes)
        self._shares(least_gain=self.least_gain)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return TreeProposer(net, self.drafts, self.top_k, self.nodes, self.least_gain)

    @property
    def label(self) -> str:
        gain = f", gain {self.least_gain:g}" if self.least_gain else ""
        return f"tree {self.drafts}x{self.top_k}, {self.nodes} nodes{gain}"


@dataclass(frozen=True)
class DrawnTree(Method):
    """A tree whose siblings are drawn from the drafter without replacement, verified by recursive rejection (RSD)."""

    widths: list[int] = field(default_factory=lambda: [4, 2, 1])
    """Children of every node on each level."""

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise UserError(
                f"DrawnTree.widths is {list(self.widths)}, but must hold a number of children, at least 1, for each level."
            )

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return DrawnProposer(net, tuple(self.widths), sampling)

    def verifier(self, sampling: Sampling) -> Verifier | None:
        return Rejection(tuple(self.widths))

    @property
    def label(self) -> str:
        return f"drawn tree {'x'.join(map(str, self.widths))}"


@dataclass(frozen=True)
class DrawnPaths(Method):
    """Several chains drawn from the drafter independently of each other; those that agree so far are weighed together at every place
    (SpecTr's k-sequential selection)."""

    paths: int = 4
    drafts: int = 4
    """Length of each."""

    def __post_init__(self) -> None:
        self._at_least_one(paths=self.paths, drafts=self.drafts)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return DrawnProposer(net, (self.paths, *(1,) * (self.drafts - 1)), sampling, replacement=True)

    def verifier(self, sampling: Sampling) -> Verifier | None:
        return KSeq((self.paths,) * self.drafts)

    @property
    def label(self) -> str:
        return f"{self.paths} drawn paths of {self.drafts}"


@dataclass(frozen=True)
class StaticTree(Method):
    """A tree of a fixed shape, the best one for the acceptance that was measured on the target's own answers (Medusa, Hydra)."""

    nodes: int = 32
    file: str | None = None
    """Where the measured acceptance is kept, best beside the drafter; measured and written there if it is missing. null: measured anew
    every time."""
    depth: int = 6
    """Depths that are measured."""
    ranks: int = 8
    """Guesses at each place that are measured."""

    def __post_init__(self) -> None:
        self._at_least_one(nodes=self.nodes, depth=self.depth, ranks=self.ranks)

    def prepare(self, target: Target, net: DrafterNet, requests: Sequence[Request]) -> Method:
        if self.file is not None and Path(self.file).exists():
            return self.of(Acceptance.load(Path(self.file), net))
        acceptance = calibrate(target, net, requests, self.depth, self.ranks)
        if self.file is not None:
            acceptance.save(Path(self.file))
        return self.of(acceptance)

    def of(self, acceptance: Acceptance) -> "_FixedTree":
        """The tree for what was measured."""
        return _FixedTree(acceptance.tree(self.nodes).paths)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        if self.file is None:
            raise UserError(
                "StaticTree.file is null, and no acceptance was measured that would shape the tree; set file to where it was, or will be, "
                "written."
            )
        return self.of(Acceptance.load(Path(self.file), net)).proposer(net, sampling)

    @property
    def label(self) -> str:
        return f"static tree, {self.nodes} nodes"


@dataclass(frozen=True)
class _FixedTree(Method):
    """A tree of a shape that is known."""

    paths: tuple[tuple[int, ...], ...]
    """Ranks from the anchor on of every node, level by level."""

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return StaticTreeProposer(net, TreeShape(self.paths))

    @property
    def label(self) -> str:
        return f"static tree, {len(self.paths)} nodes"


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


@dataclass(frozen=True)
class NGram(Method):
    """An n-gram model of the row's own text with back-off (ANPD), without a drafter."""

    drafts: int = 8
    longest: int = 4
    """Longest run of tokens that is looked for."""
    trust: float = 2.0
    """Drafts that each matched token vouches for."""

    def __post_init__(self) -> None:
        self._at_least_one(drafts=self.drafts, longest=self.longest)
        if self.trust <= 0:
            raise UserError(f"NGram.trust is {self.trust}, but must be above 0, or nothing is ever drafted.")

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return NGramProposer(self.drafts, self.longest, self.trust)

    @property
    def label(self) -> str:
        return f"n-gram {self.drafts}"


@dataclass(frozen=True)
class Recycling(Method):
    """Token Recycling: behind each token what the target guessed there last time, without a drafter."""

    nodes: int = 40
    top_k: int = 8
    """Guesses that are kept for each token."""
    depth: int = 6

    def __post_init__(self) -> None:
        self._at_least_one(nodes=self.nodes, top_k=self.top_k, depth=self.depth)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        words = net.vocabulary.size
        shape = assumed_shape(self.nodes, min(self.top_k, words), self.depth)
        return RecyclingProposer(shape, words, net.speakable_V.device)

    @property
    def label(self) -> str:
        return f"recycling, {self.nodes} nodes"


@dataclass(frozen=True)
class Graft(Tree):
    """A dynamic tree, and on it a branch of what followed the same words earlier in the row's own text (RASD)."""

    copied: int = 8
    """Longest branch."""
    longest: int = 4
    """Longest run of tokens that is looked for."""
    trust: float = 2.0
    """Copied drafts that each matched token vouches for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        NGram(self.copied, self.longest, self.trust)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        return MergedProposer([super().proposer(net, sampling), NGramProposer(self.copied, self.longest, self.trust)])

    @property
    def label(self) -> str:
        return f"{super().label}, {self.copied} copied"


@dataclass(frozen=True)
class Experts(Tree):
    """Dynamic trees of several drafters of one target, each trained for other text (TAPS)."""

    drafters: list[str] = field(default_factory=list)
    """Folders of the drafters besides the one at hand."""
    by: Literal["merge", "route"] = "merge"
    """Verify the trees of all of them under one anchor, or for each row the tree of the drafter that expects most to be accepted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafters:
            raise UserError(
                "Experts.drafters is empty, but must hold the folder of at least one more drafter; for a single one, use Tree."
            )

    def prepare(self, target: Target, net: DrafterNet, requests: Sequence[Request]) -> Method:
        dtype = next(net.parameters()).dtype
        nets = tuple(load_drafter(Path(folder), target)[0].to(dtype) for folder in self.drafters)
        return _LoadedExperts(self.drafts, self.top_k, self.nodes, self.least_gain, nets, self.by)

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        raise ValueError("the other drafters are not loaded: prepare first")

    @property
    def label(self) -> str:
        return f"{1 + len(self.drafters)} drafters by {self.by}, {super().label}"


@dataclass(frozen=True)
class _LoadedExperts(Tree):
    """Drafters at hand; fields as of `Experts`."""

    others: tuple[DrafterNet, ...] = ()
    by: str = "merge"

    def proposer(self, net: DrafterNet, sampling: Sampling) -> Proposer:
        routed, shape = self.by == "route", (self.drafts, self.top_k, self.nodes, self.least_gain)
        members = [TreeProposer(each, *shape, estimates=routed) for each in (net, *self.others)]
        return RoutedProposer(members) if routed else MergedProposer(members)

    @property
    def label(self) -> str:
        return f"{1 + len(self.others)} drafters by {self.by}, {super().label}"
