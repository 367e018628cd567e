"""Export a trained drafter as a folder in one of the formats, and read such a folder back.

    folder/  model.safetensors  config.json  drafttrain.json  README.md  plots/ (where something was measured)

The folder is built beside its place, read back from disk as an engine would (from config.json and the tensors alone), and its
logits are compared with the trained net's over several steps of a chain. Only then does it take its place; an earlier export
stays where it was until that moment. What differs between drafters and engines stands in the formats (format.py, registry.py).

Letters: N scored rows, Vd draft vocabulary.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet, public_arguments
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.save import MADE_FILE, check_identity, require_as_exported
from drafttrain.errors import UserError
from drafttrain.export.card import base_model, write_card
from drafttrain.export.card_licence import licence_of
from drafttrain.export.config import DTYPES, ExportConfig
from drafttrain.export.format import Format, Written, check_tensors
from drafttrain.export.hub import name_warning
from drafttrain.export.registry import choose_format, format_of
from drafttrain.export.speculators import KIND
from drafttrain.files import (
    explain_full_disk,
    public_place,
    read_json,
    replace_folder,
    require_space,
    restore_folder,
    sha256_file,
    write_atomic,
    write_json_atomic,
)
from drafttrain.layouts import one_chat
from drafttrain.target.origin import origin_of
from drafttrain.target.target import Target
from drafttrain.types import Features, Identity, Sequences

WEIGHTS = "model.safetensors"
CHECK_TOKENS = 24
"""Length of the fixed text on which exported and trained logits are compared."""
CHECK_DEPTH = 5
"""Most steps of the chain that are compared."""
ROUNDING = 1e-6
"""Largest difference in logits (as a share of the largest one, if that is above 1) between what was read back and what was written."""
ARITHMETIC = 1e-4
"""The same between what was written, before it was rounded, and what was trained, where a format multiplies matrices out: rounding in
fp32, which a chain of steps without norms makes larger."""


def export_drafter(
    net: DrafterNet, target: Target, folder: str | Path, config: ExportConfig, report: dict | None, facts: dict | None = None
) -> dict[str, Any]:
    """Write the folder and return what its drafttrain.json says (`notes` are sentences for the user).

    `report` is validation.json if there is one; `facts` are what is known about the training (strings and numbers). The net is put
    into eval mode.
    Raises UserError: a net that cannot be written as asked, no disk space, or a folder that does not read back as it was written.
    """
    folder, dtype = Path(folder), getattr(torch, config.dtype)
    net.eval()
    _check_shape(net, target)
    format, notes = choose_format(net, target, config.format)
    _check_finite(net)
    identity = public_identity(target.identity)
    origin = origin_of(target.identity)
    called = base_model(asdict(target.identity), config.base_model) or origin.repository
    written = format.write(net, target, dtype, called or identity["path"])
    tensors = written.rounded(dtype)
    check_tensors(tensors, format.table(written.config, "the trained drafter"), dtype, "the trained drafter", format.loaders)
    begun = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(begun, ignore_errors=True)
    restore_folder(folder)
    require_space(folder, sum(t.numel() * t.element_size() for t in tensors.values()) + 1_000_000, "the export")
    with explain_full_disk(folder, "the trained drafter and any earlier export are untouched."):
        begun.mkdir(parents=True)
        write_atomic(begun / WEIGHTS, safetensors.torch.save(tensors, metadata={"format": "pt"}))
        write_json_atomic(begun / "config.json", written.config)
        for name, content in written.files.items():
            write_atomic(begun / name, content)
        check = check_export(begun, net, target, format, written, dtype)
        notes = [*notes, *format.notes(net, target), *_name_notes(config.push, format)]
        if called is None and KIND in written.config and identity["path"] != target.identity.path:
            notes.append(_unnamed(identity["path"]))
        made = _made(net, target, config, begun, format) | {
            "base_model": called,
            **licence_of(config.license, origin, called),
            "check": check,
            "notes": notes,
            "facts": facts or {},
            "measured": None,
        }
        write_json_atomic(begun / MADE_FILE, made)
        write_card(begun, report)
        replace_folder(begun, folder)
    return made


def load_export(folder: str | Path, target: Target) -> DrafterNet:
    """Build the drafter that a serving engine would build: from config.json and the tensors, the rest from the target.

    Where drafttrain.json lies beside them, the net's configuration is the trained one as far as engines do not fix it (training's depth).
    Raises UserError if the folder is damaged, is another kind of drafter, or was made for another target.
    """
    folder = Path(folder)
    restore_folder(folder)
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, so it is no exported drafter; give the folder that `drafttrain export` wrote."
            )
    config, weights = read_json(folder / "config.json", "the export"), folder / WEIGHTS
    format = format_of(config, str(folder))
    recorded = _recorded(folder, target)
    try:
        tensors = safetensors.torch.load_file(weights)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{weights} is damaged ({error}); export the drafter again.") from error
    if config.get("torch_dtype") not in DTYPES:
        raise UserError(
            f"{folder}/config.json says torch_dtype {config.get('torch_dtype')!r}, not one of {', '.join(DTYPES)}; export again."
        )
    check_tensors(tensors, format.table(config, str(folder)), getattr(torch, config["torch_dtype"]), str(weights), format.loaders)
    return format.read(config, tensors, target, recorded, str(folder))


@torch.no_grad()
def check_export(
    folder: Path, net: DrafterNet, target: Target, format: Format, written: Written, dtype: torch.dtype
) -> dict[str, float | None]:
    """Compare the folder, read from disk, with the trained net on a fixed text.

    `against_cast`: largest difference in logits to what was written, rounded to `dtype` in memory (must be none);
    `against_trained`: to the trained net itself, so what the rounding costs; None where a selector chooses among candidates, for a logit
    jumps where rounding makes another token a candidate;
    `same_first_choice`: share of the `rows` in which both say the same token.
    Raises UserError if the folder reads back as another net, or if what was written is another net before any rounding.
    """
    sequences, features = _fixed_input(net, target)
    config = json.loads(json.dumps(written.config))
    trained, chosen = _chain_logits(net, sequences, features)
    got, meant, cast = (
        _chain_logits(each, sequences, features)[0]
        for each in (
            load_export(folder, target),
            format.read(config, written.tensors, target, net.config, str(folder)),
            format.read(config, written.rounded(dtype), target, net.config, str(folder)),
        )
    )
    words = len(net.vocabulary.ids)
    largest, against_cast = float(trained.abs().max()), float((got - cast).abs().max())
    # The head of a target in half precision rounds otherwise where the state before it differs in the last bit.
    exact = ROUNDING if written.copied else max(ARITHMETIC, torch.finfo(target.dtype).eps)
    for gap, allowed in ((against_cast, ROUNDING), (float((meant - trained).abs().max()), exact)):
        if not gap <= allowed * max(1.0, largest):
            raise UserError(
                f"the exported folder does not read back as the trained drafter: logits differ by {gap:.2e} where the "
                f"largest is {largest:.2e}. Nothing was put in place; this is a fault of drafttrain, please report it."
            )
    return {
        "against_cast": against_cast, "against_trained": None if chosen else float((got - trained).abs().max()), "largest_logit": largest,
        "same_first_choice": float((got[:, :words].argmax(-1) == trained[:, :words].argmax(-1)).float().mean()), "rows": len(got),
    }  # fmt: skip


def _check_shape(net: DrafterNet, target: Target) -> None:
    shape = net.shape
    if (shape.target_hidden, shape.hidden, shape.max_positions, shape.vocab) != (
        target.hidden, target.hidden, target.max_positions, target.vocab,
    ):  # fmt: skip
        raise UserError(
            f"the drafter has width {shape.hidden}, {shape.max_positions} positions and {shape.vocab} tokens, but its target "
            f"{target.hidden}, {target.max_positions} and {target.vocab}; engines need them equal, so train it for this target."
        )


def _check_finite(net: DrafterNet) -> None:
    bad = [name for name, weight in net.state_dict().items() if weight.is_floating_point() and not torch.isfinite(weight).all()]
    if bad:
        raise UserError(
            f"the trained drafter holds numbers that are not finite (in {', '.join(bad)}), so it is not exported; "
            "export an earlier checkpoint."
        )


def public_identity(identity: Identity) -> dict[str, Any]:
    """The identity as an export holds it: what is compared stands whole, and of the place, which is for people, nothing that is the machine's own."""
    return asdict(identity) | {"path": public_place(identity.path)}


def _unnamed(called: str) -> str:
    """What a target without a Hub id means to readers who look for it by name."""
    return (
        f"config.json calls the target {called}, the last part of its path here, since an export names no place of this machine: the speculators library "
        "does not find it so. Set export.base_model to its Hub id, or write its folder into speculators_config.verifier.name_or_path where it is loaded."
    )


def _name_notes(repository: str | None, format: Format) -> list[str]:
    """What vLLM would make of the repository's name."""
    methods = [engine.method for engine in format.engines if engine.name == "vllm"]
    warning = name_warning(repository, methods[0]) if repository and methods else None
    return [warning] if warning else []


def _made(net: DrafterNet, target: Target, config: ExportConfig, folder: Path, format: Format) -> dict[str, Any]:
    weights = folder / WEIGHTS
    return {
        "format": format.name,
        "method": format.method,
        "identity": public_identity(target.identity),
        "repository": config.push,
        "class_path": type(net.config).__name__,
        "init_args": public_arguments(net.config),
        "config": {
            "taps": list(net.needs.taps),
            "vocab": target.vocab,
            "draft_vocab": len(net.vocabulary.ids),
            "most_drafts": net.deepest,
        },
        "dtype": config.dtype,
        "weights": {"file": WEIGHTS, "bytes": weights.stat().st_size, "sha256": sha256_file(weights)},
    }


def _recorded(folder: Path, target: Target) -> DrafterConfig | None:
    """The trained drafter's configuration by drafttrain.json, which is compared with the target at hand and with the file of weights.
    A drafter from elsewhere has none."""
    if not (folder / MADE_FILE).exists():
        return None
    made = read_json(folder / MADE_FILE, "the export")
    check_identity(made["identity"], target, str(folder))
    require_as_exported(folder, made)
    classes, name = known_drafters(), made["class_path"]
    if name not in classes:
        raise UserError(f"{folder} holds a {name}, which this version does not know ({', '.join(classes)}); update drafttrain.")
    return classes[name](**made["init_args"])


def _fixed_input(net: DrafterNet, target: Target) -> tuple[Sequences, Features]:
    """A text of tokens that the drafter can say, and what the target computes while reading it."""
    ids = net.vocabulary.ids.cpu()
    pick = torch.randint(len(ids), (CHECK_TOKENS,), generator=torch.Generator().manual_seed(0))
    sequences = one_chat(ids[pick], prompt_len=0)
    return sequences, target.read_packed(sequences.to(target.device), net.needs.taps)


def _chain_logits(net: DrafterNet, sequences: Sequences, features: Features) -> tuple[Tensor, bool]:
    """[N, Vd] in fp32, elements in the layout's order: every anchor, every depth. Where the drafter tells how sure it is, that is a last column.
    And whether a selector chose among candidates."""
    device = features.final_BTD.device
    layout = net.layout(sequences, min(CHECK_DEPTH, net.deepest or CHECK_DEPTH)).to(device)
    drafted = net.rows(sequences.to(device), features, layout)
    logits_NV = net.logits(drafted.hidden_NH, drafted.prev_N).float()
    sure_N = net.confidence(drafted.hidden_NH, drafted.prev_N)
    told_NX = logits_NV if sure_N is None else torch.cat([logits_NV, sure_N[:, None].float()], dim=1)
    return told_NX, drafted.selector is not None
