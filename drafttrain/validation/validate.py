"""Prove a drafter: the same prompts by plain decoding, the drafter, prompt lookup and the untrained drafter, on one engine.

    plain ──> answers ──┬── equal, token for token, to each method's answers?          lossless
                        └── walked by the training forward                             simulated tau
    drafter ──> accepted per round                                                     tau, acceptance, reach
    one prompt in every slot ──> seconds of a round / seconds of a plain step          c, and what tau buys

Writes `folder`: README.md, *.png, tokens.jsonl (so that anybody can recount) and validation.json (last: its presence says that
the report is complete).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from drafttrain import plots
from drafttrain.decoding.engine import Engine
from drafttrain.decoding.measure import count, defined
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.propose_ngram import LookupProposer
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.files import many, write_atomic
from drafttrain.target.target import Target
from drafttrain.types import Request
from drafttrain.validation import hardware, report
from drafttrain.validation.config import ValidateConfig
from drafttrain.validation.cost import Cost, Make, measure_cost
from drafttrain.validation.curve import read_curve
from drafttrain.validation.passes import Difference, Pass, differences, logit_gap, run, tied
from drafttrain.validation.samples import Sample, sample
from drafttrain.validation.summary import compare_simulation, draft_vocabulary, summarize

WARM_UP_TOKENS = 8
COST_TOKENS = 16
SAMPLES = 3

Methods = dict[str, Make]
"""By name, what makes a fresh proposer; the drafter comes first."""


def validate(
    target: Target,
    net: DrafterNet,
    requests: Sequence[Request],
    config: ValidateConfig,
    folder: str | Path,
    *,
    untrained_net: DrafterNet | None = None,
    facts: Mapping | None = None,
) -> dict:
    """Measure the drafter on held-out prompts and write the report.

    Args:
        requests: held-out prompts; `config.prompts` and `config.max_tokens` shorten them.
        folder: where the report goes; an older report there is overwritten.
        untrained_net: the same net with random weights; None leaves the comparison out.
        facts: what the caller knows, copied into validation.json: `name` (of the run), `command` (a string), `commit`, `versions`
            (package -> version), `export_hash`, ... `training_log`, the Path of training's metrics.csv or of a folder with
            several, is drawn and not copied.

    Returns:
        What validation.json holds.

    Raises:
        UserError: without prompts, or, after the report is written, if any answer differs from plain decoding (in fp32 but for ties).
        RuntimeError: if the engine's records contradict themselves.
    """
    facts = dict(facts or {})
    training_log = facts.pop("training_log", None)
    requests = _chosen(target, requests, config)
    net.require_drafts(config.drafts, "validate.drafts")
    methods: Methods = {"drafter": lambda: ChainProposer(net, config.drafts), "lookup": lambda: LookupProposer(config.drafts)}
    if untrained_net is not None:
        methods["untrained"] = lambda: ChainProposer(untrained_net, config.drafts)

    plain, passes = _measure(target, requests, config, methods)
    found = [_with_gap(target, plain, d) for p in passes for d in differences(p.name, plain.rollouts, p.rollouts)]
    simulation = compare_simulation(target, net, plain, passes[0], config.drafts)
    cost = _cost(target, requests, plain, methods["drafter"], config)

    result = summarize(plain, passes, found, simulation, cost, config) | {
        "target": asdict(target.identity) | {"dtype": str(target.dtype).removeprefix("torch.")},
        "end_ids": list(target.end_ids),
        "draft_vocabulary": draft_vocabulary(net, plain),
        "hardware": hardware.describe_hardware(target.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    result = {"name": None, "commit": hardware.commit(), "versions": hardware.versions()} | facts | result
    samples = [sample(target.tokenizer, r) for r in passes[0].rollouts[:SAMPLES]]
    _write(Path(folder), result, _token_rows(requests, plain, passes), samples, training_log)
    exact = target.dtype == torch.float32
    wrong = [d for d in found if not (exact and tied(d.gap))]
    if wrong:
        raise UserError(_not_lossless(wrong, len(requests), folder, exact))
    return result


def _chosen(target: Target, requests: Sequence[Request], config: ValidateConfig) -> list[Request]:
    """The first prompts, with answers as long as the recipe, the request and the target's positions allow."""
    chosen = []
    for r in requests[: config.prompts]:
        room = max(1, target.max_positions - len(r.ids))
        chosen.append(replace(r, limit=min(r.limit, config.max_tokens, room)))
    if not chosen:
        raise UserError("There are no held-out prompts to validate on: run `python -m data_prep` with some held out.")
    keys = [r.key for r in chosen]
    twice = next((k for k in keys if keys.count(k) > 1), None)
    if twice is not None:
        raise UserError(f"Two held-out prompts have the key {twice}, but keys must be unique: rename one of them.")
    return chosen


def _measure(target: Target, requests: list[Request], config: ValidateConfig, methods: Methods) -> tuple[Pass, list[Pass]]:
    """Time plain decoding and every method, each after a warm-up."""
    passes = []
    for name, make in {"plain": lambda: None, **methods}.items():
        engine = Engine(target, proposer=make(), slots=config.slots)
        # What plain decoding says behind an end is what the simulation needs to judge drafts that reach there.
        overrun = config.drafts if name == "plain" else 0
        if target.device.type == "cuda":
            run(engine, requests, overrun)  # every shape that will come has its graph then
        else:
            run(engine, [replace(r, limit=min(r.limit, WARM_UP_TOKENS)) for r in requests[: config.slots]])
        rollouts, seconds = run(engine, requests, overrun)
        passes.append(Pass(name, rollouts, seconds, count(rollouts, config.drafts, name)))
        _say(passes[-1])
    return passes[0], passes[1:]


def _say(p: Pass) -> None:
    beyond = sum(len(rollout.beyond) for rollout in p.rollouts)  # they count in the rate: they took time
    behind = f" and {beyond:,} behind the ends" if beyond else ""
    size = f"{many(len(p.rollouts), 'prompt')}, {many(p.tokens, 'token')}{behind} in {p.seconds:.1f} s"
    print(f"{p.name}: {size}, {p.tokens_per_second:.1f} tokens/s, tau {p.counts.tau:.3f}", flush=True)


def _with_gap(target: Target, plain: Pass, difference: Difference) -> Difference:
    rollout = next(r for r in plain.rollouts if r.key == difference.key)
    return replace(difference, gap=logit_gap(target, rollout, difference))


def _cost(target: Target, requests: list[Request], plain: Pass, make_proposer: Make, config: ValidateConfig) -> Cost | None:
    """Cost ratio on the prompt with the longest answer."""
    request, rollout = max(zip(requests, plain.rollouts, strict=True), key=lambda pair: len(pair[1].answer))
    slots = min(config.slots, len(requests))  # the batch that the set was answered in
    return measure_cost(target, request, make_proposer, slots, min(len(rollout.answer), COST_TOKENS))


def _token_rows(requests: list[Request], plain: Pass, passes: list[Pass]) -> list[dict]:
    """One line of tokens.jsonl for each prompt."""
    rows = []
    for index, request in enumerate(requests):
        drafter, *others = [p.rollouts[index] for p in passes]
        names = [p.name for p in passes[1:]]
        rows.append(
            {
                "key": request.key,
                "limit": request.limit,
                "prompt_ids": list(request.ids),
                "plain_ids": plain.rollouts[index].answer.tolist(),
                "speculative_ids": drafter.answer.tolist(),
                "accepted": drafter.accepted,
                "cut": drafter.cut,
                "others": {
                    n: {"ids": r.answer.tolist(), "accepted": r.accepted, "cut": r.cut}
                    for n, r in zip(names, others, strict=True)
                },
            }
        )
    return rows


def _write(folder: Path, result: dict, rows: list[dict], samples: list[Sample], training_log: Path | None) -> None:
    """Write the report; validation.json goes first if an old one is there, and comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "validation.json").unlink(missing_ok=True)
    figures = {}
    for name, (caption, figure) in _figures(result, training_log).items():
        write_atomic(folder / name, plots.png(figure))
        figures[caption] = name
    write_atomic(folder / "tokens.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    write_atomic(folder / "README.md", report.render(result, samples, figures))
    write_atomic(folder / "validation.json", json.dumps(result, indent=2, allow_nan=False) + "\n")
    print(f"report: {folder / 'README.md'}", flush=True)


def _figures(result: dict, training_log: Path | None) -> dict:
    """File name -> (caption, figure)."""
    methods = result["methods"]
    depths = {}
    for name, m in methods.items():
        conditional = defined(m["acceptance_by_depth"], m["reach_by_depth"])
        depths[name] = plots.Acceptance(conditional, m["reach_by_depth"])
    tau = {"drafter": result["tau"], "simulated": result["simulated_tau"]}
    tau |= {n: m["tau"] for n, m in methods.items()} | {"plain": 1.0}
    figures = {
        "tau.png": ("tau by method", plots.tau_by_method(tau)),
        "acceptance.png": ("acceptance by depth, in percent", plots.acceptance_by_depth(depths)),
        "accepted.png": (
            "drafts accepted in a round, in percent of rounds",
            plots.accepted_histogram({n: m["rounds_by_accepted"] for n, m in methods.items()}),
        ),
    }
    points = read_curve(training_log) if training_log else []
    if points:
        figures["training.png"] = ("training: loss, and tau on held-out prompts", plots.training_curve(points))
    return figures


def _not_lossless(found: list[Difference], prompts: int, folder: str | Path, exact: bool) -> str:
    amount = f"{len({d.key for d in found})} of {many(prompts, 'prompt')}"
    way_out = "report a fault" if exact else "if logits tie, validate with --target.dtype float32, otherwise report a fault"
    return (
        f"Output differs from plain decoding on {amount}, but must be equal on all; first: {found[0]}. "
        f"{Path(folder) / 'README.md'} lists them; {way_out}."
    )
