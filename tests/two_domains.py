"""A tiny target that knows two domains: the token behind one of a domain is always the same other one of that domain, whatever stands before.

Layers add nothing to what they read, and the head's row of the next token points where this one's embedding does. So a drafter has twenty pairs
to learn for each domain, and knowing one domain tells it nothing of the other.
"""

from pathlib import Path

import torch
from tiny import ARCHITECTURES, build_tokenizer

from drafttrain.types import Request

A, B = 10, 100
"""First token of each domain."""
SIZE, STRIDE = 20, 7


def next_token(token: int) -> int:
    """What the target says behind it."""
    first = A if token < B else B
    return first + (token - first + STRIDE) % SIZE


def build_two_domains(folder: Path) -> Path:
    """Saves the target with a tokenizer; returns the folder."""
    torch.manual_seed(0)
    model = ARCHITECTURES["llama"]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight.zero_()
        for token in (*range(A, A + SIZE), *range(B, B + SIZE)):
            head[next_token(token)] = 4 * embedding[token] / embedding[token].norm()
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def prompts_of(first: int, count: int, seed: int, limit: int = 12) -> list[Request]:
    """Random prompts of a domain, 2 to 5 tokens long."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(2, 6, (), generator=g))
        found.append(Request(f"p{number}", tuple((first + torch.randint(0, SIZE, (length,), generator=g)).tolist()), limit))
    return found
