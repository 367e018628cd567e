"""A drafter against the target that it is to draft for, of which config.json alone is read: widths, vocabulary, layers, RoPE, positions."""

from dataclasses import dataclass
from typing import Any

from drafttrain.drafters.decoder import plain_rope
from drafttrain.errors import UserError
from drafttrain.export.inspect_config import Reading
from drafttrain.target.hub import only_cached
from drafttrain.target.load import locate
from drafttrain.target.refusals import reason


@dataclass(frozen=True)
class TargetSizes:
    """What a target's config.json tells."""

    path: str
    layers: int
    hidden: int
    vocab: int
    max_positions: int
    rope: dict[str, Any]
    architectures: tuple[str, ...]


def read_target(path: str) -> TargetSizes:
    """By a Hub id, a folder or a .gguf file. Raises UserError where its config cannot be had."""
    from transformers import AutoConfig

    try:
        where, gguf = locate(path)
    except UserError as error:
        raise UserError(str(error).replace("target.path is", "--target is", 1)) from error
    extra: dict[str, Any] = {"local_files_only": only_cached(where, None)} | ({} if gguf is None else {"gguf_file": gguf})
    try:
        config = AutoConfig.from_pretrained(where, **extra)
    except Exception as error:  # transformers raises a dozen kinds here; every one means that the config cannot be had
        raise UserError(f"--target {path} could not be read: {reason(error)}") from error
    text = config.get_text_config()
    return TargetSizes(
        path=path, layers=text.num_hidden_layers, hidden=text.hidden_size, vocab=text.vocab_size,
        max_positions=text.max_position_embeddings, rope={"rope_type": "default"} | plain_rope(text),
        architectures=tuple(config.architectures or ()),
    )  # fmt: skip


def check_target(reading: Reading, target: TargetSizes, has_block: bool) -> None:
    """Faults for each size that is not the target's. `has_block`: whether it attends, so that positions mean something."""
    block, config, what = reading.block, reading.config, target.path
    sizes = (
        ("width", block.get("target_hidden_size") or config.get("target_hidden_size") or block.get("hidden_size"), target.hidden),
        ("vocabulary", block.get("vocab_size"), target.vocab),
        ("number of layers (num_target_layers)", config.get("num_target_layers"), target.layers),
    )
    for name, got, wanted in sizes:
        if type(got) is int and got != wanted:
            reading.fault(f"the drafter is made for a target whose {name} is {got:,}, but that of {what} is {wanted:,}; use the target that it was "
                          "trained for.")  # fmt: skip
    if has_block:
        _check_positions(reading, target)


def _check_positions(reading: Reading, target: TargetSizes) -> None:
    positions, rope = reading.block.get("max_position_embeddings"), reading.block.get("rope_parameters")
    if type(positions) is int and positions < target.max_positions:
        reading.fault(
            f"max_position_embeddings is {positions:,}, but {target.path} has {target.max_positions:,}, and a drafter accepts nothing behind its own end "
            "or stops the engine; write the target's, if the drafter was trained so."
        )
    if isinstance(rope, dict) and rope != target.rope:
        reading.complain(
            f"RoPE is {rope}, but {target.path} has {target.rope}: right only if the drafter was trained with its own; write what it was trained with."
        )


def named_target(reading: Reading) -> str | None:
    """Whom the folder says it is for."""
    folder = reading.folder
    identity = (folder.made or folder.record or {}).get("identity") or {}
    verifier = (reading.config.get("speculators_config") or {}).get("verifier") or {}
    path = (folder.made or {}).get("base_model") or identity.get("path") or verifier.get("name_or_path")
    path = path or reading.config.get("base_model_name_or_path")
    if path is None:
        return None
    revision = identity.get("revision")
    return f"{path}, revision {revision}" if revision else str(path)
