"""Plain drafters of the engines whose drafts of a block depend on each other, or go through several layers of context: DSpark, DFlash 2, P-EAGLE.

As reference.py: written from the engines' rules, with nothing of drafttrain, one row and one slot at a time. `chain` drafts a block: from
the anchor and the features of the rows before it to the tokens, each the first choice behind the one before.

Letters: T rows read, H width, V target vocabulary, A taps, K drafts, S slots, C candidates, r rank.
"""

from pathlib import Path

import torch

from .reference import Reference, ReferenceDFlash


class ReferenceDSpark(ReferenceDFlash):
    """DSpark in either engine: as many slots as drafts, the anchor's speaks first, and a Markov head is asked token by token."""

    def check_layout(self) -> None:
        by_engine = {
            "vllm 0.26": not self.config.get("dspark_bonus_anchor", False),
            "vllm 0.33": self.config.get("sample_from_anchor", True),
            "sglang": self.config.get("sample_from_anchor", True),
        }
        assert set(by_engine.values()) == {True} and self.config["markov_head_type"] == "vanilla"

    def sglang_starts(self, ragged: bool) -> bool:
        """With ragged verification SGLang makes a confidence head and wants its tensors, whatever the flag says; without, it passes them over."""
        return not ragged or {"confidence_head.proj.weight", "confidence_head.proj.bias"} <= self.weights.keys()

    def masked(self, drafts: int) -> int:
        return drafts - 1

    def speaking(self, slots_SH: torch.Tensor) -> torch.Tensor:
        return slots_SH

    def markov(self, token: int) -> torch.Tensor:
        return self.weight("markov_head.markov_w1.weight")[token]

    def biased(self, state_H: torch.Tensor, before: int) -> torch.Tensor:
        """Logits [V] behind a token."""
        return self.spread(self.head_VH @ state_H + self.linear("markov_head.markov_w2", self.markov(before)), self.ids)

    def sure(self, state_H: torch.Tensor, before: int) -> torch.Tensor:
        """Logit of the confidence in the draft behind a token."""
        read = torch.cat([state_H, self.markov(before)]) if self.config["confidence_head_with_markov"] else state_H
        return (self.linear("confidence_head.proj", read) + self.weight("confidence_head.proj.bias"))[0]

    def chain(self, anchor: int, taps_TAD: torch.Tensor, drafts: int) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
        """Tokens of a block, their logits [K, V] and confidences [K]; None without a head for them."""
        tokens, rows, sure = [anchor], [], []
        for state_H in self.speaking(self.slots(anchor, taps_TAD, drafts, len(taps_TAD))):
            rows.append(self.biased(state_H, tokens[-1]))
            if self.config["enable_confidence_head"]:
                sure.append(self.sure(state_H, tokens[-1]))
            tokens.append(int(rows[-1].argmax()))
        return tokens[1:], torch.stack(rows), torch.stack(sure) if sure else None


class ReferenceDFlash2(ReferenceDFlash):
    """DFlash 2 in either engine: a convolution before and behind each sublayer, and a walk through the candidates of the slots."""

    def around(self, name: str, x_SH: torch.Tensor, sublayer) -> torch.Tensor:
        taps, group = self.nested["conv_kernel_size"], self.nested["conv_group_size"]
        moved = self.linear(f"{name}.kernel_projection", x_SH).view(len(x_SH), 2, taps, -1)
        base_2tH = self.weight(f"{name}.base_kernel")

        def convolved(y_SH: torch.Tensor, side: int) -> torch.Tensor:
            rows = []
            for s in range(len(y_SH)):
                row = torch.zeros_like(y_SH[0])
                for tap in range(min(taps, s + 1)):
                    for channel in range(len(row)):
                        kernel = base_2tH[side, tap, channel] + moved[s, side, tap, channel // group]
                        row[channel] += kernel * y_SH[s - tap, channel]
                rows.append(row)
            return torch.stack(rows)

        return convolved(sublayer(convolved(x_SH, 0)), 1)

    def candidates(self, state_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and logits [C]; the target's factor and cap are put on in the engines' order."""
        found = (self.head_VH @ state_H).topk(self.nested["selector_top_k"])
        values, cap = found.values * self.nested.get("output_multiplier", 1.0), self.nested.get("final_logit_softcapping")
        return found.indices, values if cap is None else cap * torch.tanh(values / cap)

    def scores(self, state_H: torch.Tensor, before: int) -> torch.Tensor:
        """[V], -inf for what is no candidate."""
        ids, unary = self.candidates(state_H)
        path_r = self.weight("candidate_selector.predecessor_codebook")[before] * self.linear(
            "candidate_selector.hidden_projection", state_H
        )
        return self.spread(unary + self.weight("candidate_selector.successor_codebook")[ids] @ path_r, ids)

    def chain(self, anchor: int, taps_TAD: torch.Tensor, drafts: int) -> tuple[list[int], torch.Tensor]:
        """Tokens of a block, and the scores [K, V] that led to them."""
        tokens, rows = [anchor], []
        for state_H in self.speaking(self.slots(anchor, taps_TAD, drafts, len(taps_TAD))):
            rows.append(self.scores(state_H, tokens[-1]))
            tokens.append(int(rows[-1].argmax()))
        return tokens[1:], torch.stack(rows)


class ReferencePEagle(Reference):
    """P-EAGLE in vLLM: one causal row after another, those behind the anchor's with the masked token and the masked state."""

    def __init__(self, folder: Path, embedding_VH: torch.Tensor):
        super().__init__(folder)
        self.embedding_VH = self.weights.get("embed_tokens.weight", embedding_VH).float()

    def vllm_layers(self) -> list[int]:
        return self.config["eagle_aux_hidden_state_layer_ids"]

    def combine(self, taps_AH: torch.Tensor) -> torch.Tensor:
        taps_AH = taps_AH.float().view(self.aux(), -1)
        if self.config.get("fc_norm", False):
            taps_AH = torch.stack([self.norm(f"fc_norm.{i}", tap_H) for i, tap_H in enumerate(taps_AH)])
        return self.linear("fc", taps_AH.reshape(-1))

    def row(self, token: int, hidden_H: torch.Tensor, position: int) -> torch.Tensor:
        """The state behind the last layer; keys and values of each layer stay in its own cache."""
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            if layer == 0:
                embed = self.norm(f"{name}.input_layernorm", self.embedding_VH[token])
                read = torch.cat([embed, self.norm(f"{name}.hidden_norm", hidden_H)])
            else:
                read = self.norm(f"{name}.input_layernorm", hidden_H)
            self.keys, self.values = self.caches[layer]
            hidden_H = self.block(name, read, hidden_H, position)
        return hidden_H

    def masked(self) -> torch.Tensor:
        return self.combine(self.weight("mask_hidden").view(-1))

    def draft(self, ids: list[int], taps_TAD: torch.Tensor, drafts: int) -> torch.Tensor:
        """Logits [K, V] behind the anchor, the last of `ids`."""
        self.caches: list = [([], []) for _ in range(self.config["num_hidden_layers"])]
        states = [self.row(ids[t + 1], self.combine(taps_AD), t) for t, taps_AD in enumerate(taps_TAD)][-1:]
        for k in range(1, drafts):
            states.append(self.row(self.config["pard_token"], self.masked(), len(taps_TAD) - 1 + k))
        rows = [self.linear("lm_head", self.norm("norm", state_H)) for state_H in states]
        return torch.stack([self.spread(row, torch.arange(len(row)) + self.weights.get("d2t", 0)) for row in rows])
