"""A ragged key/value cache for unmodified transformers models.

Every row of the batch has its own length. Before a forward pass the caller says at which slots each row writes; the layers
scatter there and hand back whole buffers, and the caller's mask says what may be seen. Dropping rejected tokens is then only
a matter of lengths: their slots are overwritten next round, and a query never looks behind its own slot.

Letters: B rows of the cache, R rows of this pass, G key/value heads, M slots, T tokens of this pass, D head width.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Addresses:
    """Where this pass writes and how far it reads; shared by all layers."""

    def __init__(self, rows: int, slots: int):
        self.batch, self.capacity = rows, slots
        self.slots_RT: Tensor | None = None
        self.rows_R: Tensor | None = None
        self.index_R1: Tensor | None = None
        """The rows of this pass as a column, all of them where `rows_R` is None."""
        self.extent = 0


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers [B, G, M, D]."""

    def __init__(self, addresses: Addresses):
        super().__init__()
        self.addresses = addresses
        self.updates = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.addresses.batch, key_states.shape[1], self.addresses.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write [R, G, T, D] at the addressed slots; return the first `extent` slots of the addressed rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.updates += 1
        where = self.addresses
        self.keys[where.index_R1, :, where.slots_RT] = key_states.transpose(1, 2)
        self.values[where.index_R1, :, where.slots_RT] = value_states.transpose(1, 2)
        keys, values = self.keys[:, :, : where.extent], self.values[:, :, : where.extent]
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
        self.addresses = Addresses(batch, capacity)
        super().__init__(layers=[RaggedLayer(self.addresses) for _ in range(layers)])

    def address(self, slots_RT: Tensor, extent: int, rows_R: Tensor | None = None) -> None:
        """Say where the next pass writes ([R, T] slots of rows `rows_R`, all rows if None) and that it reads slots < extent."""
        self.addresses.slots_RT, self.addresses.extent, self.addresses.rows_R = slots_RT, extent, rows_R
        rows = torch.arange(self.addresses.batch, device=slots_RT.device) if rows_R is None else rows_R
        self.addresses.index_R1 = rows[:, None]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.addresses.batch = len(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
