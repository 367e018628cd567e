"""A plain EAGLE-3 drafter, written from the engines' tensor table alone: it stands for vLLM's and SGLang's class.

Nothing of drafttrain is imported. It reads config.json and model.safetensors of an exported folder and the target's embedding
table, as an engine would, and drafts one chain with a growing key/value list. Letters: T rows read, H width, V target vocabulary.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu


class ReferenceEagle3:
    def __init__(self, folder: Path, embedding_VH: torch.Tensor):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: x.float() if x.is_floating_point() else x for name, x in load_file(folder / "model.safetensors").items()
        }
        self.embedding_VH = self.weights.get("embed_tokens.weight", embedding_VH).float()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def vllm_layers(self) -> list[int]:
        """Hidden states that vLLM hands over: k = the residual stream after k layers."""
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def sglang_layers(self) -> list[int]:
        return [i + 1 for i in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name + ".weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[name + ".weight"].T

    def rotate(self, x_hD: torch.Tensor, position: int) -> torch.Tensor:
        half = x_hD.shape[-1] // 2
        angle = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x_hD[..., :half], x_hD[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def combine(self, taps_AH: torch.Tensor) -> torch.Tensor:
        return self.linear("fc", taps_AH.reshape(-1).float())

    def row(self, token: int, hidden_H: torch.Tensor, position: int) -> torch.Tensor:
        """One row through the layer; its key and value stay in the cache. Returns the state before the last norm."""
        h, kv, d = self.config["num_attention_heads"], self.config["num_key_value_heads"], self.config["head_dim"]
        embed, normed = (
            self.norm("midlayer.input_layernorm", self.embedding_VH[token]),
            self.norm("midlayer.hidden_norm", hidden_H),
        )
        x = torch.cat([embed, normed])
        q, k, v = (self.linear(f"midlayer.self_attn.{n}_proj", x).view(-1, d) for n in "qkv")
        self.keys.append(self.rotate(k, position))
        self.values.append(v)
        keys, values = (torch.stack(list_).repeat_interleave(h // kv, dim=1) for list_ in (self.keys, self.values))
        weight = torch.softmax(torch.einsum("hd,thd->ht", self.rotate(q, position), keys) * d**-0.5, dim=-1)
        x = hidden_H + self.linear("midlayer.self_attn.o_proj", torch.einsum("ht,thd->hd", weight, values).reshape(-1))
        y = self.norm("midlayer.post_attention_layernorm", x)
        return x + self.linear(
            "midlayer.mlp.down_proj", silu(self.linear("midlayer.mlp.gate_proj", y)) * self.linear("midlayer.mlp.up_proj", y)
        )

    def logits(self, state_H: torch.Tensor) -> torch.Tensor:
        """[V], -inf where the draft vocabulary has no such token."""
        small = self.linear("lm_head", self.norm("norm", state_H))
        ids = torch.arange(len(small)) + self.weights.get("d2t", 0)
        return torch.full((self.config["vocab_size"],), -torch.inf).index_copy(0, ids, small)

    def draft(self, ids: list[int], taps_TAH: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """Logits [len(drafts) + 1, V] of a chain whose tokens are given. ids[0..T] with the anchor last; taps of rows 0..T-1."""
        self.keys, self.values = [], []
        for t, taps_AH in enumerate(taps_TAH):
            state = self.row(ids[t + 1], self.combine(taps_AH), t)
        rows = [self.logits(state)]
        for step, token in enumerate(drafts, start=1):
            state = self.row(token, state, len(taps_TAH) - 1 + step)
            rows.append(self.logits(state))
        return torch.stack(rows)
