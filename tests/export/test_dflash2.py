"""DFlash 2 against a plain reference of the engines' class, its convolutions and selector among what is bent; and what is not written or read."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.errors import UserError
from drafttrain.export.export import _fixed_input, load_export

from .drafting import both_faces, exported, saved_and_exported_draft_alike
from .reference_blocks import ReferenceDFlash2
from .test_dflash import config_of, edit_config
from .test_eagle3 import close

PLAIN = DFlash2(block=5, layers=2, taps=[0, 2], mask_token=319, rank=6, candidates=4, group=8, window=None)
SLIDING = DFlash2(block=4, layers=2, taps=[0, 2], mask_token=317, rank=3, candidates=3, group=4, window=5)
CASES = (
    ("sglang", PLAIN), ("vllm", PLAIN), ("vllm", SLIDING),
    ("sglang", DFlash2(block=2, layers=1, taps=[3], mask_token=318, rank=4, candidates=9, group=32, window=None)),
)  # fmt: skip


def reference_of(case, target):
    return ReferenceDFlash2(case.folder, target.embedding_weight, target.head_weight)


def chain(case, reference):
    return reference.chain(case.anchor, case.taps(reference.vllm_layers()), case.drafts)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("asked", "config"), CASES)
@torch.no_grad()
def test_an_engine_drafts_our_dflash2(targets, tmp_path, architecture, asked, config):
    """Three computations: training's rows, the decoding face, the plain reference on the folder and on transformers' hidden states. Gemma
    caps its logits, before the selector adds to them."""
    target = targets(architecture)
    if architecture == "gemma3" and asked == "sglang":
        with pytest.raises(UserError, match="raw ones"):
            exported(target, tmp_path / "export", asked, config)
        return
    case = exported(target, tmp_path / "export", asked, config)
    reference = reference_of(case, target)
    assert reference.vllm_layers() == reference.sglang_layers()
    assert (reference.nested["final_logit_softcapping"] is not None) == (architecture == "gemma3")
    tokens, wanted = chain(case, reference)
    assert reference.used == reference.weights.keys() and len(tokens) == config.block - 1
    candidate = wanted.isfinite()
    assert candidate.sum(-1).tolist() == [config.candidates] * case.drafts and float(wanted[candidate].std()) > 0.5
    for got in both_faces(case, target, tokens):
        close(got[candidate], wanted[candidate])
        assert got.argmax(-1).tolist() == tokens
        assert bool(
            (got.masked_fill(candidate, -torch.inf).amax(-1) < got.masked_fill(~candidate, torch.inf).amin(-1) - 50).all()
        )


def test_what_training_saved_and_what_was_exported_draft_alike(tiny_llama, tmp_path):
    for number, (asked, config) in enumerate((("sglang", PLAIN), ("vllm", SLIDING), ("native", SLIDING))):
        case = exported(tiny_llama, tmp_path / f"export{number}", asked, config)
        saved_and_exported_draft_alike(case, tiny_llama, tmp_path / f"saved{number}")


def _one_side(bent):
    for name, weight in bent.weights.items():
        if name.endswith("base_kernel"):
            weight[1] = weight[0]


def _other_order(bent):
    for name, weight in bent.weights.items():
        if name.endswith("base_kernel"):
            bent.weights[name] = weight.flip(1)


def _conv_across_requests(bent):
    plain = bent.around
    bent.around = lambda name, x, sublayer: plain(name, torch.cat([x[-1:], x]), lambda u: torch.cat([u[:1], sublayer(u[1:])]))[1:]


MISTAKES = {
    "one_kernel_for_both_sides": _one_side,
    "taps_in_the_other_order": _other_order,
    "block_reaches_into_the_one_before": _conv_across_requests,
    "groups_interleaved": lambda bent: bent.weights.update(
        {n: w.view(4, -1, 32).flip(1).flatten(0, 1) for n, w in bent.weights.items() if n.endswith("kernel_projection.weight")}
    ),
    "no_selector": lambda bent: bent.weights["candidate_selector.successor_codebook"].zero_(),
    "codebooks_exchanged": lambda bent: bent.weights.update(
        {
            "candidate_selector.predecessor_codebook": bent.weights["candidate_selector.successor_codebook"],
            "candidate_selector.successor_codebook": bent.weights["candidate_selector.predecessor_codebook"],
        }
    ),
    "behind_the_anchor_only": lambda bent: setattr(bent, "scores", lambda state, before, plain=bent.scores: plain(state, 7)),
    "more_candidates": lambda bent: bent.nested.update(selector_top_k=5),
    "logits_scaled": lambda bent: bent.nested.update(output_multiplier=0.5),
    "slot_0_speaks": lambda bent: setattr(bent, "speaking", lambda slots: slots[:-1]),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MISTAKES)
@torch.no_grad()
def test_the_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN)
    reference, bent = reference_of(case, tiny_llama), reference_of(case, tiny_llama)
    MISTAKES[mutation](bent)
    assert not torch.allclose(chain(case, reference)[1], chain(case, bent)[1], rtol=0, atol=1e-2)


def test_config_json_and_names_by_hand(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "sglang", PLAIN)
    config, word = config_of(case.folder), tiny_llama.tokenizer.convert_ids_to_tokens(319)
    assert config["architectures"] == ["DFlash2DraftModel"] and config["block_size"] == 5 and config["is_causal"] is False
    assert config["dflash_config"] == {
        "mask_token_id": 319, "mask_token": word, "target_layer_ids": [0, 2], "causal": False, "sample_from_anchor": False,
        "use_aux_hidden_state": True, "use_swa": False, "block_size": 5, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6,
        "selector_top_k": 4, "output_multiplier": 1.0, "final_logit_softcapping": None,
    }  # fmt: skip
    shapes = {name: tuple(weight.shape) for name, weight in load_file(case.folder / "model.safetensors").items()}
    new = {name: shape for name, shape in shapes.items() if "conv" in name or "selector" in name}
    assert new == {
        "candidate_selector.predecessor_codebook": (320, 6), "candidate_selector.successor_codebook": (320, 6),
        "candidate_selector.hidden_projection.weight": (6, 32),
        **{f"layers.{i}.{conv}.base_kernel": (2, 2, 32) for i in (0, 1) for conv in ("attention_conv", "mlp_conv")},
        **{f"layers.{i}.{conv}.kernel_projection.weight": (16, 32) for i in (0, 1) for conv in ("attention_conv", "mlp_conv")},
    }  # fmt: skip
    card = (case.folder / "README.md").read_text()
    assert '"method": "dflash"' in card and '"num_speculative_tokens": 4' in card and "vLLM (0.33;" in card
    assert "--speculative-algorithm DFLASH" in card and "--speculative-num-draft-tokens 5" in card


@torch.no_grad()
def test_what_rounding_costs_is_told_by_first_choices(tiny_llama, tmp_path):
    """A token that rounding makes a candidate jumps by the gap below candidates, so a difference in logits would say 60 of a drafter that drafts
    as before. Both numbers are computed anew: on the folder and the trained net, at every place of the text."""
    case = exported(tiny_llama, tmp_path / "export", None, replace(PLAIN, candidates=9), dtype="bfloat16")
    sequences, features = _fixed_input(case.net, tiny_llama)
    found = []
    for net in (load_export(case.folder, tiny_llama), case.net):
        drafted = net.rows(sequences, features, net.layout(sequences))
        found.append(net.logits(drafted.hidden_NH, drafted.prev_N))
    (served, trained), check = found, case.made["check"]
    assert float((served - trained).abs().max()) > 50  # another token became a candidate
    same = [int(one) == int(other) for one, other in zip(served.argmax(-1), trained.argmax(-1), strict=True)]
    assert check["against_trained"] is None and check["rows"] == len(same) > 50
    assert check["same_first_choice"] == pytest.approx(sum(same) / len(same)) and check["same_first_choice"] > 0.9
    card = (case.folder / "README.md").read_text()
    assert f"{check['same_first_choice']:.1%} of {check['rows']} places" in card and "largest logit" not in card


@pytest.mark.parametrize(
    ("asked", "config", "draft_vocab", "complaint"),
    [
        ("vllm", PLAIN, 60, "among all tokens of the target, and this drafter says 60; set export.format to native"),
        ("sglang", PLAIN, 60, "among all tokens of the target"),
        ("sglang", SLIDING, None, "window of 5 takes in depend on SGLang's attention backend"),
        ("speculators", SLIDING, None, "counts a window from the anchor"),
    ],
)
def test_what_an_engine_cannot_load_is_refused_by_name(tiny_llama, tmp_path, asked, config, draft_vocab, complaint):
    with pytest.raises(UserError, match=complaint):
        exported(tiny_llama, tmp_path / "export", asked, config, draft_vocab)
    assert not list(tmp_path.iterdir())
    made = exported(tiny_llama, tmp_path / "export", None, config, draft_vocab).made
    assert made["format"] == ("native" if draft_vocab else "dflash2" if config is PLAIN else "dflash2-vllm")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dflash_config": {"sample_from_anchor": True}}, r"DFlash 2 is 1\+N only"), ({"sample_from_anchor": True}, r"1\+N only"),
        ({"dflash_config": {"conv_kernel_size": 3}}, "dflash_config"), ({"dflash_config": {"conv_group_size": 4}}, "kernel_projection"),
        ({"dflash_config": {"output_multiplier": 2.0}}, "multiplies its logits by 2.0"),
        ({"dflash_config": {"final_logit_softcapping": 30.0}}, "caps them at 30.0"), ({"architectures": ["DFlashDraftModel"]}, "dflash_config"),
        ({"dflash_config": {"block_size": 4}}, "dflash_config"), ({"dflash_config": {"selector_rank": 5}}, "predecessor_codebook"),
    ],
)  # fmt: skip
def test_fields_that_mean_another_network_are_named(tiny_llama, tmp_path, change, complaint):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN)
    edit_config(case.folder, **change)
    with pytest.raises(UserError, match=complaint):
        load_export(case.folder, tiny_llama)


def test_a_missing_field_is_named(tiny_llama, tmp_path):
    case = exported(tiny_llama, tmp_path / "export", "vllm", PLAIN)
    config = config_of(case.folder)
    del config["dflash_config"]["selector_top_k"]
    (case.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no 'selector_top_k', so this is no DFlash 2 export"):
        load_export(case.folder, tiny_llama)
