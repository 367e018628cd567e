"""Token store: the chats of a run, memory-mapped from shards, with a manifest that says where they come from.

`manifest.json` is written last of all, so a folder without one is not finished. In its ledger, rows in = rows kept + rows
dropped, by reason. It names the target (revision, tokenizer, template, template arguments) and the tapped layers, and
`TokenStore.require` refuses anything else, because features of another layer or ids of another tokenizer train without an error.

Format 1 kept features of every token; its tokens are read, its features are not: data_prep makes them anew.

Shapes: T tokens of a chat, A taps, D target width, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.data.features import decode, vector_bytes
from drafttrain.data.kept_rows import count_rows, kept_rows
from drafttrain.data.sealed import read_sealed, unreadable, write_sealed
from drafttrain.data.shards import Chat, ShardRecord, damaged, features_name, read_record, record_name, tokens_name, verify
from drafttrain.errors import UserError
from drafttrain.target.identity import differences
from drafttrain.types import Features, Identity, Request

__all__ = ["Chat", "Manifest", "TokenStore"]

FORMAT = 2
READ = (1, FORMAT)
ANEW = "delete it and run data_prep again: it keeps the finished shards and writes the manifest anew"
FEATURES_ANEW = "run data_prep again: it keeps the answers and makes the features anew"
"""Where features are missing or unreadable, so that nobody loses any."""
FEATURES_ELSEWHERE = (
    "give the run a data folder of its own (a copy will do) and run data_prep there: it keeps the answers and makes the features anew, "
    "which here would take them from every run that reads this folder"
)
"""Where the features are another drafter's."""
OPEN_FILES = 64
"""Most shard files kept mapped at once."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says."""

    identity: Identity
    taps: list[int] | None
    """Layers whose outputs are kept (0-based, ascending); None for a store of tokens alone."""
    feature_dtype: str | None
    rows: dict
    """{"in": n, "kept": n, "dropped": {reason: n}}, and in = kept + dropped."""
    shards: int
    tokens: int
    supervised_tokens: int
    facts: dict
    """How it was made: sampling settings, sources and their own ledgers. For people and the report."""

    def write(self, folder: Path) -> None:
        """Finishes a store. ValueError if the ledger does not add up: that is a fault of the program."""
        if self.rows["in"] != self.rows["kept"] + sum(self.rows["dropped"].values()):
            raise ValueError(f"the ledger does not add up: {self.rows}")
        write_sealed(folder / "manifest.json", {"format": FORMAT, **asdict(self)})

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """UserError if the store is missing, not finished, damaged or of another format."""
        path = folder / "manifest.json"
        if not path.exists():
            state = "is not finished: it has no manifest.json" if folder.exists() else "does not exist"
            raise UserError(f"{folder}/ {state}. Run `python -m data_prep` with this recipe; it goes on where it stopped.")
        values = read_sealed(path, "the token store", ANEW)
        if (made := values.pop("format", None)) not in READ:
            raise UserError(
                f"{path} is of format {made}, but this version reads {' and '.join(map(str, READ))}; delete the folder and run data_prep again."
            )
        try:
            return Manifest(Identity(**values.pop("identity")), **values)
        except (TypeError, KeyError):
            raise unreadable(path, "its keys are not those of a manifest", ANEW) from None


class TokenStore:
    """Chats in the order of their shards. Cheap to copy and to send to loader workers; tensors are read when asked for."""

    def __init__(self, folder: Path, manifest: Manifest, records: list[ShardRecord], lengths: list[np.ndarray]):
        """Use `TokenStore.open`."""
        self.folder = folder
        self.manifest = manifest
        self.keys = [key for record in records for key in record.keys]
        self.lengths = np.concatenate([np.empty(0, np.int64), *lengths])
        """Tokens of every chat, int64."""
        self._records = records
        self._first = np.cumsum([0] + [len(record.keys) for record in records])
        self._offsets = [np.concatenate([[0], np.cumsum(each)]) for each in lengths]
        self._features_first: dict[int, list[np.ndarray]] = {}
        """Shard -> bounds of its chats in `taps` and in `final`, C+1 of each."""
        self._mapped: OrderedDict = OrderedDict()
        self._verified: set[str] = set()

    @staticmethod
    def open(folder: str | Path) -> "TokenStore":
        """Checks sizes of all files and the content of the token files. UserError if missing, unfinished or damaged."""
        folder = Path(folder)
        manifest = Manifest.read(folder)
        records, lengths = [], []
        for index in range(manifest.shards):
            record = read_record(folder, index)
            if record is None:
                raise UserError(
                    f"{folder}/ lacks shard {index} of {manifest.shards}; delete manifest.json there and run data_prep again."
                )
            verify(folder, index, record, tokens_name(index))
            with safe_open(folder / tokens_name(index), "pt") as file:
                lengths.append(file.get_tensor("offsets").diff().numpy())
            if len(lengths[-1]) != len(record.keys):
                raise damaged(folder / record_name(index), index, f"{len(record.keys)} keys of {len(lengths[-1])} chats")
            records.append(record)
        return TokenStore(folder, manifest, records, lengths)

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict:
        """Mapped files stay with the process."""
        return {**self.__dict__, "_mapped": OrderedDict()}

    def chat(self, index: int, features: bool = False) -> Chat:
        """Chat `index`, with its features if asked. UserError if the store keeps none, or the shard's content is damaged."""
        if not 0 <= index < len(self):
            raise IndexError(f"chat {index} of {len(self)}")
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        start, end = (int(x) for x in self._offsets[shard][index - self._first[shard] :][:2])
        file = self._map(shard, tokens_name(shard))
        ids = file.get_slice("ids")[start:end].long()
        supervised = file.get_slice("supervised")[start:end].bool()
        kept = self._features(shard, index - int(self._first[shard]), supervised) if features else None
        return Chat(self.keys[index], ids, supervised, kept)

    def requests(self, limit: int) -> list[Request]:
        """The prompts of the chats (all before the first supervised token), to be answered again with up to `limit` tokens."""
        found = []
        for index in range(len(self)):
            chat = self.chat(index)
            prompt = int(chat.supervised.long().argmax())
            found.append(Request(chat.key, tuple(chat.ids[:prompt].tolist()), limit))
        return found

    def counts(self) -> tuple[Tensor, Tensor]:
        """How often each token id occurs [V]: among supervised tokens, and among the others."""
        supervised_V, other_V = (torch.zeros(self.manifest.identity.vocab, dtype=torch.int64) for _ in range(2))
        for shard in range(len(self._records)):
            file = self._map(shard, tokens_name(shard))
            ids, mask = file.get_tensor("ids").long(), file.get_tensor("supervised").bool()
            supervised_V += ids[mask].bincount(minlength=len(supervised_V))
            other_V += ids[~mask].bincount(minlength=len(other_V))
        return supervised_V, other_V

    def bytes_of_features(self, taps: int, dtype: str, final: str, shards: Iterable[int] | None = None) -> int:
        """Bytes that features of these chats take, without the files' headers: `taps` layers, final states `taught` or `all`."""
        rows = 0
        for shard in range(len(self._records)) if shards is None else shards:
            context_C, final_C = self._count_rows(shard, final)
            rows += taps * int(context_C.sum()) + int(final_C.sum())
        return rows * vector_bytes(self.manifest.identity.hidden, dtype)

    def require_chats(self) -> None:
        """UserError of a store without chats."""
        if not len(self):
            raise UserError(
                f"{self.folder}/ holds no chats, so there is nothing to learn from; see in data/report/ why each was dropped, change the prepare "
                "section, and run data_prep again."
            )

    def require(
        self, identity: Identity, taps: Sequence[int] | None = None, feature_dtype: str | None = None, final: str = "taught"
    ) -> None:
        """UserError that names each difference between what the store was made with and what the recipe asks for.

        `taps` are the layers whose stored features will be read, in `feature_dtype` unless that is None; None if none will. `final`
        says whose final states will be (`wanted_final` of the drafter).
        """
        made = self.manifest.identity
        other = differences(asdict(made), identity)
        if other:
            raise UserError(
                f"{self.folder}/ was made with another target ({made.path}, the recipe says {identity.path}): {'; '.join(other)}"
                ". Go back to that target, or give the run another `name` and run data_prep again."
            )
        if taps is not None:
            self.require_features(taps, feature_dtype, final)

    def require_features(self, taps: Sequence[int], dtype: str | None, final: str) -> None:
        """UserError unless features like these are here and can be read (arguments as in `require`), whatever the target."""
        if self.manifest.taps is None:
            raise UserError(
                f"{self.folder}/ holds no features, but the recipe says data.features: stored. "
                f"Set data.features to online, or {FEATURES_ANEW}."
            )
        self.refuse_features_of_another(taps, dtype, final)
        kept = self._kept_features()
        if lacking := [shard for shard, facts in kept.items() if facts is None]:
            raise UserError(f"{self.folder}/ lacks {features_name(lacking[0])}; {FEATURES_ANEW}.")
        if any(facts is not None and facts.get("final") is None for facts in kept.values()):
            raise UserError(
                f"{self.folder}/ holds features as an earlier version kept them, which this one does not read; {FEATURES_ANEW}."
            )

    def refuse_features_of_another(self, taps: Sequence[int], dtype: str | None, final: str) -> None:
        """UserError where features are here that were made for another drafter, or in another type, than these."""
        made, wanted = self.manifest.taps, list(taps)
        if made is None:
            return
        if made != wanted:
            holds = f"features of layers {made}" if made else "features for a drafter that reads no layers"
            asks = f"the recipe taps {wanted}" if wanted else "the recipe's drafter reads no layers"
            back = f"set drafter.init_args.taps to {made}, " if made and wanted else ""
            raise UserError(
                f"{self.folder}/ holds {holds}, but {asks}. Set data.features to online, which fits every drafter, {back}or "
                f"{FEATURES_ELSEWHERE}."
            )
        if dtype not in (None, self.manifest.feature_dtype):
            raise UserError(
                f"{self.folder}/ holds features in {self.manifest.feature_dtype}, but the recipe says data.feature_dtype: "
                f"{dtype}. Set it to {self.manifest.feature_dtype}, set data.features to online, or {FEATURES_ELSEWHERE}."
            )
        if final == "all" and any(
            facts is not None and facts.get("final") == "taught" for facts in self._kept_features().values()
        ):
            raise UserError(
                f"{self.folder}/ keeps the target's final states only where they teach, but this drafter reads them in every row. "
                f"Set data.features to online, which fits every drafter, or {FEATURES_ELSEWHERE}."
            )

    def _kept_features(self) -> dict[int, dict | None]:
        """Shard that holds chats -> what its record says of its features; None where it has none."""
        return {shard: record.files.get(features_name(shard)) for shard, record in enumerate(self._records) if record.keys}

    def _count_rows(self, shard: int, final: str) -> tuple[np.ndarray, np.ndarray]:
        supervised_N = self._map(shard, tokens_name(shard)).get_tensor("supervised").bool().numpy()
        return count_rows(supervised_N, self._offsets[shard], final)

    def _features(self, shard: int, within: int, supervised_T: Tensor) -> Features:
        """Of a shard's chat `within`, laid out like its tokens."""
        facts = self._records[shard].files.get(features_name(shard), {})
        final = facts.get("final")
        if self.manifest.taps is None or final is None:
            raise UserError(
                f"{self.folder}/ holds no features that can be read; set data.features to online, or {FEATURES_ANEW}."
            )
        if shard not in self._features_first:
            self._features_first[shard] = [np.cumsum([0, *counts_C]) for counts_C in self._count_rows(shard, final)]
        first_taps, first_final = (int(first[within]) for first in self._features_first[shard])
        context, rows = kept_rows(supervised_T, final)
        file = self._map(shard, features_name(shard))

        def read(name: str, first: int, count: int) -> Tensor:
            scale = file.get_slice(f"{name}_scale")[first : first + count] if facts["dtype"] != "bfloat16" else None
            return decode(file.get_slice(name)[first : first + count], scale)

        taps_PAD, final_FD = read("taps", first_taps, context), read("final", first_final, len(rows))
        T = len(supervised_T)
        taps_TAD = taps_PAD.new_zeros(T, *taps_PAD.shape[1:])
        final_TD = final_FD.new_full((T, final_FD.shape[1]), float("nan") if final == "taught" else 0.0)
        taps_TAD[:context] = taps_PAD
        final_TD[rows] = final_FD
        return Features(taps_TAD, final_TD)

    def _map(self, shard: int, name: str):
        """The mapped file, its content checked once per process."""
        if name in self._mapped:
            self._mapped.move_to_end(name)
            return self._mapped[name]
        if name.startswith("features") and name not in self._verified:
            verify(self.folder, shard, self._records[shard], name)
            self._verified.add(name)
        file = self._mapped[name] = safe_open(self.folder / name, "pt")
        if len(self._mapped) > OPEN_FILES:
            self._mapped.popitem(last=False)
        return file
