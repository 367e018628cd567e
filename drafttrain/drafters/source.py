"""A trained drafter from elsewhere: its folder found, read and recognised (published.py), its tensors checked and put into a net of ours.

What the net is, is for others to say: a training that begins from it fills the recipe's (warm_start.py), a measurement builds the drafter's own
(measured.py).

Letters: V target vocabulary, Vd rows of a head.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from drafttrain.drafters.base import DrafterNet
from drafttrain.drafters.published import recognise
from drafttrain.drafters.published_layout import Published
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.save import MADE_FILE, read_record, require_as_exported, require_unaltered
from drafttrain.drafters.start_files import find, fitting, read_config, read_tensors
from drafttrain.errors import UserError
from drafttrain.files import read_json
from drafttrain.target.identity import differences
from drafttrain.target.target import Target
from drafttrain.vocab import DraftVocabulary

MAPS = ("d2t", "t2d", "token_map")
"""Tensors that say which tokens a head has."""
TRAINING_ONLY = ("depth", "draft_vocab", "least_coverage", "noise", "dropout", "anchors", "prefix_base", "cod_ratio", "cod_least")
"""Arguments of our drafters that another training of the same net may change."""
COMPARED_ROWS = 4096
"""Rows of a table that are compared with the target's."""


@dataclass(frozen=True)
class Source:
    """A folder that has been read."""

    asked: ClassVar[str]
    """The key or the flag that names it."""
    using: ClassVar[str]
    """What is done with it."""
    way_out: ClassVar[str]
    """What to do where its tensors do not fit."""

    where: str
    """As the user typed it."""
    found: Published
    target: Target
    spoken: DraftVocabulary | None
    """Tokens that it can say, by its maps or its head; None where the folder says nothing of them, so all."""
    notes: tuple[str, ...]

    @classmethod
    def read(cls, where: str, pickle: bool, target: Target, folder: Path | None = None, **more: Any) -> Self:
        """Find (where `folder` does not say that it was), read and recognise a folder or Hub id; `more` are fields of a kind of source. UserError
        where it is missing, damaged or of an unknown layout."""
        folder, what = folder or find(where, pickle, cls.asked), f"{cls.asked} {where}"
        tensors = read_tensors(folder, pickle, what)
        with fitting(what):
            if (folder / "drafter.json").exists():
                record = read_record(folder)
                require_unaltered(folder, record)
                found = _ours(record["class_path"], record["init_args"], record["identity"], tensors, target, what)
                strange = differences(record["identity"], target.identity)
            else:
                found = _published(read_config(folder, what), tensors, target, what)
                strange = _exported_for_another(folder, target)
            notes = (f"it was trained with another target ({'; '.join(strange)})",) if strange else ()
            return cls(where, found, target, _spoken(found, target.vocab, what), (*notes, *found.notes), **more)

    @property
    def held(self) -> DraftVocabulary | None:
        """Tokens of its head; None where it speaks with the target's."""
        return None if self.found.rows is None else self.spoken

    @property
    def what(self) -> str:
        """For sentences."""
        return f"{self.asked} {self.where}"

    def misfits(self, sizes: dict[str, Any]) -> list[str]:
        """Why no net of ours for this target is this one, where such a net has these sizes."""
        found, own = self.found, (self.target.logit_factor, self.target.logit_cap)
        faults = [
            f"{name} is {found.config[name]}, but this target's drafters have {value}"
            for name, value in sizes.items()
            if found.config.get(name) not in (None, value)
        ]
        if found.logits not in (None, own):
            faults.append(
                f"it adds its own to logits with a factor of {found.logits[0]:g} and a cap of {found.logits[1]}, and this target's have {own[0]:g} and {own[1]}"
            )
        return [*found.refusals, *faults]

    # ---- weights -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, net: DrafterNet) -> list[str]:
        """Put the tensors into a net; returns what was done, for people.

        UserError that lists every tensor which is missing, unknown or of another shape.
        """
        found, weights, used = self.found, {}, set()
        faults: list[str] = []
        for ours, own in net.state_dict().items():
            names = found.theirs(ours)
            parts = [self._part(name, own, len(names), ours in net.words, faults) for name in names]
            used.update(names)
            if all(part is not None for part in parts):
                weights[ours] = torch.cat([part for part in parts if part is not None], dim=-1)
        without = [ours for ours in found.lost if ours not in net.state_dict()]
        used.update(name for ours in without for name in found.theirs(ours))
        spare = set(found.tensors) - used - set(MAPS)
        left_out = {name for name in spare if found.skips(name)}
        faults += [f"{name} is unknown" for name in sorted(spare - left_out)]
        if faults:
            raise UserError(
                f"{self.what} ({found.layout}) does not fit the class {type(net.config).__name__} for this target: {'; '.join(faults)}. {self.way_out}"
            )
        if net.words and self.held is not None:
            rows = self._rows(net.vocabulary)
            weights |= {name: weights[name][rows] for name in net.words}
        net.load_state_dict(weights)
        line = f"{self.using} {self.where}: {found.layout}, {len(weights)} tensors"
        notes = (*self.notes, *(found.lost[ours] for ours in without), *self._strangers(left_out))
        skipped = [f"left out, as the target's or not needed: {', '.join(sorted(left_out))}"] if left_out else []
        return ["; ".join([line, *skipped]), *(f"note: {note}" for note in notes)]

    def _part(self, name: str, own: Tensor, parts: int, words: bool, faults: list[str]) -> Tensor | None:
        """One tensor of the file in the shape that ours needs, before its rows are picked; None behind a fault."""
        shape = list(own.shape)
        if words and self.held is not None:
            shape[0] = len(self.held.ids)
        shape[-1] //= parts
        got = self.found.tensors.get(name)
        if got is None:
            if re.fullmatch(self.found.zeros, name):
                return torch.zeros(shape)
            faults.append(f"{name} is missing")
        elif list(got.shape) != shape:
            faults.append(f"{name} is {list(got.shape)} instead of {shape}")
        elif not got.is_floating_point():
            faults.append(f"{name} holds {str(got.dtype).removeprefix('torch.')} instead of floating-point numbers")
        elif not got.isfinite().all():
            faults.append(f"{name} holds numbers that are not finite")
        else:
            return got.float()
        return None

    def _rows(self, vocabulary: DraftVocabulary) -> Tensor:
        """Rows of the checkpoint's head, in the file's own order, that say these tokens."""
        ids = said_ids(self.found)
        place_V = torch.arange(vocabulary.size)
        if ids is not None:
            place_V[ids] = torch.arange(len(ids))
        return place_V[vocabulary.ids]

    def _strangers(self, left_out: set[str]) -> list[str]:
        """Tables that are left out because the target has its own, and that are not the target's."""
        head, said, found = self.target.head_weight, said_ids(self.found), []
        own = {
            "embed_tokens.weight": self.target.embedding_weight,
            "lm_head.weight": head if said is None else head[said.to(head.device)],
        }
        for name in sorted(left_out & own.keys()):
            theirs, ours = self.found.tensors[name], own[name]
            every = torch.arange(0, len(ours), -(-len(ours) // COMPARED_ROWS), device=ours.device)
            here = [ours[every]]
            if name == "embed_tokens.weight":  # as the table has them, or as the first layer reads them
                here.append(self.target.embed(every))
            if theirs.shape != ours.shape or not any(_alike(theirs[every.cpu()], rows) for rows in here):
                found.append(f"its {name} is not this target's, whose own is used")
        return found


def _alike(theirs: Tensor, ours: Tensor) -> bool:
    there, here = theirs.float(), ours.float().cpu()
    return bool((there - here).norm() <= 0.01 * here.norm())


# ---- what the folder holds --------------------------------------------------------------------------------------------------


def _ours(class_path: str, init_args: dict, sizes: dict, tensors: dict[str, Tensor], target: Target, what: str) -> Published:
    """A drafter that `save_drafter` or a native export wrote. Another target is no fault: to follow one that was tuned is a use of this."""
    try:
        config = known_drafters()[class_path](**init_args)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{what} was saved by a version of drafttrain with other drafters ({error}); use that version."
        ) from error
    options, trained = asdict(config), {}
    for name in TRAINING_ONLY:
        if name in options:
            trained[name] = options.pop(name)
    if "taps" in options:
        options["taps"] = config.taps_of(target)  # each family has defaults of its own
    own_sizes = {"hidden_size": sizes["hidden"], "vocab_size": sizes["vocab"]}
    return Published("a drafter of drafttrain", class_path, own_sizes, tensors, options=options, trained=trained)


def _published(config: dict, tensors: dict[str, Tensor], target: Target, what: str) -> Published:
    """A folder with a config.json: a native export of ours, or a layout that others read too."""
    if config.get("model_type") == "drafttrain":
        sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
        return _ours(config["class_path"], config["init_args"], sizes, tensors, target, what)
    found = recognise(config, tensors, what)
    if found.raw_embeddings is not None:
        _scale_embeddings(found, found.raw_embeddings, target)
    return found


def _exported_for_another(folder: Path, target: Target) -> list[str]:
    """Of an export of ours, in what its target differs; nothing of other folders. UserError for weights that are not the ones exported."""
    if not (folder / MADE_FILE).exists():
        return []
    made = read_json(folder / MADE_FILE, "the export")
    require_as_exported(folder, made)
    return differences(made["identity"], target.identity)


def _scale_embeddings(found: Published, name: str, target: Target) -> None:
    """Where the target multiplies its embeddings by s (Gemma), columns that read them raw become columns that read theirs, divided by s."""
    scale = target.embedding_scale()
    if scale is None:
        found.refusals.append(
            "it reads the target's embeddings as they stand in the table, and the target changes them by more than a factor"
        )
    elif scale != 1.0 and name in found.tensors and found.tensors[name].dim() == 2:
        weight = found.tensors[name].float().clone()
        weight[:, : weight.shape[1] // 2] /= scale
        found.tensors[name] = weight


# ---- the tokens of a head ---------------------------------------------------------------------------------------------------


def said_ids(found: Published) -> Tensor | None:
    """Target id of each row of the head, in the file's order; None where the rows are all tokens in order."""
    tensors = found.tensors
    if "d2t" in tensors:
        return tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if "token_map" in tensors:
        return tensors["token_map"].long()
    if "t2d" in tensors:
        return tensors["t2d"].bool().nonzero()[:, 0]
    return None


def _spoken(found: Published, vocab: int, what: str) -> DraftVocabulary | None:
    """The tokens that a drafter can say. UserError where its maps do not say which they are."""
    ids, rows = said_ids(found), found.rows
    if ids is None:
        if rows is None:
            return None
        if rows != vocab:
            raise UserError(
                f"{what} has a head of {rows:,} tokens, but the target {vocab:,}, and no d2t says which they are; give a checkpoint that has one."
            )
        return DraftVocabulary.full(vocab)
    marked = found.tensors.get("t2d")
    faults = [
        rows not in (None, len(ids)) and f"its maps name {len(ids):,} tokens, its head has {rows:,} rows",
        bool(((ids < 0) | (ids >= vocab)).any()) and f"its maps name tokens outside of the target's {vocab:,}",
        len(ids.unique()) != len(ids) and "its maps name a token twice",
        marked is not None
        and not torch.equal(marked.bool().nonzero()[:, 0], ids.sort().values)
        and "its d2t and t2d name different tokens",
    ]
    if wrong := [fault for fault in faults if fault]:
        raise UserError(
            f"{what} is damaged: {'; '.join(str(fault) for fault in wrong)}; download it again, or give another checkpoint."
        )
    return DraftVocabulary(ids.sort().values, vocab)


# ---- its own shape ----------------------------------------------------------------------------------------------------------


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters that config.json comes to, in transformers 5's form. Published ones often leave the base out, and their code then
    takes 10,000."""
    said = config.get("rope_parameters") or {}
    scaling = {key: value for key, value in (config.get("rope_scaling") or said).items() if key != "type"}
    kind = scaling.get("rope_type") or (config.get("rope_scaling") or {}).get("type") or "default"
    return scaling | {"rope_type": kind, "rope_theta": float(said.get("rope_theta") or config.get("rope_theta") or 10000.0)}
