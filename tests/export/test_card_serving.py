"""The serving commands of every drafter in every format: the engine's word for the method, and the number of drafts that the net was trained for."""

import json
import shlex

import pytest

from drafttrain.export.card import write_card
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from export.test_card import REPORT, commands
from export.test_round_trip import CASES, DRAFTERS, FULL, net_for, why_not

MEASURED = 2
"""Drafts of a round in the report below."""
WORDS = {
    "Eagle3": ("eagle3", "EAGLE3"), "Eagle": ("eagle", "EAGLE"), "PEagle": ("eagle3", None), "DFlash": ("dflash", "DFLASH"),
    "DFlash2": ("dflash", "DFLASH"), "DSpark": ("dspark", "DSPARK"), "Medusa": ("medusa", None), "Independent": ("draft_model", "STANDALONE"),
}  # fmt: skip
"""Class -> what vLLM and SGLang call it."""
WHOLE = {"DFlash": -1, "DFlash2": -1, "DSpark": 0}
"""A block is drafted whole: its slots, less the anchor's where that says nothing."""


def drafts_of(net, measured: bool) -> int:
    kind = type(net.config).__name__
    return net.config.block + WHOLE[kind] if kind in WHOLE else MEASURED if measured else 3


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (name, asked)
        for name, asked, size in CASES
        if size == FULL and asked != "native" and why_not(name, asked, size, "llama") is None
    ],
)
def test_commands_ask_for_what_was_trained(tiny_llama, tmp_path, name, asked):
    net, folder = net_for(tiny_llama, name, FULL), tmp_path / "export"
    export_drafter(net, tiny_llama, folder, ExportConfig(format=asked, push="me/it", base_model="org/target"), None)
    report = REPORT | {key: REPORT[key][:MEASURED] for key in ("acceptance_by_depth", "reach_by_depth")}
    for measured in (None, report):
        write_card(folder, measured)
        found = commands((folder / "README.md").read_text())
        assert len(found) == sum("serve" in words or "sglang.launch_server" in words for words in found) > 0
        vllm, sglang = WORDS[type(net.config).__name__]
        drafts = drafts_of(net, measured is not None)
        for words in found:
            if words[0] == "vllm":
                assert words[:3] == ["vllm", "serve", "org/target"]
                told = json.loads(words[words.index("--speculative-config") + 1])
                assert (told["method"], told["num_speculative_tokens"], told["model"]) == (vllm, drafts, "me/it"), shlex.join(
                    words
                )
                assert (told.get("parallel_drafting") is True) == (type(net.config).__name__ == "PEagle")
                continue
            flags = dict(zip(words[3::2], words[4::2], strict=True))
            assert flags["--model-path"] == "org/target" and flags["--speculative-draft-model-path"] == "me/it"
            assert flags["--speculative-algorithm"] == sglang and int(flags["--speculative-num-draft-tokens"]) == drafts + 1
            chain = None if type(net.config).__name__ in WHOLE else str(drafts)
            assert flags.get("--speculative-num-steps") == chain
        assert {"vllm": "vllm", "sglang": "python"}.get(asked, found[0][0]) in {words[0] for words in found}


def test_every_drafter_that_an_engine_serves_is_among_them():
    assert {type(config).__name__ for config in DRAFTERS.values()} - {"Hydra"} == set(WORDS)
