"""What a drafter's head costs: PYTHONPATH=. python tests/benchmarks/head_cost.py [--width 576] [--vocab 49152] [--rows 1,8,64]

Dense heads over shrinking draft vocabularies and factored ones over the whole, followed by the choice of the likeliest token, timed as CUDA graphs on
a GPU (as decoding runs them) and plainly on a CPU. Weights stay cold: every timed pass uses another of enough copies to exceed the cache.
Printed: weights read, microseconds for each number of rows, and how many times less than the first line.
"""

import argparse
import time

import torch

from drafttrain.drafters.head import make_head

CACHE = 96 * 2**20
"""Bytes of copies to go round: more than the L2 cache of a datacentre GPU."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--words", default="16384,8192,4096")
    parser.add_argument("--ranks", default="64,96,144,192")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, args.dtype)
    rows = [int(n) for n in args.rows.split(",")]
    heads = [(f"dense, {args.vocab:,} tokens", args.vocab, None)]
    heads += [(f"dense, {int(n):,} tokens", int(n), None) for n in args.words.split(",")]
    heads += [(f"rank {r}, {args.vocab:,} tokens", args.vocab, int(r)) for r in args.ranks.split(",")]
    print(f"width {args.width}, {args.dtype}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    print("| head | weights |", " | ".join(f"{n} rows, us | ratio" for n in rows), "|")
    base: dict[int, float] = {}
    for name, words, rank in heads:
        size = sum(p.numel() for p in make_head(args.width, words, rank).parameters())
        copies = [
            make_head(args.width, words, rank).to(device, dtype) for _ in range(max(2, -(-CACHE // (size * dtype.itemsize))))
        ]
        cells = []
        for n in rows:
            hidden_NH = torch.randn(n, args.width, device=device, dtype=dtype)
            us = timed(copies, hidden_NH)
            cells.append(f"{us:.1f} | {base.setdefault(n, us) / us:.2f}")
        print(f"| {name} | {size / 1e6:.2f}M |", " | ".join(cells), "|", flush=True)


@torch.no_grad()
def timed(copies, hidden_NH, repeats: int = 7) -> float:
    """Microseconds of a head and the choice of a token: the median of some runs over all copies."""

    def once():
        for head in copies:
            head(hidden_NH).argmax(-1)

    if not hidden_NH.is_cuda:
        once()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - began)
        return 1e6 * sorted(seconds)[repeats // 2] / len(copies)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    graph.replay()
    found = []
    for _ in range(repeats):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(10):
            graph.replay()
        last.record()
        last.synchronize()
        found.append(100 * first.elapsed_time(last))
    return sorted(found)[repeats // 2] / len(copies)


if __name__ == "__main__":
    main()
