"""The licence of the target in an export: carried over where the recipe says nothing, set beside the recipe's where the two differ, and never made up."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from gguf import GGUFWriter
from tiny import build_target_folder
from tiny_command import flags, save_untrained, write_recipe

from drafttrain.cli import main
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.export.card_licence import licence_of, licence_text
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.target.origin import Origin
from drafttrain.vocab import DraftVocabulary

OTHER = "---\nlicense: other\nlicense_name: tongyi-qianwen\nlicense_link: LICENSE\n---\n"
MISSING = "The licence of the target was not found in its files: look it up"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of the target, flags of a run with a drafter)."""
    folder = tmp_path_factory.mktemp("licence")
    place = build_target_folder("llama", folder / "our-target")
    target = load_target(TargetConfig(path=str(place)), "cpu")
    save_untrained(folder / "runs" / "tiny" / "checkpoints" / "best", target, {"position": {}})
    return place, flags((write_recipe(folder, place), folder / "runs"))


def exported(run, capsys, card: str | None, *more) -> tuple[dict, str, str]:
    """(front matter, card, what the command said) where the target's folder has this card."""
    place, typed = run
    (place / "README.md").unlink(missing_ok=True)
    if card is not None:
        (place / "README.md").write_text(card)
    capsys.readouterr()
    assert main(["export", *typed, *more]) == 0
    text = (Path(typed[3]) / "tiny" / "export" / "README.md").read_text()
    front = re.match(r"---\n(.*?)\n---\n", text, re.S)
    assert front is not None
    return yaml.safe_load(front[1]), text, capsys.readouterr().out


def made(run) -> dict:
    return json.loads((Path(run[1][3]) / "tiny" / "export" / "drafttrain.json").read_text())


def test_where_the_recipe_says_nothing_the_targets_own_is_carried_over(run, capsys):
    front, text, said = exported(run, capsys, "---\nlicense: llama3.1\n---\n")
    assert front["license"] == made(run)["license"] == "llama3.1" and "license_name" not in front
    assert "`llama3.1`, as the target's own files say of the target." in text and "warning" not in said and MISSING not in text


def test_a_licence_of_its_own_comes_with_its_name_and_a_link_that_works(run, capsys):
    front, text, _ = exported(run, capsys, OTHER, "--export.base_model", "org/tiny")
    address = "https://huggingface.co/org/tiny/blob/main/LICENSE"
    assert (front["license"], front["license_name"], front["license_link"]) == ("other", "tongyi-qianwen", address)
    assert f"`other`, called `tongyi-qianwen`, at <{address}>" in text
    front, _, _ = exported(run, capsys, OTHER)  # of which repository nobody knows
    assert front["license_name"] == "tongyi-qianwen" and "license_link" not in front


def test_several_licences_are_all_carried_over(run, capsys):
    """The Hub's metadata may be a list, and does not say whether all of them bind."""
    card = "---\nlicense: [llama3.1, mit]\n---\n"
    front, text, said = exported(run, capsys, card)
    assert front["license"] == made(run)["license"] == ["llama3.1", "mit"] and "warning" not in said and MISSING not in text
    assert "`llama3.1` and `mit`, as the target's own files say of the target. Which of these holds for what" in text
    text = exported(run, capsys, "---\nlicense: [mit, other]\nlicense_name: tongyi\n---\n")[1]
    assert "`mit` and `other`, called `tongyi`, as" in text
    front, text, said = exported(run, capsys, card, "--export.license", "mit")  # one of them is not all of them
    assert front["license"] == "mit" and "under `mit`, but the target's own files say `llama3.1` and `mit`, whose" in text
    assert "but the target's own files say llama3.1 and mit; the card" in said and "Which of these holds" in text


@pytest.mark.parametrize("card", [None, "---\nlicense: {a\n---\n", "# A card without front matter\n"])
def test_what_is_not_known_is_said_once_and_not_made_up(run, capsys, card):
    front, text, said = exported(run, capsys, card)
    assert "license" not in front and made(run)["license"] is made(run)["target_license"] is None
    assert text.count(MISSING) == 1 and "warning" not in said


def test_a_recipe_that_names_another_one_keeps_it_and_both_are_said(run, capsys):
    front, text, said = exported(run, capsys, "---\nlicense: llama3.1\n---\n", "--export.license", "mit")
    assert front["license"] == "mit" and "put under `mit`, but the target's own files say `llama3.1`" in text
    (line,) = [line for line in said.splitlines() if line.startswith("warning:")]
    assert line.startswith("warning: export.license is mit, but the target's own files say llama3.1; the card says both.")


@pytest.mark.parametrize("card", [None, "---\nlicense: MIT\n---\n"])
def test_a_recipe_that_nothing_speaks_against_is_left_alone(run, capsys, card):
    front, text, said = exported(run, capsys, card, "--export.license", "mit")
    assert front["license"].lower() == "mit" and "warning" not in said and MISSING not in text and "put under" not in text


def test_the_section_stays_when_the_card_is_written_again(run, capsys):
    exported(run, capsys, "---\nlicense: llama3.1\n---\n")
    (run[0] / "README.md").unlink()
    assert "as the target's own files say" in licence_text(made(run))  # of drafttrain.json alone


def test_words_of_a_file_are_no_markdown_and_no_yaml(run, capsys):
    sly = "---\nlicense: other\nlicense_name: 'a` [x](http://evil) `b: # c'\nlicense_link: 'https://a.b/<script>'\n---\n"
    front, text, _ = exported(run, capsys, sly)
    assert front["license_name"] == "a` [x](http://evil) `b: # c"
    assert "called `a' [x](http://evil) 'b: # c`" in text and "at <" not in text


def test_an_export_of_an_earlier_version_says_nothing_new():
    assert licence_text({"license": None}) == ""


def test_a_gguf_says_its_licence_and_what_it_was_made_from(tiny_llama, tmp_path, monkeypatch):

    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_string("general.license", "apache-2.0")
    writer.add_string("general.source.huggingface.repository", "org/Tiny-Instruct")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setattr(tiny_llama, "identity", replace(tiny_llama.identity, path=str(tmp_path / "tiny.gguf")))
    net = Eagle3(taps=[0, 1, 3], depth=3).build(tiny_llama, DraftVocabulary.full(tiny_llama.vocab))
    found = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(format="speculators"), None)
    assert (found["license"], found["base_model"], found["identity"]["path"]) == ("apache-2.0", "org/Tiny-Instruct", "tiny.gguf")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/Tiny-Instruct"
    named = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(base_model="me/own"), None)
    assert named["base_model"] == "me/own"


def test_a_recipe_of_the_same_words_takes_the_name_and_link_along():
    found = licence_of("other", Origin("other", "tongyi", "https://a.b/c"), None)
    assert found["license_name"] == "tongyi" and found["license_link"] == "https://a.b/c"
