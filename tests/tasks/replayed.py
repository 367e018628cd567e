"""Recorded steps without a GPU: a stand-in computes anew what a graph would replay, from the same memory into the same memory."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from drafttrain.tasks import distill, speed, train


def stand_in(recorded: list[str]):
    """A patch of `speed.record`; what is recorded is listed."""

    def record(compute, what, way_out, pool=None):
        with torch.random.fork_rng(devices=[]):
            found = compute()
        recorded.append(what)
        return SimpleNamespace(replay=torch.enable_grad()(compute), pool=lambda: "memory"), found

    return patch.object(speed, "record", record)


def steps_are_recorded():
    """Patches by which a training asked for speed.graph_step does so on a CPU, and compiles nothing."""
    plain = speed.make_score
    return (
        *(patch.object(module, "records_steps", lambda config, device: config.graph_step) for module in (distill, train)),
        patch.object(distill, "make_score", lambda *given, compile=False, **_: plain(*given[:4], compile=False)),
    )
