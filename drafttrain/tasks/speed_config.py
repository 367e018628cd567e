"""What the recipe says about making a training step faster without changing what it computes. No heavy imports."""

import os
import shutil
from dataclasses import dataclass
from typing import Any

from drafttrain.errors import UserError
from drafttrain.tasks.strategy import zero_stage


@dataclass(frozen=True)
class SpeedConfig:
    """Belongs to the machine, so the hardware recipes set it."""

    compile: bool = False
    """Compile the drafter's forward pass and the objective into fused kernels (torch.compile). Takes a minute when training starts, and again when rows
    first have drafts in another quarter of their length. Not used on policy, where every step has other sizes."""
    cpp_wrapper: bool = False
    """With `compile`: let compiled C++ instead of Python launch those kernels (torch's option of the same name), for small drafters, whose steps wait for
    launches. Needs a C++ compiler (the variable CXX, or g++), and another minute at the first start."""
    graph_step: bool = False
    """With `compile`, on a GPU: record the loss and its gradients as CUDA graphs and replay them, for small drafters, whose steps wait for launches (then
    `cpp_wrapper` gains nothing more). Layouts are filled up so that few sizes recur, each of which is recorded once, when a step's memory is needed twice;
    gradients are held twice. Not with fp16 or DeepSpeed ZeRO-3. Without a GPU, on policy and in `adapt` it changes nothing."""
    graph_target: bool = False
    """On a GPU, replay the target's forward pass as one CUDA graph; without a GPU it changes nothing."""
    overlap_target: bool = False
    """On a GPU, let the target read the next micro-batch while the drafter learns from this one, on a stream of its own; that takes the memory of both
    at once. Without a GPU, and where features are stored, it changes nothing."""
    shard_target: bool = False
    """Share each layer of the target out among all processes of the machine, which then read with it together (tensor parallelism): for a target that does
    not fit on one GPU. Without answers while training (checkpoint.tau_prompts: 0), graph_target and overlap_target."""
    fused_blocks: bool = False
    """On a GPU, let block drafters attend in one kernel that holds no scores (flex_attention): for long rows and many anchors. Without a GPU
    it changes nothing."""
    fused_rows: bool = False
    """On a GPU, let the target, and drafters that read a text (EAGLE, P-EAGLE, a stand-alone model), attend to it in one kernel that holds no scores: for
    rows of more than a few thousand tokens. Without a GPU it changes nothing."""
    checkpoint_activations: bool = False
    """Keep of each layer of the drafter, or each unrolled step, what it reads alone, and compute its inside again in the backward pass: less memory, one
    more forward pass of the drafter. Heads (Medusa, Hydra) have nothing of the kind."""

    @property
    def records(self) -> bool:
        """Whether a training on a GPU records its steps."""
        return self.compile and self.graph_step


def require_compiler(speed: SpeedConfig) -> None:
    """UserError if a step is to be compiled as C++ on a machine that cannot."""
    compiler = os.environ.get("CXX") or "g++"
    if speed.compile and speed.cpp_wrapper and shutil.which(compiler) is None:
        raise UserError(
            f"speed.cpp_wrapper: the step is to be compiled as C++, but {compiler} is not on this machine; install one, name yours in the variable CXX, "
            "or set speed.cpp_wrapper to false."
        )


def require_recordable(speed: SpeedConfig, trainer: dict[str, Any]) -> None:
    """UserError if a step is to be recorded that cannot be. `trainer`: the recipe's section, its classes built or not."""
    if not speed.graph_step:
        return
    precision = str(trainer.get("precision", "32-true"))
    if precision in ("16-mixed", "16", "16-true"):
        raise UserError(
            f"speed.graph_step: trainer.precision is {precision}, whose losses are scaled behind the recorded step, when its gradients are computed "
            "already; use bf16-mixed, or set speed.graph_step to false."
        )
    if zero_stage(trainer.get("strategy")) == 3:
        raise UserError(
            "speed.graph_step: trainer.strategy is DeepSpeed ZeRO-3, which brings each layer's weights when it is their turn, to another place each time; "
            "use recipes/hardware/zero2.yaml, or set speed.graph_step to false."
        )
    if not speed.compile:
        raise UserError(
            "speed.graph_step records compiled steps, but speed.compile is false; set it to true, or speed.graph_step to false."
        )
