"""Which formats a drafter can be written in, best first: a new drafter adds one line. Every one can be written as `native` besides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.drafters.base import DrafterConfig, DrafterNet
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError
from drafttrain.export.dflash import DFlashFormat, DFlashForVllm
from drafttrain.export.dflash2 import DFlash2Format, DFlash2ForVllm
from drafttrain.export.dspark import DSparkFormat, DSparkForVllm
from drafttrain.export.eagle import EagleForSglang, EagleForVllm
from drafttrain.export.eagle3 import Eagle3Format, Eagle3ForVllm
from drafttrain.export.format import NAMES, Format
from drafttrain.export.medusa import MedusaFormat
from drafttrain.export.native import NativeFormat
from drafttrain.export.p_eagle import PEagleFormat
from drafttrain.export.speculators_blocks import DFlash2Speculators, DFlashSpeculators, DSparkSpeculators
from drafttrain.export.speculators_eagle import Eagle3Speculators, PEagleSpeculators
from drafttrain.export.transformers import TransformersFormat
from drafttrain.target.target import Target


@dataclass(frozen=True)
class Entry:
    """What engines do with a class of drafters."""

    formats: tuple[Format, ...] = ()
    otherwise: str = ""
    """Why no other engine serves it."""


NATIVE = NativeFormat()
ENTRIES: dict[type[DrafterConfig], Entry] = {
    Eagle3: Entry((Eagle3Format(), Eagle3ForVllm(), Eagle3Speculators())),
    Eagle: Entry((EagleForVllm(), EagleForSglang())),
    DFlash: Entry((DFlashFormat(), DFlashForVllm(), DFlashSpeculators())),
    PEagle: Entry((PEagleFormat(), PEagleSpeculators()), "SGLang has no P-EAGLE"),
    DFlash2: Entry((DFlash2Format(), DFlash2ForVllm(), DFlash2Speculators())),
    DSpark: Entry((DSparkFormat(), DSparkForVllm(), DSparkSpeculators())),
    Independent: Entry((TransformersFormat(),), "speculators has no form of a stand-alone drafter"),
    Medusa: Entry((MedusaFormat(),), "no release of SGLang loads Medusa heads, and vLLM up to 0.26 alone"),
    Hydra: Entry(otherwise="no engine loads Hydra; drafttrain's own loop is the runtime"),
}
OTHERS = {
    "transformers": "it loads stand-alone language models alone (class Independent)",
    "speculators": "the library has no form of it",
}
"""Of those who are no engine: why they load none but the drafters that have a form for them."""
FORMATS = {format.name: format for entry in ENTRIES.values() for format in entry.formats} | {NATIVE.name: NATIVE}
"""Name -> format: what a folder can be."""


def choose_format(net: DrafterNet, target: Target, asked: str | None) -> tuple[Format, list[str]]:
    """The format asked for (vllm, sglang, speculators or native), or the first that can hold this net; and why others cannot, sentences
    for the user.

    Raises UserError if the format asked for cannot, with the reason and the nearest choice.
    """
    entry, name = ENTRIES.get(type(net.config), Entry()), type(net.config).__name__
    otherwise = entry.otherwise or f"this version of drafttrain knows no form of a {name} that it loads"
    if asked is None:
        format, refused = _first([*entry.formats, NATIVE], net, target)
        return format, ([] if entry.formats else [_sentence(otherwise)]) + _notes(format.engine_names, refused)
    if asked == NATIVE.name:
        return NATIVE, _native_notes(entry.formats, otherwise, net, target)
    require_form(type(net.config), asked, lambda format: format.refusal(net, target) is None)
    asked_for = [format for format in entry.formats if asked in format.engine_names]
    format, refused = _first(asked_for, net, target)
    if format in refused:
        raise UserError(f"export.format is {asked}, but this drafter cannot be written for {NAMES[asked]}: {refused[format]}.")
    return format, _notes(format.engine_names, refused)


def require_form(drafter: type[DrafterConfig], asked: str | None, fits: Callable[[Format], bool] = lambda format: True) -> None:
    """UserError where no drafter of this class can ever be written as asked: what can be told before a target is loaded. Named as the way out
    are the forms that the drafter at hand `fits`."""
    entry = ENTRIES.get(drafter, Entry())
    if asked in (None, NATIVE.name) or any(asked in format.engine_names for format in entry.formats):
        return
    forms = list(
        dict.fromkeys([*(name for format in entry.formats if fits(format) for name in format.engine_names), NATIVE.name])
    )
    reason = (
        OTHERS.get(asked) or entry.otherwise or f"this version of drafttrain knows no form of a {drafter.__name__} that it loads"
    )
    raise UserError(
        f"export.format is {asked}, but drafters of class {drafter.__name__} cannot be written for {NAMES[asked]}: {reason}. Set it to {_listed(forms, 'or')}."
    )


def _first(formats: Sequence[Format], net: DrafterNet, target: Target) -> tuple[Format, dict[Format, str]]:
    """The first that can hold the net, else the last; and why those up to it cannot."""
    refused: dict[Format, str] = {}
    for format in formats:
        if (reason := format.refusal(net, target)) is None:
            return format, refused
        refused[format] = reason
    return format, refused


def _notes(served: Sequence[str], refused: dict[Format, str]) -> list[str]:
    """A sentence for each reason, about the engines that are not served; of several, an engine's last is what keeps it from loading the drafter."""
    reasons = {name: reason for format, reason in refused.items() for name in format.engine_names if name not in served}
    lost = {reason: [NAMES[name] for name, other in reasons.items() if other == reason] for reason in reasons.values()}
    return [f"Not written for {_listed(names)}: {reason}." for reason, names in lost.items()]


def _native_notes(formats: Sequence[Format], otherwise: str, net: DrafterNet, target: Target) -> list[str]:
    """Of a drafter written for drafttrain alone because that was asked for: who would load it in another form, and who would not."""
    refused = {format: reason for format in formats if (reason := format.refusal(net, target)) is not None}
    can = list(dict.fromkeys(name for format in formats if format not in refused for name in format.engine_names))
    if not can:
        return _notes([], refused) or [_sentence(otherwise)]
    names = _listed([NAMES[name] for name in can])
    told = (
        f"Written for drafttrain alone, as asked: {names} can load the same drafter where export.format is {_listed(can, 'or')}."
    )
    return [told, *_notes(can, refused)]


def _listed(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def format_of(config: dict[str, Any], where: str) -> Format:
    """The format that a config.json says it is. Raises UserError if it is none of ours."""
    found = [format for format in FORMATS.values() if format.claims(config)]
    if not found:
        known = ", ".join(dict.fromkeys(format.architecture for format in FORMATS.values()))
        raise UserError(
            f"{where}/config.json says architectures {config.get('architectures')}, which is no drafter that can be read here ({known}); "
            "give the folder that `drafttrain export` wrote."
        )
    return found[0]


def format_named(made: dict[str, Any], where: str) -> Format:
    """The format that drafttrain.json names. Raises UserError if this version knows no such format."""
    if made["format"] not in FORMATS:
        raise UserError(
            f"{where} was exported by another version of drafttrain (format {made['format']!r}); export the drafter again."
        )
    return FORMATS[made["format"]]
