"""Which fields of an identity must agree, and how a difference is said."""

from collections.abc import Mapping
from dataclasses import asdict

from drafttrain.types import Identity

COMPARED = {
    "revision": "the revision of the target's weights",
    "tokenizer": "the tokenizer",
    "template": "the chat template",
    "template_arguments": "target.template_arguments",
    "layers": "the number of layers",
    "hidden": "the hidden width",
    "vocab": "the vocabulary size",
}
"""Field of `Identity` -> what it is, in the user's words. The path is for people and may differ."""


def differences(made_with: Mapping, now: Identity) -> list[str]:
    """One clause for each field in which the target at hand differs from the one something was made with."""
    here = asdict(now)
    return [
        f"{words} ({made_with.get(name)} there, {here[name]} in the recipe)"
        for name, words in COMPARED.items()
        if made_with.get(name) != here[name]
    ]
