"""DFlash 2 as vLLM (0.33.0; 0.26.0 has none) and SGLang (0.5.23) read it: DFlash with convolutions and a candidate selector.

- `dflash_config` holds the sizes: kernels of two taps, groups of channels, rank and candidates. Codebooks have a row for every token of the
  target, for candidates are its ids: no engine knows a reduced vocabulary here.
- Convolutions count slots from the number of drafts that was asked for, and one: another number than the trained one shifts no slot, but is
  another block.
- The selector adds to the logits of the candidates: what the target's head does to them behind its matrix is said in `output_multiplier` and
  `final_logit_softcapping`, in this order.

Letters: H width, r rank, V target vocabulary, Y groups of channels.
"""

from typing import Any

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.block import BlockNet
from drafttrain.drafters.dflash2 import TAPS, DFlash2, DFlash2Net
from drafttrain.errors import UserError
from drafttrain.export.backbone import BlockFacts
from drafttrain.export.block_format import BlockFormat, Options
from drafttrain.export.format import Engine, Table
from drafttrain.target.target import Target

CODEBOOKS = ("predecessor_codebook", "successor_codebook")


class DFlash2Format(BlockFormat):
    """One folder for both engines."""

    name = "dflash2"
    title = "DFlash 2 drafter"
    word = "DFlash 2"
    method = "dflash"
    architecture = "DFlash2DraftModel"
    engines: tuple[Engine, ...] = (Engine("vllm", "0.33", "dflash"), Engine("sglang", "0.5.23", "DFLASH"))
    drafter, net = DFlash2, DFlash2Net
    renamed = {f"candidate_selector.{name}.weight": f"candidate_selector.{name}" for name in CODEBOOKS}

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if not net.vocabulary.is_full:
            return (
                f"engines choose a DFlash 2's candidates among all tokens of the target, and this drafter says {len(net.vocabulary.ids):,}; set "
                "export.format to native, or train with drafter.init_args.draft_vocab null"
            )
        return super().refusal(net, target)

    def options_of(self, net: BlockNet, target: Target) -> Options:
        assert isinstance(net, DFlash2Net)
        config = net.config
        return {
            "rank": config.rank, "candidates": config.candidates, "group": config.group,
            "multiplier": target.logit_factor, "cap": target.logit_cap,
        }  # fmt: skip

    def options_in(self, config: dict[str, Any]) -> Options:
        nested = config["dflash_config"]
        return {
            "rank": nested["selector_rank"],
            "candidates": nested["selector_top_k"],
            "group": nested["conv_group_size"],
            "multiplier": nested["output_multiplier"],
            "cap": nested["final_logit_softcapping"],
        }

    def words(self, facts: BlockFacts, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
        nested = {
            "block_size": facts.block,
            "conv_kernel_size": TAPS,
            "conv_group_size": options["group"],
            "selector_rank": options["rank"],
            "selector_top_k": options["candidates"],
            "output_multiplier": options["multiplier"],
            "final_logit_softcapping": options["cap"],
        }
        return {}, nested

    def check_options(self, options: Options, target: Target, where: str) -> None:
        own = target.logit_factor, target.logit_cap
        if (options["multiplier"], options["cap"]) != own:
            raise UserError(
                f"{where} drafts for a target that multiplies its logits by {options['multiplier']} and caps them at {options['cap']}, but "
                f"{target.identity.path} has {own}; use the target that it was trained for."
            )

    def added(self, facts: BlockFacts, options: Options) -> Table:
        H, V, r, Y = facts.shape.hidden, facts.shape.vocab, options["rank"], facts.shape.hidden // options["group"]
        table: Table = {f"candidate_selector.{name}": ((V, r), None) for name in CODEBOOKS}
        table["candidate_selector.hidden_projection.weight"] = ((r, H), None)
        for i in range(facts.layers):
            for conv in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                table[f"{conv}.base_kernel"] = ((2, TAPS, H), None)
                table[f"{conv}.kernel_projection.weight"] = ((2 * TAPS * Y, H), None)
        return table

    def about(self, made: dict[str, Any]) -> str:
        return (
            f"{super().about(made)} Convolutions over the slots stand around each of its sublayers, and a selector walks through the "
            f"{made['init_args']['candidates']} likeliest tokens of each slot."
        )


class DFlash2ForVllm(DFlash2Format):
    """What only vLLM can do: a window, embeddings that the target changes."""

    name = "dflash2-vllm"
    engines = (Engine("vllm", "0.33", "dflash"),)
    vllm_alone = True
