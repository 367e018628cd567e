"""What a published folder's layout says of itself, so that one reader can fill nets of ours from any.

A layout says for each of *our* names which tensors of the file stand for it; so a fault can be told in the file's own words, and nothing that is
not asked for is taken in silence. The layouts themselves: published.py.

Layers of the target: lists at the top level count as vLLM does, the residual stream behind k layers, our tap k - 1; lists in
`eagle_config` and block drafters' `target_layer_ids` count 0-based outputs, as taps do. Engines read taps in ascending order whatever the list's.

Letters: Vd rows of the head.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

HEADS = (
    "lm_head.weight", "lm_head.up.weight", "markov_head.markov_w2.weight", "candidate_selector.successor_codebook.weight",
)  # fmt: skip
"""What our drafters call the matrix with a row for each token."""


@dataclass
class Published:
    """A folder's drafter, in the words of its layout."""

    layout: str
    """For people."""
    drafter: str
    """Our class for it."""
    config: dict[str, Any]
    """What its config.json says of its block."""
    tensors: dict[str, Tensor]
    theirs: Callable[[str], list[str]] = lambda name: [name]
    """Our name -> the tensors of the file that stand for it, joined side by side if several."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the recipe's drafter must say to be the same net; taps of None are the usual ones."""
    trained: dict[str, Any] = field(default_factory=dict)
    """Options that another training of the same net may change, as this one had them."""
    refusals: list[str] = field(default_factory=list)
    """Why no recipe can be the same net."""
    zeros: str = r"(?!)"
    """Tensors that a file may lack where they are nothing but zeros (a pattern of full names)."""
    left_out: str = r"(?!)"
    """Tensors that have no place in our nets by design (a pattern of full names)."""
    lost: dict[str, str] = field(default_factory=dict)
    """A weight that ours have by an option -> what is lost without it, for people; its tensors are then left out."""
    raw_embeddings: str | None = None
    """The tensor whose left half reads embeddings as they stand in the target's table; ours reads them as the target does."""
    logits: tuple[float, float | None] | None = None
    """The factor and the cap that the target's logits have where it adds its own to them; None where it adds nothing."""
    notes: tuple[str, ...] = ()
    """What its reader has to guess, for people."""

    @property
    def rows(self) -> int | None:
        """Vd of its head; None where it speaks with the target's."""
        names = [name for ours in HEADS for name in self.theirs(ours)]
        return next((len(self.tensors[name]) for name in names if name in self.tensors and not self.skips(name)), None)

    def skips(self, name: str) -> bool:
        """Whether this tensor has no place in our nets by design."""
        return re.fullmatch(self.left_out, name) is not None


def numbers(pattern: str, tensors: dict[str, Tensor]) -> list[int]:
    """The distinct numbers that a pattern's one group matches among the names, ascending."""
    return sorted({int(match[1]) for name in tensors if (match := re.fullmatch(pattern, name))})


def masked_by(token: int | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """The option that says which token stands for a masked one, and a note where the folder does not."""
    if token is None:
        return {}, (
            "its config.json does not say which token stands for a masked one: the recipe's (drafter.init_args.mask_token) is used",
        )
    return {"mask_token": token}, ()
