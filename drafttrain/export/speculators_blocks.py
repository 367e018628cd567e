"""DFlash, DFlash 2 and DSpark in the speculators library's form (speculators.py).

Tensors are the engines'. The fields of a kind's head stand at the top, and the layout and the masked token beside them. Where a default of some
reader is not ours, the value is written out:

    sliding_window_non_causal  true     the library takes false but for DFlash 2, and vLLM then makes all layers causal, sliding or not
    sample_from_anchor         false    the layout 1+N; of a DSpark true, where vLLM takes false

vLLM 0.26 reads every DSpark of this form as 1+N, whatever it says, and knows no DFlash 2.

The library counts a window from the anchor for the whole block, we from each slot; so a drafter with a window is not written. It loads the target's
embeddings too by the target's name, as they stand in its files.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.dflash2 import TAPS
from drafttrain.export.backbone import BlockFacts, facts_of, layer_config, tensors_of
from drafttrain.export.block import PLAIN, head_refusal, read_block, reading_of, refused, special_ids, unlike
from drafttrain.export.block_format import BlockFormat, Options, require_layout
from drafttrain.export.dflash import DFlashFormat
from drafttrain.export.dflash2 import DFlash2Format
from drafttrain.export.dspark import DSparkFormat
from drafttrain.export.format import Engine, Written
from drafttrain.export.rows import reads_raw
from drafttrain.export.speculators import KIND, READERS, READERS_033, frame
from drafttrain.target.target import Target

DSPARK_026 = (
    "vLLM 0.26 takes every DSpark of speculators' form for one that was trained 1+N: it reads this one a slot late and accepts little. Serve it with "
    "0.33 or later, or set export.format to vllm."
)


class SpeculatorsBlocks(BlockFormat):
    """What the kinds have in common; which of them it is, the format for the engines says that is mixed in."""

    kind: str
    """The library's word."""
    told: Mapping[str, str] = {}
    """Options that the top of config.json tells: ours -> theirs."""
    fixed: Mapping[str, Any] = {}
    """Fields that are the same for all that we write."""

    def claims(self, config: dict[str, Any]) -> bool:
        return config.get("architectures") == [self.architecture] and config.get(KIND) == self.kind

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if net.config.window is not None:
            return (
                f"speculators counts a window from the anchor, and this drafter was trained with one of {net.config.window} counted from "
                "each slot; set export.format to vllm, or train with drafter.init_args.window null"
            )
        if not reads_raw(target):
            return (
                "this target changes its embeddings before its first layer reads them, and speculators takes the raw ones from its files; "
                "set export.format to vllm"
            )
        return refused(net) or head_refusal(target)

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        assert isinstance(net, BlockNet) and net.deepest is not None
        facts, options = facts_of(net, target), self.options_of(net, target)
        config = {
            **frame(self.architecture, self.kind, net.deepest, target, called, dtype),
            "transformer_layer_config": layer_config(facts, dtype, special_ids(target)),
            "num_target_layers": target.layers,
            **self.said(facts, options),
            "sample_from_anchor": net.first == 0,
            "sliding_window_non_causal": not net.causal,
        }
        tensors = {self.renamed.get(name, name): x for name, x in tensors_of(net, target, facts).items()}
        return Written(config, tensors, kept=self.kept(facts, options))

    def said(self, facts: BlockFacts, options: Options) -> dict[str, Any]:
        """Fields at the top that follow from the facts."""
        return {
            "draft_vocab_size": facts.draft_vocab,
            "target_hidden_size": facts.shape.target_hidden,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in facts.taps],
            "block_size": facts.block,
            "mask_token_id": facts.mask,
            "sample_from_anchor": self.first == 0,
            "sliding_window_non_causal": True,
            **{theirs: options[ours] for ours, theirs in self.told.items()},
            **self.fixed,
        }

    def heard(self, config: Mapping[str, Any]) -> Options:
        """The options. Raises KeyError."""
        return {ours: config[theirs] for ours, theirs in self.told.items()}

    def understood(self, config: dict[str, Any], where: str) -> tuple[BlockFacts, Options]:
        with reading_of(where, f"speculators {self.word}") as wrong:
            require_layout(config, self.first, self.word, where)
            layer = config["transformer_layer_config"]
            layers = layer["num_hidden_layers"]
            shape, found = read_block(layer, PLAIN | {"num_hidden_layers": layers, "model_type": "qwen3"})
            facts = BlockFacts(
                taps=tuple(k - 1 for k in config["aux_hidden_state_layer_ids"]),
                shape=shape,
                layers=layers,
                block=config["block_size"],
                mask=config["mask_token_id"],
                target_layers=config["num_target_layers"],
                draft_vocab=config["draft_vocab_size"],
            )
            options = self.heard(config)
            wrong += found + unlike(config, self.said(facts, options))
            if layer["layer_types"] != ["full_attention"] * layers:
                wrong.append(f"layer_types is {layer['layer_types']}, but this reader has no window counted from the anchor")
        return facts, options

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        return self.build(*self.understood(config, where), tensors, target, recorded, where)


class DFlashSpeculators(DFlashFormat, SpeculatorsBlocks):
    """DFlash as `DFlashSpeculator`."""

    name = "dflash-speculators"
    architecture = "DFlashSpeculator"
    kind = "dflash"
    engines: tuple[Engine, ...] = (Engine("speculators", READERS, "dflash"),)


class DFlash2Speculators(DFlash2Format, SpeculatorsBlocks):
    """DFlash 2, whose architecture has the engines' name here too. It chooses by the raw logits of the target's head."""

    name = "dflash2-speculators"
    kind = "dflash2"
    engines: tuple[Engine, ...] = (Engine("speculators", READERS_033, "dflash"),)
    told: Mapping[str, str] = {"rank": "selector_rank", "candidates": "selector_top_k", "group": "conv_group_size"}
    fixed: Mapping[str, Any] = {"conv_kernel_size": TAPS}

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if net.vocabulary.is_full and (target.logit_factor, target.logit_cap) != (1.0, None):
            return (
                "this target caps or scales its logits, and speculators' form of DFlash 2 cannot say so, though a selector adds to them; set "
                "export.format to vllm"
            )
        return super().refusal(net, target)

    def heard(self, config: Mapping[str, Any]) -> Options:
        return super().heard(config) | {"multiplier": 1.0, "cap": None}


class DSparkSpeculators(DSparkFormat, SpeculatorsBlocks):
    """DSpark as `DSparkSpeculator`, sampled from the anchor."""

    name = "dspark-speculators"
    architecture = "DSparkSpeculator"
    kind = "dspark"
    engines: tuple[Engine, ...] = (Engine("speculators", READERS_033, "dspark"),)
    told: Mapping[str, str] = {"rank": "markov_rank", "confidence": "enable_confidence_head"}
    fixed: Mapping[str, Any] = {"markov_head_type": "vanilla"}

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        return [*super().notes(net, target), DSPARK_026]

    def said(self, facts: BlockFacts, options: Options) -> dict[str, Any]:
        return super().said(facts, options) | {"confidence_head_with_markov": options["confidence"]}
