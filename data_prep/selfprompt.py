"""Self-prompting: the target is given an open user turn and writes the question itself.

Attempts are numbered and sampled in chunks of a fixed size, each kept in `attempts/<source>-00000.json`, and attempt 123 has
the random stream of its key "self-000123". So a killed run goes on with the chunk that was not finished and ends with the same
prompts.
"""

from typing import TYPE_CHECKING

from data_prep.text import fault, normal
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json_atomic
from drafttrain.types import Request

if TYPE_CHECKING:
    from data_prep.sources import SelfPrompts, Work


class Attempts:
    """Chunks of judged attempts, one after the other."""

    def __init__(self, source: "SelfPrompts", work: "Work"):
        self.source = source
        self.work = work
        self.prefix, self.closing = work.target.user_prefix()
        self.chunks = 0
        self._seen: set[str] = set()
        if len(self.prefix) + source.max_tokens > work.target.max_positions:
            raise UserError(
                f"SelfPrompts.max_tokens is {source.max_tokens} after an opening of {len(self.prefix)} tokens, but the target "
                f"reads at most {work.target.max_positions}; lower it."
            )

    def next(self) -> list[tuple[str, str, str | None]]:
        """(key, text, None or why it is dropped) of the next chunk, in order of the attempts' numbers."""
        path = self.work.folder / "attempts" / f"{self.source.name}-{self.chunks:05d}.json"
        if not path.exists():
            write_json_atomic(path, self._sample())
        rows = read_json(path, "the sampled prompts")
        self.chunks += 1
        return [(row["key"], *self._judge(row)) for row in rows]

    def _sample(self) -> list[dict]:
        numbers = range(self.chunks * self.work.chunk, (self.chunks + 1) * self.work.chunk)
        requests = [self._request(number) for number in numbers]
        rollouts = self.work.ask(requests, self.source.temperature, self.source.top_p, None)
        ids = {rollout.key: rollout.answer.tolist() for rollout in rollouts}
        return [{"key": request.key, "ids": ids[request.key]} for request in requests]

    def _request(self, number: int) -> Request:
        return Request(f"{self.source.name}-{number:06d}", tuple(self.prefix), self.source.max_tokens, ends=self.closing)

    def _judge(self, row: dict) -> tuple[str, str | None]:
        ended = row["ids"][-1] in (*self.work.target.end_ids, *self.closing)
        body = row["ids"][:-1] if ended else row["ids"]
        decode = self.work.target.tokenizer.decode
        text = decode(body, skip_special_tokens=True)
        if not ended:
            return text, f"did not end within {self.source.max_tokens} tokens"
        if text != decode(body, skip_special_tokens=False):
            return text, "special token inside"
        text = text.strip()
        why = fault(text, self.source.min_words)
        if why is None and normal(text) in self._seen:
            why = "duplicate"
        if why is None:
            self._seen.add(normal(text))
        return text, why
