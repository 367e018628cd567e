"""Plain judgements on text: its words, its shingles, and whether a sampled prompt is fit to be asked."""

import bisect
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
"""A word; in scripts written without spaces, a character."""
MARKER = re.compile(
    r"<\|[^<>|]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>|^\s*#*\s*(?:user|assistant|system|human)\s*(?::|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""Spellings of turns and special tokens that a model copies from its template."""
RUN = re.compile(r"(\S)\1{9}")
"""One character ten times in a row."""

THOUGHT_ENDS = "</think>"

REPEATED_WORDS = 4
REPEATS = 3
"""The same four words three times are a loop."""
DISTINCT_FROM = 20
"""Words from which the share of distinct words is looked at."""
DISTINCT = 0.35
"""English prose of 50 words has about 0.7; loops fall to 0.2."""


def words(text: str) -> list[str]:
    """Lower-cased words without punctuation."""
    return WORD.findall(text.casefold())


def normal(text: str) -> str:
    """Equal for texts that differ in case, spacing and their last punctuation only ("2+2" and "2-2" are two questions)."""
    plain = " ".join(text.casefold().split())
    return plain.rstrip(".!?。！？ ") or plain


def fingerprint(*texts: str) -> bytes:
    """16 bytes that stand for texts in their `normal` form: a million are held to find duplicates among them."""
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(normal(text).encode() + b"\0")
    return digest.digest()


def shingles(text: str, size: int = 3) -> frozenset[tuple[str, ...]]:
    """All runs of `size` words; a shorter text is one run."""
    found = words(text) or [text.strip()]
    return frozenset(tuple(found[i : i + size]) for i in range(max(len(found) - size + 1, 1)))


def jaccard(left: frozenset, right: frozenset) -> float:
    """Shared / all, in 0..1; 1 for two empty sets."""
    return len(left & right) / len(left | right) if left or right else 1.0


def fault(text: str, min_words: int) -> str | None:
    """Why a sampled prompt is not fit to be asked, or None."""
    if "\ufffd" in text or any(not c.isprintable() and not c.isspace() for c in text):
        return "broken characters"
    if MARKER.search(text):
        return "role marker inside"
    found = words(text)
    if len(found) < min_words:
        return f"shorter than {min_words} words"
    runs = Counter(tuple(found[i : i + REPEATED_WORDS]) for i in range(len(found) - REPEATED_WORDS + 1))
    if RUN.search(text) or any(count >= REPEATS for count in runs.values()):
        return "repeats itself"
    if len(found) >= DISTINCT_FROM and len(set(found)) / len(found) < DISTINCT:
        return "repeats itself"
    return None


def tokens_through_thought(ids: Sequence[int], tokenizer) -> int:
    """Leading tokens up to and including the one that completes `</think>`; 0 where it does not occur."""

    def closed(count: int) -> bool:
        return THOUGHT_ENDS in tokenizer.decode(ids[:count], skip_special_tokens=False)

    if not closed(len(ids)):
        return 0
    return bisect.bisect_left(range(1, len(ids) + 1), True, key=closed) + 1
