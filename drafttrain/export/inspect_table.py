"""Which tensors a drafter must have: by the format's own table, or, for published layouts and checkpoints, by our net built without memory.

Letters: V target vocabulary, Vd rows of the head.
"""

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from drafttrain.drafters.base import PLACES, DrafterNet
from drafttrain.drafters.published import Published
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.source import MAPS
from drafttrain.errors import UserError
from drafttrain.export.block_format import BlockFormat, require_layout
from drafttrain.export.format import Format, Table
from drafttrain.export.inspect_config import Reading
from drafttrain.target.target import Target
from drafttrain.types import Identity
from drafttrain.vocab import DraftVocabulary

OUTLINE_LAYERS = 8
"""Layers of a target that is only an outline, where nothing names more."""
WRONG_TYPES = (TypeError, ValueError, AttributeError, KeyError, RuntimeError, IndexError, ZeroDivisionError)
"""What reading a config.json raises whose values are not of the types that they should be."""


def format_table(reading: Reading, format: Format) -> Table | None:
    """The tensors that engines read; None, with what the format has to say, where config.json is not of it."""
    try:
        return format.table(reading.config, reading.folder.where)
    except UserError as error:
        missing = error.__cause__
        if not (isinstance(missing, KeyError) and set(missing.args) <= reading.folder.taken):
            reading.complain(str(error))
    except WRONG_TYPES as error:
        reading.fault(f"config.json holds values that cannot be read ({type(error).__name__}: {error}); write it again.")
    return None


def check_block(reading: Reading, format: BlockFormat) -> None:
    """Length, layout and masked token of a block drafter."""
    config, where = reading.config, reading.folder.where
    nested = config.get("dflash_config") if "transformer_layer_config" not in config else None
    inner = nested if isinstance(nested, dict) else config
    vocab = reading.block.get("vocab_size")
    if "block_size" not in config and "block_size" not in inner:
        reading.fault(
            "block_size is missing, so SGLang takes blocks of 16 slots, whatever the drafter was trained on; write the number of slots."
        )
        config["block_size"] = 2
    mask = inner.get("mask_token_id", config.get("mask_token_id"))
    if type(mask) is not int:
        reading.fault(
            "mask_token_id is missing (vLLM looks for it in dflash_config), so engines stop or fill the block with another token's embedding; write the "
            "token that the drafter was trained with."
        )
        inner["mask_token_id"] = config["mask_token_id"] = 0
    elif type(vocab) is int and not 0 <= mask < vocab:
        reading.fault(
            f"mask_token_id is {mask}, but the target's table of embeddings has rows 0 to {vocab - 1}; write the token that the drafter was trained with."
        )
        inner["mask_token_id"] = config["mask_token_id"] = 0
    try:
        require_layout(config, format.first, format.word, where)
    except UserError as error:
        silent = "dspark_bonus_anchor" not in config and not any("sample_from_anchor" in place for place in (config, inner))
        (reading.complain if silent else reading.fault)(str(error))
        _mend_layout(config, inner, format.first)


def _mend_layout(config: dict[str, Any], inner: dict[str, Any], first: int) -> None:
    for place in (config, inner):
        if "sample_from_anchor" in place:
            place["sample_from_anchor"] = first == 0
    if first == 0:
        config |= {"sample_from_anchor": True, "dspark_bonus_anchor": False}


# ---- by our own nets -------------------------------------------------------------------------------------------------------


def net_table(reading: Reading, found: Published, config: Mapping[str, Any], words: int | None) -> tuple[Table, set[str]] | None:
    """The tensors that stand for our net's weights in a published layout or a checkpoint, and those that may be missing; None, with the reason,
    where no such net can be built from the folder alone.

    Args:
        config: its class's options.
        words: Vd; None where it speaks with the target's head.
    """
    sizes, own_sizes = sizes_of(reading), (reading.folder.record or {}).get("own_sizes") or {}
    try:
        options = dict(config)
        began = next((options[name] for name in PLACES if options.get(name) is not None), None)
        if began is not None and not own_sizes:
            reading.note(
                f"it began as {began}, whose sizes an earlier version did not save, so its tensors are not held to them."
            )
            return None
        net = _outlined(reading, found.drafter, options, sizes, words, own_sizes)
    except UserError as error:
        reading.complain(str(error))
        return None
    except WRONG_TYPES as error:
        reading.fault(
            f"no {found.drafter} can be built from what it says of itself ({type(error).__name__}: {error}); give its own config.json."
        )
        return None
    if reading.folder.record is not None:
        reading.taps = net.needs.taps or None
    table: Table = {}
    for ours, own in net.state_dict().items():
        names = found.theirs(ours)
        for name in names:
            table[name] = ((*own.shape[:-1], own.shape[-1] // len(names)), None)
    _widen(reading, table)
    optional = {name for name in table if re.fullmatch(found.zeros, name)}
    lost = {name for ours in found.lost for name in found.theirs(ours)}
    left = {name for name in found.tensors if found.skips(name) or name in lost} - set(MAPS)
    return table | {name: (tuple(found.tensors[name].shape), None) for name in left - table.keys()}, optional | left


def _widen(reading: Reading, table: Table) -> None:
    """A published drafter may be narrower than its target, of which ours are not."""
    wide, own = (
        reading.block.get("target_hidden_size") or reading.config.get("target_hidden_size"),
        reading.block.get("hidden_size"),
    )
    if not wide or not own or wide == own:
        return
    for name in [name for name in table if re.fullmatch(r"fc\.weight|fc_norm\.\d+\.weight", name)]:
        (*rows, last), dtype = table[name]
        table[name] = ((*rows, last // own * wide), dtype)
    reading.note(
        f"it is {own} wide and its target {wide}: engines load that, drafttrain's drafters are as wide as their targets."
    )


def _outlined(
    reading: Reading, drafter: str, options: dict[str, Any], sizes: dict[str, Any], words: int | None, own_sizes: dict[str, Any]
) -> DrafterNet:
    """Our net on `meta`, of which nothing outside the folder is read. Raises UserError for a class that this version does not know."""
    classes = known_drafters()
    if drafter not in classes:
        raise UserError(f"it is a {drafter}, which this version does not know ({', '.join(classes)}); update drafttrain.")
    vocab = sizes["vocab_size"]
    config = classes[drafter](**options)
    target = outline(sizes, reading.layers or max([OUTLINE_LAYERS, *(tap + 2 for tap in reading.taps or ())]))
    vocabulary = DraftVocabulary(torch.arange(vocab if words is None else min(words, vocab)), vocab)
    with torch.device("meta"):
        return config.rebuild(target, vocabulary, own_sizes)


def outline(sizes: Mapping[str, Any], layers: int) -> Target:
    """A target without weights that has the sizes of a drafter's block."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # whose heads need not divide the width

    known = {key: value for key, value in sizes.items() if value is not None}
    model_config = Qwen3Config(num_hidden_layers=layers, **known)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(model_config)
    identity = Identity("", "", "", "", "", layers, sizes["hidden_size"], sizes["vocab_size"])
    return Target(model, SimpleNamespace(tokenizer=None), identity, ())  # type: ignore[arg-type]


def sizes_of(reading: Reading) -> dict[str, Any]:
    """Width, vocabulary and the block's sizes: by config.json, else by the tensors. Heads that nothing tells are as wide as fits."""
    block, tensors = reading.block, reading.tensors

    def rows(pattern: str) -> int | None:
        return next((len(x) for name, x in sorted(tensors.items()) if re.fullmatch(pattern, name) and x.dim()), None)

    def said(key: str, otherwise: Callable[[], int | None]) -> int | None:
        return block[key] if block.get(key) is not None else otherwise()

    facts = (reading.folder.record or reading.folder.made or {}).get("identity") or {}
    hidden = said(
        "hidden_size",
        lambda: facts.get("hidden") or rows(r"(.*\.)?norm\.weight|fc\.weight|.*linear\.weight|.*layers\.\d+\.weight"),
    )
    vocab = said(
        "vocab_size",
        lambda: facts.get("vocab") or rows(r"t2d|embed_tokens\.weight") or rows(r".*lm_head.*weight|\d+\.[1-9]\d*\.weight"),
    )
    q, kv, head = rows(r".*q_proj\.weight"), rows(r".*k_proj\.weight"), rows(r".*q_norm\.weight")
    heads = block.get("num_attention_heads")
    head_dim = said("head_dim", lambda: head or (q or hidden or 1) // (heads or 1) if heads or head else _common(q, kv))
    width = head_dim or 1
    return {
        "hidden_size": hidden or 1,
        "vocab_size": vocab or 1,
        "intermediate_size": said("intermediate_size", lambda: rows(r".*gate_proj\.weight")) or 1,
        "num_attention_heads": heads or (q or width) // width,
        "num_key_value_heads": said("num_key_value_heads", lambda: (kv or q or width) // width) or 1,
        "head_dim": width,
    }  # fmt: skip


def _common(q: int | None, kv: int | None) -> int | None:
    return kv if q and kv and q % kv == 0 else q


def head_rows(found: Published) -> int | None:
    """Vd; None where it speaks with the target's head."""
    tensors = found.tensors
    own = (len(tensors[name]) for name in ("lm_head.weight", "d2t", "token_map") if name in tensors and tensors[name].dim())
    return found.rows if found.rows is not None else next(own, None)
