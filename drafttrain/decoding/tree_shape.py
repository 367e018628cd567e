"""Trees of a fixed shape, and the best of them for what was measured.

A node is named by its *path*: the rank of each token from the anchor on, so that (0, 2) is the third best token behind the best one. With
a_d,r the share of places at depth d where the token said is the drafter's rank-r guess, given that the tokens before it were in the tree,
a node is reached with

    P(r_1, ..., r_d) = a_1,r_1 * ... * a_d,r_d

and the accepted tokens of a round number sum over nodes of P in expectation. Every a is at most 1, so a child is reached no more often
than its parent, and taking the best node at hand again and again gives the best tree of every size (Medusa, Cai et al. 2024, arXiv
2401.10774; Hydra, Ankner et al. 2024, arXiv 2402.05109).

Letters: N nodes, W nodes of a level.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Nodes by their paths, level by level; a node's parent is among them."""

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        if not self.paths or len(known) != len(self.paths) + 1 or list(self.paths) != sorted(self.paths, key=_order):
            raise ValueError(f"paths {self.paths} are not the distinct nodes of a tree, level by level")
        if any(path[:-1] not in known or min(path) < 0 for path in self.paths):
            raise ValueError(f"paths {self.paths} hold a node without its parent, or a negative rank")

    @cached_property
    def depth(self) -> int:
        return len(self.paths[-1])

    @cached_property
    def best(self) -> int:
        """Most guesses that are asked for at one place."""
        return 1 + max(path[-1] for path in self.paths)

    @cached_property
    def expanded(self) -> tuple[Path, ...]:
        """Nodes that have children, level by level."""
        parents = {path[:-1] for path in self.paths}
        return tuple(path for path in self.paths if path in parents)

    def parents(self) -> Tensor:
        """Index of each node's parent, -1 for the anchor [N]."""
        number = {path: n for n, path in enumerate(self.paths)} | {(): -1}
        return torch.tensor([number[path[:-1]] for path in self.paths])

    def levels(self) -> "list[Level]":
        """What a proposer looks up on each level."""
        levels: list[Level] = []
        above: list[Path] = [()]
        number = {path: n for n, path in enumerate(self.expanded)} | {(): -1}
        for depth in range(1, self.depth + 1):
            nodes = [path for path in self.paths if len(path) == depth]
            best = 1 + max(path[-1] for path in nodes)
            pick = [above.index(path[:-1]) * best + path[-1] for path in nodes]
            behind = [number[path[:-1]] for path in above if path]
            levels.append(Level(best, torch.tensor(pick), torch.tensor(behind, dtype=torch.long)))
            above = [path for path in nodes if path in number]
            levels[-1].expand = torch.tensor([nodes.index(path) for path in above], dtype=torch.long)
        return levels


@dataclass
class Level:
    """Nodes of one depth. The level's *roots* are the nodes above it that have children."""

    best: int
    """Guesses that each root must make."""
    pick: Tensor
    """Which of the roots' guesses, one root after another, each node is [W]."""
    behind: Tensor
    """For each root, the number among all expanded nodes of the one that it follows; empty where the anchor is the root."""
    expand: Tensor = field(default_factory=lambda: torch.empty(0))
    """Which nodes of this level are roots of the next."""

    def to(self, device: torch.device) -> "Level":
        return Level(self.best, self.pick.to(device), self.behind.to(device), self.expand.to(device))


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


def grow(acceptance: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The tree of up to `nodes` nodes that is expected to have most accepted; `acceptance[d - 1][r]` is a_d,r.

    Nodes that are never reached are left out. Ties go to the shallower node, then to the better rank.
    """
    chosen: list[Path] = []
    heap: list[tuple[float, tuple[int, Path]]] = [(-1.0, (0, ()))]
    while heap and len(chosen) <= nodes:
        reached, (depth, path) = heapq.heappop(heap)
        chosen.append(path)
        if depth < len(acceptance):
            for rank, share in enumerate(acceptance[depth]):
                if share > 0:
                    heapq.heappush(heap, (reached * share, (depth + 1, (*path, rank))))
    return TreeShape(tuple(sorted(chosen[1:], key=_order)))


def expected_accepted(shape: TreeShape, acceptance: Sequence[Sequence[float]]) -> float:
    """Accepted drafts of a round, in expectation."""
    reached: dict[Path, float] = {(): 1.0}
    for path in shape.paths:
        reached[path] = reached[path[:-1]] * acceptance[len(path) - 1][path[-1]]
    return sum(reached.values()) - 1
