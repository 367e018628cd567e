"""What the engine keeps of every round, against passes made afresh: the target's over context and drafts, and the drafter's at the prefix alone."""

from dataclasses import fields, replace

import pytest
import torch
from decoding.test_engine import Meddler, overfit, plain_of, requests_for
from tiny import ARCHITECTURES

from drafttrain.decoding.engine import OVERLAP_FROM, Engine
from drafttrain.decoding.methods import AdaptiveChain
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_drawn import DrawnProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.verify_chain import Block, TokenWise
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.vocab import DraftVocabulary

K = 4
DRAFTERS = {
    "eagle3": Eagle3(taps=[0, 1, 3], depth=K),
    "dflash": DFlash(block=K + 1, layers=2, taps=[0, 2], mask_token=319),
    "medusa": Medusa(heads=K),
    "hydra": Hydra(heads=K),
}
CASES = [("llama", name) for name in DRAFTERS] + [(name, "eagle3") for name in sorted(set(ARCHITECTURES) - {"llama"})]
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=5)


def ended_early(requests, plain):
    """Every other prompt ends at a token in the midst of its answer; limits differ."""
    ends = [(int(plain[r.key].answer[9]),) if i % 2 else () for i, r in enumerate(requests)]
    return [replace(r, ends=end, limit=r.limit - i) for i, (r, end) in enumerate(zip(requests, ends, strict=True))]


def asked(target):
    """Prompts whose answers end in every way, and the answers of plain decoding."""
    requests = requests_for(target, lengths=(5, 17, 9, 2, 11, 8))
    requests = ended_early(requests, plain_of(target, requests))
    return requests, plain_of(target, requests)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def taught(request, targets):
    """A target, prompts, their plain answers, and a drafter that knows half of them."""
    architecture, name = request.param
    target = targets(architecture)
    requests, plain = asked(target)
    torch.manual_seed(0)
    net = DRAFTERS[name].build(target, DraftVocabulary.full(target.vocab))
    overfit(target, net, [plain[r.key] for r in requests[::2]], steps=20)
    return target, requests, plain, net


def kept(target, requests, proposer, slots=3, **options):
    engine = Engine(target, proposer=proposer, slots=slots, keep_rounds=True, debug=True, **options)
    return {r.key: r for r in engine.generate(requests)}


def each_round(rollouts):
    """(rollout, record, index of a round)."""
    return [(r, r.rounds, i) for r in rollouts.values() for i in range(len(r.rounds.anchor_R))]


def fresh_rows(target, rollout, rounds, i):
    """The target reads the text up to the anchor and the chain behind it, without a cache: its rows from the anchor on."""
    anchor, drafted = int(rounds.anchor_R[i]), rounds.drafted_RK[i, : rounds.proposed_R[i]]
    ids = torch.cat([rollout.ids[: anchor + 1], drafted])
    return target.read_packed(one_chat(ids.to(target.device), rollout.prompt_len), ()).final_BTD[0, anchor:].cpu()


def hold_rows(target, rollouts, rounding=1e-5):
    """Every place against a fresh pass, to `rounding` of a row's length. Returns how many rows stand behind a first rejection."""
    behind = 0
    for rollout, rounds, i in each_round(rollouts):
        rows = fresh_rows(target, rollout, rounds, i)
        assert ((rounds.final_RPD[i, : len(rows)] - rows).norm(dim=-1) <= rounding * rows.norm(dim=-1)).all()
        assert not rounds.final_RPD[i, len(rows) :].any()
        behind += max(len(rows) - 1 - int(rounds.accepted_R[i]), 0)
    return behind


def hold_text(rollouts, requests, ends_of):
    """The text put together from the rounds alone, and the limits that they state, by a loop over tokens."""
    limits = {r.key: len(r.ids) + r.limit for r in requests}
    for rollout in rollouts.values():
        rounds, text = rollout.rounds, rollout.ids[: rollout.prompt_len + 1].tolist()
        for i in range(len(rounds.anchor_R)):
            anchor, proposed, accepted = int(rounds.anchor_R[i]), int(rounds.proposed_R[i]), int(rounds.accepted_R[i])
            drafted = rounds.drafted_RK[i].tolist()
            assert anchor == len(text) - 1 and accepted <= proposed and drafted[proposed:] == [-1] * (len(drafted) - proposed)
            verified = [*drafted[:accepted], int(rounds.said_R[i])]
            text += verified[: rounds.kept_R[i]]
            last = i == len(rounds.anchor_R) - 1
            assert len(verified) - int(rounds.kept_R[i]) == (rollout.cut if last else 0)
            within = 0
            for k in range(1, proposed + 1):
                if anchor + k == limits[rollout.key] or (k > 1 and drafted[k - 2] in ends_of[rollout.key]):
                    break
                within = k
            assert int(rounds.within_R[i]) == within
        assert text == rollout.ids.tolist()
        assert rounds.accepted_R.tolist() == rollout.accepted


def ends_of(target, requests):
    return {r.key: {*target.end_ids, *r.ends} for r in requests}


def same_record(mine, alone):
    for field in fields(mine):
        a, b = getattr(mine, field.name), getattr(alone, field.name)
        torch.testing.assert_close(a, b, atol=1e-5 if a.is_floating_point() else 0, rtol=1e-5 if a.is_floating_point() else 0)


def alone_drafts(target, net, prefix_T, drafts):
    """What a new proposer drafts behind the last of these tokens, where the target has just read all before it."""
    proposer, anchor = ChainProposer(net, drafts), len(prefix_T) - 1
    tokens_1M = torch.zeros(1, anchor + drafts + 2, dtype=torch.long)
    tokens_1M[0, : anchor + 1] = prefix_T
    features = target.read_packed(one_chat(prefix_T[:-1], 1), net.needs.taps)
    proposer.begin(1, tokens_1M.shape[1])
    count_1, extent = torch.tensor([anchor]), tokens_1M.shape[1]
    proposer.admit(torch.tensor([0]), tokens_1M, count_1, features, extent)
    return proposer.propose(tokens_1M, count_1, torch.zeros(1, dtype=torch.long), extent).tokens_BN[0]


def test_the_record_is_the_target_s_rows_the_answer_and_the_drafter_s_words(taught):
    target, requests, plain, net = taught
    rollouts = kept(target, requests, ChainProposer(net, K))
    assert {k: r.ids.tolist() for k, r in rollouts.items()} == {k: r.ids.tolist() for k, r in plain.items()}
    assert hold_rows(target, rollouts) > 0
    hold_text(rollouts, requests, ends_of(target, requests))
    for rollout, rounds, i in each_round(rollouts):
        assert rounds.drafted_RK.shape[1] == K and rounds.final_RPD.shape[1:] == (K + 1, target.hidden)
        prefix_T = rollout.ids[: rounds.anchor_R[i] + 1]
        assert rounds.drafted_RK[i].tolist() == alone_drafts(target, net, prefix_T, K).tolist()
        logits_PV = target.logits(rounds.final_RPD[i])
        assert int(logits_PV[rounds.accepted_R[i]].argmax()) == int(rounds.said_R[i])
    assert len({int(rounds.accepted_R[i]) for _, rounds, i in each_round(rollouts)}) > 2


def test_a_batch_with_refill_keeps_what_each_prompt_alone_does(taught):
    target, requests, _, net = taught
    together = kept(target, requests, ChainProposer(net, K), slots=3)
    alone = kept(target, requests, ChainProposer(net, K), slots=1)
    engine = Engine(target, proposer=ChainProposer(net, K), slots=3, keep_rounds=True)
    engine._overlap_from = 1  # what a GPU does with many rows: a round is noted while the next one runs
    for rollouts in (together, {r.key: r for r in engine.generate(requests)}, {r.key: r for r in engine.generate(requests)}):
        for key in alone:
            same_record(rollouts[key].rounds, alone[key].rounds)


def test_nothing_changes_without_it(taught):
    target, requests, _, net = taught
    proposer = ChainProposer(net, K)
    without = {r.key: r for r in Engine(target, proposer=proposer, slots=3).generate(requests)}
    with_it = kept(target, requests, proposer)
    for key, rollout in without.items():
        assert rollout.rounds is None
        for name in ("accepted", "tried", "cut", "stopped", "prompt_len"):
            assert getattr(rollout, name) == getattr(with_it[key], name)
        assert rollout.ids.tolist() == with_it[key].ids.tolist()


@pytest.mark.parametrize("verify", [None, TokenWise(), Block()], ids=["match", "token-wise", "block"])
def test_sampled_decoding_is_kept_too(taught, verify):
    target, requests, _, net = taught
    proposer = DrawnProposer(net, (1,) * K, SAMPLED) if verify else ChainProposer(net, K)
    rollouts = kept(target, requests, proposer, verify=verify, sampling=SAMPLED)
    assert hold_rows(target, rollouts) > 20
    hold_text(rollouts, requests, ends_of(target, requests))
    if verify is None:
        plain = plain_of(target, requests, sampling=SAMPLED)
        assert {k: r.ids.tolist() for k, r in rollouts.items()} == {k: r.ids.tolist() for k, r in plain.items()}


def test_chains_that_end_early_or_change_their_length(tiny_llama):
    requests = requests_for(tiny_llama)
    plain = plain_of(tiny_llama, requests)
    torch.manual_seed(0)
    net = DRAFTERS["eagle3"].build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    overfit(tiny_llama, net, [plain[r.key] for r in requests[::2]], steps=20)
    for proposer in (ChainProposer(net, K, least_confidence=0.3), AdaptiveChain(K).proposer(net, Sampling())):
        rollouts = kept(tiny_llama, requests, proposer)
        hold_rows(tiny_llama, rollouts)
        hold_text(rollouts, requests, ends_of(tiny_llama, requests))
        lengths = {int(n) for r in rollouts.values() for n in r.rounds.proposed_R}
        assert len(lengths) > 1 and max(lengths) <= K


def test_drafts_past_the_end_are_told(tiny_llama):
    """An end of turn among the accepted drafts, one among the rejected, and the limit inside a chain."""
    requests = requests_for(tiny_llama)
    whole = plain_of(tiny_llama, requests, overrun=K)
    requests = [replace(r, ends=(*r.ends, 3)) for r in ended_early(requests, whole)]  # 3 is what the meddler drafts in error
    plain = plain_of(tiny_llama, requests, overrun=K)
    rollouts = kept(tiny_llama, requests, Meddler(requests, whole, K))
    hold_rows(tiny_llama, rollouts)
    hold_text(rollouts, requests, ends_of(tiny_llama, requests))
    cut = [(r.rounds, i) for r, _, i in each_round(rollouts) if r.rounds.kept_R[i] <= r.rounds.accepted_R[i]]
    assert cut and all(i == len(rounds.anchor_R) - 1 for rounds, i in cut)
    inside = [i for r, _, i in each_round(rollouts) if r.rounds.accepted_R[i] < r.rounds.within_R[i] < K]
    assert inside and {r.stopped for r in rollouts.values()} == {True, False}
    assert {k: r.ids.tolist() for k, r in rollouts.items()} == {k: r.ids.tolist() for k, r in plain.items()}


def test_answers_of_one_token_and_plain_decoding_have_well_formed_records(tiny_llama):
    requests = requests_for(tiny_llama, limit=1)
    plain = plain_of(tiny_llama, requests, overrun=K)
    for rollout in kept(tiny_llama, requests, Meddler(requests, plain, K)).values():
        assert rollout.rounds.drafted_RK.shape == (0, K) and rollout.rounds.final_RPD.shape == (0, K + 1, tiny_llama.hidden)
        assert rollout.rounds.final_RPD.dtype == tiny_llama.dtype and not len(rollout.rounds.kept_R)
    requests = requests_for(tiny_llama, limit=8)
    for overrun in (0, 3):
        engine = Engine(tiny_llama, slots=3, keep_rounds=True, debug=True)
        rollouts = {r.key: r for r in engine.generate(requests, overrun=overrun)}
        hold_rows(tiny_llama, rollouts)
        hold_text(rollouts, requests, ends_of(tiny_llama, requests))


def test_a_tree_is_refused(tiny_llama):
    torch.manual_seed(0)
    net = DRAFTERS["eagle3"].build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    with pytest.raises(UserError, match=r"keep_rounds.*trees of 9 nodes.*draft a chain"):
        Engine(tiny_llama, proposer=TreeProposer(net, 3, 3, 9), keep_rounds=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_replayed_and_overlapping_rounds_are_kept_whole(target_folders):
    """More rows than overlap needs, with refill: graphs overwrite their buffers while the host still has the round before to note."""
    target = load_target(TargetConfig(path=str(target_folders("llama"))), device="cuda")
    requests = requests_for(target, lengths=[2 + i % 17 for i in range(OVERLAP_FROM + 20)], limit=40)
    plain = plain_of(target, requests)
    torch.manual_seed(0)
    net = DRAFTERS["eagle3"].build(target, DraftVocabulary.full(target.vocab))
    overfit(target, net, [plain[r.key] for r in requests[:8]], steps=20)
    for graphs in (True, False):
        engine = Engine(target, proposer=ChainProposer(net, K), slots=OVERLAP_FROM, keep_rounds=True, graphs=graphs, debug=True)
        for _ in range(2):  # the first call records, the second replays
            rollouts = {r.key: r for r in engine.generate(requests)}
            assert hold_rows(target, rollouts, rounding=1e-4) > 20
            hold_text(rollouts, requests, ends_of(target, requests))
        assert engine.graphs_refused is None and bool(engine._rounds._recorded) == graphs
