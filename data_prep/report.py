"""What is in a run's data folder, for people: data/report/README.md with figures, and summary.json with the same numbers.

Everything is counted from the finished stores; the ledger says what is not in them, and why. What deserves a look before a drafter is
trained on it is said in words, by the rules of `worries`.

Shapes: V vocabulary.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_prep.dialogue import question_key
from data_prep.quality import repeated_share
from drafttrain import plots
from drafttrain.data import token_counts
from drafttrain.data.features import FEATURE_DTYPES
from drafttrain.data.store import Chat, TokenStore
from drafttrain.files import human_bytes, write_atomic, write_json_atomic
from drafttrain.markdown import table
from drafttrain.vocab import Cost, Counts, DraftVocabulary, arithmetic, best_size, choose, coverage, describe, size_for

FURTHER_ANSWER = re.compile(r"#(\d+|greedy)$")
HELD_OUT = "split off as held out"
"""A reason in the ledger that is no loss."""
LOOPS = 0.5
"""An answer counts as looping from this share of repeated runs of 8 tokens."""
COVERAGES = (0.9, 0.95, 0.98, 0.99, 0.995)
COLUMNS = (
    "source", "chats", "answer tokens", "mean", "median", "95%", "cut at the limit", "looping", "draft vocabulary covers",
    "of held-out answers",
)  # fmt: skip
WORRYING_SHARE = 0.2
"""Of rows dropped for one reason, and of a source's answers that loop or were cut."""
WORRYING_GAP = 0.05
"""By which the coverage of a source is below that of all others together."""
WORRYING_HELD_OUT = 0.9
"""Coverage of held-out answers below which acceptance suffers visibly: 10% of tokens that cannot be drafted end every third chain of 4."""
LEAST_TOKENS = 1000
"""Counted tokens from which a source's coverage is worth a sentence."""


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


class Tally:
    """What one reading of a store's chats leaves: facts of each, and counts of answer tokens [V] by source."""

    def __init__(self, sources: dict[str, str], ends: Sequence[int], vocab: int):
        self.sources, self.ends = sources, set(ends)
        self.facts: list[ChatFacts] = []
        self.counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(vocab, dtype=torch.int64))

    def see(self, index: int, chat: Chat) -> None:
        """Count a chat; chats come in the order of their store."""
        said = chat.supervised.numpy()
        answer = chat.ids[chat.supervised]
        ids = answer.tolist()
        starts = np.flatnonzero(np.diff(said.astype(np.int8), prepend=0) == 1)
        source = _source_of(chat.key, self.sources)
        self.counts[source].index_add_(0, answer, torch.ones_like(answer))
        stopped, repeated = ids[-1] in self.ends, repeated_share(ids)
        self.facts.append(ChatFacts(source, int(starts[0]), len(ids), len(starts), stopped, repeated))


def write_report(
    folder: Path,
    training: TokenStore,
    held_out: TokenStore,
    end_ids: Sequence[int],
    draft_vocab: int | float | Cost | None,
    taps: int | None,
    final: str = "taught",
) -> Path:
    """Writes data/report/ from the stores of a finished data folder and returns its README.

    `draft_vocab` is how many tokens, or the share to be covered, or what drafts cost, for the best size. `taps` is how many layers are
    tapped (None: not known, and nothing is said of features), `final` whose final states a drafter needs (kept_rows.py).
    """
    vocab = training.manifest.identity.vocab
    seen, held = (Tally(_sources(folder / name), end_ids, vocab) for name in ("prompts.jsonl", "held_out.jsonl"))
    counts = token_counts.count(training, visit=seen.see)
    for index in range(len(held_out)):
        held.see(index, held_out.chat(index))
    summary = _summary(training, held_out, seen, held) | _vocabulary(counts, seen, held, draft_vocab, end_ids)
    if taps is not None:
        summary["feature_bytes"] = {dtype: training.bytes_of_features(taps, dtype, final) for dtype in FEATURE_DTYPES}
    summary["worries"] = worries(summary)
    place = folder / "report"
    place.mkdir(exist_ok=True)
    figures = _figures(summary, seen.facts)
    for name, figure in figures.items():
        write_atomic(place / name, plots.png(figure))
    write_json_atomic(place / "summary.json", summary)
    write_atomic(place / "README.md", _markdown(summary, list(figures), taps, final))
    return place / "README.md"


def worries(s: dict) -> list[str]:
    """What deserves a look before a drafter is trained on this data, a sentence or two each, from the numbers of summary.json."""
    rows, found = s["rows"], []
    for reason, count in rows["dropped"].items():
        if reason != HELD_OUT and count > WORRYING_SHARE * rows["in"]:
            found.append(f"{count / rows['in']:.0%} of the rows were dropped: {reason}.")
    for name, group in s["sources"].items():
        for key, words in (("looping", "loop"), ("cut_at_limit", "were cut at the limit")):
            if group[key] > WORRYING_SHARE:
                found.append(f"{group[key]:.0%} of the answers to {name} {words}.")
        if group["answer_tokens"] >= LEAST_TOKENS and group["covered_elsewhere"] - group["covered"] > WORRYING_GAP:
            found.append(
                f"The draft vocabulary covers {group['covered']:.1%} of the answers to {name}, but {group['covered_elsewhere']:.1%} of all "
                "others. Reduced vocabularies cost other languages and rare subjects first: raise drafter.init_args.draft_vocab, or give "
                "that source more weight."
            )
    covered = s["draft_vocabulary"]["held_out"]
    if covered < WORRYING_HELD_OUT and s["held_out"]["answer_tokens"] >= LEAST_TOKENS:
        found.append(
            f"The draft vocabulary covers {covered:.1%} of held-out answers: no drafter can be accepted more often. "
            "Raise drafter.init_args.draft_vocab, or make more training answers to choose it by."
        )
    return found


def _sources(prompts: Path) -> dict[str, str]:
    """Key of a prompt -> name of its source."""
    with open(prompts, encoding="utf-8", newline="\n") as file:  # a line separator (U+2028) in a prompt ends no line
        return {row["key"]: row["source"] for row in map(json.loads, file)}


def _source_of(key: str, sources: dict[str, str]) -> str:
    key = question_key(key)
    return sources.get(key) or sources.get(FURTHER_ANSWER.sub("", key), "unknown")


def _summary(training: TokenStore, held_out: TokenStore, seen: Tally, held: Tally) -> dict:
    """Everything but the draft vocabulary."""
    return {
        "rows": training.manifest.rows,
        "notes": training.manifest.facts.get("notes", {}),
        "chats": len(training),
        "tokens": training.manifest.tokens,
        "answer_tokens": training.manifest.supervised_tokens,
        "held_out": {"chats": len(held_out), "answer_tokens": held_out.manifest.supervised_tokens},
        "turns": dict(sorted(Counter(f.turns for f in seen.facts).items())),
    }


def _vocabulary(counts: Counts, seen: Tally, held: Tally, draft_vocab: int | float | Cost | None, end_ids: Sequence[int]) -> dict:
    """The draft vocabulary, what it covers of each source, and what others would."""
    best = isinstance(draft_vocab, Cost)
    size = best_size(counts, draft_vocab) if isinstance(draft_vocab, Cost) else draft_vocab
    vocabulary = choose(counts.supervised_V, size, counts.other_V, always=end_ids)
    held_V = torch.zeros_like(counts.supervised_V)
    for source_V in held.counts.values():
        held_V += source_V
    said = [describe(vocabulary, counts)]
    if isinstance(draft_vocab, Cost):
        said.append(f"best size: {arithmetic(counts, draft_vocab, len(vocabulary.ids))}")
    names = sorted({f.source for f in seen.facts})
    return {
        "draft_vocabulary": {
            "size": len(vocabulary.ids),
            "best": best,
            "training": coverage(vocabulary, counts.supervised_V),
            "held_out": coverage(vocabulary, held_V),
            "said": said,
        },
        "sources": {name: _group(name, seen, held, vocabulary) for name in names},
        "coverage": _curve(counts, held_V),
        "size_for_coverage": {str(share): size_for(counts.supervised_V, share) for share in COVERAGES},
        "size_for_new_coverage": {str(share): counts.size_for_expected(share) for share in COVERAGES},
    }


def _group(source: str, seen: Tally, held: Tally, vocabulary: DraftVocabulary) -> dict:
    """Numbers of one source."""
    mine = [f for f in seen.facts if f.source == source]
    lengths = np.array([f.answer for f in mine])
    others_V = torch.zeros(vocabulary.size, dtype=torch.int64)
    for name, counts_V in seen.counts.items():
        if name != source:
            others_V += counts_V
    return {
        "chats": len(mine),
        "answer_tokens": int(lengths.sum()),
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p95": float(np.quantile(lengths, 0.95)),
        "cut_at_limit": float(np.mean([not f.stopped for f in mine])),
        "looping": float(np.mean([f.repeated >= LOOPS for f in mine])),
        "covered": coverage(vocabulary, seen.counts[source]),
        "covered_elsewhere": coverage(vocabulary, others_V),
        "held_out_covered": coverage(vocabulary, held.counts[source]) if source in held.counts else None,
    }


def _curve(counts: Counts, held_V: Tensor) -> dict[str, list[tuple[int, float]]]:
    """Coverage by size of the draft vocabulary: of training answers, as expected of new ones, and of held-out ones."""
    V = len(held_V)
    sizes = [*(256 << power for power in range(32) if 256 << power < V), V]
    chosen = [choose(counts.supervised_V, size, counts.other_V) for size in sizes]
    expected = counts.expected(torch.tensor(sizes)).tolist()
    return {
        "training answers": [(len(v.ids), coverage(v, counts.supervised_V)) for v in chosen],
        "new answers, expected": list(zip(sizes, expected, strict=True)),
        "held-out answers": [(len(v.ids), coverage(v, held_V)) for v in chosen],
    }


def _figures(summary: dict, facts: list[ChatFacts]) -> dict:
    """File name -> figure."""
    figures = {
        "lengths.png": plots.histograms(
            {"tokens of a prompt": [f.prompt for f in facts], "answer tokens of a chat": [f.answer for f in facts]}
        ),
        "coverage.png": plots.curves(summary["coverage"], "draft vocabulary", "share of answer tokens covered"),
    }
    if summary["rows"]["dropped"]:
        ordered = sorted(summary["rows"]["dropped"].items(), key=lambda pair: -pair[1])
        figures["dropped.png"] = plots.bars({reason: float(count) for reason, count in ordered})
    return figures


def _markdown(s: dict, figures: list[str], taps: int | None, final: str) -> str:
    rows = s["rows"]
    parts = [
        "# Training data",
        f"{s['chats']:,} chats, {s['tokens']:,} tokens, {s['answer_tokens']:,} of them answers by the target. Held out: "
        f"{s['held_out']['chats']:,} prompts with {s['held_out']['answer_tokens']:,} greedy answer tokens.",
        "## Worth a look\n\n" + ("\n".join(f"- {worry}" for worry in s["worries"]) or "Nothing stands out."),
        f"## Ledger\n\n{rows['in']:,} rows in = {rows['kept']:,} kept + {sum(rows['dropped'].values()):,} dropped.",
        table(["dropped because", "rows"], [[why, f"{n:,}"] for why, n in sorted(rows["dropped"].items(), key=lambda p: -p[1])]),
        table(["done to rows that stayed", "rows"], [[what, f"{n:,}"] for what, n in s["notes"].items()]) if s["notes"] else "",
        "## By source\n\n" + table(COLUMNS, [_source_row(name, group) for name, group in s["sources"].items()]),
        "Looping: at least half of the answer's runs of 8 tokens stood earlier in it.",
        "## Turns\n\n" + table(["supervised answers in a chat", "chats"], [[n, f"{c:,}"] for n, c in s["turns"].items()]),
        *_vocabulary_parts(s),
        "" if taps is None else _features_part(s["feature_bytes"], taps, final),
        *(f"![{name.removesuffix('.png')}]({name})" for name in figures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _features_part(sizes: dict[str, int], taps: int, final: str) -> str:
    layers = (
        f"{taps} tap{'s' if taps > 1 else ''} of the tokens that drafts see, and the final state of those that " if taps else ""
    )
    whose = "teach" if final == "taught" else "teach or are seen"
    kept = f"{layers or 'The final state of the tokens that '}{whose}"
    return f"## Stored features\n\n{kept}: " + ", ".join(f"{human_bytes(size)} in {dtype}" for dtype, size in sizes.items()) + "."


def _vocabulary_parts(s: dict) -> list[str]:
    curve = zip(*s["coverage"].values(), strict=True)
    return [
        "## Draft vocabulary\n\n" + "\n".join(f"- {line}" for line in s["draft_vocabulary"]["said"]),
        table(
            ["tokens", *s["coverage"]],
            [[f"{points[0][0]:,}", *(f"{100 * share:.1f}%" for _, share in points)] for points in curve],
        ),
        table(
            ["to cover", "of training answers", "of new answers, expected"],
            [
                [f"{float(share):.1%}", f"{size:,}", f"{s['size_for_new_coverage'][share]:,}"]
                for share, size in s["size_for_coverage"].items()
            ],
        ),
        "New answers: each question is left out in turn, and the tokens chosen by the rest.",
    ]


def _source_row(name: str, g: dict) -> list[str]:
    keys = ("cut_at_limit", "looping", "covered", "held_out_covered")
    shares = ["none" if g[key] is None else f"{100 * g[key]:.1f}%" for key in keys]
    return [name, f"{g['chats']:,}", f"{g['answer_tokens']:,}", *(f"{g[key]:.0f}" for key in ("mean", "median", "p95")), *shares]
