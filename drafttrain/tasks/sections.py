"""The sections that a training reads, and what of them decides its numbers."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

from drafttrain.data.store import TokenStore
from drafttrain.data.stream import DataConfig
from drafttrain.drafters.base import DrafterConfig
from drafttrain.losses import Objective
from drafttrain.target.config import TargetConfig
from drafttrain.target.identity import COMPARED
from drafttrain.tasks.checkpoint_config import CheckpointConfig
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.tasks.on_policy_config import OnPolicyConfig
from drafttrain.tasks.optimizer import OptimizerConfig
from drafttrain.tasks.speed_config import SpeedConfig


@dataclass(frozen=True)
class Sections:
    """The recipe's sections that training reads."""

    target: TargetConfig
    drafter: DrafterConfig
    objective: Objective
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    trainer: dict[str, Any]
    speed: SpeedConfig
    on_policy: OnPolicyConfig | None = None
    """None trains on the stored answers."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def max_steps(self) -> int:
        return self.trainer["max_steps"]


def recipe_facts(sections: Sections, store: TokenStore) -> dict[str, Any]:
    """What decides the numbers of a run: it may not change between a checkpoint and what goes on from it."""
    identity = store.manifest.identity
    return {
        "target": {name: getattr(identity, name) for name in COMPARED},
        "drafter": facts_of(sections.drafter),
        "objective": facts_of(sections.objective),
        "data": {name: getattr(sections.data, name) for name in ("length", "seed", "feature_dtype")},
        "optimizer": dataclasses.asdict(sections.optimizer),
        "checkpoint.start": sections.checkpoint.start,  # null and a checkpoint from before this key are the same
        "on_policy": _on_policy_facts(sections.on_policy),
        "lora": None if sections.lora.rank is None else facts_of(sections.lora),
        "chats": {
            "count": len(store),
            "tokens": store.manifest.tokens,
            "keys": hashlib.sha256("\n".join(store.keys).encode()).hexdigest()[:16],
        },
    }


def _on_policy_facts(config: OnPolicyConfig | None) -> dict[str, Any] | None:
    """All but how many prompts are answered at once, which changes no answer."""
    return None if config is None else {name: value for name, value in facts_of(config).items() if name != "slots"}


def facts_of(config: Any) -> Any:
    """A config as JSON can hold it, with the name of every class; the parts of a list of configs stand under their numbers."""
    if isinstance(config, list | tuple) and any(dataclasses.is_dataclass(part) for part in config):
        return {str(number): facts_of(part) for number, part in enumerate(config)}
    if dataclasses.is_dataclass(config):
        values = {field.name: facts_of(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {"class": type(config).__name__, **values}
    return config
