"""Do methods say plain decoding's very tokens, and where they do not, is it a tie or a fault?

Greedily, two tokens tie where their logits are as close as rounding. Sampled with a row's own random number u, the target says the
token in whose piece of the cumulative distribution u falls, so they tie where u stands as close as rounding to the other's piece.
Passes of other shapes round differently: in bf16 ties are common, in fp32 rare.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drafttrain.decoding.sampling import Sampling, probabilities, stream_of, uniforms
from drafttrain.target.target import Target
from drafttrain.types import Rollout
from drafttrain.validation.bench_passes import Row
from drafttrain.validation.passes import Difference, differences, logit_gap, logits_before, tied


def compare(target: Target, plain: Sequence[Row], rows: Sequence[Row], sampling: Sampling) -> list[Difference]:
    """For every question that was ever answered otherwise than plain decoding's first run did, where that began, in the first turn and run
    where it is no tie if there is one. With its gap."""
    reference = {row.question: row.rollouts for row in plain if row.run == 1}
    found: dict[str, Difference] = {}
    for row in rows:
        for parted in differences(row.method, reference[row.question], row.rollouts):
            known = found.get(row.question)
            if known is not None and not tied(known.gap):
                break
            rollout = next(r for r in reference[row.question] if r.key == parted.key)
            measured = replace(parted, gap=gap(target, rollout, parted, sampling))
            if known is None or not tied(measured.gap):
                found[row.question] = measured
    return list(found.values())


@torch.no_grad()
def gap(target: Target, rollout: Rollout, difference: Difference, sampling: Sampling) -> float | None:
    """How far the other token was from being plain decoding's, by the target in one plain pass: in logits, or, sampled, in
    probability. None where one of the two had ended."""
    if sampling.temperature == 0:
        return logit_gap(target, rollout, difference)
    if difference.plain is None or difference.other is None:
        return None
    place = rollout.prompt_len + difference.position
    upper_V = probabilities(logits_before(target, rollout, difference.position), sampling).double().cumsum(0)
    stream_B, position_BT = torch.tensor([stream_of(rollout.key, sampling.seed)]), torch.tensor([[place]])
    u = float(uniforms(stream_B, position_BT)) * float(upper_V[-1])
    lower = float(upper_V[difference.other - 1]) if difference.other else 0.0
    return max(lower - u, u - float(upper_V[difference.other]))


def faults(target: Target, found: Sequence[Difference]) -> list[Difference]:
    """Those that no rounding explains: in fp32, where no two tokens tie."""
    if target.dtype != torch.float32:
        return []
    return [d for d in found if not tied(d.gap)]
