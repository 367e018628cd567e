"""The report in Markdown, written from the numbers in validation.json, a few marked answers and the names of the figures.

Nothing here measures or computes more than a percentage: a report can be written again from its validation.json.
"""

import json
from collections.abc import Mapping, Sequence

from drafttrain.decoding.measure import defined
from drafttrain.files import many
from drafttrain.markdown import table
from drafttrain.validation.passes import tied
from drafttrain.validation.samples import Sample

METHOD_NAMES = {"drafter": "the drafter", "lookup": "prompt lookup", "untrained": "the untrained drafter"}
LISTED_DIFFERENCES = 20

RECOUNT = """\
import json

rows = [json.loads(line) for line in open("tokens.jsonl", encoding="utf-8")]
accepted = [a for row in rows for a in row["accepted"]]
for row in rows:
    assert 1 + sum(a + 1 for a in row["accepted"]) - row["cut"] == len(row["speculative_ids"]), row["key"]
tau = 1 + sum(accepted) / len(accepted)
lossless = all(row["plain_ids"] == row["speculative_ids"] for row in rows)
print(tau, lossless)
"""
"""What the report offers to a reader who trusts nobody. Needs tokens.jsonl only."""

TOKENS_FILE = """\
`tokens.jsonl` holds, for every prompt, its ids, the plain and the speculative answer, the accepted drafts of each round and
the cut. In this folder:"""

DIFFERENCES = """\
The gap is how far the target itself, in one pass without cache, prefers plain decoding's token. One near the rounding of
the dtype is a tie, which another batch shape breaks the other way{hint}; a large one is a fault of the engine."""

CPU_NOTE = """\
A CPU is busy computing already when it decodes one token, so verifying several at once costs a multiple of one. A GPU that
serves few sequences waits for the weights to arrive from memory, so c stays little above 1 there: the assumed rows say what
the same tau would give. They are arithmetic, not measurements: measure on the machine that serves."""

POSITION_NOTE = """

Repeated text is the share of runs of 8 tokens that stood earlier in the same answer. Small targets loop when they answer greedily, and
prompt lookup copies loops."""

DEFINITIONS = """\
- **tau**, the acceptance length: 1 + accepted drafts / rounds, pooled over all rounds of all prompts: tokens per pass of
  the target. The first token of an answer comes from reading the prompt and belongs to no round. Every prompt was held to
  `1 + sum(accepted + 1) - cut = tokens emitted`, where `cut` counts tokens verified but discarded behind the end of an
  answer.
- **Accepted at depth k**: accepted at k / rounds that reached k (conditional). **Reach**: accepted at k / all rounds
  (vLLM's `per_pos`).
- **Lossless**: every answer of every method equals plain greedy decoding, token for token, by the same engine, cache and
  slots.
- **Tokens/s**: tokens decoded / wall clock of the whole set, reading of the prompts included, after a warm-up. Plain
  decoding goes on for up to `drafts` tokens behind each end, which the simulated tau needs; those count as decoded.
- **c**, the cost ratio: seconds of one speculative round / seconds of one plain step. One prompt is copied into every slot
  that the set fills, so that the batch stays full; the time of the same call limited to one token is taken off; medians of 3.
- **Simulated tau**: the plain answers walked from anchor to anchor by the training forward, unrolled to the draft length.
  It shares no record with the measured tau: where the two differ, the decoding side and the training side of the drafter
  disagree.
- **Prompt lookup** proposes what followed the last occurrence of the latest tokens in the same text, and needs no training.
  **The untrained drafter** is the same net without any training: with random weights, or with those of the `model` that
  its recipe names. A drafter that training began from (`checkpoint.start`) is another one, and is not measured."""


def render(result: Mapping, samples: Sequence[Sample], figures: Mapping[str, str]) -> str:
    """The report.

    Args:
        result: what validation.json holds.
        samples: answers to show.
        figures: caption -> file name, in the order to be shown.
    """
    parts = [
        f"# Validation of {result.get('name') or 'a drafter'}",
        _answer(result),
        _differences(result),
        "## By method\n\n" + _methods(result),
        "## By depth\n\n" + _depths(result),
        "## By position in the answer\n\n" + _positions(result),
        "\n\n".join(f"![{caption}]({name})" for caption, name in figures.items()),
        "## What it means for speed\n\n" + _speed(result),
        "## Simulated beside measured\n\n" + _simulation(result),
        "## How each number was made\n\n" + _made(result) + "\n\n" + DEFINITIONS,
        "## Count again\n\n" + _recount(result),
        "## Sample answers\n\n" + _samples(samples),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _answer(r: Mapping) -> str:
    """The first lines: tau, losslessness, speed; losslessness first where it failed."""
    beside = [f"{METHOD_NAMES[m]} {r['methods'][m]['tau']:.3f}" for m in ("lookup", "untrained") if m in r["methods"]]
    against = f" ({', '.join(beside)})" if beside else ""
    tau = f"**tau {r['tau']:.3f}** tokens per target pass with {many(r['drafts'], 'draft')}{against}."
    plain = f"{r['baseline_tokens_per_second']:.1f} by plain decoding on this {_device(r)}"
    speed = f"**{r['tokens_per_second']:.1f} tokens/s** against {plain}: {_times(r['speedup'])}{_verdict(r)}."
    ahead = _lookup_ahead(r)
    if r["lossless"]:
        amount = f"{'all' if r['prompts'] > 1 else 'the'} {many(r['prompts'], 'prompt')} ({many(r['tokens'], 'token')})"
        lines = [tau, f"**Lossless**: output equal to plain decoding, token for token, on {amount}.", speed]
    elif not (wrong := {d["key"] for d in r["differences"] if not tied(d["gap"])}):
        lines = [tau, _ties(r), speed]
    else:
        amount = f"{len(wrong)} of {many(r['prompts'], 'prompt')}"
        lines = [
            f"**NOT LOSSLESS**: output differs from plain decoding on {amount}. No other number counts until it does not.",
            tau,
            speed,
        ]
    return "\n".join(f"- {line}" for line in [*lines, ahead] if line)


def _ties(r: Mapping) -> str:
    amount = f"{len({d['key'] for d in r['differences']})} of {many(r['prompts'], 'prompt')}"
    return f"Lossless but for ties: output differs from plain decoding on {amount}, {tie_words(r['differences'])}{settled(r)}."


def tie_words(differences: Sequence[Mapping]) -> str:
    """Why answers that part at ties are no faults."""
    largest = max(abs(d["gap"]) for d in differences)
    return f"where two tokens tie (gap up to {largest:.2g}) and rounding breaks the tie either way"


def settled(r: Mapping) -> str:
    """What to do about ties; nothing in fp32, where they are as good as equal."""
    return "" if r["target"]["dtype"] == "float32" else " (`--target.dtype float32` settles it)"


def _lookup_ahead(r: Mapping) -> str:
    lookup = r["methods"].get("lookup")
    if not lookup or lookup["tau"] <= r["tau"]:
        return ""
    taus = f"tau {lookup['tau']:.3f} against {r['tau']:.3f}"
    return f"Prompt lookup, which needs no training, is ahead ({taus}): train longer or on more chats."


def _verdict(r: Mapping) -> str:
    if r["speedup"] >= 1:
        return ""
    if not r["cost"]:
        return ", slower"
    tau, c, implied, first = r["tau"], r["cost_ratio"], r["cost"]["implied_speedup"], r["cost"]["assumed"][0]
    if tau >= c:  # the arithmetic promises more than was measured
        return (
            f", slower, though tau / c = {tau:.3f} / {c:.2f} = {_times(implied)}: each pass over the whole set was timed once, so other "
            "load on the machine shows in it; run validate again"
        )
    would = f"a machine with c = {first['ratio']} would make {_times(first['implied_speedup'])} of the same tau; "
    cheaper = would if first["ratio"] < round(c, 1) else ""  # this machine is as good
    return f", slower, because a round costs c = {c:.2f} plain steps here, and gives tau = {tau:.3f} tokens ({cheaper}see below)"


def _differences(r: Mapping) -> str:
    if not r["differences"]:
        return ""
    rows = []
    for d in r["differences"][:LISTED_DIFFERENCES]:
        rows.append([d["method"], d["key"], d["position"], _or_ended(d["plain"]), _or_ended(d["other"]), _gap(d["gap"])])
    more = len(r["differences"]) - len(rows)
    listed = table(["method", "prompt", "answer position", "plain token", "its token", "logit gap"], rows)
    rest = f"\n\n{more} more in validation.json." if more else ""
    return f"### Where the output leaves plain decoding\n\n{listed}{rest}\n\n{DIFFERENCES.format(hint=settled(r))}"


def _methods(r: Mapping) -> str:
    plain = r["plain"]
    rows = [["plain decoding", "1", "", f"{plain['tokens']:,}", "", f"{plain['tokens_per_second']:.1f}", _times(1)]]
    for name, m in r["methods"].items():
        row = [
            METHOD_NAMES[name],
            f"{m['tau']:.3f}",
            "yes" if m["lossless"] else _unequal(r, name),
            f"{m['tokens']:,}",
            f"{m['rounds']:,}",
        ]
        rows.append(row + [f"{m['tokens_per_second']:.1f}", _times(m["speedup"])])
    return table(["method", "tau", "equal to plain", "tokens", "rounds", "tokens/s", "against plain"], rows)


def _unequal(r: Mapping, method: str) -> str:
    return "but for ties" if all(tied(d["gap"]) for d in r["differences"] if d["method"] == method) else "**NO**"


def _depths(r: Mapping) -> str:
    rows = []
    for name, m in r["methods"].items():
        rows.append(
            [
                METHOD_NAMES[name],
                "of the rounds that got there",
                *map(percent, defined(m["acceptance_by_depth"], m["reach_by_depth"])),
            ]
        )
        rows.append(["", "of all rounds (reach)", *map(percent, m["reach_by_depth"])])
    return table(["method", "accepted", *(f"depth {k}" for k in range(1, r["drafts"] + 1))], rows)


def _positions(r: Mapping) -> str:
    rows: list[list[object]] = [
        [METHOD_NAMES[name], *("n/a" if tau is None else f"{tau:.3f}" for tau in m["tau_by_position"])]
        for name, m in r["methods"].items()
    ]
    rows.append(["repeated text", *map(percent, r["repeated_by_position"])])
    return (
        table(["tau of rounds that begin at token", *(f"{start}-{end}" for start, end in r["positions"])], rows) + POSITION_NOTE
    )


def _speed(r: Mapping) -> str:
    tau, cost = r["tau"], r["cost"]
    if not cost:
        return "The answers are too short, or this target too fast for the clock, to time one round: no cost ratio."
    step, one_round, c = 1000 * cost["plain_step_seconds"], 1000 * cost["round_seconds"], cost["ratio"]
    rows = [["measured here", f"{c:.2f}", f"{tau:.3f} / {c:.2f} = **{_times(cost['implied_speedup'])}**"]]
    for a in cost["assumed"]:
        rows.append(["assumed", f"{a['ratio']:.2f}", f"{tau:.3f} / {a['ratio']:.2f} = {_times(a['implied_speedup'])}"])
    parts = [
        f"A round drafts {many(r['drafts'], 'token')}, verifies {r['drafts'] + 1} in one pass of the target and emits tau = {tau:.3f}.\n"
        f"At batch {cost['batch']} on this {_device(r)} it takes {one_round:.1f} ms, and a plain step {step:.1f} ms:\n"
        f"c = {one_round:.1f} / {step:.1f} = {c:.2f}. Speculative decoding pays where tau > c:",
        "    speed-up = tau / c",
        table(["cost of a round, in plain steps", "c", "speed-up"], rows),
        f"The whole set gave {_times(r['speedup'])}: it was timed once, and also holds the reading of prompts and the emptier batches at its end.",
        CPU_NOTE if _device(r) == "CPU" else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _simulation(r: Mapping) -> str:
    s, first = r["simulation"], r["simulation"]["first_disagreement"]
    simulated, measured = f"{s['tau']:.4f} over {s['rounds']:,} rounds", f"{r['tau']:.4f} over {r['rounds']:,}"
    text = f"Simulated tau {simulated}, measured {measured}: {100 * s['relative_difference']:+.2f}%.\n"
    if first is None:
        return text + "Every round of every prompt agrees."
    counts = f"simulated {_or_ended(first['simulated'])} accepted, measured {_or_ended(first['measured'])}"
    return text + f"First disagreement: prompt {first['prompt']}, round {first['round']}: {counts}."


def _made(r: Mapping) -> str:
    c, v = r["config"], r["draft_vocabulary"]
    rows = [
        *provenance(r),
        [
            "set",
            f"{many(r['prompts'], 'held-out prompt')}; answers up to {c['max_tokens']} tokens, {c['slots']} at a time; temperature 0",
        ],
        ["draft vocabulary", f"{v['size']:,} of {v['target_size']:,} tokens: {percent(v['coverage'])} of these answers' tokens"],
        ["drafter", f"{r['draft']}/" if r.get("draft") else ""],
        ["export", r.get("export_hash") or ""],
        ["date", r["date"]],
    ]
    return table(["", ""], [row for row in rows if row[1]])


def provenance(r: Mapping) -> list[list[str]]:
    """Rows of a table that say what made a report, where, and of which target; a row without content is not shown."""
    h, target = r["hardware"], r["target"]
    gpu = f"{h['gpu']} (CUDA {h['cuda']}), " if "gpu" in h else ""
    speed = f"{h['gflops_2048_fp32']:.0f} GFLOP/s in a 2048³ fp32 product"
    rounded = f", matrices in {target['weights']}" if target.get("weights") else ""
    versions = {"python": h["python"], "torch": h["torch"]} | r["versions"]
    return [
        ["command", f"`{r['command']}`" if r.get("command") else ""],
        ["commit", r.get("commit") or "not a checkout"],
        ["machine", f"{gpu}{h['cpu']}, {h['cores']} cores, {h['threads']} threads; {speed}"],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["target", f"{target['path']} (revision {target['revision'] or 'none'}), {target['dtype']}{rounded}"],
    ]


def _recount(r: Mapping) -> str:
    call = f"generate(prompt_ids, do_sample=False, max_new_tokens=limit, eos_token_id={json.dumps(r['end_ids'])})"
    return (
        f"{TOKENS_FILE}\n\n```python\n{RECOUNT}```\n\nTo make the plain answers without drafttrain: transformers'\n`{call}`\n"
        "on the same target in the same dtype, with `limit` from the prompt's row."
    )


def _samples(samples: Sequence[Sample]) -> str:
    intro = "Accepted drafts are underlined; one pass of the target gave an underlined run and the token behind it."
    return "\n\n".join([intro, *(f"**{s.key}**: {s.prompt}\n\n<pre>{s.answer}</pre>" for s in samples)])


def _device(r: Mapping) -> str:
    return "GPU" if r["hardware"]["device"] == "cuda" else "CPU"


def _times(factor: float) -> str:
    return f"{factor:.2f}×"


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.1f}%"


def _gap(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _or_ended(value: int | None) -> str:
    return "ended" if value is None else str(value)
