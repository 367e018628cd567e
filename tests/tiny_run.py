"""Builds the data folder of a tiny run: random ragged chats of the tiny target, in real token stores."""

from collections.abc import Sequence
from pathlib import Path

import torch

from drafttrain.data.shards import Chat, write_shard
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.types import Features, Sequences


def ragged_chats(count: int, vocab: int, seed: int = 0, longest: int = 40) -> list[Chat]:
    """Chats of 8 to `longest` tokens; a prompt, an answer, and in every third a second turn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    chats = []
    for index in range(count):
        length = draw(8, longest + 1)
        ids = torch.randint(3, vocab, (length,), generator=generator)
        supervised = torch.arange(length) >= draw(2, length - 3)
        if index % 3 == 0:
            supervised[length // 2 : length // 2 + 2] = False
            supervised[1:4] = True
        chats.append(Chat(f"chat-{index}", ids, supervised))
    return chats


def with_features(target, chats: Sequence[Chat], taps: tuple[int, ...]) -> list[Chat]:
    """The chats with what the target computes while reading each of them alone."""
    found = []
    for chat in chats:
        T = len(chat.ids)
        alone = Sequences(chat.ids[None], chat.supervised[None], torch.arange(T)[None], torch.zeros(1, T, dtype=torch.int64))
        features = target.read_packed(alone, taps)
        found.append(Chat(chat.key, chat.ids, chat.supervised, Features(features.taps_BTAD[0], features.final_BTD[0])))
    return found


def write_store(folder: Path, chats: Sequence[Chat], identity, taps: Sequence[int] | None = None) -> TokenStore:
    """A finished store of two shards."""
    folder.mkdir(parents=True)
    half = len(chats) // 2
    for index, part in enumerate((chats[:half], chats[half:])):
        write_shard(folder, index, part, {"in": len(part), "kept": len(part), "dropped": {}})
    tokens = sum(len(chat.ids) for chat in chats)
    supervised = sum(int(chat.supervised.sum()) for chat in chats)
    rows = {"in": len(chats), "kept": len(chats), "dropped": {}}
    Manifest(
        identity, None if taps is None else list(taps), None if taps is None else "bfloat16", rows, 2, tokens, supervised, {}
    ).write(folder)
    return TokenStore.open(folder)
