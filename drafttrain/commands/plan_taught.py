"""Whether an objective teaches every weight of a drafter, asked of tensors without memory: the same question that training asks before its first step.

Which weights a loss depends on is read off its graph, and a graph needs shapes alone. What the target would say is therefore left out.

Shapes: N rows, D target width, V draft vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from drafttrain.divergences import Teacher
from drafttrain.drafters.base import DrafterNet
from drafttrain.losses import Objective, Student
from drafttrain.target.target import Target
from drafttrain.tasks.distill import require_taught
from drafttrain.types import Drafted, Layout, Term
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
        require_taught(target, net.to(target.device), _WithoutTarget(objective, len(vocabulary.ids)))
    except RuntimeError as error:  # of torch: something looks at a value, of which an outline has none
        return [f"whether the objective teaches every weight is seen when training starts ({type(error).__name__})"]
    return []


@dataclass(frozen=True)
class _WithoutTarget(Objective):
    """An objective that learns from a target which is not there."""

    objective: Objective
    words: int

    def counts(self, layout: Layout, depth: int) -> dict[str, float]:
        return self.objective.counts(layout, depth)

    def terms(
        self, drafted: Drafted, student: Student, teacher: Teacher, depth: int
    ) -> tuple[dict[str, Term], dict[str, Tensor]]:
        return self.objective.terms(drafted, student, _Shapes(self.words), depth)


@dataclass(frozen=True)
class _Shapes:
    """A teacher with nothing to say. (That of training switches automatic precision off, which there is none of on `meta`.)"""

    words: int

    def logits(self, final_ND: Tensor) -> Tensor:
        """[N, V]"""
        return final_ND.new_empty(len(final_ND), self.words)

    def log_mass(self, final_ND: Tensor, logits_NV: Tensor) -> Tensor:
        """[N]"""
        return logits_NV.new_empty(len(logits_NV))
