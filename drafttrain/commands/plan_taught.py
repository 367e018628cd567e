"""Whether an objective teaches every weight of a drafter, asked of tensors without memory: the same question that training asks before its first step.

Which weights a loss depends on is read off its graph, and a graph needs shapes alone.
"""

from drafttrain.drafters.base import DrafterNet
from drafttrain.losses import Objective
from drafttrain.target.target import Target
from drafttrain.tasks.distill import require_taught
from drafttrain.vocab import DraftVocabulary


def taught(target: Target, net: DrafterNet, vocabulary: DraftVocabulary, objective: Objective) -> list[str]:
    """Nothing where every trained weight is taught, a line where an outline cannot tell.

    Args:
        target: An outline, on `meta`.
        net: Built on `meta` for that target. What it knows of its vocabulary is made anew, from numbers.

    Raises:
        UserError: as training would, naming the parts that nothing teaches.
    """
    net.take_vocabulary(vocabulary)  # layouts are made on the CPU, and ask which tokens can be said
    try:
        require_taught(target, net.to(target.device), objective)
    except RuntimeError as error:  # of torch: something looks at a value, of which an outline has none
        return [f"whether the objective teaches every weight is seen when training starts ({type(error).__name__})"]
    return []
