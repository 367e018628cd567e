"""Medusa heads as vLLM up to 0.26 reads them (`method: medusa`; SGLang never did, and vLLM 0.33 no longer does).

    r = c;  r <- r + SiLU(blocks.h.layers.l r), l = 0, 1, ...;   q_h = lm_heads.h r, or lm_head r for all

which is what our heads compute: their first layer adds to c itself, since a Medusa head reads nothing but c.

- Biases are loaded only with `medusa_fc_bias: true`, and ours have them.
- Any key of config.json with "num" and "heads" in it becomes `num_heads`, any with "num" and "layers" `num_hidden_layers`, the last one
  winning: so nothing of the target's configuration is shipped.
- A head shared by all (`original_lm_head`) is a tensor of the file, not the target's: the rows of the target's head that are said.
- A reduced vocabulary would be `truncated_vocab_size` and `token_map` (the target ids). vLLM 0.26 reads them, makes a parameter of the map, and then
  stops, since its count of what was loaded lacks that parameter ("not initialized from checkpoint: {'token_map'}", seen there): such a drafter is
  refused. Folders that have a map are still read here.
- Drafts are the first choices, one for each head; a cap or a scale of the target's logits changes none of them and is left out.

Letters: H width, K heads, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.heads import HeadsNet, Medusa
from drafttrain.errors import UserError
from drafttrain.export.block import head_refusal
from drafttrain.export.format import Engine, Format, Table, Written, dtype_words, fill, require_target, state_of
from drafttrain.export.rows import require_same, said_rows
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary

FIELDS = (
    "hidden_size", "vocab_size", "truncated_vocab_size", "num_heads", "num_hidden_layers", "medusa_fc_bias", "original_lm_head",
)  # fmt: skip


class MedusaFormat(Format):
    """Blocks, and one head or many."""

    name = "medusa"
    title = "Medusa heads"
    method = "medusa"
    architecture = "MedusaModel"
    engines = (Engine("vllm", "up to 0.26: Medusa was removed later", "medusa"),)

    def refusal(self, net: DrafterNet, target: Target) -> str | None:
        if not net.vocabulary.is_full:
            return (
                f"vLLM loads Medusa heads that say all {target.vocab:,} tokens only, since it stops at a token_map, and this drafter says "
                f"{len(net.vocabulary.ids):,}; set export.format to native, or train with drafter.init_args.draft_vocab null"
            )
        return None if net.config.own_heads else head_refusal(target)

    def notes(self, net: DrafterNet, target: Target) -> list[str]:
        return ["vLLM loads Medusa up to 0.26 only, and drafts one chain of first choices with it; no SGLang release does."]

    def write(self, net: DrafterNet, target: Target, dtype: torch.dtype, called: str) -> Written:
        config, vocabulary, H = net.config, net.vocabulary, net.shape.hidden
        fields = {
            "architectures": [self.architecture],
            "model_type": "medusa",
            "hidden_size": H,
            "vocab_size": target.vocab,
            "truncated_vocab_size": len(vocabulary.ids),
            "num_heads": config.heads,
            "num_hidden_layers": config.layers,
            "medusa_fc_bias": True,
            "original_lm_head": not config.own_heads,
            **dtype_words(dtype),
        }
        own = state_of(net)
        tensors = {_theirs(name): weight for name, weight in own.items() if name != "lm_head.weight"}
        if config.own_heads:
            parts = own["lm_head.weight"].split(H, dim=1)
            tensors |= {f"lm_heads.{h}.weight": part.contiguous() for h, part in enumerate(parts)}
        else:
            tensors["lm_head.weight"] = said_rows(target, vocabulary)
        return Written(fields, tensors)

    def table(self, config: dict[str, Any], where: str) -> Table:
        if missing := sorted(set(FIELDS) - config.keys()):
            raise UserError(
                f"{where}/config.json has no {', '.join(missing)}, so this is no Medusa export of ours; export it again."
            )
        if not config["medusa_fc_bias"]:
            raise UserError(
                f"{where}/config.json says medusa_fc_bias false, but our heads have biases; export the drafter again."
            )
        H, V, Vd, K = (config[key] for key in ("hidden_size", "vocab_size", "truncated_vocab_size", "num_heads"))
        shapes: dict[str, tuple[int, ...]] = {}
        for h in range(K):
            for layer in range(config["num_hidden_layers"]):
                shapes |= {f"blocks.{h}.layers.{layer}.weight": (H, H), f"blocks.{h}.layers.{layer}.bias": (H,)}
        shapes |= (
            {"lm_head.weight": (Vd, H)} if config["original_lm_head"] else {f"lm_heads.{h}.weight": (V, H) for h in range(K)}
        )
        table: Table = {name: (shape, None) for name, shape in shapes.items()}
        return table if Vd == V else table | {"token_map": ((Vd,), torch.int64)}

    def read(
        self, config: dict[str, Any], tensors: Mapping[str, Tensor], target: Target, recorded: DrafterConfig | None, where: str
    ) -> DrafterNet:
        V, own_heads = config["vocab_size"], not config["original_lm_head"]
        require_target(V, config["hidden_size"], target, where)
        weights = dict(tensors)
        vocabulary = DraftVocabulary(weights.pop("token_map", torch.arange(V)), V)
        if own_heads:
            weights["lm_head.weight"] = torch.cat(
                [weights.pop(f"lm_heads.{h}.weight") for h in range(config["num_heads"])], dim=1
            )
        else:
            require_same(weights.pop("lm_head.weight"), said_rows(target, vocabulary), "a head", "our Medusa speaks with", where)
        full = Medusa(draft_vocab=None if vocabulary.is_full else len(vocabulary.ids))
        drafter = replace(
            recorded if isinstance(recorded, Medusa) else full,
            heads=config["num_heads"], layers=config["num_hidden_layers"], own_heads=own_heads,
        )  # fmt: skip
        net = drafter.build(target, vocabulary)
        assert isinstance(net, HeadsNet)
        return fill(net, {_ours(name): weight for name, weight in weights.items()}, target)

    def about(self, made: dict[str, Any]) -> str:
        heads = made["config"]["most_drafts"]
        return f"{heads} small heads on the target's final hidden state guess the next {heads} tokens, each without knowing the others."


def _theirs(name: str) -> str:
    return name.replace("heads.", "blocks.", 1)


def _ours(name: str) -> str:
    return name.replace("blocks.", "heads.", 1)
