"""Prompts from a file until they are ready to be asked, or trained on: python tests/benchmarks/prompts_1m.py [rows] [--near] [--no-render] [--pack]

Writes a JSONL file of so many rows into a temporary folder (four dialects, of 20 to 120 words; a tenth are repeats of earlier
rows, and another tenth near-repeats), then collects, drops duplicates, renders the first turns with a chat template and a
byte-level tokenizer of 320 tokens, splits off 20 held-out prompts and writes prompts.jsonl. With --pack the whole data stage runs, every
question answered with 8 made-up tokens instead of by a target, and the chats of the store are packed into rows of 2,048 tokens. Printed:
rows per second of each stage, and the largest memory of this process and all that it started, sampled ten times a second: its own
(resident and anonymous), and with the mapped files that the kernel may drop at any time. Importing torch and transformers is the first line.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from data_prep import gather as gathering
from data_prep import pipeline
from data_prep.config import PrepareConfig
from data_prep.prompt import Prompt, Work
from data_prep.sources import JsonlPrompts
from drafttrain.data.packing import RowPlan, read_chats
from drafttrain.target.template import ChatTemplate
from drafttrain.types import Identity, Request, Rollout

MOST = 1 << 20
"""No prompt is too long here."""
ANSWER = 8
"""Tokens of a made-up answer."""
PAGE = resource.getpagesize()
ROW = 2048
"""Tokens of a packed row."""


class Memory:
    """The largest resident memory of this process and its descendants together."""

    def __init__(self):
        self.own = self.mapped = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def __str__(self) -> str:
        self._look()
        return f"{self.own / (1 << 30):5.2f} GiB at most so far, {self.mapped / (1 << 30):5.2f} with mapped files"

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(0.1)

    def _look(self) -> None:
        resident, files = _resident()
        self.own, self.mapped = max(self.own, resident - files), max(self.mapped, resident)


def _resident() -> tuple[int, int]:
    """Bytes of the process tree, and how many of them are mapped files. Pages that processes share are counted once for each."""
    total, files, tree = 0, 0, [Path("/proc/self")]
    while tree:
        process = tree.pop()
        try:
            resident, shared = (process / "statm").read_text().split()[1:3]
            total, files = total + int(resident) * PAGE, files + int(shared) * PAGE
            for task in (process / "task").iterdir():
                tree += [Path("/proc") / child for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return total, files


class Standin:
    """As much of a target as data preparation needs where somebody else speaks."""

    def __init__(self, renders: bool):
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tiny import build_tokenizer

        self.tokenizer = build_tokenizer()
        self.chat = ChatTemplate(self.tokenizer, {}, "tiny")
        self.renders = renders
        self.vocab, self.hidden, self.layers, self.max_positions = len(self.tokenizer), 32, 5, 4 * MOST
        self.dtype, self.end_ids = torch.float32, (self.tokenizer.eos_token_id,)
        self.identity = Identity("tiny", "", "", "", "{}", self.layers, self.hidden, self.vocab)

    def render(self, messages: list[dict], tools=None) -> list[int]:
        return self.chat.render(messages, tools) if self.renders else [1]

    def answer(self, requests: Sequence[Request], temperature: float, top_p: float, taps: None) -> Iterator[Rollout]:
        for request in requests:
            draw = random.Random(request.key)
            said = [draw.randrange(60, 300) for _ in range(ANSWER - 1)] + list(self.end_ids)
            yield Rollout(
                request.key, torch.from_numpy(np.array([*request.ids, *said])), len(request.ids), [], 0, True, torch.empty(0)
            )


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


class Clock:
    """Times stages and says what they took."""

    def __init__(self, rows: int):
        self.rows, self.memory = rows, Memory()

    def timed(self, name: str, run):
        began = time.perf_counter()
        result = run()
        took = time.perf_counter() - began
        print(f"{name:28} {took:8.1f} s {self.rows / took:12,.0f} rows/s   {self.memory}", flush=True)
        return result

    def watch(self, module, *names: str) -> None:
        """Times these functions of a module wherever it calls them."""
        for name in names:
            stage = getattr(module, name)
            label = f"  {name.strip('_').replace('_', ' ')}"
            setattr(module, name, lambda *a, label=label, stage=stage, **k: self.timed(label, lambda: stage(*a, **k)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--near", action="store_true", help="near-duplicates too")
    parser.add_argument("--no-render", action="store_true", help="without template and tokenizer")
    parser.add_argument("--pack", action="store_true", help="the whole data stage with made-up answers, then rows for training")
    args = parser.parse_args()
    clock = Clock(args.rows)
    print(f"{args.rows:,} rows; {'imported':20} {clock.memory}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, args.rows)
        print(f"{path.stat().st_size / (1 << 20):,.0f} MiB written, {clock.memory}")
        config = PrepareConfig(
            prompts=[JsonlPrompts(str(path))],
            dedupe="near" if args.near else "exact",
            max_prompt=MOST,
            chunk=4096 if args.pack else 64,
        )
        clock.watch(gathering, "_collected", "askable", "_without_repeats", "hold_out", "near_duplicates", "_write")
        (pack if args.pack else gather)(clock, config, Standin(not args.no_render), Path(folder) / "data")


def gather(clock: Clock, config: PrepareConfig, target: Standin, folder: Path) -> None:
    """Up to the first answer, and once more as a restart reads it."""
    work = Work(target, None, folder, config.chunk, lambda text: None)  # type: ignore[arg-type]
    found = clock.timed("all", lambda: gathering.gather(config, work))
    print(f"{len(found.training):,} prompts left; {dict(found.ledger.dropped)}")
    again: list[Prompt] = clock.timed("read again by a restart", lambda: gathering.gather(config, work)).training
    assert again == found.training


def pack(clock: Clock, config: PrepareConfig, target: Standin, folder: Path) -> None:
    """Up to packed rows."""
    clock.watch(pipeline, "gather", "_training_chunks", "answer", "write_report")

    def whole() -> RowPlan:
        store = pipeline.prepare(
            config, target, folder, taps=None, draft_vocab=200, ask=target.answer, say=lambda text: None  # type: ignore[arg-type]
        )  # fmt: skip
        chats = clock.timed("  read chats", lambda: read_chats(store, ROW))
        plan = RowPlan(chats, ROW, 0)
        clock.timed("  pack an epoch", lambda: plan.epoch(0))
        return plan

    plan = clock.timed("all", whole)
    print(f"{len(plan.chats):,} chats of {plan.chats.tokens:,} tokens in {len(plan.epoch(0)):,} rows, {plan.padding:.1%} padding")


if __name__ == "__main__":
    main()
