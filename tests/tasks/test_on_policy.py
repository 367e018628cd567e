"""On-policy training with the real engine: what must not change its numbers does not, and its rollouts are the target's own answers."""

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from tiny_run import logged, ragged_chats, start, write_store

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.replay_loss import OnPolicyDistillation

SMALL = {"rollouts": 8, "every": 2, "batch": 4, "buffer": 16, "max_tokens": 12, "slots": 4, "from_random": True}
EAGLE = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=200)
DFLASH = DFlash(block=4, layers=2, taps=[0, 2], mask_token=319, anchors=None)
FORMS = {
    "eagle3, rounds": (EAGLE, {"replay": "rounds"}, OnPolicyDistillation()),
    "dflash, rounds": (DFLASH, {"replay": "rounds"}, OnPolicyDistillation()),
    "eagle3, pooled, chunks": (EAGLE, {"replay": "rounds"}, OnPolicyDistillation(reduction="pooled", chunk=16)),
    "eagle3, text": (EAGLE, {"replay": "text"}, {}),
    "eagle3, first rejection": (EAGLE, {"replay": "first_rejection"}, {}),
}


@pytest.fixture(params=FORMS, ids=list(FORMS))
def form(request):
    drafter, on_policy, objective = FORMS[request.param]
    return {"drafter": drafter, "on_policy": SMALL | on_policy, "objective": objective}


@pytest.fixture
def llama(target_folders):
    return target_folders("llama")


def make_run(folder, target):
    """Chats without the last token, which stands for a masked one."""
    write_store(folder / "data" / "train", ragged_chats(23, len(target.tokenizer) - 1), target.identity)
    write_store(folder / "data" / "held_out", ragged_chats(4, len(target.tokenizer) - 1, seed=1, longest=16), target.identity)
    return folder


def weights(run):
    return load_file(run / "checkpoints" / "last_drafter" / "drafter.safetensors")


class Stop(pl.Callback):
    """Asks for a stop at the beginning of a micro-batch."""

    def __init__(self, micro_batch):
        self.micro_batch = micro_batch

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if batch_idx == self.micro_batch:
            task.stop.requested = True


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
