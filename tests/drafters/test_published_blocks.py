"""Block drafters and P-EAGLE under each published layout (published_builders.py): they come back as `checkpoint.start` and as they are, with the
same logits; a net that ours is not is refused with the reason."""

import json
from dataclasses import replace

import drafters.published_builders as builders
import pytest
import torch
from drafters.test_published import assert_same, begin, logits_of, refused, source, write

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.measured import AsPublished
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError

HERE = {"layers": 2, "mask_token": 319, "anchors": None}
FLASH = DFlash(block=5, taps=[0, 2], **HERE)
SPARK = DSpark(block=4, taps=[0, 2], rank=6, **HERE)
FLASH2 = DFlash2(block=5, taps=[1, 3], rank=6, candidates=4, group=8, window=9, **HERE)
DEEP = PEagle(taps=[0, 2, 3], depth=4, layers=3, mask_token=319, draft_vocab=200)
PUBLISHED = {
    "z-lab dflash": (FLASH, builders.zlab_dflash, "DFlash"),
    "z-lab dflash, usual taps": (replace(FLASH, taps=[]), builders.zlab_dflash_usual_taps, "DFlash"),
    "vllm dflash, window and few words": (replace(FLASH, window=7, draft_vocab=200), builders.vllm_dflash, "DFlash"),
    "speculators dflash": (FLASH, builders.speculators_dflash, "DFlash, speculators' fields"),
    "speculators dflash, few words": (
        replace(FLASH, draft_vocab=200),
        builders.speculators_dflash,
        "DFlash, speculators' fields",
    ),
    "specforge dflash2": (FLASH2, builders.specforge_dflash2, "DFlash 2"),
    "speculators dflash2": (replace(FLASH2, window=None), builders.speculators_dflash2, "DFlash 2, speculators' fields"),
    "vllm dspark": (SPARK, builders.vllm_dspark, "DSpark"),
    "specforge dspark": (SPARK, builders.specforge_dspark, "DSpark"),
    "specforge dspark, no confidence": (replace(SPARK, confidence=False), builders.specforge_dspark, "DSpark"),
    "speculators dspark": (replace(SPARK, draft_vocab=200), builders.speculators_dspark, "DSpark, speculators' fields"),
    "vllm p-eagle": (DEEP, builders.vllm_p_eagle, "P-EAGLE, vLLM's names"),
    "specforge p-eagle": (replace(DEEP, taps=[], draft_vocab=None), builders.specforge_p_eagle, "P-EAGLE, the original's names"),
    "speculators p-eagle": (DEEP, builders.speculators_p_eagle, "P-EAGLE, speculators' names"),
}


@pytest.fixture(params=sorted(PUBLISHED))
def published(request, tiny_llama, tmp_path):
    """(our configuration, the net, its folder, layout)."""
    config, build, layout = PUBLISHED[request.param]
    old = source(tiny_llama, config)
    return config, old, write(tmp_path / "it", *build(old)), layout


def test_it_comes_back_as_a_start(published, tiny_llama):
    config, old, folder, layout = published
    net, lines = begin(tiny_llama, config, folder)
    both = net.vocabulary.ids[old.vocabulary.t2d[net.vocabulary.ids]]  # with the target's head the recipe chooses tokens anew
    assert len(both) > 50
    torch.testing.assert_close(logits_of(net, tiny_llama, both), logits_of(old, tiny_llama, both), rtol=1e-5, atol=1e-5)
    assert any(line.startswith(f"starting from {folder}: {layout}, {len(net.state_dict())} tensors") for line in lines)
    guessed = "which token stands for a masked one"
    assert [line for line in lines if line.startswith("note") and guessed not in line] == []


def test_it_comes_back_as_it_is(published, tiny_llama):
    """Under a recipe of another drafter: the folder says all. Of SpecForge's P-EAGLE it does not, and the recipe's word is taken."""
    config, old, folder, _ = published
    said = json.loads((folder / "config.json").read_text())
    like = config if said["architectures"] == ["PEagleDraftModel"] else Eagle3()
    own = AsPublished.open(str(folder), False, like, tiny_llama)
    net, _ = own.build()
    assert torch.equal(net.vocabulary.ids, old.vocabulary.ids) and net.needs.taps == old.needs.taps and net.mask == old.mask
    assert_same(net, old, tiny_llama)


def test_a_p_eagle_drafts_as_many_tokens_as_its_folder_says(tiny_llama, tmp_path):
    """Else as many as the recipe says of a P-EAGLE, and else as many as one usually does."""
    said, silent = (
        write(tmp_path / name, *build(source(tiny_llama, DEEP)))
        for name, build in (("said", builders.speculators_p_eagle), ("silent", builders.vllm_p_eagle))
    )
    cases = (
        (said, Eagle3(), 4),
        (said, replace(DEEP, depth=6), 4),
        (silent, replace(DEEP, depth=6), 6),
        (silent, Eagle3(), PEagle().depth),
    )
    for folder, like, depth in cases:
        assert AsPublished.open(str(folder), False, like, tiny_llama).build()[0].deepest == depth


def bent(name, tiny_llama, folder, **changes):
    """The folder of a case, with other fields: nested ones as dflash_config={...}."""
    config, build, _ = PUBLISHED[name]
    said, tensors = build(source(tiny_llama, config))
    for key, value in changes.items():
        said[key] = said.get(key, {}) | value if isinstance(value, dict) else value
    return config, write(folder, said, tensors)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("z-lab dflash", {"dflash_config": {"sample_from_anchor": True}}, "samples from the anchor (slot 0 drafts the first token), and our DFlash does not"),
        ("vllm dspark", {"dspark_bonus_anchor": True}, "is 1+N (slot 0 is the anchor), and our DSpark does not"),
        ("speculators dspark", {"sample_from_anchor": False}, "is 1+N (slot 0 is the anchor)"),
        ("specforge dspark", {"is_causal": True}, "it is causal, and the slots of our DSpark see each other"),
        ("z-lab dflash", {"dflash_config": {"causal": True}}, "it is causal"),
        ("vllm dspark", {"markov_head_type": "gated"}, "markov_head_type is gated"),
        ("z-lab dflash", {"dflash_config": {"projector_type": "domino"}}, "projector_type is domino"),
        ("z-lab dflash", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, "some of its layers slide"),
        (
            "speculators dflash",
            {"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}},
            "its window is counted from the anchor",
        ),
        ("specforge dflash2", {"dflash_config": {"conv_kernel_size": 3}}, "conv_kernel_size is 3"),
        ("specforge dflash2", {"dflash_config": {"final_logit_softcapping": 30.0}}, "a cap of 30.0, and this target's have 1 and None"),
        ("vllm p-eagle", {"norm_before_residual": True}, "norm_before_residual is true"),
    ],
)  # fmt: skip
def test_what_our_blocks_cannot_compute_is_refused_with_the_reason(tiny_llama, tmp_path, name, changes, sentence):
    config, folder = bent(name, tiny_llama, tmp_path, **changes)
    assert sentence in refused(tiny_llama, config, folder)
    with pytest.raises(UserError, match="is no net that can be built here") as caught:
        AsPublished.open(str(folder), False, config, tiny_llama)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("z-lab dflash", {"block": 6}, "drafter.init_args.block is 6, its own 5"),
        ("z-lab dflash", {"mask_token": 318}, "drafter.init_args.mask_token is 318, its own 319"),
        ("z-lab dflash", {"taps": [0, 3]}, "drafter.init_args.taps is [0, 3], its own [0, 2]"),
        ("vllm dflash, window and few words", {"window": None}, "drafter.init_args.window is null, its own 7"),
        ("vllm dspark", {"confidence": False}, "drafter.init_args.confidence is false, its own true"),
        (
            "specforge dflash2",
            {"candidates": 5, "group": 16},
            "candidates is 5, its own 4; drafter.init_args.group is 16, its own 8",
        ),
        ("vllm p-eagle", {"layers": 2}, "drafter.init_args.layers is 2, its own 3"),
    ],
)
def test_another_net_than_the_recipe_s_is_refused_with_what_to_set(tiny_llama, tmp_path, name, changes, sentence):
    config, folder = bent(name, tiny_llama, tmp_path)
    assert sentence in refused(tiny_llama, replace(config, **changes), folder)


def test_a_recipe_that_leaves_the_mask_open_means_the_one_that_is_chosen(tiny_llama, tmp_path, monkeypatch):
    config, folder = bent("z-lab dflash", tiny_llama, tmp_path)
    for chosen, module in ((319, "warm_start"), (319, "block"), (318, "warm_start")):
        monkeypatch.setattr(
            f"drafttrain.drafters.{module}.mask_token", lambda target, asked, own=chosen: own if asked is None else asked
        )
        if (chosen, module) == (319, "block"):
            begin(tiny_llama, replace(config, mask_token=None), folder)
    assert "mask_token is 318, its own 319" in refused(tiny_llama, replace(config, mask_token=None), folder)


def test_a_confidence_head_that_reads_the_state_alone_is_left_out_and_told(tiny_llama, tmp_path):
    config, build, _ = PUBLISHED["vllm dspark"]
    old = source(tiny_llama, config)
    said, tensors = build(old)
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :32]
    folder = write(tmp_path, said | {"confidence_head_with_markov": False}, tensors)
    net, lines = begin(tiny_llama, replace(config, confidence=False), folder)
    assert_same(net, old, tiny_llama)
    assert any("reads the state alone" in line for line in lines)


def test_a_missing_tensor_is_named_as_the_file_would(tiny_llama, tmp_path):
    config, build, _ = PUBLISHED["specforge dflash2"]
    said, tensors = build(source(tiny_llama, config))
    del tensors["candidate_selector.successor_codebook"], tensors["layers.1.self_attn.k_norm.weight"]
    tensors["prefix_gru.weight_ih_l0"] = torch.ones(2)
    text = refused(tiny_llama, config, write(tmp_path, said, tensors))
    for words in (
        "candidate_selector.successor_codebook is missing",
        "layers.1.self_attn.k_norm.weight is missing",
        "prefix_gru.weight_ih_l0 is unknown",
    ):
        assert words in text
