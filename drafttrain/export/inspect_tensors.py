"""What can be wrong in a drafter's tensors: names, shapes and types against a table, the vocabulary map, and numbers.

    ids = arange + d2t      strictly increasing, inside the vocabulary;    t2d[v] = v in ids

Letters: V target vocabulary, Vd draft vocabulary.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.drafters.source import MAPS
from drafttrain.export.format import Table, word
from drafttrain.export.inspect_config import Reading

CARRIES = r"(.*norm.*|fc|lm_heads?(\.\d+)?)\.weight"
"""Weights without which nothing comes through: zeros there are no beginning of a training."""
NORMS = r".*norm.*\.weight"
PIECE = 1 << 24
"""Numbers of a tensor that are looked at as fp32 at once."""
SHOWN = 4
"""Names in one sentence."""


def check_table(
    reading: Reading, tensors: Mapping[str, Tensor], table: Table, said: torch.dtype | None, optional: Collection[str] = ()
) -> None:
    """Every name, shape and type that differs from the table, a sentence each. Map tensors' presence is `check_map`'s business.

    Args:
        said: Type of the weights by config.json; None leaves floating types alone.
        optional: Names that may be missing.
    """
    missing = sorted(table.keys() - tensors.keys() - set(MAPS) - set(optional)) if reading.folder.whole else []
    if 2 * len(missing) > len(table):
        reading.fault(
            f"{_listed(missing)} are missing, most of what such a drafter has: these tensors are another drafter's, or another layout's; give those that "
            "config.json belongs to."
        )
    else:
        for name in missing:
            wanted = list(table[name][0])
            reading.fault(
                f"{name} {wanted} is missing: engines leave it at random or stop; take it from the drafter as it was trained, or export again."
            )
    for name in sorted(tensors.keys() - table.keys() - set(MAPS)):
        reading.fault(
            f"{name} is not a tensor of this kind of drafter: SGLang passes over it in silence, vLLM stops; give it the name that it should have, or "
            "leave it out."
        )
    for name in sorted(table.keys() & tensors.keys()):
        if name in MAPS and tensors[name].is_floating_point():
            continue  # `check_map` says it
        shape, own = table[name]
        _check_one(reading, name, tensors[name], shape, own or said)


def _check_one(reading: Reading, name: str, got: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    if tuple(got.shape) != shape:
        reading.fault(
            f"{name} is {list(got.shape)} instead of {list(shape)}{_shape_hint(reading, name, got, shape)}; write it as it was trained."
        )
    if dtype is None and not got.is_floating_point():
        reading.fault(f"{name} holds {word(got.dtype)} instead of floating-point numbers; write it as it was trained.")
    if dtype is not None and got.dtype != dtype:
        both = got.is_floating_point() and dtype.is_floating_point
        (reading.complain if both else reading.fault)(
            f"{name} is {word(got.dtype)} instead of {word(dtype)}, which config.json promises or engines hold it in; convert it."
        )


def _shape_hint(reading: Reading, name: str, got: Tensor, shape: tuple[int, ...]) -> str:
    if len(shape) == 2 and tuple(got.shape) == shape[::-1]:
        return " (it is transposed)"
    if name == "fc.weight" and reading.taps and got.dim() == 2 and got.shape[0] == shape[0]:
        width = shape[1] // len(reading.taps)
        if got.shape[1] % width == 0:
            return f" (it reads {got.shape[1] // width} layers, and config.json names {len(reading.taps)})"
    return ""


# ---- the vocabulary map ------------------------------------------------------------------------------------------------------


def check_map(reading: Reading, rows: int | None, vocab: int | None, always: bool = False) -> None:
    """d2t, t2d and token_map against each other, the rows of the head and the vocabulary.

    Args:
        rows: Vd by config.json or the head; None where the drafter speaks with the target's head and says all of its tokens.
        vocab: V; None where nothing tells it.
        always: whether d2t is there for a full vocabulary too, as in drafttrain's checkpoints.
    """
    tensors = reading.tensors
    d2t, marked, listed = (tensors.get(name) for name in MAPS)
    if rows is not None and vocab is not None and rows < vocab and d2t is None and listed is None and reading.folder.whole:
        reading.fault(
            f"d2t is missing, but the head has {rows:,} tokens and the target {vocab:,}, so draft token i is taken for target token i; take d2t from "
            "the drafter as it was trained."
        )
    full = rows is None or (vocab is not None and rows == vocab)
    if full and not always and (spare := [name for name in MAPS if name in tensors]) and (rows is not None or d2t is None):
        harmless = d2t is None or not d2t.any()
        (reading.complain if harmless else reading.fault)(
            f"{' and '.join(spare)} {_is(spare)} there, but the head has all {vocab or 0:,} tokens of the target, and engines have no place for a map "
            "then (vLLM from 0.33 on) or shift the drafts by it; leave it out."
        )
        return
    if d2t is not None:
        _check_ids(
            reading, "d2t", torch.arange(len(d2t)) + d2t.long() if _whole_numbers(reading, "d2t", d2t) else None, rows, vocab
        )
    if listed is not None and _whole_numbers(reading, "token_map", listed):
        _check_ids(reading, "token_map", listed.long(), rows, vocab, ascending=False)
        reading.complain(
            'token_map is there, at which vLLM 0.26 stops ("not initialized from checkpoint"); it loads Medusa heads of a full vocabulary only.'
        )
    if d2t is not None and marked is not None and d2t.dim() == 1 and not d2t.is_floating_point():
        _check_marks(reading, torch.arange(len(d2t)) + d2t.long(), marked, vocab)


def _whole_numbers(reading: Reading, name: str, tensor: Tensor) -> bool:
    if tensor.dim() == 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
        return True
    reading.fault(
        f"{name} is {word(tensor.dtype)} {list(tensor.shape)}, but must be a row of whole numbers; write it again from the trained drafter."
    )
    return False


def _check_ids(
    reading: Reading, name: str, ids: Tensor | None, rows: int | None, vocab: int | None, ascending: bool = True
) -> None:
    if ids is None:
        return
    wrong = []
    if rows is not None and len(ids) != rows:
        wrong.append(f"it has {len(ids):,} entries for a head of {rows:,} tokens")
    outside = (ids < 0) if vocab is None else (ids < 0) | (ids >= vocab)
    if outside.any():
        place = int(outside.nonzero()[0, 0])
        top = "" if vocab is None else f", but the target's tokens are 0 to {vocab - 1}"
        wrong.append(f"row {place} would say token {int(ids[place])}{top}")
    if len(ids.unique()) != len(ids):
        wrong.append("two rows would say the same token")
    elif ascending and not (ids[1:] > ids[:-1]).all():
        wrong.append("the tokens do not ascend")
    if not wrong:
        return
    offsets = ids - torch.arange(len(ids))
    absolute = name == "d2t" and len(ids) > 1 and bool((offsets[1:] > offsets[:-1]).all())
    hint = "; it looks like the ids themselves, and d2t holds offsets, id - row" if absolute else ""
    reading.fault(
        f"{name} is wrong ({'; '.join(wrong)}{hint}), so drafts are other tokens than meant; write it again from the trained drafter."
    )


def _check_marks(reading: Reading, ids: Tensor, marked: Tensor, vocab: int | None) -> None:
    told = marked.bool().nonzero()[:, 0] if marked.dim() == 1 else None
    if told is None or (vocab is not None and len(marked) != vocab):
        return  # its shape is told by the table
    if not torch.equal(told, ids.sort().values):
        only = len(set(ids.tolist()) ^ set(told.tolist()))
        reading.fault(
            f"d2t and t2d name different tokens ({only:,} are in one of them only), so one of them belongs to another head or is shifted; write both "
            "again from the trained drafter."
        )


# ---- numbers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """What the numbers of a tensor are like."""

    wrong: int
    """How many are not finite."""
    low: float
    high: float
    """Of the finite ones."""


def check_numbers(reading: Reading) -> None:
    """Numbers that are not finite, matrices of one value, norms as before training."""
    found: dict[str, Numbers] = {}
    unread = []
    for name, x in reading.tensors.items():
        if x.is_floating_point() and x.numel():
            try:
                found[name] = _numbers(x)
            except RuntimeError:
                unread.append(name)
    if unread:
        reading.fault(
            f"{_listed(unread)} hold{'s' if len(unread) == 1 else ''} numbers that no drafter is kept in ({word(reading.tensors[unread[0]].dtype)}, "
            f"{reading.tensors[unread[0]].dim()} dimensions); write the weights as bfloat16."
        )
    bad = [name for name, numbers in found.items() if numbers.wrong]
    if bad:
        count = sum(found[name].wrong for name in bad)
        reading.fault(f"{_listed(bad)} hold{'s' if len(bad) == 1 else ''} {count:,} numbers that are not finite and spread to every draft; take "
                      "an earlier checkpoint.")  # fmt: skip
    flat = {name: numbers.low for name, numbers in found.items() if not numbers.wrong and numbers.low == numbers.high}
    zero = [name for name, value in flat.items() if value == 0]
    if dead := [name for name in zero if re.fullmatch(CARRIES, name)]:
        reading.fault(
            f"{_listed(dead)} {_is(dead)} nothing but zeros, so nothing comes through; take it from the drafter as it was trained."
        )
    dims = {name: reading.tensors[name].dim() for name in flat}
    if idle := [name for name in zero if name not in dead and dims[name] > 1]:
        reading.note(f"{_listed(idle)} {_is(idle)} nothing but zeros, as before training.")
    same = [name for name in flat if dims[name] > 1 and reading.tensors[name].numel() > 1 and name not in zero]
    if same:
        reading.fault(f"{_listed(same)} hold{'s' if len(same) == 1 else ''} one number throughout, which no training gives; take it from the drafter as "
                      "it was trained.")  # fmt: skip
    norms = [name for name in found if re.fullmatch(NORMS, name)]
    if norms and all(flat.get(name) == 1 for name in norms):
        reading.note(
            "every weight of its norms is exactly 1, as before training (in bfloat16 a short training may round to that)."
        )


def _numbers(x: Tensor) -> Numbers:
    """Piece by piece: in fp32 a large tensor may not fit beside itself."""
    wrong, low, high = 0, math.inf, -math.inf
    for piece in x.flatten().split(PIECE):
        numbers = piece.float()
        finite = numbers[numbers.isfinite()]
        wrong += len(numbers) - len(finite)
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return Numbers(wrong, low, high)


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def count_by_dtype(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Type -> floating-point numbers of that type, most first."""
    found: dict[str, int] = {}
    for x in tensors.values():
        if x.is_floating_point():
            found[word(x.dtype)] = found.get(word(x.dtype), 0) + x.numel()
    return dict(sorted(found.items(), key=lambda item: -item[1]))
