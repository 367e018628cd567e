"""What an engine holds on the device while it answers, from tensors without memory: the same buffers that decoding makes, of the same shapes.

Shapes: B rows that decode at the same time, M slots of a row.
"""

from torch import Tensor

from drafttrain.decoding.batch import Batch, whole_blocks
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.decoding.verify import Match
from drafttrain.drafters.base import DrafterNet
from drafttrain.target.target import Target
from drafttrain.types import Request


def engine_buffers(
    target: Target, net: DrafterNet, drafts: int, rows: int, longest: int, keep_rounds: bool
) -> tuple[int, list[Tensor]]:
    """(M, buffers) of an engine that drafts chains and keeps features: keys and values of target and drafter, and what it records.

    Args:
        target, net: Outlines, on `meta`.
        longest: Tokens of the longest prompt and its answer.

    Raises:
        RuntimeError: of torch, where the target's code looks at a value, of which an outline has none.
    """
    proposer = ChainProposer(net, drafts)
    # The anchor and the drafts of a round, and another round before the host knows that a row has ended.
    slots = whole_blocks(longest + 1 + max(proposer.nodes, proposer.reach) + 1 + drafts)
    batch = Batch(target, proposer, Match(drafts, chain=True), Sampling(), rows, slots, net.needs.taps, True, keep_rounds)
    try:
        batch.admit([0], [Request("outline", (0,), 1)], whole_blocks(1))
    except NotImplementedError:  # of torch, at the end of it: the first token has no value. By then every buffer is there
        if not len(proposer.hidden_BH):
            raise
    recorded = [batch.features, batch.round_buffers, proposer.state]
    held = [vars(record) for record in recorded if record is not None]
    tensors = [value for fields in [*held, vars(batch), vars(proposer)] for value in fields.values() if isinstance(value, Tensor)]
    return slots, [*batch.cache.addresses.stacks, *tensors]


def bytes_as(buffers: list[Tensor], size: int) -> int:
    """Their bytes, where a floating-point number takes `size` of them."""
    return sum(x.numel() * (size if x.is_floating_point() else x.element_size()) for x in buffers)
