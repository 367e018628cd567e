"""What a model card takes over from a benchmark: tau and speed by method and category, and where they were measured.

`bench_of` reads report/bench/bench.json and keeps what the card shows; drafttrain.json holds it as `benchmark`. Of the file of questions only its
name is kept, for a card is public.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import read_json
from drafttrain.markdown import table

PLAIN, UNSORTED = "plain", "all"
"""What bench.json calls plain decoding, and questions that name no category."""
OVERALL, UNNAMED = "all questions", "no category"
"""What the card calls all of them together, and the latter."""
OF_A_METHOD = ("tau", "tokens_per_second", "tokens_per_second_sd", "speedup", "speedup_sd", "exact", "different")
DEPTHS = ("acceptance_by_depth", "reach_by_depth")


def bench_of(folder: str | Path) -> dict[str, Any] | None:
    """What a card keeps of the benchmark in a report's folder, with the sha256 of the weights as `export_hash`; None if there is none yet.
    Raises UserError if bench.json is damaged or lacks a number."""
    path = Path(folder) / "bench" / "bench.json"
    if not path.exists():
        return None
    result = read_json(path, "the benchmark")
    try:
        return _kept(result)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} lacks a number that every benchmark has ({error}); run `drafttrain bench` again.") from error


def _kept(result: Mapping[str, Any]) -> dict[str, Any]:
    tables = [
        {
            "temperature": each["temperature"],
            "questions": each["questions"],
            "methods": {
                name: {key: m[key] for key in (*OF_A_METHOD, *DEPTHS)}
                | {"categories": {label: {"tau": c["tau"]} for label, c in m["categories"].items()}}
                for name, m in each["methods"].items()
            },
        }
        for each in result["temperatures"]
    ]
    length, config = result["draft_length"], result["config"]
    return {
        "export_hash": result.get("export_hash"),
        "commit": result["commit"],
        "hardware": result["hardware"],
        "date": result["date"],
        "prompts": Path(config["prompts"]).name if config["prompts"] else None,
        "max_tokens": config["max_tokens"],
        "repeats": config["repeats"],
        "categories": result["categories"],
        "fastest_drafts": length["best"] if length else None,
        "temperatures": tables,
    }


def drafting(each: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods of one temperature but plain decoding."""
    return {name: m for name, m in each["methods"].items() if name != PLAIN}


def tau_by_category(bench: Mapping[str, Any] | None) -> dict[str, dict[str, float]]:
    """Category -> method -> tau at the first temperature, all questions together last; {} where no question names a category."""
    if bench is None or bench["categories"].keys() <= {UNSORTED}:
        return {}
    methods = drafting(bench["temperatures"][0])
    named = {UNSORTED: UNNAMED}
    found = {
        named.get(category, category): {label: m["categories"][category]["tau"] for label, m in methods.items()}
        for category in bench["categories"]
    }
    return found | {OVERALL: {label: m["tau"] for label, m in methods.items()}} if methods else {}


def bench_text(bench: Mapping[str, Any]) -> str:
    """The tables: speed by method at every temperature, and tau by category at the first."""
    rows = [_row(each["temperature"], name, m) for each in bench["temperatures"] for name, m in each["methods"].items()]
    parts = [table(["temperature", "method", "tau", "tokens/s", "speed-up", "equal to plain decoding"], rows)]
    if by_category := tau_by_category(bench):
        labels = list(by_category[OVERALL])
        counts = {UNNAMED if name == UNSORTED else name: number for name, number in bench["categories"].items()}
        cells = [
            [name, counts.get(name, sum(counts.values())), *(f"{values[label]:.3f}" for label in labels)]
            for name, values in by_category.items()
        ]
        where = f"tau by category, temperature {bench['temperatures'][0]['temperature']:g}"
        parts.append(table([where, "questions", *labels], cells))
    parts.append(_how(bench))
    return "\n\n".join(parts)


def _row(temperature: float, name: str, m: Mapping[str, Any]) -> list[object]:
    return [
        f"{temperature:g}",
        name,
        f"{m['tau']:.3f}",
        _with(m, "tokens_per_second", ".1f"),
        _with(m, "speedup", ".2f"),
        "in distribution" if not m["exact"] else "yes" if not m["different"] else f"not in {m['different']} answers",
    ]


def _how(bench: Mapping[str, Any]) -> str:
    number, asked = sum(bench["categories"].values()), bench["prompts"] or "the run's held-out prompts"
    best = bench["fastest_drafts"]
    fastest = "" if best is None else f" The fastest chain there has {best} drafts."
    runs = "one timed run" if bench["repeats"] == 1 else f"mean of {bench['repeats']} timed runs"
    return f"{number} questions of {asked}, one at a time, answers up to {bench['max_tokens']} tokens; {runs}.{fastest}"


def _with(facts: Mapping[str, Any], key: str, form: str) -> str:
    """A mean with the standard deviation over runs, where there are several."""
    sd = facts[f"{key}_sd"]
    return format(facts[key], form) + ("" if sd is None else f" ± {sd:{form}}")
