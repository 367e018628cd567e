"""On-policy training with the real engine: what must not change its numbers does not, and its rollouts are the target's own answers."""

import pytest
import torch
from on_policy_forms import FORMS, SMALL, Stop, form_of, make_run
from safetensors.torch import load_file
from tiny_run import logged, start

from drafttrain.errors import UserError


@pytest.fixture(params=FORMS, ids=list(FORMS))
def form(request):
    return form_of(request.param)


@pytest.fixture
def llama(target_folders):
    return target_folders("llama")


def weights(run):
    return load_file(run / "checkpoints" / "last_drafter" / "drafter.safetensors")


def test_accumulations_equal_one_batch(tmp_path, tiny_llama, llama, form):
    narrow, wide = (make_run(tmp_path / name, tiny_llama) for name in ("narrow", "wide"))
    start(narrow, llama, trainer={"accumulate_grad_batches": 4}, **form)
    start(wide, llama, data={"rows": 4}, **form)
    for name in ("train/loss", "train/top1_depth_1", "rollout/tau", "rollout/staleness"):
        a, b = logged(narrow, name), logged(wide, name)
        assert a == pytest.approx(b, rel=1e-5), name
    assert all(torch.allclose(value, weights(wide)[name], rtol=1e-4, atol=1e-5) for name, value in weights(narrow).items())


@pytest.mark.parametrize("told_at", [0, 1, 2, 3])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, tiny_llama, llama, form, told_at):
    """Stopped before, at and behind a refresh."""
    whole, broken = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "broken"))
    start(whole, llama, trainer={"max_steps": 6}, **form)
    start(broken, llama, trainer={"max_steps": 6, "callbacks": [Stop(told_at)]}, **form)
    assert len(logged(broken)) < 6
    start(broken, llama, trainer={"max_steps": 6}, **form)
    assert logged(broken) == logged(whole)
    assert all(torch.equal(value, weights(broken)[name]) for name, value in weights(whole).items())


def test_a_random_drafter_is_refused(tmp_path, tiny_llama, llama):
    run = make_run(tmp_path / "run", tiny_llama)
    with pytest.raises(UserError, match=r"checkpoint\.start is null.*on_policy\.from_random"):
        start(run, llama, on_policy=SMALL | {"from_random": False})
