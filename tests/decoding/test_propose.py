"""What is proposed, against slow and plain ways to find the same: lists of tokens, sets of paths, a drafter stepped along each path."""

import pytest
import torch
from decoding.verify_cases import random_tree
from tiny import first

from drafttrain.decoding.merge import merged
from drafttrain.decoding.methods import Chain, Graft, Method, Tree, _FixedTree
from drafttrain.decoding.propose_merged import MergedProposer, RoutedProposer
from drafttrain.decoding.propose_ngram import NGramProposer
from drafttrain.decoding.propose_recycling import RecyclingProposer, assumed_shape
from drafttrain.decoding.propose_static import StaticTreeProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.proposer import chain_of
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.tree import check
from drafttrain.decoding.tree_shape import TreeShape
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.types import Features, Proposal
from drafttrain.vocab import DraftVocabulary

GREEDY, LENGTHS = Sampling(), (9, 4, 12)


def drafter(target, seed, words=None, taps=(0, 1, 3)):
    torch.manual_seed(seed)
    vocabulary = (
        DraftVocabulary.full(target.vocab) if words is None else DraftVocabulary(torch.arange(40, 40 + words), target.vocab)
    )
    net = Eagle3(taps=list(taps), draft_vocab=words).build(target, vocabulary).eval()
    with torch.no_grad():
        net.lm_head.weight.mul_(3)
    return net


def texts(target):
    """Three rows with an anchor at 8, 3 and 11."""
    ids = torch.randint(3, target.vocab, (3, 64), generator=torch.Generator().manual_seed(0))
    return ids, torch.tensor(LENGTHS) - 1


@torch.no_grad()
def propose(target, proposer, ids=None):
    own, length = texts(target)
    ids = own if ids is None else ids
    read = [target.read_packed(one_chat(row[:12], 2), proposer.taps) for row in ids]
    features = Features(torch.cat([f.taps_BTAD for f in read]), torch.cat([f.final_BTD for f in read]))
    proposer.begin(3, 64)
    proposer.admit(torch.arange(3), ids, length, features, 64)
    proposal = proposer.propose(ids, length, torch.arange(3), 64)
    check(proposal)
    assert proposal.tokens_BN.shape == (3, proposer.nodes)
    return proposal


def paths_of(proposal: Proposal, row: int) -> list[tuple[int, ...] | None]:
    """The text of each node, None for those that do not exist."""
    found: list[tuple[int, ...] | None] = []
    for n, (token, parent) in enumerate(zip(proposal.tokens_BN[row].tolist(), proposal.parents_BN[row].tolist(), strict=True)):
        above = () if parent < 0 else found[parent]
        exists = proposal.valid_BN is None or bool(proposal.valid_BN[row, n])
        found.append((*above, token) if exists and above is not None else None)
    return found


def there(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    return {path for path in paths_of(proposal, row) if path is not None}


@torch.no_grad()
def ranked(target, net, row, path):
    """The drafter's logits behind a path, by stepping that path alone: (tokens from the best down, log-probabilities)."""
    ids, length = texts(target)
    n = int(length[row])
    features = first(target.read_packed(one_chat(ids[row, :12], 2), net.needs.taps), n)
    state = net.begin(1, 64, max(len(path), 1))
    hidden = net.commit(state, None, features, ids[row, None, 1 : n + 1], torch.tensor([n]), 64)
    for number, token in enumerate(path):
        hidden = net.step(state, torch.tensor([[token]]), torch.tensor([[number - 1]]))[:, 0]
    logp = net.logits(hidden, ids[:1, 0])[0].log_softmax(-1)
    order = logp.argsort(descending=True)
    return net.speakable_V[order].tolist(), logp[order].tolist()


# ---- trained drafters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [None, 9])
def test_a_static_tree_says_the_ranks_of_its_paths(any_target, words):
    net = drafter(any_target, 2, words)
    shape = TreeShape(((0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (0, 2, 0), (4, 1, 0), (4, 1, 3)))
    proposer = StaticTreeProposer(net, shape)
    assert proposer.stepped == 4 and not proposer.chain and proposer.drafts == 3
    proposal = propose(any_target, proposer)
    for row in range(3):
        said: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for path, text in zip(shape.paths, paths_of(proposal, row), strict=True):
            said[path] = (*said[path[:-1]], ranked(any_target, net, row, said[path[:-1]])[0][path[-1]])
            assert text == said[path]


def test_a_static_chain_is_the_greedy_chain(tiny_llama):
    net = drafter(tiny_llama, 2)
    chain = StaticTreeProposer(net, TreeShape(((0,), (0, 0), (0, 0, 0))))
    assert chain.chain
    greedy = Chain(3).proposer(net, GREEDY)
    assert torch.equal(propose(tiny_llama, chain).tokens_BN, propose(tiny_llama, greedy).tokens_BN)


def test_a_static_tree_wider_than_the_draft_vocabulary_is_refused(tiny_llama):
    with pytest.raises(UserError, match="asks for 7 guesses at one place, but the draft vocabulary has 5"):
        _FixedTree(((6,),)).proposer(drafter(tiny_llama, 0, 5), GREEDY)


def test_a_chain_ends_where_the_drafter_is_unsure(tiny_llama):
    net, ends = drafter(tiny_llama, 2), set()
    for least in (0.02, 0.2, 0.5):
        whole = propose(tiny_llama, Chain(5).proposer(net, GREEDY))
        proposal = propose(tiny_llama, Chain(5, least_confidence=least).proposer(net, GREEDY))
        assert torch.equal(proposal.tokens_BN, whole.tokens_BN) and whole.valid_BN is None
        for row in range(3):
            sure, text = 0.0, tuple(proposal.tokens_BN[row].tolist())
            for k in range(5):
                sure += ranked(tiny_llama, net, row, text[:k])[1][0]
                assert bool(proposal.valid_BN[row, k]) == (sure >= torch.tensor(least).log())
            ends.add(int(proposal.valid_BN[row].sum()))
    assert len(ends) > 2


def test_nodes_that_add_little_are_left_out_of_a_tree(tiny_llama):
    net, counts = drafter(tiny_llama, 2), set()
    whole = propose(tiny_llama, Tree(3, 4, 20).proposer(net, GREEDY))
    for least in (0.001, 0.02, 0.1):
        proposal = propose(tiny_llama, Tree(3, 4, 20, least_gain=least).proposer(net, GREEDY))
        for row in range(3):
            kept = set()
            for path in there(whole, row):
                tokens = [ranked(tiny_llama, net, row, path[:k]) for k in range(len(path))]
                gain = sum(logp[order.index(token)] for (order, logp), token in zip(tokens, path, strict=True))
                kept |= {path} if gain >= torch.tensor(least).log() else set()
            assert there(proposal, row) == kept
            counts.add(len(kept))
    assert len(counts) > 3


def test_a_row_gets_the_tree_of_the_surer_drafter(tiny_llama):
    nets = [drafter(tiny_llama, seed) for seed in (2, 3)]
    alone = [propose(tiny_llama, TreeProposer(net, 3, 3, 8)) for net in nets]
    routed = propose(tiny_llama, RoutedProposer([TreeProposer(net, 3, 3, 8, estimates=True) for net in nets]))
    chosen = set()
    for row in range(3):
        expected = []
        for net, proposal in zip(nets, alone, strict=True):
            total = 0.0
            for path in there(proposal, row):
                tokens = [ranked(tiny_llama, net, row, path[:k]) for k in range(len(path))]
                total += float(
                    torch.tensor(sum(logp[order.index(token)] for (order, logp), token in zip(tokens, path, strict=True))).exp()
                )
            expected.append(total)
        best = int(expected[1] > expected[0])
        assert there(routed, row) == there(alone[best], row)
        chosen.add(best)
    assert chosen == {0, 1}


# ---- without a drafter ---------------------------------------------------------------------------------------------------


def copied(text: list[int], drafts: int, longest: int, trust: float) -> list[int]:
    """What an n-gram model with back-off drafts, by comparing lists."""
    text, found, vouched = list(text), [], None
    for k in range(1, drafts + 1):
        best = (0, -1)
        for end in range(len(text) - 1):  # a match may end at any token before the last
            size = 0
            while size < longest and size <= end and text[end - size] == text[len(text) - 1 - size]:
                size += 1
            best = max(best, (size, end))
        vouched = best[0] if vouched is None else vouched
        if not best[0] or k > trust * vouched:
            break
        found.append(text[best[1] + 1])
        text.append(found[-1])
    return found


@pytest.mark.parametrize(("longest", "trust"), [(1, 1.0), (3, 1.0), (3, 2.5), (5, 0.5), (4, 100.0)])
def test_ngrams_are_those_of_a_search_through_lists(longest, trust):
    g = torch.Generator().manual_seed(longest)
    proposer, seen = NGramProposer(6, longest, trust), set()
    for words in (2, 4, 12, 60):
        ids = torch.randint(words, (40, 50), generator=g)
        length = torch.randint(0, 40, (40,), generator=g)
        proposal = proposer.propose(ids, length, length, 48)
        check(proposal)
        for row, n in enumerate(length.tolist()):
            wanted = copied(ids[row, : n + 1].tolist(), 6, longest, trust)
            assert proposal.tokens_BN[row][proposal.valid_BN[row]].tolist() == wanted
            assert proposal.valid_BN[row].long().diff().max() <= 0
            seen.add(len(wanted))
    assert {0, min(6, int(longest * trust))} <= seen


def test_recycling_says_what_the_target_guessed_last():
    """Against a dictionary that is told the same."""
    V, k, g = 12, 3, torch.Generator().manual_seed(0)
    shape = assumed_shape(14, k, 3)
    proposer, known = RecyclingProposer(shape, V, torch.device("cpu")), {}
    sizes = set()
    for _ in range(30):
        anchor = torch.randint(V, (2, 1), generator=g)
        proposal = proposer.propose(anchor, torch.zeros(2, dtype=torch.long), torch.zeros(2), 64)
        check(proposal)
        for row in range(2):
            said: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
            for path in shape.paths:
                above = said.get(path[:-1])
                last = None if above is None else (int(anchor[row]), *above)[-1]
                if last in known:
                    said[path] = (*above, known[last][path[-1]])
            said.pop(())
            assert there(proposal, row) == set(said.values())
            sizes.add(len(said))
        ids = torch.cat([anchor, proposal.tokens_BN], dim=1)[:, :3]
        logits = torch.randn(2, 3, V, generator=g)
        proposer.observe(logits, ids)
        for row in range(2):
            for place in range(3):
                known[int(ids[row, place])] = logits[row, place].argsort(descending=True)[:k].tolist()
    assert {0, 14} <= sizes and len(sizes) > 3


# ---- merging -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_merged_tree_holds_the_paths_of_both_and_each_once(seed):
    first, second = random_tree(60, 7, 3, seed, holes=seed % 2 == 0), random_tree(60, 9, 3, seed + 50, holes=seed % 3 == 0)
    both = merged(first, second, 9)
    check(both)
    shared = 0
    for row in range(60):
        found = [path for path in paths_of(both, row) if path is not None]
        assert len(set(found)) == len(found)
        assert set(found) == there(first, row) | there(second, row)
        assert paths_of(both, row)[:7] == paths_of(first, row)
        shared += len(there(first, row) & there(second, row))
    assert shared > 30


def test_one_proposal_in_another_adds_nothing():
    chain = chain_of(torch.tensor([[5, 6, 7], [5, 5, 5]]))
    assert not merged(chain, chain, 3).valid_BN[:, 3:].any()
    longer = merged(chain, chain_of(torch.tensor([[5, 6, 7, 8], [5, 5, 6, 5]])), 4)
    assert longer.valid_BN[:, 3:].tolist() == [[False, False, False, True], [False, False, True, True]]
    assert longer.parents_BN[:, 3:].tolist() == [[-1, 0, 1, 2], [-1, 0, 1, 5]]


def test_draws_are_not_merged():
    drawn = Proposal(torch.tensor([[1]]), torch.tensor([[-1]]), None, torch.full((1, 2, 3), 1 / 3))
    with pytest.raises(ValueError, match="drawn drafts cannot be merged"):
        merged(drawn, chain_of(torch.tensor([[1]])), 1)


def test_a_graft_is_the_tree_and_the_branch(tiny_llama):
    net = drafter(tiny_llama, 2)
    ids, length = texts(tiny_llama)
    ids[0, :9] = torch.tensor([5, 6, 7, 8, 9, 5, 6, 7, 8])  # the last four words stood there before
    method = Graft(3, 3, 8, copied=4, longest=3)
    tree, branch = propose(tiny_llama, TreeProposer(net, 3, 3, 8), ids), propose(tiny_llama, NGramProposer(4, 3, 2.0), ids)
    both = propose(tiny_llama, method.proposer(net, GREEDY), ids)
    for row in range(3):
        assert there(both, row) == there(tree, row) | there(branch, row)
    assert (9, 5, 6, 7) in there(both, 0)
    assert length.tolist() == [8, 3, 11]


def test_drafters_with_other_taps_are_handed_their_own(any_target):
    nets = [drafter(any_target, 2), drafter(any_target, 3, taps=(0, 2)), drafter(any_target, 4, words=20, taps=(1,))]
    methods: list[Method] = [Tree(3, 3, 8), Tree(2, 4, 6), Chain(4)]
    alone = [propose(any_target, method.proposer(net, GREEDY)) for method, net in zip(methods, nets, strict=True)]
    proposer = MergedProposer([method.proposer(net, GREEDY) for method, net in zip(methods, nets, strict=True)])
    assert proposer.taps == (0, 1, 2, 3) and proposer.nodes == 18 and proposer.drafts == 4
    both = propose(any_target, proposer)
    for row in range(3):
        assert there(both, row) == set().union(*(there(proposal, row) for proposal in alone))


def test_proposers_that_do_not_fit_together_are_refused(tiny_llama):
    nets = [drafter(tiny_llama, seed) for seed in (2, 3)]
    with pytest.raises(ValueError, match="trees of one size"):
        RoutedProposer([TreeProposer(nets[0], 3, 3, 8), TreeProposer(nets[1], 3, 3, 7)])
    with pytest.raises(ValueError, match="nothing to choose"):
        MergedProposer([TreeProposer(nets[0], 3, 3, 8)])
