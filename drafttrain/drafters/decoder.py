"""The decoder block that drafters share, in the shape (and with the names) that serving engines load.

    h = r + Attention(x)
    a = h + MLP(norm(h))

What x and r are is the family's business: EAGLE-3 reads x = [norm(embedding); norm(hidden)] and keeps the un-normed hidden as r.

Shapes: B batch, T tokens, H width, G key/value heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import UserError
from drafttrain.target.target import Target


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a drafter's block; an engine rebuilds the net from these alone."""

    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rms_eps: float
    max_positions: int
    vocab: int
    """The target's vocabulary."""
    rope_parameters: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(target: Target) -> "DecoderShape":
        """The target's own sizes: same width, heads, rotary base and window of positions, so nothing has to be guessed when serving."""
        config = target.config
        heads = config.num_attention_heads
        return DecoderShape(
            hidden=target.hidden,
            target_hidden=target.hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or target.hidden // heads,
            intermediate=config.intermediate_size,
            rms_eps=getattr(config, "rms_norm_eps", 1e-6),
            max_positions=target.max_positions,
            vocab=target.vocab,
            rope_parameters=plain_rope(config),
        )


def plain_rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters as an ordinary decoder can use them: never partial, never sectioned (M-RoPE)."""
    parameters = dict(config.rope_parameters)
    if "full_attention" in parameters:  # one entry per kind of layer
        parameters = dict(parameters["full_attention"])
    for special in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        parameters.pop(special, None)
    if parameters.get("rope_type") not in ("default", "linear", "dynamic", "yarn", "llama3", "longrope"):
        raise UserError(
            f"the target's rotary type is {parameters.get('rope_type')!r}, which engines do not know for drafters; use another target."
        )
    return parameters


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)


def together(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    """What each of these layers makes of x. In a compiled step one product, where they are plain matrices: kernels that read x once and fill the device,
    and the compiler lays the weights end to end as it rounds them."""
    if not torch.compiler.is_compiling():
        return [layer(x) for layer in layers]
    weights = [layer.weight for layer in layers if type(layer) is nn.Linear and layer.bias is None]
    # Adapters compute beside a matrix, and the pieces of a divided one (DeepSpeed marks them so) are brought together when it is called alone.
    if len(weights) < len(layers) or any(hasattr(weight, "ds_id") for weight in weights):
        return [layer(x) for layer in layers]
    return list(nn.functional.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1))


class Attention(nn.Module):
    """Projections only: how queries meet keys differs between training, drafting and families."""

    def __init__(self, shape: DecoderShape, inputs: int):
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def queries(self, x_BTX: Tensor) -> Tensor:
        """[B, heads, T, head_dim]"""
        return self._by_heads(self.q_proj(x_BTX))

    def keys_values(self, x_BTX: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [B, kv_heads, T, head_dim]"""
        key, value = (self._by_heads(x) for x in together(x_BTX, (self.k_proj, self.v_proj)))
        return key, value

    def queries_keys_values(self, x_BTX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three of the same rows."""
        query, key, value = (self._by_heads(x) for x in together(x_BTX, (self.q_proj, self.k_proj, self.v_proj)))
        return query, key, value

    def _by_heads(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def output(self, mixed_BHTD: Tensor) -> Tensor:
        """[B, T, H]"""
        return self.o_proj(mixed_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = together(x, (self.gate_proj, self.up_proj))
        return self.down_proj(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    """One pre-norm block; `self_attn` reads `inputs` numbers a row, which need not be what the residual carries."""

    def __init__(self, shape: DecoderShape, inputs: int):
        super().__init__()
        self.self_attn = Attention(shape, inputs)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = MLP(shape)

    def finish(self, residual_BTH: Tensor, mixed_BHTD: Tensor) -> Tensor:
        """Both residual branches: [B, T, H], before any norm."""
        h = residual_BTH + self.self_attn.output(mixed_BHTD)
        return h + self.mlp(self.post_attention_layernorm(h))


class PlainLayer(Layer):
    """An ordinary pre-norm block."""

    def __init__(self, shape: DecoderShape):
        super().__init__(shape, inputs=shape.hidden)
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)


class FusedInputLayer(Layer):
    """A block whose attention reads the embedding of the next token beside the hidden state (EAGLE-3)."""

    def __init__(self, shape: DecoderShape):
        super().__init__(shape, inputs=2 * shape.hidden)
        self.input_layernorm = RMSNorm(shape.hidden, shape.rms_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_eps)

    def mix_inputs(self, embedding_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        """[B, T, 2H], embeddings first."""
        return torch.cat([self.input_layernorm(embedding_BTH), self.hidden_norm(hidden_BTH)], dim=-1)
