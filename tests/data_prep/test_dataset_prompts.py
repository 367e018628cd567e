"""Prompts from what `datasets` loads: files and folders made here, and a Hub that cannot be reached."""

import json

import pytest
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.ledger import Ledger
from data_prep.pipeline import prepare
from data_prep.sources import DatasetPrompts
from data_prep.stamp import settings
from drafttrain.errors import UserError

datasets = pytest.importorskip("datasets")

ROWS = [{"prompt": f"question {number}", "id": f"q{number}", "other": 1} for number in range(4)]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}},
    {"type": "function", "function": {"name": "say", "parameters": {"text": {"type": "string"}}}},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No network, and no cache but the test's own."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "cache" / "downloads")


def table(rows=ROWS):
    return datasets.Dataset.from_list(rows)


def save(kind: str, place) -> str:
    """The rows as a file or folder of this kind; returns the path to give."""
    if kind == "saved":
        table().save_to_disk(place)
    elif kind == "saved splits":
        datasets.DatasetDict({"train": table(), "test": table(ROWS[:1])}).save_to_disk(place)
    elif kind == "folder":
        place.mkdir()
        table().to_parquet(place / "train-00000.parquet")
    elif kind == "array":
        place = place.with_suffix(".json")
        place.write_text(json.dumps(ROWS, indent=1))
    else:
        place = place.with_suffix(f".{kind}")
        getattr(table(), {"jsonl": "to_json"}.get(kind, f"to_{kind}"))(place)
    return str(place)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["saved", "saved splits", "folder", "array", "jsonl", "parquet", "csv"])
def test_local_files_and_folders(tmp_path, work, ledger, kind, streaming):
    path = save(kind, tmp_path / "some")
    found = DatasetPrompts(path, streaming=streaming).collect(work, ledger)
    assert [(p.key, p.user) for p in found] == [(f"some-q{number}", f"question {number}") for number in range(4)]
    assert ledger.read == 4 and not ledger.dropped


def test_count_split_and_turns(tmp_path, work, ledger):
    splits = {"train": table([{"turns": ["a", "b"]}, {"turns": ["c", "d"]}]), "test": table([{"turns": ["e", "f"]}])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "d")
    path = str(tmp_path / "d")
    assert [p.user for p in DatasetPrompts(path, count=1).collect(work, ledger)] == ["a\nb"] and ledger.read == 1
    assert [p.user for p in DatasetPrompts(path, split="test", turns=1).collect(work, Ledger())] == ["e"]
    with pytest.raises(UserError, match=r"DatasetPrompts.split is dev, but .*/d has train, test"):
        DatasetPrompts(path, split="dev").collect(work, Ledger())


def test_columns_of_other_names(tmp_path, work, ledger):
    rows = [{"question": "one", "hint": "be brief", "prompt": "not this"}, {"question": " ", "hint": None, "prompt": "nor this"}]
    table(rows).save_to_disk(tmp_path / "d")
    columns = {"prompt": "question", "system": "hint"}
    found = DatasetPrompts(str(tmp_path / "d"), columns=columns).collect(work, ledger)
    assert [p.messages for p in found] == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]]
    assert ledger.rows == [{"row": f"{tmp_path}/d row 2", "reason": "an empty user turn"}]


@pytest.mark.parametrize("streaming", [True, False])
def test_missing_columns_are_named(tmp_path, work, ledger, streaming):
    for kind, place in (("saved", tmp_path / "d"), ("jsonl", tmp_path / "e")):
        path = save(kind, place)
        with pytest.raises(UserError, match="has the columns prompt, id, other and no column question; say where"):
            DatasetPrompts(path, columns={"prompt": "question"}, streaming=streaming).collect(work, ledger)
    table([{"question": "one"}]).save_to_disk(tmp_path / "f")
    with pytest.raises(UserError, match="has the columns question and none of messages, conversations, prompt, turns; say where"):
        DatasetPrompts(str(tmp_path / "f"), streaming=streaming).collect(work, ledger)


def test_tools_are_those_that_were_written(tmp_path, work, ledger):
    """Arrow gives every schema the keys of all of them, null where a schema has none."""
    rows = [{"prompt": "one", "tools": TOOLS}, {"prompt": "two", "tools": None}]
    table(rows).save_to_disk(tmp_path / "d")
    found = DatasetPrompts(str(tmp_path / "d")).collect(work, ledger)
    assert [p.tools for p in found] == [TOOLS, None]


def test_pictures_are_refused(tmp_path, work, ledger):
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict({"prompt": ["look"], "image": [None]}, features=features).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match="holds pictures or sound in its column image, and a drafter is trained on text alone"):
        DatasetPrompts(str(tmp_path / "d")).collect(work, ledger)
    found = DatasetPrompts(str(tmp_path / "d"), columns={"prompt": "prompt"}).collect(work, ledger)
    assert [p.user for p in found] == ["look"]


@pytest.mark.parametrize("streaming", [True, False])
def test_what_cannot_be_loaded_is_one_sentence(tmp_path, work, ledger, streaming):
    def sentence(path, **options) -> str:
        with pytest.raises(UserError) as error:
            DatasetPrompts(str(path), streaming=streaming, **options).collect(work, ledger)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "path is ./nowhere, which is neither a file or folder that exists nor a name on the Hub" in sentence("./nowhere")
    assert "which is no file or folder here and which the Hub does not give" in sentence("owner/nothing")
    (tmp_path / "a.txt").write_text("x")
    assert "whose ending is none of .jsonl, .json" in sentence(tmp_path / "a.txt")
    (tmp_path / "a.parquet").write_text("no parquet")
    assert "a.parquet cannot be loaded by `datasets`" in sentence(tmp_path / "a.parquet")
    (tmp_path / "empty").mkdir()
    assert "empty cannot be loaded by `datasets`" in sentence(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    table().to_parquet(tmp_path / "folder" / "train.parquet")
    assert "folder cannot be loaded by `datasets`" in sentence(tmp_path / "folder", split="dev")


def test_content_is_known_before_a_run_goes_on(tmp_path):
    path = save("folder", tmp_path / "some")
    before = DatasetPrompts(path).content()
    assert DatasetPrompts(path).content() == before and len(before["content (sha256)"]) == 64
    table(ROWS[:2]).to_parquet(f"{path}/train-00000.parquet")
    assert DatasetPrompts(path).content() != before
    commit = "0123456789" * 4
    assert DatasetPrompts("owner/name", revision=commit).content() == {"commit": commit}
    with pytest.raises(UserError, match="owner/name, which is no file or folder here and which the Hub does not give"):
        DatasetPrompts("owner/name").content()


def test_the_commit_of_a_branch_decides(monkeypatch):
    import huggingface_hub

    class Info:
        sha = "abc"

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, path, revision=None, timeout=None: Info)
    config = small_config(prompts=[DatasetPrompts("owner/name", revision="main")], held_out=1)
    found = settings(config, FakeTarget())
    assert found["prepare.prompts[0] commit"] == "abc" and "prepare.prompts[0].revision" not in found


def test_through_the_whole_stage(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"kaban lodor {word}"}]} for word in ("mifel", "nugim", "rahus", "sejot")]
    table(rows).save_to_disk(tmp_path / "d")
    target = FakeTarget()
    config = small_config(prompts=[DatasetPrompts(str(tmp_path / "d"))], held_out=1, near_duplicate=1.0)
    store = prepare(config, target, tmp_path / "data", taps=None, draft_vocab=16, ask=FakeSpeech(target), say=lambda text: None)
    assert store.manifest.rows["in"] == 4 == store.manifest.rows["kept"] + sum(store.manifest.rows["dropped"].values())
