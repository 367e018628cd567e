"""The layers of a block drafter in config.json and model.safetensors, both directions: what DFlash, DFlash 2 and DSpark have in common.

What both engines (vLLM 0.26.0 and 0.33.0, SGLang 0.5.23) compute, and what they do with a mistake (they serve, and accept nothing):

- Layer ids are 0-based outputs; both engines add 1. The same layers stand in `eagle_aux_hidden_state_layer_ids`, 1 higher, which vLLM
  reads as they are.
- Two layouts: 1+N (slot 0 is the anchor and says nothing) and sample from anchor (slot 0 says the first draft). A kind of drafter has one of them,
  written out in `sample_from_anchor`; a folder that names the other is refused, on reading too.
- Neither takes the length of a block from config.json without being asked: as many slots as drafts are asked for, and in 1+N one more.
- A layer is causal if `dflash_config.causal` (vLLM 0.26), `is_causal` (vLLM 0.33, SGLang) or, without them, a window says so.
- Embeddings and head are the target's; no such tensors are in the file. Both lend the *raw* table, and `mask_token_id` is a row of it.

vLLM alone takes rows of the target's head with offsets (a reduced vocabulary), a table of embeddings of the drafter's own (for
targets that change theirs), and a window of W as ours is: slot s sees context rows above position - W, and all of its block. Told
that it is not causal, FlashAttention looks W-1 back and W-1 ahead, which is ours as long as a block fits into the window. In SGLang
the far end depends on the attention backend (FlashInfer gives the later slots of a block rows that FlashAttention does not), so we
do not write it for SGLang.

Letters: H width of the drafter = width of the target, A taps, V target vocabulary, Vd draft vocabulary, D head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.export.block import PLAIN, block_config, block_table, read_block, require_masked, require_rope, require_taps
from drafttrain.export.format import Table, map_table, map_tensors, state_of
from drafttrain.export.rows import read_rows, reads_raw, require_same, said_rows
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary


@dataclass(frozen=True)
class BlockFacts:
    """All that config.json has to say of the layers, in our own words."""

    taps: tuple[int, ...]
    """0-based layer outputs, ascending."""
    shape: DecoderShape
    layers: int
    block: int
    """Slots, the anchor's included."""
    mask: int
    target_layers: int
    draft_vocab: int
    window: int | None = None
    own_embedding: bool = False
    """Whether the file holds the embeddings as the target's first layer reads them."""
    mask_word: str | None = None
    """The mask's text, which SGLang compares with the tokenizer where there is one."""

    def __post_init__(self) -> None:
        require_taps(self.taps, self.target_layers)
        require_masked(self.draft_vocab, self.mask, self.shape.vocab)
        require_rope(self.shape)


def facts_of(net: BlockNet, target: Target) -> BlockFacts:
    known = net.mask < len(target.tokenizer)
    return BlockFacts(
        net.needs.taps, net.shape, len(net.layers), net.slots, net.mask, target.layers, len(net.vocabulary.ids), net.config.window,
        own_embedding=not reads_raw(target), mask_word=target.tokenizer.convert_ids_to_tokens(net.mask) if known else None,
    )  # fmt: skip


def tensors_of(net: BlockNet, target: Target, facts: BlockFacts) -> dict[str, Tensor]:
    """What the net has learned, and copies of the target's tables where the facts say so."""
    tensors = state_of(net) | map_tensors(net.vocabulary)
    if not net.vocabulary.is_full:
        tensors["lm_head.weight"] = said_rows(target, net.vocabulary)
    if facts.own_embedding:
        tensors["embed_tokens.weight"] = read_rows(target)
    return tensors


def tensor_table(facts: BlockFacts) -> Table:
    """Exactly these tensors of the layers are in the file."""
    H, D, V, Vd = facts.shape.hidden, facts.shape.head_dim, facts.shape.vocab, facts.draft_vocab
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, len(facts.taps) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(facts.layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.self_attn.q_norm.weight": (D,),
            f"layers.{i}.self_attn.k_norm.weight": (D,),
            **block_table(facts.shape, f"layers.{i}", inputs=H),
        }
    if Vd < V:
        shapes["lm_head.weight"] = (Vd, H)
    if facts.own_embedding:
        shapes["embed_tokens.weight"] = (V, H)
    return {name: (shape, None) for name, shape in shapes.items()} | map_table(Vd, V)


def take_tables(tensors: dict[str, Tensor], target: Target, vocabulary: DraftVocabulary, title: str, where: str) -> None:
    """Takes copies of the target's tables out of `tensors`. Raises UserError if they are not the target's."""
    for name, what, own in (
        ("lm_head.weight", "a head", lambda: said_rows(target, vocabulary)),
        ("embed_tokens.weight", "a table of embeddings", lambda: read_rows(target)),
    ):
        if name in tensors:
            require_same(tensors.pop(name), own(), what, f"our {title} works with", where)


def layer_config(facts: BlockFacts, dtype: Any, ids: dict[str, Any]) -> dict[str, Any]:
    """The Qwen3 fields of config.json; transformers drops a window that `use_sliding_window` does not call for."""
    slides = facts.window is not None
    return {
        **block_config(facts.shape, dtype, ids),
        "model_type": "qwen3",
        "num_hidden_layers": facts.layers,
        "layer_types": ["sliding_attention" if slides else "full_attention"] * facts.layers,
        "use_sliding_window": slides,
        "sliding_window": facts.window,
        "max_window_layers": 0 if slides else facts.layers,
    }


def backbone_config(facts: BlockFacts, dtype: Any, ids: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the layers; a layout and a name are the drafter's to add. `ids` are the target's bos/eos/pad ids."""
    slides = facts.window is not None
    return {
        **layer_config(facts, dtype, ids),
        "block_size": facts.block,
        "num_target_layers": facts.target_layers,
        "draft_vocab_size": facts.draft_vocab,
        "has_embed_tokens": facts.own_embedding,
        "is_causal": False,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in facts.taps],
        "dflash_config": {
            "mask_token_id": facts.mask,
            "target_layer_ids": list(facts.taps),
            "causal": False,
            "use_aux_hidden_state": True,
            "use_swa": slides,
            **({"swa_window_size": facts.window} if slides else {}),
            **({} if facts.mask_word is None else {"mask_token": facts.mask_word}),
        },
    }


def read_backbone(config: Mapping[str, Any]) -> tuple[BlockFacts, list[str]]:
    """What an engine would understand of the layers from config.json alone, and the contradictions in it. Raises KeyError where a field is
    missing, UserError for what no block drafter can be."""
    nested = config["dflash_config"]
    shape, wrong = read_block(dict(config), PLAIN | {"num_hidden_layers": config["num_hidden_layers"]})
    facts = BlockFacts(
        taps=tuple(nested["target_layer_ids"]),
        shape=shape,
        layers=config["num_hidden_layers"],
        block=config["block_size"],
        mask=nested["mask_token_id"],
        target_layers=config["num_target_layers"],
        draft_vocab=config["draft_vocab_size"],
        window=config["sliding_window"],
        own_embedding=config["has_embed_tokens"],
        mask_word=nested.get("mask_token"),
    )
    return facts, wrong


def any_dtype(facts: BlockFacts) -> dict[str, Any]:
    """`backbone_config` for a comparison that leaves types and special tokens alone."""
    return backbone_config(facts, torch.float32, {})
