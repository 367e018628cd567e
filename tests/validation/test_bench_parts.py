"""The parts of a benchmark one by one: a section that makes no sense, questions, warming up, times by a clock that ticks, and ties."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from drafttrain.decoding import graphs
from drafttrain.decoding.engine import Engine, generate
from drafttrain.decoding.methods import AdaptiveChain, Chain, Lookup, Recycling, Tree
from drafttrain.decoding.propose_ngram import LookupProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.types import Request, Rollout
from drafttrain.validation import bench_lossless, bench_passes
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.bench_lossless import compare, faults, gap
from drafttrain.validation.bench_passes import Contender, Row, Stages, answer, throughput, time_questions, time_stages, warm_up
from drafttrain.validation.bench_questions import Asked, Question, choose, probe_of
from drafttrain.validation.bench_summary import Staged, breakdown, length_facts, method_facts
from drafttrain.validation.passes import Difference
from drafttrain.vocab import DraftVocabulary

# ---- the section -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": [1, 0]}, "bench.batches is 0"),
        ({"repeats": 0}, "bench.repeats is 0"),
        ({"count": 0}, "bench.count is 0"),
        ({"longest": 0}, "bench.longest is 0"),
        ({"temperatures": [0.0, -0.5]}, r"bench.temperatures is \[0.0, -0.5\]"),
        ({"temperatures": [float("nan")]}, "bench.temperatures"),
        ({"temperatures": []}, "bench.temperatures"),
        ({"temperatures": [1.0, 1.0]}, "bench.temperatures has 1.0 twice"),
        ({"methods": []}, "bench.methods is empty"),
        ({"methods": [Chain(3), Lookup(3), Chain(3)]}, "bench.methods has chain 3 twice"),
    ],
)
def test_what_makes_no_sense_is_named(options, words):
    with pytest.raises(UserError, match=words):
        BenchConfig(**options)


# ---- questions ---------------------------------------------------------------------------------------------------------


def test_the_first_questions_of_each_category_and_mt_bench_as_one():
    mt_bench = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
    questions = [Question(f"{c}{i}", c, ids=(1,)) for i in range(3) for c in [*mt_bench, "qa"]]
    chosen = choose(questions, 2)
    assert [q.key for q in chosen] == [f"{c}{i}" for i in range(2) for c in [*mt_bench, "qa"]]
    assert [q.category for q in chosen] == (["mt_bench"] * 8 + ["qa"]) * 2
    without = [q for q in questions if q.category != "stem"]
    assert choose(without, None) == without


def test_a_probe_takes_from_every_category_in_turn():
    asked = [Asked(key, key[0], ()) for key in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [a.key for a in probe_of(asked, 5)] == ["a1", "b1", "c1", "a2", "c2"]
    assert len(probe_of(asked, 99)) == 6


# ---- warming up --------------------------------------------------------------------------------------------------------


def ask(key: str, tokens: int, limit: int = 8) -> Asked:
    return Asked(key, "x", (Request(f"{key}/1", tuple(range(3, 3 + tokens)), limit),))


def net_for(target):
    torch.manual_seed(0)
    return Eagle3(depth=3, draft_vocab=None).build(target, DraftVocabulary.full(target.vocab)).eval()


class Spy(Engine):
    """Notes which prompts it answered; `device` may be made up."""

    def __init__(self, target, **options):
        super().__init__(target, **options)
        self.heard: list[str] = []

    def generate(self, requests, overrun=0):
        self.heard += [r.key for r in requests]
        return super().generate(requests, overrun)


def test_a_cpu_warms_up_on_the_first_questions(tiny_llama):
    engine = Spy(tiny_llama, slots=1)
    warm_up(engine, [ask("a", 5), ask("b", 9), ask("c", 7)], 2)
    assert engine.heard == ["a/1", "b/1"]


@pytest.fixture
def in_a_gpus_clothes(monkeypatch):
    """Rounds are "recorded", and replayed by running them; the shapes in the order of recording."""
    recorded = []

    class Replay:
        def __init__(self, stage):
            self.replay = stage

    def record(rounds, key, extent):
        recorded.append(key)
        rounds._recorded[key] = {name: Replay(partial(stage, extent)) for name, stage in rounds.batch.stages.items()}

    begin = graphs.Rounds.__init__

    def begun(rounds, batch, use):
        begin(rounds, batch, False)
        rounds.graphs = True

    monkeypatch.setattr(graphs.Rounds, "__init__", begun)
    monkeypatch.setattr(graphs.Rounds, "_record", record)
    monkeypatch.setattr(Engine, "graphed", True)
    return recorded


@pytest.mark.parametrize("method", [None, Lookup(3), AdaptiveChain(3), Tree(3, 2, 5), Chain(2, draw=True), Recycling(8, 3, 3)])
def test_a_gpu_has_every_round_recorded_before(tiny_llama, in_a_gpus_clothes, method):
    """Whatever is said then, and whatever length a chain takes, nothing new is recorded; and what is said is what a fresh engine says."""
    sampling = Sampling(temperature=0.9)
    contender = Contender("x", tiny_llama, net_for(tiny_llama), method)
    asked = [ask(str(n), n, limit=24) for n in (5, 40, 120, 184)]
    engine, timed = contender.engine(sampling), []
    if engine.proposer:
        honest = engine.proposer.heard
        engine.proposer.heard = lambda accepted, shape, seconds: (timed.append(seconds), honest(accepted, shape, seconds))
    warm_up(engine, asked, 1)
    assert (method is None) == (not timed) and not any(timed[:2]), (
        "rounds that were not replayed say nothing of what others will cost"
    )
    shapes = {shape for _, _, shape in in_a_gpus_clothes}
    extents = {engine.extent(n + said) for n in (5, 40, 120, 184) for said in range(24)}
    assert shapes == ({1, 2, 3} if isinstance(method, AdaptiveChain) else {0})
    assert set(in_a_gpus_clothes) == {(1, extent, shape) for extent in extents for shape in shapes}
    count = len(in_a_gpus_clothes)
    answers = [answer(engine, each)[0][0].ids.tolist() for each in asked * 2]
    assert len(in_a_gpus_clothes) == count == len(set(in_a_gpus_clothes))
    assert answers == [answer(contender.engine(sampling), each)[0][0].ids.tolist() for each in asked * 2]


def test_a_gpu_reads_every_prompt_once_before(tiny_llama, in_a_gpus_clothes):
    engine = Spy(tiny_llama, slots=1)
    engine.record([request for n in (5, 9, 7) for request in ask(str(n), n).requests])
    assert engine.heard == ["9/1", "5/1", "9/1", "7/1"], "the longest for the size of the buffers, then each"


def test_a_cpu_records_nothing(tiny_llama):
    engine = Spy(tiny_llama, slots=1)
    engine.record(ask("a", 5).requests)
    assert not engine.heard and engine.rounds_known == 0


def test_a_batch_is_answered_until_nothing_new_is_recorded(tiny_llama, in_a_gpus_clothes, monkeypatch):
    engine = Spy(tiny_llama, slots=4)
    for batch, passes in (
        (4, 2),
        (4, 1),
        (2, 2),
        (2, 1),
    ):  # met and recorded until nothing is new; two rows meet a last one alone
        engine.heard.clear()
        throughput(engine, [ask("a", 5, limit=9), ask("b", 5, limit=5)], batch, 2)
        assert len(engine.heard) == batch * (passes + 2)
    assert len(set(in_a_gpus_clothes)) == len(in_a_gpus_clothes)


def test_what_was_said_before_does_not_help_to_say_it_again(tiny_llama):
    """Token Recycling learns from every pass; each run begins as the first did."""
    engine = Contender("x", tiny_llama, net_for(tiny_llama), Recycling(8, 3, 3)).engine(Sampling())
    asked = [ask("a", 5, limit=24), ask("b", 9, limit=24)]
    first, second = (time_questions({"x": engine}, asked, run, "questions") for run in (1, 2))
    assert [row.accepted for row in first] == [row.accepted for row in second]
    assert throughput(engine, asked, 1, 1) and engine.proposer.behind_VK.max() >= 0


# ---- time --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by one at every look."""
    looks = iter(range(10**9))
    monkeypatch.setattr(bench_passes, "perf_counter", lambda: float(next(looks)))
    monkeypatch.setattr(graphs, "perf_counter", lambda: float(next(looks)))


def test_a_question_lasts_from_one_look_at_the_clock_to_the_next(tiny_llama, ticking):
    engines = {"plain": Engine(tiny_llama, slots=1), "m": Engine(tiny_llama, proposer=LookupProposer(3), slots=1)}
    rows = time_questions(engines, [ask("a", 5), ask("b", 9)], 2, "questions")
    assert [(r.question, r.method) for r in rows] == [("a", "plain"), ("a", "m"), ("b", "plain"), ("b", "m")]
    assert all((r.run, r.seconds, r.tokens, r.rate) == (2, 1.0, 8, 8.0) for r in rows)
    assert rows[0].facts()["tokens"] == [8] and "ids" not in rows[0].facts()


def test_stages_by_a_ticking_clock(tiny_llama, ticking):
    """A look opens a question, one its first round, two stand around each stage, one closes it."""
    asked = [ask("a", 5), ask("b", 9)]
    engines = {"plain": Engine(tiny_llama, slots=1), "m": Engine(tiny_llama, proposer=LookupProposer(3), slots=1)}
    rounds = {m: sum(len(r.accepted) for each in asked for r in e.generate(each.requests)) for m, e in engines.items()}
    found = time_stages(engines, asked)
    for method, stages in (("plain", 2), ("m", 3)):
        mine, n = found[method], rounds[method]
        assert mine.rounds == n and mine.tokens == 16 and mine.prefill == 2
        assert mine.check == mine.commit == n and mine.draft == (n if method == "m" else 0)
        assert mine.rest == (2 * stages * n + 2) - stages * n
        assert engines[method].clock is None


def test_an_answer_of_one_token_is_all_prefill(tiny_llama, ticking):
    found = time_stages({"plain": Engine(tiny_llama, slots=1)}, [ask("a", 5, limit=1)])
    assert found == {"plain": Stages(tokens=1, rounds=0, prefill=1.0, draft=0.0, check=0.0, commit=0.0, rest=0.0)}


def test_throughput_copies_questions_as_needed(tiny_llama, ticking):
    engine = Spy(tiny_llama, slots=8)
    assert throughput(engine, [ask("a", 5), ask("b", 9)], 5, 3) == [5 * 8.0] * 3
    assert engine.heard == ["a/1#0", "b/1#1", "a/1#2", "b/1#3", "a/1#4"] * 4, "a warm-up and three runs"


# ---- numbers by hand ---------------------------------------------------------------------------------------------------


def row(method: str, question: str, category: str, seconds: float, accepted: list[int], run: int = 1) -> Row:
    answer = list(range(1 + sum(a + 1 for a in accepted)))
    rollout = Rollout(f"{question}/1", torch.tensor([7, *answer]), 1, accepted, 0, True, torch.empty(0, dtype=torch.long))
    return Row("questions", 0.0, method, run, question, category, seconds, (rollout,))


def test_speed_up_is_the_ratio_of_mean_rates_of_each_run():
    plain = [row("plain", "a", "x", s, [0] * 3, run) for run, s in ((1, 4.0), (2, 2.0))]  # 4 tokens: 1 and 2 a second
    plain += [row("plain", "b", "y", s, [0] * 5, run) for run, s in ((1, 2.0), (2, 1.0))]  # 6 tokens: 3 and 6
    mine = [row("m", "a", "x", 1.0, [2], run) for run in (1, 2)] + [row("m", "b", "y", 0.5, [1, 2], run) for run in (1, 2)]
    facts = method_facts(mine, plain, drafts=3)
    # 4 and 12 tokens a second: a mean of 8, against means of 2 and 4.
    assert facts["tokens_per_second"] == 8 and facts["tokens_per_second_sd"] == 0
    assert facts["speedup"] == 3 and facts["speedup_sd"] == pytest.approx(2**0.5)
    assert facts["speedup_total"] == pytest.approx((20 / 3) / (20 / 9))
    assert facts["tau"] == pytest.approx(1 + 5 / 3) and facts["rounds"] == 6
    assert facts["reach_by_depth"] == pytest.approx([1, 2 / 3, 0]) and facts["acceptance_by_depth"] == pytest.approx(
        [1, 2 / 3, 0]
    )
    assert facts["categories"]["x"]["speedup"] == pytest.approx((4 / 1 + 4 / 2) / 2) and facts["categories"]["y"]["tau"] == 2.5


def test_a_single_run_has_no_spread_and_a_depth_that_no_round_reached_no_acceptance():
    facts = method_facts([row("m", "a", "x", 1.0, [0])], [row("plain", "a", "x", 1.0, [0])], drafts=2)
    assert facts["speedup_sd"] is None and facts["acceptance_by_depth"] == [0.0, None]


def test_where_the_time_goes_by_hand():
    """A plain step of 10 ms; rounds of 20 ms, 4 of them for drafting 2 tokens: c = 0.2."""
    plain = Staged("plain", 0, Stages(tokens=11, rounds=10, prefill=0.1, draft=0.0, check=0.08, commit=0.01, rest=0.01))
    mine = Staged("m", 2, Stages(tokens=11, rounds=4, prefill=0.12, draft=0.016, check=0.048, commit=0.008, rest=0.008))
    rows = [row("plain", "a", "x", 0.2, [0] * 10), row("m", "a", "x", 0.25, [2, 1, 2, 1]), row("m", "other", "x", 9.0, [0])]
    found = breakdown([plain, mine], rows, ["a"])
    facts = found["methods"]["m"]
    assert found["plain_step_ms"] == pytest.approx(10)
    assert facts["ms_per_round"] == pytest.approx({"draft": 4, "check": 12, "commit": 2, "rest": 2, "round": 20})
    assert facts["outside_percent"] == pytest.approx(20) and facts["c"] == pytest.approx(0.2) and facts["tau"] == 2.5
    assert facts["speedup_if_check_costs_a_step"] == pytest.approx(2.5 / 1.4)
    assert facts["speedup_of_rounds"] == pytest.approx(1.25)
    assert facts["speedup_with_prefill"] == pytest.approx(1.0) and facts["speedup_measured"] == pytest.approx(0.8)
    assert facts["assumed"][0] == {"round_in_plain_steps": 1.1, "speedup": pytest.approx(2.5 / 1.1)}
    assert facts["prefill_ms_per_question"] == pytest.approx(120)


def test_the_best_draft_length_is_the_fastest():
    plain = [row("plain", "a", "x", 1.0, [0, 0, 0])]
    rows = {k: [row(f"chain {k}", "a", "x", seconds, [1, 0])] for k, seconds in ((1, 0.5), (2, 0.4), (3, 0.6))}
    facts = length_facts(rows, plain)
    assert facts["best"] == 2 and [p["speedup"] for p in facts["points"]] == pytest.approx([2, 2.5, 4 / 2.4])
    assert facts["plain"] == {"tokens_per_second": 4.0, "tokens_per_second_sd": None}


# ---- ties --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_gap_says_how_far_the_other_token_was_from_being_said(tiny_llama, temperature):
    """Plain decoding's own token is at no distance; any other at the distance by which the number, or the logit, would have to move."""
    sampling = Sampling(temperature)
    (rollout,) = generate(tiny_llama, [Request("k", tuple(range(5, 15)), 6)], sampling=sampling, slots=1)
    for position in range(6):
        said = int(rollout.answer[position])
        gaps = [
            gap(tiny_llama, rollout, Difference("m", "k", position, said, other), sampling) for other in range(tiny_llama.vocab)
        ]
        assert gaps[said] <= 1e-5
        assert sum(g <= 1e-5 for g in gaps) == 1
        if temperature:  # pieces lie in the order of the tokens, so distances grow to both sides
            assert gaps[:said] == sorted(gaps[:said], reverse=True) and gaps[said + 1 :] == sorted(gaps[said + 1 :])
    assert gap(tiny_llama, rollout, Difference("m", "k", 5, None, 3), sampling) is None


def test_every_run_is_compared_with_the_first_plain_one(tiny_llama):
    plain = [row("plain", "a", "x", 1.0, [0, 0], run) for run in (1, 2)]
    wrong = replace(plain[0].rollouts[0], ids=plain[0].rollouts[0].ids + torch.tensor([0, 0, 0, 5]))
    plain[1] = replace(plain[1], rollouts=(wrong,))
    found = compare(tiny_llama, plain, plain, Sampling())
    assert [(d.method, d.key, d.position, d.plain, d.other) for d in found] == [("plain", "a/1", 2, 2, 7)]


def test_a_tie_hides_no_fault_of_a_later_run(tiny_llama, monkeypatch):
    plain = [row("plain", "a", "x", 1.0, [0, 0], 1)]
    parted = replace(plain[0].rollouts[0], ids=plain[0].rollouts[0].ids + torch.tensor([0, 0, 0, 5]))
    rows = [replace(plain[0], run=run, rollouts=(parted,)) for run in (1, 2, 3, 4)]
    for gaps, kept in (([1e-6, 0.5, 1e-5, 0.7], 0.5), ([0.7, 0.5], 0.7), ([1e-6, 1e-5, 2e-5, 3e-5], 1e-6)):
        left = iter(gaps)
        monkeypatch.setattr(bench_lossless, "gap", lambda *rest, left=left: next(left))
        assert [d.gap for d in compare(tiny_llama, plain, rows, Sampling())] == [kept]


def test_ties_and_other_dtypes_are_no_faults(tiny_llama):
    tie, real, ended, other_way = (Difference("m", "k", 0, 1, 2, gap) for gap in (5e-5, 2e-4, None, -2e-4))
    assert faults(tiny_llama, [tie, real, ended, other_way]) == [real, ended, other_way]

    class Rounded:
        dtype = torch.bfloat16

    assert faults(Rounded(), [tie, real, ended]) == []
