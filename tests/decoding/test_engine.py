"""The loop against transformers' own greedy decoding, and speculative against plain, token for token."""

from dataclasses import replace

import pytest
import torch
from tiny import first

from drafttrain.decoding.engine import Engine, generate
from drafttrain.decoding.measure import count, simulate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_ngram import LookupProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.decoding.proposer import Proposer, chain_of
from drafttrain.decoding.sampling import Sampling, choose_tokens, probabilities, stream_of, uniforms
from drafttrain.decoding.tree import check
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.layouts import one_chat
from drafttrain.target.target import own_attention
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary

LIMIT = 24


def requests_for(target, lengths=(5, 17, 9, 30, 2, 11, 8), limit=LIMIT):
    g = torch.Generator().manual_seed(3)
    return [
        Request(f"p{i}", tuple(torch.randint(3, target.vocab, (n,), generator=g).tolist()), limit) for i, n in enumerate(lengths)
    ]


def plain_of(target, requests, **kw):
    return {r.key: r for r in generate(target, requests, slots=3, **kw)}


class Meddler(Proposer):
    """Proposes the plain answer with errors at known places, so that every accepted count occurs."""

    def __init__(self, requests, plain, drafts):
        self.drafts = drafts
        self.text = {
            plain[r.key].ids[: len(r.ids)].tolist().__str__(): torch.cat([plain[r.key].ids, plain[r.key].beyond])
            for r in requests
        }
        self.turn = 0

    def begin(self, batch, capacity):
        self.row_text = [None] * batch

    def admit(self, rows_R, tokens_RM, counts_R, features, extent):
        for row, tokens, n in zip(rows_R.tolist(), tokens_RM, counts_R.tolist(), strict=True):
            self.row_text[row] = self.text[str(tokens[:n].tolist())]

    def propose(self, tokens_BM, length_B, stream_B, extent):
        out = torch.zeros(len(length_B), self.drafts, dtype=torch.long)
        for b, n in enumerate(length_B.tolist()):
            text = [] if self.row_text[b] is None else self.row_text[b]
            for k in range(self.drafts):
                self.turn += 1
                right = n + 1 + k < len(text) and self.turn % 5
                out[b, k] = text[n + 1 + k] if right else 3
        return chain_of(out)

    def keep(self, rows):
        self.row_text[: len(rows)] = [self.row_text[b] for b in rows.tolist()]


def test_plain_equals_transformers_generate(any_target):
    requests = requests_for(any_target)
    mine = plain_of(any_target, requests)
    with own_attention(any_target.model), torch.no_grad():
        for request in requests:
            ids = torch.tensor([request.ids])
            theirs = any_target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=LIMIT,
                do_sample=False,
                eos_token_id=list(any_target.end_ids),
            )
            assert mine[request.key].ids.tolist() == theirs[0].tolist()


@pytest.mark.parametrize("drafts", [1, 4])
def test_speculative_equals_plain_whatever_is_proposed(any_target, drafts):
    requests = requests_for(any_target)
    plain = plain_of(any_target, requests, overrun=drafts)
    net = Eagle3(taps=[0, 1, 3], draft_vocab=None).build(any_target, DraftVocabulary.full(any_target.vocab))
    seen = set()
    trees = (TreeProposer(net, drafts, top_k=3, nodes=3), TreeProposer(net, drafts, top_k=2, nodes=1))
    for proposer in (Meddler(requests, plain, drafts), LookupProposer(drafts), ChainProposer(net, drafts), *trees):
        for slots in (1, 3):
            rollouts = list(Engine(any_target, proposer=proposer, slots=slots, debug=True).generate(requests))
            assert sorted(r.key for r in rollouts) == sorted(plain)
            for rollout in rollouts:
                assert rollout.ids.tolist() == plain[rollout.key].ids.tolist(), (type(proposer).__name__, rollout.key)
                seen.update(rollout.accepted)
            count(rollouts, drafts)
    assert seen == set(range(drafts + 1))  # a test in which nothing is ever accepted would prove little


@pytest.mark.parametrize("drafts", [0, 3])
def test_noting_a_round_while_the_next_one_runs_changes_nothing(any_target, drafts):
    """What a GPU does with many rows, here with a few: rows end, are refilled and moved while a round is on its way."""
    requests = [replace(r, limit=5 + 7 * (i % 4)) for i, r in enumerate(requests_for(any_target))]
    plain = plain_of(any_target, requests, overrun=drafts)
    proposer = Meddler(requests, plain, drafts) if drafts else None
    for overrun in (0,) if drafts else (0, 2):
        engine = Engine(any_target, proposer=proposer, slots=4, debug=True)
        engine._overlap_from = 1
        for _ in range(2):
            rollouts = list(engine.generate(requests, overrun=overrun))
            assert sorted(r.key for r in rollouts) == sorted(plain)
            for rollout in rollouts:
                assert rollout.ids.tolist() == plain[rollout.key].ids.tolist()
                assert (
                    overrun == 0
                    or rollout.beyond.tolist() == plain_of(any_target, requests, overrun=2)[rollout.key].beyond.tolist()
                )
            count(rollouts, drafts)
    next(engine.generate(requests))  # left in the middle
    assert len(list(engine.generate(requests))) == len(requests)


def test_sampled_speculative_says_what_sampled_plain_says(tiny_llama):
    requests = requests_for(tiny_llama)
    sampling = Sampling(temperature=0.9, top_p=0.9, top_k=50, seed=7)
    plain = plain_of(tiny_llama, requests, sampling=sampling, overrun=4)
    alone = {r.key: r for request in requests for r in generate(tiny_llama, [request], sampling=sampling)}
    rollouts = list(generate(tiny_llama, requests, proposer=Meddler(requests, plain, 4), sampling=sampling, slots=3))
    for rollout in rollouts:
        assert rollout.ids.tolist() == plain[rollout.key].ids.tolist() == alone[rollout.key].ids.tolist()
    assert max(max(r.accepted, default=0) for r in rollouts) == 4
    other = plain_of(tiny_llama, requests, sampling=Sampling(temperature=0.9, seed=8))
    assert any(other[k].ids.tolist() != plain[k].ids.tolist() for k in plain)


def test_draws_follow_the_distribution():
    """Chi-square of 20,000 draws against the probabilities, temperature, top-k and top-p applied (99.9% quantile, 9 kept tokens)."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -3.5])
    sampling = Sampling(temperature=1.3, top_k=9, top_p=0.999)
    p = probabilities(logits, sampling)
    p = p / p.sum()
    assert int((p > 0).sum()) == 9
    n = 20000
    streams = torch.tensor([stream_of(f"row{i}", 0) for i in range(20)])
    positions = torch.arange(n // 20).expand(20, -1)
    drawn = choose_tokens(logits.expand(20, n // 20, -1), sampling, streams, positions).flatten()
    seen = torch.bincount(drawn, minlength=12).double()
    assert seen[p == 0].sum() == 0
    expected = p[p > 0].double() * n
    chi2 = ((seen[p > 0] - expected) ** 2 / expected).sum()
    assert chi2 < 26.1
    u = uniforms(streams, positions)
    assert float(u.min()) >= 0 and float(u.max()) < 1 and abs(float(u.mean()) - 0.5) < 0.01


def test_features_kept_while_answering_equal_a_fresh_reading(any_target):
    from drafttrain.types import Sequences

    requests = requests_for(any_target)
    for rollout in generate(any_target, requests, slots=3, taps=(0, 2), keep_features=True):
        ids = rollout.ids[None]
        position = torch.arange(ids.shape[1])[None]
        fresh = any_target.read_packed(Sequences(ids, position > 0, position, torch.zeros_like(ids)), (0, 2))
        torch.testing.assert_close(rollout.taps_TAD[:-1], fresh.taps_BTAD[0, :-1], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(rollout.final_TD[:-1], fresh.final_BTD[0, :-1], atol=2e-4, rtol=1e-3)
        assert rollout.taps_TAD[-1].abs().sum() == 0


def test_simulated_rounds_equal_measured_rounds(any_target):
    """The training forward, walked anchor to anchor over the plain answer, accepts exactly what the loop accepted."""
    requests = requests_for(any_target, limit=40)
    drafts = 3
    plain = plain_of(any_target, requests, overrun=drafts)
    # A head that copies the target's own makes some drafts right; a vocabulary with holes makes some impossible.
    vocabulary = DraftVocabulary(torch.arange(0, any_target.vocab, 1)[torch.arange(any_target.vocab) % 7 != 3], any_target.vocab)
    torch.manual_seed(1)
    net = Eagle3(taps=[0, 1, 3], draft_vocab=len(vocabulary.ids)).build(any_target, vocabulary)
    overfit(any_target, net, plain.values())
    measured = {r.key: r.accepted for r in generate(any_target, requests, proposer=ChainProposer(net, drafts), slots=3)}
    simulated = dict(zip(plain, simulate(any_target, net, plain.values(), drafts), strict=True))
    assert simulated == measured
    assert sum(map(sum, measured.values())) > 10


def test_a_tree_accepts_at_least_what_its_best_branch_would(any_target):
    """A tree accepts more than the chain where the drafter is unsure, and says what plain decoding says all the same; features too."""
    requests = requests_for(any_target, limit=40)
    plain = plain_of(any_target, requests)
    torch.manual_seed(1)
    net = Eagle3(taps=[0, 1, 3], draft_vocab=None).build(any_target, DraftVocabulary.full(any_target.vocab))
    overfit(any_target, net, plain.values(), steps=20)
    accepted = {}
    for name, proposer in {"chain": ChainProposer(net, 4), "tree": TreeProposer(net, 4, 4, 24)}.items():
        engine = Engine(any_target, proposer=proposer, slots=3, taps=proposer.taps, keep_features=True, debug=True)
        for _ in range(2):  # the second call finds the buffers of the first
            rollouts = list(engine.generate(requests))
            assert {r.key: r.ids.tolist() for r in rollouts} == {k: r.ids.tolist() for k, r in plain.items()}
        accepted[name] = count(rollouts, 4).tau
        for rollout in rollouts[:3]:
            fresh = any_target.read_packed(one_chat(rollout.ids, rollout.prompt_len), proposer.taps)
            torch.testing.assert_close(rollout.taps_TAD[:-1], fresh.taps_BTAD[0, :-1], atol=2e-4, rtol=1e-3)
            torch.testing.assert_close(rollout.final_TD[:-1], fresh.final_BTD[0, :-1], atol=2e-4, rtol=1e-3)
    assert accepted["tree"] > min(accepted["chain"], 4) > 1.3  # a drafter that is always right gains nothing by branching


def test_the_nodes_of_a_tree_are_the_most_probable_paths(tiny_llama):
    """Against every path of the drafter, found by stepping each one alone."""
    torch.manual_seed(2)
    net = Eagle3(taps=[0, 1, 3], draft_vocab=12).build(tiny_llama, DraftVocabulary(torch.arange(40, 52), tiny_llama.vocab))
    net.lm_head.weight.data.mul_(3)
    depth, width, nodes = 3, 12, 20  # as wide as the vocabulary: nothing is pruned before the last choice
    proposer = TreeProposer(net, depth, width, nodes)
    ids = torch.randint(3, tiny_llama.vocab, (1, 9))
    features = first(tiny_llama.read_packed(one_chat(ids[0], 5), proposer.taps), 8)

    def logp(path):
        state = net.begin(1, 64, depth)
        hidden = net.commit(state, None, features, ids[:, 1:], torch.tensor([8]), 64)
        for number, token in enumerate(path):
            hidden = net.step(state, torch.tensor([[token]]), torch.tensor([[number - 1]]))[:, 0]
        return net.logits(hidden, ids[:, -1])[0].log_softmax(-1).tolist()

    scores, frontier = {(): 0.0}, [()]
    for _ in range(depth):
        frontier = [(*path, 40 + d) for path in frontier for d in range(12)]
        known = {}
        for path in frontier:
            if path[:-1] not in known:
                known[path[:-1]] = logp(path[:-1])
            scores[path] = scores[path[:-1]] + known[path[:-1]][path[-1] - 40]
        frontier = sorted(frontier, key=lambda path: -scores[path])[:24]
    del scores[()]
    wanted = set(sorted(scores, key=lambda path: -scores[path])[:nodes])

    proposer.begin(1, 64)
    proposer.admit(torch.tensor([0]), torch.nn.functional.pad(ids, (0, 40)), torch.tensor([8]), features, 64)
    proposal = proposer.propose(torch.nn.functional.pad(ids, (0, 40)), torch.tensor([8]), torch.tensor([1]), 64)
    check(proposal)
    paths = []
    for n in range(nodes):
        parent = int(proposal.parents_BN[0, n])
        paths.append((*(paths[parent] if parent >= 0 else ()), int(proposal.tokens_BN[0, n])))
    assert set(paths) == wanted and {len(path) for path in paths} == {1, 2, 3}


@pytest.mark.parametrize("bad", [(4, 3, 0), (4, 0, 3), (1, 2, 3), (2, 400, 5), (0, 2, 1)])
def test_trees_that_cannot_be_built_are_refused(tiny_llama, bad):
    net = Eagle3(taps=[0, 1, 3], draft_vocab=None).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    with pytest.raises(UserError, match="asked for 0 drafts|cannot be built"):
        TreeProposer(net, *bad)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "tree", "lookup"])
def test_two_hundred_random_cases_equal_plain_decoding(any_target, kind):
    """Batch 1 to 16, ragged lengths, drafts of every quality. A difference counts unless the two best logits are closer than 1e-4."""
    g = torch.Generator().manual_seed(11)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    cases = 0
    while cases < 200:
        lengths = [draw(1, 40) for _ in range(draw(1, 16))]
        requests = [
            Request(f"{cases}.{i}", tuple(torch.randint(3, any_target.vocab, (n,), generator=g).tolist()), draw(1, 24))
            for i, n in enumerate(lengths)
        ]
        cases += len(requests)
        plain = {r.key: r for r in Engine(any_target, slots=16).generate(requests)}
        net = Eagle3(taps=[0, 1, 3], draft_vocab=None).build(any_target, DraftVocabulary.full(any_target.vocab))
        if draw(0, 1):
            overfit(any_target, net, plain.values(), steps=5)
        drafts = draw(1, 5)
        if kind == "chain":
            proposer = ChainProposer(net, drafts)
        elif kind == "tree":
            proposer = TreeProposer(net, drafts, top_k=4, nodes=draw(1, 4 + (drafts - 1) * 16))
        else:
            proposer = LookupProposer(drafts, draw(1, 3))
        for rollout in Engine(any_target, proposer=proposer, slots=draw(1, 16), debug=True).generate(requests):
            assert rollout.ids.tolist() == plain[rollout.key].ids.tolist() or _tie(any_target, plain[rollout.key], rollout)


def _tie(target, plain, other) -> bool:
    at = next(i for i, (a, b) in enumerate(zip(plain.ids.tolist(), other.ids.tolist(), strict=False)) if a != b)
    features = target.read_packed(one_chat(plain.ids[:at], plain.prompt_len), ())
    best = target.logits(features.final_BTD[0, -1]).topk(2).values
    print(f"{plain.key}: answers part at {at}, the two best logits are {float(best[0] - best[1]):.2g} apart")
    return float(best[0] - best[1]) < 1e-4


def overfit(target, net, rollouts, steps=60):
    """Teach the net these very answers, so that drafts of every depth get accepted."""
    from drafttrain.losses import Distillation
    from drafttrain.tasks.teacher import TargetTeacher
    from drafttrain.types import Sequences

    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    batches = []
    for rollout in rollouts:
        ids = rollout.ids[None]
        position = torch.arange(ids.shape[1])[None]
        sequences = Sequences(ids, position >= rollout.prompt_len, position, torch.zeros_like(ids))
        layout, sequences = net.layout(sequences, 3).to(target.device), sequences.to(target.device)
        batches.append((sequences, target.read_packed(sequences, net.needs.taps), layout))
    objective = Distillation()
    for _ in range(steps):
        for sequences, features, layout in batches:
            if not len(layout.depth_N):
                continue
            terms, _ = objective.terms(net.rows(sequences, features, layout), net.logits, TargetTeacher(target, net), 3)
            loss = sum(t.sum / t.count.clamp(min=1) for t in terms.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    net.eval()


def test_a_limit_of_one_and_an_early_end(tiny_llama):
    [rollout] = generate(tiny_llama, [Request("a", (5, 6, 7), 1)])
    assert len(rollout.answer) == 1 and rollout.accepted == [] and rollout.cut == 0
    first = int(rollout.answer[0])
    [stopped] = generate(tiny_llama, [Request("a", (5, 6, 7), 9, ends=(first,))])
    assert stopped.stopped and stopped.answer.tolist() == [first]


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_nothing_is_emitted_behind_an_end_of_turn_inside_an_accepted_run(tiny_llama, kind):
    """Whatever token of the plain answer ends a turn: all drafts are right, so it often stands in the middle of a run."""
    requests = requests_for(tiny_llama, lengths=(5, 9), limit=20)
    plain = plain_of(tiny_llama, requests, overrun=4)
    cut = 0
    for at in range(1, 18):
        ending = [replace(r, ends=(int(plain[r.key].answer[at]),)) for r in requests]
        knowing = Meddler(requests, plain, 4)
        net = Eagle3(taps=[0, 1, 3], draft_vocab=None).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
        proposer = knowing if kind == "chain" else TreeProposer(net, 3, 4, 12)
        for rollout in Engine(tiny_llama, proposer=proposer, slots=2, debug=True).generate(ending):
            whole, end = plain[rollout.key].answer.tolist(), next(r.ends[0] for r in ending if r.key == rollout.key)
            assert rollout.answer.tolist() == whole[: whole.index(end) + 1] and rollout.stopped
            count([rollout], 4)
            cut += rollout.cut
    assert cut > 0 or kind == "tree"


def test_rows_that_are_all_finished_at_once(tiny_llama):
    """Every answer ends with its first token, which comes from the prefill: there is no round, and slots are refilled all the same."""
    requests = requests_for(tiny_llama)
    first = {r.key: int(r.answer[0]) for r in generate(tiny_llama, [replace(r, limit=1) for r in requests])}
    ending = [replace(r, ends=(first[r.key],)) for r in requests]
    rollouts = list(Engine(tiny_llama, proposer=LookupProposer(3), slots=3, debug=True).generate(ending))
    assert {r.key: r.answer.tolist() for r in rollouts} == {key: [token] for key, token in first.items()}
    assert all(r.accepted == [] and r.stopped for r in rollouts)


def test_a_prompt_that_leaves_no_room_is_refused(tiny_llama):
    with pytest.raises(UserError, match="512 positions"):
        list(generate(tiny_llama, [Request("long", tuple([5] * 500), 20)]))
