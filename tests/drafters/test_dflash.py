"""DFlash: anchors drawn from the data alone, the token for masks, taps, what blocks may be; the block against a dense loop over pairs."""

import pytest
import torch
from drafters.test_eagle3 import chat
from drafters.test_faces import net_for
from tiny import COMMON, build_tokenizer
from tiny_run import logged, make_run, ragged_chats, start, write_store
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.divergences import HardCrossEntropy
from drafttrain.drafters.block import spread_taps
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.mask_token import mask_token
from drafttrain.errors import UserError
from drafttrain.layouts import BlockRule, chain_layout, some_anchors
from drafttrain.ops.blocks import attend_blocks, attend_blocks_fused
from drafttrain.position_weights import Exponential
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.types import Features, Sequences
from drafttrain.vocab import DraftVocabulary

CONFIG = DFlash(block=5, layers=2, taps=[0, 2], mask_token=319, anchors=4)


def test_anchors_are_drawn_by_the_number_of_the_row_alone():
    sequences = chat("0001111111111111000111111", documents="0" * 16 + "1" * 9)
    every = set(chain_layout(sequences, 4, torch.ones(400, dtype=torch.bool)).anchor_N.tolist())
    seen = set()
    for row in range(40):
        drawn = some_anchors(sequences, 4, [(7, row)])
        again = some_anchors(sequences, 4, [(7, row)])
        found = set(drawn[0].nonzero()[:, 0].tolist())
        assert torch.equal(drawn, again) and len(found) == 4 and found <= every
        seen |= found
    assert seen == every  # each has its turn
    assert some_anchors(sequences, 999, [(7, 0)]).sum() == len(every)


def test_the_layout_holds_the_drawn_anchors_and_all_of_them_when_measured(tiny_llama):
    net = net_for(tiny_llama, CONFIG)
    sequences = chat("0001111111111111")
    drawn, every = net.layout(sequences, numbers=[(1, 2)]), net.layout(sequences)
    assert len(drawn.anchor_N.unique()) <= 4 < len(every.anchor_N.unique())
    assert len(drawn.dropped_K) == len(every.dropped_K) == 4


@torch.no_grad()
def test_attention_of_blocks_equals_a_loop_over_pairs():
    g = torch.Generator().manual_seed(0)
    B, H, G, Q, S, T, D = 2, 4, 2, 3, 4, 6, 8

    def draw(*shape):
        return torch.randn(*shape, generator=g)

    query, key, value, own_key, own_value = (
        draw(B, H, Q, S, D),
        draw(B, G, T, D),
        draw(B, G, T, D),
        draw(B, G, Q, S, D),
        draw(B, G, Q, S, D),
    )
    visible = torch.rand(B, Q, S, T, generator=g) > 0.4
    visible[..., 0] = True
    own_visible = torch.ones(S, S, dtype=torch.bool).tril()
    got = attend_blocks(query, key, value, visible, own_key, own_value, own_visible)
    for b in range(B):
        for h in range(H):
            for q in range(Q):
                for s in range(S):
                    keys = [key[b, h // 2, t] for t in range(T) if visible[b, q, s, t]] + [
                        own_key[b, h // 2, q, r] for r in range(s + 1)
                    ]
                    values = [value[b, h // 2, t] for t in range(T) if visible[b, q, s, t]]
                    values += [own_value[b, h // 2, q, r] for r in range(s + 1)]
                    weights = torch.stack([query[b, h, q, s] @ k / D**0.5 for k in keys]).softmax(0)
                    wanted = (weights[:, None] * torch.stack(values)).sum(0)
                    torch.testing.assert_close(got[b, h, q, s], wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 4), (True, 3)])
def test_the_rule_of_blocks_as_a_loop_a_mask_and_a_kernel(causal, window):
    """The dense mask against a loop over all pairs, and the fused attention against the dense one, over packed documents."""
    g = torch.Generator().manual_seed(1)
    sequences = chat("0" * 24, documents="0" * 9 + "1" * 11 + "....")
    B, H, G, S, T, D = 1, 4, 2, 5, 24, 16
    row_BQ = torch.tensor([[0, 3, 4, 8, 9, 14, 19, 0]])
    rule = BlockRule(sequences, row_BQ, S, causal, window)
    context, own = rule.context().expand(-1, -1, S, -1), rule.own()
    document, position = sequences.document_BT[0], sequences.position_BT[0]
    for q, row in enumerate(row_BQ[0].tolist()):
        for s in range(S):
            for t in range(T):
                near = window is None or position[t] > position[row] + 1 + s - window
                assert bool(context[0, q, s, t]) == bool(t <= row and document[t] == document[row] and near)
            assert own[s].tolist() == [not causal or r <= s for r in range(S)]
    Q = row_BQ.shape[1]
    query, key, value = (torch.randn(B, n, *size, D, generator=g) for n, size in ((H, (Q, S)), (G, (T,)), (G, (T,))))
    own_key, own_value = (torch.randn(B, G, Q, S, D, generator=g) for _ in range(2))
    fused = attend_blocks_fused(query, key, value, own_key, own_value, rule.block_mask())
    torch.testing.assert_close(
        fused, attend_blocks(query, key, value, rule.context(), own_key, own_value, own), atol=1e-5, rtol=1e-4
    )


@torch.no_grad()
def test_a_chain_takes_all_slots_in_one_product_and_a_tree_their_marginals(tiny_llama):
    """The chain in one product against the path that steps; a tree's scores against sums of the slots' log-probabilities."""
    net = net_for(tiny_llama, CONFIG)
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    length = torch.tensor([7, 9])
    features = tiny_llama.read_packed(chat("0" * 2 + "1" * 10, ids=ids[0, :12].tolist()), net.needs.taps)
    both = Features(features.taps_BTAD[:, :9].repeat(2, 1, 1, 1), features.final_BTD[:, :9].repeat(2, 1, 1))

    def begun(proposer):
        proposer.begin(2, 64)
        proposer.admit(torch.arange(2), ids, length, both, 64)
        return proposer.propose(ids, length, torch.arange(2), 64)

    chain = ChainProposer(net, 4)
    at_once = begun(chain)
    net.parallel = False
    stepped = begun(ChainProposer(net, 4))
    net.parallel = True
    assert torch.equal(at_once.tokens_BN, stepped.tokens_BN)
    logp_BKV = net.logits(net.ahead(chain.state).flatten(0, 1), ids[:, :4].flatten()).unflatten(0, (2, 4)).log_softmax(-1)
    tree = TreeProposer(net, 4, 3, 12, estimates=True)
    proposal = begun(tree)
    for b in range(2):
        total = 0.0
        for n in range(12):
            score, node, depth = 0.0, n, []
            while node >= 0:
                depth.append(int(proposal.tokens_BN[b, node]))
                node = int(proposal.parents_BN[b, node])
            for k, token in enumerate(reversed(depth)):
                score += float(logp_BKV[b, k, net.vocabulary.ids.tolist().index(token)])
            total += 2.718281828459045**score
        assert float(tree.expected_B[b]) == pytest.approx(total, rel=1e-3)


def test_the_mask_is_a_row_that_no_text_uses(tiny_llama):
    with pytest.raises(UserError, match="neither a padding row"):
        mask_token(tiny_llama)  # its tokenizer fills the table, and all its special tokens are in use
    assert mask_token(tiny_llama, 300) == 300
    with pytest.raises(UserError, match="mask_token is 2, which the target's chats use"):
        mask_token(tiny_llama, 2)
    with pytest.raises(UserError, match="rows 0 to 319"):
        mask_token(tiny_llama, 320)


def test_taps_are_spread_as_published():
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spread_taps(30, 5) == (1, 8, 14, 20, 27)
    assert spread_taps(5, 2) == (1, 2) and spread_taps(4, 3) == (2,)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"block": 1}, "block is 1"), ({"layers": 0}, "layers is 0"), ({"anchors": 0}, "anchors is 0"), ({"window": 0}, "window is 0"),
     ({"taps": [3, 1]}, "ascending"), ({"draft_vocab": 1}, r"draft_vocab is 1, but must be a number of tokens \(at least 2\)")],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        DFlash(**arguments)


def run_without_masks(folder, target):
    for name, count in (("train", 23), ("held_out", 4)):
        write_store(folder / "data" / name, ragged_chats(count, 319), target.identity)
    return folder


def test_a_text_that_holds_the_mask_is_refused(tmp_path, tiny_llama, target_folders):
    run = make_run(tmp_path, tiny_llama)
    with pytest.raises(UserError, match=r"holds the token 319 \(\d+ times\), which stands for a masked one"):
        start(run, target_folders("llama"), drafter=CONFIG)
    assert not (run / "checkpoints").exists()


def test_anchors_drawn_are_the_same_however_a_window_is_shared_out(tmp_path, tiny_llama, target_folders):
    """One row in eight micro-batches, and eight rows in one; stopped and gone on: the anchors follow from the row's number."""
    folder = target_folders("llama")
    objective = {"divergences": [HardCrossEntropy()], "positions": Exponential(2.0), "reduction": "weights"}
    losses = []
    for rows, accumulate in ((1, 4), (4, 1)):
        run = run_without_masks(tmp_path / str(rows), tiny_llama)
        start(run, folder, drafter=CONFIG, objective=objective, data={"rows": rows},
              trainer={"max_steps": 4, "accumulate_grad_batches": accumulate})  # fmt: skip
        losses.append(logged(run))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    halves = run_without_masks(tmp_path / "halves", tiny_llama)
    for steps in (2, 4):
        start(halves, folder, drafter=CONFIG, objective=objective, data={"rows": 4}, optimizer={"schedule": "constant"},
              trainer={"max_steps": steps, "accumulate_grad_batches": 1})  # fmt: skip
    whole = run_without_masks(tmp_path / "whole", tiny_llama)
    start(whole, folder, drafter=CONFIG, objective=objective, data={"rows": 4}, optimizer={"schedule": "constant"},
          trainer={"max_steps": 4, "accumulate_grad_batches": 1})  # fmt: skip
    assert logged(halves) == pytest.approx(logged(whole), rel=1e-6)


def wide_heads(folder):
    """A random target whose heads are as wide as the fused kernel asks for on a GPU: 16 or more."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**COMMON | {"head_dim": 16})).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def states_and_gradients(net, target, mixed):
    """Of two packed documents in several rows, a fixed direction of every state being the loss."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 319, (4, 96), generator=g)
    position = torch.cat([torch.arange(40), torch.arange(56)]).expand(4, -1)
    document = torch.cat([torch.zeros(40), torch.ones(56)]).long().expand(4, -1)
    sequences = Sequences(ids, position > 3, position, document)
    layout = net.layout(sequences, numbers=[(0, b) for b in range(4)]).to(target.device)
    sequences = sequences.to(target.device)
    features = target.read_packed(sequences, net.needs.taps)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=mixed):
        hidden_NH = net.rows(sequences, features, layout).hidden_NH.float()
    net.zero_grad()
    (hidden_NH * torch.randn(hidden_NH.shape, generator=g).to(target.device)).mean().backward()
    return [hidden_NH.detach(), *(weight.grad.clone() for weight in net.parameters())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("mixed", "window", "allowed"), [(False, 20, 1e-3), (True, None, 5e-2)])
def test_fused_attention_gives_the_states_and_gradients_of_the_dense_mask(tmp_path, mixed, window, allowed):
    """fp32 and bf16-mixed on the device; the kernel's gradients have no other oracle. Differences by the norm of each weight's gradient."""
    dtype = "bfloat16" if mixed else "float32"
    target = load_target(TargetConfig(path=str(wide_heads(tmp_path)), dtype=dtype), device="cuda")
    config = DFlash(block=8, layers=2, taps=[0, 2], mask_token=319, window=window)
    net = config.build(target, DraftVocabulary.full(target.vocab))
    found = []
    for fused in (False, True):
        net.fused = fused
        found.append(states_and_gradients(net, target, mixed))
    for dense, kernel in zip(*found, strict=True):
        assert float((dense - kernel).norm()) <= allowed * float(dense.norm())
