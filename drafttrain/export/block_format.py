"""Block drafters as the engines read them: one folder for vLLM and SGLang, or one for vLLM alone where SGLang cannot follow.

What differs between kinds is small, and stands in their files (dflash.py, dflash2.py, dspark.py): an architecture, a layout, some options with
the words and tensors that they come to, and whom an engine cannot serve. What the layers look like stands in backbone.py.

Letters: S slots of a block.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen
from drafttrain.drafters.block import BlockNet, _BlockDrafter
from drafttrain.drafters.head import TargetHead
from drafttrain.errors import UserError
from drafttrain.export.backbone import (
    BlockFacts,
    any_dtype,
    backbone_config,
    facts_of,
    read_backbone,
    take_tables,
    tensor_table,
    tensors_of,
)
from drafttrain.export.block import head_refusal, reading_of, refused, settled, special_ids, unlike_facts
from drafttrain.export.format import Format, Table, Written, fill, read_map, require_target
from drafttrain.export.handing import handing_notes
from drafttrain.export.rows import reads_raw
from drafttrain.export.speculators import KIND
from drafttrain.target.target import Target

Options = dict[str, Any]
"""What a kind adds to the layers: field of its drafter, or fact of its target -> value."""


class BlockFormat(Format):
    """One folder for both engines."""

    word: str
    """What people call this kind."""
    drafter: type[_BlockDrafter]
    net: type[BlockNet]
    first = 1
    """The slot that says the first draft, as engines have it for this kind: 1 in 1+N, 0 where it is sampled from the anchor."""
    renamed: Mapping[str, str] = {}
    """Tensors that engines call otherwise: ours -> theirs."""
    whole_block = True
    vllm_alone = False
    """Whether it is the folder that SGLang cannot read."""

    # ---- what a kind adds ----------------------------------------------------------------------------------------------

    def options_of(self, net: BlockNet, target: Target) -> Options:
        return {}

    def options_in(self, config: dict[str, Any]) -> Options:
        """The same from config.json. Raises KeyError."""
        return {}

    def words(self, facts: BlockFacts, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of config.json, and of its dflash_config."""
        return {}, {}

    def added(self, facts: BlockFacts, options: Options) -> Table:
        """Its tensors, besides those of the layers."""
        return {}

    def check_options(self, options: Options, target: Target, where: str) -> None:
        """Raises UserError where an option belongs to another target."""

    # ---- both directions -----------------------------------------------------------------------------------------------

    def claims(self, config: dict[str, Any]) -> bool:
        flat = KIND not in config  # that library's form of DFlash 2 has the same architecture
        return flat and super().claims(config) and _needs_vllm(config) == self.vllm_alone

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        reason = _window_refusal(net) if self.vllm_alone else _sglang_refusal(net, target, self.word)
        return reason or refused(net) or head_refusal(target)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        drafts = net.deepest
        slots = "one slot longer than that" if self.first else "as long as that"
        found = [
            f"Ask for {drafts} drafts: an engine makes the block {slots}, and this drafter was trained on blocks of "
            f"{net.config.block}. Fewer drafts are a shorter block, which was neither trained nor measured."
        ]
        if self.vllm_alone and net.config.window is not None:
            found.append(
                "Its layers slide without being causal: serve it with vLLM's FlashAttention backend and V2 model runner, its defaults."
            )
        if self.vllm_alone and not reads_raw(target):
            found.append("The embeddings are in the file as the target's first layer reads them, since vLLM lends the raw table.")
        return found + handing_notes(target, self.engine_names)

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        assert isinstance(net, BlockNet)
        facts = facts_of(net, target)
        options = self.options_of(net, target)
        config = self.config(facts, options, backbone_config(facts, dtype, special_ids(target)))
        config["dflash_config"] |= {"causal": net.causal, "sample_from_anchor": net.first == 0}
        tensors = {self.renamed.get(name, name): x for name, x in tensors_of(net, target, facts).items()}
        return Written(config, tensors, kept=self.kept(facts, options))

    def config(self, facts: BlockFacts, options: Options, backbone: dict[str, Any]) -> dict[str, Any]:
        """config.json from what it says of the layers."""
        top, nested = self.words(facts, options)
        layout = {"sample_from_anchor": self.first == 0}
        return {
            "architectures": [self.architecture],
            **backbone,
            **top,
            "dflash_config": backbone["dflash_config"] | layout | nested,
        }

    def kept(self, facts: BlockFacts, options: Options) -> frozenset[str]:
        """Names of tensors that stay in fp32."""
        return frozenset(name for name, (_, dtype) in self.added(facts, options).items() if dtype == torch.float32)

    def table(self, config: dict[str, Any], where: str) -> Table:
        facts, options = self.understood(config, where)
        return tensor_table(facts) | self.added(facts, options)

    def understood(self, config: dict[str, Any], where: str) -> tuple[BlockFacts, Options]:
        """What an engine would understand from config.json alone.

        Raises UserError if it is another kind of drafter or of layout, asks for something that this reader does not compute, or if two
        fields that say the same thing disagree.
        """
        with reading_of(where, self.word) as wrong:
            require_layout(config, self.first, self.word, where)
            facts, found = read_backbone(config)
            options = self.options_in(config)
            wrong += found + unlike_facts(config, self.config(facts, options, any_dtype(facts)))
        return facts, options

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        return self.build(*self.understood(config, where), tensors, target, recorded, where)

    def build(
        self, facts: BlockFacts, options: Options, tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:  # fmt: skip
        """The net that an engine would build; what is not the drafter's own is compared with the target's."""
        require_target(facts.shape.vocab, facts.shape.hidden, target, where)
        target.check_taps(facts.taps)
        self.check_options(options, target, where)
        theirs = {name: ours for ours, name in self.renamed.items()}
        weights = {theirs.get(name, name): x for name, x in tensors.items()}
        vocabulary = read_map(weights, facts.shape.vocab, where)
        take_tables(weights, target, vocabulary, self.word, where)
        config = self._drafter(facts, options, target, vocabulary.is_full, recorded)
        embedding, head = Frozen(target.model.get_input_embeddings()), TargetHead(target, vocabulary)
        return fill(self.net(config, facts.shape, facts.taps, facts.mask, vocabulary, embedding, head), weights, target)

    def _drafter(
        self, facts: BlockFacts, options: Options, target: Target, full: bool, recorded: DrafterConfig | None
    ) -> _BlockDrafter:
        """The configuration: as recorded, where it was, with what the folder says."""
        plain = self.drafter(draft_vocab=None if full else facts.draft_vocab, mask_token=facts.mask, taps=list(facts.taps))
        own = recorded if isinstance(recorded, self.drafter) else plain
        known = {field.name for field in fields(self.drafter)}
        mine = {name: value for name, value in options.items() if name in known}
        own = replace(own, block=facts.block, layers=facts.layers, window=facts.window, **mine)
        return settled(own, facts.taps, facts.mask, target)

    def about(self, made: dict[str, Any]) -> str:
        block, layers, drafts = made["init_args"]["block"], made["init_args"]["layers"], made["config"]["most_drafts"]
        taps = ", ".join(map(str, made["config"]["taps"]))
        what = f"the last token and {drafts} drafts" if drafts < block else "each a draft, the last token's own slot too"
        return (
            f"{layers} decoder layers fill in a block of {block} slots in one pass: {what}. Each of them "
            f"reads the target's hidden states after layers {taps} (counted from 0)."
        )


def require_layout(config: Mapping[str, Any], first: int, word: str, where: str) -> None:
    """Raises UserError unless config.json says the layout in which slot `first` says the first draft, wherever it says one."""
    places = (config, config.get("dflash_config") or {})
    said = [place["sample_from_anchor"] for place in places if "sample_from_anchor" in place]
    said += [not config["dspark_bonus_anchor"]] if "dspark_bonus_anchor" in config else []
    if first and any(said):
        raise UserError(
            f"{where} says sample_from_anchor true, but {word} is 1+N only, here and in the engines: slot 0 is the anchor and slot k says "
            "the k-th draft. Drafters whose first slot speaks are DSpark's; give one that was trained 1+N."
        )
    if first == 0 and not (said and all(said)):
        raise UserError(
            f"{where} does not say sample_from_anchor true throughout, but {word} samples from the anchor: its first slot says the first "
            "draft. A drafter that was trained 1+N would be read one slot too early and accept nothing; give one whose first slot was trained to speak."
        )


def _needs_vllm(config: dict[str, Any]) -> bool:
    reduced = config.get("draft_vocab_size") != config.get("vocab_size")
    return bool(reduced or config.get("sliding_window") or config.get("has_embed_tokens"))


def _window_refusal(net: DrafterNet) -> str | None:
    """Why vLLM cannot compute this drafter's window."""
    window, block = net.config.window, net.config.block
    if window is None or window >= block:
        return None
    return (
        f"a slot of ours sees all of its block of {block}, and one of vLLM's no further than its window of {window}; train with "
        f"drafter.init_args.window {block} or more, or set export.format to native"
    )


def _sglang_refusal(net: DrafterNet, target: Target, word: str) -> str | None:
    """Why SGLang cannot compute this drafter, where vLLM can."""
    if not net.vocabulary.is_full:
        return (
            f"SGLang's {word} says every token of the target, and this drafter says {len(net.vocabulary.ids):,}; set export.format "
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
    return None
