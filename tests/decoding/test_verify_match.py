"""Sample-then-match against a walk down each row's tree, token by token, greedy and sampled."""

import pytest
import torch
from decoding.verify_cases import random_tree, rows_of
from torch import Tensor

from drafttrain.decoding.sampling import Sampling, choose_tokens, stream_of
from drafttrain.decoding.tree import check
from drafttrain.decoding.verify import Match, said_at
from drafttrain.types import Proposal

GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=3)


def case(vocab: int, nodes: int, holes: bool, seed: int):
    B = 60
    generator = torch.Generator().manual_seed(seed)
    proposal = random_tree(B, nodes, vocab, seed, holes)
    logits = torch.randn(B, nodes + 1, vocab, generator=generator)
    return logits, proposal, torch.tensor([stream_of(f"{seed}/{b}", 0) for b in range(B)]), torch.arange(B) * 3 + 1


def walk(logits_PV: Tensor, proposal: Proposal, b: int, sampling: Sampling, stream_1: Tensor, length: int):
    """(path, token behind it) of row b: plain decoding that follows the tree for as long as it says what the tree says."""
    path: list[int] = []
    here = -1
    while True:
        position = torch.tensor([[length + len(path) + 1]])
        token = int(choose_tokens(logits_PV[None, here + 1 : here + 2], sampling, stream_1, position))
        for n in range(proposal.tokens_BN.shape[1]):
            exists = proposal.valid_BN is None or proposal.valid_BN[b, n]
            if exists and proposal.parents_BN[b, n] == here and proposal.tokens_BN[b, n] == token:
                path, here = path + [n], n
                break
        else:
            return path, token


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(("vocab", "nodes", "holes"), [(2, 12, False), (2, 12, True), (4, 24, True), (3, 1, False)])
def test_equals_plain_decoding_that_follows_the_tree(vocab, nodes, holes, sampling):
    logits, proposal, stream, length = case(vocab, nodes, holes, seed=nodes)
    check(proposal)
    verdict = Match(depth=nodes)(logits, proposal, sampling, stream, length)
    for b in range(len(logits)):
        path, said = walk(logits[b], proposal, b, sampling, stream[b : b + 1], int(length[b]))
        assert verdict.path_BK[b, : verdict.accepted_B[b]].tolist() == path
        assert verdict.said_B[b] == said
    assert verdict.accepted_B.unique().numel() > min(nodes, 2)  # the walk went to several depths
    assert (verdict.path_BK < nodes).all() and (verdict.path_BK >= 0).all()


def test_a_chain_keeps_its_matching_prefix():
    said = torch.tensor([[5, 6, 7, 8]])
    for drafts, accepted, last in (([5, 6, 7], 3, 8), ([5, 6, 0], 2, 7), ([5, 0, 7], 1, 6), ([0, 6, 7], 0, 5)):
        verdict = Match(depth=3).of(said, Proposal(torch.tensor([drafts]), torch.tensor([[-1, 0, 1]])))
        assert (verdict.accepted_B.item(), verdict.said_B.item()) == (accepted, last)
        assert verdict.path_BK.shape == (1, 3)


def test_no_drafts_is_plain_decoding():
    logits = torch.randn(4, 1, 7, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(4, 0, dtype=torch.long)
    stream, length = torch.arange(4), torch.arange(4) + 9
    verdict = Match(depth=0)(logits, Proposal(none, none), SAMPLED, stream, length)
    assert torch.equal(verdict.said_B, choose_tokens(logits, SAMPLED, stream, length[:, None] + 1)[:, 0])
    assert not verdict.accepted_B.any() and verdict.path_BK.shape == (4, 0)


def test_a_row_alone_gets_the_same_verdict():
    logits, proposal, stream, length = case(3, 20, True, seed=2)
    together = Match(depth=6)(logits, proposal, SAMPLED, stream, length)
    for b in range(0, 60, 7):
        row = slice(b, b + 1)
        alone = Match(depth=6)(logits[row], rows_of(proposal, row), SAMPLED, stream[row], length[row])
        assert torch.equal(alone.path_BK, together.path_BK[row])
        assert torch.equal(alone.accepted_B, together.accepted_B[row]) and torch.equal(alone.said_B, together.said_B[row])


def test_said_at_every_place_is_the_token_of_its_position():
    logits, proposal, stream, length = case(5, 6, False, seed=4)
    said = said_at(logits, proposal, SAMPLED, stream, length)
    for b in range(5):
        for n in range(6):
            depth, above = 1, int(proposal.parents_BN[b, n])
            while above >= 0:
                depth, above = depth + 1, int(proposal.parents_BN[b, above])
            row, place = slice(b, b + 1), slice(n + 1, n + 2)
            token = choose_tokens(logits[row, place], SAMPLED, stream[row], length[row, None] + depth + 1)
            assert said[b, n + 1] == token


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("holes", [False, True])
def test_a_chain_is_verified_alike_in_fewer_operations(sampling, holes):
    B, K, vocab = 200, 4, 3
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab, (B, K), generator=g)
    valid = torch.rand(B, K, generator=g) > 0.2 if holes else None
    proposal = Proposal(tokens, (torch.arange(K) - 1).expand(B, -1), valid)
    logits = torch.randn(B, K + 1, vocab, generator=g)
    stream, length = torch.arange(B) * 977, torch.arange(B) + 2
    wanted = Match(K)(logits, proposal, sampling, stream, length)
    found = Match(K, chain=True)(logits, proposal, sampling, stream, length)
    assert torch.equal(found.accepted_B, wanted.accepted_B) and torch.equal(found.said_B, wanted.said_B)
    for b, accepted in enumerate(wanted.accepted_B.tolist()):
        assert found.path_BK[b, :accepted].tolist() == wanted.path_BK[b, :accepted].tolist()
    assert wanted.accepted_B.unique().numel() > 3
