"""Near-duplicates among a million prompts: MinHash signatures (Broder 1997), banded (locality-sensitive hashing).

    signature   128 minima of random permutations of a text's shingles; two texts agree in each with probability J, their Jaccard
                similarity
    band        r neighbouring minima; texts that agree in one band are compared exactly. Of b = 128 // r bands at least one agrees
                with probability 1 - (1 - J^r)^b

r is the largest at which a pair at the threshold is missed at most once in a hundred. Nothing is dropped by chance: chance only
decides which pairs are looked at. The bands of all prompts are one table of 8-byte hashes (0.7: r = 4, 256 bytes a prompt); an index of
Python objects, as datasketch.MinHashLSH keeps it, would take kilobytes a prompt.

Shapes: N prompts, B bands.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from data_prep.prompt import Prompt
from data_prep.text import jaccard, shingles

PERMUTATIONS = 128
MISSED = 0.01
MOST_COMPARED = 64
"""Kept prompts that one prompt is compared with: a template that fills a band for a whole data set must not make this quadratic."""


def near_repeats(prompts: Sequence[Prompt], threshold: float) -> dict[int, int]:
    """Index of each prompt that is at least this similar to an earlier one that stays -> the index of that one."""
    neighbours = _neighbours(_bands_NB((prompt.user for prompt in prompts), len(prompts), rows_of_band(threshold)))
    found: dict[int, int] = {}
    kept_in: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in sorted(neighbours):
        own = shingles(prompts[index].user)
        earlier = dict.fromkeys(other for bucket in neighbours[index] for other in kept_in[bucket])
        for other in list(earlier)[:MOST_COMPARED]:
            if jaccard(own, shingles(prompts[other].user)) >= threshold:
                found[index] = other
                break
        else:
            for bucket in neighbours[index]:
                kept_in[bucket].append(index)
    return found


def rows_of_band(threshold: float) -> int:
    """r, as above; 1 for thresholds so low that no r is good enough."""
    good = [r for r in range(1, PERMUTATIONS + 1) if (1 - threshold**r) ** (PERMUTATIONS // r) <= MISSED]
    return max(good, default=1)


def _bands_NB(texts: Iterable[str], count: int, rows: int) -> np.ndarray:
    """A hash of each band of each text, uint64."""
    from datasketch import MinHash  # type: ignore[import-untyped]  # loads scipy: only for who asks for it

    permutations = MinHash(num_perm=PERMUTATIONS).permutations
    factors_BR = np.random.default_rng(0).integers(1, 1 << 63, (PERMUTATIONS // rows, rows), dtype=np.uint64) | np.uint64(1)
    bands_NB = np.empty((count, PERMUTATIONS // rows), np.uint64)
    for index, text in enumerate(texts):
        signature = MinHash(num_perm=PERMUTATIONS, permutations=permutations, scheme="affine32")
        signature.update_batch([" ".join(shingle).encode() for shingle in shingles(text)])
        minima_BR = signature.hashvalues[: factors_BR.size].reshape(factors_BR.shape).astype(np.uint64)
        bands_NB[index] = (minima_BR * factors_BR).sum(1)  # modulo 2^64; a collision costs one comparison
    return bands_NB


def _neighbours(bands_NB: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """Index of each prompt that shares a band with another -> its shared bands, as (band, first prompt in it)."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for band in range(bands_NB.shape[1]):
        order = np.argsort(bands_NB[:, band], kind="stable")
        hashes = bands_NB[order, band]
        starts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
            if end - start > 1:
                bucket = (band, int(order[start]))
                for index in order[start:end]:
                    found[int(index)].append(bucket)
    return found
