"""Ancestors and depths against a walk up the parents, and every fault of a proposal by name."""

import pytest
import torch
from decoding.verify_cases import random_parents
from torch import Tensor

from drafttrain.decoding.tree import ancestors, check, depths, place_depths
from drafttrain.types import Proposal


def ancestors_slow(parents_BN: Tensor) -> Tensor:
    B, N = parents_BN.shape
    marks = torch.zeros(B, N, N, dtype=torch.bool)
    for b in range(B):
        for n in range(N):
            above = n
            while above >= 0:
                marks[b, n, above] = True
                above = int(parents_BN[b, above])
    return marks


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8, 9, 16, 33])
def test_ancestors_equal_a_walk_up(nodes):
    chain = torch.arange(-1, nodes - 1).expand(1, nodes)  # the deepest tree there is
    parents = torch.cat([chain, random_parents(12, nodes, seed=nodes)])
    assert torch.equal(ancestors(parents), ancestors_slow(parents))


def test_depths_count_from_the_anchor():
    parents = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 1, 2, 3]])
    assert depths(ancestors(parents)).tolist() == [[1, 1, 2, 3, 2], [1, 2, 3, 4, 5]]
    assert place_depths(ancestors(parents)).tolist() == [[0, 1, 1, 2, 3, 2], [0, 1, 2, 3, 4, 5]]


def test_no_nodes_at_all():
    parents = torch.zeros(3, 0, dtype=torch.long)
    assert ancestors(parents).shape == (3, 0, 0) and place_depths(ancestors(parents)).tolist() == [[0]] * 3


def proposal(**changes) -> Proposal:
    """Two children of the anchor, the first with a child of its own."""
    fields = dict(
        tokens_BN=torch.tensor([[1, 2, 1]]),
        parents_BN=torch.tensor([[-1, -1, 0]]),
        valid_BN=torch.tensor([[True, True, True]]),
        q_BPV=torch.full((1, 4, 4), 0.25),
    )
    return Proposal(**(fields | changes))


def test_a_sound_proposal_passes():
    check(proposal())
    check(proposal(valid_BN=None, q_BPV=None))
    check(proposal(tokens_BN=torch.tensor([[1, 1, 1]]), valid_BN=torch.tensor([[True, False, True]])))
    check(proposal(tokens_BN=torch.tensor([[1, 1, 1]])), replacement=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(parents_BN=torch.tensor([[-1, -1, 2]])), "node 2 of row 0 has a parent"),
        (dict(parents_BN=torch.tensor([[-1, -2, 0]])), "node 1 of row 0 has a parent"),
        (dict(parents_BN=torch.tensor([[-1, -1]])), "parents are"),
        (dict(tokens_BN=torch.tensor([[1, 2, 1]], dtype=torch.int32)), "tokens are torch.int32"),
        (dict(valid_BN=torch.tensor([[1, 1, 1]])), "valid are"),
        (dict(tokens_BN=torch.tensor([[1, 1, 1]])), "node 1 of row 0 says the same token as a sibling"),
        (dict(q_BPV=torch.full((1, 3, 4), 0.25)), "q has shape"),
        (dict(q_BPV=torch.full((1, 4, 4), 0.5)), "node 0 of row 0 was drawn from a q that is no distribution"),
        (dict(q_BPV=torch.tensor([0.5, 0.5, 0, 0]).expand(1, 4, 4)), "node 1 of row 0 says a token that its q excludes"),
    ],
)
def test_each_fault_has_its_name(changes, words):
    with pytest.raises(ValueError, match=words):
        check(proposal(**changes))
