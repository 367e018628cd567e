"""EAGLE-3 and P-EAGLE in the speculators library's form (speculators.py).

Tensors are the engines', but for EAGLE-3's layer, which is called `layers.0` instead of `midlayer`. Where a default of some reader is not ours, or a
reader knows a field in one place only, the value is written out:

    norm_before_residual                      false    vLLM takes true for an EAGLE-3 where it is missing
    embed_requires_grad                       false    the library takes true for a P-EAGLE
    num_aux_hidden_states, in the layer       A        vLLM takes 3: it does not count the layer ids of this form
    fc_norm, in the layer of a P-EAGLE                 vLLM takes it from the top for an EAGLE-3 alone

The library looks for NaN among the embeddings before it loads the target's, but fresh memory holds anything: so they are in the file, as the target's
first layer reads them. How many tokens a P-EAGLE was trained to draft is the number of proposed ones.

Letters: A taps.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.p_eagle import PEagleNet
from drafttrain.export.block import PLAIN, block_config, read_block, reading_of, special_ids, unlike
from drafttrain.export.eagle3 import Eagle3Facts, Eagle3Format, build_eagle3, facts_of, tensor_table, tensors_of
from drafttrain.export.format import Engine, Table, Written, map_tensors, require_target, state_of
from drafttrain.export.p_eagle import PEagleFacts, PEagleFormat, build_p_eagle
from drafttrain.export.p_eagle import facts_of as p_eagle_facts_of
from drafttrain.export.p_eagle import tensor_table as p_eagle_table
from drafttrain.export.rows import read_rows, require_same
from drafttrain.export.speculators import READERS, frame
from drafttrain.target.target import Target

OURS, THEIRS = "midlayer.", "layers.0."
EMBEDDINGS = "embed_tokens.weight"


class Eagle3Speculators(Eagle3Format):
    """EAGLE-3 as `Eagle3Speculator`."""

    name = "eagle3-speculators"
    architecture = "Eagle3Speculator"
    engines = (Engine("speculators", READERS, "eagle3"),)
    sees_all = "the library's EAGLE-3 layer"
    lends_raw = False

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        facts, (tensors, copied) = facts_of(net), tensors_of(net)
        tensors[EMBEDDINGS] = read_rows(target)
        config = {
            **frame(self.architecture, "eagle3", net.needs.depth, target, called, dtype),
            "transformer_layer_config": block_config(facts.shape, dtype, special_ids(target)) | _eagle3_layer(facts),
            **_eagle3_words(facts),
        }
        return Written(config, {name.replace(OURS, THEIRS, 1): x for name, x in tensors.items()}, copied=copied)

    def table(self, config: dict[str, Any], where: str) -> Table:
        facts = _eagle3_facts(config, where)
        table = tensor_table(facts) | _embedding_table(facts.shape)
        return {name.replace(OURS, THEIRS, 1): entry for name, entry in table.items()}

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        facts = _eagle3_facts(config, where)
        own = _own_tensors(tensors, facts.shape, target, "EAGLE-3", where)
        return build_eagle3(facts, {name.replace(THEIRS, OURS, 1): x for name, x in own.items()}, target, recorded, where)


class PEagleSpeculators(PEagleFormat):
    """P-EAGLE as `PEagleSpeculator`."""

    name = "p-eagle-speculators"
    architecture = "PEagleSpeculator"
    engines = (Engine("speculators", READERS, "eagle3"),)
    lends_raw = False

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        assert isinstance(net, PEagleNet)
        facts = p_eagle_facts_of(net)
        config = {
            **frame(self.architecture, "peagle", facts.drafts, target, called, dtype),
            "transformer_layer_config": block_config(facts.shape, dtype, special_ids(target)) | _p_eagle_layer(facts),
            **_p_eagle_words(facts),
        }
        return Written(config, state_of(net) | map_tensors(net.vocabulary) | {EMBEDDINGS: read_rows(target)})

    def table(self, config: dict[str, Any], where: str) -> Table:
        facts = _p_eagle_facts(config, where)
        return p_eagle_table(facts) | _embedding_table(facts.shape)

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        facts = _p_eagle_facts(config, where)
        return build_p_eagle(facts, _own_tensors(tensors, facts.shape, target, "P-EAGLE", where), target, recorded, where)


def _embedding_table(shape: DecoderShape) -> Table:
    return {EMBEDDINGS: ((shape.vocab, shape.hidden), None)}


def _own_tensors(tensors: Mapping[str, Tensor], shape: DecoderShape, target: Target, word: str, where: str) -> dict[str, Tensor]:
    """All but the embeddings. Raises UserError for another target, or if they are not the target's."""
    require_target(shape.vocab, shape.hidden, target, where)
    require_same(tensors[EMBEDDINGS], read_rows(target), "a table of embeddings", f"our {word} reads", where)
    return {name: x for name, x in tensors.items() if name != EMBEDDINGS}


def _words(facts: Eagle3Facts | PEagleFacts) -> dict[str, Any]:
    """What both say at the top."""
    return {
        "draft_vocab_size": facts.draft_vocab,
        "target_hidden_size": facts.shape.target_hidden,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in facts.taps],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": facts.fc_norm,
        "embed_requires_grad": False,
    }


def _eagle3_words(facts: Eagle3Facts) -> dict[str, Any]:
    return _words(facts) | {"norm_output": facts.norm_output}


def _eagle3_layer(facts: Eagle3Facts) -> dict[str, Any]:
    return {"num_aux_hidden_states": len(facts.taps)}


def _eagle3_facts(config: dict[str, Any], where: str) -> Eagle3Facts:
    """Raises UserError for a drafter that this reader cannot compute."""
    with reading_of(where, "speculators EAGLE-3") as wrong:
        layer = config["transformer_layer_config"]
        shape, found = read_block(layer)
        facts = Eagle3Facts(
            taps=tuple(k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]),
            shape=shape,
            draft_vocab=config["draft_vocab_size"],
            fc_norm=config["fc_norm"],
            norm_output=config["norm_output"],
        )
        wrong += found + unlike(config, _eagle3_words(facts)) + unlike(layer, _eagle3_layer(facts))
    return facts


def _p_eagle_words(facts: PEagleFacts) -> dict[str, Any]:
    return _words(facts) | {"norm_output": False, "mask_token_id": facts.mask}


def _p_eagle_layer(facts: PEagleFacts) -> dict[str, Any]:
    return {"num_hidden_layers": facts.layers, "num_aux_hidden_states": len(facts.taps), "fc_norm": facts.fc_norm}


def _p_eagle_facts(config: dict[str, Any], where: str) -> PEagleFacts:
    """Raises UserError for a drafter that this reader cannot compute."""
    with reading_of(where, "speculators P-EAGLE") as wrong:
        layer = config["transformer_layer_config"]
        shape, found = read_block(layer, PLAIN | {"num_hidden_layers": layer["num_hidden_layers"], "model_type": "llama"})
        facts = PEagleFacts(
            taps=tuple(k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]),
            shape=shape,
            layers=layer["num_hidden_layers"],
            drafts=config["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
            mask=config["mask_token_id"],
            draft_vocab=config["draft_vocab_size"],
            fc_norm=config["fc_norm"],
        )
        wrong += found + unlike(config, _p_eagle_words(facts)) + unlike(layer, _p_eagle_layer(facts))
    return facts
