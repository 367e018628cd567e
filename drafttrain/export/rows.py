"""Rows of the target's own tables that some formats carry: the head's and the embedding's.

A drafter that speaks with the target's head, or reads its embeddings, has no such weights of its own. Where an engine wants them in the
file, they are copies, and what is read back must be the target's again: bfloat16 explains differences up to `SAME`.

Shapes: V vocabulary, Vd draft vocabulary, D width.
"""

import torch
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary

SAME = 1e-2
"""Relative difference between two copies of one table that bfloat16 explains."""
CHUNK = 4096


def said_rows(target: Target, vocabulary: DraftVocabulary) -> Tensor:
    """The target's head, cut down to what is said: [Vd, D] in fp32 on the CPU."""
    return target.head_weight.detach()[vocabulary.ids.to(target.device)].to("cpu", torch.float32)


@torch.no_grad()
def read_rows(target: Target) -> Tensor:
    """What the target's first layer reads for every token: [V, D] in fp32 on the CPU."""
    ids = torch.arange(target.vocab, device=target.device)
    return torch.cat([target.embed(part).to("cpu", torch.float32) for part in ids.split(CHUNK)])


def reads_raw(target: Target) -> bool:
    """Whether the first layer reads the table of embeddings as it stands. Gemma multiplies it, and engines lend a drafter the raw one."""
    return target.embedding_scale() == 1.0


def require_same(got: Tensor, own: Tensor, what: str, use: str, where: str) -> None:
    """Raises UserError unless `got` is the target's own table up to rounding; `use` says who works with the target's."""
    if got.shape != own.shape or not torch.allclose(got.float(), own, rtol=SAME, atol=SAME * float(own.std())):
        raise UserError(f"{where} has {what} that is not the target's, which {use}; export the drafter again.")
