"""What a folder with a drafter is, for which target and engines, and every fault that can be known from the folder alone.

    files (inspect_files.py) -> which drafter (inspect_kind.py) -> config.json (inspect_config.py) -> tensors by a table (inspect_table.py,
    inspect_tensors.py) -> what our own record says, and the target's config (inspect_target.py)

No weights of a target are needed, so what only the target can judge (halves of fc the other way round, another RoPE base in both schemas) is
not seen here: that is what `drafttrain validate` and `drafttrain compare` measure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from drafttrain.drafters.published import Published
from drafttrain.drafters.save import MADE_FILE, WEIGHTS, altered
from drafttrain.drafters.source import MAPS
from drafttrain.errors import UserError, printable
from drafttrain.export.block_format import BlockFormat
from drafttrain.export.format import NAMES, Engine
from drafttrain.export.inspect_config import Reading, check_eagle3_ids, check_layer_ids, check_positions, check_rope
from drafttrain.export.inspect_files import AGAIN, Folder, read_folder
from drafttrain.export.inspect_kind import Kind, identify
from drafttrain.export.inspect_table import check_block, format_table, head_rows, net_table, sizes_of
from drafttrain.export.inspect_target import TargetSizes, check_target, named_target
from drafttrain.export.inspect_tensors import check_map, check_numbers, check_table, count_by_dtype
from drafttrain.files import human_bytes, sha256_file

T = TypeVar("T")
P_EAGLE_WORDS = ("pard_token", "ptd_token_id", "max_drafts")
"""What only a drafter with masked elements says."""


@dataclass(frozen=True)
class Inspection:
    """What there is to print."""

    lines: list[tuple[str, str]]
    """(what, words)"""
    notes: list[str]
    faults: list[str]
    config: dict[str, Any]
    """As it was understood: mended where a fault was told."""
    folder: Folder


def require_sound(faults: Sequence[str]) -> None:
    """UserError with a line for each fault: how a command that looks at folders ends, behind everything that is to be printed."""
    if faults:
        raise UserError("\n".join(faults))


def inspect_folder(where: str, target: TargetSizes | None = None) -> Inspection:
    """Look at a local folder or a Hub id. Raises UserError where there is none."""
    folder = read_folder(where)
    reading = Reading.of(folder, folder.config or {}, target.layers if target else _known_layers(folder))
    known = folder.config is not None or folder.record is not None
    kind = _as_far_as_it_goes(folder, lambda: _looked_at(reading)) if known else None
    _as_far_as_it_goes(folder, lambda: check_numbers(reading))
    if folder.made is not None:
        _as_far_as_it_goes(folder, lambda: _check_made(reading, kind))
    if target is not None:
        _as_far_as_it_goes(folder, lambda: check_target(reading, target, _attends(reading)))
    lines = _as_far_as_it_goes(folder, lambda: _lines(reading, kind, target)) or [
        ("what", "not known, for what it says of itself cannot be read")
    ]
    folder.notes, folder.faults = ([printable(words) for words in told] for told in (folder.notes, folder.faults))
    return Inspection([(what, printable(words)) for what, words in lines], folder.notes, folder.faults, reading.config, folder)


def _as_far_as_it_goes(folder: Folder, look: Callable[[], T]) -> T | None:
    """What a look finds; None, and a fault, where the folder holds something that no reader of it expects. Its files are anybody's, and the libraries
    that build nets and configurations from them raise whatever they like."""
    try:
        return look()
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        sentence = (
            f"what the folder says of itself does not fit together ({told}), so no engine could build the drafter; {AGAIN}."
        )
        if sentence not in folder.faults:
            folder.faults.append(sentence)
        return None


def _known_layers(folder: Folder) -> int | None:
    identity = (folder.made or folder.record or {}).get("identity") or {}
    found = identity.get("layers", (folder.config or {}).get("num_target_layers"))
    return found if type(found) is int else None


# ---- one kind after another ------------------------------------------------------------------------------------------------


def _looked_at(reading: Reading) -> Kind | None:
    if reading.folder.record is not None:
        return _checkpoint(reading, reading.folder.record)
    kind = identify(reading)
    if kind is None or kind.drafter is None:
        return kind
    if kind.format is not None and kind.format.name == "native":
        _check_native(reading, kind)
        return kind
    check_layer_ids(reading)
    if _attends(reading) and kind.engines:
        check_rope(reading)
        check_positions(reading)
    methods = {format.method for format in kind.formats}
    if "eagle3" in methods:
        check_eagle3_ids(reading, nested_too=any(engine.name == "sglang" for engine in kind.engines))
    if block := next((format for format in kind.formats if isinstance(format, BlockFormat)), None):
        check_block(reading, block)
    if kind.published is not None:
        _check_published(reading, kind.published)
    elif kind.format is not None and (table := format_table(reading, kind.format)) is not None:
        check_table(reading, reading.tensors, table, _said_dtype(reading))
        _check_format_map(reading, kind)
    return kind


def _attends(reading: Reading) -> bool:
    """Whether positions mean something to it."""
    return any(".self_attn." in name for name in reading.tensors)


def _check_native(reading: Reading, kind: Kind) -> None:
    reading.taps = tuple(((reading.folder.made or {}).get("config") or {}).get("taps") or ()) or None
    if kind.format is not None and (table := format_table(reading, kind.format)) is not None:
        check_table(reading, reading.tensors, table, _said_dtype(reading))
        check_map(reading, reading.config["draft_vocab_size"], reading.config["vocab_size"])


def _check_format_map(reading: Reading, kind: Kind) -> None:
    config, vocab = reading.config, reading.block.get("vocab_size")
    rows = config.get("draft_vocab_size", config.get("truncated_vocab_size", config.get("hot_vocab_size")))
    if kind.drafter == "Eagle" and rows is None and "d2t" in reading.tensors:
        rows = len(reading.tensors["d2t"])
    check_map(reading, rows, vocab)


def _check_published(reading: Reading, found: Published) -> None:
    """Somebody else's layout, by our net."""
    for note in found.notes:
        reading.note(f"{note}.")
    if any(word in reading.config for word in P_EAGLE_WORDS) and "mask_hidden" not in reading.tensors and reading.folder.whole:
        reading.fault(
            "mask_hidden is missing, which stands for the states of masked elements, so all drafts but the first are at random; take it from the drafter "
            "as it was trained."
        )
    for refusal in found.refusals:
        reading.note(f"drafttrain cannot go on training it: {refusal}.")
    options = dict(found.options)
    if "taps" in options:
        options["taps"] = list(reading.taps or range(_fc_layers(reading)))
    rows = head_rows(found)
    made = net_table(reading, found, options, rows)
    if made is not None and not found.refusals:
        check_table(reading, found.tensors, made[0], None, optional=made[1])
    vocab = sizes_of(reading)["vocab_size"]
    said = reading.config.get("draft_vocab_size")
    if type(said) is int and rows is not None and said != rows:
        reading.fault(
            f"draft_vocab_size is {said:,}, but the head has {rows:,} rows, and engines size it by the first; set it to {rows}."
        )
    check_map(reading, rows, vocab)


def _fc_layers(reading: Reading) -> int:
    fc, hidden = reading.tensors.get("fc.weight"), sizes_of(reading)["hidden_size"]
    return max(1, fc.shape[1] // hidden) if fc is not None and fc.dim() == 2 else 3


def _checkpoint(reading: Reading, record: Mapping[str, Any]) -> Kind | None:
    """A folder that training wrote: checkpoints/best, checkpoints/last_drafter."""
    said = {key for key, value in record.items() if value is not None}
    if missing := sorted({"class_path", "init_args", "identity", "facts"} - said):
        reading.fault(
            f"drafter.json has no {', '.join(missing)}, so it is damaged; train again from checkpoints/last, or restore it."
        )
        return None
    if reading.folder.whole and (reading.folder.path / WEIGHTS).is_file() and altered(reading.folder.path, record):
        reading.fault(
            f"{WEIGHTS} is not the file that was saved (its sha256 is not the one in drafter.json); restore it, or train again from checkpoints/last."
        )
    name, options = record["class_path"], record["init_args"]
    found = Published("a drafter as drafttrain's training saves it", name, {}, reading.tensors)
    d2t = reading.tensors.get("d2t")
    if d2t is None and reading.folder.whole:
        reading.fault("d2t is missing, which says what the drafter's tokens are; train again, or restore drafter.safetensors.")
    words = head_rows(found) if d2t is None or d2t.dim() != 1 else len(d2t)
    if (made := net_table(reading, found, options, words)) is not None:
        check_table(reading, reading.tensors, made[0], torch.float32)
    if d2t is not None:
        check_map(reading, words, record["identity"].get("vocab"), always=True)
    return Kind(name, found.layout, published=found)


def _said_dtype(reading: Reading) -> torch.dtype | None:
    """The type that config.json names; a fault where the two fields differ or name none."""
    said = {reading.config[key] for key in ("torch_dtype", "dtype") if isinstance(reading.config.get(key), str)}
    if len(said) > 1:
        reading.complain(
            f"dtype and torch_dtype name different types ({', '.join(sorted(said))}); set both to that of the tensors."
        )
    found = getattr(torch, min(said), None) if said else None
    if not isinstance(found, torch.dtype):
        reading.complain(
            f"config.json names no type of its weights that torch knows ({', '.join(said) or 'no torch_dtype'}); write it."
        )
        return None
    return found


# ---- our own record --------------------------------------------------------------------------------------------------------


def _check_made(reading: Reading, kind: Kind | None) -> None:
    """drafttrain.json against what lies beside it."""
    made, config = reading.folder.made or {}, reading.config
    weights, told = made.get("weights") or {}, made.get("config") or {}
    file = reading.folder.path / str(weights.get("file"))
    if reading.folder.whole and file.is_file() and sha256_file(file) != weights.get("sha256"):
        reading.fault(
            f"{file.name} is not the file that was exported (its sha256 is not the one in {MADE_FILE}); download or export the drafter again."
        )
    if kind is not None and kind.drafter is not None and kind.drafter != made.get("class_path"):
        reading.fault(
            f"{MADE_FILE} says {made.get('class_path')}, but the files hold a {kind.drafter}; export the drafter again."
        )
    taps = told.get("taps")
    if taps and reading.taps and list(reading.taps) != list(taps):
        reading.fault(
            f"config.json names layers {list(reading.taps)}, counted from 0, but {MADE_FILE} says that the drafter was trained on {list(taps)}; export "
            "the drafter again."
        )
    for what, said in (("vocab_size", told.get("vocab")), ("draft_vocab_size", told.get("draft_vocab"))):
        got = config.get(what, reading.block.get(what))
        if type(got) is int and type(said) is int and got != said:
            reading.fault(f"{what} is {got:,} in config.json, but {said:,} in {MADE_FILE}; export the drafter again.")


# ---- what is printed -------------------------------------------------------------------------------------------------------


def _lines(reading: Reading, kind: Kind | None, target: TargetSizes | None) -> list[tuple[str, str]]:
    folder = reading.folder
    lines = [("what", f"{kind.layout}{f' ({kind.drafter})' if kind.drafter else ''}" if kind else "not recognised")]
    if folder.tensors:
        lines.append(("tensors", _tensors(reading)))
    if kind is not None:
        if reading.taps:
            ids = ", ".join(str(tap + 1) for tap in reading.taps)
            lines.append(("layers read", f"{', '.join(map(str, reading.taps))} counted from 0 (as vLLM counts: {ids})"))
        lines.append(("says", _says(reading, kind)))
        lines += [("block", _block(reading, format)) for format in kind.formats[:1] if isinstance(format, BlockFormat)]
        lines.append(("target", _target(reading)))
        lines += [] if target is None else [("--target", _asked(target))]
        lines += [("" if number else "loaded by", words) for number, words in enumerate(_loaders(reading, kind))]
    return lines


def _tensors(reading: Reading) -> str:
    tensors = reading.tensors
    size = sum(x.numel() * x.element_size() for x in tensors.values())
    types = ", ".join(f"{count:,} numbers in {name}" for name, count in count_by_dtype(tensors).items())
    layers = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    depth = f" of {len(layers)} decoder layer{'s' if len(layers) > 1 else ''}" if layers else ""
    return f"{len(tensors)}{depth}, {types}, {human_bytes(size)}"


def _says(reading: Reading, kind: Kind) -> str:
    """Which tokens."""
    vocab = sizes_of(reading)["vocab_size"]
    rows = next((len(reading.tensors[name]) for name in MAPS if name != "t2d" and name in reading.tensors), vocab)
    return f"all {vocab:,} tokens of the target" if rows == vocab else f"{rows:,} of the target's {vocab:,} tokens"


def _block(reading: Reading, format: BlockFormat) -> str:
    options = (reading.folder.record or {}).get("init_args") or {}
    nested = _nested(reading.config)
    slots = nested.get("block_size", reading.config.get("block_size", options.get("block")))
    mask = nested.get("mask_token_id", reading.config.get("mask_token_id", options.get("mask_token")))
    layout = "1+N (slot 0 is the anchor)" if format.first else "sampled from the anchor (slot 0 says the first draft)"
    return f"{slots} slots, {layout}; masked token {'chosen for the target' if mask is None else mask}"


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("dflash_config")
    return found if isinstance(found, Mapping) else {}


def _target(reading: Reading) -> str:
    sizes, block = sizes_of(reading), reading.block
    named = named_target(reading) or "not named"
    parts = [f"width {block.get('target_hidden_size') or sizes['hidden_size']:,}", f"{sizes['vocab_size']:,} tokens"]
    layers = _known_layers(reading.folder)  # of `reading` they are those of --target, where that is given
    parts += [f"{layers} layers"] if layers else []
    if "rope_theta" in block and "max_position_embeddings" in block:
        parts.append(f"{block['max_position_embeddings']:,} positions, RoPE base {block['rope_theta']:,.0f}")
    return f"{named}: {', '.join(parts)}"


def _asked(target: TargetSizes) -> str:
    """The target that it is held against, which may be another one than its own."""
    return f"{target.path}: width {target.hidden:,}, {target.vocab:,} tokens, {target.layers} layers, {target.max_positions:,} positions"


def most_drafts(reading: Reading, kind: Kind) -> int | None:
    """Tokens that it drafts in a round by its making; None where any number does."""
    config = reading.config
    if (
        block := next((format for format in kind.formats if isinstance(format, BlockFormat)), None)
    ) and reading.folder.record is None:
        slots = _nested(config).get("block_size", config.get("block_size"))
        return slots - block.first if type(slots) is int else None
    found = ((reading.folder.made or {}).get("config") or {}).get("most_drafts")
    if found is None and kind.published is not None:
        found = kind.published.options.get("heads")
    if found is None and kind.published is not None and reading.folder.record is not None:
        found = reading.folder.record["init_args"].get("heads")
    return found if found is not None else config.get("max_drafts", config.get("num_heads"))


def _loaders(reading: Reading, kind: Kind) -> list[str]:
    drafts = most_drafts(reading, kind)
    found = [_loader(engine, kind, drafts) for engine in kind.engines]
    if kind.drafter is None:
        return found
    if reading.folder.record is not None:
        return ["drafttrain alone: validate, bench, generate, adapt (--draft); `drafttrain export` writes what engines load"]
    if reading.folder.ours:
        return [*found, "drafttrain: validate, bench, generate, adapt (--draft)"]
    if kind.published is not None and not kind.published.refusals:
        own = "drafttrain: validate, bench, generate (--draft); training goes on from it (checkpoint.start)"
        return [*found, own if found else f"{own}; no serving engine"]
    return found or ["no engine that is known here"]


def _loader(engine: Engine, kind: Kind, drafts: int | None) -> str:
    name = NAMES.get(engine.name, engine.name)
    number = "as many drafts as measured best" if drafts is None else f"{drafts} drafts"
    if engine.name == "vllm":
        more = next((format.extra_words("vllm") for format in kind.formats), {})
        extra = "".join(f", {key} {str(value).lower()}" for key, value in more.items())
        return f"{name} ({engine.versions}): method {engine.method}, num_speculative_tokens {'N' if drafts is None else drafts}{extra}"
    if engine.name == "sglang":
        return f"{name} ({engine.versions}): --speculative-algorithm {engine.method}, {number}"
    return f"{name} ({engine.versions}): {engine.method}, {number}"
