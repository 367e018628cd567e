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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from drafttrain.drafters.base import PLACES, DrafterConfig
from drafttrain.drafters.decoder import DecoderShape
from drafttrain.drafters.mask_token import mask_token
from drafttrain.drafters.published_layout import Published
from drafttrain.drafters.source import Source, rope_of
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.errors import UserError
from drafttrain.files import public_place, write_tensors_atomic
from drafttrain.target.target import Target
from drafttrain.vocab import Counts, DraftVocabulary, choose, coverage

KEPT = "start_vocabulary.safetensors"


@dataclass(frozen=True)
class WarmStart(Source):
    """A checkpoint that fits the recipe's drafter, as far as can be told before a net is built."""

    asked, using = "checkpoint.start", "starting from"
    way_out = "Give a checkpoint of the same shape, or train without checkpoint.start."

    config: DrafterConfig

    @staticmethod
    def open(where: str, pickle: bool, config: DrafterConfig, target: Target) -> "WarmStart":
        """Find, read and recognise `checkpoint.start`. UserError where it is missing, damaged, of an unknown layout, or another net than
        the recipe's drafter."""
        start = WarmStart.read(where, pickle, target, config=config)
        start.require_same_net()
        return replace(start, notes=(*start.notes, *_rotary_note(start.found, target)))

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

    # ---- what must be equal --------------------------------------------------------------------------------------------

    def require_same_net(self) -> None:
        """UserError that names each argument of the recipe's drafter, and each size of the target, for which the checkpoint is another net."""
        found, config, what = self.found, self.config, f"{self.what} ({self.found.layout})"
        if found.drafter != type(config).__name__:
            raise UserError(
                f"{self.what} is {found.layout}, which is a drafter of class {found.drafter}, but drafter.class_path is {type(config).__name__}; set "
                f"that to {found.drafter}, or give another checkpoint."
            )
        if faults := self.misfits(_sizes(self.target)):
            raise UserError(f"{what} cannot be continued here: {'; '.join(faults)}; give another checkpoint.")
        wrong = []
        for name, value in found.options.items():
            if name == "mask_token" and self.target.tokenizer is None and None in (value, getattr(config, name)):
                continue  # a plan has no tokenizer to choose one by; training compares them
            now, own = (meant(config, name, said, self.target) for said in (getattr(config, name), value))
            if now != own:
                wrong.append(f"drafter.init_args.{name} is {json.dumps(now)}, its own {json.dumps(own)}")
        if wrong:
            raise UserError(f"{what} is another net than the recipe's: {'; '.join(wrong)}; set them as the checkpoint has them.")


def meant(config: DrafterConfig, name: str, value: Any, target: Target) -> Any:
    """What an argument of a drafter comes to for this target, where its value leaves a choice. UserError where it does not fit the target."""
    if name == "taps":
        taps: dict[str, Any] = {name: list(value or [])}
        return replace(config, **taps).taps_of(target)
    if name == "mask_token" and target.tokenizer is not None:
        return mask_token(target, value)
    if name in PLACES and value is not None:  # an export tells the last part of a path alone
        return public_place(value)
    return value


def _sizes(target: Target) -> dict[str, Any]:
    """What a drafter that is trained for this target has in its config.json."""
    shape = DecoderShape.of(target)
    return {
        "hidden_size": shape.hidden, "vocab_size": shape.vocab, "intermediate_size": shape.intermediate, "hidden_act": "silu",
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip


def _rotary_note(found: Published, target: Target) -> tuple[str, ...]:
    """Told where the drafter's positions are not turned as the target's, for training turns them so."""
    if "num_attention_heads" not in found.config:
        return ()
    own, said = DecoderShape.of(target).rope_parameters, rope_of(found.config)
    base, kind = said["rope_theta"], said["rope_type"]
    if (base, kind) == (float(own["rope_theta"]), own.get("rope_type", "default")):
        return ()
    return (
        f"it turns positions with base {base:g} ({kind}), the target with {own['rope_theta']:g} ({own.get('rope_type')}): the target's is used",
    )


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
