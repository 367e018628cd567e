"""The speculators library's own classes (0.9.0, no dependency of ours) against our nets: every kind that is written in its form (slow)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter

from .test_eagle3 import DRAFTS, PROMPT, V31, edit_tensors, hf_hidden_states, text
from .test_eagle_medusa import make_net, ours

NEEDED = ("speculators==0.9.0", "hs-connectors==0.9.0", "loguru", "openai", "pydantic-settings", "python-dotenv", "sniffio")
"""The library and what it imports that is not installed already."""
WORKER = Path(__file__).with_name("speculators_worker.py")
CASES = {
    "eagle3": (Eagle3(taps=[0, 1, 3], depth=DRAFTS), 60),
    "eagle3 full": (Eagle3(taps=[2], depth=DRAFTS), None),
    "eagle3.1": (Eagle3(taps=[0, 1, 3], depth=DRAFTS, **V31), 60),
    "eagle3 low-rank": (Eagle3(taps=[1, 2], depth=DRAFTS, head_rank=7), 60),
    "p-eagle": (PEagle(taps=[0, 1, 3], depth=5, layers=3, mask_token=319), 60),
    "p-eagle full": (PEagle(taps=[1, 2], depth=4, layers=2, mask_token=317, fc_norm=True), None),
    "p-eagle one draft": (PEagle(taps=[2], depth=1, layers=1, mask_token=318), 319),
    "dflash": (DFlash(block=5, layers=2, taps=[0, 2], mask_token=319), None),
    "dflash reduced": (DFlash(block=5, layers=2, taps=[0, 2], mask_token=319), 60),
    "dflash deep": (DFlash(block=7, layers=3, taps=[1, 2], mask_token=318), 319),
    "dspark": (DSpark(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6), None),
    "dspark reduced": (DSpark(block=4, layers=3, taps=[1, 2, 3], mask_token=318, rank=3), 60),
    "dspark headless": (DSpark(block=5, layers=1, taps=[0, 2], mask_token=319, rank=6, confidence=False), 319),
    "dflash2": (DFlash2(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6, candidates=4, group=8, window=None), None),
    "dflash2 deep": (DFlash2(block=7, layers=3, taps=[1, 2], mask_token=318, rank=3, candidates=9, group=4, window=None), None),
}  # fmt: skip
CLASSES = {
    Eagle3: "Eagle3DraftModel", PEagle: "PEagleDraftModel", DFlash: "DFlashDraftModel", DFlash2: "DFlash2DraftModel", DSpark: "DSparkDraftModel",
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the library."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *NEEDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"speculators 0.9.0 cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return site


def asked_of(target, folder, config, draft_vocab):
    """A case for the worker, and what our net says to it: logits [K, Vd], and confidences [K] or None."""
    net = make_net(target, config, draft_vocab)
    export_drafter(net, target, folder, ExportConfig(dtype="float32", format="speculators"), None)
    _name_target(folder / "config.json", target.identity.path)
    drafts = net.deepest or DRAFTS
    sequences = text(net, PROMPT + 2 * drafts + 3)
    taps_TAD = hf_hidden_states(target, sequences.ids_BT, [tap + 1 for tap in net.needs.taps])
    features, layout = target.read_packed(sequences, net.needs.taps), net.layout(sequences, drafts)
    drafted = net.rows(sequences, features, layout)
    mine = layout.anchor_N == PROMPT
    wanted = [face[:, net.vocabulary.ids] for face in ours(net, target, sequences, drafts)]
    sure_K = net.confidence(drafted.hidden_NH[mine], drafted.prev_N[mine])
    case = {"folder": str(folder), "ids": sequences.ids_BT[0], "taps": taps_TAD.flatten(1), "anchor": PROMPT, "drafts": drafts}
    return case, (*wanted, sure_K)


def _name_target(file, path):
    """What the export's note asks for where the target has no Hub id: its folder on the machine that loads it."""
    config = json.loads(file.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = path
    file.write_text(json.dumps(config))


def answered(cases, library, place):
    """The same cases with the library's answers."""
    torch.save(cases, place)
    done = subprocess.run(
        [sys.executable, str(WORKER), str(library), str(place)], capture_output=True, text=True, timeout=600,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(place)


def gap(got_KV, wanted_KV, config):
    """Largest difference, as a share of the largest logit where that is above 1. Of a selector's, the candidates': they must be the same ones."""
    if isinstance(config, DFlash2):
        wanted_KV = wanted_KV.masked_fill(wanted_KV < wanted_KV.topk(config.candidates).values[:, -1:], -torch.inf)
    assert torch.equal(got_KV.isfinite(), wanted_KV.isfinite())
    told = wanted_KV.isfinite()
    return float((got_KV - wanted_KV)[told].abs().max()) / max(1.0, float(wanted_KV[told].abs().max()))


@pytest.mark.slow
@torch.no_grad()
def test_the_librarys_own_classes_give_our_logits(tiny_llama, tmp_path, library):
    """Those of the training face and of the decoding face, and confidences; and no tensor is left over on either side."""
    cases, wanted = zip(*(asked_of(tiny_llama, tmp_path / name, *case) for name, case in CASES.items()), strict=True)
    for name, case, (trained, decoded, sure) in zip(CASES, answered(cases, library, tmp_path / "work.pt"), wanted, strict=True):
        config, _ = CASES[name]
        assert case["class"] == CLASSES[type(config)] and case["left"] == [], name
        gaps = [gap(case["logits"], face, config) for face in (trained, decoded)]
        assert (case["sure"] is None) == (sure is None)
        gaps += [] if sure is None else [gap(case["sure"], sure, config)]
        print(f"{name:20} {case['class']:18} {case['logits'].shape[0]} drafts, gaps {', '.join(f'{x:.1e}' for x in gaps)}")
        assert max(gaps) <= 1e-4, name


MISTAKES = {
    "p-eagle": {"mask_hidden": lambda x: x.mul_(2), "layers.1.input_layernorm.weight": lambda x: x.mul_(2), "fc.weight": lambda x: x.copy_(x.flip(1))},
    "dspark": {"markov_head.markov_w1.weight": lambda x: x.copy_(x.roll(1, 0)), "layers.0.self_attn.k_norm.weight": lambda x: x.fill_(1)},
    "dflash2": {
        "layers.0.attention_conv.base_kernel": lambda x: x.copy_(x.flip(0)),
        "candidate_selector.predecessor_codebook": lambda x: x.copy_(x.roll(1, 0)),
    },
}  # fmt: skip


@pytest.mark.slow
@torch.no_grad()
def test_the_comparison_notices_a_tensor_that_is_another(tiny_llama, tmp_path, library):
    cases, wanted = [], []
    for name, changes in MISTAKES.items():
        for tensor, change in changes.items():
            folder = tmp_path / f"{name} {tensor}"
            case, said = asked_of(tiny_llama, folder, *CASES[name])
            edit_tensors(folder, lambda tensors, tensor=tensor, change=change: change(tensors[tensor]))
            cases.append(case)
            wanted.append(said[0])
    for case, trained in zip(answered(cases, library, tmp_path / "work.pt"), wanted, strict=True):
        got = case["logits"]
        told = got.isfinite()
        assert float((got - trained)[told].abs().max()) > 1e-2, case["folder"]
