"""Proposals to be verified: random trees of nodes, with siblings that differ."""

import torch
from torch import Tensor

from drafttrain.types import Proposal


def random_parents(batch: int, nodes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(-1, n, (batch,), generator=generator) for n in range(nodes)], dim=1)


def random_tree(batch: int, nodes: int, vocab: int, seed: int, holes: bool = False) -> Proposal:
    """Nodes under random parents; of equal siblings only the first exists. `holes` removes a third of the nodes besides."""
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(batch, nodes, seed)
    tokens = torch.randint(vocab, (batch, nodes), generator=generator)
    valid = torch.rand(batch, nodes, generator=generator) > (1 / 3 if holes else 0)
    for b in range(batch):
        seen: set[tuple[int, int]] = set()
        for n in range(nodes):
            name = int(parents[b, n]), int(tokens[b, n])
            valid[b, n] &= name not in seen
            seen |= {name} if valid[b, n] else set()
    return Proposal(tokens, parents, valid)


def rows_of(proposal: Proposal, rows: slice) -> Proposal:
    return Proposal(*(None if x is None else x[rows] for x in vars(proposal).values()))
