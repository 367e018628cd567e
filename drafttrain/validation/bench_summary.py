"""The numbers of a benchmark from its rows: what bench.json holds.

    rate of a question   = tokens / seconds, all its turns, prefill included
    speed-up             = mean of the questions' rates / mean of plain decoding's rates           (Spec-Bench; of every run)
    tau                  = 1 + accepted / rounds, pooled over all rounds

Where the time goes, with gamma drafts a round (greatest depth), all times in plain steps:

    c = draft time of a round / gamma         speed-up = tau / (1 + c gamma)          (Leviathan et al. 2023, verification costs a step)
                                              speed-up = tau / round                  (all of a round, prefill left out)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from drafttrain.decoding.measure import acceptance
from drafttrain.validation.bench_config import PLAIN
from drafttrain.validation.bench_passes import Row, Stages
from drafttrain.validation.cost import ASSUMED_RATIOS


@dataclass(frozen=True)
class Staged:
    """A method's stages on the probe questions."""

    method: str
    gamma: int
    stages: Stages


def method_facts(rows: Sequence[Row], plain: Sequence[Row], drafts: int) -> dict:
    """Everything about one method at one temperature; `plain` are the baseline's rows of the same questions and runs."""
    categories = dict.fromkeys(row.category for row in rows)
    return _speed(rows, plain) | _accepted(rows, drafts) | {
        "categories": {name: _of_category(rows, plain, drafts, name) for name in categories},
    }  # fmt: skip


def _of_category(rows: Sequence[Row], plain: Sequence[Row], drafts: int, category: str) -> dict:
    mine, base = ([row for row in some if row.category == category] for some in (rows, plain))
    counted = _accepted(mine, drafts)
    return {"questions": len({row.question for row in mine})} | _speed(mine, base) | {k: counted[k] for k in ("tau", "rounds")}


def _accepted(rows: Sequence[Row], drafts: int) -> dict:
    """tau and acceptance by depth. Conditional acceptance is null at a depth that no round tried."""
    rounds = [count for row in rows for count in row.accepted]
    tried = [depth for row in rows for depth in row.tried(drafts)]
    tau, conditional, reach = acceptance(rounds, drafts, tried)
    return {
        "tau": tau,
        "rounds": len(rounds),
        "drafts": drafts,
        "acceptance_by_depth": [a if depth <= max(tried, default=0) else None for depth, a in enumerate(conditional, 1)],
        "reach_by_depth": reach,
    }


def _speed(rows: Sequence[Row], plain: Sequence[Row]) -> dict:
    rates, base = _rates(rows), _rates(plain)
    speedups = [rate / plain_rate for rate, plain_rate in zip(rates, base, strict=True)]
    return {
        "tokens": sum(row.tokens for row in rows),
        "seconds": sum(row.seconds for row in rows),
        "tokens_per_second": mean(rates),
        "tokens_per_second_sd": spread(rates),
        "speedup": mean(speedups),
        "speedup_sd": spread(speedups),
        "speedup_total": _total(rows) / _total(plain),
    }


def _rates(rows: Sequence[Row]) -> list[float]:
    """Of every run, the mean of its questions' rates."""
    runs = sorted({row.run for row in rows})
    return [mean(row.rate for row in rows if row.run == run) for run in runs]


def _total(rows: Sequence[Row]) -> float:
    """All tokens by all seconds."""
    return sum(row.tokens for row in rows) / sum(row.seconds for row in rows)


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over runs; None of a single one."""
    return stdev(values) if len(values) > 1 else None


def breakdown(staged: Sequence[Staged], rows: Sequence[Row], keys: Sequence[str]) -> dict:
    """Where the time of each method goes, plain decoding first, and the speed-up that it explains.

    Args:
        staged: every method on the questions `keys`.
        rows: timed rows of all methods at the same temperature; those of `keys` say what was measured.
    """
    plain, wanted = staged[0], set(keys)
    timed = {some.method: [row for row in rows if row.method == some.method and row.question in wanted] for some in staged}
    return {
        "questions": list(keys),
        "plain_step_ms": _round_ms(plain.stages),
        "methods": {some.method: _stage_facts(some, plain, timed[some.method], timed[plain.method]) for some in staged},
    }


def _round_ms(stages: Stages) -> float:
    return 1e3 * (stages.draft + stages.check + stages.commit + stages.rest) / max(stages.rounds, 1)


def _stage_facts(staged: Staged, baseline: Staged, rows: Sequence[Row], base: Sequence[Row]) -> dict:
    """Milliseconds a round by stage, and three accounts of the speed-up beside the measured one."""
    stages, plain, gamma = staged.stages, baseline.stages, staged.gamma
    spent = {name: 1e3 * getattr(stages, name) / max(stages.rounds, 1) for name in ("draft", "check", "commit", "rest")}
    whole, step = _round_ms(stages), _round_ms(plain)
    tau = _accepted(rows, gamma)["tau"]
    c = spent["draft"] / gamma / step if gamma and step > 0 else 0.0
    rates = [s.tokens / (s.prefill + s.rounds * ms / 1e3) for s, ms in ((plain, step), (stages, whole))]
    return {
        "prefill_ms_per_question": 1e3 * stages.prefill / len({row.question for row in rows}),
        "rounds": stages.rounds,
        "ms_per_round": spent | {"round": whole},
        "outside_percent": 100 * (whole - spent["draft"] - spent["check"]) / whole if whole > 0 else None,
        "tau": tau,
        "gamma": gamma,
        "c": c,
        "speedup_if_check_costs_a_step": tau / (1 + c * gamma),
        "speedup_of_rounds": tau * step / whole if whole > 0 else None,
        "speedup_with_prefill": rates[1] / rates[0],
        "speedup_measured": _total(rows) / _total(base),
        "assumed": [{"round_in_plain_steps": ratio, "speedup": tau / ratio} for ratio in ASSUMED_RATIOS],
    }


def throughput_facts(rates: dict[int, dict[str, list[float]]]) -> list[dict]:
    """By batch size, tokens a second of every method and its speed-up; `rates` holds those of every run."""
    found = []
    for batch, methods in rates.items():
        base = mean(methods[PLAIN])
        facts = {
            name: {"tokens_per_second": mean(runs), "tokens_per_second_sd": spread(runs), "speedup": mean(runs) / base}
            for name, runs in methods.items()
        }
        found.append({"batch": batch, "methods": facts})
    return found


def length_facts(rows: dict[int, list[Row]], plain: Sequence[Row]) -> dict:
    """tau and speed by number of drafts, and the fastest."""
    points = [{"drafts": k} | _speed(some, plain) | {"tau": _accepted(some, k)["tau"]} for k, some in rows.items()]
    best = max(points, key=lambda point: point["speedup"])["drafts"]
    plain_rates = _rates(plain)
    return {
        "questions": len({row.question for row in plain}),
        "plain": {"tokens_per_second": mean(plain_rates), "tokens_per_second_sd": spread(plain_rates)},
        "points": points,
        "best": best,
    }
