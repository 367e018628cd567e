"""Targets whose hidden states an engine hands to a drafter that taps layers: the engine's class for the target has to be made for it.

Looked up in vLLM 0.26.0 and 0.33.0 (classes that support EAGLE-3's features) and in SGLang 0.5.23 (classes that a DFlash's or DSpark's layers can be set
in). Only targets that drafttrain is used with are listed. For another one the engine stops when it starts, so the card says it; the folder
itself is right, and a later release may load it.
"""

from collections.abc import Sequence

from drafttrain.export.format import NAMES
from drafttrain.target.target import Target

KNOWN = {
    "vllm": {
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
        "ApertusForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    },
    "sglang": {
        "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    },
}  # fmt: skip
"""Engine -> architectures of targets, as transformers calls them."""


def handing_notes(target: Target, engines: Sequence[str]) -> list[str]:
    """A sentence for each engine that may not know how to draft for this kind of target."""
    kind = type(target.model).__name__
    return [
        f"{NAMES[name]} was not found to hand the hidden states of a {kind} to drafters, in the releases that were looked at: there it stops when it "
        "starts. Its own list of models with such features says whether a later one does."
        for name in engines
        if name in KNOWN and kind not in KNOWN[name]
    ]
