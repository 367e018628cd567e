"""Judgements on answers, on token ids and on text: each gives the reason why an answer is dropped, or None.

Nothing is dropped by default except empty answers: a loop or a truncated answer is what the target says, and a drafter served
greedily will meet both.
"""

import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from drafttrain.errors import UserError

LOOP_RUN = 8
"""Tokens of a run whose second occurrence counts as repeated."""


@dataclass(frozen=True)
class QualityConfig:
    """Which answers are dropped. Every drop is counted by its reason."""

    truncated: str = "keep"
    """keep or drop answers that were cut at max_tokens."""
    max_repeated: float = 1.0
    """Drop answers whose share of repeated runs of 8 tokens is above this; 1 = off. Loops of a small target reach 0.7."""
    min_same_script: float = 0.0
    """Drop answers with a smaller share of letters in the scripts of the question (a Latin answer to a Chinese question); 0 = off."""

    def __post_init__(self) -> None:
        if self.truncated not in ("keep", "drop"):
            raise UserError(f"prepare.quality.truncated is {self.truncated!r}; it must be keep or drop.")
        for name in ("max_repeated", "min_same_script"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"prepare.quality.{name} is {getattr(self, name)}; it must be from 0 to 1.")


def fault_of_answer(config: QualityConfig, ids: list[int], text: str, question: str, stopped: bool) -> str | None:
    """Why an answer is dropped, or None."""
    if config.truncated == "drop" and not stopped:
        return "answer cut at max_tokens"
    if config.max_repeated < 1 and repeated_share(ids) > config.max_repeated:
        return "answer loops"
    if config.min_same_script > 0 and same_script_share(text, question) < config.min_same_script:
        return "answer in another script"
    return None


def repeated_share(ids: list[int], run: int = LOOP_RUN) -> float:
    """Share of the runs of `run` tokens that stood earlier in the same answer; 0 for answers shorter than a run."""
    runs = [tuple(ids[i : i + run]) for i in range(len(ids) - run + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def same_script_share(text: str, question: str) -> float:
    """Share of the text's letters that belong to a script of the question; 1 where one of the two has no letters."""
    wanted, found = set(scripts(question)), scripts(text)
    total = sum(found.values())
    if not wanted or not total:
        return 1.0
    return sum(count for script, count in found.items() if script in wanted) / total


def scripts(text: str) -> Counter[str]:
    """Letters by script, as the first word of their Unicode name (LATIN, CYRILLIC, CJK, HIRAGANA, ...)."""
    return Counter(_script(letter) for letter in text if letter.isalpha())


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split()[0].split("-")[0]
