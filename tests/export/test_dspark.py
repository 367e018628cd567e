"""DSpark against a plain reference of the engines' class, its layout and heads among what is bent; and what is not written or read."""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dspark import DSpark
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export

from .drafting import both_faces, exported, saved_and_exported_draft_alike
from .reference_blocks import ReferenceDSpark
from .test_dflash import config_of, edit_config
from .test_eagle3 import PROMPT, close, edit_tensors
from .test_eagle_medusa import make_net

PLAIN = DSpark(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6)
SLIDING = DSpark(block=4, layers=2, taps=[0, 2], mask_token=317, rank=3, window=5)
HEADLESS = DSpark(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6, confidence=False)
CASES = (
    ("sglang", PLAIN, None), ("vllm", PLAIN, None), ("vllm", PLAIN, 60), ("vllm", SLIDING, None), ("vllm", SLIDING, 319),
    ("vllm", DSpark(block=1, layers=1, taps=[3], mask_token=318, rank=4), None), ("sglang", DSpark(block=7, layers=3, mask_token=319), None),
    ("sglang", HEADLESS, None), ("vllm", HEADLESS, 60),
)  # fmt: skip


def reference_of(case, target):
    return ReferenceDSpark(case.folder, target.embedding_weight, target.head_weight)


def chain(case, reference):
    return reference.chain(case.anchor, case.taps(reference.vllm_layers()), case.drafts)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("asked", "config", "draft_vocab"), CASES)
@torch.no_grad()
def test_an_engine_drafts_our_dspark(targets, tmp_path, architecture, asked, config, draft_vocab):
    """Three computations: training's rows, the decoding face, the plain reference on the folder and on transformers' hidden states."""
    target = targets(architecture)
    case = exported(target, tmp_path / "export", asked, config, draft_vocab)
    reference = reference_of(case, target)
    assert reference.vllm_layers() == reference.sglang_layers()
    tokens, wanted, sure = chain(case, reference)
    assert reference.used | {"d2t", "t2d"} == reference.weights.keys() | {"d2t", "t2d"}
    assert len(tokens) == config.block and float(wanted[wanted.isfinite()].std()) > 0.5
    for got in both_faces(case, target, tokens):
        close(got, wanted)
        assert got.argmax(-1).tolist() == tokens
    again, ids = load_export(case.folder, target), case.sequences.ids_BT
    features, layout = target.read_packed(case.sequences, again.needs.taps), again.layout(case.sequences, case.drafts)
    drafted = again.rows(case.sequences, features, layout)
    mine = layout.anchor_N == PROMPT
    assert drafted.prev_N[mine].tolist() == ids[0, PROMPT : PROMPT + config.block].tolist()
    told = again.confidence(drafted.hidden_NH[mine], drafted.prev_N[mine])
    assert (told is None) == (sure is None) == (not config.confidence)
    if sure is not None:
        close(told, sure)


def test_what_training_saved_and_what_was_exported_draft_alike(tiny_llama, tmp_path):
    for number, (asked, config, draft_vocab) in enumerate(
        (("sglang", PLAIN, None), ("vllm", PLAIN, 60), ("native", PLAIN, None), (None, HEADLESS, None), ("vllm", HEADLESS, 60))
    ):
        case = exported(tiny_llama, tmp_path / f"export{number}", asked, config, draft_vocab)
        saved_and_exported_draft_alike(case, tiny_llama, tmp_path / f"saved{number}")


MISTAKES = {
    "read_as_1_plus_n": lambda bent: bent.__dict__.update(masked=lambda drafts: drafts, speaking=lambda slots: slots[1:]),
    "first_slot_dropped": lambda bent: setattr(bent, "speaking", lambda slots: torch.cat([slots[1:], slots[-1:]])),
    "no_markov_head": lambda bent: bent.weights["markov_head.markov_w2.weight"].zero_(),
    "markov_head_behind_the_anchor_only": lambda bent: setattr(
        bent, "biased", lambda state, before, plain=bent.biased: plain(state, 7)
    ),
    "causal_block": lambda bent: bent.nested.update(causal=True),
    "mask_of_another_row": lambda bent: bent.nested.update(mask_token_id=318),
    "absolute_d2t": lambda bent: setattr(bent, "ids", bent.weights["d2t"]),
}


@pytest.mark.parametrize("mutation", MISTAKES)
@torch.no_grad()
def test_the_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN, 300)
    reference, bent = reference_of(case, tiny_llama), reference_of(case, tiny_llama)
    MISTAKES[mutation](bent)
    assert not torch.allclose(chain(case, reference)[1], chain(case, bent)[1], rtol=0, atol=1e-2)


def test_config_json_by_hand(tiny_llama, tmp_path):
    word = tiny_llama.tokenizer.convert_ids_to_tokens(319)
    case = exported(tiny_llama, tmp_path / "export", "sglang", PLAIN)
    config = config_of(case.folder)
    added = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 5, "num_hidden_layers": 2, "is_causal": False,
        "sample_from_anchor": True, "dspark_bonus_anchor": False, "mask_token_id": 319, "target_layer_ids": [0, 2],
        "eagle_aux_hidden_state_layer_ids": [1, 3], "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "draft_vocab_size": 320, "num_target_layers": 5,
        "dflash_config": {
            "mask_token_id": 319, "mask_token": word, "target_layer_ids": [0, 2], "causal": False, "sample_from_anchor": True,
            "use_aux_hidden_state": True, "use_swa": False,
        },
    }  # fmt: skip
    assert {name: config[name] for name in added} == added
    assert not any(
        name.startswith("dspark_") for name in config.keys() - {"dspark_bonus_anchor"}
    )  # SGLang takes those for a bundle
    card = (case.folder / "README.md").read_text()
    assert (
        '"method": "dspark"' in card and '"num_speculative_tokens": 5' in card and "of 5 slots in one pass: each a draft" in card
    )
    assert "--speculative-algorithm DSPARK" in card and "--speculative-num-draft-tokens 6" in card and "num-steps" not in card


def test_a_drafter_without_confidence_has_no_such_tensors_and_says_so(tiny_llama, tmp_path):
    """The flag is false, SGLang is asked first, and all that is gone from the other folder is the head."""
    case, other = (exported(tiny_llama, tmp_path / str(config.confidence), None, config) for config in (HEADLESS, PLAIN))
    assert case.made["format"] == other.made["format"] == "dspark" and case.made["init_args"]["confidence"] is False
    config, whole = config_of(case.folder), config_of(other.folder)
    changed = {name for name in whole if config[name] != whole[name]}
    assert changed == {"enable_confidence_head", "confidence_head_with_markov"} and config["enable_confidence_head"] is False
    less, more = (load_file(folder / "model.safetensors").keys() for folder in (case.folder, other.folder))
    assert more - less == {"confidence_head.proj.weight", "confidence_head.proj.bias"} and not less - more
    card, others = ((folder / "README.md").read_text() for folder in (case.folder, other.folder))
    assert (
        "has no confidence head" in card
        and "SGLANG_RAGGED_VERIFY_MODE static" in card
        and "vLLM" in card
        and "--speculative" in card
    )
    assert "tells how likely each is to be kept" in others and "tells how likely" not in card and "changes no draft" not in card
    for each, starts in ((case, [True, False]), (other, [True, True])):
        assert [reference_of(each, tiny_llama).sglang_starts(ragged) for ragged in (False, True)] == starts
    (case.folder / "drafttrain.json").unlink()
    assert load_export(case.folder, tiny_llama).config.confidence is False


@pytest.mark.parametrize("asked", ["sglang", "vllm"])
def test_a_flag_and_a_head_that_do_not_belong_together_are_named(tiny_llama, tmp_path, asked):
    flags = ("enable_confidence_head", "confidence_head_with_markov")
    for number, (config, complaint) in enumerate(
        ((HEADLESS, "confidence_head.proj.bias is missing"), (PLAIN, "confidence_head.proj.bias is not one of the"))
    ):
        case = exported(tiny_llama, tmp_path / str(number), asked, config)
        edit_config(case.folder, **dict.fromkeys(flags, not config.confidence))
        with pytest.raises(UserError, match=complaint):
            load_export(case.folder, tiny_llama)


def test_the_confidence_head_stays_in_fp32(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "sglang", PLAIN, dtype="bfloat16")
    weights = load_file(case.folder / "model.safetensors")
    kept = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert kept == {"confidence_head.proj.weight", "confidence_head.proj.bias"} and weights["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(weights["confidence_head.proj.weight"], case.net.confidence_head.proj.weight.detach())
    edit_tensors(case.folder, lambda t: t.update({"confidence_head.proj.bias": t["confidence_head.proj.bias"].bfloat16()}))
    (case.folder / "drafttrain.json").unlink()
    with pytest.raises(UserError, match="confidence_head.proj.bias is bfloat16 instead of float32"):
        load_export(case.folder, tiny_llama)


def test_a_changed_confidence_is_not_put_in_place(tiny_llama, tmp_path, monkeypatch):
    """No draft tells, so the check of an export looks at it too."""
    plain = load_export

    def worse(folder, target):
        net = plain(folder, target)
        net.confidence_head.proj.bias.data += 0.5
        return net

    monkeypatch.setattr("drafttrain.export.export.load_export", worse)
    with pytest.raises(UserError, match="does not read back"):
        exported(tiny_llama, tmp_path / "export", "vllm", PLAIN)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("asked", "config", "draft_vocab", "complaint"),
    [
        (
            "sglang",
            PLAIN,
            60,
            "SGLang's DSpark says every token of the target, and this drafter says 60; set export.format to vllm",
        ),
        ("sglang", SLIDING, None, "window of 5 takes in depend on SGLang's attention backend"),
        ("vllm", DSpark(block=4, layers=1, taps=[1], mask_token=319, rank=3, window=3), None, "window 4 or more"),
        ("speculators", SLIDING, None, "counts a window from the anchor"),
    ],
)
def test_what_an_engine_cannot_load_is_refused_by_name(tiny_llama, tmp_path, asked, config, draft_vocab, complaint):
    with pytest.raises(UserError, match=complaint):
        exported(tiny_llama, tmp_path / "export", asked, config, draft_vocab)
    assert not list(tmp_path.iterdir())


def test_a_target_that_caps_its_logits_has_no_engine(targets, tmp_path):
    """The Markov head's logits are added behind the cap here, and without it there."""
    for asked in ("vllm", "sglang", "speculators"):
        with pytest.raises(UserError, match="caps or scales its logits"):
            exported(targets("gemma3"), tmp_path / "export", asked, PLAIN)
    made = exported(targets("gemma3"), tmp_path / "export", None, PLAIN).made
    assert made["format"] == "native"
    assert [note.split(":")[0] for note in made["notes"]] == ["Not written for vLLM, SGLang and speculators"]


@pytest.mark.parametrize("asked", ["vllm", "native"])
def test_the_layout_is_checked_on_load(tiny_llama, tmp_path, asked):
    """A 1+N drafter under DSpark's name, and a DSpark that any of the readers would take for 1+N."""
    case = exported(tiny_llama, tmp_path / "export", asked, PLAIN)
    whole = config_of(case.folder)
    changes = [{"sample_from_anchor": False}]
    if asked == "vllm":
        changes += [{"dspark_bonus_anchor": True}, {"dflash_config": {"sample_from_anchor": False}}]
    for change in changes:
        (case.folder / "config.json").write_text(json.dumps(whole))
        edit_config(case.folder, **change)
        with pytest.raises(UserError, match=r"samples from the anchor"):
            load_export(case.folder, tiny_llama)


@pytest.mark.parametrize("asked", ["vllm", "native"])
def test_a_dflash_checkpoint_is_not_read_as_sampled_from_the_anchor(tiny_llama, tmp_path, asked):
    """Whichever way it is relabelled: as DFlash of the other layout, or as DSpark."""
    dflash = DFlash(block=5, layers=2, taps=[0, 2], mask_token=319)
    case = exported(tiny_llama, tmp_path / "export", asked, dflash)
    whole = config_of(case.folder)
    flags = {"sample_from_anchor": True}
    if asked == "vllm":
        label = {"architectures": ["Qwen3DSparkModel"]}
        both = flags | {"dflash_config": whole["dflash_config"] | flags}
        others = (
            (label, "samples from the anchor"),
            (label | flags, "samples from the anchor"),
            (label | both, "no 'markov_rank'"),
        )
    else:
        label = {"class_path": "DSpark", "init_args": {"block": 5, "layers": 2, "taps": [0, 2], "mask_token": 319}}
        others = ((label, "samples from the anchor"), (label | flags, "does not fit its own config.json"))
    (case.folder / "drafttrain.json").unlink()
    for change, complaint in ((flags, r"1\+N only"), *others):
        (case.folder / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(UserError, match=complaint):
            load_export(case.folder, tiny_llama)


def test_a_net_of_the_other_layout_is_not_written(tiny_llama, tmp_path, monkeypatch):
    net = make_net(tiny_llama, PLAIN, None)
    monkeypatch.setattr(type(net), "first", 1)
    with pytest.raises(UserError, match="samples from the anchor"):
        export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(format="vllm"), None)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"), ({"markov_rank": 5}, r"markov_w1.weight is \[320, 6\]"),
        ({"enable_confidence_head": False}, "confidence_head_with_markov"), ({"mask_token_id": 318}, "mask_token_id"),
        ({"target_layer_ids": [1, 3]}, "target_layer_ids"), ({"is_causal": True}, "is_causal"), ({"block_size": 0}, "block is 0"),
    ],
)  # fmt: skip
def test_fields_that_mean_another_network_are_named(tiny_llama, tmp_path, change, complaint):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN)
    edit_config(case.folder, **change)
    with pytest.raises(UserError, match=complaint):
        load_export(case.folder, tiny_llama)
