"""The numbers of a validation as one plain dict: what `report/validation.json` holds, and all that the report is written from.

Definitions (one place each, in words, are in the report's last part): tau = 1 + accepted / rounds, pooled over all rounds of all
prompts; acceptance_by_depth[k] = accepted at k / rounds that reached k; reach_by_depth[k] = accepted at k / all rounds.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from drafttrain.decoding.measure import simulate, simulated_tau
from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target
from drafttrain.types import Rollout
from drafttrain.validation.config import ValidateConfig
from drafttrain.validation.cost import Cost
from drafttrain.validation.passes import Difference, Pass
from drafttrain.vocab import coverage

FIRST_SPAN = 32
REPEATED_RUN = 8


@dataclass(frozen=True)
class Simulation:
    """The accepted counts that the training forward predicts, beside those that the loop measured."""

    tau: float
    rounds: int
    relative_difference: float
    """(simulated - measured) / measured tau."""
    first_disagreement: dict | None
    """prompt, round, simulated, measured of the first round that differs; None if every round agrees."""


def compare_simulation(target: Target, net: DrafterNet, plain: Pass, drafter: Pass, drafts: int) -> Simulation:
    """Walk the plain answers with the training forward and compare, round by round, with what the loop accepted."""
    simulated = simulate(target, net, plain.rollouts, drafts)
    first = None
    for rollout, accepted in zip(drafter.rollouts, simulated, strict=True):
        if first is None and accepted != rollout.accepted:
            first = _first_disagreement(rollout, accepted)
    tau, measured = simulated_tau(simulated), drafter.counts.tau
    return Simulation(tau, sum(map(len, simulated)), (tau - measured) / measured, first)


def _first_disagreement(rollout: Rollout, simulated: Sequence[int]) -> dict:
    measured = rollout.accepted
    pairs = enumerate(zip(simulated, measured, strict=False))
    index = next((i for i, (s, m) in pairs if s != m), min(len(simulated), len(measured)))
    return {
        "prompt": rollout.key,
        "round": index,
        "simulated": simulated[index] if index < len(simulated) else None,
        "measured": measured[index] if index < len(measured) else None,
    }


def summarize(
    plain: Pass,
    methods: Sequence[Pass],
    found: Sequence[Difference],
    simulation: Simulation,
    cost: Cost | None,
    config: ValidateConfig,
) -> dict:
    """Everything measured, by the names that machines read. `methods[0]` is the drafter."""
    tables = {m.name: _method(m, plain, config.drafts, lossless=all(d.method != m.name for d in found)) for m in methods}
    drafter = tables[methods[0].name]
    return {
        "tau": drafter["tau"],
        "simulated_tau": simulation.tau,
        "lossless": not found,
        "prompts": len(plain.rollouts),
        "tokens": drafter["tokens"],
        "rounds": drafter["rounds"],
        "acceptance_by_depth": drafter["acceptance_by_depth"],
        "reach_by_depth": drafter["reach_by_depth"],
        "tokens_per_second": drafter["tokens_per_second"],
        "baseline_tokens_per_second": plain.tokens_per_second,
        "drafts": config.drafts,
        "speedup": drafter["speedup"],
        "cost_ratio": cost.ratio if cost else None,
        "lookup_tau": tables["lookup"]["tau"] if "lookup" in tables else None,
        "untrained_tau": tables["untrained"]["tau"] if "untrained" in tables else None,
        "methods": tables,
        "positions": [list(span) for span in spans(plain.rollouts)],
        "repeated_by_position": repeated_by_position(plain.rollouts),
        "plain": {"tokens": plain.tokens, "seconds": plain.seconds, "tokens_per_second": plain.tokens_per_second},
        "differences": [asdict(d) for d in found],
        "simulation": asdict(simulation),
        "cost": cost.facts(drafter["tau"]) if cost else None,
        "config": asdict(config),
    }


def _method(method: Pass, plain: Pass, drafts: int, lossless: bool) -> dict:
    counts = method.counts
    accepted = [a for r in method.rollouts for a in r.accepted]
    return {
        "tau": counts.tau,
        "lossless": lossless,
        "tokens": counts.tokens,
        "rounds": counts.rounds,
        "acceptance_by_depth": counts.acceptance_by_depth,
        "reach_by_depth": counts.reach_by_depth,
        "tau_by_position": tau_by_position(method.rollouts, spans(plain.rollouts)),
        "rounds_by_accepted": [accepted.count(k) for k in range(drafts + 1)],
        "seconds": method.seconds,
        "tokens_per_second": method.tokens_per_second,
        "speedup": method.tokens_per_second / plain.tokens_per_second,
    }


def spans(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Stretches of answer positions, each twice as far as the one before: 0-32, 32-64, 64-128, ... up to the longest answer."""
    longest = max((len(r.answer) for r in rollouts), default=1)
    edges = [0, FIRST_SPAN]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return list(itertools.pairwise(edges))


def tau_by_position(rollouts: Sequence[Rollout], where: Sequence[tuple[int, int]]) -> list[float | None]:
    """tau of the rounds whose anchor stands in each stretch of the answer; None where no round does."""
    rounds, accepted = [0] * len(where), [0] * len(where)
    for rollout in rollouts:
        anchor = 0
        for count in rollout.accepted:
            index = next(i for i, (_, end) in enumerate(where) if anchor < end)
            rounds[index] += 1
            accepted[index] += count
            anchor += count + 1
    return [1.0 + a / n if n else None for a, n in zip(accepted, rounds, strict=True)]


def repeated_by_position(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Share of the runs of 8 tokens, by the stretch they end in, that stood earlier in the same answer. Looping text can be copied."""
    where = spans(rollouts)
    runs, repeated = [0] * len(where), [0] * len(where)
    for rollout in rollouts:
        answer, seen = rollout.answer.tolist(), set()
        for end in range(REPEATED_RUN, len(answer) + 1):
            run = tuple(answer[end - REPEATED_RUN : end])
            index = next(i for i, (_, stop) in enumerate(where) if end <= stop)
            runs[index] += 1
            repeated[index] += run in seen
            seen.add(run)
    return [r / n if n else None for r, n in zip(repeated, runs, strict=True)]


def draft_vocabulary(net: DrafterNet, plain: Pass) -> dict:
    """How large the draft vocabulary is, and which part of the held-out answer tokens it can say at all."""
    vocabulary = net.vocabulary
    tokens = torch.cat([r.answer for r in plain.rollouts])
    counts_V = torch.bincount(tokens, minlength=vocabulary.size)
    return {"size": len(vocabulary.ids), "target_size": vocabulary.size, "coverage": float(coverage(vocabulary, counts_V))}
