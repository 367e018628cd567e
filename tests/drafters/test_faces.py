"""The two faces of every drafter against each other, and the contract of what a draft may see. A new drafter adds a line to `DRAFTERS`."""

from dataclasses import replace

import pytest
import torch
from drafters.test_eagle3 import chat
from tiny import first

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.tied_block import TiedBlockNet
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout
from drafttrain.types import Features, Sequences
from drafttrain.vocab import DraftVocabulary

SMALL = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 40}
"""Sizes of a language model of its own."""
DRAFTERS = {
    "eagle3": Eagle3(taps=[0, 1, 3], depth=4),
    "eagle3.1": Eagle3(taps=[0, 1, 3], depth=4, fc_norm=True, norm_output=True),
    "eagle3 low-rank": Eagle3(taps=[1, 2], depth=4, head_rank=5),
    "eagle3 window": Eagle3(taps=[0, 1, 3], depth=4, window=5),
    "eagle3 window shorter than a draft": Eagle3(taps=[0, 1, 3], depth=4, window=2),
    "eagle1": Eagle(depth=1),
    "hass": Eagle(depth=3, bias=True),
    "medusa": Medusa(heads=4, layers=2),
    "medusa own heads": Medusa(heads=4, own_heads=True),
    "hydra": Hydra(heads=4),
    "hydra++": Hydra(heads=4, layers=3, prefix=True, dropout=0.2),
    "hydra own heads": Hydra(heads=4, own_heads=True),
    "dflash": DFlash(block=5, layers=2, taps=[0, 2], mask_token=319),
    "dflash window": DFlash(block=6, layers=2, window=7, mask_token=319),
    "dflash2": DFlash2(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6, candidates=4),
    "dspark": DSpark(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6),
    "p-eagle": PEagle(taps=[0, 1, 3], depth=5, layers=3, mask_token=319),
    "p-eagle normed taps": PEagle(taps=[1, 2], depth=4, layers=1, mask_token=319, fc_norm=True),
    "independent": Independent(**SMALL, layers=2, depth=4, tied=False),
    "independent qk-norm": Independent(**SMALL, layers=1, depth=4, tied=False, qk_norm=True),
}


def shaken(net, seed=0):
    """Random weights everywhere: a fresh head is the identity, which would prove little."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(torch.randn(weight.shape, generator=g) * (0.3 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.1))
    return net.eval()


@pytest.fixture(params=sorted(DRAFTERS))
def config(request):
    return DRAFTERS[request.param]


def net_for(target, config):
    torch.manual_seed(0)
    ids = torch.arange(target.vocab)
    return shaken(config.build(target, DraftVocabulary(ids[ids % 5 != 4], target.vocab)))


def test_every_drafter_is_here():
    assert {type(config).__name__ for config in DRAFTERS.values()} == set(known_drafters())


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_coverage_that_is_no_share_is_refused(config, share):
    with pytest.raises(UserError, match="least_coverage is .*, but is a share"):
        replace(config, least_coverage=share)


def drafted_of(net, target, sequences, depth=4):
    features = target.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences, depth)
    return features, layout, net.rows(sequences, features, layout)


def committed(net, features, tokens, counts, nodes):
    state = net.begin(len(counts), 40, nodes)
    return state, net.commit(state, None, features, tokens, counts, extent=40)


def test_training_forward_equals_decoding_step_by_step(any_target, config):
    """States and logits of every scored element against a drafter that is fed the same prefix one call at a time."""
    net = net_for(any_target, config)
    sequences = chat("0000111111110001111100", documents="0" * 14 + "1" * 6 + "..")
    features, layout, drafted = drafted_of(net, any_target, sequences)
    trained = net.logits(drafted.hidden_NH, drafted.prev_N)
    document = sequences.document_BT[0]
    checked = 0
    for anchor in layout.anchor_N.unique().tolist():
        start = int((document == document[anchor]).nonzero()[0])
        # Row 1 of the state decodes something else at another length: neighbours must not matter.
        parts = []
        for x in (features.taps_BTAD[0, start:anchor], features.final_BTD[0, start:anchor]):
            pad = torch.zeros(3, *x.shape[1:])
            parts.append(torch.stack([torch.cat([x, pad]), torch.cat([pad, x])]))
        T = anchor - start
        tokens = torch.zeros(2, T + 3, dtype=torch.long)
        tokens[0, :T] = sequences.ids_BT[0, start + 1 : anchor + 1]
        state, hidden = committed(net, Features(*parts), tokens, torch.tensor([T, T + 2]), 3)
        hidden = hidden[0]
        for depth in range(1, 5):
            if depth > 1:
                token = sequences.ids_BT[0, anchor + depth - 1] if anchor + depth - 1 < 22 else torch.tensor(0)
                hidden = net.step(state, torch.stack([token, torch.tensor(7)])[:, None], torch.full((2, 1), depth - 3))[0, 0]
            for n in ((layout.anchor_N == anchor) & (layout.depth_N == depth)).nonzero()[:, 0].tolist():
                torch.testing.assert_close(drafted.hidden_NH[n], hidden, atol=1e-5, rtol=1e-4)
                prev_1 = sequences.ids_BT[0, anchor + depth - 1][None]
                torch.testing.assert_close(trained[n], net.logits(hidden[None], prev_1)[0], atol=1e-4, rtol=1e-4)
                assert drafted.prev_N[n] == prev_1
                checked += 1
    assert checked == len(layout.depth_N) > 20
    assert float(trained.detach().std(0).mean()) > 1e-2  # the comparison is not one of constants


def test_a_head_is_called_frozen_where_nothing_of_it_learns(tiny_llama, config):
    """Behind one that is called so, the states alone are given gradients (losses.py)."""
    net = net_for(tiny_llama, config)
    _, _, drafted = drafted_of(net, tiny_llama, chat("0000111111110001111100"))
    assert drafted.frozen_head == (not net.logits(drafted.hidden_NH.detach(), drafted.prev_N).requires_grad)


def test_committing_in_pieces_equals_committing_at_once(tiny_llama, config):
    net = net_for(tiny_llama, config)
    g = torch.Generator().manual_seed(0)
    D = tiny_llama.hidden
    features = Features(torch.randn(1, 12, len(net.needs.taps), D, generator=g), torch.randn(1, 12, D, generator=g))
    tokens = torch.randint(3, tiny_llama.vocab, (1, 12), generator=g)
    _, whole = committed(net, features, tokens, torch.tensor([12]), 2)
    state = net.begin(1, 40, 2)
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 12)):
        padded = [
            torch.cat([x[:, start:stop], torch.full_like(x[:, :3], 9.0)], dim=1) for x in (features.taps_BTAD, features.final_BTD)
        ]
        padded_tokens = torch.cat([tokens[:, start:stop], torch.full((1, 3), 5)], dim=1)
        hidden = net.commit(state, None, Features(*padded), padded_tokens, torch.tensor([stop - start]), extent=40)
        net.step(state, torch.tensor([[11]]), torch.tensor([[-1]]))  # drafted and rejected: must leave no trace
        net.step(state, torch.tensor([[12]]), torch.tensor([[0]]))
    torch.testing.assert_close(hidden, whole, atol=1e-5, rtol=1e-4)


def test_branches_of_a_tree_equal_chains_of_their_own(tiny_llama, config):
    """Every node of a random tree, stepped level by level, against the chain from the anchor to it, stepped token by token."""
    net, batch, nodes = net_for(tiny_llama, config), 2, 9
    g = torch.Generator().manual_seed(1)
    counts, longest, D = torch.tensor([7, 11]), 11, tiny_llama.hidden
    features = Features(
        torch.randn(batch, longest, len(net.needs.taps), D, generator=g), torch.randn(batch, longest, D, generator=g)
    )
    context = torch.randint(3, tiny_llama.vocab, (batch, longest), generator=g)
    tokens = torch.randint(3, tiny_llama.vocab, (batch, nodes), generator=g)
    parents = torch.tensor([[-1, -1, -1, 0, 0, 2, 3, 3, 5], [-1, -1, -1, 2, 1, 1, 5, 4, 4]])  # three levels of three
    state, _ = committed(net, features, context, counts, nodes)
    got = torch.cat([net.step(state, tokens[:, i : i + 3], parents[:, i : i + 3]) for i in (0, 3, 6)], dim=1)
    for n in range(nodes):
        paths = []
        for b in range(batch):
            path, node = [], n
            while node >= 0:
                path.insert(0, node)
                node = int(parents[b, node])
            paths.append(path)
        state, _ = committed(net, features, context, counts, nodes)
        for depth in range(len(paths[0])):
            step = torch.stack([tokens[b, paths[b][depth]] for b in range(batch)])[:, None]
            wanted = net.step(state, step, torch.full((batch, 1), depth - 1))
        torch.testing.assert_close(got[:, n], wanted[:, 0], atol=1e-5, rtol=1e-4)


def test_rows_that_leave_and_come_back(tiny_llama, config):
    """Keeping rows 2 and 0 of three, then widening again, leaves what those two remember untouched."""
    net, D = net_for(tiny_llama, config), tiny_llama.hidden
    g = torch.Generator().manual_seed(2)
    features = Features(torch.randn(3, 6, len(net.needs.taps), D, generator=g), torch.randn(3, 6, D, generator=g))
    tokens, counts = torch.randint(3, tiny_llama.vocab, (3, 6), generator=g), torch.tensor([6, 4, 5])
    state, _ = committed(net, features, tokens, counts, 2)
    wanted = net.step(state, torch.tensor([[7], [8], [9]]), torch.full((3, 1), -1))
    state, _ = committed(net, features, tokens, counts, 2)
    state.keep(torch.tensor([2, 0]))
    state.forget(40)
    got = net.step(state, torch.tensor([[9], [7]]), torch.full((2, 1), -1))
    torch.testing.assert_close(got, wanted[[2, 0]], atol=1e-5, rtol=1e-4)
    state.widen()
    hidden = net.commit(
        state,
        torch.tensor([1]),
        first(Features(features.taps_BTAD[:1], features.final_BTD[:1]), 0 + 6),
        tokens[:1],
        counts[:1],
        40,
    )
    assert state.length_B.tolist()[:1] == [5] and hidden.shape[0] == 1


def test_a_draft_sees_rows_before_its_anchor_only(tiny_llama, config):
    """Altering the features of any row >= A leaves drafts from A alone; altering row A-1, or the anchor token, does not."""
    net = net_for(tiny_llama, config)
    sequences = chat("0001111111")
    features, layout, drafted = drafted_of(net, tiny_llama, sequences, 3)
    anchor = 5
    mine = layout.anchor_N == anchor
    before = drafted.hidden_NH[mine]
    depth = layout.depth_N[mine]
    reads_anchor, reads_drafts = (
        not isinstance(config, Medusa),
        not isinstance(config, Medusa | DFlash | DFlash2 | DSpark | PEagle),
    )

    def altered(rows=None, token=None):
        taps, final, ids = features.taps_BTAD.clone(), features.final_BTD.clone(), sequences.ids_BT.clone()
        if rows is not None:
            taps[:, rows] += 1.0
            final[:, rows] += torch.linspace(-1, 1, final.shape[-1])
        if token is not None:
            ids[0, token] += 1
        changed = Sequences(ids, sequences.supervised_BT, sequences.position_BT, sequences.document_BT)
        return net.rows(changed, Features(taps, final), layout).hidden_NH[mine]

    assert torch.equal(altered(rows=slice(anchor, None)), before)
    reads_features = not isinstance(config, Independent)
    assert torch.allclose(altered(rows=slice(anchor - 1, anchor)), before, atol=1e-3) != reads_features
    assert torch.equal(altered(token=anchor + 3), before)  # depth 3 reads A+2 last
    assert torch.allclose(altered(token=anchor), before, atol=1e-3) != reads_anchor
    # A token inside the draft is read by deeper steps only.
    deeper = altered(token=anchor + 1)
    assert torch.equal(deeper[depth == 1], before[depth == 1])
    assert torch.allclose(deeper[depth == 2], before[depth == 2], atol=1e-3) != reads_drafts


def test_drafts_do_not_see_each_other(tiny_llama, config):
    """Drafts of some anchors are the same whether or not their neighbours, whose text overlaps theirs, draft as well."""
    net = net_for(tiny_llama, config)
    sequences = chat("000111111111")
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    keep_BT = torch.zeros(1, 12, dtype=torch.bool)
    keep_BT[0, [4, 7]] = True
    every, some = (chain_layout(sequences, 3, net.speaks_V, keep) for keep in (None, keep_BT))
    mine = keep_BT.flatten()[every.anchor_N]
    got, wanted = net.rows(sequences, features, some).hidden_NH, net.rows(sequences, features, every).hidden_NH[mine]
    assert set(some.anchor_N.tolist()) == {4, 7} and len(got) < len(every.anchor_N)
    torch.testing.assert_close(got, wanted[_match(every, mine, some)], atol=1e-5, rtol=1e-4)


def _match(every, mine, some):
    """Where each element of `some` stands among those of `every` that are `mine`."""
    pairs = list(zip(every.anchor_N[mine].tolist(), every.depth_N[mine].tolist(), strict=True))
    return [pairs.index(pair) for pair in zip(some.anchor_N.tolist(), some.depth_N.tolist(), strict=True)]


def test_packed_documents_do_not_see_each_other(tiny_llama, config):
    net = net_for(tiny_llama, config)
    sequences = chat("0011110111", documents="0000001111")
    _, layout, packed = drafted_of(net, tiny_llama, sequences, 3)
    alone = chat("0111", ids=sequences.ids_BT[0, 6:].tolist())
    _, alone_layout, single = drafted_of(net, tiny_llama, alone, 3)
    mine = layout.anchor_N >= 6
    torch.testing.assert_close(packed.hidden_NH[mine], single.hidden_NH, atol=1e-5, rtol=1e-4)
    assert (layout.anchor_N[mine] - 6).tolist() == alone_layout.anchor_N.tolist()


def test_saved_and_loaded_is_the_same_net(tiny_llama, config, tmp_path):
    net = net_for(tiny_llama, config)
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    loaded, _ = load_drafter(tmp_path / "best", tiny_llama)
    assert loaded.config == net.config and torch.equal(net.vocabulary.ids, loaded.vocabulary.ids)
    assert set(loaded.state_dict()) == set(net.state_dict())
    for name, value in net.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_nothing_of_the_target_is_trained_or_saved(tiny_llama, config):
    net = net_for(tiny_llama, config)
    of_target = {p.data_ptr() for p in tiny_llama.model.parameters()}
    assert not of_target & {p.data_ptr() for p in net.parameters()}
    assert not any("embed" in name or "target" in name for name in net.state_dict())


def test_the_weights_of_a_word_are_counted(tiny_llama, config):
    """`per_word` and `words` against nets of one and of two words."""
    one, two = (config.build(tiny_llama, DraftVocabulary(torch.arange(n), tiny_llama.vocab)) for n in (1, 2))
    more = sum(p.numel() for p in two.parameters()) - sum(p.numel() for p in one.parameters())
    frozen = tiny_llama.hidden if isinstance(one, TiedBlockNet) or not one.words else 0  # where the target's head speaks
    assert one.per_word == more + frozen > 0
    assert bool(one.words) == (more > 0)


def test_a_fresh_head_says_what_the_target_says(tiny_llama):
    """Heads begin as the identity on the final state: depth 1 of Medusa and Hydra is then the target's own distribution of the anchor."""
    sequences = chat("0001111111")
    for config in (Medusa(heads=2, layers=2), Hydra(heads=2, layers=2), Medusa(heads=2, own_heads=True)):
        net = config.build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)).eval()
        features, layout, drafted = drafted_of(net, tiny_llama, sequences, 2)
        wanted = tiny_llama.logits(features.final_BTD[0, layout.anchor_N - 1])
        torch.testing.assert_close(net.logits(drafted.hidden_NH, drafted.prev_N), wanted, atol=1e-4, rtol=1e-4)


def test_a_low_rank_head_begins_as_the_best_of_its_rank(tiny_llama):
    """Against numpy's singular values: the error of the nearest matrix of rank r is what they leave out (Eckart and Young)."""
    weight = tiny_llama.head_weight.double()
    singular = torch.linalg.svdvals(weight)
    for rank in (4, 16, 31):
        net = Eagle3(taps=[1], head_rank=rank).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
        error = (net.lm_head.weight.double() - weight).norm()
        torch.testing.assert_close(error, singular[rank:].pow(2).sum().sqrt(), atol=1e-3, rtol=1e-3)


def test_noise_is_for_training_alone(tiny_llama):
    net = net_for(tiny_llama, Eagle(noise=0.5))
    sequences = chat("0001111111")
    _, _, quiet = drafted_of(net, tiny_llama, sequences, 1)
    net.train()
    _, _, loud = drafted_of(net, tiny_llama, sequences, 1)
    assert not torch.equal(loud.hidden_NH, quiet.hidden_NH)
    assert torch.equal(loud.teacher_MD, quiet.teacher_MD)  # what is learned is not shaken


def test_hass_learns_each_step_alone(tiny_llama):
    """The gradient of step 2 is that of a net whose step-1 state was given as a constant: none reaches step 1 through the state."""
    net = net_for(tiny_llama, Eagle(depth=2, noise=0.0))
    sequences = chat("0001111111")
    features = tiny_llama.read_packed(sequences, ())
    leaf = Features(features.taps_BTAD, features.final_BTD.clone().requires_grad_())
    layout = net.layout(sequences, 2)
    drafted = net.rows(sequences, leaf, layout)
    last = drafted.hidden_NH[layout.depth_N == 2]
    anchor = int(layout.anchor_N[layout.depth_N == 2][0])
    (grad,) = torch.autograd.grad(last[0].sum(), leaf.final_BTD)
    # Only through the context's keys and values; with feedback it would be larger.
    net.alone = False
    drafted = net.rows(sequences, leaf, layout)
    (fed,) = torch.autograd.grad(drafted.hidden_NH[layout.depth_N == 2][0].sum(), leaf.final_BTD)
    assert float((grad[0, anchor - 1] - fed[0, anchor - 1]).abs().max()) > 1e-3
    net.alone = True


def test_drafts_beyond_the_last_head_are_refused(tiny_llama):
    net = net_for(tiny_llama, Hydra(heads=2))
    with pytest.raises(UserError, match="this Hydra drafts at most 2"):
        net.layout(chat("00011111"), 3)
    with pytest.raises(UserError, match="a round asks for 3 drafts"):
        ChainProposer(net, 3)
    assert ChainProposer(net, 2).drafts == 2
    with pytest.raises(UserError, match="heads is 0"):
        Medusa(heads=0)
    with pytest.raises(UserError, match="dropout is 1.0"):
        Hydra(dropout=1.0)
    for noise in (-1, float("inf")):
        with pytest.raises(UserError, match="noise is"):
            Eagle(noise=noise)
    with pytest.raises(UserError, match="head_rank is 32, but this target's states are 32 wide"):
        Eagle3(taps=[1], head_rank=32).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    with pytest.raises(UserError, match="head_rank is 0"):
        Eagle3(head_rank=0)
