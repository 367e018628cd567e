"""The model card (README.md) of an export: what it is, what was measured, how to serve it.

Everything comes from three files: `drafttrain.json` in the folder (what was exported, and how it was trained) and, where the drafter has been
validated or benchmarked, the report's `validation.json` and `bench.json`. A number that was not measured is not in the card, nor is a figure
(card_figures.py) without its numbers. Writing it again after `validate` or `bench` brings the numbers in.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from drafttrain.decoding.measure import defined
from drafttrain.drafters.save import MADE_FILE
from drafttrain.errors import UserError
from drafttrain.export.card_bench import bench_text
from drafttrain.export.card_figures import CardFigure, figures_of, is_unchanged, remove_others, write_figures
from drafttrain.export.card_licence import KEYS as LICENCE_KEYS
from drafttrain.export.card_licence import licence_text
from drafttrain.export.format import NAMES, Format
from drafttrain.export.registry import format_named
from drafttrain.files import public_place, read_json, write_atomic, write_json_atomic
from drafttrain.target.precision import rounded_to

MEASURED = (
    "tau", "simulated_tau", "lossless", "prompts", "tokens", "rounds", "acceptance_by_depth", "reach_by_depth",
    "tokens_per_second", "baseline_tokens_per_second", "lookup_tau", "untrained_tau", "hardware", "commit",
)  # fmt: skip
"""What is taken over from a report."""
UNMEASURED_DRAFTS = 3
"""Tokens to propose in a round where nothing was measured."""
TAU = "tau is the mean number of tokens that a target pass yields: 1 + accepted drafts.\n"
"""Said once, under the first figures."""
UNCHANGED = "Training did not improve on the drafter that it began from: these are the weights of that one."
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def write_card(folder: str | Path, report: dict | None, bench: dict | None = None) -> None:
    """Write README.md and its figures into an exported folder, and the measured numbers into its drafttrain.json.

    `report` is validation.json, and `bench` what card_bench.py keeps of bench.json; without one, its numbers that are there already stay.
    Raises UserError if the folder is no export.
    """
    folder = Path(folder)
    made = read_json(folder / MADE_FILE, "the export")
    if report is not None:
        made["measured"] = {name: report[name] for name in MEASURED if name in report}
    if bench is not None:
        made["benchmark"] = bench
    if report is not None or bench is not None:
        write_json_atomic(folder / MADE_FILE, made)
    figures = figures_of(made, made["measured"])
    write_figures(folder, figures)
    write_atomic(folder / "README.md", card_text(made, made["measured"]))
    remove_others(folder, figures)  # when no card shows them any more


def card_text(made: dict[str, Any], report: dict | None) -> str:
    """The card as text. `made` is drafttrain.json; `report` is validation.json or the part of it that is kept there, None if the
    drafter was never validated."""
    format = format_named(made, "the export")
    use = _serving(format, made, report) if format.engines else _running()
    figures = figures_of(made, report)
    measured, trained = _shown(figures, "acceptance", "categories", "speed"), _shown(figures, "training")
    parts = [
        _front_matter(format, made),
        _what(format, made),
        _measured(report),
        _benchmarked(made.get("benchmark")),
        measured,
        TAU if measured else "",
        use,
        licence_text(made),
        _notes(format, made, report),
        _training(made),
        trained,
        TAU if trained and not measured else "",
        _files(made),
    ]
    return "\n".join(part for part in parts if part)


def base_model(identity: dict[str, Any], named: str | None) -> str | None:
    """Hub id of the target: as the recipe names it, else target.path if that is one and no local place."""
    path = identity["path"]
    return named or (path if HUB_ID.fullmatch(path) and public_place(path) == path else None)


def served_by(format: Format) -> str:
    """Who loads it, with versions."""
    found = [f"{NAMES[engine.name]} ({engine.versions})" for engine in format.engines]
    return f"for {' and '.join(found)}" if found else "which no serving engine loads; drafttrain runs it"


def _front_matter(format: Format, made: dict) -> str:
    lines = ["---"]
    if made["base_model"]:
        lines += ["base_model:", f"- {made['base_model']}"]
    words = {key: made[key] for key in LICENCE_KEYS if made.get(key)}
    lines += yaml.safe_dump(words, sort_keys=False, allow_unicode=True, width=1000).splitlines() if words else []
    tags = [format.method, "speculative-decoding", "drafter", *(engine.name for engine in format.engines)]
    return "\n".join(
        [*lines, "library_name: drafttrain", "pipeline_tag: text-generation", "tags:", *[f"- {tag}" for tag in tags], "---", ""]
    )


def _what(format: Format, made: dict) -> str:
    identity, facts = made["identity"], made["config"]
    full = facts["draft_vocab"] == facts["vocab"]
    words = "every token" if full else f"{facts['draft_vocab']:,} of the target's {facts['vocab']:,} tokens"
    return f"""# {format.title} for {made["base_model"] or _called(made)}

A drafter for speculative decoding: it proposes several tokens, the target checks them in one pass, and only what the target
itself would have said is kept. {format.about(made)} It can say {words}. It is of use only with this target
(revision `{identity["revision"]}`) and its tokenizer.{_precision(identity)}
"""


def _precision(identity: dict) -> str:
    weights = rounded_to(identity["revision"])
    return (
        ""
        if weights is None
        else f" While it was trained and measured, the matrices of the target's layers were rounded to {weights}; beside other weights less may be accepted."
    )


def _measured(report: dict | None) -> str:
    if report is None:
        return "## Measured\n\nNot validated yet: no acceptance length was measured.\n"
    tau, drafts = report["tau"], len(report["acceptance_by_depth"])
    rows = [
        ("Acceptance length (tau = 1 + accepted drafts per round)", _number(tau)),
        ("Drafts per round", drafts),
        (
            "Accepted at each depth, of the rounds that reached it",
            _list(defined(report["acceptance_by_depth"], report["reach_by_depth"])),
        ),
        ("Accepted at each depth, of all rounds", _list(report["reach_by_depth"])),
        ("Output equal to plain decoding, token for token", "yes" if report["lossless"] else "**NO**"),
        ("Held-out prompts / tokens / rounds", f"{report['prompts']} / {report['tokens']:,} / {report['rounds']:,}"),
        ("Acceptance length predicted by the training forward", _number(report.get("simulated_tau"))),
        (
            "Tokens per second, this drafter / plain decoding",
            _pair(report.get("tokens_per_second"), report.get("baseline_tokens_per_second")),
        ),
        (
            "Acceptance length of prompt lookup / of the same net with fresh, untrained weights",
            _pair(report.get("lookup_tau"), report.get("untrained_tau")),
        ),
        ("Measured on", _hardware(report.get("hardware"))),
        ("By drafttrain at commit", _commit(report)),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value is not None)
    note = "Greedy decoding in drafttrain's reference engine; speed there is no forecast of a serving engine's."
    return f"## Measured\n\n| | |\n|---|---|\n{table}\n\n{note}\n"


def _benchmarked(bench: dict | None) -> str:
    if bench is None:
        return ""
    where = [_hardware(bench["hardware"]), None if _commit(bench) is None else f"drafttrain at {_commit(bench)}"]
    on = "; ".join(part for part in where if part)
    return f"## Benchmarked\n\n{bench_text(bench)} Measured on {on}.\n"


def _shown(figures: dict[str, CardFigure], *names: str) -> str:
    """Figures by these names, each with what is seen there."""
    shown = [(path, each) for path, each in figures.items() if Path(path).stem in names]
    return "\n".join(f"![{each.caption}]({path})\n\n{each.seen}\n" for path, each in shown)


def _drafts(format: Format, made: dict, report: dict | None) -> int:
    """Tokens to propose in a round: as many as were measured, or a whole block."""
    most = made["config"]["most_drafts"]
    if format.whole_block:
        return most
    return len(report["acceptance_by_depth"]) if report else min(UNMEASURED_DRAFTS, most or UNMEASURED_DRAFTS)


def _serving(format: Format, made: dict, report: dict | None) -> str:
    target, here = made["base_model"] or "PATH/TO/TARGET", made["repository"] or "PATH/TO/THIS/FOLDER"
    drafts, blocks = _drafts(format, made, report), ["## Serve"]
    for engine in format.engines:
        if engine.name == "transformers":
            blocks.append(f"transformers ({engine.versions}):\n\n```python\n{_assisted(target, here)}\n```")
            continue
        say = "" if engine.name == "sglang" else "; say the method, or it is guessed from the path"
        if engine.name == "sglang":
            command = _sglang(target, here, engine.method, drafts, format.whole_block)
        else:
            command = _vllm(target, here, engine.method, drafts, format.extra_words(engine.name))
        flags = format.extra_flags(engine.name, made, here)
        blocks.append(f"{NAMES[engine.name]} ({engine.versions}{say}):\n\n```bash\n{command}{flags}\n```")
    return "\n\n".join(blocks) + "\n"


def _assisted(target: str, here: str) -> str:
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer, model = (kind.from_pretrained("{target}") for kind in (AutoTokenizer, AutoModelForCausalLM))\n'
        f'drafter = AutoModelForCausalLM.from_pretrained("{here}")\n'
        'chat = [{"role": "user", "content": "Name three rivers."}]\n'
        'asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)\n'
        "print(tokenizer.decode(model.generate(**asked, assistant_model=drafter, do_sample=False, max_new_tokens=64)[0]))"
    )


def _vllm(target: str, here: str, method: str, drafts: int, more: dict[str, Any]) -> str:
    asked = json.dumps({"method": method, "model": here, "num_speculative_tokens": drafts} | more)
    return f"vllm serve {target} \\\n  --speculative-config '{asked}'"


def _sglang(target: str, here: str, method: str, drafts: int, whole_block: bool) -> str:
    chain = "" if whole_block else f" --speculative-num-steps {drafts} --speculative-eagle-topk 1"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} \\\n"
        f"  --speculative-draft-model-path {here}{chain} \\\n"
        f"  --speculative-num-draft-tokens {drafts + 1}"
    )


def _running() -> str:
    return """## Run

No serving engine loads this folder: vLLM, SGLang and what reads speculators' files stop at its config.json, so no server can draft with it.
drafttrain's own loop can, on one machine and for one user: `generate` answers with it, `validate` and `bench` measure it. They take a local
copy, and a recipe for the target:

```bash
python -m drafttrain generate --config RECIPE.yaml --draft PATH/TO/THIS/FOLDER --prompt "Name three rivers."
```
"""


def _notes(format: Format, made: dict, report: dict | None) -> str:
    """What the drafter costs or cannot, and what nobody has tried."""
    notes = [*made["notes"]]
    if format.engines:
        notes.append(
            f"This folder was written by the rules of {served_by(format).removeprefix('for ')} and read back by drafttrain, which starts no engine: "
            "try it in yours before you rely on it."
        )
    if report is not None or made.get("benchmark") is not None:
        notes.append(
            "Acceptance depends on what is asked: it was measured on the prompts named above, and on no other language, task, length or sampling."
        )
    return "## To know\n\n" + "\n".join(f"- {note}" for note in notes) + "\n" if notes else ""


def _training(made: dict) -> str:
    facts = {"Target": _called(made), "Template arguments": made["identity"]["template_arguments"]} | made["facts"]
    rows = [
        f"- {name.replace('_', ' ')}: {f'{value:.3f}' if isinstance(value, float) else value}"
        for name, value in facts.items()
        if isinstance(value, str | int | float | bool)
    ]
    data = _data(made["facts"].get("data"))
    unchanged = f" {UNCHANGED}" if is_unchanged(made["facts"]) else ""
    return (
        "## Trained\n\nWith drafttrain, on chats answered by the target itself, to guess the target's own next tokens at every depth of the draft."
        f"{unchanged}{data}\n\n" + "\n".join(rows) + "\n"
    )


def _data(data: dict | None) -> str:
    """Where the chats come from, as the token store's manifest says it."""
    if data is None:
        return ""
    sources = ", ".join(f"{name} ({prompts:,} prompts)" for name, prompts in data["sources"].items())
    told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in data["answers"].items())
    return (
        f" The data: {data['chats']:,} chats of {data['tokens']:,} tokens, {data['supervised_tokens']:,} of them the target's answers"
        + (f"; prompts from {sources}" if sources else "")
        + (f"; answers with {told}" if told else "")
        + "."
    )


def _called(made: dict) -> str:
    """The target as a card may call it; an export of an earlier version holds its path on the machine that trained."""
    return public_place(made["identity"]["path"])


def _files(made: dict) -> str:
    weights, dtype = made["weights"], made["dtype"]
    return (
        f"## Checked\n\n`{weights['file']}` (sha256 `{weights['sha256']}`, {weights['bytes']:,} bytes, {dtype}) was read "
        f"back from disk through `config.json` alone. {_compared(made['check'], dtype)}\n"
    )


def _compared(check: dict, dtype: str) -> str:
    """What reading back and rounding changed. Behind a selector (`against_trained` is None) a difference in logits tells nothing of what rounding
    costs: that of a token which is no candidate any more is large, however seldom it is the token that is said."""
    first = f"Its logits differ by at most {check['against_cast']:.1e} from those of the trained drafter rounded to {dtype}"
    same = f"its first choice is that of the drafter as trained in {check['same_first_choice']:.1%} of {check['rows']} places"
    if check["against_trained"] is None:
        return f"{first}; {same}."
    return f"{first}, and by {check['against_trained']:.1e} from those of the drafter as trained (largest logit {check['largest_logit']:.2f}); {same}."


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _pair(first: float | None, second: float | None) -> str | None:
    if first is None and second is None:
        return None
    return " / ".join("not measured" if value is None else f"{value:.2f}" for value in (first, second))


def _list(values: list[float | None]) -> str:
    return ", ".join("never reached" if value is None else f"{value:.3f}" for value in values)


def _hardware(hardware: dict | None) -> str | None:
    if not hardware:
        return None
    chip = hardware.get("gpu") or f"{hardware.get('cpu', 'a CPU')}, {hardware.get('threads', '?')} threads"
    return f"{chip}, torch {hardware['torch']}" if "torch" in hardware else chip


def _commit(measured: dict) -> str | None:
    commit = measured.get("commit")
    return f"`{commit[:12]}`" if commit else None


def report_of(folder: str | Path) -> dict | None:
    """The report's validation.json, or None if there is none yet. Raises UserError if it is damaged or lacks a number."""
    path = Path(folder) / "validation.json"
    if not path.exists():
        return None
    report = read_json(path, "the report")
    missing = {"tau", "lossless", "prompts", "tokens", "rounds", "acceptance_by_depth", "reach_by_depth"} - report.keys()
    if missing:
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}; run `drafttrain validate` again.")
    return report
