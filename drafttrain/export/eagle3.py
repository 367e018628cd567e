"""Export an EAGLE-3 drafter as the folder that vLLM and SGLang load, and read such a folder back.

    folder/  model.safetensors  config.json  drafttrain.json  README.md

The folder is built beside its place, read back from disk as an engine would (from config.json and the tensors alone), and its
logits are compared with the trained net's over several steps of a chain. Only then does it take its place; an earlier export
stays where it was until that moment. What the tensors are called and config.json says is in eagle3_format.py.
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

from drafttrain.drafters.base import DrafterNet, Frozen
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.eagle3 import Eagle3, Eagle3Net
from drafttrain.drafters.save import check_identity
from drafttrain.errors import UserError
from drafttrain.export.card import MADE_FILE, base_model, write_card
from drafttrain.export.config import ExportConfig
from drafttrain.export.eagle3_format import Eagle3Facts, check_tensors, engine_config, read_engine_config
from drafttrain.export.hub import name_warning
from drafttrain.files import (
    explain_full_disk,
    read_json,
    replace_folder,
    require_space,
    restore_folder,
    sha256_file,
    write_atomic,
    write_json_atomic,
)
from drafttrain.layouts import one_chat
from drafttrain.target.target import Target
from drafttrain.types import Features, Sequences
from drafttrain.vocab import DraftVocabulary

WEIGHTS = "model.safetensors"
CHECK_TOKENS = 24
"""Length of the fixed text on which exported and trained logits are compared."""
CHECK_DEPTH = 5
"""Steps of the chain that are compared."""
TOLERANCE = 1e-6
"""Largest difference in logits (as a share of the largest one, if that is above 1) between what was read back and meant."""
EMBEDDING_GAP = 0.01
"""Relative change of a normed embedding from which the export warns: see `embedding_gap`."""


def export_eagle3(
    net: DrafterNet, target: Target, folder: str | Path, config: ExportConfig, report: dict | None, facts: dict | None = None
) -> dict[str, Any]:
    """Write the folder and return what its drafttrain.json says (`notes` are sentences for the user).

    `report` is validation.json if there is one; `facts` are what is known about the training (strings and numbers).
    Raises UserError: a net that engines cannot load, no disk space, or a folder that does not read back as it was written.
    """
    folder = Path(folder)
    if not isinstance(net, Eagle3Net):
        raise UserError(f"a {type(net).__name__} cannot be exported as EAGLE-3; only a drafter of class Eagle3 can.")
    dtype = getattr(torch, config.dtype)
    engine_facts = _facts_of(net, target)
    tensors = _tensors_of(net, dtype)
    check_tensors(tensors, engine_facts, dtype, "the trained drafter")
    _check_finite(tensors)
    begun = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(begun, ignore_errors=True)
    restore_folder(folder)
    require_space(folder, sum(t.numel() * t.element_size() for t in tensors.values()) + 1_000_000, "the export")
    with explain_full_disk(folder, "the trained drafter and any earlier export are untouched."):
        begun.mkdir(parents=True)
        write_atomic(begun / WEIGHTS, safetensors.torch.save(tensors, metadata={"format": "pt"}))
        write_json_atomic(begun / "config.json", engine_config(engine_facts, dtype, _special_ids(target)))
        check = check_export(begun, net, target, dtype)
        made = _made(net, target, config, begun, engine_facts, check) | {"facts": facts or {}}
        write_json_atomic(begun / MADE_FILE, made)
        write_card(begun, report)
        replace_folder(begun, folder)
    return made


def load_export(folder: str | Path, target: Target) -> Eagle3Net:
    """Build the drafter that a serving engine would build: from config.json and the tensors, the embeddings from the target.

    Raises UserError if the folder is damaged, is another kind of drafter, or was made for another target.
    """
    folder = Path(folder)
    restore_folder(folder)
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, so it is no exported drafter; give the folder that `drafttrain export` wrote."
            )
    facts, dtype = read_engine_config(read_json(folder / "config.json", "the export"), str(folder))
    if (facts.vocab, facts.hidden) != (target.vocab, target.hidden):
        raise UserError(
            f"{folder} drafts for a target of width {facts.hidden} and {facts.vocab} tokens, but {target.identity.path} has "
            f"{target.hidden} and {target.vocab}; use the target that it was trained for."
        )
    target.check_taps(facts.taps)
    _check_made(folder, target)
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({error}); export the drafter again.") from error
    check_tensors(tensors, facts, dtype, str(folder / WEIGHTS))
    d2t = tensors.pop("d2t", torch.zeros(facts.draft_vocab, dtype=torch.int64))
    vocabulary = DraftVocabulary.from_d2t(d2t, facts.vocab)
    t2d = tensors.pop("t2d", vocabulary.t2d)
    if not torch.equal(t2d, vocabulary.t2d):
        raise UserError(f"{folder / WEIGHTS} has a d2t and a t2d that name different tokens; export the drafter again.")
    shape = DecoderShape(
        hidden=facts.hidden, target_hidden=facts.hidden, heads=facts.heads, kv_heads=facts.kv_heads, head_dim=facts.head_dim,
        intermediate=facts.intermediate, rms_eps=facts.rms_eps, max_positions=facts.max_positions, vocab=facts.vocab,
        rope_parameters=facts.rope_parameters,
    )  # fmt: skip
    config = Eagle3(taps=list(facts.taps), draft_vocab=None if facts.full else facts.draft_vocab)
    net = Eagle3Net(config, shape, facts.taps, vocabulary, Frozen(target.model.get_input_embeddings()))
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return net.to(target.device)


@torch.no_grad()
def check_export(folder: Path, net: Eagle3Net, target: Target, dtype: torch.dtype) -> dict[str, float]:
    """Compare the folder, read from disk, with the trained net on a fixed text. Everything is computed in fp32.

    `against_cast`: largest difference in logits to the trained net with its weights rounded to `dtype` (must be none);
    `against_trained`: to the trained net itself, so what the rounding costs.
    Raises UserError if the folder reads back as another net.
    """
    sequences, features = _fixed_input(net, target)
    got = _chain_logits(load_export(folder, target), sequences, features)
    cast = _chain_logits(_twin(net, dtype), sequences, features)
    trained = _chain_logits(_twin(net, torch.float32), sequences, features)
    largest = float(cast.abs().max())
    against_cast = float((got - cast).abs().max())
    if not against_cast <= TOLERANCE * max(1.0, largest):
        raise UserError(
            f"the exported folder does not read back as the trained drafter: logits differ by {against_cast:.2e} where the "
            f"largest is {largest:.2e}. Nothing was put in place; this is a fault of drafttrain, please report it."
        )
    return {
        "against_cast": against_cast, "against_trained": float((got - trained).abs().max()), "largest_logit": largest,
        "same_first_choice": float((got.argmax(-1) == trained.argmax(-1)).float().mean()), "rows": len(got),
    }  # fmt: skip


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


def _facts_of(net: Eagle3Net, target: Target) -> Eagle3Facts:
    shape = net.shape
    if shape.target_hidden != shape.hidden or shape.max_positions != target.max_positions or shape.vocab != target.vocab:
        raise UserError(
            f"the drafter has width {shape.hidden}, {shape.max_positions} positions and {shape.vocab} tokens, but its target "
            f"{target.hidden}, {target.max_positions} and {target.vocab}; engines need them equal, so train it for this target."
        )
    return Eagle3Facts(
        taps=tuple(net.needs.taps),
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_eps=shape.rms_eps,
        rope_parameters=dict(shape.rope_parameters),
        max_positions=shape.max_positions,
        vocab=shape.vocab,
        draft_vocab=len(net.vocabulary.ids),
    )


def _tensors_of(net: Eagle3Net, dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything the net has learned, plus the vocabulary map unless the vocabulary is full (an identity map helps nobody)."""
    tensors = {name: value.detach().to("cpu", dtype, copy=True).contiguous() for name, value in net.state_dict().items()}
    if not net.vocabulary.is_full:
        tensors |= {"d2t": net.vocabulary.d2t.cpu().contiguous(), "t2d": net.vocabulary.t2d.cpu().contiguous()}
    return tensors


def _check_finite(tensors: dict[str, Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if bad:
        raise UserError(
            f"the trained drafter holds numbers that are not finite (in {', '.join(bad)}), so it is not exported; "
            "export an earlier checkpoint."
        )


def _special_ids(target: Target) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(target.config, name) for name in names if getattr(target.config, name, None) is not None}


def _made(
    net: Eagle3Net, target: Target, config: ExportConfig, folder: Path, facts: Eagle3Facts, check: dict[str, float]
) -> dict[str, Any]:
    weights = folder / WEIGHTS
    gap = embedding_gap(target, facts.rms_eps)
    notes = [name_warning(config.push)] if config.push else []
    if gap > EMBEDDING_GAP:
        notes.append(
            f"The target scales its embeddings and engines give the drafter the raw ones; its first norm cancels that up to "
            f"{gap:.1%}, so served acceptance may be a little below the measured one."
        )
    return {
        "format": 1,
        "method": "eagle3",
        "identity": asdict(target.identity),
        "base_model": base_model(asdict(target.identity), config.base_model),
        "license": config.license,
        "repository": config.push,
        "class_path": type(net.config).__name__,
        "init_args": json.loads(json.dumps(asdict(net.config))),
        "config": {"taps": list(facts.taps), "vocab": facts.vocab, "draft_vocab": facts.draft_vocab},
        "dtype": config.dtype,
        "weights": {"file": WEIGHTS, "bytes": weights.stat().st_size, "sha256": sha256_file(weights)},
        "check": check,
        "embedding_gap": gap,
        "notes": [note for note in notes if note],
        "measured": None,
    }


def _check_made(folder: Path, target: Target) -> None:
    """Compare drafttrain.json with the target at hand and with the file of weights. A drafter from elsewhere has none."""
    if not (folder / MADE_FILE).exists():
        return
    made = read_json(folder / MADE_FILE, "the export")
    check_identity(made["identity"], target, str(folder))
    if sha256_file(folder / WEIGHTS) != made["weights"]["sha256"]:
        raise UserError(
            f"{folder / WEIGHTS} is not the file that was exported (its sha256 differs from {MADE_FILE}); "
            "export or download it again."
        )


def _twin(net: Eagle3Net, dtype: torch.dtype) -> Eagle3Net:
    """The trained net with its weights rounded to `dtype`, computing in fp32."""
    twin = Eagle3Net(net.config, net.shape, net.needs.taps, net.vocabulary, net.embedding)
    twin.load_state_dict({name: value.detach().to(dtype).float() for name, value in net.state_dict().items()})
    return twin.to(net.fc.weight.device)


def _fixed_input(net: Eagle3Net, target: Target) -> tuple[Sequences, Features]:
    """A text of tokens that the drafter can say, and what the target computes while reading it."""
    ids = net.vocabulary.ids.cpu()
    pick = torch.randint(len(ids), (CHECK_TOKENS,), generator=torch.Generator().manual_seed(0))
    sequences = one_chat(ids[pick], prompt_len=0)
    return sequences, target.read_packed(sequences.to(target.device), net.needs.taps)


def _chain_logits(net: Eagle3Net, sequences: Sequences, features: Features) -> Tensor:
    """[N, Vd] in fp32, elements in the layout's order: every anchor, every depth."""
    layout = net.layout(sequences, CHECK_DEPTH).to(features.final_BTD.device)
    drafted = net.rows(sequences.to(features.final_BTD.device), features, layout)
    return net.logits(drafted.hidden_NH, drafted.prev_N).float()
