"""What a server is asked, and what its reply is worth.

The exact way: token ids of the prompt go out, token ids of the answer come back (`return_token_ids`: vLLM since 0.10.2, SGLang since
July 2026). Where ids do not come back, the answer's text is tokenised again; that is counted, because the target may have said the
same text in other tokens. Ids are believed only if they lie inside the vocabulary and spell the text beside them.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data_prep.engines import OpenAIServer
from drafttrain.errors import UserError
from drafttrain.target.load import Speaker
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DOUBTFUL = "token ids and text of the server's answer differ"
MANY_DOUBTS = 0.01
"""Share of a server's answers whose ids and text differ from which it speaks another tokenizer; detokenizers differ in rare corners."""


class Again(Exception):
    """A try that failed in a way in which the next one may not. `wait` is what the server asked for, in seconds."""

    def __init__(self, what: str, wait: float | None = None):
        super().__init__(what)
        self.wait = wait


@dataclass
class Checked:
    """Answers of one server."""

    answers: int = 0
    retokenised: int = 0
    doubtful: int = 0


class Interpreter:
    """Writes requests for a server and makes rollouts of its replies. Keeps count of what it saw of every server."""

    def __init__(self, config: OpenAIServer, target: Target | Speaker, seed: int):
        self.api, self.seed, self.vocab = config.api, seed, target.vocab
        self.arguments = target.chat.arguments
        self.tokenizer: Any = copy.deepcopy(target.tokenizer)  # used in a thread of its own
        self.end_ids = target.end_ids
        self.seen = {url: Checked() for url in config.bases}

    def body(self, request: Request, model: str, temperature: float, top_p: float) -> dict[str, Any]:
        """The JSON of a request. Everything that shapes the distribution is named: servers have defaults of their own for each model."""
        limit = "max_tokens" if self.api == "completions" else "max_completion_tokens"
        body: dict[str, Any] = {
            "model": model,
            limit: request.limit,
            "temperature": temperature,
            "top_p": top_p if temperature > 0 else 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "seed": stream_seed(self.seed, request.key),
            "stop_token_ids": sorted({*self.end_ids, *request.ends}),
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
        }
        if self.api == "completions":
            return body | {"prompt": list(request.ids)}
        body["messages"] = list(request.messages or ())
        if request.tools:
            body["tools"] = list(request.tools)
        return body | ({"chat_template_kwargs": self.arguments} if self.arguments else {})

    def rollout(self, request: Request, reply: Any, url: str) -> Rollout:
        """What the reply says, checked. Again: it is malformed. UserError: the server does not serve the recipe's target."""
        choice = _only_choice(reply)
        self._require_same_prompt(request, reply, choice, url)
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length", "tool_calls"):
            raise Again(f"finish_reason {finish!r}")
        seen = self.seen[url]
        seen.answers += 1
        text, whole = self._text(choice)
        ids = choice.get("token_ids")
        if ids is None:
            found = self._retokenise(request, text) if whole else None
            if found is None:
                return failure(request, "the server returned neither token ids nor the whole text of its answer")
            seen.retokenised += 1
            ids = found[: request.limit]
        else:
            self._require_vocabulary(ids, url)
            if whole and not self._spells(ids, text):
                seen.doubtful += 1
                if seen.doubtful > max(1, MANY_DOUBTS * seen.answers):
                    raise _another_tokenizer(
                        url, f"{seen.doubtful} of its {seen.answers} answers have token ids that spell another text"
                    )
                return failure(request, DOUBTFUL)
        return self._finished(request, ids, finish != "length", choice)

    def _text(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """(the answer's text, whether it is all of it): a chat server may have parsed reasoning or tool calls out of it."""
        if self.api == "completions":
            text, parsed = choice.get("text"), False
        else:
            message = choice.get("message")
            if not isinstance(message, dict):
                raise Again("a choice without a message")
            text = message.get("content")
            parsed = any(message.get(name) for name in ("reasoning", "reasoning_content", "tool_calls", "refusal"))
            if text is None and (parsed or "token_ids" in choice):
                return "", False
        if not isinstance(text, str):
            raise Again("a choice without text")
        return text, not parsed

    def _retokenise(self, request: Request, text: str) -> list[int] | None:
        """Token ids of an answer's text; None if characters of it are broken."""
        text = text.rstrip("\ufffd")  # a character that the limit cut in two
        if "\ufffd" in text:
            return None
        prompt = list(request.ids)
        # Behind its prompt first: some tokenizers write a text that stands alone with a space before it.
        ids = self._encode(self._decode(prompt) + text)
        return ids[len(prompt) :] if ids[: len(prompt)] == prompt else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _spells(self, ids: list[int], text: str) -> bool:
        """Equal but for white space and broken characters, which detokenizers that work token by token treat in their own ways."""
        wanted = _letters(text)
        return any(_letters(self._decode(ids[:stop])) == wanted for stop in (len(ids) - 1, len(ids)) if stop >= 0)

    def _require_vocabulary(self, ids: Any, url: str) -> None:
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise Again("token_ids that are no list of numbers")
        strange = [i for i in ids if not 0 <= i < self.vocab]
        if strange:
            raise _another_tokenizer(url, f"it answered token id {strange[0]}, and the target's vocabulary has {self.vocab:,}")

    def _require_same_prompt(self, request: Request, reply: dict[str, Any], choice: dict[str, Any], url: str) -> None:
        """vLLM's chat names the prompt's ids beside the choices, its completions and SGLang inside them; others count them (0: they do not)."""
        read = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        usage = reply.get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if (isinstance(read, list) and read != list(request.ids)) or (
            isinstance(count, int) and count not in (0, len(request.ids))
        ):
            got = len(read) if isinstance(read, list) else count
            raise UserError(
                f"{url} read prompt {request.key} as other tokens ({got}) than the recipe's target renders ({len(request.ids)}): it serves "
                "another model, or another chat template or arguments. Serve target.path with the same template, or use api: completions."
            )

    def _finished(self, request: Request, ids: list[int], stopped: bool, choice: dict[str, Any]) -> Rollout:
        """The answer up to its end of turn, which text has not and ids may not have."""
        ends = {*self.end_ids, *request.ends}
        first = next((number for number, token in enumerate(ids) if token in ends), None)
        if first is not None:
            ids, stopped = ids[: first + 1], True
        elif stopped and not (ids and ids[-1] == choice.get("stop_reason")):  # a server may have further ends of its own
            ids, stopped = self._closed(request, ids, choice, ends)
        if len(ids) > request.limit:
            raise Again(f"more tokens than the {request.limit} asked for")
        return rollout_of(request, ids, stopped)

    def _closed(self, request: Request, ids: list[int], choice: dict[str, Any], ends: set[int]) -> tuple[list[int], bool]:
        """With the end that the server says it stopped at, or the tokenizer's own, if the limit leaves room for it."""
        candidates = (choice.get("stop_reason"), choice.get("matched_stop"), self.tokenizer.eos_token_id, *sorted(ends))
        end = next((token for token in candidates if isinstance(token, int) and token in ends), None)
        return (ids, False) if end is None or len(ids) >= request.limit else ([*ids, end], True)


def stream_seed(seed: int, key: str) -> int:
    """31 bits for the server's random stream of one answer."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:4], "big") >> 1


def rollout_of(request: Request, answer: Sequence[int], stopped: bool, failed: str | None = None) -> Rollout:
    """A rollout as plain decoding would have made it: no draft was ever accepted."""
    ids = torch.tensor([*request.ids, *answer], dtype=torch.long)
    rounds = [0] * (len(answer) - 1)
    return Rollout(request.key, ids, len(request.ids), rounds, 0, stopped, torch.empty(0, dtype=torch.long), failed=failed)


def failure(request: Request, why: str) -> Rollout:
    """A prompt that nobody answered."""
    return rollout_of(request, [], False, why)


def _only_choice(reply: Any) -> dict[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list):
        raise Again("a reply without choices")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise Again(f"{len(choices)} choices instead of 1")
    return choices[0]


def _letters(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())


def _another_tokenizer(url: str, evidence: str) -> UserError:
    return UserError(f"{url} answers in another tokenizer than the recipe's target has: {evidence}. Serve target.path there.")
