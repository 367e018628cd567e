"""The whole benchmark on a tiny target: its numbers recounted from bench.jsonl alone, later turns that hold plain answers, and a
method that is wrong on purpose."""

import json
import re
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch

from drafttrain.decoding.engine import generate
from drafttrain.decoding.methods import Chain, Lookup, Tree
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.verify import Match
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.types import Request, Verdict
from drafttrain.validation import bench_lossless
from drafttrain.validation.bench import bench
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.bench_questions import Question, Skipped
from drafttrain.validation.bench_report import RECOUNT, render
from drafttrain.vocab import DraftVocabulary

CONFIG = BenchConfig(
    max_tokens=12, methods=[Chain(3), Tree(2, 3, 6), Lookup(3), Chain(2, draw=True)], temperatures=[0.0, 1.0], warm_up=1, repeats=2,
    batches=[1, 3], longest=3, probe=2,
)  # fmt: skip
LABELS = ["plain", *(method.label for method in CONFIG.methods)]


def user(*turns: str) -> tuple[dict, ...]:
    return tuple({"role": "user", "content": turn} for turn in turns)


QUESTIONS = [
    Question("a", "maths", user("what is two plus two", "and why")),
    Question("b", "maths", user("name three rivers")),
    Question("c", "talk", user("the quick brown fox", "lazy dog", "again")),
    Question("long", "talk", user("x " * 600)),
]


@pytest.fixture(scope="module")
def net(tiny_llama):
    torch.manual_seed(0)
    return Eagle3(depth=3, draft_vocab=None).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab)).eval()


@pytest.fixture(scope="module")
def made(tiny_llama, net, tmp_path_factory):
    """(folder, what bench.json holds, lines of bench.jsonl)."""
    folder = tmp_path_factory.mktemp("bench") / "report"
    folder.mkdir()
    (folder / "of-an-older-report.png").write_bytes(b"")
    facts = {"name": "trial", "command": "drafttrain bench", "commit": "0123abc", "draft": "export"}
    skipped = [Skipped("line 7", "no user turn")]
    result = bench(tiny_llama, net, QUESTIONS, CONFIG, folder, skipped=skipped, facts=facts)
    return folder, result, [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]


def lines(rows: list[dict], temperature: float, method: str, part: str = "questions") -> list[dict]:
    return [r for r in rows if (r["part"], r["temperature"], r["method"]) == (part, temperature, method)]


def recount(mine: list[dict], plain: list[dict]) -> dict:
    """Speed and tau by plain loops."""
    per_run, base_per_run = [], []
    for run in (1, 2):
        for found, rows in ((per_run, mine), (base_per_run, plain)):
            rates = [sum(r["tokens"]) / r["seconds"] for r in rows if r["run"] == run]
            found.append(sum(rates) / len(rates))
    speedups = [a / b for a, b in zip(per_run, base_per_run, strict=True)]
    rounds = [a for r in mine for turn in r["accepted"] for a in turn]
    total, base_total = (sum(sum(r["tokens"]) for r in rows) / sum(r["seconds"] for r in rows) for rows in (mine, plain))
    return {
        "tokens_per_second": mean(per_run), "tokens_per_second_sd": stdev(per_run), "speedup": mean(speedups),
        "speedup_sd": stdev(speedups), "speedup_total": total / base_total, "tau": 1 + sum(rounds) / len(rounds), "rounds": len(rounds),
    }  # fmt: skip


def test_the_files_are_complete_and_say_the_same(made):
    folder, result, _ = made
    names = {p.name for p in folder.iterdir()}
    pictures = {f"{kind}-t{t}.png" for kind in ("categories", "acceptance") for t in (0, 1)}
    pictures |= {"stages.png", "drafts.png", "batches.png"}
    assert names == {"README.md", "bench.json", "bench.jsonl"} | pictures
    stored = json.loads((folder / "bench.json").read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert stored == result
    text = (folder / "README.md").read_text()
    assert set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)) == pictures
    assert "0123abc" in text and "A CPU is busy" in text and "line 7: no user turn" in text
    assert text.count("\n| all questions | 3 |") == 2 and "\n| talk | " in text  # once a temperature
    assert stored["hardware"]["cpu"] and stored["versions"]["torch"] and stored["command"] == "drafttrain bench"
    assert stored["config"]["methods"][0]["class"] == "Chain"


@pytest.mark.parametrize(("temperature", "methods"), [(0.0, LABELS[:4]), (1.0, LABELS)])
def test_an_independent_recount_gives_the_reported_numbers(made, temperature, methods):
    """A chain that draws needs a temperature above 0, so it is measured there alone."""
    _, result, rows = made
    table = next(t for t in result["temperatures"] if t["temperature"] == temperature)
    assert list(table["methods"]) == methods and table["questions"] == 3
    plain = lines(rows, temperature, "plain")
    for method in methods:
        mine, facts = lines(rows, temperature, method), table["methods"][method]
        assert len(mine) == 2 * 3
        for key, value in recount(mine, plain).items():
            assert facts[key] == pytest.approx(value), key
        for category in ("maths", "talk"):
            some, base = ([r for r in rows if r["category"] == category] for rows in (mine, plain))
            for key, value in recount(some, base).items():
                assert facts["categories"][category][key] == pytest.approx(value), key
        rounds = [a for r in mine for turn in r["accepted"] for a in turn]
        for k, reach in enumerate(facts["reach_by_depth"], 1):
            assert reach == pytest.approx(sum(a >= k for a in rounds) / len(rounds))
            before = sum(a >= k - 1 for a in rounds)
            conditional = facts["acceptance_by_depth"][k - 1]
            assert conditional == (pytest.approx(sum(a >= k for a in rounds) / before) if before else None)


def test_every_line_obeys_the_counting_rule(made):
    _, _, rows = made
    for row in rows:
        for accepted, cut, tokens in zip(row["accepted"], row["cut"], row["tokens"], strict=True):
            assert 1 + sum(a + 1 for a in accepted) - cut == tokens <= 12
        assert ("ids" in row) == (row["run"] == 1)
        assert "ids" not in row or [len(ids) for ids in row["ids"]] == row["tokens"]


def test_methods_that_must_say_plain_tokens_do_and_the_others_are_not_compared(made):
    _, result, rows = made
    assert result["lossless"] and result["differences"] == []
    for temperature in (0.0, 1.0):
        reference = {r["question"]: r["ids"] for r in lines(rows, temperature, "plain") if r["run"] == 1}
        for method in LABELS[1:4]:
            assert {r["question"]: r["ids"] for r in lines(rows, temperature, method) if r["run"] == 1} == reference
    sampled = result["temperatures"][1]["methods"]
    assert [m["exact"] for m in sampled.values()] == [True] * 4 + [False]
    greedy, warm = ({r["question"]: r["ids"] for r in lines(rows, t, "plain")[:3]} for t in (0.0, 1.0))
    assert greedy != warm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_later_turns_hold_the_plain_answers(made, tiny_llama, temperature):
    """Each prompt rebuilt from the answers in bench.jsonl has as many tokens, and plain decoding answers it with the recorded ones."""
    _, _, rows = made
    line = next(r for r in lines(rows, temperature, "chain 3") if r["question"] == "c" and r["run"] == 1)
    history = []
    for turn, words in enumerate(("the quick brown fox", "lazy dog", "again")):
        history.append({"role": "user", "content": words})
        ids = tiny_llama.render(history)
        assert line["prompt_tokens"][turn] == len(ids)
        request = Request(f"c/{turn + 1}", tuple(ids), 12)
        (rollout,) = generate(tiny_llama, [request], sampling=Sampling(temperature), slots=1)
        assert rollout.answer.tolist() == line["ids"][turn]
        text = tiny_llama.tokenizer.decode(rollout.answer.tolist(), skip_special_tokens=True)
        history.append({"role": "assistant", "content": text})


def test_a_question_without_room_is_skipped_by_name(made):
    folder, result, rows = made
    assert result["questions"] == 3 and result["categories"] == {"maths": 2, "talk": 1}
    assert not any(row["question"] == "long" for row in rows)
    (line, why) = result["skipped"][0], result["skipped"][1]["why"]
    assert line == {"question": "line 7", "why": "no user turn"} and "does not fit the target's 512 positions" in why
    assert f"long: {why}" in (folder / "README.md").read_text()


def test_the_recount_printed_in_the_report_runs_as_it_stands(made, monkeypatch, capsys):
    folder, result, _ = made
    assert RECOUNT in (folder / "README.md").read_text()
    monkeypatch.chdir(folder)
    exec(RECOUNT, {})
    printed = capsys.readouterr().out.splitlines()
    wanted = [
        f"{t['temperature']} {name} tau {m['tau']:.3f}, speed-up {m['speedup']:.3f}"
        for t in result["temperatures"] for name, m in t["methods"].items()
    ]  # fmt: skip
    assert printed == wanted


def test_draft_lengths_and_batches(made):
    _, result, rows = made
    found = result["draft_length"]
    assert [p["drafts"] for p in found["points"]] == [1, 2, 3] and found["questions"] == 2
    plain = lines(rows, 0.0, "plain", "draft length")
    for point in found["points"]:
        mine = lines(rows, 0.0, f"chain {point['drafts']}", "draft length")
        assert {r["question"] for r in mine} == {"a", "c"}, "one of each category first"
        for key, value in recount(mine, plain).items():
            assert key == "rounds" or point[key] == pytest.approx(value), key
    assert found["best"] == max(found["points"], key=lambda p: p["speedup"])["drafts"]
    assert [b["batch"] for b in result["throughput"]] == [1, 3]
    for batch in result["throughput"]:
        assert list(batch["methods"]) == LABELS[:4] and batch["methods"]["plain"]["speedup"] == 1
        for facts in batch["methods"].values():
            speedup = facts["tokens_per_second"] / batch["methods"]["plain"]["tokens_per_second"]
            assert facts["speedup"] == pytest.approx(speedup) and facts["tokens_per_second_sd"] >= 0


def test_the_arithmetic_of_where_the_time_goes(made):
    _, result, rows = made
    found = result["breakdown"]
    assert found["questions"] == ["a", "c"] and found["temperature"] == 0
    step = found["plain_step_ms"]
    plain = [r for r in lines(rows, 0.0, "plain") if r["question"] != "b"]
    for method, facts in found["methods"].items():
        ms, mine = facts["ms_per_round"], [r for r in lines(rows, 0.0, method) if r["question"] != "b"]
        assert ms["round"] == pytest.approx(ms["draft"] + ms["check"] + ms["commit"] + ms["rest"])
        assert (method == "plain") == (ms["draft"] == 0) and min(ms["check"], ms["commit"], ms["rest"]) > 0
        assert facts["outside_percent"] == pytest.approx(100 * (ms["commit"] + ms["rest"]) / ms["round"])
        assert facts["tau"] == pytest.approx(recount(mine, plain)["tau"])
        assert facts["speedup_if_check_costs_a_step"] == pytest.approx(facts["tau"] / (1 + ms["draft"] / step))
        assert facts["speedup_of_rounds"] == pytest.approx(facts["tau"] * step / ms["round"])
        assert facts["speedup_measured"] == pytest.approx(recount(mine, plain)["speedup_total"])
        assert facts["rounds"] == sum(len(turn) for r in mine if r["run"] == 1 for turn in r["accepted"])


# ---- what must not pass ------------------------------------------------------------------------------------------------

SMALL = replace(CONFIG, methods=[Chain(3)], temperatures=[0.0], repeats=1, batches=[], longest=None)


@pytest.fixture
def broken(monkeypatch):
    """Every fourth round of chains of three says another token than the target."""
    honest, calls = Match.__call__, []

    def verify(self, logits_BPV, proposal, sampling, stream_B, length_B):
        verdict = honest(self, logits_BPV, proposal, sampling, stream_B, length_B)
        calls.append(self.chain and self.depth == 3)
        if calls[-1] and sum(calls) % 4 == 0:
            return Verdict(verdict.accepted_B, verdict.path_BK, (verdict.said_B + 1) % logits_BPV.shape[-1])
        return verdict

    monkeypatch.setattr(Match, "__call__", verify)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_token_is_reported_and_then_stops_the_command(tiny_llama, net, tmp_path, broken, temperature):
    config = replace(SMALL, methods=[Chain(3), Tree(2, 3, 6)], temperatures=[temperature])
    with pytest.raises(UserError, match="differences that no rounding explains.*chain 3"):
        bench(tiny_llama, net, QUESTIONS[:3], config, tmp_path)
    stored = json.loads((tmp_path / "bench.json").read_text())
    methods = stored["temperatures"][0]["methods"]
    assert not stored["lossless"] and methods["chain 3"]["different"] > 0
    assert methods["plain"]["different"] == methods["tree 2x3, 6 nodes"]["different"] == 0
    assert {d["method"] for d in stored["differences"]} == {"chain 3"}
    assert all(d["gap"] > 1e-4 and d["other"] != d["plain"] for d in stored["differences"] if d["gap"] is not None)
    text = (tmp_path / "README.md").read_text()
    assert "Not equal to plain decoding" in text.splitlines()[2] and "Where answers leave plain decoding" in text


def test_in_bf16_a_difference_is_reported_and_does_not_stop_the_command(target_folders, tmp_path, broken):
    target = load_target(TargetConfig(path=str(target_folders("llama")), dtype="bfloat16"), device="cpu")
    net = Eagle3(depth=3, draft_vocab=None).build(target, DraftVocabulary.full(target.vocab)).to(torch.bfloat16).eval()
    result = bench(target, net, QUESTIONS[:2], SMALL, tmp_path)
    assert not result["lossless"] and result["differences"] and result["target"]["dtype"] == "bfloat16"
    assert "settles it" in (tmp_path / "README.md").read_text()


def test_ties_are_told_as_such_and_one_run_has_no_spread(tiny_llama, net, tmp_path, broken, monkeypatch):
    monkeypatch.setattr(bench_lossless, "gap", lambda *rest: -1e-7)
    result = bench(tiny_llama, net, QUESTIONS[1:2], SMALL, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert not result["lossless"] and result["temperatures"][0]["methods"]["chain 3"]["ties"] == 1
    assert "- Lossless but for ties: 1 answer left plain decoding, where two tokens tie (gap up to 1e-07) and" in text
    assert "| yes, but for ties in 1 question |" in text and "settles it" not in text
    assert "**chain 3** is fastest" in text and "(one run each, so no spread)." in text
    assert "\n1 question, temperature 0." in text


def test_a_fault_among_ties_is_bold(made):
    result = dict(made[1]) | {"lossless": False}
    tie = {"temperature": 0.0, "method": "chain 3", "key": "a/1", "position": 2, "plain": 5, "other": 7, "gap": 1e-7}
    for found, words in (
        ([tie, tie | {"gap": 0.5}], "**Not equal to plain decoding** in 1 answer, and in 1 more at a tie: see the gaps below"),
        ([tie | {"gap": None}] * 2, "**Not equal to plain decoding** in 2 answers: see the gaps below"),
    ):
        first = render(result | {"differences": found}, {}).splitlines()[2]
        assert first.startswith(f"- {words}")
    assert "no spread" not in render(made[1], {})


def test_what_cannot_be_had_is_refused_before_anything_is_measured(tiny_llama, net, tmp_path):
    for config, words in (
        (replace(SMALL, methods=[Tree(1, 2, 60)]), "a tree of 60 nodes"),
        (replace(SMALL, methods=[Chain(2, draw=True)]), "chain 2, drawn, block, which draws its drafts"),
    ):
        with pytest.raises(UserError, match=words):
            bench(tiny_llama, net, QUESTIONS, config, tmp_path)
    with pytest.raises(UserError, match="none of 1 questions can be asked; the first: long, the prompt has"):
        bench(tiny_llama, net, QUESTIONS[3:], SMALL, tmp_path)
    with pytest.raises(UserError, match="Two questions have the id a"):
        bench(tiny_llama, net, [QUESTIONS[0]] * 2, SMALL, tmp_path)
    assert not any(tmp_path.iterdir())
