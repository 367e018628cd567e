"""Builds the tiny random targets that the tests use: a byte-level tokenizer, a ChatML-like template, random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drafttrain.types import Features

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what is two plus two, and why is it four?",
    "name three rivers that flow north",
]
VOCAB = 320
COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
)  # fmt: skip
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**COMMON, sliding_window=6, final_logit_softcapping=8.0, query_pre_attn_scalar=8)
    ),
}


def first(features: Features, count: int) -> Features:
    """The first rows."""
    return Features(features.taps_BTAD[:, :count], features.final_BTD[:, :count])


def rows_of(features: Features, rows) -> Features:
    """Some rows of the batch."""
    return Features(features.taps_BTAD[rows], features.final_BTD[rows])


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """On a GPU: whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def build_target_folder(name: str, folder: Path, seed: int = 0) -> Path:
    """Save a random model of the named architecture with its tokenizer; returns the folder."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name]()
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
