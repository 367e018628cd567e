"""What verification is tested on: random trees; and little worlds, where target and drafter are tables, so that drafts can be drawn
by the thousand and every text of three tokens has a probability that a loop can work out.

Texts are numbered like a heap: the empty one is 0, and text i followed by token x is i V + x + 1.

Letters: B rows, N nodes, P places, W children, V vocabulary, I texts of the tables.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.decoding.sampling import DRAFT, Sampling, draw, draw_without_replacement, probabilities, round_uniforms, stream_of
from drafttrain.types import Proposal, Verdict


def random_parents(batch: int, nodes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(-1, n, (batch,), generator=generator) for n in range(nodes)], dim=1)


def random_tree(batch: int, nodes: int, vocab: int, seed: int, holes: bool = False) -> Proposal:
    """Nodes under random parents; of equal siblings only the first exists. `holes` removes a third of the nodes besides."""
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(batch, nodes, seed)
    tokens = torch.randint(vocab, (batch, nodes), generator=generator)
    valid = torch.rand(batch, nodes, generator=generator) > (1 / 3 if holes else 0)
    for b in range(batch):
        seen: set[tuple[int, int]] = set()
        for n in range(nodes):
            name = int(parents[b, n]), int(tokens[b, n])
            valid[b, n] &= name not in seen
            seen |= {name} if valid[b, n] else set()
    return Proposal(tokens, parents, valid)


def rows_of(proposal: Proposal, rows: slice) -> Proposal:
    return Proposal(*(None if x is None else x[rows] for x in vars(proposal).values()))


@dataclass(frozen=True)
class World:
    """Next-token logits of a target and a drafter behind each text; those of longer texts repeat."""

    target_IV: Tensor
    drafter_IV: Tensor
    stopping: bool = False
    """Drafting stops behind token 0."""

    @property
    def vocab(self) -> int:
        return self.target_IV.shape[1]

    def after(self, text: Tensor, token: Tensor) -> Tensor:
        return text * self.vocab + token + 1


def world_of(kind: str, vocab: int, seed: int, stopping: bool = False) -> World:
    generator = torch.Generator().manual_seed(seed)
    texts = sum(vocab**d for d in range(4))
    target, other = 1.5 * torch.randn(2, texts, vocab, generator=generator)
    drafter = {"apart": other, "near": target + 0.3 * other, "equal": target, "reduced": target + 0.5 * other}[kind].clone()
    if kind == "reduced":
        drafter[:, 1] = float("-inf")
    return World(target, drafter, stopping)


def streams(rows: int, seed: int = 0) -> Tensor:
    return torch.tensor([stream_of(str(b), seed) for b in range(rows)])


def drawn(
    world: World,
    branching: tuple[int, ...],
    replacement: bool,
    sampling: Sampling,
    stream_B: Tensor,
    length_B: Tensor,
    text_B: Tensor,
) -> tuple[Tensor, Proposal]:
    """(logits_BPV, proposal) behind text_B: `branching` children of every node at each depth, drawn from the drafter."""
    sizes = [1]
    for width in branching:
        sizes.append(sizes[-1] * width)
    uniform_BN = round_uniforms(stream_B, length_B, sum(sizes[1:]), DRAFT)
    q_IV, index = probabilities(world.drafter_IV, sampling), len(world.drafter_IV)
    text_BP, tokens, parents, exists, first = text_B[:, None], [], [], [], -1
    going_BS = torch.ones_like(text_BP, dtype=torch.bool)
    for width, size in zip(branching, sizes[:-1], strict=True):
        done = sum(x.shape[1] for x in tokens)
        uniform_BSW = uniform_BN[:, done : done + size * width].unflatten(1, (size, width))
        q_BSV = q_IV[text_BP[:, -size:] % index]
        if replacement:
            token_BSW = torch.stack([draw(q_BSV, uniform_BSW[..., w]) for w in range(width)], -1)
            exists_BSW = torch.ones_like(token_BSW, dtype=torch.bool)
        else:
            token_BSW, exists_BSW = draw_without_replacement(q_BSV, uniform_BSW)
        text_BSW = world.after(text_BP[:, -size:, None], token_BSW)
        parents.append(torch.arange(first, first + size).repeat_interleave(width).expand(len(text_B), -1))
        tokens.append(token_BSW.flatten(1))
        exists.append((exists_BSW & going_BS[..., None]).flatten(1))
        going_BS = exists[-1] & ((tokens[-1] != 0) | torch.tensor(not world.stopping))
        text_BP, first = torch.cat([text_BP, text_BSW.flatten(1)], dim=1), first + size
    proposal = Proposal(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(exists, 1), q_IV[text_BP % index])
    return world.target_IV[text_BP % index], proposal


def said_text(world: World, proposal: Proposal, verdict: Verdict, text_B: Tensor) -> Tensor:
    """Number of the text that a round leaves: accepted drafts, and the target's token."""
    for k in range(verdict.path_BK.shape[1]):
        token_B = proposal.tokens_BN.gather(1, verdict.path_BK[:, k, None])[:, 0]
        text_B = torch.where(k < verdict.accepted_B, world.after(text_B, token_B), text_B)
    return world.after(text_B, verdict.said_B)


def chi_square(counts_I: Tensor, expected_I: Tensor) -> float:
    """p-value. Cells that expect fewer than 5 count as one; what cannot happen must not."""
    counts_I, expected_I = counts_I.double(), expected_I.double()
    if counts_I[expected_I == 0].any():
        return 0.0
    rare = expected_I < 5
    cells = [(counts_I[~rare], expected_I[~rare])]
    if expected_I[rare].sum() >= 5:
        cells.append((counts_I[rare].sum()[None], expected_I[rare].sum()[None]))
    counts, expected = (torch.cat(x) for x in zip(*cells, strict=True))
    if len(counts) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.double), statistic / 2))
