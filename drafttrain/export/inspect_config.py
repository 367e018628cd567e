"""What can be wrong in a drafter's config.json, looked for field by field: layer ids, RoPE, positions, the block's layout, the masked token.

Several engines and several releases read one file, each its own fields; where two that must say the same do not, one of the readers builds
another net, serves it, and accepts nothing. A fault that was told is mended in the copy at hand, so that what comes behind it (the format's
table of tensors, for one) can still be looked at.

Layer ids: a tap is the output of a layer, counted from 0. Nested lists hold taps; those at the top level and speculators' hold the number
of layers before the state, 1 higher (serving engines differ in which list they read).
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drafttrain.export.block import rope_fault
from drafttrain.export.inspect_files import Folder

PLACES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 0),
    (("dflash_config", "target_layer_ids"), 0),
    (("target_layer_ids",), 0),
    (("dspark_target_layer_ids",), 0),
    (("eagle_aux_hidden_state_layer_ids",), 1),
    (("aux_hidden_state_layer_ids",), 1),
)
"""Where layer ids stand -> by how much they exceed the taps."""
VLLM_TAPS = 3
"""Layers that vLLM takes for EAGLE-3 where `num_aux_hidden_states` is silent."""
PLAIN_BASE = 10000.0
"""RoPE base where config.json names none."""


@dataclass
class Reading:
    """A config.json being read, and what the reader has to say."""

    folder: Folder
    config: dict[str, Any]
    """A copy, mended where a fault was told, and filled in where engines have a default."""
    layers: int | None
    """Layers of the target, where they are known."""
    taps: tuple[int, ...] | None = None
    """0-based layer outputs; None where nothing names them."""

    @staticmethod
    def of(folder: Folder, config: Mapping[str, Any], layers: int | None) -> "Reading":
        return Reading(folder, deepcopy(dict(config)), layers)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.folder.tensors

    @property
    def block(self) -> dict[str, Any]:
        """The fields of the decoder block: speculators keeps them apart."""
        inner = self.config.get("transformer_layer_config")
        return inner if isinstance(inner, dict) else self.config

    def fault(self, sentence: str) -> None:
        self.folder.faults.append(sentence)

    def note(self, sentence: str) -> None:
        self.folder.notes.append(sentence)

    def complain(self, sentence: str) -> None:
        """A fault in what drafttrain wrote; in anybody else's folder it may be an engine's business."""
        (self.fault if self.folder.ours else self.note)(sentence)


# ---- layer ids -------------------------------------------------------------------------------------------------------------


def check_layer_ids(reading: Reading) -> None:
    """Lists that disagree, are out of order or out of the target; mended to one list of taps."""
    said = _said_ids(reading)
    if not said:
        return
    named = {place: [value - more for value in ids] for place, (ids, more) in said.items()}
    if len({tuple(taps) for taps in named.values()}) > 1:
        reading.fault(_disagreement(said, named))
    own = list(((reading.folder.made or {}).get("config") or {}).get("taps") or ())
    taps = own if own in named.values() else next(iter(named.values()))
    if taps != sorted(set(taps)):
        reading.fault(
            f"{next(iter(named))} names the layers {taps}, but engines join their states in the order of the layers, whatever the list says; list "
            "them ascending and once each, as fc.weight reads them."
        )
        taps = sorted(set(taps))
    _check_inside(reading, taps)
    reading.taps = tuple(max(tap, 0) for tap in taps)
    for path, more in PLACES:
        if _get(reading.config, path) is not None:
            _put(reading.config, path, [tap + more for tap in reading.taps])
    _check_number(reading, len(taps))


def _said_ids(reading: Reading) -> dict[str, tuple[list[int], int]]:
    """Place, as a user would spell it -> (ids, by how much they exceed the taps)."""
    found = {}
    for path, more in PLACES:
        ids, name = _get(reading.config, path), ".".join(path)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or any(type(value) is not int for value in ids):
            reading.fault(
                f"{name} is {ids!r}, but must be a list of layer numbers; write the layers that the drafter was trained on."
            )
            continue
        found[name] = ids, more
    return found


def _disagreement(said: Mapping[str, tuple[list[int], int]], named: Mapping[str, list[int]]) -> str:
    each = "; ".join(f"{place} {ids} means layers {named[place]}" for place, (ids, _) in said.items())
    return (
        f"the layer ids disagree, so an engine that reads one list feeds other layers than an engine that reads the other ({each}, counted from 0): "
        "eagle_aux_hidden_state_layer_ids at the top level must be 1 higher than the other lists; set all to the layers that the drafter was trained on."
    )


def _check_inside(reading: Reading, taps: list[int]) -> None:
    """Layers that the target does not have, or does not hand out."""
    n = reading.layers
    if any(tap < 0 for tap in taps):
        reading.complain(
            f"layers are {taps}, counted from 0, so the first would be the embeddings, for which drafttrain has no tap; name outputs of layers."
        )
    if n is None:
        return
    if any(tap >= n for tap in taps):
        reading.fault(
            f"layers are {taps}, but the target has layers 0 to {n - 1}: engines stop, or feed states of something else; name layers that it has."
        )
    elif any(tap == n - 1 for tap in taps):
        reading.complain(
            f"layers are {taps}, the target's last ({n - 1}) among them, which engines hand out differently (before or after the final norm); name "
            f"layers up to {n - 2}."
        )


def _check_number(reading: Reading, count: int) -> None:
    """`num_aux_hidden_states`, which vLLM's EAGLE-3 goes by."""
    said = reading.config.get("num_aux_hidden_states")
    if said is not None and said != count:
        reading.fault(
            f"num_aux_hidden_states is {said}, but {count} layers are named, and vLLM sizes fc.weight by it; set it to {count}."
        )
        reading.config["num_aux_hidden_states"] = count


def check_eagle3_ids(reading: Reading, nested_too: bool) -> None:
    """What engines do for EAGLE-3 where a list is missing. `nested_too`: whether SGLang is to read the folder."""
    if "transformer_layer_config" in reading.config:  # speculators' readers know one list alone
        return
    top = "eagle_aux_hidden_state_layer_ids" in reading.config
    nested = _get(reading.config, ("eagle_config", "eagle_aux_hidden_state_layer_ids")) is not None
    usual = "layers 2, n//2 and n-3 as it counts (1, n//2-1 and n-4 from 0)"
    if not top:
        reading.complain(
            f"there is no eagle_aux_hidden_state_layer_ids at the top level, so vLLM takes {usual}; write the drafter's own there, 1 higher than "
            "counted from 0."
        )
    if nested_too and not nested:
        reading.complain(
            f"there is no eagle_config.eagle_aux_hidden_state_layer_ids, so SGLang takes {usual}; write the drafter's own there."
        )
    if reading.taps and "num_aux_hidden_states" not in reading.config and len(reading.taps) != VLLM_TAPS:
        reading.fault(
            f"num_aux_hidden_states is missing, so vLLM takes {VLLM_TAPS} layers, but {len(reading.taps)} are named; set it to {len(reading.taps)}."
        )


# ---- positions -------------------------------------------------------------------------------------------------------------


def check_rope(reading: Reading) -> None:
    """The two schemas: rope_theta and rope_scaling, which older readers know, and rope_parameters, which transformers 5 knows."""
    block = reading.block
    older = None if block.get("rope_theta") is None else _older_rope(block)
    newer = block.get("rope_parameters") if isinstance(block.get("rope_parameters"), dict) else None
    newer = None if newer is None else {"rope_type": "default"} | newer
    if older is None and newer is None:
        reading.complain(
            f"config.json names no RoPE base (rope_theta, rope_parameters), so readers take {PLAIN_BASE:,.0f}; write the target's, if the drafter was "
            "trained with it."
        )
    elif (older is None or newer is None) and (older or newer) != {"rope_type": "default", "rope_theta": PLAIN_BASE}:
        one, other = ("rope_parameters", "rope_theta") if older is None else ("rope_theta", "rope_parameters")
        reading.complain(
            f"RoPE is said in {one} alone, and a reader that knows {other} only takes {PLAIN_BASE:,.0f}; write both."
        )
    elif older is not None and newer is not None and older != newer:
        reading.fault(
            f"RoPE is {older} in rope_theta and rope_scaling but {newer} in rope_parameters, so one of the readers turns positions wrongly; write in "
            "both what the drafter was trained with."
        )
    rope = newer or older or {"rope_type": "default", "rope_theta": PLAIN_BASE}
    if why := rope_fault(rope):
        reading.complain(f"{why}; write what the drafter was trained with.")
        rope = {"rope_type": "default", "rope_theta": PLAIN_BASE}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    block |= {
        "rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }  # fmt: skip


def _older_rope(block: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(block.get("rope_scaling") or {})
    if "type" in scaling:  # as configs of before 2024 spell it
        scaling = {"rope_type": scaling.pop("type")} | scaling
    return {"rope_type": "default"} | scaling | {"rope_theta": block["rope_theta"]}


def check_positions(reading: Reading) -> None:
    """`max_position_embeddings` sizes the drafter's table of rotations."""
    positions = reading.block.get("max_position_embeddings")
    if type(positions) is int and positions > 0:
        return
    what = "missing" if positions is None else f"{positions!r}"
    reading.fault(
        f"max_position_embeddings is {what}, so engines make their table of rotations for a default number of positions (2,048 for a Llama) and "
        "longer prompts break; write the target's."
    )
    reading.block["max_position_embeddings"] = 2048


# ---- small help ------------------------------------------------------------------------------------------------------------


def _get(config: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = config
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value
