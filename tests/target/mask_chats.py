"""Chats, tokenizers and templates that the mask tests share."""

from itertools import groupby
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from drafttrain.target.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
TEXT = [
    "what is two plus two?\n\nIt is four.",
    "the answer is Paris\n\n",
    "<think>\nsum them up\n</think>\n\nfour",
    'the "name": "add"',
] * 9
SPECIAL = [
    "<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[SYSTEM]", "[/SYSTEM]", "[TOOL_CALLS]",
    "<|start|>", "<|channel|>", "<|message|>", "<|return|>",
]  # fmt: skip


def build(pieces: str = "lines") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer.

    pieces: lines (newlines stay together, as in most targets of today), trimmed (GPT-2's way: newlines are cut before a word, and
    offsets leave a leading space out), whole (merges over any boundary).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces == "trimmed")
    if pieces == "lines":
        words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    if pieces == "trimmed":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.add_tokens(["<tool_call>", "</tool_call>"])
    return fast


TOKENIZERS = {pieces: build(pieces) for pieces in ("lines", "trimmed", "whole")}


def chat_of(template: str, pieces: str = "lines", **arguments) -> ChatTemplate:
    """A tokenizer with a template: a file's name, or the template itself."""
    tokenizer = TOKENIZERS[pieces]
    tokenizer.chat_template = template if "{" in template else (TEMPLATES / f"{template}.jinja").read_text().rstrip("\n")
    return ChatTemplate(tokenizer, arguments, "toy")


def user(words: str) -> dict:
    return {"role": "user", "content": words}


def says(words, thought: str | None = None, **more) -> dict:
    return {"role": "assistant", "content": words, **({"reasoning_content": thought} if thought is not None else {}), **more}


def stretches(found) -> list[str]:
    """The supervised stretches as text."""
    groups = groupby(zip(found.pieces, found.mask, strict=True), key=lambda token: token[1])
    return ["".join(piece for piece, _ in group) for kept, group in groups if kept]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call>'
TWO = [user("what?"), says("It is four."), user("sure?"), says("Yes.")]
THOUGHTS = [user("what?"), says("four", "sum"), user("sure?"), says("yes", "again")]
INLINE = [user("what?"), says("<think>\nsum\n</think>\n\nfour"), user("sure?"), says("<think>\nagain\n</think>\n\nyes")]


def wrapped(before: str, after: str = "<|end|>") -> str:
    """A template that writes something before the words of every answer, and closes it."""
    answer = f"<|assistant|>{before}{{{{ m.content }}}}{after}"
    return (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}<|user|>{{{{ m.content }}}}<|end|>{{% endif %}}"
        "{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
