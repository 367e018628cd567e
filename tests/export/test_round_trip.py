"""Every drafter in every format that can hold it: exported, read back, the same net; and drafts of it leave the target's words alone."""

import json
import re
from dataclasses import fields, replace

import pytest
import torch
from drafters.test_eagle3 import chat
from drafters.test_faces import DRAFTERS as FACES
from drafters.test_faces import shaken

from drafttrain.decoding.engine import generate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.registry import known_drafters
from drafttrain.errors import UserError
from drafttrain.export import export
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.export.registry import ENTRIES, FORMATS, Entry
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary

DRAFTERS = FACES | {"dflash2 all rows": replace(FACES["dflash2"], window=None)}
ASKED = ("vllm", "sglang", "speculators", "transformers", "native")
ONE_OF_FIVE_MISSING, FULL = "reduced", "full"


def why_not(name: str, asked: str, size: str, architecture: str) -> str | None:
    """What the refusal of this drafter says; None where it can be written."""
    entry, reduced, scaled = ENTRIES.get(type(DRAFTERS[name]), Entry()), size == ONE_OF_FIVE_MISSING, architecture == "gemma3"
    if asked == "native":
        return None
    if asked not in {engine for format in entry.formats for engine in format.engine_names}:
        others = {"transformers": "stand-alone language models alone", "speculators": "the library has no form of it"}
        return others.get(asked) or re.escape(entry.otherwise) or "knows no form of"
    rules = (
        {
            ("eagle1", "vllm"): (reduced, "every token of the target"),
            ("hass", "vllm"): (True, "bias"),
            ("medusa", "vllm"): (reduced, "stops at a token_map"),
            ("medusa own heads", "vllm"): (reduced, "stops at a token_map"),
            ("dflash", "sglang"): (reduced or scaled, "every token of the target" if reduced else "the raw ones"),
            ("dflash window", "sglang"): (True, "every token of the target" if reduced else "window of 7"),
            ("dflash", "speculators"): (scaled, "the raw ones"),
            ("dflash window", "speculators"): (True, "window from the anchor"),
            ("dspark", "vllm"): (scaled, "caps or scales"),
            ("dspark", "sglang"): (reduced or scaled, "caps or scales" if scaled else "every token of the target"),
            ("dspark", "speculators"): (scaled, "caps or scales"),
            ("dflash2", "vllm"): (reduced, "among all tokens"),
            ("dflash2", "sglang"): (True, "among all tokens" if reduced else "a window of 2048"),
            ("dflash2", "speculators"): (True, _selects(reduced, scaled) or "window from the anchor"),
            ("dflash2 all rows", "vllm"): (reduced, "among all tokens"),
            ("dflash2 all rows", "sglang"): (reduced or scaled, "among all tokens" if reduced else "the raw ones"),
            ("dflash2 all rows", "speculators"): (reduced or scaled, _selects(reduced, scaled)),
        }
        | {
            (window, engine): (True, "sees all positions, and this drafter the last [25]; set export.format to vllm")
            for window in ("eagle3 window", "eagle3 window shorter than a draft")
            for engine in ("sglang", "speculators")
        }
        | {
            (independent, engine): (reduced, "every token of the target")
            for independent in ("independent", "independent qk-norm")
            for engine in ("vllm", "sglang", "transformers")
        }
    )
    holds, reason = rules.get((name, asked), (False, None))
    return reason if holds else None


def _selects(reduced: bool, scaled: bool) -> str:
    """What speculators' form of DFlash 2 cannot say of a selector."""
    return "among all tokens" if reduced else "caps or scales its logits, and speculators" if scaled else ""


ENGINE_FIXED = {"eagle3 low-rank": {"head_rank": None}}
"""What reads back otherwise than it was trained: engines have no factored heads."""
CASES = [(name, asked, size) for name in DRAFTERS for asked in ASKED for size in (ONE_OF_FIVE_MISSING, FULL)]


def net_for(target, name, size, drafters=DRAFTERS):
    torch.manual_seed(0)
    ids = torch.arange(target.vocab)
    vocabulary = (
        DraftVocabulary(ids[ids % 5 != 4], target.vocab) if size == ONE_OF_FIVE_MISSING else DraftVocabulary(ids, target.vocab)
    )
    return shaken(drafters[name].build(target, vocabulary))


@torch.no_grad()
def logits_of(net, target):
    """Of every element of a fixed chat, and of single decoding steps behind its sixth token."""
    sequences = chat("0000111111110001111100")
    features = target.read_packed(sequences, net.needs.taps)
    drafted = net.rows(sequences, features, net.layout(sequences, 4))
    logits_NV, sure_N = (ask(drafted.hidden_NH, drafted.prev_N) for ask in (net.logits, net.confidence))
    return logits_NV if sure_N is None else torch.cat([logits_NV, sure_N[:, None]], dim=1)


def plain(target, requests):
    return {r.key: r.ids for r in generate(target, requests, slots=2)}


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("name", "asked", "size"), CASES)
def test_what_is_exported_is_what_is_read_back(targets, tmp_path, architecture, name, asked, size):
    target, config = targets(architecture), ExportConfig(dtype="float32", format=asked)
    net = net_for(target, name, size)
    if reason := why_not(name, asked, size, architecture):
        with pytest.raises(UserError, match=reason):
            export_drafter(net, target, tmp_path / "export", config, None)
        assert not list(tmp_path.iterdir())
        return
    made = export_drafter(net, target, tmp_path / "export", config, None)
    again = load_export(tmp_path / "export", target)
    wanted = logits_of(net, target)
    torch.testing.assert_close(logits_of(again, target), wanted, rtol=0, atol=1e-5 * max(1.0, float(wanted.abs().max())))
    assert float(wanted.std()) > 0.1  # the comparison is not one of constants
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert [format.name for format in FORMATS.values() if format.claims(config)] == [made["format"]]
    native = {} if asked == "native" else ENGINE_FIXED.get(name, {})
    assert again.config == replace(net.config, **native) and torch.equal(again.vocabulary.ids, net.vocabulary.ids)
    assert again.needs == net.needs and again.deepest == net.deepest and again.shape == net.shape and not again.training
    assert {engine.name for engine in FORMATS[made["format"]].engines} >= {asked} - {"native"}

    requests = [Request(f"p{i}", tuple(range(5 + i, 14 + 2 * i)), 12) for i in range(3)]
    spoken = generate(target, requests, proposer=ChainProposer(again, 4), slots=2)
    said = plain(target, requests)
    assert all(torch.equal(rollout.ids, said[rollout.key]) for rollout in spoken)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_half_precision_and_the_format_that_is_chosen_when_none_is_asked_for(tiny_llama, tmp_path, name):
    """The first engine that can, else ours; the reasons of those that cannot are told."""
    net = net_for(tiny_llama, name, ONE_OF_FIVE_MISSING)
    made = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None)
    can = [asked for asked in ASKED if why_not(name, asked, ONE_OF_FIVE_MISSING, "llama") is None]
    chosen = FORMATS[made["format"]]
    assert can[0] in ([engine.name for engine in chosen.engines] or ["native"])
    check = made["check"]
    assert check["against_cast"] <= 1e-6 * max(1, check["largest_logit"]) and 0.5 < check["same_first_choice"] <= 1
    assert (check["against_trained"] is None) == name.startswith("dflash2")  # behind a selector it would tell nothing
    assert check["against_trained"] is None or check["against_trained"] > 1e-6 * max(1, check["largest_logit"])
    told = [note for note in made["notes"] if "Not written for" in note]
    wanted = {
        "eagle3 window": "SGLang", "eagle3 window shorter than a draft": "SGLang",
        "eagle1": "vLLM", "hass": "vLLM", "medusa": "vLLM", "medusa own heads": "vLLM", "dflash": "SGLang", "dflash window": "SGLang", "dspark": "SGLang",
        "dflash2": "vLLM, SGLang and speculators", "dflash2 all rows": "vLLM, SGLang and speculators",
        "independent": "transformers, vLLM and SGLang", "independent qk-norm": "transformers, vLLM and SGLang",
    }  # fmt: skip
    assert [note.split(":")[0] for note in told] == [f"Not written for {engine}" for engine in filter(None, [wanted.get(name)])]
    otherwise = ENTRIES.get(type(net.config), Entry()).otherwise or "knows no form of"
    assert chosen.engines or told or otherwise[1:] in made["notes"][0]
    card = (tmp_path / "export" / "README.md").read_text()
    assert all(note in card for note in made["notes"])
    assert ("vllm serve" in card) == ("vllm" in card.split("---")[1]) == any(e.name == "vllm" for e in chosen.engines)


def test_our_own_record_is_not_needed(tiny_llama, tmp_path):
    """Engines have config.json and the tensors only: without drafttrain.json the net computes the same."""
    for name in DRAFTERS:
        net = net_for(tiny_llama, name, FULL)
        made = export_drafter(net, tiny_llama, tmp_path / name, ExportConfig(dtype="float32"), None)
        (tmp_path / name / "drafttrain.json").unlink()
        again = load_export(tmp_path / name, tiny_llama)
        torch.testing.assert_close(logits_of(again, tiny_llama), logits_of(net, tiny_llama), rtol=0, atol=2e-5)
        assert type(again.config) is type(net.config) and made["init_args"]


def test_a_file_that_is_not_what_was_meant_is_not_put_in_place(tiny_llama, tmp_path, monkeypatch):
    """The disk gives back other numbers than were written, in tensors that fit the table."""
    save = export.safetensors.torch.save
    monkeypatch.setattr(
        export.safetensors.torch, "save", lambda tensors, **kw: save({n: x * 1.001 for n, x in tensors.items()}, **kw)
    )
    for name in ("eagle1", "medusa", "hydra++"):
        with pytest.raises(UserError, match="does not read back"):
            export_drafter(net_for(tiny_llama, name, FULL), tiny_llama, tmp_path / "export", ExportConfig(dtype="float32"), None)
        assert not (tmp_path / "export").exists()


def test_a_net_in_training_mode_is_compared_without_noise_and_dropout(tiny_llama, tmp_path):
    for name in ("hass", "hydra++"):
        export_drafter(net_for(tiny_llama, name, FULL).train(), tiny_llama, tmp_path / name, ExportConfig(dtype="float32"), None)


def test_a_config_of_another_kind_is_refused(tiny_llama, tmp_path):
    export_drafter(net_for(tiny_llama, "medusa", FULL), tiny_llama, tmp_path / "export", ExportConfig(), None)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    for change, complaint in (
        ({"architectures": ["GPT2LMHeadModel"]}, "no drafter that can be read here"),
        ({"torch_dtype": "float16"}, "torch_dtype 'float16'"),
        ({"medusa_fc_bias": False}, "medusa_fc_bias false"),
        ({"num_heads": 3}, "blocks.3.layers.0.bias is not one of"),
    ):
        (tmp_path / "export" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=complaint):
            load_export(tmp_path / "export", tiny_llama)


def test_every_drafter_has_an_entry_and_every_format_a_name_of_its_own():
    assert {cls.__name__ for cls in ENTRIES} == set(known_drafters())
    formats = [format for entry in ENTRIES.values() for format in entry.formats]
    assert len(FORMATS) == len(formats) + 1
    assert all(entry.formats or entry.otherwise for entry in ENTRIES.values())


def test_a_drafter_without_an_entry_is_written_as_ours(tiny_llama, tmp_path, monkeypatch):
    net = net_for(tiny_llama, "medusa", FULL)
    monkeypatch.delitem(ENTRIES, type(net.config))
    made = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None)
    assert made["format"] == "native" and "knows no form of a Medusa" in made["notes"][0]
    assert {field.name for field in fields(net.config)} == made["init_args"].keys()


AS_ASKED = "Written for drafttrain alone, as asked: "


@pytest.mark.parametrize(
    ("name", "size", "told"),
    [
        ("hydra", FULL, ["No engine loads Hydra; drafttrain's own loop is the runtime."]),
        (
            "dflash", FULL,
            [AS_ASKED + "vLLM, SGLang and speculators can load the same drafter where export.format is vllm, sglang or speculators."],
        ),
        ("dspark", ONE_OF_FIVE_MISSING, [AS_ASKED + "vLLM and speculators can load the same", "Not written for SGLang: SGLang's DSpark says every token"]),
        ("dflash2", ONE_OF_FIVE_MISSING, ["Not written for vLLM, SGLang and speculators: engines choose a DFlash 2's candidates among all tokens"]),
        ("p-eagle", FULL, [AS_ASKED + "vLLM and speculators can load the same drafter where export.format is vllm or speculators."]),
    ],
)  # fmt: skip
def test_a_native_export_says_who_does_not_load_it_and_who_could(tiny_llama, tmp_path, name, size, told):
    made = export_drafter(net_for(tiny_llama, name, size), tiny_llama, tmp_path / "export", ExportConfig(format="native"), None)
    assert len(made["notes"]) == len(told) and all(
        note.startswith(start) for note, start in zip(made["notes"], told, strict=True)
    )
    card = (tmp_path / "export" / "README.md").read_text()
    assert "vLLM, SGLang and what reads speculators' files stop at its config.json" in card and "no server can draft" in card
