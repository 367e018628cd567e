"""Builds the data folder of a tiny run: random ragged chats of the tiny target, in real token stores."""

import csv
from collections.abc import Sequence
from pathlib import Path

import torch

from drafttrain.data.shards import Chat, write_shard
from drafttrain.data.store import Manifest, TokenStore
from drafttrain.data.stream import DataConfig
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.optimizer import OptimizerConfig
from drafttrain.tasks.speed_config import SpeedConfig
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


def write_store(
    folder: Path,
    chats: Sequence[Chat],
    identity,
    taps: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    final: str = "taught",
) -> TokenStore:
    """A finished store of two shards."""
    folder.mkdir(parents=True)
    half = len(chats) // 2
    for index, part in enumerate((chats[:half], chats[half:])):
        write_shard(folder, index, part, {"in": len(part), "kept": len(part), "dropped": {}}, dtype, final=final)
    tokens = sum(len(chat.ids) for chat in chats)
    supervised = sum(int(chat.supervised.sum()) for chat in chats)
    rows = {"in": len(chats), "kept": len(chats), "dropped": {}}
    Manifest(
        identity, None if taps is None else list(taps), None if taps is None else dtype, rows, 2, tokens, supervised, {}
    ).write(folder)
    return TokenStore.open(folder)


def make_run(
    folder: Path,
    target,
    features: Sequence[int] | None = None,
    count: int = 23,
    dtype: str = "bfloat16",
    final: str = "taught",
) -> Path:
    """A run folder as data_prep leaves it. `features`: layers whose outputs are kept; `final`: whose final states."""
    words = len(target.tokenizer)
    chats = ragged_chats(count, words)
    train_chats = chats if features is None else with_features(target, chats, tuple(features))
    write_store(folder / "data" / "train", train_chats, target.identity, features, dtype, final)
    write_store(folder / "data" / "held_out", ragged_chats(4, words, seed=1, longest=16), target.identity)
    return folder


def start(run_folder: Path, target_folder: Path, topology=None, **changes) -> Path:
    """Calls `train` with tiny sections. `changes`: section name -> values that replace some of its fields, or a whole drafter."""
    from drafttrain.drafters.base import DrafterConfig
    from drafttrain.drafters.eagle3 import Eagle3
    from drafttrain.losses import Distillation, Objective
    from drafttrain.target.config import TargetConfig
    from drafttrain.tasks.lora_config import LoraConfig
    from drafttrain.tasks.on_policy_config import OnPolicyConfig
    from drafttrain.tasks.train import train
    from drafttrain.topology import Topology

    given = {
        "target": {"path": str(target_folder)},
        "drafter": {"taps": [0, 2, 3], "depth": 3, "draft_vocab": 200},
        "data": {"length": 48, "seed": 7},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "checkpoint": {"every": 1000, "tau_every": 1000, "tau_prompts": 0},
        "trainer": {"max_steps": 4, "log_every_n_steps": 1},
        "speed": {},
    }
    drafter, objective, on_policy = changes.pop("drafter", {}), changes.pop("objective", {}), changes.pop("on_policy", None)
    lora = changes.pop("lora", None)
    sections = {name: values | changes.get(name, {}) for name, values in given.items()}
    return train(
        run_folder=run_folder,
        target=TargetConfig(**sections["target"]),
        drafter=drafter if isinstance(drafter, DrafterConfig) else Eagle3(**sections["drafter"] | drafter),
        objective=objective if isinstance(objective, Objective) else Distillation(**objective),
        data=DataConfig(**sections["data"]),
        optimizer=OptimizerConfig(**sections["optimizer"]),
        checkpoint=CheckpointConfig(**sections["checkpoint"]),
        trainer=sections["trainer"],
        topology=Topology() if topology is None else topology,
        speed=SpeedConfig(**sections["speed"]),
        on_policy=None if on_policy is None else OnPolicyConfig(**on_policy),
        lora=None if lora is None else LoraConfig(**lora),
    )


def logged(run_folder: Path, name: str = "train/loss") -> dict[int, float]:
    """Step -> value, over all starts of a run; a later start's value wins."""
    found = {}
    for file in sorted((run_folder / "logs").glob("version_*/metrics.csv")):
        with open(file) as stream:
            found |= {int(row["step"]): float(row[name]) for row in csv.DictReader(stream) if row.get(name)}
    return found
