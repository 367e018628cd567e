"""What a target's files say of its licence and its source: each kind of place, what is no YAML, and what makes no sense; and no network is asked."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFWriter
from huggingface_hub import constants

from drafttrain.target.origin import Origin, origin_of

COMMIT = "0123456789" * 4


def folder_with(place: Path, card: str | bytes | None) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text("{}")
    if card is not None:
        (place / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    return place


@pytest.fixture
def found(tiny_llama, tmp_path):
    """What is found of a target at a path, or of a folder with this card."""

    def of(card=None, path=None, revision=COMMIT) -> Origin:
        where = folder_with(tmp_path / "target", card) if path is None else path
        return origin_of(replace(tiny_llama.identity, path=str(where), revision=revision))

    return of


OTHER = "---\ntags: [a]\nlicense: other\nlicense_name: tongyi\nlicense_link: LICENSE\n---\n# Model\n"


@pytest.mark.parametrize(
    ("card", "wanted"),
    [
        ("---\nlicense: apache-2.0\n---\n", Origin("apache-2.0")),
        ("\ufeff---\r\nlicense: [mit]\r\nother: x\r\n---\r\ntext", Origin("mit")),
        ("---\nlicense: llama3.1\nlicense_name: x\n---", Origin("llama3.1")),  # a name belongs to `other`
        (OTHER, Origin("other", "tongyi", "LICENSE")),
        (None, Origin()),
        ("# A card\n\nlicense: mit\n", Origin()),
        ("text\n---\nlicense: mit\n---\n", Origin()),
        ("---\nlicense: mit\n", Origin()),  # never closed
        ("---\nlicense: [mit, apache-2.0, mit]\n---\n", Origin(["mit", "apache-2.0"])),
        ("---\nlicense:\n- Other\n- mit\nlicense_name: x\n---\n", Origin(["other", "mit"], "x")),
        ("---\nlicense: [MIT, apache-2.0, mit]\n---\n", Origin(["MIT", "apache-2.0"])),
        ("---\nlicense: [Other, OTHER]\nlicense_name: x\n---\n", Origin("other", "x")),
        ("---\nlicense: [mit, {a: b}]\n---\n", Origin()),  # of several a part says too little
        ("---\nlicense: [mit, no]\n---\n", Origin()),
        ("---\nlicense: []\n---\n", Origin()),
        (f"---\nlicense: {list('abcdefghi')}\n---\n", Origin()),
        ("---\nlicense: no\n---\n", Origin()),
        ("---\nlicense: ''\n---\n", Origin()),
        ("---\nlicense: \"a\\nb\"\n---\n", Origin()),
        ("---\nlicense: " + "x" * 300 + "\n---\n", Origin()),
        ("---\n- license\n---\n", Origin()),
        ("---\nlicense: {a\n---\n", Origin()),
        ("---\nlicense: 2024-99-99\nx: 2024-99-99\n---\n", Origin()),
        ("---\nlicense: mit\nx: " + "[" * 5000 + "\n---\n", Origin()),
        (b"---\nlicense: \xff\xfe\n---\n", Origin("\ufffd\ufffd")),
    ],
)  # fmt: skip
def test_the_card_of_a_folder(found, card, wanted):
    assert found(card) == wanted


def test_front_matter_runs_nothing(found, tmp_path):
    """Tags of Python objects are no error either."""
    assert found(f"---\nlicense: !!python/object/apply:os.mkdir [{tmp_path}/made]\n---\n") == Origin()
    assert not (tmp_path / "made").exists()


def test_a_card_that_is_no_file_says_nothing(found, tmp_path):
    (folder_with(tmp_path / "target", None) / "README.md").mkdir()
    assert found() == Origin()


def test_a_snapshot_is_looked_at_as_it_lies_there_and_nobody_is_asked(found, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    for commit, licence in ((COMMIT, "mit"), ("f" * 40, "gemma")):
        snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / commit
        folder_with(snapshot, f"---\nlicense: {licence}\n---\n")
    assert found(path="owner/name") == found(path="owner/name", revision=f"{COMMIT}+int8") == Origin("mit")
    assert found(path="owner/name", revision="0" * 40) == found(path="owner/other") == Origin()


def gguf_with(file: Path, **fields: str) -> Path:
    writer = GGUFWriter(file, "llama")
    writer.add_array("tokenizer.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.scores", [0.5, 1.5])
    writer.add_bool("llama.flag", True)
    writer.add_float64("llama.number", 0.5)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_a_gguf_says_it_in_its_fields(found, tmp_path):
    file = tmp_path / "tiny.gguf"
    assert found(path=gguf_with(file, general__license="mit", general__license__name="x")) == Origin("mit")
    more = {"general__license": "other", "general__license__name": "tongyi", "general__license__link": "https://a.b/c"}
    assert found(path=gguf_with(file, **more)) == Origin("other", "tongyi", "https://a.b/c")
    assert found(path=gguf_with(file, general__name="x")) == Origin()
    whole = gguf_with(file, **more).read_bytes()
    for count in range(len(whole) - 1):
        file.write_bytes(whole[:count])
        assert found(path=file).license in (None, "other")
    file.write_bytes(b"GGUF damaged")
    assert found(path=file) == found(path=tmp_path / "none.gguf") == Origin()


@pytest.mark.parametrize(
    ("fields", "repository"),
    [
        ({"general__source__huggingface__repository": "org/Tiny-Instruct"}, "org/Tiny-Instruct"),
        ({"general__source__repo_url": "https://huggingface.co/org/Tiny-Instruct/"}, "org/Tiny-Instruct"),
        ({"general__source__url": "https://github.com/org/tiny"}, None),
        ({"general__source__huggingface__repository": "/home/me/tiny"}, None),
        # What it was tuned from is not what it is.
        ({"general__base_model__0__repo_url": "https://huggingface.co/org/Tiny-Base"}, None),
    ],
)
def test_a_gguf_may_say_what_it_was_converted_from(found, tmp_path, fields, repository):
    assert found(path=gguf_with(tmp_path / "tiny.gguf", **fields)).repository == repository


def test_a_link_is_made_to_work_from_elsewhere_or_left_out():
    assert Origin("other", None, "LICENSE").address("org/t") == "https://huggingface.co/org/t/blob/main/LICENSE"
    assert Origin("other", None, "https://a.b/c").address(None) == "https://a.b/c"
    for link in ("LICENSE", "/home/me/LICENSE", "../LICENSE", "javascript:x", None):
        assert Origin("other", None, link).address(None) is None
        assert link == "LICENSE" or Origin("other", None, link).address("org/t") is None
