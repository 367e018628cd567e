"""DFlash as vLLM (0.26.0, 0.33.0) and SGLang (0.5.23) read it: one folder for both, or one for vLLM alone where SGLang cannot follow.

What both compute, and what they do with a mistake (they serve, and accept nothing):

- Layer ids are 0-based outputs; both engines add 1. The same layers stand in `eagle_aux_hidden_state_layer_ids`, 1 higher, which vLLM
  reads as they are.
- Layout 1+N: slot 0 is the anchor and says nothing. Neither engine has the other layout for DFlash, and vLLM 0.26 does not look at the
  flag: a folder with `sample_from_anchor` true would be drafted from one slot too late. It is refused by name, here on reading too.
- Neither knows from config.json how long a block is: as many slots as drafts are asked for, and one. Fewer drafts are a shorter block.
- Embeddings and head are the target's; no such tensors are in the file. Both lend the *raw* table, and `mask_token_id` is a row of it.

What vLLM alone does:

- A reduced vocabulary: rows of the target's head as `lm_head`, and offsets `d2t`. SGLang has no map.
- A target that does something to its embeddings (Gemma multiplies them): vLLM takes a table of the drafter's own.
- A window of W. Ours: slot s sees context rows above position - W, and all of its block. In both engines a sliding layer is causal
  unless told otherwise (`dflash_config.causal`, `is_causal`). Told, FlashAttention looks W-1 back and W-1 ahead, which is ours as long as a
  block fits into the window. In SGLang the far end depends on the attention backend (FlashInfer gives the later slots of a block rows
  that FlashAttention does not), so we do not write it for SGLang.

Letters: H width of the drafter = width of the target, A taps, V target vocabulary, Vd draft vocabulary, D head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.dflash import DFlash, DFlashNet
from drafttrain.drafters.head import TargetHead
from drafttrain.errors import UserError
from drafttrain.export.block import (
    PLAIN,
    block_config,
    block_table,
    head_refusal,
    read_block,
    refused,
    rope_fault,
    special_ids,
    unlike,
)
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
from drafttrain.export.rows import read_rows, reads_raw, require_same, said_rows
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary

ARCHITECTURE = "DFlashDraftModel"
KNOWN_ALREADY = ("dtype", "torch_dtype", "rope_theta", "rope_scaling")
"""Fields that the facts do not decide, or that `read_block` compares."""


@dataclass(frozen=True)
class DFlashFacts:
    """All that config.json has to say, in our own words."""

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
        if (
            list(self.taps) != sorted(set(self.taps))
            or not self.taps
            or not 0 <= self.taps[0] <= self.taps[-1] < self.target_layers
        ):
            raise UserError(
                f"taps are {list(self.taps)}, but engines read layers in order: they must ascend, without repeats, "
                f"from 0 to {self.target_layers - 1}."
            )
        if not (0 < self.draft_vocab <= self.shape.vocab and 0 <= self.mask < self.shape.vocab):
            raise UserError(
                f"the draft vocabulary has {self.draft_vocab} tokens and the mask is number {self.mask}, but the target has "
                f"{self.shape.vocab}: neither may reach beyond them."
            )
        if fault := rope_fault(self.shape.rope_parameters):
            raise UserError(f"{fault}.")


class DFlashFormat(Format):
    """One folder for both engines."""

    name = "dflash"
    title = "DFlash drafter"
    method = "dflash"
    architecture = ARCHITECTURE
    engines: tuple[Engine, ...] = (Engine("vllm", "0.26 and later", "dflash"), Engine("sglang", "0.5.23", "DFLASH"))
    whole_block = True

    def claims(self, config: dict[str, Any]) -> bool:
        return super().claims(config) and not _vllm_only(config)

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if not net.vocabulary.is_full:
            return (
                f"SGLang's DFlash says every token of the target, and this drafter says {len(net.vocabulary.ids):,}; set export.format "
                "to vllm, or train with drafter.init_args.draft_vocab null"
            )
        if net.config.window is not None:
            return (
                f"the rows that a window of {net.config.window} takes in depend on SGLang's attention backend; set export.format to "
                "vllm, or train with drafter.init_args.window null"
            )
        if not reads_raw(target):
            return (
                "this target changes its embeddings before its first layer reads them, and SGLang gives a drafter the raw ones; set "
                "export.format to vllm"
            )
        return refused(net) or head_refusal(target)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        drafts = net.deepest
        return [
            f"Ask for {drafts} drafts: an engine makes the block one slot longer than that, and this drafter was trained on blocks of "
            f"{net.config.block}. Fewer drafts are a shorter block, which was neither trained nor measured."
        ]

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        assert isinstance(net, DFlashNet)
        facts = facts_of(net, target)
        config = engine_config(facts, dtype, special_ids(target))
        config["dflash_config"] |= {"causal": net.causal, "sample_from_anchor": net.first == 0}
        return Written(config, tensors_of(net, target, facts))

    def table(self, config: dict[str, Any], where: str) -> Table:
        return tensor_table(read_engine_config(config, where))

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        return build_dflash(read_engine_config(config, where), tensors, target, recorded, where)

    def about(self, made: dict[str, Any]) -> str:
        block, layers = made["init_args"]["block"], made["init_args"]["layers"]
        taps = ", ".join(map(str, made["config"]["taps"]))
        return (
            f"{layers} decoder layers fill in a block of {block} slots in one pass: the last token and {block - 1} drafts. Each of them "
            f"reads the target's hidden states after layers {taps} (counted from 0)."
        )


class DFlashForVllm(DFlashFormat):
    """What only vLLM can do: a reduced vocabulary, a window, embeddings that the target changes."""

    name = "dflash-vllm"
    engines = (Engine("vllm", "0.26 and later", "dflash"),)

    def claims(self, config: dict[str, Any]) -> bool:
        return Format.claims(self, config) and _vllm_only(config)

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        window, block = net.config.window, net.config.block
        if window is not None and window < block:
            return (
                f"a slot of ours sees all of its block of {block}, and one of vLLM's no further than its window of {window}; train with "
                f"drafter.init_args.window {block} or more, or set export.format to native"
            )
        return refused(net) or head_refusal(target)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        found = super().notes(net, target)
        if net.config.window is not None:
            found.append(
                "Its layers slide without being causal: serve it with vLLM's FlashAttention backend and V2 model runner, its defaults."
            )
        if not reads_raw(target):
            found.append("The embeddings are in the file as the target's first layer reads them, since vLLM lends the raw table.")
        return found


def facts_of(net: DFlashNet, target: Target) -> DFlashFacts:
    known = net.mask < len(target.tokenizer)
    return DFlashFacts(
        net.needs.taps, net.shape, len(net.layers), net.slots, net.mask, target.layers, len(net.vocabulary.ids), net.config.window,
        own_embedding=not reads_raw(target), mask_word=target.tokenizer.convert_ids_to_tokens(net.mask) if known else None,
    )  # fmt: skip


def tensors_of(net: DFlashNet, target: Target, facts: DFlashFacts) -> dict[str, Tensor]:
    """What the net has learned, and copies of the target's tables where the facts say so."""
    tensors = state_of(net) | map_tensors(net.vocabulary)
    if not net.vocabulary.is_full:
        tensors["lm_head.weight"] = said_rows(target, net.vocabulary)
    if facts.own_embedding:
        tensors["embed_tokens.weight"] = read_rows(target)
    return tensors


def tensor_table(facts: DFlashFacts) -> Table:
    """Exactly these tensors are in the file."""
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


def layer_config(facts: DFlashFacts, dtype: Any, ids: dict[str, Any]) -> dict[str, Any]:
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


def engine_config(facts: DFlashFacts, dtype: Any, ids: dict[str, Any]) -> dict[str, Any]:
    """config.json as the engines read it. `ids` are the target's bos/eos/pad ids."""
    slides = facts.window is not None
    return {
        "architectures": [ARCHITECTURE],
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
            "sample_from_anchor": False,
            "use_aux_hidden_state": True,
            "use_swa": slides,
            **({"swa_window_size": facts.window} if slides else {}),
            **({} if facts.mask_word is None else {"mask_token": facts.mask_word}),
        },
    }


def read_engine_config(config: dict[str, Any], where: str) -> DFlashFacts:
    """What an engine would understand from config.json alone.

    Raises UserError if it is another kind of drafter or of layout, asks for something that this reader does not compute, or if two
    fields that say the same thing disagree.
    """
    try:
        nested = config["dflash_config"]
        require_one_plus_n(nested.get("sample_from_anchor") or config.get("sample_from_anchor"), where)
        shape, wrong = read_block(config, PLAIN | {"num_hidden_layers": config["num_hidden_layers"]})
        facts = DFlashFacts(
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
        wrong += unlike(
            config, {key: value for key, value in engine_config(facts, torch.float32, {}).items() if key not in KNOWN_ALREADY}
        )
    except KeyError as error:
        raise UserError(
            f"{where}/config.json has no {error}, so this is no DFlash export of ours; export the drafter again."
        ) from error
    if wrong:
        raise UserError(f"{where}/config.json is not a DFlash drafter that can be read here: {'; '.join(wrong)}.")
    return facts


def require_one_plus_n(from_anchor: bool | None, where: str) -> None:
    """Raises UserError for the layout whose first slot speaks."""
    if from_anchor:
        raise UserError(
            f"{where} says sample_from_anchor true, but DFlash is 1+N only, here and in the engines: slot 0 is the anchor and slot k says "
            "the k-th draft. Drafters whose first slot speaks are DSpark's; give one that was trained 1+N."
        )


def build_dflash(
    facts: DFlashFacts, tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
) -> DrafterNet:
    """The net that an engine would build; what is not the drafter's own is compared with the target's."""
    require_target(facts.shape.vocab, facts.shape.hidden, target, where)
    target.check_taps(facts.taps)
    weights = dict(tensors)
    vocabulary = read_map(weights, facts.shape.vocab, where)
    for name, what, own in (
        ("lm_head.weight", "a head", lambda: said_rows(target, vocabulary)),
        ("embed_tokens.weight", "a table of embeddings", lambda: read_rows(target)),
    ):
        if name in weights:
            require_same(weights.pop(name), own(), what, "our DFlash works with", where)
    config = _drafter(facts, target, vocabulary, recorded)
    embedding = Frozen(target.model.get_input_embeddings())
    return fill(
        DFlashNet(config, facts.shape, facts.taps, facts.mask, vocabulary, embedding, TargetHead(target, vocabulary)),
        weights,
        target,
    )


def _drafter(facts: DFlashFacts, target: Target, vocabulary: DraftVocabulary, recorded: DrafterConfig | None) -> DFlash:
    """The configuration: what was left to be chosen for the target in training stays so where the choice is the same."""
    plain = DFlash(draft_vocab=None if vocabulary.is_full else len(vocabulary.ids), mask_token=facts.mask, taps=list(facts.taps))
    own = replace(recorded if type(recorded) is DFlash else plain, block=facts.block, layers=facts.layers, window=facts.window)
    if own.taps_of(target) != facts.taps:
        own = replace(own, taps=list(facts.taps))
    return own if own.mask_token is None else replace(own, mask_token=facts.mask)


def _vllm_only(config: dict[str, Any]) -> bool:
    reduced = config.get("draft_vocab_size") != config.get("vocab_size")
    return bool(reduced or config.get("sliding_window") or config.get("has_embed_tokens"))
