"""What a serving engine accepts of an export, beside what our own loop measures: PYTHONPATH=. python tests/benchmarks/served.py COMMAND [options]

    target --target T --out FOLDER            the target as a Hugging Face folder in bf16, for engines that read no GGUF file
    prompts --data STORE --count N --out F    held-out prompts as JSON lines of prompt_token_ids, the same for both sides
    ours --target T --export E --drafts K --prompts F --out NAME.json    greedy answers, chains of K: tau and tokens
    table NAME ... --folder D                 D/NAME.json (ours), D/NAME.txt (the engine's log with a line RESULT {...}), D/NAME.tokens.json (its tokens),
                                              D/plain.txt and D/plain.tokens.json (the engine without a drafter)

The engine's side is any script that prints RESULT {"mean_accepted_length", "tok_s", ...} and saves its tokens as a list of lists in the order of the
prompts. tau is 1 + accepted / rounds on both sides. In bf16 two programs break ties differently, so texts part at some places: how many do is said.
"""

import argparse
import json
import re
from pathlib import Path

from drafttrain.data.store import TokenStore
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.export.export import load_export
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.types import Request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(run, **options) -> None:
        own = commands.add_parser(run.__name__)
        own.set_defaults(run=run)
        for name, kind in options.items():
            own.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
        if run is table:
            own.add_argument("names", nargs="+")

    command(target, target=str, out=Path)
    command(prompts, data=Path, count=int, out=Path)
    command(ours, target=str, export=Path, drafts=int, prompts=Path, max_tokens=int, out=Path)
    command(table, folder=Path)
    args = parser.parse_args()
    args.run(args)


def target(args) -> None:
    found = load_target(TargetConfig(path=args.target, dtype="bfloat16"), device="cpu")
    found.model.save_pretrained(args.out)
    found.tokenizer.save_pretrained(args.out)


def prompts(args) -> None:
    requests = TokenStore.open(args.data).requests(1)[: args.count]
    args.out.write_text("".join(json.dumps({"prompt_token_ids": list(request.ids)}) + "\n" for request in requests))


def ours(args) -> None:
    found = load_target(TargetConfig(path=args.target, dtype="bfloat16"))
    net = load_export(args.export, found).to(found.dtype)
    lines = args.prompts.read_text().splitlines()
    asked = [Request(f"{i:05}", tuple(json.loads(line)["prompt_token_ids"]), args.max_tokens) for i, line in enumerate(lines)]
    engine = Engine(found, proposer=ChainProposer(net, args.drafts), slots=len(asked))
    answers = sorted(engine.generate(asked), key=lambda answer: answer.key)
    counted = count(answers, args.drafts)
    made = {"drafts": args.drafts, "tau": counted.tau, "rounds": counted.rounds, "tokens": [a.answer.tolist() for a in answers]}
    args.out.write_text(json.dumps(made))
    print(f"{args.export}: tau {counted.tau:.3f} with {args.drafts} drafts, {counted.rounds} rounds")


def table(args) -> None:
    plain, said = _result(args.folder / "plain.txt"), json.loads((args.folder / "plain.tokens.json").read_text())
    print("| drafter | drafts | our tau | the engine's | ratio | answers as plain ones | as ours | tokens/s | plain | speed-up |")
    print("|" + " --- |" * 10)
    for name in args.names:
        if not (args.folder / f"{name}.tokens.json").exists():
            print(f"| {name} | " + " | " * 8 + "not served |")
            continue
        mine, theirs = json.loads((args.folder / f"{name}.json").read_text()), _result(args.folder / f"{name}.txt")
        tokens = json.loads((args.folder / f"{name}.tokens.json").read_text())
        same = [sum(a == b for a, b in zip(tokens, other, strict=True)) for other in (said, mine["tokens"])]
        tau, rate, base = theirs["mean_accepted_length"], theirs["tok_s"], plain["tok_s"]
        print(
            f"| {name} | {mine['drafts']} | {mine['tau']:.3f} | {tau:.3f} | {tau / mine['tau']:.3f} | {same[0]} of {len(said)} | {same[1]} of {len(said)} | "
            f"{rate:.0f} | {base:.0f} | {rate / base:.2f} |"
        )


def _result(log: Path) -> dict:
    """What the line RESULT of a log says; of a log without one (no drafter), its tokens per second."""
    text = log.read_text()
    found = re.findall(r"^RESULT (\{.*\})$", text, re.MULTILINE)
    return json.loads(found[-1]) if found else {"tok_s": float(re.findall(r"tok/s ([0-9.]+)", text)[-1])}


if __name__ == "__main__":
    main()
