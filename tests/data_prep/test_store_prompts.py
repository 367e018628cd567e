"""Prompts of a store that another run made."""

import json
import shutil

import pytest
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.ledger import Ledger
from data_prep.pipeline import prepare
from data_prep.sources import JsonlPrompts, StorePrompts
from drafttrain.errors import UserError

TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A finished data folder with chats of two turns, a system message and a tool."""
    folder = tmp_path_factory.mktemp("other")
    words = ["mifel", "nugim", "rahus", "sejot", "tiban", "vodor"]
    rows = [{"turns": [f"kaban {word}", f"lodor {word}"], "system": "mifel", "tools": [TOOL]} for word in words]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small_config(prompts=[JsonlPrompts(str(folder / "p.jsonl"))], held_out=2, near_duplicate=1.0)
    target = FakeTarget()
    prepare(config, target, folder / "data", taps=None, draft_vocab=16, ask=FakeSpeech(target), say=lambda text: None)
    return folder / "data"


@pytest.mark.parametrize(("store", "file", "count"), [("train", "prompts.jsonl", 4), ("held_out", "held_out.jsonl", 2)])
def test_messages_and_tools_come_back(data, work, ledger, said, store, file, count):
    found = StorePrompts(str(data / store)).collect(work, ledger)
    written = [json.loads(line) for line in (data / file).read_text().splitlines()]
    assert len(found) == count == ledger.read
    assert [(p.key, p.messages, p.tools) for p in found] == [
        (f"store-{row['key']}", row["messages"], row["tools"]) for row in written
    ]
    assert [m["role"] for m in found[0].messages] == ["system", "user", "user"] and found[0].tools == [TOOL]
    assert said == []
    found = StorePrompts(str(data / store), count=1, turns=1, name="again").collect(work, Ledger())
    assert [m["role"] for m in found[0].messages] == ["system", "user"] and found[0].source == "again"


def test_another_template_is_said_and_does_not_matter(data, work, ledger, said):
    work.target.identity = FakeTarget(template="another").identity
    assert len(StorePrompts(str(data / "train")).collect(work, ledger)) == 4
    assert said == [
        f"{data}/train: made with another tokenizer or template (fake); its prompts are rendered anew for this target"
    ]


def test_what_is_no_store_is_refused(data, tmp_path, work, ledger):
    for path in (tmp_path / "nowhere", data):
        with pytest.raises(
            UserError, match="no finished token store .it has no manifest.json.; name the folder train or held_out"
        ):
            StorePrompts(str(path)).collect(work, ledger)
    alone = tmp_path / "train"
    shutil.copytree(data / "train", alone)
    for use in (StorePrompts(str(alone)).content, lambda: StorePrompts(str(alone)).collect(work, ledger)):
        with pytest.raises(UserError, match=r"prompts.jsonl, which holds its prompts as text, is missing"):
            use()


def test_damaged_rows_are_named(data, tmp_path, work, ledger, said):
    shutil.copytree(data, tmp_path / "data")
    path = tmp_path / "data" / "prompts.jsonl"
    before = StorePrompts(str(tmp_path / "data" / "train")).content()
    path.write_text("{broken\n" + '{"key": "k"}\n' + path.read_text())
    source = StorePrompts(str(tmp_path / "data" / "train"))
    assert len(source.collect(work, ledger)) == 4 and source.content() != before
    assert ledger.dropped == {"not JSON": 1, "no list of messages": 1} and f"{path} line 1: not JSON; left out" in said
    assert said[0] == f"{path}: not as data_prep wrote it (cut short, or changed since); its rows are taken as they are"
