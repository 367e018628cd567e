"""How many operations a training step has to do, product by product, from shapes and layouts alone.

    a product of N rows, I inputs and O outputs     2 N I O operations forward, and as many for each gradient that it needs:
                                                    that of its inputs, and that of its weight where the weight is trained

What counts is what the drafter has to compute: scored elements alone are multiplied with the head, attention has the pairs that see each other, and
what is computed a second time to save memory is not counted. Norms, softmaxes, the optimizer and what is added are left out.

Letters: T tokens of a row, Q drafting rows, N scored elements, M teacher rows, K depths, S slots of a block, L layers, H width.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.unrolled import UnrolledNet
from drafttrain.layouts import chain_visibility
from drafttrain.types import Layout, Sequences

FORWARD, FROZEN, FIRST, TRAINED = 1, 2, 2, 3
"""How often a product is computed: without gradient; its inputs need one, its weight not; its weight needs one, its inputs not; both."""


@dataclass(frozen=True)
class Product:
    """N rows of I inputs and O outputs, forward, and its gradients."""

    name: str
    rows: float
    inputs: int
    outputs: int
    times: int

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.times

    def __str__(self) -> str:
        return f"{self.name}: 2 x {self.rows:,.0f} x {self.inputs:,} x {self.outputs:,} x {self.times} = {self.operations / 1e12:.3f} TFLOP"


def seen_pairs(sequences: Sequences, query_BQ: torch.Tensor) -> int:
    """How many (drafting row, row of the text) see each other."""
    return int((chain_visibility(sequences, query_BQ) & (query_BQ >= 0)[..., None]).sum())


def drafter_products(net: DrafterNet, sequences: Sequences, layout: Layout, teacher: bool, head_trained: bool) -> list[Product]:
    """Of a step of a drafter that reads its own state back (EAGLE-3) or of a block drafter (DFlash). `teacher`: whether its objective asks for
    the target's logits."""
    s = net.shape
    T, Q = sequences.ids_BT.numel(), int((layout.query_BQ >= 0).sum())
    N, M, pairs = len(layout.label_N), len(layout.pool_M), seen_pairs(sequences, layout.query_BQ)
    H, heads, both = s.hidden, s.heads * s.head_dim, 2 * s.kv_heads * s.head_dim
    words, taps = len(net.vocabulary.ids), len(net.needs.taps) * s.target_hidden
    ends = [Product("head, scored elements", N, H, words, TRAINED if head_trained else FROZEN)]
    if teacher:
        ends.append(Product("the target's head, rows that teach", M, s.target_hidden, words, FORWARD))
    if isinstance(net, UnrolledNet):
        K, X = net.needs.depth, net.layer.self_attn.q_proj.in_features
        return [
            Product("fused taps", T, taps, H, FIRST),
            Product("keys and values of the text", T, X, both, TRAINED),
            Product(f"queries of {K} steps", K * Q, X, heads, TRAINED),
            Product("keys and values of later steps", (K - 1) * Q, X, both, TRAINED),
            Product("attention, pairs that see each other", K * pairs + Q * K * (K - 1) // 2, 2, heads, TRAINED),
            Product("attention's output", K * Q, heads, H, TRAINED),
            Product("MLP", K * Q, H, 3 * s.intermediate, TRAINED),
            *ends,
        ]
    assert isinstance(net, BlockNet), type(net)
    S, L = net.slots, len(net.layers)
    return [
        Product("fused taps", T, taps, H, FIRST),
        Product(f"keys and values of the text, {L} layers", L * T, H, both, TRAINED),
        Product("queries, keys and values of the blocks", L * Q * S, H, heads + both, TRAINED),
        Product("attention, pairs that see each other", L * (S * pairs + Q * S * S), 2, heads, TRAINED),
        Product("attention's output", L * Q * S, heads, H, TRAINED),
        Product("MLP", L * Q * S, H, 3 * s.intermediate, TRAINED),
        *ends,
    ]


def target_products(config: PretrainedConfig, sequences: Sequences) -> list[Product]:
    """Of the frozen target reading packed chats: its layers, without the head."""
    T = sequences.ids_BT.numel()
    every_BT = torch.arange(sequences.ids_BT.shape[1], device=sequences.ids_BT.device).expand_as(sequences.ids_BT)
    pairs = seen_pairs(sequences, every_BT)
    H, L, groups = config.hidden_size, config.num_hidden_layers, config.num_key_value_heads
    D = getattr(config, "head_dim", None) or H // config.num_attention_heads
    heads = config.num_attention_heads * D
    return [
        Product(f"target: queries, keys and values, {L} layers", L * T, H, heads + 2 * groups * D, FORWARD),
        Product("target: attention, pairs that see each other", L * pairs, 2, heads, FORWARD),
        Product("target: attention's output", L * T, heads, H, FORWARD),
        Product("target: MLP", L * T, H, 3 * config.intermediate_size, FORWARD),
    ]


def matrix_rate(device: torch.device, size: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations per second of this device in one size x size product of random numbers: the mean of ten, behind three that warm up."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(10):
        a @ b
    last.record()
    torch.cuda.synchronize()
    return 10 * 2 * size**3 / (first.elapsed_time(last) / 1e3)
