"""Every class of drafters in every format that can hold it, having learnt some answers: read back it accepts the same drafts in every round, so tau
is the same, and in fp32 its logits are equal bit for bit (on a target that scales nothing, where every format copies the weights). In bf16 they are those of the drafter rounded.

`test_round_trip.py` does the same for every option with drafters that know nothing, whose drafts are all refused alike.
"""

import pytest
import torch

from drafttrain.decoding.engine import generate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.heads import Hydra
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.registry import known_drafters
from drafttrain.export.config import FORMATS as ASKED
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.export.registry import ENTRIES
from drafttrain.vocab import DraftVocabulary
from export.test_broken import BLOCK, DRAFTS, LEARNT, TAPS, H, answers, by_heart, requests  # noqa: F401  (fixtures)
from export.test_round_trip import logits_of

MORE = {
    "hass": (Eagle(depth=DRAFTS, bias=True), 60),
    "dflash2": (DFlash2(**BLOCK, window=None), 100),
    "hydra": (Hydra(heads=DRAFTS), 150),
    "independent": (Independent(hidden=H, intermediate=64, heads=4, kv_heads=2, layers=2, depth=DRAFTS, tied=False), 150),
}
LEARNERS = {name: LEARNT[name] for name in ("eagle3", "eagle1", "dflash", "dspark", "p-eagle", "medusa")} | MORE


@pytest.fixture(scope="module")
def learner(tiny_llama, answers):  # noqa: F811
    """name -> a drafter that knows the answers, taught when first asked for."""
    made = {}

    def net(name):
        if name not in made:
            made[name] = by_heart(tiny_llama, *LEARNERS[name], answers, DraftVocabulary.full(tiny_llama.vocab))
        return made[name]

    return net


def formats_of(name: str) -> list[str]:
    can = {engine for format in ENTRIES[type(LEARNERS[name][0])].formats for engine in format.engine_names}
    return [asked for asked in ASKED if asked in {*can, "native"} and (name, asked) != ("hass", "vllm")]


def accepted(target, net, asked) -> dict[str, list[int]]:
    return {r.key: r.accepted for r in generate(target, asked, proposer=ChainProposer(net, DRAFTS), slots=len(asked))}


def tau(found: dict[str, list[int]]) -> float:
    rounds = [count for counts in found.values() for count in counts]
    return 1 + sum(rounds) / len(rounds)


@pytest.mark.parametrize(("name", "asked"), [(name, asked) for name in LEARNERS for asked in formats_of(name)])
def test_the_same_rounds_and_the_same_logits(tiny_llama, tmp_path, learner, requests, name, asked):  # noqa: F811
    net = learner(name)
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(dtype="float32", format=asked), None)
    again = load_export(tmp_path / "export", tiny_llama)
    assert torch.equal(logits_of(again, tiny_llama), logits_of(net, tiny_llama))
    before, after = (accepted(tiny_llama, each, requests) for each in (net, again))
    assert after == before and tau(before) > 2  # not all are refused


@pytest.mark.parametrize("name", LEARNERS)
def test_in_bf16_it_is_the_drafter_rounded(tiny_llama, tmp_path, learner, requests, name):  # noqa: F811
    net = learner(name)
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None)
    again, trained = load_export(tmp_path / "export", tiny_llama), dict(net.named_parameters())
    for key, weight in again.named_parameters():
        in_fp32 = key.startswith("confidence")  # as engines hold that head
        assert torch.equal(weight, trained[key] if in_fp32 else trained[key].bfloat16().float()), key
    before, after = (tau(accepted(tiny_llama, each, requests)) for each in (net, again))
    assert after > 0.9 * before > 1.8


def test_every_class_is_among_them():
    assert {type(config).__name__ for config, _ in LEARNERS.values()} == set(known_drafters())
