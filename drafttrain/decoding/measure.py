"""Counting what was accepted, and simulating it with the training forward. Neither is computed from the other's records.

`1 + sum(accepted + 1) - cut = tokens emitted`: the first answer token comes from the prefill.
tau = 1 + accepted / rounds, pooled over all rounds of all prompts.
acceptance_by_depth[k] = accepted at k / rounds that tried a draft at k; reach_by_depth[k] = accepted at k / all rounds (vLLM's per_pos).

A round tries depth k if k - 1 drafts were kept and one was proposed behind them. An unsure drafter proposes less than it could: what it
left out was not refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from drafttrain.drafters.base import DrafterNet
from drafttrain.layouts import one_chat
from drafttrain.target.target import Target
from drafttrain.types import Rollout


@dataclass
class Decoded(Rollout):
    """An answer of the engine, which knows what was proposed."""

    tried: list[int] = field(default_factory=list)
    """Of every round the greatest depth at which a draft was tried: the accepted ones, and one more if any was proposed behind them."""


def tried_of(rollout: Rollout, drafts: int) -> list[int]:
    """`Decoded.tried`; of an answer that does not say, as if all `drafts` were always proposed."""
    return rollout.tried if isinstance(rollout, Decoded) else _all_tried(rollout.accepted, drafts)


def _all_tried(accepted: Sequence[int], drafts: int) -> list[int]:
    return [min(count + 1, drafts) for count in accepted]


@dataclass(frozen=True)
class Counts:
    """What a set of rollouts amounts to."""

    prompts: int
    tokens: int
    """Emitted answer tokens."""
    rounds: int
    tau: float
    acceptance_by_depth: list[float]
    reach_by_depth: list[float]


def count(rollouts: Iterable[Rollout], drafts: int, name: str = "engine") -> Counts:
    """Pool the rounds of all rollouts. Raises RuntimeError if a rollout's books do not balance; `name` says whose they are."""
    rollouts = list(rollouts)
    check_counts(name, rollouts, drafts)
    accepted = [r for rollout in rollouts for r in rollout.accepted]
    tried = [t for rollout in rollouts for t in tried_of(rollout, drafts)]
    tokens = sum(len(rollout.answer) for rollout in rollouts)
    return Counts(len(rollouts), tokens, len(accepted), *acceptance(accepted, drafts, tried))


def check_counts(name: str, rollouts: Sequence[Rollout], drafts: int) -> None:
    """Hold every prompt to `1 + sum(accepted + 1) - cut = tokens emitted`, and every round to at most `drafts` tried and no more accepted.

    Raises:
        RuntimeError: naming the first prompt that breaks it. Then no number of this pass means anything.
    """
    for r in rollouts:
        counted = 1 + sum(a + 1 for a in r.accepted) - r.cut
        if counted != len(r.answer):
            raise RuntimeError(
                f"{name}, prompt {r.key}: 1 + sum(accepted + 1) - cut = {counted}, but {len(r.answer)} tokens were emitted "
                f"({len(r.accepted)} rounds, cut {r.cut}); the engine's records are wrong"
            )
        if any(not 0 <= a <= drafts for a in r.accepted):
            raise RuntimeError(f"{name}, prompt {r.key}: a round accepted {max(r.accepted)} of {drafts} drafts")
        tried = tried_of(r, drafts)
        if len(tried) != len(r.accepted) or any(
            not a <= t <= min(a + 1, drafts) for a, t in zip(r.accepted, tried, strict=False)
        ):
            raise RuntimeError(f"{name}, prompt {r.key}: rounds accepted {r.accepted} drafts, but tried {tried}")


def acceptance(
    accepted: Sequence[int], drafts: int, tried: Sequence[int] | None = None
) -> tuple[float, list[float], list[float]]:
    """(tau, acceptance by depth, reach by depth) of pooled rounds; without `tried`, as if all `drafts` were always proposed."""
    tried = _all_tried(accepted, drafts) if tried is None else tried
    rounds, depths = len(accepted), range(1, drafts + 1)
    kept, asked = ([sum(count >= k for count in counts) for k in depths] for counts in (accepted, tried))
    conditional = [a / b if b else 0.0 for a, b in zip(kept, asked, strict=True)]
    reach = [a / rounds if rounds else 0.0 for a in kept]
    return 1 + (sum(accepted) / rounds if rounds else 0.0), conditional, reach


def defined(acceptance: Sequence[float | None], reach: Sequence[float]) -> list[float | None]:
    """Conditional acceptance for people: None, rather than the 0 that machines get, at a depth that no round reached."""
    return [a if before else None for a, before in zip(acceptance, [1.0, *reach], strict=False)]


@torch.no_grad()
def simulate(target: Target, net: DrafterNet, plain: Iterable[Rollout], drafts: int) -> list[list[int]]:
    """Accepted drafts of every round, per rollout, walking plain answers with the *training* forward unrolled to `drafts`.

    The rollouts come from plain decoding with `overrun=drafts`, so that drafts reaching past the end have labels too. The
    target reads each text afresh, without a cache.
    """
    net.eval()
    return [_walk(_hits(target, net, rollout, drafts), rollout) for rollout in plain]


def simulated_tau(accepted: Iterable[Sequence[int]]) -> float:
    """tau of simulated rounds, pooled."""
    pooled = [r for rounds in accepted for r in rounds]
    return 1 + (sum(pooled) / len(pooled) if pooled else 0.0)


def _hits(target: Target, net: DrafterNet, rollout: Rollout, drafts: int) -> torch.Tensor:
    """[T, drafts + 1] bool: whether the draft of depth k from anchor A says token A+k (column 0 unused)."""
    sequences = one_chat(torch.cat([rollout.ids, rollout.beyond]), rollout.prompt_len)
    layout = net.layout(sequences, drafts).to(target.device)
    sequences = sequences.to(target.device)
    drafted = net.rows(sequences, target.read_packed(sequences, net.needs.taps), layout)
    best = drafted.vocabulary_V[net.logits(drafted.hidden_NH, drafted.prev_N).argmax(-1)]
    hits = torch.zeros(sequences.ids_BT.shape[1], drafts + 1, dtype=torch.bool)
    hits[layout.anchor_N.cpu(), layout.depth_N.cpu()] = (best == drafted.label_N).cpu()
    return hits


def _walk(hits: torch.Tensor, rollout: Rollout) -> list[int]:
    """From the answer's first token, anchor to anchor."""
    accepted, anchor = [], rollout.prompt_len
    while anchor < len(rollout.ids) - 1:
        run = int(hits[anchor, 1:].long().cumprod(0).sum())
        accepted.append(run)
        anchor += run + 1
    return accepted
