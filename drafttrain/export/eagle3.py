"""The EAGLE-3 folder as vLLM (0.26.0, 0.33.0) and SGLang (0.5.23) read it, in one: tensor table and config.json, both directions.

Every rule here was read in the engines' source. What they do with a mistake is to serve and accept nothing:

- Layer ids: we tap 0-based layer outputs i. SGLang reads the nested list and adds 1; vLLM reads the top-level list as it is.
  So nested [i...] and top-level [i+1...], ascending, for both engines concatenate in layer order whatever the list says.
- The number of taps: vLLM takes 3 unless `num_aux_hidden_states` says otherwise, so it is always written.
- `d2t` holds offsets: target id = draft id + d2t[draft id]. It is left out where the vocabulary is full.
- A window stands in `layer_types` and `sliding_window`, which vLLM's Llama layer reads, a position counting itself as ours does; SGLang's passes over
  both, so such a drafter is written for vLLM alone.
- EAGLE-3.1: `fc_norm` wants one tensor for each tap, and `norm_output` decides what is fed back; both engines read both.
- No engine has a factored head, so a low-rank one is multiplied out: lm_head = W2 W1.
- SGLang skips tensor names that it does not know, and vLLM does not miss tensors that are missing: so names and shapes are
  compared with this table before anything is written, and again after it is read back.

Letters: H width of the drafter = width of the target, A taps, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, Frozen
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.eagle3 import Eagle3, Eagle3Net
from drafttrain.drafters.head import LowRankHead
from drafttrain.errors import UserError
from drafttrain.export.block import (
    block_config,
    block_table,
    read_block,
    reading_of,
    refused,
    require_rope,
    require_taps,
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
from drafttrain.target.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
EMBEDDING_GAP = 0.01
"""Relative change of a normed embedding from which the export warns: see `embedding_gap`."""


@dataclass(frozen=True)
class Eagle3Facts:
    """All that config.json has to say, in our own words."""

    taps: tuple[int, ...]
    """0-based layer outputs, ascending."""
    shape: DecoderShape
    draft_vocab: int
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        require_taps(self.taps)
        if not 0 < self.draft_vocab <= self.shape.vocab:
            raise UserError(
                f"the draft vocabulary has {self.draft_vocab} tokens, but the target {self.shape.vocab}: it must be between 1 and that."
            )
        require_rope(self.shape)


class Eagle3Format(Format):
    """One folder for both engines."""

    name = "eagle3"
    title = "EAGLE-3 drafter"
    method = "eagle3"
    architecture = ARCHITECTURE
    engines: tuple[Engine, ...] = (Engine("vllm", "0.26 and later", "eagle3"), Engine("sglang", "0.5.23", "EAGLE3"))

    slides = False
    """Whether its layer has a window."""
    sees_all = "SGLang's EAGLE-3 layer"
    """Whose layer has none."""
    lends_raw = True
    """Whether the embeddings are the target's table as it stands, and not in the file."""

    def claims(self, config: dict[str, Any]) -> bool:
        return super().claims(config) and bool(config.get("layer_types")) == self.slides

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        window = net.config.window
        if window is not None and not self.slides:
            return (
                f"{self.sees_all} sees all positions, and this drafter the last {window:,}; set export.format to vllm, or train with "
                "drafter.init_args.window null"
            )
        return refused(net)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        found = []
        if net.config.head_rank is not None:
            found.append(
                f"The head of rank {net.config.head_rank} is written multiplied out, since engines have no factored heads: served, it "
                f"costs as much as a dense one of {len(net.vocabulary.ids):,} tokens."
            )
        return found + (scale_notes(target, net.shape.rms_eps) if self.lends_raw else [])

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        tensors, copied = tensors_of(net)
        return Written(engine_config(facts_of(net), dtype, special_ids(target)), tensors, copied=copied)

    def table(self, config: dict[str, Any], where: str) -> Table:
        return tensor_table(read_engine_config(config, where))

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        return build_eagle3(read_engine_config(config, where), tensors, target, recorded, where)

    def about(self, made: dict[str, Any]) -> str:
        taps = ", ".join(map(str, made["config"]["taps"]))
        return f"One decoder layer reads the target's hidden states after layers {taps} (counted from 0)."


class Eagle3ForVllm(Eagle3Format):
    """What only vLLM can do: a window."""

    name = "eagle3-vllm"
    engines = (Engine("vllm", "0.26 and later", "eagle3"),)
    slides = True

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        unneeded = "this drafter has no window; the form that both engines read is enough"
        return super().refusal(net, target) or (unneeded if net.config.window is None else None)


def facts_of(net: DrafterNet) -> Eagle3Facts:
    config = net.config
    return Eagle3Facts(net.needs.taps, net.shape, len(net.vocabulary.ids), config.fc_norm, config.norm_output, config.window)


def tensors_of(net: DrafterNet) -> tuple[dict[str, Tensor], bool]:
    """The tensors under the engines' names, and whether all are copies of trained ones."""
    tensors = state_of(net) | map_tensors(net.vocabulary)
    if not isinstance(net.lm_head, LowRankHead):
        return tensors, True
    tensors = {name: value for name, value in tensors.items() if not name.startswith("lm_head.")}
    return tensors | {"lm_head.weight": net.lm_head.weight.detach().cpu().float()}, False


def build_eagle3(
    facts: Eagle3Facts, tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
) -> DrafterNet:
    """The net that an engine would build."""
    shape = facts.shape
    require_target(shape.vocab, shape.hidden, target, where)
    target.check_taps(facts.taps)
    weights = dict(tensors)
    vocabulary = read_map(weights, shape.vocab, where)
    full = Eagle3(draft_vocab=None if vocabulary.is_full else facts.draft_vocab)
    drafter = replace(
        recorded if isinstance(recorded, Eagle3) else full,
        taps=list(facts.taps), head_rank=None, fc_norm=facts.fc_norm, norm_output=facts.norm_output,
        window=facts.window,
    )  # fmt: skip
    return fill(Eagle3Net(drafter, shape, facts.taps, vocabulary, Frozen(target.model.get_input_embeddings())), weights, target)


def tensor_table(facts: Eagle3Facts) -> Table:
    """Exactly these tensors are in the file."""
    H, A = facts.shape.hidden, len(facts.taps)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, A * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        **block_table(facts.shape, "midlayer", inputs=2 * H),
        "norm.weight": (H,),
        "lm_head.weight": (facts.draft_vocab, H),
    }
    if facts.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(A)}
    return {name: (shape, None) for name, shape in shapes.items()} | map_table(facts.draft_vocab, facts.shape.vocab)


def engine_config(facts: Eagle3Facts, dtype: torch.dtype, ids: dict[str, Any]) -> dict[str, Any]:
    """config.json as the engines read it. `ids` are the target's bos/eos/pad ids."""
    nested, top = list(facts.taps), [tap + 1 for tap in facts.taps]
    return {
        "architectures": [ARCHITECTURE],
        **block_config(facts.shape, dtype, ids),
        "draft_vocab_size": facts.draft_vocab,
        "num_aux_hidden_states": len(nested),
        "eagle_aux_hidden_state_layer_ids": top,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": nested},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": facts.fc_norm,
        "norm_output": facts.norm_output,
        **({} if facts.window is None else {"layer_types": ["sliding_attention"], "sliding_window": facts.window}),
    }


def read_engine_config(config: dict[str, Any], where: str) -> Eagle3Facts:
    """What an engine would understand from config.json alone.

    Raises UserError if it is another kind of drafter, asks for something that this reader does not compute, or if two fields
    that say the same thing (one for each engine) disagree.
    """
    with reading_of(where, "EAGLE-3") as wrong:
        shape, found = read_block(config)
        wrong += found + unlike(config, {"architectures": [ARCHITECTURE], "norm_before_residual": False, "norm_before_fc": False})
        nested = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        top = config["eagle_aux_hidden_state_layer_ids"]
        if top != [tap + 1 for tap in nested] or config["num_aux_hidden_states"] != len(nested):
            wrong.append(f"layer ids {top} (vLLM) and {nested} (SGLang, one lower) or num_aux_hidden_states disagree")
        facts = Eagle3Facts(
            taps=tuple(nested),
            shape=shape,
            draft_vocab=config["draft_vocab_size"],
            fc_norm=config["fc_norm"],
            norm_output=config["norm_output"],
            window=config["sliding_window"] if config.get("layer_types") else None,
        )
        if config.get("layer_types") not in (None, ["sliding_attention"]):
            wrong.append(f"layer_types is {config['layer_types']}, but ours is one that slides, or is not written")
        if config.get("layer_types") and type(facts.window) is not int:
            wrong.append(
                f"layer_types says that a layer slides, but sliding_window is {facts.window!r} instead of a number of positions"
            )
    return facts


def scale_notes(target: Target, eps: float) -> list[str]:
    """A sentence where engines lend a drafter, whose first norm has this epsilon, embeddings that it was not trained on."""
    gap = embedding_gap(target, eps)
    if gap <= EMBEDDING_GAP:
        return []
    return [
        f"The target scales its embeddings and engines give the drafter the raw ones; its first norm cancels that up to "
        f"{gap:.1%}, so served acceptance may be a little below the measured one."
    ]


@torch.no_grad()
def embedding_gap(target: Target, eps: float) -> float:
    """Largest relative change of a normed embedding if an engine feeds the raw table where the target scales it (Gemma).

    The drafter's first norm cancels a scale s except for its epsilon: sqrt((m + eps/s^2) / (m + eps)), m the row's mean square.
    """
    ids = torch.arange(target.vocab, device=target.device)
    raw = target.embedding_weight.float().pow(2).mean(-1)
    scaled = torch.cat([target.embed(part).float().pow(2).mean(-1) for part in ids.split(4096)])
    used = raw > 0
    ratio = ((scaled + eps) / scaled * raw / (raw + eps))[used].sqrt()
    return float((ratio - 1).abs().max())
