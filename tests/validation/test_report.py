"""The Markdown says what the numbers say: losslessness first where it failed, slower where it is slower, with the arithmetic."""

import copy
import re

import pytest

from drafttrain.markdown import table
from drafttrain.validation.report import render
from drafttrain.validation.samples import Sample

METHOD = {
    "tau": 1.4,
    "lossless": True,
    "tokens": 3120,
    "rounds": 2200,
    "acceptance_by_depth": [0.3, 0.0, 0.0],
    "reach_by_depth": [0.3, 0.0, 0.0],
    "rounds_by_accepted": [1540, 495, 165, 0],
    "tau_by_position": [1.5, 1.4, None],
    "seconds": 150.0,
    "tokens_per_second": 20.8,
    "speedup": 0.66,
}
RESULT = {
    "name": "trial",
    "tau": 1.4,
    "simulated_tau": 1.401,
    "lossless": True,
    "prompts": 20,
    "tokens": 3120,
    "rounds": 2200,
    "tokens_per_second": 20.8,
    "baseline_tokens_per_second": 31.5,
    "drafts": 3,
    "speedup": 0.66,
    "cost_ratio": 2.0,
    "methods": {"drafter": METHOD, "lookup": METHOD | {"tau": 1.1}, "untrained": METHOD | {"tau": 1.0}},
    "positions": [[0, 32], [32, 64], [64, 128]],
    "repeated_by_position": [0.0, 0.125, None],
    "plain": {"tokens": 3120, "seconds": 99.0, "tokens_per_second": 31.5},
    "differences": [],
    "simulation": {"tau": 1.401, "rounds": 2200, "relative_difference": 0.0007, "first_disagreement": None},
    "cost": {
        "batch": 8,
        "tokens": 24,
        "plain_step_seconds": 0.1,
        "round_seconds": 0.2,
        "ratio": 2.0,
        "implied_speedup": 0.7,
        "assumed": [{"ratio": 1.1, "implied_speedup": 1.4 / 1.1}, {"ratio": 1.2, "implied_speedup": 1.4 / 1.2}],
    },
    "config": {"drafts": 3, "max_tokens": 256, "slots": 8, "prompts": None},
    "target": {"path": "some/target", "revision": "abc", "dtype": "float32"},
    "end_ids": [2],
    "draft_vocabulary": {"size": 4096, "target_size": 49152, "coverage": 0.951},
    "hardware": {
        "device": "cpu",
        "cpu": "Some CPU",
        "cores": 2,
        "threads": 2,
        "gflops_2048_fp32": 151.2,
        "python": "3.11.9",
        "torch": "2.13.0",
    },
    "versions": {"transformers": "5.24.0"},
    "commit": "0123abc",
    "command": "python -m drafttrain validate --config R",
    "date": "2026-01-01T00:00:00+00:00",
}


@pytest.fixture
def result():
    return copy.deepcopy(RESULT)


def head(text: str) -> str:
    return text.split("## By method")[0]


def test_first_lines_hold_tau_losslessness_and_speed(result):
    lines = head(render(result, [], {})).strip().splitlines()
    assert lines[0] == "# Validation of trial"
    assert (
        lines[2].startswith("- **tau 1.400**") and "prompt lookup 1.100" in lines[2] and "the untrained drafter 1.000" in lines[2]
    )
    assert "Lossless" in lines[3] and "all 20 prompts (3,120 tokens)" in lines[3]
    assert "20.8 tokens/s" in lines[4] and "31.5" in lines[4] and "0.66×, slower, because a round costs c = 2.00" in lines[4]


def test_speed_section_shows_the_arithmetic_measured_and_assumed(result):
    text = render(result, [], {})
    assert "c = 200.0 / 100.0 = 2.00" in text
    assert "1.400 / 2.00 = **0.70×**" in text
    assert "| assumed | 1.10 | 1.400 / 1.10 = 1.27× |" in text
    assert "not measurements" in text


def test_a_faster_gpu_is_not_called_slower_and_gets_no_word_on_cpus(result):
    result["hardware"] |= {"device": "cuda", "gpu": "Some GPU", "cuda": "12.8"}
    result["speedup"] = 1.3
    text = render(result, [], {})
    assert "slower" not in head(text)
    assert "A CPU is busy" not in text
    assert "Some GPU (CUDA 12.8)" in text


def test_a_loss_of_losslessness_stands_first_and_is_located(result):
    result["lossless"] = False
    result["methods"]["lookup"] |= {"lossless": False}
    result["differences"] = [{"method": "lookup", "key": "p7", "position": 12, "plain": 31, "other": None, "gap": None}]
    text = render(result, [], {})
    assert head(text).splitlines()[2].startswith("- **NOT LOSSLESS**") and "1 of 20 prompts" in head(text)
    assert "| lookup | p7 | 12 | 31 | ended |" in head(text)
    assert re.search(r"\| prompt lookup \| 1\.100 \| \*\*NO\*\* \|", text)


def test_undefined_acceptance_reads_na_and_disagreement_is_named(result):
    result["simulation"]["first_disagreement"] = {"prompt": "p3", "round": 4, "simulated": 2, "measured": 1}
    text = render(result, [], {})
    assert "| the drafter | of the rounds that got there | 30.0% | 0.0% | n/a |" in text
    assert "prompt p3, round 4: simulated 2 accepted, measured 1" in text


def test_without_a_cost_the_report_says_so(result):
    result |= {"cost": None, "cost_ratio": None}
    assert "no cost ratio" in render(result, [], {})


def test_figures_samples_and_provenance(result):
    text = render(result, [Sample("p1", "Why?", "a <ins><b>b</b></ins>")], {"tau by method": "tau.png"})
    assert "![tau by method](tau.png)" in text
    assert "**p1**: Why?\n\n<pre>a <ins><b>b</b></ins></pre>" in text
    for fact in (
        "0123abc",
        "Some CPU, 2 cores, 2 threads; 151 GFLOP/s",
        "4,096 of 49,152 tokens: 95.1%",
        "eos_token_id=[2]",
        "python 3.11.9, torch 2.13.0, transformers 5.24.0",
    ):
        assert fact in text


def test_table_escapes_bars():
    assert table(["a"], [["x|y\nz"]]) == "| a |\n| --- |\n| x\\|y z |"


def test_tau_by_position_stands_beside_the_share_of_repeated_text(result):
    text = render(result, [], {})
    assert "| the drafter | 1.500 | 1.400 | n/a |" in text and "| repeated text | 0.0% | 12.5% | n/a |" in text
    assert "| tau of rounds that begin at token | 0-32 | 32-64 | 64-128 |" in text


def test_the_untrained_drafter_is_not_taken_for_the_one_that_training_began_from(result):
    text = render(result, [], {})
    assert "before its first step" not in text and "began from (`checkpoint.start`) is another one" in text


def test_a_round_is_blamed_for_being_slower_only_where_the_arithmetic_says_so(result):
    result |= {"tau": 1.151, "cost_ratio": 1.11}
    result["cost"] |= {"ratio": 1.11, "implied_speedup": 1.151 / 1.11}
    text = head(render(result, [], {}))
    assert "0.66×, slower, though tau / c = 1.151 / 1.11 = 1.04×: each pass" in text and "run validate again" in text
    assert "because" not in text and "a machine with" not in text


@pytest.mark.parametrize(("c", "told"), [(1.08, False), (1.11, False), (1.3, True)])
def test_a_cheaper_machine_is_named_only_where_it_would_be_cheaper(result, c, told):
    result |= {"tau": 1.05, "cost_ratio": c}
    result["cost"] |= {"ratio": c, "implied_speedup": 1.05 / c}
    text = head(render(result, [], {}))
    assert f"because a round costs c = {c:.2f} plain steps here" in text and ("a machine with c = 1.1" in text) == told


def test_prompt_lookup_that_is_ahead_is_named_in_the_first_lines(result):
    assert "is ahead" not in head(render(result, [], {}))
    result["tau"] = 1.027
    result["methods"]["lookup"] |= {"tau": 2.801}
    words = "- Prompt lookup, which needs no training, is ahead (tau 2.801 against 1.027): train longer or on more chats."
    assert words in head(render(result, [], {}))
    del result["methods"]["lookup"]
    assert "is ahead" not in head(render(result, [], {}))


TIE = {"method": "lookup", "key": "p7", "position": 12, "plain": 31, "other": 5, "gap": -1e-7}


def test_ties_are_told_as_such_and_faults_stand_first(result):
    result["lossless"] = False
    result["methods"]["lookup"] |= {"lossless": False}
    result["differences"] = [TIE]
    text = render(result, [], {})
    words = "differs from plain decoding on 1 of 20 prompts, where two tokens tie (gap up to 1e-07) and rounding breaks the tie either way."
    assert f"- Lossless but for ties: output {words}" in head(text)
    assert "NOT LOSSLESS" not in text and "| prompt lookup | 1.100 | but for ties |" in text and "**NO**" not in text
    for gap in (-0.5, 0.5, None):
        result["differences"] = [TIE, TIE | {"key": "p8", "gap": gap}]
        text = render(result, [], {})
        assert head(text).splitlines()[2].startswith("- **NOT LOSSLESS**: output differs from plain decoding on 1 of 20 prompts.")
        assert "| prompt lookup | 1.100 | **NO** |" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_advised_only_where_it_is_not_had(result, dtype):
    result["target"] |= {"dtype": dtype}
    result |= {"lossless": False, "differences": [TIE]}
    assert render(result, [], {}).count("`--target.dtype float32` settles it") == (0 if dtype == "float32" else 2)


def test_one_of_a_thing_is_called_so(result):
    result |= {"prompts": 1, "tokens": 1, "drafts": 1}
    text = render(result, [], {})
    assert "with 1 draft (" in text and "on the 1 prompt (1 token)." in text and "A round drafts 1 token," in text
