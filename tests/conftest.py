"""Tiny random targets of several architectures, built once per session and loaded the way a user's target is."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the commands that tests start: two test files run at once

import pytest
import torch
from tiny import ARCHITECTURES, build_target_folder

from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folders(tmp_path_factory):
    """name -> folder of a tiny random model, made when first asked for."""
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = build_target_folder(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def targets(target_folders):
    """name -> loaded tiny target (fp32, CPU)."""
    made = {}

    def target(name: str):
        if name not in made:
            made[name] = load_target(TargetConfig(path=str(target_folders(name))), device="cpu")
        return made[name]

    return target


@pytest.fixture(scope="session")
def tiny_llama(targets):
    return targets("llama")


@pytest.fixture(params=sorted(ARCHITECTURES))
def any_target(request, targets):
    return targets(request.param)
