"""A target with so few tokens that every answer can be enumerated: what the whole engine says, by the thousand, against what the
target's own probabilities say.

Letters: V tokens, n answer tokens that are compared.
"""

import itertools
from collections import Counter

import torch
from decoding.verify_cases import chi_square
from decoding.verify_oracle import processed
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.decoding.engine import Engine
from drafttrain.decoding.methods import Method
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.target.target import ATTENTION, Target, own_attention
from drafttrain.types import Request, Rollout
from drafttrain.vocab import DraftVocabulary

WORDS = 9
ANSWER = 4
PROMPT = (3, 1, 4, 1, 5, 2, 6)


def small_target(tiny_llama: Target) -> Target:
    """A random Llama with 9 tokens, none of which ends an answer; template and tokenizer are lent and not used."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=64, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(ATTENTION)
    return Target(model, tiny_llama.chat, tiny_llama.identity, ())


def small_drafter(target: Target, words: int = WORDS):
    """A random drafter with the target's head, over the last `words` tokens."""
    torch.manual_seed(5)
    vocabulary = DraftVocabulary(torch.arange(WORDS - words, WORDS), WORDS)
    net = Eagle3(taps=[0, 1, 2], draft_vocab=None if words == WORDS else words).build(target, vocabulary)
    with torch.no_grad():
        for weight in net.midlayer.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)  # so that what it guesses depends on what it read
    return net.eval()


def answers(target: Target, net, method: Method, sampling: Sampling, rows: int, limit: int = ANSWER) -> list[Rollout]:
    """As many answers to one prompt, each with random numbers of its own."""
    engine = Engine(
        target,
        proposer=method.proposer(net, sampling),
        verify=method.verifier(sampling),
        sampling=sampling,
        slots=min(rows, 1000),
    )
    return list(engine.generate([Request(str(i), PROMPT, limit) for i in range(rows)]))


def enumerated(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every answer of four tokens, by the model's own forward pass and Python floats."""
    texts = list(itertools.product(range(WORDS), repeat=ANSWER - 1))
    ids = torch.tensor([(*PROMPT, *text) for text in texts])
    with own_attention(target.model), torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits[:, len(PROMPT) - 1 :].double()
    row = {text[:n]: logits[i, n].tolist() for i, text in enumerate(texts) for n in range(ANSWER)}
    behind = {text: processed(values, sampling) for text, values in row.items()}
    found = {(): 1.0}
    for _ in range(ANSWER):
        found = {(*text, x): p * v for text, p in found.items() for x, v in enumerate(behind[text])}
    return found


def p_values(found: list[Rollout], expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Chi-square of tokens 1 to 3, and of tokens 2 to 4."""
    seen = Counter(tuple(rollout.answer.tolist()) for rollout in found)
    result = []
    for part in (slice(0, 3), slice(1, 4)):
        counts, chances = torch.zeros(WORDS**3), torch.zeros(WORDS**3, dtype=torch.double)
        for text, p in expected.items():
            a, b, c = text[part]
            chances[(a * WORDS + b) * WORDS + c] += p
            counts[(a * WORDS + b) * WORDS + c] += seen[text]
        assert counts.sum() == len(found)
        result.append(chi_square(counts, len(found) * chances))
    return result[0], result[1]
