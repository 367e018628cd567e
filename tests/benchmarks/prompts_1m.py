"""Prompts from a file until they are ready to be asked: python tests/benchmarks/prompts_1m.py [rows] [--near] [--no-render]

Writes a JSONL file of so many rows into a temporary folder (four dialects, of 20 to 120 words; a tenth are repeats of earlier
rows, and another tenth near-repeats), then collects, drops duplicates, renders the first turns with a chat template and a
byte-level tokenizer of 320 tokens, splits off 20 held-out prompts and writes prompts.jsonl. Printed: rows per second of each
stage, and the peak of resident memory so far, of which importing torch and transformers is the first line.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from data_prep import gather as gathering
from data_prep.config import PrepareConfig
from data_prep.prompt import Prompt, Work
from data_prep.sources import JsonlPrompts
from drafttrain.target.template import ChatTemplate

MOST = 1 << 20
"""No prompt is too long here."""


class Renderer:
    """As much of a target as is needed before it speaks."""

    def __init__(self, renders: bool):
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tiny import build_tokenizer

        self.chat = ChatTemplate(build_tokenizer(), {}, "tiny")
        self.renders = renders

    def render(self, messages: list[dict], tools=None) -> list[int]:
        return self.chat.render(messages, tools) if self.renders else []


def write_rows(path: Path, rows: int) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    earlier: list[str] = []
    with open(path, "w") as file:
        for number in range(rows):
            kind, text = draw.random(), " ".join(draw.choices(words, k=draw.randint(20, 120)))
            if earlier and kind < 0.1:
                text = draw.choice(earlier)
            elif earlier and kind < 0.2:
                text = draw.choice(earlier) + " " + draw.choice(words)
            elif len(earlier) < 10_000:
                earlier.append(text)
            turn, again = {"role": "user", "content": text}, {"role": "user", "content": "And why is that so?"}
            row = (
                {"messages": [turn, {"role": "assistant", "content": "yes " * 50}, again]},
                {"messages": [{"role": "system", "content": "Be brief."}, turn]},
                {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "no " * 50}]},
                {"prompt": text},
            )[number % 4]
            file.write(json.dumps(row) + "\n")


def peak() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):5.2f} GiB at most so far"


def timed(name: str, rows: int, run):
    began = time.perf_counter()
    result = run()
    took = time.perf_counter() - began
    print(f"{name:28} {took:8.1f} s {rows / took:12,.0f} rows/s   {peak()}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--near", action="store_true", help="near-duplicates too")
    parser.add_argument("--no-render", action="store_true", help="without template and tokenizer")
    args = parser.parse_args()
    print(f"{args.rows:,} rows; {'imported':20} {peak()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, args.rows)
        print(f"{path.stat().st_size / (1 << 20):,.0f} MiB written, {peak()}")
        source = JsonlPrompts(str(path))
        config = PrepareConfig(prompts=[source], dedupe="near" if args.near else "exact", max_prompt=MOST)
        work = Work(Renderer(not args.no_render), None, Path(folder) / "data", config.chunk, lambda text: None)  # type: ignore[arg-type]
        stages = ("_collected", "askable", "_without_repeats", "hold_out", "near_duplicates", "_write")
        for name in stages:  # each stage of gather is timed where it is called
            setattr(gathering, name, _clocked(name.strip("_"), getattr(gathering, name), args.rows))
        found = timed("all", args.rows, lambda: gathering.gather(config, work))
        print(f"{len(found.training):,} prompts left; {dict(found.ledger.dropped)}")
        again: list[Prompt] = timed("read again by a restart", args.rows, lambda: gathering.gather(config, work)).training
        assert again == found.training


def _clocked(name: str, stage, rows: int):
    return lambda *arguments: timed(name, rows, lambda: stage(*arguments))


if __name__ == "__main__":
    main()
