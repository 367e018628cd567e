"""Rows of a data set that Hugging Face `datasets` can load: from the Hub, a folder or a file.

Only the columns that prompts are made of are read, so that a picture beside them is never decoded. Code that comes with a data
set is not run: `datasets` 4 and later cannot.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.dialects import DIALECTS, FIELDS, PICTURES
from drafttrain.errors import UserError
from drafttrain.files import sha256_file

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""Ending of a file that may stand packed (.gz) too -> what reads it."""
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
EXAMPLE = "{prompt: question}"


def is_local(path: str) -> bool:
    """Whether there is such a file or folder. UserError if there is none and the Hub cannot have it either."""
    if Path(path).exists():
        return True
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"DatasetPrompts.path is {path}, which is neither a file or folder that exists nor a name on the Hub (owner/name); "
            "name one of them."
        )
    return False


def content_of(path: str, revision: str | None) -> dict[str, str]:
    """A hash of local files, or the commit on the Hub that `revision` stands for. UserError if neither can be found out."""
    if is_local(path):
        return {"content (sha256)": _digest(Path(path))}
    if revision is not None and COMMIT.fullmatch(revision):
        return {"commit": revision}
    from huggingface_hub import HfApi

    try:
        return {"commit": str(HfApi().dataset_info(path, revision=revision, timeout=30).sha)}
    except Exception as error:  # offline, gated, missing, and whatever the network does
        raise _unreachable(path, error) from None


def load(path: str, config_name: str | None, split: str, revision: str | None, streaming: bool) -> Any:
    """The data set, not read yet where that can be helped. UserError with what `datasets` says."""
    import datasets

    local = is_local(path)
    try:
        if local and any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json")):
            return _saved(datasets.load_from_disk(path), path, split)
        if local and Path(path).is_file():
            ending = next((each for each in reversed(Path(path).suffixes) if each != ".gz"), "")
            if ending not in BUILDERS:
                raise UserError(
                    f"DatasetPrompts.path is {path}, whose ending is none of {', '.join(BUILDERS)}; rename it, or use JsonlPrompts "
                    "for one JSON object a line."
                )
            return datasets.load_dataset(BUILDERS[ending], data_files={split: path}, split=split, streaming=streaming)
        return datasets.load_dataset(path, config_name, split=split, revision=revision, streaming=streaming)
    except UserError:
        raise
    except Exception as error:  # each builder, file system and the network raise their own
        raise (_unloadable if local else _unreachable)(path, error) from None


def rows_of(dataset: Any, path: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and row, with our names for the columns. UserError for missing columns, pictures and damaged files."""
    try:
        known = dataset.column_names
        if known is not None:
            wanted = _wanted(known, columns, path)
            _require_text(dataset.features, wanted, path)
            dataset = dataset.select_columns(wanted)
        for number, row in enumerate(dataset, 1):
            if number == 1 and known is None:
                _wanted(list(row), columns, path)
            yield number, _ours(row, columns)
    except UserError:
        raise
    except Exception as error:
        raise _unloadable(path, error) from None


def _wanted(known: list[str], columns: Mapping[str, str], path: str) -> list[str]:
    """Columns to read: those that the recipe names, else those of our own names."""
    missing = [name for name in columns.values() if name not in known]
    if missing or not (columns or any(name in known for name in DIALECTS)):
        lack = f"no column {missing[0]}" if missing else f"none of {', '.join(DIALECTS)}"
        raise UserError(
            f"{path} has the columns {', '.join(known)} and {lack}; say where its prompts are with DatasetPrompts.columns, such as "
            f"{EXAMPLE}."
        )
    return list(dict.fromkeys(columns.values())) or [name for name in known if name in (*FIELDS, *PICTURES)]


def _require_text(features: Any, wanted: list[str], path: str) -> None:
    for name in wanted:
        if features is not None and re.search(r"\b(Image|Audio|Video)\(", repr(features[name])):
            raise UserError(
                f"{path} holds pictures or sound in its column {name}, and a drafter is trained on text alone; use another data set, "
                f"or name the columns of text with DatasetPrompts.columns, such as {EXAMPLE}."
            )


def _ours(row: dict, columns: Mapping[str, str]) -> dict:
    named = {ours: row[theirs] for ours, theirs in columns.items()} if columns else dict(row)
    if isinstance(named.get("tools"), list):
        named["tools"] = without_nulls(named["tools"])
    return named


def without_nulls(value: Any) -> Any:
    """A table gives every row the keys of all rows, null where a row has none: schemas without them are the ones written."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _saved(found: Any, path: str, split: str) -> Any:
    """A data set of `save_to_disk`, or its split."""
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise UserError(f"DatasetPrompts.split is {split}, but {path} has {', '.join(found)}; choose one of them.")
    return found[split]


def _digest(path: Path) -> str:
    if path.is_file():
        return sha256_file(path)
    whole = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        whole.update(f"{file.relative_to(path)}\0{sha256_file(file)}\n".encode())
    return whole.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]


def _unreachable(path: str, error: Exception) -> UserError:
    return UserError(
        f"DatasetPrompts.path is {path}, which is no file or folder here and which the Hub does not give "
        f"({type(error).__name__}: {_first_line(error)}); check the name, config_name, split and revision, your access and the "
        "network, or give a local folder."
    )


def _unloadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be loaded by `datasets` ({type(error).__name__}: {_first_line(error)}); check the files, and "
        "DatasetPrompts.config_name and split."
    )
