"""What one draft costs, and from which tau on it pays: PYTHONPATH=.:tests python tests/benchmarks/draft_pass.py [flags]

    --targets smollm2-135m,qwen3-8b --lengths 7,15,5,3,4,2,6,1 --others 7,15,5 --seconds 60 --out FILE
    --tau-eagle3 3:2.1,5:2.4 --tau-dflash 7:2.6 [--tau-dspark ... --tau-dflash2 ... --tau-p-eagle ...]
    --tiny --device cpu                                        # shrunken targets, to see that it runs

Targets of these shapes with random weights, made on the device; drafters of the recipes (where a target has none, of the class's defaults) with
random weights, whose block is as large as n drafts need; one row of --context tokens, decoded greedily by the engine, with its rounds as CUDA graphs on
a GPU. Milliseconds are medians over rounds. A drafter that knows all depths at once works when a round is committed, the others mostly in the stage
`draft`, so that

    pass  = draft + commit - (commit of plain decoding)        # all that the drafter adds, but the wider check
    speed = tau * t_plain / t_round,    t_round = draft + check + commit + rest,    rest: what the host adds

Random drafts are hardly ever kept; a round takes as long whatever is kept. With taus of EAGLE-3, measured elsewhere, its best n is known, and so is
the tau from which another drafter is GOAL times as fast: GOAL * tau_E / t_E * t. Lengths are measured in the order given, until --seconds are over.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from recipe_targets import REAL, ROOT, shrunken
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.graphs import StageClock
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.proposer import Proposer
from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.target.fuse import fuse_norms, merge_projections
from drafttrain.target.target import ATTENTION, Target, hf_attention
from drafttrain.types import Identity, Request
from drafttrain.vocab import DraftVocabulary

BASE = "eagle3"
KINDS: dict[str, type[DrafterConfig]] = {BASE: Eagle3, "dflash": DFlash, "dspark": DSpark, "dflash2": DFlash2, "p-eagle": PEagle}
FILES = {BASE: ("eagle3-h100", "eagle3")}
"""Names of recipes, where it is not that of the drafter."""
GOAL, SHARE = 1.1, 1 / 3
"""Bars: speed over EAGLE-3's, and the pass of DFlash over EAGLE-3's chain of the same length."""


# ---- what is measured --------------------------------------------------------------------------------------------------


def random_target(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, name: str) -> Target:
    """As `load_target` makes one, but of random weights and without a tokenizer; nothing ends an answer."""
    AttentionInterface.register(ATTENTION, hf_attention)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_attn_implementation(ATTENTION)
    if device.type == "cuda":
        fuse_norms(model)
        merge_projections(model)
    return bare(model, name)


def headed_target(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """Embedding and head with random weights; the layers stay outlines."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight = nn.Parameter(torch.empty(module.weight.shape, device=device, dtype=dtype).normal_(std=0.02))
    return bare(model, "embedding and head")


def bare(model: Any, name: str) -> Target:
    """A target without a tokenizer."""
    text = model.config.get_text_config()
    identity = Identity(name, "", "", "", "", text.num_hidden_layers, text.hidden_size, text.vocab_size)
    return Target(model, SimpleNamespace(tokenizer=None), identity, ())  # type: ignore[arg-type]


def recipe_of(shape: str, kind: str) -> Recipe | None:
    """The target's recipe for this drafter, where there is one."""
    paths = [ROOT / "recipes" / shape / f"{name}.yaml" for name in FILES.get(kind, (kind,))]
    found = [path for path in paths if path.is_file()]
    return load_recipe(found[:1])[0] if found else None


def drafter_of(shape: str, kind: str, drafts: int, target: Target) -> DrafterConfig:
    """The drafter of the recipe, or of the class's defaults, for as many drafts; its vocabulary no larger than a small target allows."""
    recipe = recipe_of(shape, kind)
    config: Any = recipe.drafter if recipe else KINDS[kind]()
    changes: dict[str, int] = {}
    if isinstance(config, DFlash | DFlash2 | DSpark):
        changes["block"] = drafts + (not isinstance(config, DSpark))
    if isinstance(config, PEagle):
        changes["depth"] = drafts
    if isinstance(config, DFlash2):
        changes["group"] = math.gcd(config.group, target.hidden)
    if config.draft_vocab is not None:
        changes["draft_vocab"] = min(config.draft_vocab, target.vocab // 2)
    return replace(config, **changes)


def build(config: DrafterConfig, target: Target) -> DrafterNet:
    """On the target's device and in its type, as an export is read."""
    size = config.draft_vocab
    vocabulary = DraftVocabulary.full(target.vocab) if size is None else DraftVocabulary(torch.arange(int(size)), target.vocab)
    with target.device:
        net = config.build(target, vocabulary)
    for weight in net.parameters():
        weight.data = weight.data.to(target.dtype)
    return net.requires_grad_(False).eval()


@dataclass
class RoundClock(StageClock):
    """Keeps every round's own times."""

    began: list[float] = field(default_factory=list)
    each: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name, stage, cuda) -> None:
        if len(self.began) == self.rounds:
            self.began.append(time.perf_counter())
        super().time(name, stage, cuda)

    def _add(self, name: str, seconds: float) -> None:
        self.each.setdefault(name, []).append(1e3 * seconds)

    def whole(self) -> list[float]:
        """Milliseconds from one round to the next."""
        return [1e3 * (b - a) for a, b in zip(self.began, self.began[1:], strict=False)]


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a round."""

    kind: str
    n: int
    draft: float
    check: float
    commit: float
    round: float
    kept: float
    """Random drafts that were kept in a round."""
    graphed: bool
    note: str = ""

    @property
    def rest(self) -> float:
        return self.round - self.draft - self.check - self.commit


def measure(target: Target, kind: str, n: int, proposer: Proposer | None, args: argparse.Namespace) -> Cost:
    """A context of random tokens and some rounds, answered until all is recorded, then again with a clock."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1, target.vocab, (args.context,), generator=g).tolist()
    request = Request("context", tuple(ids), args.rounds + 1)
    engine = Engine(target, proposer=proposer, slots=1)
    engine.record([request])
    if not engine.graphed:
        list(engine.generate([request]))
    known, clocks, accepted = engine.rounds_known, [], []
    for _ in range(args.passes):
        engine.clock = RoundClock()
        accepted += next(iter(engine.generate([request]))).accepted
        engine.clock.settle()
        clocks.append(engine.clock)
    draft, check, commit = (
        statistics.median(ms for clock in clocks for ms in clock.each.get(stage, [0.0])) for stage in ("draft", "check", "commit")
    )
    whole = statistics.median(ms for clock in clocks for ms in clock.whole())
    note = engine.graphs_refused or ("a round was recorded while it was timed" if engine.rounds_known != known else "")
    graphed = engine.graphed and not engine.graphs_refused
    return Cost(kind, n, draft, check, commit, whole, statistics.mean(accepted), graphed, note)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """What is compared by the bars comes first."""
    for n in args.lengths:
        yield from ((kind, n) for kind in KINDS if kind in (BASE, "dflash") or n in args.others)


def costs_of(shape: str, device: torch.device, args: argparse.Namespace, until: float) -> list[Cost]:
    config = shrunken(REAL[shape]()) if args.tiny else REAL[shape]()
    began = time.perf_counter()
    target = random_target(config, device, getattr(torch, args.dtype), shape)
    print(f"\n{shape}: {target.layers} layers of {target.hidden} made in {time.perf_counter() - began:.1f} s", flush=True)
    measure(target, "plain", 0, None, args)  # the first of all warms up
    found = [measure(target, "plain", 0, None, args)]
    _say(found[0])
    late = []
    for kind, n in cases(args):
        if time.perf_counter() > until:
            late.append(f"{kind} {n}")
            continue
        try:
            found.append(measure(target, kind, n, ChainProposer(build(drafter_of(shape, kind, n, target), target), n), args))
            _say(found[-1])
        except Exception as error:  # one that fails says so, and the others go on
            print(f"  {kind} {n} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        _forget(device)
    if late:
        print(f"  not measured, since time was up: {', '.join(late)}", flush=True)
    return found


def _say(cost: Cost) -> None:
    stages = ", ".join(f"{name} {getattr(cost, name):.3f}" for name in ("draft", "check", "commit", "rest", "round"))
    print(f"  {cost.kind} {cost.n}: {stages} ms{' as graphs' if cost.graphed else ''} {cost.note}", flush=True)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- what follows ------------------------------------------------------------------------------------------------------


def table(costs: list[Cost]) -> list[str]:
    """Times, and the taus that they ask for whatever the prompts."""
    plain, base = costs[0], {cost.n: cost for cost in costs if cost.kind == BASE}
    heads = ["drafter", "n", "draft", "commit", "pass", "pass / EAGLE-3's", "check", "rest", "round", "x plain step",
             f"tau / EAGLE-3's tau for {GOAL}x, same n"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for cost in sorted(costs, key=lambda cost: (["plain", *KINDS].index(cost.kind), cost.n)):
        other = base.get(cost.n)
        against = (
            [f"{pass_of(cost, plain) / pass_of(other, plain):.3f}", f"{GOAL * cost.round / other.round:.3f}"]
            if other
            else ["", ""]
        )
        ms = [cost.draft, cost.commit, pass_of(cost, plain), cost.check, cost.rest, cost.round]
        cells = [cost.kind, str(cost.n), *(f"{x:.3f}" for x in ms)]
        cells.insert(5, against[0])
        lines.append(f"| {' | '.join([*cells, f'{cost.round / plain.round:.3f}', against[1]])} |")
    return lines


def pass_of(cost: Cost, plain: Cost) -> float:
    """What the drafter adds to a round, ms."""
    return cost.draft + cost.commit - plain.commit


def verdicts(costs: list[Cost], taus: dict[str, dict[int, float]]) -> list[str]:
    """The two bars in sentences, as far as they are known."""
    plain, by_case = costs[0], {(cost.kind, cost.n): cost for cost in costs}
    lines = []
    for n in sorted({cost.n for cost in costs if cost.n}):
        if (BASE, n) in by_case and ("dflash", n) in by_case:
            share = pass_of(by_case["dflash", n], plain) / pass_of(by_case[BASE, n], plain)
            lines.append(
                f"{n} drafts: DFlash's pass is {share:.2f} of EAGLE-3's chain ({'' if share <= SHARE else 'not '}at most 1/3)."
            )
    known = {kind: {n: tau for n, tau in own.items() if (kind, n) in by_case} for kind, own in taus.items()}

    def speed(kind: str, n: int) -> float:
        return known[kind][n] * plain.round / by_case[kind, n].round

    if not known.get(BASE):
        return [*lines, "Without taus of EAGLE-3 (--tau-eagle3 n:tau,...) its best length is not known."]
    best = max(known[BASE], key=lambda n: speed(BASE, n))
    said = ", ".join(f"{n}: {speed(BASE, n):.3f}x" for n in sorted(known[BASE]))
    lines.append(f"EAGLE-3 by n: {said}; best with {best} drafts and tau {known[BASE][best]}.")
    for cost in costs:
        if cost.kind not in ("plain", BASE):
            needed = GOAL * speed(BASE, best) * cost.round / plain.round
            verdict = f"{cost.kind} {cost.n}: needs tau {needed:.3f} to be {GOAL} times as fast"
            if needed > cost.n + 1:
                verdict += f", more than {cost.n + 1}, which is all it can say"
            if cost.n in known.get(cost.kind, {}):
                ratio = speed(cost.kind, cost.n) / speed(BASE, best)
                verdict += f"; with tau {known[cost.kind][cost.n]} it is {speed(cost.kind, cost.n):.3f}x plain, {ratio:.3f} times EAGLE-3"
            lines.append(f"{verdict}.")
    return lines


# ---- the command -------------------------------------------------------------------------------------------------------


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


def _taus(words: str) -> dict[int, float]:
    pairs = (pair.split(":") for pair in words.split(",") if pair)
    return {int(n): float(tau) for n, tau in pairs}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default="smollm2-135m,qwen3-8b")
    parser.add_argument("--lengths", type=_numbers, default=[7, 15, 5, 3, 4, 2, 6, 1])
    parser.add_argument("--others", type=_numbers, default=[7, 15, 5], help="lengths at which all drafters are measured")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    for kind in KINDS:
        parser.add_argument(f"--tau-{kind}", type=_taus, default={}, metavar="N:TAU,...")
    args = parser.parse_args()
    if args.tiny:
        args.context, args.rounds, args.passes, args.lengths, args.others = 40, 3, 1, [7, 2], [2]
    return args


def main() -> None:
    args = arguments()
    device, began, shapes = torch.device(args.device), time.perf_counter(), args.targets.split(",")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    taus = {kind: getattr(args, f"tau_{kind.replace('-', '_')}") for kind in KINDS}
    print(f"one row of {args.context} tokens, {args.dtype}, {where}, torch {torch.__version__}{', tiny' if args.tiny else ''}")
    found: dict[str, Any] = {"device": where, "torch": torch.__version__, "args": {k: str(v) for k, v in vars(args).items()}}
    for number, shape in enumerate(shapes, start=1):
        try:
            costs = costs_of(shape, device, args, began + args.seconds * number / len(shapes))
        except Exception as error:  # the other target is still worth measuring
            print(f"{shape} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        lines = verdicts(costs, taus)
        print("\n".join(["", f"{shape}, milliseconds", *table(costs), "", *lines]), flush=True)
        found[shape] = {
            "costs": [asdict(cost) | {"rest": cost.rest, "pass": pass_of(cost, costs[0])} for cost in costs],
            "verdicts": lines,
        }
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))
        _forget(device)
    print(f"\n{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
