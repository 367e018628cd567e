"""A target that speaks from a list of words, so that the data stage can be tested without a model, also in a subprocess.

Ids: 0 pad, 1 <|turn|>, 2 <|end|>, 3 <|other|>, then one id for every word. What it says depends on the request's key and the seed
only, and its features are a function of the token, so that every stored row can be recomputed.
"""

import random
import sys
import time
from pathlib import Path

import torch

from drafttrain.errors import UserError
from drafttrain.types import Identity, Rollout

SPECIAL = ["<pad>", "<|turn|>", "<|end|>", "<|other|>"]
WORDS = [
    a + b
    for a in ("ka", "lo", "mi", "nu", "ra", "se", "ti", "vo", "wu", "zy")
    for b in ("ban", "dor", "fel", "gim", "hus", "jot")
]
HIDDEN = 8


class FakeTokenizer:
    def __init__(self):
        self.words = SPECIAL + WORDS + ["unknown"]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.words.index(word) if word in self.words else len(self.words) - 1 for word in text.split()]

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        return " ".join(self.words[i] for i in ids if not (skip_special_tokens and i < len(SPECIAL)))


class FakeTarget:
    """Duck type of drafttrain.target.Target, as far as data_prep uses it."""

    def __init__(self, **identity):
        self.tokenizer = FakeTokenizer()
        self.vocab, self.hidden, self.layers, self.max_positions = len(self.tokenizer.words), HIDDEN, 6, 256
        self.dtype, self.device, self.end_ids = torch.float32, torch.device("cpu"), (2,)
        facts = {"path": "fake", "revision": "r1", "tokenizer": "t1", "template": "c1", "template_arguments": "{}"}
        self.identity = Identity(**{**facts, **identity}, layers=self.layers, hidden=self.hidden, vocab=self.vocab)

    def check_taps(self, taps) -> None:
        if max(taps) >= self.layers:
            raise UserError(f"taps {taps} are outside the layers")

    def render(self, messages: list[dict], tools=None) -> list[int]:
        if any(message["content"] == "forbidden words here" for message in messages):
            raise UserError("the chat template refused a chat")
        return [token for message in messages for token in (1, *self.tokenizer.encode(message["content"]), 2)] + [1]

    def user_prefix(self):
        return [1], (2,)


class FakeSpeech:
    """Duck type of data_prep.sources.Ask. `calls` counts the batches; `stop_after` fails in the middle of a later one."""

    def __init__(self, target: FakeTarget, seed: int = 0, stop_after: int | None = None, slow: float = 0.0):
        self.target, self.seed, self.stop_after, self.slow = target, seed, stop_after, slow
        self.calls = 0
        self.requests: list = []
        self.scripted: dict[str, list[int]] = {}

    def __call__(self, requests, temperature, top_p, taps):
        self.calls += 1
        order = list(requests)
        random.Random(self.calls).shuffle(order)  # completion order differs between runs; nothing may depend on it
        for number, request in enumerate(order):
            if self.stop_after is not None and self.calls > self.stop_after and number == 1:
                raise RuntimeError("killed here")
            time.sleep(self.slow)
            self.requests.append(request)
            yield self._rollout(request, temperature, taps)

    def _rollout(self, request, temperature: float, taps) -> Rollout:
        stream = random.Random(f"{request.key}:{self.seed}:{temperature}")
        words = range(len(SPECIAL), self.target.vocab - 1)
        said = self.scripted.get(request.key, [stream.choice(words) for _ in range(stream.randint(2, 20))] + [2])[: request.limit]
        ids = torch.tensor([*request.ids, *said])
        rollout = Rollout(
            request.key, ids, len(request.ids), [], 0, bool(said) and said[-1] == 2, torch.empty(0, dtype=torch.long)
        )
        if taps is not None:
            rollout.taps_TAD, rollout.final_TD = features_of(ids, taps)
        return rollout


def features_of(ids_T: torch.Tensor, taps) -> tuple[torch.Tensor, torch.Tensor]:
    """taps [T, A, D] and final [T, D]; zero in the last row, which no target reads. Whole numbers below 256 are exact in bf16."""
    final_TD = ids_T[:, None].float() + torch.arange(HIDDEN)
    taps_TAD = final_TD[:, None] + 10 * torch.tensor(list(taps), dtype=torch.float32)[:, None]
    final_TD[-1], taps_TAD[-1] = 0, 0
    return taps_TAD, final_TD


def check_kept(chat, taps_TAD: torch.Tensor, final_TD: torch.Tensor, same=torch.equal) -> int:
    """A chat read back from a store holds these features, in the rows that somebody may need; returns how many final states there are."""
    said, T = chat.supervised.tolist(), len(chat.ids)
    taught = [t for t in range(1, T - 1) if said[t] and said[t + 1]]
    last = max(taught, default=0)
    for t in range(T):
        assert same(chat.features.taps_BTAD[t].float(), taps_TAD[t] if t < last else torch.zeros_like(taps_TAD[t]))
        if t in taught:
            assert same(chat.features.final_BTD[t].float(), final_TD[t])
        else:
            assert chat.features.final_BTD[t].isnan().all()
    return len(taught)


def small_config(**changes):
    """24 self-written prompts, 4 held out, shards of 5."""
    from data_prep.config import PrepareConfig
    from data_prep.sources import SelfPrompts

    values = {
        "prompts": [SelfPrompts(count=24, max_tokens=30)],
        "held_out": 4,
        "max_tokens": 12,
        "max_prompt": 60,
        "held_out_max_tokens": 8,
        "chunk": 5,
    }
    return PrepareConfig(**{**values, **changes})


if __name__ == "__main__":  # python fake_target.py FOLDER SECONDS_PER_ANSWER [RANK WORLD START]: to be killed from outside
    from data_prep.pipeline import prepare
    from data_prep.team import Team

    fake = FakeTarget()
    prepare(
        small_config(),
        fake,
        Path(sys.argv[1]),
        taps=(1, 3),
        draft_vocab=16,
        ask=FakeSpeech(fake, slow=float(sys.argv[2])),
        team=Team(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]) if len(sys.argv) > 3 else Team(),
        say=lambda text: print(text, flush=True),
    )
