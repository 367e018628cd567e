"""The best static tree against all trees, and measured acceptance against a loop that steps the drafter token by token."""

import itertools
import json

import pytest
import torch
from decoding.test_engine import overfit, plain_of, requests_for
from tiny import first

from drafttrain.decoding.calibrate import Acceptance, calibrate, fingerprint, ranks_of
from drafttrain.decoding.tree_shape import TreeShape, expected_accepted, grow
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary


def all_trees(nodes: int, depth: int, ranks: int) -> set[frozenset]:
    """Every tree of so many nodes, grown child by child."""
    trees = {frozenset([()])}
    for _ in range(nodes):
        trees = {
            tree | {(*path, rank)}
            for tree in trees
            for path in tree
            if len(path) < depth
            for rank in range(ranks)
            if (*path, rank) not in tree
        }
    return trees


def reached(path, acceptance):
    product = 1.0
    for depth, rank in enumerate(path):
        product *= acceptance[depth][rank]
    return product


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_its_size_is_expected_to_have_more_accepted(nodes, seed):
    rows = torch.rand(3, 2, generator=torch.Generator().manual_seed(seed)).softmax(-1) * torch.tensor([[0.9], [0.8], [0.5]])
    acceptance = rows.tolist()
    best = max(sum(reached(path, acceptance) for path in tree) - 1 for tree in all_trees(nodes, 3, 2))
    shape = grow(acceptance, nodes)
    assert len(shape.paths) == nodes
    assert expected_accepted(shape, acceptance) == pytest.approx(best)
    assert expected_accepted(shape, acceptance) == pytest.approx(sum(reached(path, acceptance) for path in shape.paths))


def test_guesses_that_are_never_right_get_no_node():
    assert grow([[0.5, 0.0], [0.0, 0.0]], 10).paths == ((0,),)
    assert grow([[0.5, 0.5], [1.0, 0.0]], 10).paths == ((0,), (1,), (0, 0), (1, 0))


def test_parents_and_levels_name_the_same_tree():
    shape = TreeShape(((0,), (2,), (0, 1), (2, 0), (2, 3), (2, 0, 0), (2, 0, 1), (2, 3, 0)))
    assert shape.parents().tolist() == [-1, -1, 0, 1, 1, 3, 3, 4]
    assert shape.expanded == ((0,), (2,), (2, 0), (2, 3))
    first, second, third = shape.levels()
    assert (first.best, first.pick.tolist(), first.behind.tolist(), first.expand.tolist()) == (3, [0, 2], [], [0, 1])
    assert (second.best, second.pick.tolist(), second.behind.tolist(), second.expand.tolist()) == (4, [1, 4, 7], [-1, -1], [1, 2])
    assert (third.best, third.pick.tolist(), third.behind.tolist(), third.expand.tolist()) == (2, [0, 1, 2], [1, 1], [])


@pytest.mark.parametrize("paths", [(), ((0, 0),), ((0,), (0,)), ((1,), (0,)), ((0,), (0, -1))])
def test_what_is_no_tree_is_refused(paths):
    with pytest.raises(ValueError, match="paths"):
        TreeShape(paths)


@pytest.fixture(scope="module")
def net(tiny_llama):
    """Knows the answers of `requests_for` a little; says 240 of the 320 tokens."""
    torch.manual_seed(1)
    ids = torch.arange(tiny_llama.vocab)
    vocabulary = DraftVocabulary(ids[ids % 4 != 3], tiny_llama.vocab)
    net = Eagle3(taps=[0, 1, 3], draft_vocab=len(vocabulary.ids)).build(tiny_llama, vocabulary)
    overfit(tiny_llama, net, plain_of(tiny_llama, requests_for(tiny_llama)).values(), steps=15)
    return net.eval()


@torch.no_grad()
def stepped_ranks(target, net, rollout, anchor, depth, ranks):
    """Ranks of the tokens behind one anchor, by committing its context and stepping the true tokens one by one."""
    ids = rollout.ids[None]
    features = first(target.read_packed(one_chat(rollout.ids, rollout.prompt_len), net.needs.taps), anchor)
    state = net.begin(1, 128, depth)
    hidden = net.commit(state, None, features, ids[:, 1 : anchor + 1], torch.tensor([anchor]), 128)
    found = []
    for d in range(1, depth + 1):
        if anchor + d >= ids.shape[1]:
            break
        order = net.speakable_V[net.logits(hidden, ids[0, anchor + d - 1 : anchor + d])[0].argsort(descending=True)].tolist()
        token = int(ids[0, anchor + d])
        found.append(min(order.index(token), ranks) if token in order else ranks)
        hidden = net.step(state, ids[:, anchor + d, None], torch.tensor([[d - 2]]))[:, 0]
    return found


def test_measured_acceptance_equals_a_loop(tiny_llama, net):
    depth, ranks = 3, 4
    requests = [*requests_for(tiny_llama)[:4], Request("short", (5, 6, 7), 2), Request("shortest", (9, 8), 1)]
    right, reached = torch.zeros(depth, ranks, dtype=torch.long), [0] * depth
    for rollout in plain_of(tiny_llama, requests).values():
        table = ranks_of(tiny_llama, net, rollout, depth, ranks)
        for anchor in range(rollout.prompt_len, len(rollout.ids)):
            found = stepped_ranks(tiny_llama, net, rollout, anchor, depth, ranks)
            assert table[anchor, : len(found)].tolist() == found
            for d, rank in enumerate(found):
                reached[d] += 1
                if rank == ranks:
                    break
                right[d, rank] += 1
    acceptance = calibrate(tiny_llama, net, requests, depth, ranks, slots=3)
    assert acceptance.right == right.tolist() and acceptance.reached == reached
    assert sum(acceptance.right[2]) > 10 and len({tuple(row) for row in acceptance.right}) == 3
    shares = acceptance.shares
    assert shares[1][0] == right[1, 0] / reached[1]
    assert acceptance.tree(6) == grow(shares, 6)


def test_acceptance_is_kept_and_belongs_to_one_drafter(tiny_llama, net, tmp_path):
    acceptance = calibrate(tiny_llama, net, requests_for(tiny_llama)[:2], 2, 3)
    file = tmp_path / "drafter" / "acceptance.json"
    acceptance.save(file)
    assert Acceptance.load(file, net) == acceptance
    assert list(file.parent.iterdir()) == [file]
    with torch.no_grad():
        net.norm.weight[0] += 1
    other = fingerprint(net)
    with pytest.raises(UserError, match="measured with another drafter; delete it"):
        Acceptance.load(file, net)
    with torch.no_grad():
        net.norm.weight[0] -= 1
    assert other != fingerprint(net)
    record = json.loads(file.read_text())
    for bad in (record | {"right": [[1]]}, record | {"reached": [0, 0]}, {"right": []}, record | {"right": 3}, [1]):
        file.write_text(json.dumps(bad))
        with pytest.raises(UserError, match="not a measured acceptance; delete it"):
            Acceptance.load(file, net)
    file.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        Acceptance.load(file, net)
    with pytest.raises(UserError, match="missing"):
        Acceptance.load(tmp_path / "nowhere.json", net)


def test_nothing_to_measure_is_refused(tiny_llama, net):
    with pytest.raises(UserError, match="no token to guess"):
        calibrate(tiny_llama, net, [Request("a", (5, 6, 7), 1)], 2, 2)
    with pytest.raises(UserError, match="none of the drafter's first guesses was right in 7 places"):
        Acceptance([[0, 0]], [7], "").tree(4)


def test_ranks_that_no_tree_can_have_are_not_measured(tiny_llama):
    words = DraftVocabulary(torch.arange(10, 13), tiny_llama.vocab)
    small = Eagle3(taps=[0, 1, 3], draft_vocab=3).build(tiny_llama, words)
    acceptance = calibrate(tiny_llama, small, requests_for(tiny_llama)[:2], 2, 8)
    assert [len(row) for row in acceptance.right] == [3, 3]


def test_every_small_tree_is_counted_once():
    assert len(all_trees(2, 2, 2)) == len(list(itertools.combinations(range(2), 2))) + 4
