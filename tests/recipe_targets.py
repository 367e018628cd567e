"""The architectures that recipes are written for, as transformers configs: in their real sizes for the meta device, and shrunk.

Sizes are those of the models' own config.json files.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import VOCAB, build_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "hardware")

REAL: dict[str, Callable[[], PretrainedConfig]] = {
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "qwen3-8b": lambda: Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "llama3.1-8b": lambda: LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=128000, eos_token_id=[128001, 128008, 128009],
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
"""Folder of recipes -> config of their target."""


def shrunken(config: PretrainedConfig) -> PretrainedConfig:
    """The same kind of model with the same layers and rotary base, and as many queries for each key; narrow, and with few tokens. Behind
    the tokenizer's last one the embedding has padding rows, as real ones do."""
    small = copy.deepcopy(config)
    groups = config.num_attention_heads // config.num_key_value_heads
    sizes = {
        "vocab_size": VOCAB + 8, "hidden_size": 8 * groups, "intermediate_size": 48, "num_attention_heads": groups, "num_key_value_heads": 1,
        "head_dim": 8, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    for name, value in sizes.items():
        setattr(small, name, value)
    return small


def save_target(config: PretrainedConfig, folder: Path) -> Path:
    """A folder as the Hub has it, with random weights. Returns the folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
