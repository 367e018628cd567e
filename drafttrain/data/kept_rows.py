"""Which rows of the target's states a drafter can use: a store keeps no others.

An element (anchor A >= 1, depth k >= 1) exists where tokens A, ..., A+k are all supervised (layouts.py). Its teacher is row A+k-1, and its
draft sees rows < A. So in a chat

    taught rows     t >= 1 with tokens t and t+1 supervised                      their final states teach
    context rows    0, ..., L-1, where L is the last taught row                  their taps are seen by some draft
    all             0, ..., L                                                    final states for a drafter that reads them too

No row behind L is of use to anybody, and a chat without a taught row has nothing worth keeping.

Shapes: N tokens of C chats, one after the other (chat c is first[c]:first[c+1]), M taught rows, T tokens of one chat, F rows of final.
"""

import numpy as np
import torch
from torch import Tensor

from drafttrain.drafters.base import Needs

FINALS = ("taught", "all")


def wanted_final(needs: Needs) -> str:
    """Whose final states a store keeps for a drafter: `all` where it reads them, else those that teach."""
    return "all" if needs.final else "taught"


def taught_rows(supervised_N: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Rows of the flat N that teach [M], ascending. `supervised_N` is boolean, `first` holds C+1 bounds; no chat is empty."""
    taught_N = supervised_N & np.append(supervised_N[1:], False)
    taught_N[first[:-1]] = False  # as an anchor, a first token has no row before it
    taught_N[first[1:] - 1] = False  # the token behind it belongs to another chat
    return np.flatnonzero(taught_N)


def kept_rows(supervised_T: Tensor, final: str) -> tuple[int, Tensor]:
    """(number of context rows, rows [F] whose final state is kept) of one chat."""
    taught = taught_rows(supervised_T.numpy(), np.array([0, len(supervised_T)]))
    if not len(taught):
        return 0, torch.empty(0, dtype=torch.int64)
    last = int(taught[-1])
    return last, torch.from_numpy(taught) if final == "taught" else torch.arange(last + 1)


def count_rows(supervised_N: np.ndarray, first: np.ndarray, final: str) -> tuple[np.ndarray, np.ndarray]:
    """Of every chat, the number of context rows [C] and of kept final states [C], int64."""
    taught = taught_rows(supervised_N, first)
    bounds = np.searchsorted(taught, first)
    taught_C = np.diff(bounds)
    some = taught_C > 0
    context_C = np.zeros(len(taught_C), np.int64)
    context_C[some] = taught[bounds[1:][some] - 1] - first[:-1][some]
    return context_C, taught_C if final == "taught" else context_C + some
