"""What is in a run's data folder, for people: data/report/README.md with figures, and summary.json with the same numbers.

Everything is counted from the finished stores; the ledger says what is not in them, and why.

Shapes: C chats, V vocabulary.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_prep.dialogue import question_key
from data_prep.quality import repeated_share
from drafttrain import plots
from drafttrain.data.features import FEATURE_DTYPES, feature_bytes
from drafttrain.data.store import TokenStore
from drafttrain.files import human_bytes, write_atomic, write_json_atomic
from drafttrain.markdown import table
from drafttrain.vocab import DraftVocabulary, choose, coverage, size_for

FURTHER_ANSWER = re.compile(r"#(\d+|greedy)$")
LOOPS = 0.5
"""An answer counts as looping from this share of repeated runs of 8 tokens."""
COVERAGES = (0.95, 0.98, 0.99, 0.995)
COLUMNS = ("source", "chats", "answer tokens", "mean", "median", "95%", "cut at the limit", "looping", "draft vocabulary covers")


@dataclass(frozen=True)
class ChatFacts:
    """What is counted of one chat."""

    source: str
    prompt: int
    """Tokens before the first answer."""
    answer: int
    """Supervised tokens."""
    turns: int
    """Supervised stretches."""
    stopped: bool
    """Whether the last answer ends with an end of turn."""
    repeated: float


def write_report(
    folder: Path,
    training: TokenStore,
    held_out: TokenStore,
    end_ids: Sequence[int],
    draft_vocab: int | float | None,
    taps: int,
) -> Path:
    """Writes data/report/ from the stores of a finished data folder and returns its README. `taps` is how many layers are tapped."""
    sources = _sources(folder)
    facts = [_facts(training, index, sources, set(end_ids)) for index in range(len(training))]
    supervised_V, other_V = training.counts()
    held_V = held_out.counts()[0]
    vocabulary = choose(supervised_V, draft_vocab, other_V, always=end_ids)
    summary = {
        "rows": training.manifest.rows,
        "notes": training.manifest.facts.get("notes", {}),
        "chats": len(training),
        "tokens": training.manifest.tokens,
        "answer_tokens": training.manifest.supervised_tokens,
        "held_out": {"chats": len(held_out), "answer_tokens": held_out.manifest.supervised_tokens},
        "sources": {name: _group(training, facts, name, vocabulary) for name in sorted({f.source for f in facts})},
        "turns": dict(sorted(Counter(f.turns for f in facts).items())),
        "coverage": _curve(supervised_V, other_V, held_V),
        "size_for_coverage": {str(share): size_for(supervised_V, share) for share in COVERAGES},
        "feature_bytes": {
            dtype: training.manifest.tokens * feature_bytes(taps, training.manifest.identity.hidden, dtype)
            for dtype in FEATURE_DTYPES
        },
    }
    place = folder / "report"
    place.mkdir(exist_ok=True)
    figures = {
        "lengths.png": plots.histograms(
            {"tokens of a prompt": [f.prompt for f in facts], "answer tokens of a chat": [f.answer for f in facts]}
        ),
        "coverage.png": plots.curves(summary["coverage"], "draft vocabulary", "share of answer tokens covered"),
    }
    if training.manifest.rows["dropped"]:
        ordered = sorted(training.manifest.rows["dropped"].items(), key=lambda pair: -pair[1])
        figures["dropped.png"] = plots.bars({reason: float(count) for reason, count in ordered})
    for name, figure in figures.items():
        write_atomic(place / name, plots.png(figure))
    write_json_atomic(place / "summary.json", summary)
    write_atomic(place / "README.md", _markdown(summary, list(figures), taps))
    return place / "README.md"


def _sources(folder: Path) -> dict[str, str]:
    """Key of a prompt -> name of its source."""
    with open(folder / "prompts.jsonl", encoding="utf-8") as file:
        return {row["key"]: row["source"] for row in map(json.loads, file)}


def _source_of(key: str, sources: dict[str, str]) -> str:
    key = question_key(key)
    return sources.get(key) or sources.get(FURTHER_ANSWER.sub("", key), "unknown")


def _facts(store: TokenStore, index: int, sources: dict[str, str], ends: set[int]) -> ChatFacts:
    chat = store.chat(index)
    said = chat.supervised.numpy()
    answer = chat.ids[chat.supervised].tolist()
    starts = np.flatnonzero(np.diff(said.astype(np.int8), prepend=0) == 1)
    return ChatFacts(
        _source_of(chat.key, sources), int(starts[0]), len(answer), len(starts), answer[-1] in ends, repeated_share(answer)
    )


def _group(store: TokenStore, facts: list[ChatFacts], source: str, vocabulary: DraftVocabulary) -> dict:
    """Numbers of one source."""
    mine = [index for index, f in enumerate(facts) if f.source == source]
    lengths = np.array([facts[index].answer for index in mine])
    counts_V = torch.zeros(vocabulary.size, dtype=torch.int64)
    for index in mine:
        chat = store.chat(index)
        counts_V += chat.ids[chat.supervised].bincount(minlength=len(counts_V))
    return {
        "chats": len(mine),
        "answer_tokens": int(lengths.sum()),
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p95": float(np.quantile(lengths, 0.95)),
        "cut_at_limit": float(np.mean([not facts[index].stopped for index in mine])),
        "looping": float(np.mean([facts[index].repeated >= LOOPS for index in mine])),
        "covered": coverage(vocabulary, counts_V),
    }


def _curve(supervised_V: torch.Tensor, other_V: torch.Tensor, held_V: torch.Tensor) -> dict[str, list[tuple[int, float]]]:
    """Coverage by size of the draft vocabulary, of training answers and of held-out ones."""
    size, sizes = len(supervised_V), []
    step = 256
    while step < size:
        sizes.append(step)
        step *= 2
    chosen: list[DraftVocabulary] = [choose(supervised_V, step, other_V) for step in [*sizes, size]]
    return {
        name: [(len(v.ids), coverage(v, counts_V)) for v in chosen]
        for name, counts_V in (("training answers", supervised_V), ("held-out answers", held_V))
    }


def _markdown(s: dict, figures: list[str], taps: int) -> str:
    rows = s["rows"]
    parts = [
        "# Training data",
        f"{s['chats']:,} chats, {s['tokens']:,} tokens, {s['answer_tokens']:,} of them answers by the target. Held out: "
        f"{s['held_out']['chats']:,} prompts with {s['held_out']['answer_tokens']:,} greedy answer tokens.",
        f"## Ledger\n\n{rows['in']:,} rows in = {rows['kept']:,} kept + {sum(rows['dropped'].values()):,} dropped.",
        table(["dropped because", "rows"], [[why, f"{n:,}"] for why, n in sorted(rows["dropped"].items(), key=lambda p: -p[1])]),
        table(["done to rows that stayed", "rows"], [[what, f"{n:,}"] for what, n in s["notes"].items()]) if s["notes"] else "",
        "## By source\n\n" + table(COLUMNS, [_source_row(name, group) for name, group in s["sources"].items()]),
        "Looping: at least half of the answer's runs of 8 tokens stood earlier in it.",
        "## Turns\n\n" + table(["supervised answers in a chat", "chats"], [[n, f"{c:,}"] for n, c in s["turns"].items()]),
        "## Draft vocabulary\n\n"
        + table(
            ["covers of training answers", "tokens"], [[share, f"{size:,}"] for share, size in s["size_for_coverage"].items()]
        ),
        f"## Stored features\n\nWith {taps} taps and the final state of every token: "
        + ", ".join(f"{human_bytes(size)} in {dtype}" for dtype, size in s["feature_bytes"].items())
        + ".",
        *(f"![{name.removesuffix('.png')}]({name})" for name in figures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _source_row(name: str, g: dict) -> list[str]:
    shares = [f"{100 * g[key]:.1f}%" for key in ("cut_at_limit", "looping", "covered")]
    return [name, f"{g['chats']:,}", f"{g['answer_tokens']:,}", *(f"{g[key]:.0f}" for key in ("mean", "median", "p95")), *shares]
