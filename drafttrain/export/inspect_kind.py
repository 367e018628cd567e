"""Which drafter a folder holds: what drafttrain wrote says so itself, anybody else's is known by the names of its tensors (published.py).

The architecture in config.json is what engines go by, so it is compared with the drafter: one of our formats (registry.py) must claim it, or at
least no other method's word stand in it. vLLM puts the method's word before a name that has none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafttrain.drafters.published import Published, recognise
from drafttrain.errors import UserError
from drafttrain.export.format import Engine, Format
from drafttrain.export.inspect_config import Reading
from drafttrain.export.registry import ENTRIES, FORMATS, NATIVE

METHOD_WORDS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "eagle": "eagle",
    "dflash": "dflash",
    "dspark": "dspark",
    "medusa": "medusa",
}
"""Part of an architecture's name -> vLLM's word for the method; the first that it contains counts."""
NOT_RENAMED = "dspark"
"""The method for which vLLM takes every architecture that it does not know for another model's."""
CAUSAL_LM = r"model\.layers\.0\..*|transformer\.h\.0\..*"
STANDALONE = (
    Engine("transformers", "as assistant_model", "assisted generation"),
    Engine("vllm", "0.26 and later", "draft_model"),
    Engine("sglang", "0.5.23", "STANDALONE"),
)
"""Who drafts with an ordinary language model."""


@dataclass(frozen=True)
class Kind:
    """What a folder is."""

    drafter: str | None
    """Our class for it; None for a language model of its own."""
    layout: str
    """For people."""
    format: Format | None = None
    """Ours, whose table of tensors it is held to."""
    published: Published | None = None
    """Else somebody's layout, held to our net."""
    engines: tuple[Engine, ...] = ()

    @property
    def formats(self) -> list[Format]:
        """In which this class is written."""
        return [format for cls, entry in ENTRIES.items() if cls.__name__ == self.drafter for format in entry.formats]


def identify(reading: Reading) -> Kind | None:
    """The kind, with a fault where config.json says another; None, with a fault, where nothing is recognised."""
    folder, config = reading.folder, reading.config
    if config.get("model_type") == NATIVE.architecture:
        return Kind(config.get("class_path"), "drafttrain's own", NATIVE)
    if folder.made is not None:
        return _export(reading, folder.made)
    if config.get("speculators_model_type") is None and any(re.fullmatch(CAUSAL_LM, name) for name in folder.tensors):
        return Kind(None, "a language model of its own", engines=STANDALONE)
    try:
        found = recognise(config, folder.tensors, folder.where)
    except UserError as error:
        reading.fault(str(error))
        return None
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        reading.fault(
            f"what it is cannot be told, since tensors are missing or have other shapes ({error}); download or copy it again."
        )
        return None
    return _published(reading, found)


def _export(reading: Reading, made: Mapping[str, Any]) -> Kind | None:
    """What drafttrain.json says, with a fault where config.json has another architecture."""
    format = FORMATS.get(str(made.get("format")))
    if format is None:
        reading.fault(
            f"drafttrain.json names the format {made.get('format')!r}, which this version does not know; update drafttrain, or export again."
        )
        return None
    if not format.claims(reading.config):
        wanted = [format.architecture]
        if reading.config.get("architectures") != wanted:
            reading.fault(_architecture_fault(reading.config, str(made.get("class_path")), format.architecture))
            reading.config["architectures"] = wanted
        elif reading.config:
            reading.fault(
                f"config.json is not of the form that {format.name!r} is written in, but of another of {wanted[0]}; export it again."
            )
    return Kind(made.get("class_path"), f"{format.title}, drafttrain's form {format.name}", format, engines=format.engines)


def _published(reading: Reading, found: Published) -> Kind:
    config, formats = reading.config, Kind(found.drafter, "").formats
    told = {"draft_vocab_size": reading.block.get("vocab_size")} | config  # where nothing is said, the head is the target's
    fitting = next((format for format in formats if format.claims(told)), None)
    said = _word(config)
    if fitting is None and said is not None and said not in {format.method for format in formats}:
        near = next(
            (
                format.architecture
                for format in formats
                if ("speculators_model_type" in config) == ("speculators" in format.engine_names)
            ),
            None,
        )
        reading.fault(_architecture_fault(config, found.drafter, near))
        fitting = next((format for format in formats if format.architecture == near), None)
    return Kind(found.drafter, found.layout, published=found, engines=_engines(config, formats, fitting))


def _architecture_fault(config: Mapping[str, Any], drafter: str, wanted: str | None) -> str:
    way_out = f"set architectures to [{wanted!r}]" if wanted else "give its own config.json"
    return (
        f"config.json says architectures {config.get('architectures')}, but the tensors are those of a drafter of class {drafter}, so an engine builds another net around "
        f"them; {way_out}."
    )


def _word(config: Mapping[str, Any]) -> str | None:
    named = " ".join(map(str, config.get("architectures") or [])).lower()
    return next((method for word, method in METHOD_WORDS.items() if word in named), None)


def _engines(config: Mapping[str, Any], formats: list[Format], fitting: Format | None) -> tuple[Engine, ...]:
    """Who loads somebody else's folder: those that load our form with the same architecture; vLLM, where that says nothing."""
    if not config.get("architectures") and not config.get("model_type"):
        return ()
    if "speculators_model_type" in config:
        return next((format.engines for format in formats if "speculators" in format.engine_names), ())
    if fitting is not None:
        found = fitting.engines
    else:
        found = tuple(
            engine
            for format in formats[:1]
            for engine in format.engines
            if (engine.name == "vllm") == (format.method != NOT_RENAMED)
        )
    nested = config.get("eagle_config") or {}
    after_norm = nested.get("norm_before_residual", config.get("norm_before_residual"))  # SGLang has no such block
    return tuple(engine for engine in found if not (after_norm and engine.name == "sglang"))
