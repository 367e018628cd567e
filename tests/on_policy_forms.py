"""The small on-policy runs that are tried alone and in several processes, by name, and what can go wrong in them."""

import os
import signal
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from tiny import build_target_folder
from tiny_run import ragged_chats, write_store
from transformers import AutoModelForCausalLM

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.tasks import rollout_files, rollouts

SMALL = {"rollouts": 8, "every": 2, "batch": 4, "buffer": 16, "max_tokens": 12, "slots": 4, "from_random": True}
EAGLE = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=200)
DFLASH = DFlash(block=4, layers=2, taps=[0, 2], mask_token=319, anchors=None)
FORMS = {
    "eagle3, rounds": (EAGLE, {"replay": "rounds"}, OnPolicyDistillation()),
    "dflash, rounds": (DFLASH, {"replay": "rounds"}, OnPolicyDistillation()),
    "eagle3, pooled, chunks": (EAGLE, {"replay": "rounds"}, OnPolicyDistillation(reduction="pooled", chunk=16)),
    "eagle3, text": (EAGLE, {"replay": "text"}, {}),
    "dflash, anchors": (DFLASH, {"replay": "anchors"}, {}),
    "eagle3, first rejection": (EAGLE, {"replay": "first_rejection"}, {}),
}


def form_of(name: str) -> dict:
    """The sections of a form, as `tiny_run.start` takes them."""
    drafter, on_policy, objective = FORMS[name]
    return {"drafter": drafter, "on_policy": SMALL | on_policy, "objective": objective, "optimizer": {"lr": 1e-2}}


def build_easy_target(folder):
    """A tiny target that mostly says one of eight tokens, so that a drafter which has learnt for a few steps has some of its drafts accepted."""
    build_target_folder("llama", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[100:108] *= 4
    model.save_pretrained(folder)
    return folder


def make_run(folder, target, shortest_prompt: int = 1):
    """Chats without the last token, which stands for a masked one."""
    chats = ragged_chats(23, len(target.tokenizer) - 1)
    chats = [chat for chat in chats if not chat.supervised[:shortest_prompt].any()]
    write_store(folder / "data" / "train", chats, target.identity)
    write_store(folder / "data" / "held_out", ragged_chats(4, len(target.tokenizer) - 1, seed=1, longest=16), target.identity)
    return folder


class Stop(pl.Callback):
    """Asks for a stop at the beginning of a micro-batch."""

    def __init__(self, micro_batch):
        self.micro_batch = micro_batch

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if batch_idx == self.micro_batch:
            task.stop.requested = True


@contextmanager
def trouble(rank: int, **kinds):
    """What happens to this rank while the context is open, each kind with its numbers."""
    with ExitStack() as stack:
        for kind, numbers in kinds.items():
            stack.enter_context(TROUBLES[kind](rank, *numbers))
        yield


def uneven(rank: int, short: int):
    """Rollouts of even number are of `short` tokens at most: with two processes all of those of rank 0."""
    asked = rollouts.requests

    def limited(prompts, order, numbers):
        found = asked(prompts, order, numbers)
        return [r if n % 2 else replace(r, limit=short) for n, r in zip(numbers, found, strict=True)]

    return patch.object(rollouts, "requests", limited)


def slow(rank: int, who: int, seconds: float):
    """One rank takes so much longer to answer for the first time."""
    answer, seen = rollouts.Roller.answer, []

    def late(self, prompts):
        if rank == who and not seen:
            time.sleep(seconds)
        seen.append(None)
        return answer(self, prompts)

    return patch.object(rollouts.Roller, "answer", late)


def told(rank: int, who: int, refresh: int):
    """One rank gets SIGTERM while it answers."""
    answer, seen = rollouts.Roller.answer, []

    def interrupted(self, prompts):
        seen.append(None)
        if rank == who and len(seen) == refresh + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer(self, prompts)

    return patch.object(rollouts.Roller, "answer", interrupted)


def killed(rank: int, who: int, refresh: int, records: int):
    """One rank is gone with SIGKILL as it saves rollouts: so many lanes are whole, and of the next one the tensors stand there."""
    seal, seen = rollout_files.write_sealed, []

    def dying(path, value):
        if rank == who and path.parent.name == f"refresh_{refresh:08d}" and path.name.startswith("lane_"):
            seen.append(path)
            if len(seen) > records:
                os.kill(os.getpid(), signal.SIGKILL)
        seal(path, value)

    return patch.object(rollout_files, "write_sealed", dying)


TROUBLES = {"uneven": uneven, "slow": slow, "told": told, "killed": killed}
