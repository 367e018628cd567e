"""What block drafters that tie their slots together share: a small head of rank r beside the target's, and logits in two parts.

The backbone knows the states of all slots before a token is drafted (block.py); a small head then reads the token before each one. So the product
with the large head serves all slots of a block at once, and only the small one is left to do token by token:

    known_k       = f(h_k)                    # one product for all depths k
    q_k(. | prev) = g(known_k, prev)          # a token at a time

Letters: N rows, H width, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drafttrain.drafters.block import BlockNet, _BlockDrafter
from drafttrain.errors import UserError


@dataclass(frozen=True)
class _TiedBlockDrafter(_BlockDrafter):
    """Options of the family."""

    rank: int = 256
    """Numbers by which the small head knows a token."""

    def __post_init__(self):
        super().__post_init__()
        if self.rank < 1:
            raise UserError(f"drafter.init_args.rank is {self.rank}, but must be at least 1.")


class TiedBlockNet(BlockNet):
    """A block whose slots speak with the target's head, corrected by what the token before was."""

    reads_last = True

    @property
    def per_word(self) -> int:
        """Weights read for each token it can say: the small head's, and the target's."""
        return super().per_word + self.shape.target_hidden

    def logits(self, hidden_NH: Tensor, prev_N: Tensor) -> Tensor:
        return self.logits_given(self.known(hidden_NH), prev_N)

    def known(self, hidden_NH: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def logits_given(self, known: Sequence[Tensor], prev_N: Tensor) -> Tensor:
        raise NotImplementedError
