"""Plain drafters, written from the engines' tensor tables alone: they stand for vLLM's and SGLang's classes.

Nothing of drafttrain is imported. Each reads config.json and model.safetensors of an exported folder and what an engine would lend it of the
target (the table of embeddings, the head), and drafts one chain with a growing key/value list. `used` collects the tensors that were
read, so that a test can tell whether any was left over.

Letters: T rows read, H width, V target vocabulary, A taps, K drafts, h heads, D head width.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu


class Reference:
    """Config, tensors, and one Llama block with a cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: x.float() if x.is_floating_point() else x for name, x in load_file(folder / "model.safetensors").items()
        }
        self.used: set[str] = set()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def weight(self, name: str) -> torch.Tensor:
        self.used.add(name)
        return self.weights[name]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weight(name + ".weight")

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight(name + ".weight").T

    def rotate(self, x_hD: torch.Tensor, position: int) -> torch.Tensor:
        half = x_hD.shape[-1] // 2
        angle = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x_hD[..., :half], x_hD[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def block(self, prefix: str, x: torch.Tensor, residual_H: torch.Tensor, position: int) -> torch.Tensor:
        """One row, x what the attention reads; its key and value stay in the cache. Returns the state before any last norm [H]."""
        h, kv, d = self.config["num_attention_heads"], self.config["num_key_value_heads"], self.config["head_dim"]
        q, k, v = (self.linear(f"{prefix}.self_attn.{n}_proj", x).view(-1, d) for n in "qkv")
        self.keys.append(self.rotate(k, position))
        self.values.append(v)
        keys, values = (torch.stack(list_).repeat_interleave(h // kv, dim=1) for list_ in (self.keys, self.values))
        weight = torch.softmax(torch.einsum("hd,thd->ht", self.rotate(q, position), keys) * d**-0.5, dim=-1)
        x = residual_H + self.linear(f"{prefix}.self_attn.o_proj", torch.einsum("ht,thd->hd", weight, values).reshape(-1))
        y = self.norm(f"{prefix}.post_attention_layernorm", x)
        gate, up = (self.linear(f"{prefix}.mlp.{n}_proj", y) for n in ("gate", "up"))
        return x + self.linear(f"{prefix}.mlp.down_proj", silu(gate) * up)

    def spread(self, small: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[V], -inf where the draft vocabulary has no such token."""
        return torch.full((self.config["vocab_size"],), -torch.inf).index_copy(0, ids, small)


class Unrolled(Reference):
    """Reads rows of features and the tokens behind them, then its own states."""

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        return features.float()

    def row(self, token: int, hidden_H: torch.Tensor, position: int) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, state_H: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def feed(self, state_H: torch.Tensor) -> torch.Tensor:
        return state_H

    def draft(self, ids: list[int], features: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """Logits [len(drafts) + 1, V] of a chain whose tokens are given. ids[0..T] with the anchor last; features of rows 0..T-1."""
        self.keys, self.values = [], []
        for t, row in enumerate(features):
            state = self.row(ids[t + 1], self.combine(row), t)
        rows = [self.logits(state)]
        for step, token in enumerate(drafts, start=1):
            state = self.row(token, self.feed(state), len(features) - 1 + step)
            rows.append(self.logits(state))
        return torch.stack(rows)


class ReferenceEagle3(Unrolled):
    def __init__(self, folder: Path, embedding_VH: torch.Tensor):
        super().__init__(folder)
        self.embedding_VH = self.weights.get("embed_tokens.weight", embedding_VH).float()

    def vllm_layers(self) -> list[int]:
        """Hidden states that vLLM hands over: k = the residual stream after k layers."""
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def sglang_layers(self) -> list[int]:
        return [i + 1 for i in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        taps_AH = features.float()
        if self.config["fc_norm"]:
            taps_AH = torch.stack([self.norm(f"fc_norm.{i}", tap_H) for i, tap_H in enumerate(taps_AH)])
        return self.linear("fc", taps_AH.reshape(-1))

    def row(self, token: int, hidden_H: torch.Tensor, position: int) -> torch.Tensor:
        embed = self.norm("midlayer.input_layernorm", self.embedding_VH[token])
        normed = self.norm("midlayer.hidden_norm", hidden_H)
        return self.block("midlayer", torch.cat([embed, normed]), hidden_H, position)

    def logits(self, state_H: torch.Tensor) -> torch.Tensor:
        small = self.linear("lm_head", self.norm("norm", state_H))
        return self.spread(small, torch.arange(len(small)) + self.weights.get("d2t", 0))

    def feed(self, state_H: torch.Tensor) -> torch.Tensor:
        return self.norm("norm", state_H) if self.config["norm_output"] else state_H


class ReferenceEagle(Unrolled):
    """EAGLE-1 in either engine; SGLang's class has a bias, and says the tokens of a file that the command line names."""

    def __init__(self, folder: Path, embedding_VH: torch.Tensor, head_VH: torch.Tensor):
        super().__init__(folder)
        self.embedding_VH, self.head_VH = embedding_VH.float(), head_VH.float()
        self.bias_H = self.weight("fc.bias") if self.config["architectures"] == ["LlamaForCausalLMEagle"] else 0.0
        self.ids = torch.arange(len(head_VH))
        if "hot_vocab_size" in self.config:
            self.ids = torch.tensor(torch.load(folder / "hot_token_id.pt", weights_only=True), dtype=torch.int64)
            assert len(self.ids) == self.config["hot_vocab_size"]

    def fuse(self, token: int, hidden_H: torch.Tensor) -> torch.Tensor:
        return self.linear("fc", torch.cat([self.embedding_VH[token], hidden_H])) + self.bias_H

    def row(self, token: int, hidden_H: torch.Tensor, position: int) -> torch.Tensor:
        x_H = self.fuse(token, hidden_H)
        return self.block("layers.0", x_H, x_H, position)

    def logits(self, state_H: torch.Tensor) -> torch.Tensor:
        return self.spread(self.head_VH[self.ids] @ state_H, self.ids)


class ReferenceMedusa(Reference):
    """Medusa in vLLM 0.26; the way in which it reads config.json is part of it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        for key in list(self.config):
            if "num" in key and "heads" in key:
                self.config["num_heads"] = self.config.pop(key)
            elif "num" in key and "layers" in key:
                self.config["num_hidden_layers"] = self.config.pop(key)
        self.ids = torch.arange(self.config["vocab_size"])
        if self.config["truncated_vocab_size"] < self.config["vocab_size"]:
            self.ids = self.weight("token_map")

    def residual(self, x_H: torch.Tensor, head: int) -> torch.Tensor:
        for layer in range(self.config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            bias_H = self.weight(name + ".bias") if self.config["medusa_fc_bias"] else 0.0
            x_H = x_H + silu(self.linear(name, x_H) + bias_H)
        return x_H

    def draft(self, final_H: torch.Tensor) -> torch.Tensor:
        """Logits [K, V] from the final state of the row before the anchor."""
        shared = self.config["original_lm_head"]
        rows = []
        for h in range(self.config["num_heads"]):
            small = self.linear("lm_head" if shared else f"lm_heads.{h}", self.residual(final_H.float(), h))
            rows.append(self.spread(small[: self.config["truncated_vocab_size"]], self.ids))
        return torch.stack(rows)
