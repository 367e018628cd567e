"""Faults that an attempt to break heads found. One is known and not mended yet: who mends it takes its mark away."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from drafttrain.decoding.calibrate import fingerprint
from drafttrain.decoding.methods import Chain
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.heads import Medusa
from drafttrain.drafters.trim import trim
from drafttrain.layouts import one_chat
from drafttrain.target.target import ATTENTION, Target
from drafttrain.validation.bench import Benchmark
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.bench_questions import Question
from drafttrain.vocab import DraftVocabulary


def medusa(target, **arguments):
    torch.manual_seed(0)
    return Medusa(heads=2, **arguments).build(target, DraftVocabulary.full(target.vocab)).eval()


def test_a_trimmed_drafter_does_not_take_the_acceptance_of_the_whole_one(tiny_llama):
    net = medusa(tiny_llama)
    assert fingerprint(net) != fingerprint(trim(net, tiny_llama, DraftVocabulary(torch.arange(90), tiny_llama.vocab)))


def test_a_bench_that_names_no_longest_draft_goes_as_far_as_the_drafter(tiny_llama):
    question = Question("a", "talk", ({"role": "user", "content": "two"},))
    Benchmark(tiny_llama, medusa(tiny_llama), [question], BenchConfig(methods=[Chain(2)]))


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_a_temperature_is_a_number(temperature):
    with pytest.raises(Exception, match="temperature"):
        Sampling(temperature=temperature)


@pytest.mark.xfail(
    strict=True, reason="a head of its own begins as the target's matrix without the factor of the target's logits"
)
def test_a_head_of_its_own_begins_by_saying_what_a_scaled_target_says(tiny_llama):
    sizes = dict(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=8.0, initializer_range=0.3))
    model.set_attn_implementation(ATTENTION)
    target = Target(model, tiny_llama.chat, tiny_llama.identity, ())
    sequences = one_chat(torch.randint(0, 50, (20,)), 3)
    features, said = target.read_packed(sequences, ()), []
    for own_heads in (False, True):
        net = medusa(target, own_heads=own_heads)
        drafted = net.rows(sequences, features, net.layout(sequences))
        said.append(net.logits(drafted.hidden_NH, drafted.prev_N).softmax(-1))
    torch.testing.assert_close(said[1], said[0])
