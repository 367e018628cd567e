"""Training that begins from a trained drafter: one of ours (`checkpoints/best`), an export, or a published checkpoint (published.py).

    start = WarmStart.open("owner/name", pickle=False, config=Eagle3(...), target=target)
    vocabulary, lines = start.choose_vocabulary(counts)
    lines += start.fill(config.build(target, vocabulary))

The recipe stays the one that says what is built; the checkpoint fills it or is refused, with everything that does not fit in one sentence.
The draft vocabulary is the exception, because a head's rows are worth keeping: a checkpoint with a reduced vocabulary brings it along, or
is cut to fewer of its tokens; one with the full vocabulary is cut to the one that the recipe chooses (VocabTrim, arXiv 2506.22694).

Letters: V target vocabulary, Vd rows of a head.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.published import Published, recognise
from drafttrain.drafters.registry import known_drafters
from drafttrain.drafters.save import read_record
from drafttrain.drafters.start_files import find, read_tensors
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_tensors_atomic
from drafttrain.target.identity import differences
from drafttrain.target.target import Target
from drafttrain.vocab import Counts, DraftVocabulary, choose, coverage

MAPS = ("d2t", "t2d", "token_map")
"""Tensors that say which tokens a head has."""
TRAINING_ONLY = ("depth", "draft_vocab", "least_coverage", "noise", "dropout", "anchors", "cod_ratio", "cod_least")
"""Arguments of our drafters that another training of the same net may change."""
COMPARED_ROWS = 4096
"""Rows of a table that are compared with the target's."""
KEPT = "start_vocabulary.safetensors"


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint that fits the recipe's drafter, as far as can be told before a net is built."""

    where: str
    """As the user typed it."""
    found: Published
    config: DrafterConfig
    target: Target
    held: DraftVocabulary | None
    """Tokens of its head; None where it speaks with the target's."""
    notes: tuple[str, ...]

    @staticmethod
    def open(where: str, pickle: bool, config: DrafterConfig, target: Target) -> "WarmStart":
        """Find, read and recognise `checkpoint.start`. UserError where it is missing, damaged, of an unknown layout, or another net than
        the recipe's drafter."""
        folder, what = find(where, pickle), f"checkpoint.start {where}"
        tensors = read_tensors(folder, pickle, what)
        notes: tuple[str, ...] = ()
        if (folder / "drafter.json").exists():
            record = read_record(folder)
            found = _ours(record["class_path"], record["init_args"], record["identity"], tensors, target, what)
            strange = differences(record["identity"], target.identity)
            notes = (f"it was trained with another target ({'; '.join(strange)})",) if strange else ()
        else:
            found = _published(read_json(folder / "config.json", what), tensors, target, what)
        _require_same_net(found, config, target, what)
        notes += _rotary_note(found, target)
        return WarmStart(where, found, config, target, _held(found, target.vocab, what), notes)

    # ---- vocabulary ----------------------------------------------------------------------------------------------------

    def choose_vocabulary(self, counts: Counts) -> tuple[DraftVocabulary, list[str]]:
        """The tokens that the drafter will say, and what they cover, for people.

        UserError where the recipe asks for more tokens, or more coverage, than the checkpoint's head has.
        """
        held = self.held
        if held is None or held.is_full:
            vocabulary, lines = choose_vocabulary(self.config, self.target, counts)
            cut = held is not None and not vocabulary.is_full
            return vocabulary, [*lines, *(["its head is cut to them, row by row"] if cut else [])]
        most, size = len(held.ids), self.config.draft_vocab
        if size is None or (isinstance(size, int) and size > most):
            raise UserError(
                f"drafter.init_args.draft_vocab is {'null (all tokens)' if size is None else size}, but the head of checkpoint.start "
                f"{self.where} has {most:,} tokens, and rows that it lacks cannot be made up; set draft_vocab to {most} or less, or train "
                "without checkpoint.start."
            )
        kept = self._cut(held, size, counts) if isinstance(size, int) and size < most else held
        reached = coverage(kept, counts.supervised_V)
        asked = max(self.config.least_coverage, size if isinstance(size, float) else 0.0)
        if reached < asked:
            name = "least_coverage" if self.config.least_coverage == asked else "draft_vocab"
            raise UserError(
                f"the {len(kept.ids):,} tokens of checkpoint.start {self.where} cover {reached:.1%} of the training answers, but "
                f"drafter.init_args.{name} asks for {asked:.1%}; lower it, or train without checkpoint.start."
            )
        best = float(counts.trained(torch.tensor([len(kept.ids)]))[0])
        of = "" if len(kept.ids) == most else f" of the {most:,}"
        line = (
            f"draft vocabulary: {len(kept.ids):,}{of} tokens of the checkpoint, in place of a choice by counts; they are {reached:.2%} of the "
            f"training answers, the {len(kept.ids):,} most frequent ones would be {best:.2%}"
        )
        mute = [token for token in self.target.end_ids if not kept.t2d[token]]
        return kept, [line, *([f"note: it cannot say the end-of-turn tokens {mute}"] if mute else [])]

    def _cut(self, held: DraftVocabulary, size: int, counts: Counts) -> DraftVocabulary:
        """The most frequent of the head's own tokens, ends of turn always among them."""
        ends = [place for place, token in enumerate(held.ids.tolist()) if token in self.target.end_ids]
        chosen = choose(counts.supervised_V[held.ids], size, counts.other_V[held.ids], always=ends)
        return DraftVocabulary(held.ids[chosen.ids], held.size)

    # ---- weights -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, net: DrafterNet) -> list[str]:
        """Put the checkpoint's weights into a net of the recipe; returns what was done, for people.

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
                f"checkpoint.start {self.where} ({found.layout}) does not fit the recipe's {type(self.config).__name__} for this target: "
                f"{'; '.join(faults)}. Give a checkpoint of the same shape, or train without checkpoint.start."
            )
        if net.words and self.held is not None:
            rows = self._rows(net.vocabulary)
            weights |= {name: weights[name][rows] for name in net.words}
        net.load_state_dict(weights)
        line = f"starting from {self.where}: {found.layout}, {len(weights)} tensors"
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
        ids = _ids(self.found)
        place_V = torch.arange(vocabulary.size)
        if ids is not None:
            place_V[ids] = torch.arange(len(ids))
        return place_V[vocabulary.ids]

    def _strangers(self, left_out: set[str]) -> list[str]:
        """Tables that are left out because the target has its own, and that are not the target's."""
        head = self.target.head_weight
        said = self.found.tensors.get("token_map")
        own = {
            "embed_tokens.weight": self.target.embedding_weight,
            "lm_head.weight": head if said is None else head[said.to(head.device)],
        }
        found = []
        for name in sorted(left_out & own.keys()):
            theirs, ours = self.found.tensors[name], own[name]
            every = slice(0, len(ours), -(-len(ours) // COMPARED_ROWS))
            if theirs.shape == ours.shape:
                there, here = theirs[every].float(), ours[every].float().cpu()
                if (there - here).norm() <= 0.01 * here.norm():
                    continue
            found.append(f"its {name} is not this target's, whose own is used")
        return found


# ---- what the folder holds --------------------------------------------------------------------------------------------------


def _ours(class_path: str, init_args: dict, sizes: dict, tensors: dict[str, Tensor], target: Target, what: str) -> Published:
    """A drafter that `save_drafter` or a native export wrote. Another target is no fault: to follow one that was tuned is a use of this."""
    try:
        config = known_drafters()[class_path](**init_args)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{what} was saved by a version of drafttrain with other drafters ({error}); use that version."
        ) from error
    options = {name: value for name, value in asdict(config).items() if name not in TRAINING_ONLY}
    if "taps" in options:
        options["taps"] = config.taps_of(target)  # each family has defaults of its own
    own_sizes = {"hidden_size": sizes["hidden"], "vocab_size": sizes["vocab"]}
    return Published("a drafter of drafttrain", class_path, own_sizes, tensors, options=options)


def _published(config: dict, tensors: dict[str, Tensor], target: Target, what: str) -> Published:
    """A folder with a config.json: a native export of ours, or a layout that others read too."""
    if config.get("model_type") == "drafttrain":
        sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
        return _ours(config["class_path"], config["init_args"], sizes, tensors, target, what)
    found = recognise(config, tensors, what)
    if found.raw_embeddings is not None:
        _scale_embeddings(found, found.raw_embeddings, target)
    return found


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


# ---- what must be equal -----------------------------------------------------------------------------------------------------


def _require_same_net(found: Published, config: DrafterConfig, target: Target, what: str) -> None:
    """UserError that names each argument of the recipe's drafter, and each size of the target, for which the checkpoint is another net."""
    if found.drafter != type(config).__name__:
        raise UserError(
            f"{what} is {found.layout}, which is a drafter of class {found.drafter}, but drafter.class_path is {type(config).__name__}; set that "
            f"to {found.drafter}, or give another checkpoint."
        )
    shape = DecoderShape.of(target)
    sizes = {
        "hidden_size": shape.hidden, "vocab_size": shape.vocab, "intermediate_size": shape.intermediate, "hidden_act": "silu",
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip
    faults = list(found.refusals)
    faults += [
        f"{name} is {found.config[name]}, but this target's drafters have {value}"
        for name, value in sizes.items()
        if found.config.get(name) not in (None, value)
    ]
    if faults:
        raise UserError(f"{what} ({found.layout}) cannot be continued here: {'; '.join(faults)}; give another checkpoint.")
    wrong = []
    for name, value in found.options.items():
        now = getattr(config, name)
        if name == "taps":
            now, value = config.taps_of(target), target.default_taps if value is None else value
        if now != value:
            wrong.append(f"drafter.init_args.{name} is {json.dumps(now)}, its own {json.dumps(value)}")
    if wrong:
        raise UserError(
            f"{what} ({found.layout}) is another net than the recipe's: {'; '.join(wrong)}; set them as the checkpoint has them."
        )


def _rotary_note(found: Published, target: Target) -> tuple[str, ...]:
    """Published configs often leave the rotary base out, and their code then takes 10,000: told where that is not the target's."""
    if "num_attention_heads" not in found.config:
        return ()
    own = DecoderShape.of(target).rope_parameters
    said = found.config.get("rope_parameters") or {}
    scaling = found.config.get("rope_scaling") or said
    base = said.get("rope_theta") or found.config.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if (float(base), kind) == (float(own["rope_theta"]), own.get("rope_type", "default")):
        return ()
    return (
        f"it turns positions with base {base:g} ({kind}), the target with {own['rope_theta']:g} ({own.get('rope_type')}): the target's is used",
    )


# ---- the tokens of a head ---------------------------------------------------------------------------------------------------


def _ids(found: Published) -> Tensor | None:
    """Target id of each row of the head, in the file's order; None where the rows are all tokens in order."""
    tensors = found.tensors
    if "d2t" in tensors:
        return tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if "token_map" in tensors:
        return tensors["token_map"].long()
    if "t2d" in tensors:
        return tensors["t2d"].bool().nonzero()[:, 0]
    return None


def _held(found: Published, vocab: int, what: str) -> DraftVocabulary | None:
    """The tokens of the checkpoint's head. UserError where its maps do not say which they are."""
    if found.rows is None:
        return None
    ids = _ids(found)
    ids = torch.arange(found.rows) if ids is None and found.rows == vocab else ids
    if ids is None:
        raise UserError(
            f"{what} has a head of {found.rows:,} tokens, but the target {vocab:,}, and no d2t says which they are; give a checkpoint that has one."
        )
    marked = found.tensors.get("t2d")
    faults = [
        len(ids) != found.rows and f"its maps name {len(ids):,} tokens, its head has {found.rows:,} rows",
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


# ---- a run that goes on -----------------------------------------------------------------------------------------------------


def keep_vocabulary(checkpoints: Path, vocabulary: DraftVocabulary) -> None:
    """Note the draft vocabulary of a warm start, so that the run goes on without reading the checkpoint again."""
    write_tensors_atomic(checkpoints / KEPT, {"d2t": vocabulary.d2t})


def kept_vocabulary(checkpoints: Path, vocab: int) -> DraftVocabulary:
    """What `keep_vocabulary` noted. UserError if it is gone."""
    try:
        return DraftVocabulary.from_d2t(load_file(str(checkpoints / KEPT))["d2t"], vocab)
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"{checkpoints / KEPT}, which holds the draft vocabulary of this run, cannot be read ({error}); restore it, or delete {checkpoints} "
            "to begin anew from checkpoint.start."
        ) from error
