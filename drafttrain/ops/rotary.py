"""Rotary positions for drafters, by transformers' own tables (so that llama3, yarn, ... scaling is what engines compute)."""

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """cos and sin for positions, from a Hugging Face `rope_parameters` dictionary."""

    def __init__(self, head_dim: int, max_positions: int, rope_parameters: dict):
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        # One head of the given width: the table depends on nothing else.
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope_parameters),
        )
        self.table = LlamaRotaryEmbedding(config)

    def forward(self, position_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, T, D]."""
        cos, sin = self.table(torch.empty(0, dtype=dtype, device=position_BT.device), position_BT)
        return cos[:, None], sin[:, None]


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D/2) by their position's angle (Su et al. 2021, in the half-split form of Llama)."""
    left, right = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos + torch.cat([-right, left], dim=-1) * sin
