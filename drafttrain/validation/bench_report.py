"""The benchmark's report in Markdown, written from the numbers in bench.json and the names of the figures."""

from collections.abc import Mapping, Sequence

from drafttrain.files import many
from drafttrain.markdown import table
from drafttrain.validation.bench_config import PLAIN
from drafttrain.validation.bench_passes import Row
from drafttrain.validation.passes import tied
from drafttrain.validation.report import percent, provenance, settled, tie_words

LISTED = 20
"""Differences and skipped questions that the report shows; bench.json has all."""

RECOUNT = """\
import json
from statistics import mean

rows = [json.loads(line) for line in open("bench.jsonl", encoding="utf-8")]
rows = [row for row in rows if row["part"] == "questions"]
rate = lambda row: sum(row["tokens"]) / row["seconds"]
for temperature, method in dict.fromkeys((row["temperature"], row["method"]) for row in rows):
    runs = {}
    for row in rows:
        if row["temperature"] == temperature and row["method"] in (method, "plain"):
            runs.setdefault(row["run"], {}).setdefault(row["method"], []).append(row)
    speedup = mean(mean(map(rate, run[method])) / mean(map(rate, run["plain"])) for run in runs.values())
    accepted = [a for run in runs.values() for row in run[method] for turn in row["accepted"] for a in turn]
    print(temperature, method, f"tau {1 + mean(accepted):.3f}, speed-up {speedup:.3f}")
"""
"""What the report offers to a reader who trusts nobody. Needs bench.jsonl only."""

DEFINITIONS = """\
- **Protocol** (Spec-Bench, Xia et al. 2024): one question at a time, after a warm-up of each method; the device is waited for before and
  after every question, and the methods answer each question one after another. A question's rate is its tokens by its seconds, all its
  turns together, reading its prompts included. Prompts of later turns hold plain decoding's answers, made once, so every method reads the
  same prompts.
- **Speed-up**: mean of the questions' rates / mean of plain decoding's rates, in every run; then the mean over runs, and ± the standard
  deviation over runs. *Total*: all tokens by all seconds, against plain decoding's.
- **Plain decoding** is the same engine, with the same cache and graphs, and no drafts.
- **tau**: 1 + accepted drafts / rounds, pooled over all rounds; an answer's first token comes from its prompt and belongs to no round.
- **Accepted at depth k**: accepted at k / rounds that kept k - 1 drafts and proposed one behind them. **Reach**: accepted at k / all rounds.
- **Equal to plain**: every answer, token for token, in every run. At a temperature above 0 each question has its own random numbers, the
  same for every method; a method that draws its drafts keeps only the distribution, and is not compared.
- **Stages** are timed in a pass of their own: *draft*, *check* (the target reads the drafts and keeps some), *commit* (buffers), and *rest*,
  what the host adds."""

CPU_NOTE = """\
A CPU is busy computing already when it decodes one token, so checking several at once costs a multiple of one, and hardly any speed-up
is to be expected. A GPU that serves few sequences waits for the weights to arrive from memory, so a round costs little more than a plain step
there: the assumed columns say what the same tau would give. They are arithmetic, not measurements: measure on the machine that serves."""

ARITHMETIC = """\
With c the draft time for each drafted token in plain steps, and gamma drafts a round, speed-up = tau / (1 + c gamma) if checking drafts costs
no more than a plain step. With all of a round it is tau × plain step / round; with the reading of prompts it should be what was measured: the *total* above."""

DIFFERENCES = """\
The gap is how far the other token was from being plain decoding's, by the target in one pass without cache: in logits at temperature 0, in
probability above. One near the rounding of the dtype is a tie, which a pass of another shape breaks the other way{hint};
a large one is a fault."""


def run_line(rows: Sequence[Row], repeats: int) -> str:
    """What is said when all methods have gone once through the questions."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.method] = seconds.get(row.method, 0.0) + row.seconds
    spent = ", ".join(f"{method} {total:.1f}" for method, total in seconds.items())
    return f"temperature {rows[0].temperature:g}, {rows[0].part}, run {rows[0].run} of {repeats}, seconds: {spent}"


def method_line(temperature: float, label: str, facts: Mapping, questions: int) -> str:
    """What is said when a method was measured."""
    equal = _equal(facts).replace("*", "")
    return (
        f"temperature {temperature:g}, {label}: {many(questions, 'question')}, {_with(facts, 'tokens_per_second', '.1f')} tokens/s, "
        f"speed-up {_with(facts, 'speedup', '.2f')}, tau {facts['tau']:.3f}, equal to plain: {equal}"
    )


def render(result: Mapping, figures: Mapping[str, str]) -> str:
    """The report. `figures`: file name -> caption, in the order to be shown."""
    parts = [f"# Benchmark of {result['name'] or 'a drafter'}", _answer(result)]
    for each in result["temperatures"]:
        ending = f"-t{each['temperature']:g}.png"
        parts += [
            f"## Temperature {each['temperature']:g}",
            _methods(each),
            _categories(each),
            *_shown(figures, ending),
            _depths(each),
        ]
    parts += [
        "## Where the time goes",
        _stages(result),
        *_shown(figures, "stages.png"),
        _arithmetic(result),
        _lengths(result),
        *_shown(figures, "drafts.png"),
        _batches(result),
        *_shown(figures, "batches.png"),
        _differences(result),
        _skipped(result),
        "## How each number was made",
        _made(result),
        DEFINITIONS,
        f"## Count again\n\n`bench.jsonl` has a line for each question, method and run. In this folder:\n\n```python\n{RECOUNT}```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(figures: Mapping[str, str], ending: str) -> list[str]:
    return [f"![{caption}]({name})" for name, caption in figures.items() if name.endswith(ending)]


def _answer(r: Mapping) -> str:
    """The first lines: losslessness, the fastest method, and what a CPU makes of it."""
    lines = []
    if r["lossless"]:
        lines.append("**Lossless**: every answer that was compared equals plain decoding's, token for token.")
    else:
        lines.append(_unequal(r))
    for each in r["temperatures"]:
        methods = {name: m for name, m in each["methods"].items() if name != PLAIN}
        if methods:
            name = max(methods, key=lambda label: methods[label]["speedup"])
            base = f"{_with(each['methods'][PLAIN], 'tokens_per_second', '.1f')} tokens/s"
            once = " (one run each, so no spread)" if methods[name]["speedup_sd"] is None else ""
            gained = f"**{_with(methods[name], 'speedup', '.2f')}** times the speed of plain decoding ({base})"
            lines.append(
                f"Temperature {each['temperature']:g}: **{name}** is fastest, {gained}, at tau {methods[name]['tau']:.3f}{once}."
            )
    if r["hardware"]["device"] == "cpu":
        lines.append(CPU_NOTE.replace("\n", " "))
    return "\n".join(f"- {line}" for line in lines)


def _unequal(r: Mapping) -> str:
    """Ties alone are told as such."""
    found = r["differences"]
    ties = sum(tied(d["gap"]) for d in found)
    if ties == len(found):
        return f"Lossless but for ties: {many(ties, 'answer')} left plain decoding, {tie_words(found)}{settled(r)}."
    more = f", and in {ties} more at a tie" if ties else ""
    amount = f"{many(len(found) - ties, 'answer')}{more}"
    return f"**Not equal to plain decoding** in {amount}: see the gaps below, which tell ties from faults."


def _methods(each: Mapping) -> str:
    rows = []
    for name, m in each["methods"].items():
        speed = [_with(m, "tokens_per_second", ".1f"), _with(m, "speedup", ".2f"), f"{m['speedup_total']:.2f}"]
        rows.append([name, f"{m['tau']:.3f}", *speed, _equal(m), f"{m['tokens']:,}"])
    refused = [f"{name}: no CUDA graphs ({m['graphs_refused']})" for name, m in each["methods"].items() if m["graphs_refused"]]
    header = ["method", "tau", "tokens/s", "speed-up", "total", "equal to plain", "tokens"]
    return "\n\n".join([table(header, rows), *refused])


def _categories(each: Mapping) -> str:
    """tau and speed-up of every method, a row for each category where there are several, and one for all questions."""
    methods = {name: m["categories"] for name, m in each["methods"].items() if name != PLAIN}
    rows = []
    for category, plain in each["methods"][PLAIN]["categories"].items():
        cells = [_both(categories[category]) for categories in methods.values()]
        rows.append([_named(category), plain["questions"], f"{plain['tokens_per_second']:.1f}", *cells])
    whole = each["methods"][PLAIN]
    overall = [_both(m) for name, m in each["methods"].items() if name != PLAIN]
    total = ["all questions", each["questions"], f"{whole['tokens_per_second']:.1f}", *overall]
    return table(["tau, speed-up", "questions", "plain tokens/s", *methods], [*(rows if len(rows) > 1 else []), total])


def _named(category: str) -> str:
    """bench.json calls those of no category `all`, which a reader takes for the whole."""
    return "without category" if category == "all" else category


def _both(facts: Mapping) -> str:
    return f"{facts['tau']:.3f}, {_with(facts, 'speedup', '.2f')}"


def _depths(each: Mapping) -> str:
    methods = {name: m for name, m in each["methods"].items() if name != PLAIN}
    deepest = max((m["drafts"] for m in methods.values()), default=0)
    rows = []
    for name, m in methods.items():
        missing = [""] * (deepest - m["drafts"])
        rows.append([name, "of the rounds that got there", *map(percent, m["acceptance_by_depth"]), *missing])
        rows.append(["", "of all rounds (reach)", *map(percent, m["reach_by_depth"]), *missing])
    return table(["method", "accepted", *(f"depth {k}" for k in range(1, deepest + 1))], rows) if rows else ""


def _stages(r: Mapping) -> str:
    b = r["breakdown"]
    rows = []
    for name, m in b["methods"].items():
        spent = [f"{m['ms_per_round'][stage]:.2f}" for stage in ("draft", "check", "commit", "rest", "round")]
        outside = "" if name == PLAIN or m["outside_percent"] is None else f"{m['outside_percent']:.1f}%"
        rows.append([name, *spent, outside, f"{m['prefill_ms_per_question']:.1f}"])
    header = [
        "milliseconds a round",
        "draft",
        "check",
        "commit",
        "rest",
        "round",
        "outside draft and check",
        "prompts, ms a question",
    ]
    return f"{many(len(b['questions']), 'question')}, temperature {b['temperature']:g}.\n\n{table(header, rows)}"


def _arithmetic(r: Mapping) -> str:
    cpu = r["hardware"]["device"] == "cpu"
    rows = []
    for name, m in r["breakdown"]["methods"].items():
        if name == PLAIN:
            continue
        tau, step, whole = m["tau"], r["breakdown"]["plain_step_ms"], m["ms_per_round"]["round"]
        by_c = f"{tau:.3f} / (1 + {m['c']:.3f} × {m['gamma']}) = {m['speedup_if_check_costs_a_step']:.2f}"
        by_round = f"{tau:.3f} × {step:.2f} / {whole:.2f} = {_number(m['speedup_of_rounds'])}"
        row = [name, by_c, by_round, f"{m['speedup_with_prefill']:.2f}", f"**{m['speedup_measured']:.2f}**"]
        rows.append(row + ([f"{a['speedup']:.2f}" for a in m["assumed"]] if cpu else []))
    header = ["method", "tau / (1 + c gamma)", "tau × plain step / round", "with the prompts", "measured"]
    if cpu and rows:
        assumed = next(m for name, m in r["breakdown"]["methods"].items() if name != PLAIN)["assumed"]
        header += [f"assumed: a round costs {a['round_in_plain_steps']:g} steps" for a in assumed]
    return f"{ARITHMETIC}\n\n{table(header, rows)}"


def _lengths(r: Mapping) -> str:
    d = r["draft_length"]
    if not d:
        return ""
    rows = [["plain", "1.000", _with(d["plain"], "tokens_per_second", ".1f"), "1.00"]]
    for p in d["points"]:
        mark = "**" if p["drafts"] == d["best"] else ""
        speed = [_with(p, "tokens_per_second", ".1f"), _with(p, "speedup", ".2f")]
        rows.append([f"{mark}{p['drafts']}{mark}", f"{p['tau']:.3f}", *speed])
    size = f"A chain on {many(d['questions'], 'question')}, plain decoding beside it. Fastest: {d['best']}."
    return f"## Draft length\n\n{size}\n\n" + table(["drafts", "tau", "tokens/s", "speed-up"], rows)


def _batches(r: Mapping) -> str:
    if not r["throughput"]:
        return ""
    names = list(r["throughput"][0]["methods"])
    rows = []
    for b in r["throughput"]:
        cells = [
            f"{m['tokens_per_second']:,.1f}" + (f" ({m['speedup']:.2f})" if n != PLAIN else "") for n, m in b["methods"].items()
        ]
        rows.append([b["batch"], *cells])
    intro = "Tokens/s of all answers together, prompts included, and in brackets against plain decoding at the same batch size."
    return f"## Throughput\n\n{intro}\n\n" + table(["answers at a time", *names], rows)


def _differences(r: Mapping) -> str:
    if not r["differences"]:
        return ""
    rows = []
    for d in r["differences"][:LISTED]:
        tokens = ["ended" if d[k] is None else d[k] for k in ("plain", "other")]
        gap = "" if d["gap"] is None else f"{d['gap']:.3g}"
        rows.append([f"{d['temperature']:g}", d["method"], d["key"], d["position"], *tokens, gap])
    header = ["temperature", "method", "question/turn", "answer position", "plain token", "its token", "gap"]
    more = len(r["differences"]) - len(rows)
    rest = f"\n\n{more} more in bench.json." if more else ""
    return f"## Where answers leave plain decoding\n\n{table(header, rows)}{rest}\n\n{DIFFERENCES.format(hint=settled(r))}"


def _skipped(r: Mapping) -> str:
    if not r["skipped"]:
        return ""
    listed = "\n".join(f"- {s['question']}: {s['why']}" for s in r["skipped"][:LISTED])
    more = len(r["skipped"]) - LISTED
    rest = f"\n\n{more} more in bench.json." if more > 0 else ""
    were = "was" if len(r["skipped"]) == 1 else "were"
    return f"## Left out\n\n{many(len(r['skipped']), 'question')} {were} not asked:\n\n{listed}{rest}"


def _made(r: Mapping) -> str:
    c = r["config"]
    asked = ", ".join(f"{number} {_named(name)}" for name, number in r["categories"].items())
    rows = [
        *provenance(r),
        ["drafter", r.get("draft") or ""],
        ["export", r.get("export_hash") or ""],
        ["questions", f"{asked}; from {c['prompts'] or 'the held-out prompts of the run'}; answers up to {c['max_tokens']} tokens"],
        ["runs", f"{c['repeats']} timed, after {many(c['warm_up'], 'question')} or more to warm up"],
        ["date", r["date"]],
    ]  # fmt: skip
    return table(["", ""], [row for row in rows if row[1]])


def _equal(facts: Mapping) -> str:
    if not facts["exact"]:
        return "in distribution, not compared"
    if not facts["different"]:
        return "yes"
    if facts["different"] == facts.get("ties"):
        return f"yes, but for ties in {many(facts['different'], 'question')}"
    return f"**not in {many(facts['different'], 'question')}**"


def _with(facts: Mapping, key: str, form: str) -> str:
    """A mean with the standard deviation over runs, where there are several."""
    sd = facts[f"{key}_sd"]
    return format(facts[key], form) + ("" if sd is None else f" ± {sd:{form}}")


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
