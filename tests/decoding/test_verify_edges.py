"""Verdicts that need no statistics: refusals, certain outcomes, batch mates, and how block verification compares with token-wise."""

import pytest
import torch
from decoding.test_verify_exact import CHAINS, METHODS, TREES, Method
from decoding.verify_cases import World, chi_square, drawn, rows_of, streams, world_of
from torch import Tensor

from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.verify_chain import Block, TokenWise
from drafttrain.decoding.verify_tree import KSeq, Rejection
from drafttrain.errors import UserError
from drafttrain.types import Proposal

SAMPLED = Sampling(temperature=1.0)
DRAWING = [m for m in METHODS if m.name != "match"]


def round_of(method: Method, world: World, sampling: Sampling, rows: int):
    stream, length, text = streams(rows), torch.arange(rows) % 5, torch.zeros(rows, dtype=torch.long)
    logits, proposal = drawn(world, method.branching, method.replacement, sampling, stream, length, text)
    return logits, proposal, sampling, stream, length


@pytest.mark.parametrize("verify", [Rejection((1,)), TokenWise(), Block(), KSeq((1,))], ids=str)
def test_what_cannot_be_weighed_is_refused(verify):
    logits, proposal, _, stream, length = round_of(CHAINS[0], world_of("near", 3, 0), SAMPLED, 2)
    with pytest.raises(UserError, match="temperature is 0.*raise temperature, or verify by match"):
        verify(logits, proposal, Sampling(temperature=0.0), stream, length)
    with pytest.raises(UserError, match="chosen, not drawn.*verify by match"):
        verify(logits, Proposal(proposal.tokens_BN, proposal.parents_BN), SAMPLED, stream, length)


@pytest.mark.parametrize("method", DRAWING, ids=str)
def test_a_row_alone_gets_the_same_verdict(method):
    logits, proposal, sampling, stream, length = round_of(
        method, world_of("near", 5, 1), Sampling(temperature=0.8, top_p=0.9), 40
    )
    together = method.verify(logits, proposal, sampling, stream, length)
    for b in range(40):
        row = slice(b, b + 1)
        alone = method.verify(logits[row], rows_of(proposal, row), sampling, stream[row], length[row])
        assert torch.equal(alone.path_BK, together.path_BK[row])
        assert torch.equal(alone.accepted_B, together.accepted_B[row]) and torch.equal(alone.said_B, together.said_B[row])


@pytest.mark.parametrize("method", DRAWING, ids=str)
def test_a_path_leads_down_the_tree_and_indices_are_valid(method):
    logits, proposal, sampling, stream, length = round_of(method, world_of("near", 4, 1), SAMPLED, 500)
    verdict = method.verify(logits, proposal, sampling, stream, length)
    assert verdict.path_BK.shape == (500, len(method.branching)) and verdict.accepted_B.max() == len(method.branching)
    assert verdict.path_BK.min() >= 0 and verdict.path_BK.max() < proposal.tokens_BN.shape[1]
    above = torch.full((500,), -1)
    for k in range(len(method.branching)):
        node, kept = verdict.path_BK[:, k], k < verdict.accepted_B
        parent = proposal.parents_BN.gather(1, node[:, None])[:, 0]
        if method.replacement:  # the parent may be an equal sibling of the node before
            token = proposal.tokens_BN.gather(1, torch.stack([parent, above], 1).clamp(min=0))
            assert (token[:, 0] == token[:, 1])[kept].all()
        else:
            assert (parent == above)[kept].all()
        above = node


@pytest.mark.parametrize("method", [m for m in DRAWING if m.branching[0] == 1], ids=str)
def test_a_drafter_equal_to_the_target_is_always_right(method):
    method_input = round_of(method, world_of("equal", 5, 2), Sampling(temperature=0.7, top_p=0.9), 2000)
    assert (method.verify(*method_input).accepted_B == len(method.branching)).all()


@pytest.mark.parametrize("method", DRAWING, ids=str)
def test_what_the_target_excludes_is_neither_accepted_nor_said(method):
    """top_k leaves the target two tokens; the drafter draws all of them."""
    world, narrow = world_of("apart", 5, 3), Sampling(temperature=1.0, top_k=2)
    logits, proposal, _, stream, length = round_of(method, world, SAMPLED, 2000)
    verdict = method.verify(logits, proposal, narrow, stream, length)
    said_BT = torch.cat([proposal.tokens_BN.gather(1, verdict.path_BK), verdict.said_B[:, None]], 1)
    said_BT.scatter_(1, verdict.accepted_B[:, None], verdict.said_B[:, None])
    place_B = torch.zeros_like(length)
    for k in range(said_BT.shape[1]):
        best = logits[torch.arange(2000), place_B].topk(2).indices
        assert (best == said_BT[:, k, None]).any(1)[k <= verdict.accepted_B].all()
        if k < verdict.path_BK.shape[1]:
            place_B = torch.where(k < verdict.accepted_B, verdict.path_BK[:, k] + 1, place_B)


@pytest.mark.parametrize("verify", [Rejection((1, 1, 1)), TokenWise(), Block(), KSeq((1, 1, 1)), Rejection(())], ids=str)
def test_without_drafts_the_target_speaks(verify):
    logits = torch.tensor([0.0, 40.0, 0.0]).expand(4, 1, 3)
    none = torch.zeros(4, 0, dtype=torch.long)
    proposal = Proposal(none, none, None, torch.full((4, 1, 3), float("nan")))
    verdict = verify(logits, proposal, SAMPLED, torch.arange(4), torch.arange(4))
    assert verdict.said_B.tolist() == [1] * 4 and verdict.accepted_B.tolist() == [0] * 4 and verdict.path_BK.shape == (4, 0)


@pytest.mark.parametrize("stopping", [False, True])
@pytest.mark.parametrize("kind", ["apart", "near", "reduced"])
def test_token_wise_is_rejection_down_a_tree_of_width_one(kind, stopping):
    inputs = round_of(CHAINS[4], world_of(kind, 5, 7, stopping), Sampling(temperature=0.8, top_p=0.9), 5000)
    chain, tree = TokenWise()(*inputs), Rejection((1, 1, 1))(*inputs)
    kept = torch.arange(3) < chain.accepted_B[:, None]
    assert torch.equal(chain.accepted_B, tree.accepted_B) and torch.equal(chain.said_B, tree.said_B)
    assert torch.equal(chain.path_BK[kept], tree.path_BK[kept]) and chain.accepted_B.unique().numel() == 4


@pytest.mark.parametrize("verify", [Rejection((2, 1)), TokenWise(), Block(), KSeq((2, 1))], ids=str)
def test_nodes_that_do_not_exist_are_not_weighed(verify):
    logits = torch.tensor([0.0, 0.0, 40.0]).expand(4, 3, 3)
    drafts = Proposal(torch.tensor([[2, 2]]).expand(4, 2), torch.tensor([[-1, 0]]).expand(4, 2))
    q = torch.tensor([0.0, 0.0, 1.0]).expand(4, 3, 3)
    for valid, accepted in (([True, True], 2), ([True, False], 1), ([False, True], 0), ([False, False], 0)):
        proposal = Proposal(drafts.tokens_BN, drafts.parents_BN, torch.tensor([valid]).expand(4, 2), q)
        verdict = verify(logits, proposal, SAMPLED, torch.arange(4), torch.arange(4))
        assert verdict.accepted_B.tolist() == [accepted] * 4 and verdict.said_B.tolist() == [2] * 4


@pytest.mark.parametrize("verify", [Rejection((1,)), TokenWise(), Block(), KSeq((1,))], ids=str)
@pytest.mark.parametrize("valid", [None, torch.ones(3000, 1, dtype=torch.bool)], ids=["all", "valid"])
def test_a_token_that_its_q_excludes_is_passed_over(verify, valid):
    """As if the node did not exist: p is not spent on it."""
    rows, p = 3000, torch.tensor([0.5, 0.5, 1e-9])
    proposal = Proposal(torch.ones(rows, 1).long(), -torch.ones(rows, 1).long(), valid, torch.eye(3)[0].expand(rows, 2, 3))
    verdict = verify(p.log().expand(rows, 2, 3), proposal, SAMPLED, streams(rows), torch.arange(rows))
    assert not verdict.accepted_B.any()
    assert chi_square(torch.bincount(verdict.said_B, minlength=3), rows * p) > 1e-3


def accepted_of(verify, world: World, drafts: int, rows: int) -> Tensor:
    method = Method(verify, (1,) * drafts, False, "chain")
    return verify(*round_of(method, world, SAMPLED, rows)).accepted_B.double()


@pytest.mark.parametrize("kind", ["apart", "near", "reduced", "equal"])
def test_block_keeps_at_least_as_many_as_token_wise(kind):
    rows, drafts = 50_000, 3
    world = world_of(kind, 4, 5)
    more = accepted_of(Block(), world, drafts, rows) - accepted_of(TokenWise(), world, drafts, rows)
    assert more.mean() + 1.96 * more.std() / rows**0.5 >= 0
    if kind != "equal":
        assert more.mean() - 1.96 * more.std() / rows**0.5 > 0


def test_the_paper_s_example():
    """Target 1/3, 2/3 and drafter 2/3, 1/3 everywhere, two drafts: 10/9 accepted token-wise and 11/9 by block (section 2)."""
    p = torch.tensor([1 / 3, 2 / 3])
    world = World(p.log().expand(15, 2), p.flip(0).log().expand(15, 2))
    rows = 50_000
    for verify, wanted in ((TokenWise(), 10 / 9), (Block(), 11 / 9)):
        accepted = accepted_of(verify, world, 2, rows)
        assert abs(accepted.mean() - wanted) < 3 * accepted.std() / rows**0.5


def test_more_children_are_accepted_more_often():
    """Rates of the first depth: without replacement beats independent children; k-sequential selection beats one child."""
    world = world_of("apart", 5, 6)
    rates = {}
    for name, method in (("one", CHAINS[0]), ("recursive", TREES[3]), ("independent", TREES[5]), ("kseq", TREES[7])):
        verdict = method.verify(*round_of(method, world, SAMPLED, 20_000))
        rates[name] = (verdict.accepted_B > 0).double().mean()
    assert rates["recursive"] > rates["independent"] > rates["one"] and rates["kseq"] > rates["one"]
