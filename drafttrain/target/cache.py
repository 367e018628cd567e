"""A ragged key/value cache for unmodified transformers models.

Every row of the batch has its own length. Before a forward pass the caller says at which slots each row writes; the layers
scatter there and hand back whole buffers, and the caller's mask says what may be seen. Dropping rejected tokens is then only
a matter of lengths: their slots are overwritten next round, and a query never looks behind its own slot. Of a tree of tokens
the accepted path is moved to the front of the slots that the tree was written to.

Buffers keep their addresses for the life of the cache, so that a CUDA graph may hold them: fewer rows are a prefix of the batch.

Letters: L layers, B rows of the cache, R rows of this pass, G key/value heads, M slots, T tokens of this pass, K moved slots, D head width.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Addresses:
    """Where this pass writes and how far it reads; shared by all layers. Also owns the storage that the layers share."""

    def __init__(self, layers: int, rows: int, slots: int):
        self.layers, self.batch, self.capacity = layers, rows, slots
        self.width = rows
        """Rows in play: the first of the batch."""
        self.slots_RT: Tensor | None = None
        self.rows_R: Tensor | None = None
        self.index_R1: Tensor | None = None
        """The rows of this pass as a column, all those in play where `rows_R` is None."""
        self.extent = 0
        self.stacks: list[Tensor] = []
        """Storage [2L, B, G, M, D]: keys and values of all layers of one shape, so that one operation moves them all."""
        self._taken: list[int] = []

    def allocate(self, like_RGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, M, D] of the next layer with heads like these."""
        shape = (self.batch, like_RGTD.shape[1], self.capacity, like_RGTD.shape[3])
        for number, stack in enumerate(self.stacks):
            if stack.shape[1:] == shape and self._taken[number] + 2 <= len(stack):
                break
        else:
            number, stack = len(self.stacks), like_RGTD.new_zeros(2 * self.layers, *shape)
            self.stacks.append(stack)
            self._taken.append(0)
        start = self._taken[number]
        self._taken[number] += 2
        return stack[start], stack[start + 1]


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers [B, G, M, D]."""

    def __init__(self, addresses: Addresses):
        super().__init__()
        self.addresses = addresses
        self.updates = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[3] == value_states.shape[3]:
            self.keys, self.values = self.addresses.allocate(key_states)
        else:
            self.keys, _ = self.addresses.allocate(key_states)
            _, self.values = self.addresses.allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [R, G, T, D] at the addressed slots; return the first `extent` slots of the addressed rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.updates += 1
        where = self.addresses
        self.keys[where.index_R1, :, where.slots_RT] = key_states.transpose(1, 2)
        self.values[where.index_R1, :, where.slots_RT] = value_states.transpose(1, 2)
        keys, values = self.keys[: where.width, :, : where.extent], self.values[: where.width, :, : where.extent]
        return (keys, values) if where.rows_R is None else (keys[where.rows_R], values[where.rows_R])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.addresses.extent, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.addresses.capacity


class RaggedCache(Cache):
    """`batch` rows of `capacity` slots for a model of `layers` layers."""

    def __init__(self, layers: int, batch: int, capacity: int):
        self.addresses = Addresses(layers, batch, capacity)
        super().__init__(layers=[RaggedLayer(self.addresses) for _ in range(layers)])

    def address(self, slots_RT: Tensor, extent: int, rows_R: Tensor | None = None) -> None:
        """Say where the next pass writes ([R, T] slots of rows `rows_R`, all rows in play if None) and that it reads slots < extent."""
        self.addresses.slots_RT, self.addresses.extent, self.addresses.rows_R = slots_RT, extent, rows_R
        rows = torch.arange(self.addresses.width, device=slots_RT.device) if rows_R is None else rows_R
        self.addresses.index_R1 = rows[:, None]

    def move(self, source_BK: Tensor, target_BK: Tensor) -> None:
        """Copy each row's slots `source` to its slots `target`, in all layers; a target may be another one's source."""
        width = self.addresses.width
        for stack in self.addresses.stacks:
            used = stack[:, :width]
            shape = (*used.shape[:3], source_BK.shape[1], used.shape[4])
            kept = used.gather(3, source_BK[None, :, None, :, None].expand(shape))
            used.scatter_(3, target_BK[None, :, None, :, None].expand(shape), kept)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order: they become the first of the batch."""
        for stack in self.addresses.stacks:
            for plane in stack:  # one after another: what is copied in between stays small
                plane[: len(rows)] = plane[rows]
        self.addresses.width = len(rows)

    def widen(self) -> None:
        """All rows of the batch are in play again; those that come back hold nothing of use."""
        self.addresses.width = self.addresses.batch
