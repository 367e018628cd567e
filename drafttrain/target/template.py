"""Rendering chats with the target's own template: what the target reads is decided here and nowhere else."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from drafttrain.errors import UserError

MARK = "\u2063drafttrain-mark\u2063"  # invisible separators: no template strips or escapes them


class ChatTemplate:
    """A tokenizer with a chat template and the arguments that every rendering gets."""

    def __init__(self, tokenizer, arguments: dict[str, Any], path: str, end_ids: Iterable[int] = ()):
        self.tokenizer, self.arguments, self.path = tokenizer, arguments, path
        self.end_ids = {*end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        """Tokens that end an answer: the tokenizer's own, and those that the target's generation config names."""

    def text(self, messages: list[dict], generation_prompt: bool, tools: list[dict] | None = None) -> str:
        """The rendered chat; `tools` are JSON schemas of functions. Raises UserError where there is no template or it refuses the chat."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"target {self.path} has a tokenizer without a chat template, and chats cannot be rendered without one; "
                "use the instruct version of the model or add chat_template.jinja beside its tokenizer."
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.arguments
            )
        except Exception as error:  # templates raise whatever they like
            why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(f"the chat template of {self.path} refused a chat ({why}); check its roles and contents.") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text (the template writes its own special tokens)."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Token ids of a chat with the generation prompt at its end."""
        if not any(message.get("role") == "user" for message in messages):
            raise UserError("a chat has no user turn, so there is nothing to answer; give it a message with role 'user'.")
        return self.encode(self.text(messages, generation_prompt=True, tools=tools))

    def user_prefix(self) -> tuple[list[int], tuple[int, ...]]:
        """Token ids of an open user turn, and the first token of what the template writes after it."""
        text = self.text([{"role": "user", "content": MARK}], generation_prompt=False)
        before, mark, after = text.partition(MARK)
        if not mark:
            raise UserError(
                f"the chat template of {self.path} does not show the user's words as they are, so it cannot write prompts for itself; use prompts from a file."
            )
        return self.encode(before), tuple(self.encode(after.lstrip())[:1])

    def hash(self) -> str:
        return digest(self.tokenizer.chat_template or "")

    def vocabulary_hash(self) -> str:
        vocabulary = self.tokenizer.get_vocab()
        return digest(json.dumps(sorted(vocabulary.items(), key=lambda item: item[1]), ensure_ascii=True))

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, sort_keys=True)


def digest(text: str) -> str:
    """A short hash for identities (collisions would need 2^32 different targets)."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
