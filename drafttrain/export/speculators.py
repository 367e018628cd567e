"""The format of the speculators library (0.9.0): its own loader reads it, and vLLM, which finds the target in it. SGLang does not.

Tensors are the engines', but for EAGLE-3's layer, which is called `layers.0` instead of `midlayer`. config.json says in the library's words
what the engines' says in theirs. Where a default of some reader is not ours, the value is written out:

    norm_before_residual       false    vLLM takes true where it is missing
    sliding_window_non_causal  true     the library takes false, and vLLM then makes all layers causal, sliding or not
    sample_from_anchor         false    the layout 1+N
    layer ids                  i + 1    both readers count the stream after i + 1 layers, we the output of layer i

The library counts a window from the anchor for the whole block, we from each slot; so a drafter with a window is not written.

It loads the target's head by the target's name, and for DFlash the embeddings too, as they stand in the target's files. For EAGLE-3 it looks
for NaN before it loads them, but fresh memory holds anything: so they are in the file, as the target's first layer reads them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.block import BlockNet
from drafttrain.errors import UserError
from drafttrain.export.backbone import BlockFacts, layer_config
from drafttrain.export.backbone import facts_of as block_facts_of
from drafttrain.export.backbone import tensor_table as block_table
from drafttrain.export.backbone import tensors_of as block_tensors_of
from drafttrain.export.block import PLAIN, block_config, head_refusal, read_block, refused, special_ids
from drafttrain.export.block_format import require_layout
from drafttrain.export.dflash import DFlashFormat
from drafttrain.export.eagle3 import Eagle3Facts, Eagle3Format, build_eagle3, facts_of, tensor_table, tensors_of
from drafttrain.export.format import Engine, Table, Written, dtype_words, require_target
from drafttrain.export.rows import read_rows, reads_raw, require_same
from drafttrain.target.target import Target

VERSION = "0.9.0"
READERS = f"{VERSION}, and vLLM 0.26 and later in its own way"
OURS, THEIRS = "midlayer.", "layers.0."


class Eagle3Speculators(Eagle3Format):
    """EAGLE-3 as `Eagle3Speculator`."""

    name = "eagle3-speculators"
    architecture = "Eagle3Speculator"
    engines = (Engine("speculators", READERS, "eagle3"),)
    lends_raw = False

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        facts, (tensors, copied) = facts_of(net), tensors_of(net)
        tensors["embed_tokens.weight"] = read_rows(target)
        config = {
            **_frame(self.architecture, "eagle3", net.needs.depth, target, called, dtype),
            "transformer_layer_config": block_config(facts.shape, dtype, special_ids(target)),
            **_eagle3_words(facts),
        }
        return Written(config, {name.replace(OURS, THEIRS, 1): x for name, x in tensors.items()}, copied=copied)

    def table(self, config: dict[str, Any], where: str) -> Table:
        facts = _eagle3_facts(config, where)
        table = tensor_table(facts) | {"embed_tokens.weight": ((facts.shape.vocab, facts.shape.hidden), None)}
        return {name.replace(OURS, THEIRS, 1): entry for name, entry in table.items()}

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        facts, ours = _eagle3_facts(config, where), {name.replace(THEIRS, OURS, 1): x for name, x in tensors.items()}
        require_target(facts.shape.vocab, facts.shape.hidden, target, where)
        require_same(ours.pop("embed_tokens.weight"), read_rows(target), "a table of embeddings", "our EAGLE-3 reads", where)
        return build_eagle3(facts, ours, target, recorded, where)


class DFlashSpeculators(DFlashFormat):
    """DFlash as `DFlashSpeculator`."""

    name = "dflash-speculators"
    architecture = "DFlashSpeculator"
    engines = (Engine("speculators", READERS, "dflash"),)

    def claims(self, config: dict[str, Any]) -> bool:
        return config.get("architectures") == [self.architecture]

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
        facts = block_facts_of(net, target)
        config = {
            **_frame(self.architecture, "dflash", net.deepest, target, called, dtype),
            "transformer_layer_config": layer_config(facts, dtype, special_ids(target)),
            "num_target_layers": target.layers,
            **_dflash_words(facts),
            "sample_from_anchor": net.first == 0,
            "sliding_window_non_causal": not net.causal,
        }
        return Written(config, block_tensors_of(net, target, facts))

    def table(self, config: dict[str, Any], where: str) -> Table:
        return block_table(_dflash_facts(config, where))

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        return self.build(_dflash_facts(config, where), {}, tensors, target, recorded, where)


def _frame(architecture: str, algorithm: str, drafts: int, target: Target, called: str, dtype: torch.dtype) -> dict[str, Any]:
    """What every drafter says: how many tokens it proposes, and for whom. Raises UserError if the library could not load the target."""
    if called.startswith("package:") or called.endswith(".gguf"):
        raise UserError(
            f"export.format is speculators, which loads the target {called} from its Hub id or its folder, and this is neither; set "
            "export.base_model to the id of the same model on the Hub."
        )
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": called, "architectures": [type(target.model).__name__]},
        },
        **dtype_words(dtype),
    }


def _eagle3_words(facts: Eagle3Facts) -> dict[str, Any]:
    return {
        "draft_vocab_size": facts.draft_vocab,
        "target_hidden_size": facts.shape.target_hidden,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in facts.taps],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": facts.fc_norm,
        "norm_output": facts.norm_output,
        "embed_requires_grad": False,
    }


def _dflash_words(facts: BlockFacts) -> dict[str, Any]:
    return {
        "draft_vocab_size": facts.draft_vocab,
        "target_hidden_size": facts.shape.target_hidden,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in facts.taps],
        "block_size": facts.block,
        "mask_token_id": facts.mask,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }


def _eagle3_facts(config: dict[str, Any], where: str) -> Eagle3Facts:
    """Raises UserError for a drafter that this reader cannot compute."""
    try:
        shape, wrong = read_block(config["transformer_layer_config"])
        facts = Eagle3Facts(
            taps=tuple(k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]),
            shape=shape,
            draft_vocab=config["draft_vocab_size"],
            fc_norm=config["fc_norm"],
            norm_output=config["norm_output"],
        )
    except KeyError as error:
        raise _missing(error, where) from error
    _require(config, _eagle3_words(facts), wrong, where)
    return facts


def _dflash_facts(config: dict[str, Any], where: str) -> BlockFacts:
    """Raises UserError for a drafter that this reader cannot compute."""
    require_layout(config, DFlashFormat.first, DFlashFormat.word, where)
    try:
        layer = config["transformer_layer_config"]
        shape, wrong = read_block(layer, PLAIN | {"num_hidden_layers": layer["num_hidden_layers"], "model_type": "qwen3"})
        facts = BlockFacts(
            taps=tuple(k - 1 for k in config["aux_hidden_state_layer_ids"]),
            shape=shape,
            layers=layer["num_hidden_layers"],
            block=config["block_size"],
            mask=config["mask_token_id"],
            target_layers=config["num_target_layers"],
            draft_vocab=config["draft_vocab_size"],
        )
        if layer["layer_types"] != ["full_attention"] * facts.layers:
            wrong.append(f"layer_types is {layer['layer_types']}, but this reader has no window counted from the anchor")
    except KeyError as error:
        raise _missing(error, where) from error
    _require(config, _dflash_words(facts), wrong, where)
    return facts


def _missing(error: KeyError, where: str) -> UserError:
    return UserError(
        f"{where}/config.json has no {error}, so this is no export of ours for speculators; export the drafter again."
    )


def _require(config: dict[str, Any], wanted: dict[str, Any], wrong: list[str], where: str) -> None:
    """Raises UserError where the config says something else than what the facts read from it come to."""
    wrong = wrong + [f"{key} is {config.get(key)!r}, not {value!r}" for key, value in wanted.items() if config.get(key) != value]
    if wrong:
        raise UserError(f"{where}/config.json is not a speculators drafter that can be read here: {'; '.join(wrong)}.")
