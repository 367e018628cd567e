"""P-EAGLE as vLLM (0.26.0, 0.33.0) reads it: EAGLE-3's class with further layers, a state for masked elements, and drafts in one pass.

vLLM has no architecture of its own for the plain form: its EAGLE-3 class drafts so if the server is told `parallel_drafting`, which nothing in
config.json can do. Untold it passes over `mask_hidden` with a warning and drafts as EAGLE-3, which accepts little. So the card's command says it.

    layers.0                 [norm(e); norm(g)], as EAGLE-3's; its `hidden_norm` exists in this layer only
    layers.1, 2, ...         ordinary, with `input_layernorm`
    mask_hidden              stands for the taps of a masked element, goes through fc (and fc_norm) like them
    pard_token               the masked elements' token; vLLM 0.26 knows no other field here
    row i, depth k           position i + k - 1; causal, so fewer drafts are the first ones of more

Layer ids are 1 higher than our 0-based taps, in one list at the top. The architecture is `Eagle3LlamaForCausalLM`, which SGLang has not: it has
no P-EAGLE, and its EAGLE-3 class would take the first layer's weights and accept nothing.

How deep a draft was trained is not vLLM's to know; `max_drafts` is ours.

Letters: H width of the drafter = width of the target, A taps, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.p_eagle import PEagle, PEagleNet
from drafttrain.export.block import (
    PLAIN,
    block_config,
    block_table,
    read_block,
    reading_of,
    refused,
    require_masked,
    require_rope,
    require_taps,
    settled,
    special_ids,
    unlike_facts,
)
from drafttrain.export.eagle3 import scale_notes
from drafttrain.export.format import (
    Engine,
    Format,
    Table,
    Written,
    fill,
    map_table,
    map_tensors,
    read_map,
    require_target,
    state_of,
)
from drafttrain.export.handing import handing_notes
from drafttrain.target.target import Target


@dataclass(frozen=True)
class PEagleFacts:
    """All that config.json has to say, in our own words."""

    taps: tuple[int, ...]
    """0-based layer outputs, ascending."""
    shape: DecoderShape
    layers: int
    drafts: int
    """Tokens of a draft."""
    mask: int
    draft_vocab: int
    fc_norm: bool = False

    def __post_init__(self) -> None:
        require_taps(self.taps)
        require_masked(self.draft_vocab, self.mask, self.shape.vocab)
        require_rope(self.shape)


class PEagleFormat(Format):
    """vLLM's."""

    name = "p-eagle"
    title = "P-EAGLE drafter"
    method = "eagle3"
    architecture = "Eagle3LlamaForCausalLM"
    engines: tuple[Engine, ...] = (Engine("vllm", "0.26 and later", "eagle3"),)

    lends_raw = True
    """Whether the embeddings are the target's table as it stands, and not in the file."""

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        return refused(net)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        told = (
            "vLLM drafts in one pass only where it is told parallel_drafting, as in the command of the card; untold, it takes this for EAGLE-3 and "
            "accepts little."
        )
        scale = scale_notes(target, net.shape.rms_eps) if self.lends_raw else []
        return [told, *scale, *handing_notes(target, self.engine_names)]

    def extra_words(self, engine: str) -> dict[str, Any]:
        return {"parallel_drafting": True}

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        assert isinstance(net, PEagleNet)
        tensors = state_of(net) | map_tensors(net.vocabulary)
        return Written(engine_config(facts_of(net), dtype, special_ids(target)), tensors)

    def table(self, config: dict[str, Any], where: str) -> Table:
        return tensor_table(read_engine_config(config, where))

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        return build_p_eagle(read_engine_config(config, where), tensors, target, recorded, where)

    def about(self, made: dict[str, Any]) -> str:
        layers, drafts = made["init_args"]["layers"], made["config"]["most_drafts"]
        taps = ", ".join(map(str, made["config"]["taps"]))
        return (
            f"{layers} decoder layers draft up to {drafts} tokens in one pass. They read the target's hidden states after layers {taps} "
            "(counted from 0)."
        )


def facts_of(net: PEagleNet) -> PEagleFacts:
    return PEagleFacts(
        net.needs.taps, net.shape, len(net.layers), net.config.depth, net.mask, len(net.vocabulary.ids), net.config.fc_norm
    )


def build_p_eagle(
    facts: PEagleFacts, tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
) -> DrafterNet:
    """The net that an engine would build."""
    require_target(facts.shape.vocab, facts.shape.hidden, target, where)
    target.check_taps(facts.taps)
    weights = dict(tensors)
    vocabulary = read_map(weights, facts.shape.vocab, where)
    full = PEagle(draft_vocab=None if vocabulary.is_full else facts.draft_vocab, mask_token=facts.mask)
    drafter = replace(
        recorded if isinstance(recorded, PEagle) else full, depth=facts.drafts, layers=facts.layers, fc_norm=facts.fc_norm
    )
    drafter = settled(drafter, facts.taps, facts.mask, target)
    embedding = Frozen(target.model.get_input_embeddings())
    return fill(PEagleNet(drafter, facts.shape, facts.taps, facts.mask, vocabulary, embedding), weights, target)


def tensor_table(facts: PEagleFacts) -> Table:
    """Exactly these tensors are in the file."""
    H, A = facts.shape.hidden, len(facts.taps)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, A * H),
        "mask_hidden": (1, 1, A * H),
        "layers.0.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (facts.draft_vocab, H),
    }
    for i in range(facts.layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (H,),
            **block_table(facts.shape, f"layers.{i}", inputs=H if i else 2 * H),
        }
    if facts.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(A)}
    return {name: (shape, None) for name, shape in shapes.items()} | map_table(facts.draft_vocab, facts.shape.vocab)


def engine_config(facts: PEagleFacts, dtype: torch.dtype, ids: dict[str, Any]) -> dict[str, Any]:
    """config.json as vLLM reads it. `ids` are the target's bos/eos/pad ids."""
    return {
        "architectures": [PEagleFormat.architecture],
        **block_config(facts.shape, dtype, ids),
        "num_hidden_layers": facts.layers,
        "draft_vocab_size": facts.draft_vocab,
        "num_aux_hidden_states": len(facts.taps),
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in facts.taps],
        "eagle_config": {"use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": facts.fc_norm,
        "norm_output": False,
        "pard_token": facts.mask,
        "max_drafts": facts.drafts,
    }


def read_engine_config(config: dict[str, Any], where: str) -> PEagleFacts:
    """What vLLM would understand from config.json. Raises UserError for another kind of drafter, or for what this reader does not compute."""
    with reading_of(where, "P-EAGLE") as wrong:
        shape, found = read_block(config, PLAIN | {"num_hidden_layers": config["num_hidden_layers"], "model_type": "llama"})
        facts = PEagleFacts(
            taps=tuple(k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]),
            shape=shape,
            layers=config["num_hidden_layers"],
            drafts=config["max_drafts"],
            mask=config["pard_token"],
            draft_vocab=config["draft_vocab_size"],
            fc_norm=config["fc_norm"],
        )
        wrong += found + unlike_facts(config, engine_config(facts, torch.float32, {}))
    return facts
