"""How often a drafter's r-th guess is right at each depth, measured on the target's own answers; kept in a file beside the drafter.

For every anchor A of a plain answer and every depth d = 1, 2, ..., the rank of the token A+d among the drafter's guesses, given that it read
the true tokens A+1, ..., A+d-1. A depth is *reached* where those were all among the first R guesses themselves, as in a tree of that
width, and

    a_d,r = places reached at depth d where rank r is right / places reached at depth d

`tree_shape.grow` makes the best tree of it. Ranks come from the training forward; a token outside the draft vocabulary has none.

Letters: T tokens, K depths, R ranks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.decoding.engine import generate
from drafttrain.decoding.tree_shape import TreeShape, grow
from drafttrain.drafters.base import DrafterNet
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json_atomic
from drafttrain.layouts import one_chat
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout


@dataclass(frozen=True)
class Acceptance:
    """What was counted."""

    right: list[list[int]]
    """right[d - 1][r]: places reached at depth d where the token said is the guess of rank r."""
    reached: list[int]
    """Places reached at each depth."""
    drafter: str
    """Hash of the drafter's weights."""

    @property
    def shares(self) -> list[list[float]]:
        """a_d,r."""
        return [[n / max(reached, 1) for n in row] for row, reached in zip(self.right, self.reached, strict=True)]

    def tree(self, nodes: int) -> TreeShape:
        """The best tree of up to `nodes` nodes. UserError if no guess was ever right."""
        if not any(self.right[0]):
            raise UserError(
                f"none of the drafter's first guesses was right in {self.reached[0]} places, so that no tree can be built; train the drafter, or "
                "measure on more answers."
            )
        return grow(self.shares, nodes)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_json_atomic(path, asdict(self))

    @staticmethod
    def load(path: Path, net: DrafterNet) -> "Acceptance":
        """UserError where the file is missing or damaged, or was measured with other weights."""
        record = read_json(path, "the measured acceptance")
        try:
            acceptance = Acceptance(**record)
            counts = zip(acceptance.right, acceptance.reached, strict=True)
            whole = acceptance.right != [] and all(len(row) > 0 and 0 <= sum(row) <= n for row, n in counts)
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise UserError(f"{path} is not a measured acceptance; delete it, and it is measured again.")
        if acceptance.drafter != fingerprint(net):
            raise UserError(f"{path} was measured with another drafter; delete it, and it is measured again with this one.")
        return acceptance


def fingerprint(net: DrafterNet) -> str:
    """Hash of a drafter's weights and of the tokens that it can say."""
    digest = hashlib.sha256(net.vocabulary.ids.cpu().numpy().tobytes())
    for name, weight in sorted(net.state_dict().items()):
        digest.update(name.encode() + weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def calibrate(
    target: Target, net: DrafterNet, requests: Sequence[Request], depth: int, ranks: int, slots: int = 16
) -> Acceptance:
    """Answer `requests` plainly, and count. Depths and ranks that a tree cannot have are not in the result.

    Raises UserError for prompts that do not fit the target, and where no answer is long enough to count anything.
    """
    net.eval()
    ranks = min(ranks, len(net.speakable_V))
    right_KR, reached_K = torch.zeros(depth, ranks, dtype=torch.long), torch.zeros(depth, dtype=torch.long)
    for rollout in generate(target, requests, slots=slots):
        rank_TK = ranks_of(target, net, rollout, depth, ranks)
        last = len(rollout.ids) - 1
        for d in range(1, depth + 1):
            rank_TD = rank_TK[rollout.prompt_len : max(last - d + 1, rollout.prompt_len), :d]  # anchors that have a token A+d
            here = (rank_TD[:, : d - 1] < ranks).all(1)
            reached_K[d - 1] += here.sum()
            right_KR[d - 1] += torch.bincount(rank_TD[here, d - 1], minlength=ranks + 1)[:ranks]
    if not reached_K[0]:
        raise UserError(
            f"the target's {len(requests)} answers have no token to guess, so that nothing can be measured; give more prompts."
        )
    return Acceptance(right_KR.tolist(), reached_K.tolist(), fingerprint(net))


def ranks_of(target: Target, net: DrafterNet, rollout: Rollout, depth: int, ranks: int) -> Tensor:
    """Rank of token A+d among the guesses of depth d from anchor A, at [A, d - 1]; `ranks` where it is not among so many [T, K]."""
    sequences = one_chat(rollout.ids, rollout.prompt_len)
    rank_TK = torch.full((len(rollout.ids), depth), ranks)
    layout = net.layout(sequences, depth).to(target.device)
    if not len(layout.depth_N):
        return rank_TK
    sequences = sequences.to(target.device)
    drafted = net.rows(sequences, target.read_packed(sequences, net.needs.taps), layout)
    best_NR = drafted.vocabulary_V[net.logits(drafted.hidden_NH, drafted.prev_N).topk(ranks, dim=-1).indices]
    hit_NR = best_NR == drafted.label_N[:, None]
    rank_N = torch.where(hit_NR.any(1), hit_NR.int().argmax(1), ranks)
    rank_TK[layout.anchor_N.cpu(), layout.depth_N.cpu() - 1] = rank_N.cpu()
    return rank_TK
