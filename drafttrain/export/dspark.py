"""DSpark as vLLM (0.26.0, 0.33.0) and SGLang (0.5.23) read it: the layers of backbone.py sampled from the anchor, a Markov and a confidence head.

The layout must be told, for readers take different defaults and different fields: vLLM 0.26 `dspark_bonus_anchor` (false), vLLM 0.33 and SGLang
`sample_from_anchor` (true), both at the top. A Markov head is read for its rank and its type (`vanilla`), with `markov_w1` of all the target's tokens
and `markov_w2` of those that are said.

Both heads' logits are added up. Engines add the Markov head's to the raw ones of the target's head, so a target that caps or scales its logits
is not written: the sum's first choice would be another.

The confidence head reads the state beside the Markov embedding and stays in fp32, as both engines hold it. vLLM 0.26 passes over it. A drafter
may have none: `enable_confidence_head` is then false and no such tensor in the file. vLLM reads the flag; SGLang looks for the tensors whenever
its ragged verification is on, whatever the flag says, and for none otherwise.

Letters: H width, r rank, V target vocabulary, Vd draft vocabulary.
"""

from typing import Any

import torch

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.dspark import DSpark, DSparkNet
from drafttrain.export.backbone import BlockFacts
from drafttrain.export.block_format import BlockFormat, Options
from drafttrain.export.format import Engine, Table
from drafttrain.target.target import Target

WITH_HEAD = (
    "The confidence head changes no draft. Where an engine ends drafts early (vLLM from 0.33 on: adaptive verification; SGLang: ragged "
    "verification) it is what decides; otherwise it is passed over, as vLLM 0.26 always does."
)
WITHOUT_HEAD = (
    "It has no confidence head, so an engine cannot end its drafts early: leave vLLM's enable_adaptive_verification false and SGLang's "
    "SGLANG_RAGGED_VERIFY_MODE static, as they are by default. Otherwise the engine stops when it starts."
)


class DSparkFormat(BlockFormat):
    """One folder for both engines."""

    name = "dspark"
    title = "DSpark drafter"
    word = "DSpark"
    method = "dspark"
    architecture = "Qwen3DSparkModel"
    engines: tuple[Engine, ...] = (Engine("vllm", "0.26 and later", "dspark"), Engine("sglang", "0.5.23", "DSPARK"))
    drafter, net, first = DSpark, DSparkNet, 0

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if (target.logit_factor, target.logit_cap) != (1.0, None):
            return (
                "this target caps or scales its logits, and engines add those of a DSpark's Markov head to the raw ones, which leads to other "
                "drafts; set export.format to native"
            )
        return super().refusal(net, target)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        return [*super().notes(net, target), WITH_HEAD if net.config.confidence else WITHOUT_HEAD]

    def options_of(self, net: BlockNet, target: Target) -> Options:
        assert isinstance(net.config, DSpark)
        return {"rank": net.config.rank, "confidence": net.config.confidence}

    def options_in(self, config: dict[str, Any]) -> Options:
        return {"rank": config["markov_rank"], "confidence": config["enable_confidence_head"]}

    def words(self, facts: BlockFacts, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
        top = {
            "sample_from_anchor": True,
            "dspark_bonus_anchor": False,
            "mask_token_id": facts.mask,
            "target_layer_ids": list(facts.taps),
            "markov_rank": options["rank"],
            "markov_head_type": "vanilla",
            "enable_confidence_head": options["confidence"],
            "confidence_head_with_markov": options["confidence"],
        }
        return top, {}

    def added(self, facts: BlockFacts, options: Options) -> Table:
        r, H = options["rank"], facts.shape.hidden
        table: Table = {
            "markov_head.markov_w1.weight": ((facts.shape.vocab, r), None),
            "markov_head.markov_w2.weight": ((facts.draft_vocab, r), None),
        }
        if options["confidence"]:
            table["confidence_head.proj.weight"] = ((1, H + r), torch.float32)
            table["confidence_head.proj.bias"] = ((1,), torch.float32)
        return table

    def about(self, made: dict[str, Any]) -> str:
        options = made["init_args"]
        sure = options.get("confidence", True)  # drafters from before there was a choice have one
        return (
            f"{super().about(made)} A Markov head of rank {options['rank']} ties each draft to the one before it"
            f"{', and a confidence head tells how likely each is to be kept' if sure else ''}."
        )


class DSparkForVllm(DSparkFormat):
    """What only vLLM can do: a reduced vocabulary, a window, embeddings that the target changes."""

    name = "dspark-vllm"
    engines = (Engine("vllm", "0.26 and later", "dspark"),)
    vllm_alone = True
