"""The whole validation on a tiny target: its numbers recounted from tokens.jsonl alone, its plain answers made again by
transformers alone, and a lossless failure that is written down before it stops the command."""

import dataclasses
import json
import math
import re
from contextlib import nullcontext

import pytest
import torch

from drafttrain.decoding.engine import generate
from drafttrain.decoding.proposer import Proposer, chain_of
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.types import Request, Rollout
from drafttrain.validation import validate as validate_module
from drafttrain.validation.config import ValidateConfig
from drafttrain.validation.cost import Cost
from drafttrain.validation.passes import Difference
from drafttrain.validation.report import RECOUNT
from drafttrain.validation.summary import repeated_by_position, spans
from drafttrain.validation.validate import validate
from drafttrain.vocab import DraftVocabulary

MACHINE_KEYS = {
    "tau", "simulated_tau", "lossless", "prompts", "tokens", "rounds", "acceptance_by_depth", "reach_by_depth",
    "tokens_per_second", "baseline_tokens_per_second",
}  # fmt: skip
CONFIG = ValidateConfig(drafts=3, max_tokens=24, slots=2)


def prompts(count: int) -> list[Request]:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (count,), generator=g).tolist()
    return [Request(f"p{i}", tuple(torch.randint(3, 320, (n,), generator=g).tolist()), 100) for i, n in enumerate(lengths)]


def drafter(target, seed: int):
    torch.manual_seed(seed)
    return Eagle3(depth=3, draft_vocab=None).build(target, DraftVocabulary.full(target.vocab)).eval()


@pytest.fixture(scope="module")
def report(tiny_llama, tmp_path_factory):
    """One validation of five prompts, shared by the tests that read its files."""
    folder = tmp_path_factory.mktemp("run") / "report"
    logs = folder.parent / "logs"
    logs.mkdir()
    (logs / "metrics.csv").write_text("tokens_seen,train/loss,held_out/tau\n100,5.0,\n200,4.0,1.2\n")
    facts = {"name": "trial", "command": "drafttrain validate", "commit": "0123abc", "training_log": logs}
    net, untrained = drafter(tiny_llama, 0), drafter(tiny_llama, 1)
    honest, mentioned = tiny_llama.end_ids, next(generate(tiny_llama, prompts(1))).answer[10]
    tiny_llama.end_ids = (*honest, int(mentioned))  # so that one answer ends with a turn, the others at the limit
    try:
        result = validate(tiny_llama, net, prompts(5), CONFIG, folder, untrained_net=untrained, facts=facts)
    finally:
        tiny_llama.end_ids = honest
    rows = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    return folder, result, rows


def recount(rounds_of_prompts: list[list[int]], drafts: int):
    """tau, conditional acceptance and reach by plain loops over lists of accepted counts."""
    total, accepted, got, reached = 0, 0, [0] * drafts, [0] * drafts
    for rounds in rounds_of_prompts:
        for r in rounds:
            total += 1
            accepted += r
            for k in range(drafts):
                if r >= k:
                    reached[k] += 1
                if r >= k + 1:
                    got[k] += 1
    conditional = [g / n if n else 0.0 for g, n in zip(got, reached, strict=True)]
    return 1 + accepted / total, total, conditional, [g / total for g in got]


def test_the_files_are_complete_and_say_the_same(report):
    folder, result, _ = report
    names = {p.name for p in folder.iterdir()}
    assert names == {"README.md", "validation.json", "tokens.jsonl", "tau.png", "acceptance.png", "accepted.png", "training.png"}
    stored = json.loads((folder / "validation.json").read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert stored == result
    assert stored.keys() >= MACHINE_KEYS
    text = (folder / "README.md").read_text()
    shown = set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", text))
    assert shown == {n for n in names if n.endswith(".png")}
    assert f"tau {stored['tau']:.3f}" in text.split("## By method")[0]
    assert "0123abc" in text and "training_log" not in stored


def test_every_prompt_obeys_the_counting_rule(report):
    _, result, rows = report
    assert len(rows) == result["prompts"] == 5
    assert sum(len(row["speculative_ids"]) for row in rows) == result["tokens"]
    for row in rows:
        for ids, accepted, cut in [(row["speculative_ids"], row["accepted"], row["cut"])] + [
            (o["ids"], o["accepted"], o["cut"]) for o in row["others"].values()
        ]:
            assert 1 + sum(a + 1 for a in accepted) - cut == len(ids) <= row["limit"] == 24


@pytest.mark.parametrize("method", ["drafter", "lookup", "untrained"])
def test_an_independent_recount_gives_the_reported_numbers(report, method):
    _, result, rows = report
    accepted = [row["accepted"] if method == "drafter" else row["others"][method]["accepted"] for row in rows]
    tau, rounds, conditional, reach = recount(accepted, 3)
    table = result["methods"][method]
    assert table["tau"] == pytest.approx(tau) and table["rounds"] == rounds
    assert table["reach_by_depth"] == pytest.approx(reach)
    assert table["acceptance_by_depth"] == pytest.approx(conditional)
    assert sum(table["rounds_by_accepted"]) == rounds
    begun = [(1 + sum(a + 1 for a in row[:i]), count) for row in accepted for i, count in enumerate(row)]  # of each round: token
    for (start, end), found in zip(result["positions"], table["tau_by_position"], strict=True):
        counts = [count for position, count in begun if start <= position - 1 < end]
        assert found == (pytest.approx(1 + sum(counts) / len(counts)) if counts else None)
    top = {"drafter": "tau", "lookup": "lookup_tau", "untrained": "untrained_tau"}[method]
    assert result[top] == table["tau"]
    if method == "drafter":
        for key in ("rounds", "acceptance_by_depth", "reach_by_depth", "tokens", "tokens_per_second"):
            assert result[key] == table[key]


def test_the_printed_rate_is_of_the_printed_tokens(tiny_llama, tmp_path, capsys):
    """Plain decoding goes on behind the ends, and what it decodes there counts in its rate."""
    validate(tiny_llama, drafter(tiny_llama, 0), prompts(2), CONFIG, tmp_path / "report")
    words = r"plain: 2 prompts, (\d+) tokens and (\d+) behind the ends in ([\d.]+) s, ([\d.]+) tokens/s"
    out = capsys.readouterr().out
    tokens, beyond, seconds, rate = map(float, re.findall(words, out)[0])
    assert abs((tokens + beyond) / rate - seconds) <= 0.051
    assert "behind the ends" not in out[out.index("drafter: ") :]


def test_the_recount_printed_in_the_report_runs_as_it_stands(report, monkeypatch, capsys):
    folder, result, _ = report
    assert RECOUNT in (folder / "README.md").read_text()
    monkeypatch.chdir(folder)
    exec(RECOUNT, {})
    tau, lossless = capsys.readouterr().out.split()
    assert float(tau) == pytest.approx(result["tau"]) and lossless == "True"


def test_plain_answers_are_those_of_transformers_alone(report, target_folders):
    from transformers import AutoModelForCausalLM

    _, result, rows = report
    model = AutoModelForCausalLM.from_pretrained(target_folders("llama"), dtype=torch.float32).eval()
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=row["limit"],
            eos_token_id=result["end_ids"],
            pad_token_id=0,
        )
        assert out[0, ids.shape[1] :].tolist() == row["plain_ids"], row["key"]
        assert row["speculative_ids"] == row["plain_ids"]


def test_simulated_tau_agrees_with_measured(report):
    _, result, _ = report
    assert result["simulation"]["first_disagreement"] is None
    assert result["simulated_tau"] == pytest.approx(result["tau"])


class TwoRightOneWrong(Proposer):
    """A drafter that knows the plain answers: its first two drafts of every round are right, the third is wrong."""

    drafts = 3

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def propose(self, tokens_BM, length_B, stream_B, extent):
        rows = []
        for tokens, length in zip(tokens_BM.tolist(), length_B.tolist(), strict=True):
            so_far = tokens[: length + 1]
            text = next((t for t in self.texts if t[: length + 1] == so_far), so_far)
            a, b, c = (text + [0, 0, 0])[length + 1 : length + 4]
            rows.append([a, b, (c + 1) % 320])
        return chain_of(torch.tensor(rows))


def test_known_acceptance_is_reported_exactly(tiny_llama, tmp_path, monkeypatch):
    """With two of three drafts right in every round, tau is 3 and the answers of n tokens take ceil((n - 1) / 3) rounds."""
    requests = [dataclasses.replace(r, limit=24) for r in prompts(5)]
    texts = [[*r.ids.tolist(), *r.beyond.tolist()] for r in generate(tiny_llama, requests, overrun=3)]
    monkeypatch.setattr(validate_module, "ChainProposer", lambda net, drafts: TwoRightOneWrong(texts))
    result = validate(tiny_llama, drafter(tiny_llama, 0), requests, CONFIG, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert result["tau"] == 3.0 and result["lossless"]
    assert result["acceptance_by_depth"] == result["reach_by_depth"] == [1.0, 1.0, 0.0]
    assert result["methods"]["drafter"]["rounds_by_accepted"] == [0, 0, result["rounds"], 0]
    for row in rows:
        n = len(row["plain_ids"])
        assert row["accepted"] == [2] * math.ceil((n - 1) / 3)
        assert row["cut"] == -(n - 1) % 3
    assert any(row["cut"] for row in rows)
    assert "<ins><b>" in (tmp_path / "README.md").read_text()


def test_speed_and_cost_are_positive_and_consistent(report):
    _, result, _ = report
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["baseline_tokens_per_second"])
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["methods"]["drafter"]["seconds"])
    cost = result["cost"]
    assert cost["batch"] == 2 and cost["ratio"] == pytest.approx(cost["round_seconds"] / cost["plain_step_seconds"])
    assert cost["implied_speedup"] == pytest.approx(result["tau"] / result["cost_ratio"])


@pytest.mark.parametrize(("slots", "batch"), [(8, 3), (2, 2)])
def test_the_cost_is_timed_at_the_batch_that_the_prompts_fill(tiny_llama, tmp_path, monkeypatch, slots, batch):
    monkeypatch.setattr(
        validate_module, "measure_cost", lambda target, request, make, slots, tokens: Cost(slots, tokens, 0.1, 0.2)
    )
    config = dataclasses.replace(CONFIG, max_tokens=6, slots=slots)
    result = validate(tiny_llama, drafter(tiny_llama, 0), prompts(3), config, tmp_path)
    assert result["cost"]["batch"] == batch


def test_a_second_run_overwrites_and_may_be_smaller(report, tiny_llama, tmp_path):
    config = dataclasses.replace(CONFIG, prompts=2, max_tokens=6)
    for requests in (prompts(3), prompts(5)[::-1]):
        result = validate(tiny_llama, drafter(tiny_llama, 0), requests, config, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows] == ["p4", "p3"]
    assert result["prompts"] == 2 and result["untrained_tau"] is None and "untrained" not in result["methods"]
    assert max(len(row["plain_ids"]) for row in rows) == 6


@pytest.mark.parametrize("broken", ["drafter", "lookup"])
def test_a_wrong_token_is_reported_and_then_stops_the_command(tiny_llama, tmp_path, monkeypatch, broken):
    honest = validate_module.run
    wanted = {"drafter": "ChainProposer", "lookup": "LookupProposer"}[broken]

    def run(engine, requests, overrun=0):
        rollouts, seconds = honest(engine, requests, overrun)
        if type(engine.proposer).__name__ == wanted and len(requests) == 3 and requests[0].limit == 12:
            ids = rollouts[1].ids.clone()
            ids[rollouts[1].prompt_len + 4] += 1
            rollouts[1] = dataclasses.replace(rollouts[1], ids=ids)
        return rollouts, seconds

    monkeypatch.setattr(validate_module, "run", run)
    config = dataclasses.replace(CONFIG, max_tokens=12, slots=4)
    with pytest.raises(UserError, match=f"1 of 3 prompts.*{broken}, prompt p1, answer position 4"):
        validate(tiny_llama, drafter(tiny_llama, 0), prompts(3), config, tmp_path)
    stored = json.loads((tmp_path / "validation.json").read_text())
    assert stored["lossless"] is False
    assert {name: m["lossless"] for name, m in stored["methods"].items()} == {n: n != broken for n in ("drafter", "lookup")}
    assert [(d["key"], d["position"], d["other"] - d["plain"]) for d in stored["differences"]] == [("p1", 4, 1)]
    assert stored["differences"][0]["gap"] > 0
    assert "NOT LOSSLESS" in (tmp_path / "README.md").read_text().splitlines()[2]


@pytest.mark.parametrize(("gap", "words"), [(1e-6, None), (0.5, r"lists them; report a fault\.$")])
def test_in_fp32_ties_do_not_stop_the_command(tiny_llama, tmp_path, monkeypatch, gap, words):
    def differing(name, plain, other):
        return [Difference(name, "p0", 3, 5, 7)] if name == "lookup" else []

    monkeypatch.setattr(validate_module, "differences", differing)
    monkeypatch.setattr(validate_module, "logit_gap", lambda *rest: gap)
    with pytest.raises(UserError, match=words) if words else nullcontext():
        validate(tiny_llama, drafter(tiny_llama, 0), prompts(2), dataclasses.replace(CONFIG, max_tokens=6), tmp_path)
    assert json.loads((tmp_path / "validation.json").read_text())["lossless"] is False


def test_a_simulation_that_disagrees_is_named(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("drafttrain.validation.summary.simulate", lambda t, n, rollouts, drafts: [[3] * 40 for _ in rollouts])
    result = validate(tiny_llama, drafter(tiny_llama, 0), prompts(2), dataclasses.replace(CONFIG, max_tokens=8), tmp_path)
    assert result["simulated_tau"] == 4.0
    assert result["simulation"]["relative_difference"] == pytest.approx(4.0 / result["tau"] - 1)
    first = result["simulation"]["first_disagreement"]
    assert first["prompt"] == "p0" and first["simulated"] == 3


def test_no_prompts_and_doubled_keys_are_refused(tiny_llama, tmp_path):
    with pytest.raises(UserError, match="no held-out prompts"):
        validate(tiny_llama, None, [], CONFIG, tmp_path)
    with pytest.raises(UserError, match="key p0"):
        validate(tiny_llama, None, [prompts(1)[0]] * 2, CONFIG, tmp_path)
    assert not any(tmp_path.iterdir())


def test_repeated_text_is_counted_where_a_run_ends():
    def rollout(answer):
        return Rollout("r", torch.tensor([0, *answer]), 1, [], 0, True, torch.empty(0, dtype=torch.long))

    found = repeated_by_position([rollout(range(40)), rollout([1, 2] * 20)])
    # Up to token 32 each answer has 25 runs: all new in one, two distinct ones in the other; from there on 8 runs each.
    assert found == [23 / 50, 8 / 16]
    assert spans([rollout(range(40))]) == [(0, 32), (32, 64)]
