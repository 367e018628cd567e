"""Plain drafters, written from the engines' tensor tables alone: they stand for vLLM's and SGLang's classes.

Nothing of drafttrain is imported. Each reads config.json and model.safetensors of an exported folder and what an engine would lend it of the
target (the table of embeddings, the head), and drafts one chain with a growing key/value list. `used` collects the tensors that were
read, so that a test can tell whether any was left over. A folder of the speculators library is first turned into what vLLM makes of it.

Letters: T rows read, H width, V target vocabulary, A taps, K drafts, S slots, L layers, h heads, D head width.
"""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu


def as_vllm_reads(config: dict, release: str = "0.33") -> dict:
    """vLLM's translation of a speculators config.json, its defaults and what it forgets included; any other as it stands."""
    kind = config.get("speculators_model_type")
    if kind is None:
        return config
    made = config["transformer_layer_config"] | {key: config[key] for key in ("draft_vocab_size", "target_hidden_size")}
    made["num_speculative_tokens"] = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if kind in ("eagle3", "peagle"):
        defaults = {"norm_before_residual": kind == "eagle3", "norm_before_fc": False}
        if kind == "eagle3":
            defaults |= {"fc_norm": False, "norm_output": False}
        else:
            made["pard_token"] = config["mask_token_id"]
        made["architectures"] = ["Eagle3LlamaForCausalLM" if kind == "eagle3" else "PeagleLlamaForCausalLM"]
        made["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
        return made | {key: config.get(key, value) for key, value in defaults.items()}
    made["eagle_aux_hidden_state_layer_ids"] = layers = config["aux_hidden_state_layer_ids"]
    if kind == "dspark":
        made["architectures"] = ["Qwen3DSparkModel"]
        made["target_layer_ids"] = [k - 1 for k in layers]
        anchored = release != "0.26" and config.get("sample_from_anchor", False)
        made |= {"dspark_bonus_anchor": not anchored} | ({} if release == "0.26" else {"sample_from_anchor": anchored})
        heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        return made | {key: config[key] for key in ("mask_token_id", "block_size", *heads) if config.get(key) is not None}
    nested = {"mask_token_id": config["mask_token_id"], "target_layer_ids": [k - 1 for k in layers]}
    nested["sample_from_anchor"] = config.get("sample_from_anchor", False)
    nested["causal"] = not config.get("sliding_window_non_causal", True)
    if kind == "dflash2":
        nested |= {key: config[key] for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
    return made | {"architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"], "dflash_config": nested}


class Reference:
    """Config, tensors, and one Llama block with a cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = as_vllm_reads(json.loads((folder / "config.json").read_text()))
        self.weights = {
            name: x.float() if x.is_floating_point() else x for name, x in load_file(folder / "model.safetensors").items()
        }
        self.used: set[str] = set()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def aux(self) -> int:
        """Hidden states that vLLM's EAGLE-3 class is built for: it does not count the layer ids at the top."""
        return self.config.get("num_aux_hidden_states", 3)

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
        score = torch.einsum("hd,thd->ht", self.rotate(q, position), keys) * d**-0.5
        if self.config.get("layer_types") == ["sliding_attention"]:  # FlashAttention looks so far back, and at the row itself
            score[:, : max(len(keys) - 1 - (self.config["sliding_window"] - 1), 0)] = -torch.inf
        weight = torch.softmax(score, dim=-1)
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
        self.weights = {name.replace("layers.0.", "midlayer."): x for name, x in self.weights.items()}
        assert not self.config["norm_before_residual"] and not self.config["norm_before_fc"]

    def vllm_layers(self) -> list[int]:
        """Hidden states that vLLM hands over: k = the residual stream after k layers."""
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def sglang_layers(self) -> list[int]:
        return [i + 1 for i in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        taps_AH = features.float()
        assert len(taps_AH) == self.aux()
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
            rows.append(self.linear("lm_head" if shared else f"lm_heads.{h}", self.residual(final_H.float(), h)))
        return torch.stack(rows)


class ReferenceDFlash(Reference):
    """DFlash in either engine: all layers read one context, and a block of one slot more than there are drafts is filled in at once."""

    def __init__(self, folder: Path, embedding_VH: torch.Tensor, head_VH: torch.Tensor):
        super().__init__(folder)
        own = {name: self.weight(name) for name in ("embed_tokens.weight", "lm_head.weight") if name in self.weights}
        self.embedding_VH = own.get("embed_tokens.weight", embedding_VH).float()
        self.head_VH = own.get("lm_head.weight", head_VH).float()
        self.ids = torch.arange(len(self.head_VH)) + self.weights.get("d2t", 0)
        self.nested = self.config.get("dflash_config") or {"mask_token_id": self.config["mask_token_id"]}
        self.check_layout()

    def check_layout(self) -> None:
        assert not self.nested["sample_from_anchor"]

    def masked(self, drafts: int) -> int:
        """Masked slots of a block for so many drafts."""
        return drafts

    def around(self, name: str, x_SH: torch.Tensor, sublayer) -> torch.Tensor:
        """What a sublayer adds; `name` is what a drafter may put around it."""
        return sublayer(x_SH)

    def vllm_layers(self) -> list[int]:
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def sglang_layers(self) -> list[int]:
        return [i + 1 for i in self.nested["target_layer_ids"]]

    def vllm_reach(self, layer: int) -> tuple[float, float]:
        """How many positions back and ahead a query looks."""
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        causal = self.nested.get("causal", sliding)
        window = self.nested.get("swa_window_size", self.config["sliding_window"]) if sliding else None
        back = torch.inf if window is None else window - 1
        return back, 0 if causal else back

    def sglang_reach(self, layer: int) -> tuple[float, float]:
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        causal = self.config.get("is_causal", sliding)
        back = self.config["sliding_window"] - 1 if sliding else torch.inf
        return back, 0 if causal else back

    def combine(self, taps_TAD: torch.Tensor) -> torch.Tensor:
        return self.norm("hidden_norm", self.linear("fc", taps_TAD.float().flatten(1)))

    def context(self, layer: int, combined_TH: torch.Tensor) -> torch.Tensor:
        return combined_TH

    def key_rows(self, layer: int, x_TH: torch.Tensor, start: int) -> torch.Tensor:
        """[T, heads, D] of rows that stand one behind the other from position `start` on."""
        name, d = f"layers.{layer}.self_attn", self.config["head_dim"]
        k_ThD = self.norm(f"{name}.k_norm", self.linear(f"{name}.k_proj", x_TH).unflatten(-1, (-1, d)))
        return torch.stack([self.rotate(row, start + t) for t, row in enumerate(k_ThD)])

    def query_rows(self, layer: int, x_SH: torch.Tensor, start: int) -> torch.Tensor:
        name, d = f"layers.{layer}.self_attn", self.config["head_dim"]
        q_ShD = self.norm(f"{name}.q_norm", self.linear(f"{name}.q_proj", x_SH).unflatten(-1, (-1, d)))
        return torch.stack([self.rotate(row, start + s) for s, row in enumerate(q_ShD)])

    def attend(self, layer: int, x_SH: torch.Tensor, context_TH: torch.Tensor, start: int) -> torch.Tensor:
        name, d = f"layers.{layer}.self_attn", self.config["head_dim"]
        query = self.query_rows(layer, x_SH, start)
        keys = torch.cat([self.key_rows(layer, context_TH, 0), self.key_rows(layer, x_SH, start)])
        values = self.linear(f"{name}.v_proj", torch.cat([context_TH, x_SH])).unflatten(-1, (-1, d))
        groups = query.shape[1] // keys.shape[1]
        at = torch.cat([torch.arange(len(context_TH)), start + torch.arange(len(x_SH))])
        back, ahead = self.vllm_reach(layer)
        mixed = []
        for s, q_hD in enumerate(query):
            seen = (at >= start + s - back) & (at <= start + s + ahead)
            k, v = (x[seen].repeat_interleave(groups, dim=1) for x in (keys, values))
            weight = torch.softmax(torch.einsum("hd,khd->hk", q_hD, k) * d**-0.5, dim=-1)
            mixed.append(torch.einsum("hk,khd->hd", weight, v).flatten())
        return self.linear(f"{name}.o_proj", torch.stack(mixed))

    def slots(self, anchor: int, taps_TAD: torch.Tensor, drafts: int, start: int) -> torch.Tensor:
        """[S, H], after the last norm. The anchor stands at `start`."""
        combined_TH = self.combine(taps_TAD)
        x_SH = self.embedding_VH[[anchor] + [self.nested["mask_token_id"]] * self.masked(drafts)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            y_SH, seen_TH = self.norm(f"{name}.input_layernorm", x_SH), self.context(layer, combined_TH)
            x_SH = x_SH + self.around(
                f"{name}.attention_conv", y_SH, partial(self.attend, layer, context_TH=seen_TH, start=start)
            )
            y_SH = self.norm(f"{name}.post_attention_layernorm", x_SH)
            x_SH = x_SH + self.around(f"{name}.mlp_conv", y_SH, partial(self.mlp, f"{name}.mlp"))
        return self.norm("norm", x_SH)

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.linear(f"{name}.{n}_proj", x) for n in ("gate", "up"))
        return self.linear(f"{name}.down_proj", silu(gate) * up)

    def speaking(self, slots_SH: torch.Tensor) -> torch.Tensor:
        return slots_SH[1:]

    def draft(self, anchor: int, taps_TAD: torch.Tensor, drafts: int) -> torch.Tensor:
        """Logits [K, V] of the tokens behind the anchor, from the features of all rows before it."""
        states = self.speaking(self.slots(anchor, taps_TAD, drafts, len(taps_TAD)))
        return torch.stack([self.spread(self.head_VH @ state_H, self.ids) for state_H in states])
