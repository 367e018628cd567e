"""The speculators format: what vLLM makes of it against a plain reference, the library's own classes against ours (slow), refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.export import eagle3
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export

from .reference import ReferenceEagle3
from .test_dflash import PLAIN, config_of, edit_config
from .test_eagle3 import DRAFTS, PROMPT, V31, close, edit_tensors, hf_hidden_states, text
from .test_eagle_medusa import make_net, ours

NEEDED = ("speculators==0.9.0", "hs-connectors==0.9.0", "loguru", "openai", "pydantic-settings", "python-dotenv", "sniffio")
"""The library and what it imports that is not installed already."""
EAGLE3 = Eagle3(taps=[0, 1, 3], depth=DRAFTS)
CASES = (
    ("eagle3", EAGLE3, 60), ("eagle3 full", Eagle3(taps=[2], depth=DRAFTS), None),
    ("eagle3.1", Eagle3(taps=[0, 1, 3], depth=DRAFTS, **V31), 60), ("eagle3 low-rank", Eagle3(taps=[1, 2], depth=DRAFTS, head_rank=7), 60),
    ("dflash", PLAIN, None), ("dflash reduced", PLAIN, 60), ("dflash deep", DFlash(block=7, layers=3, taps=[1, 2], mask_token=318), 319),
)  # fmt: skip


def exported(target, folder, config=EAGLE3, draft_vocab=60, **export):
    net = make_net(target, config, draft_vocab)
    return net, export_drafter(
        net, target, folder, ExportConfig(**({"dtype": "float32", "format": "speculators"} | export)), None
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("name", "config", "draft_vocab"), [case for case in CASES if "eagle3" in case[0]])
@torch.no_grad()
def test_vllm_computes_our_eagle3_from_it(targets, tmp_path, architecture, name, config, draft_vocab):
    target = targets(architecture)
    net, _ = exported(target, tmp_path / "export", config, draft_vocab)
    sequences, reference = text(net), ReferenceEagle3(tmp_path / "export", torch.full((target.vocab, target.hidden), torch.nan))
    ids = sequences.ids_BT[0].tolist()
    taps = hf_hidden_states(target, sequences.ids_BT, reference.vllm_layers())[:PROMPT]
    wanted = reference.draft(ids[: PROMPT + 1], taps, ids[PROMPT + 1 : PROMPT + DRAFTS])
    for got in ours(net, target, sequences):
        close(got, wanted)
    others = {"d2t", "t2d", "embed_tokens.weight"}
    assert reference.used | others == reference.weights.keys() | others
    assert reference.config["num_speculative_tokens"] == DRAFTS


def test_config_json_by_hand(tiny_llama, tmp_path):
    layer = {
        "model_type": "llama", "hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "mlp_bias": False, "vocab_size": 320, "tie_word_embeddings": False, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip

    def frame(algorithm, tokens):
        proposal = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        return {
            "speculators_model_type": algorithm, "speculators_version": "0.9.0", "dtype": "float32", "torch_dtype": "float32",
            "target_hidden_size": 32, "speculators_config": {
                "algorithm": algorithm, "default_proposal_method": "greedy", "proposal_methods": [proposal],
                "verifier": {"name_or_path": tiny_llama.identity.path, "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip

    exported(tiny_llama, tmp_path / "eagle3")
    assert config_of(tmp_path / "eagle3") == {
        "architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, "draft_vocab_size": 60, **frame("eagle3", 4),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False,
        "norm_output": False, "embed_requires_grad": False,
    }  # fmt: skip
    exported(tiny_llama, tmp_path / "dflash", PLAIN, None)
    layers = {
        "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 2,
    }  # fmt: skip
    assert config_of(tmp_path / "dflash") == {
        "architectures": ["DFlashSpeculator"], "transformer_layer_config": layer | layers, "draft_vocab_size": 320, **frame("dflash", 4),
        "aux_hidden_state_layer_ids": [1, 3], "block_size": 5, "mask_token_id": 319, "sample_from_anchor": False,
        "sliding_window_non_causal": True, "num_target_layers": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "change", "complaint"),
    [
        (EAGLE3, {"norm_before_residual": True}, "norm_before_residual is True"),
        (EAGLE3, {"norm_before_residual": None}, "norm_before_residual is None"),
        (EAGLE3, {"norm_before_fc": True}, "norm_before_fc is True"),
        (EAGLE3, {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}, "must ascend, without repeats, from 0"),
        (EAGLE3, {"transformer_layer_config": {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
        (PLAIN, {"sliding_window_non_causal": False}, "sliding_window_non_causal is False"),
        (PLAIN, {"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2}}, "window counted from the anchor"),
        (PLAIN, {"transformer_layer_config": {"model_type": "llama"}}, "model_type is 'llama'"),
        (PLAIN, {"mask_token_id": 400}, "the mask is number 400"),
    ],
)
def test_what_would_be_another_network_is_not_read(tiny_llama, tmp_path, config, change, complaint):
    exported(tiny_llama, tmp_path / "export", config, None)
    edit_config(tmp_path / "export", **change)
    with pytest.raises(UserError, match=complaint):
        load_export(tmp_path / "export", tiny_llama)


@pytest.mark.parametrize("config", [EAGLE3, PLAIN])
def test_a_missing_field_is_named(tiny_llama, tmp_path, config):
    exported(tiny_llama, tmp_path / "export", config, None)
    whole = config_of(tmp_path / "export")
    (tmp_path / "export" / "drafttrain.json").unlink()
    for field in ("draft_vocab_size", "transformer_layer_config"):
        (tmp_path / "export" / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != field}))
        with pytest.raises(UserError, match=f"no '{field}'"):
            load_export(tmp_path / "export", tiny_llama)


def test_a_target_that_the_library_cannot_load_needs_a_name(tiny_llama, tmp_path, monkeypatch):
    """It takes embeddings and head from the target's own files, which a GGUF file has not."""
    monkeypatch.setattr(tiny_llama, "identity", replace(tiny_llama.identity, path="package:weights/tiny.gguf"))
    with pytest.raises(UserError, match="set export.base_model to the id"):
        exported(tiny_llama, tmp_path / "export")
    exported(tiny_llama, tmp_path / "export", base_model="org/tiny")
    assert config_of(tmp_path / "export")["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"


def test_embeddings_are_in_the_file_because_the_library_may_not_load_them(targets, tmp_path, monkeypatch):
    """As the first layer reads them, so there is no gap to warn of; and others are not read."""
    target = targets("gemma3")
    monkeypatch.setattr(eagle3, "EMBEDDING_GAP", 1e-9)
    assert any("raw" in note for note in exported(target, tmp_path / "export", format="vllm")[1]["notes"])
    assert not any("raw" in note for note in exported(target, tmp_path / "export")[1]["notes"])
    table = load_file(tmp_path / "export" / "model.safetensors")["embed_tokens.weight"]
    torch.testing.assert_close(table, target.embed(torch.arange(target.vocab)))
    (tmp_path / "export" / "drafttrain.json").unlink()
    edit_tensors(tmp_path / "export", lambda t: t["embed_tokens.weight"].div_(target.hidden**0.5))
    with pytest.raises(UserError, match="table of embeddings that is not the target's"):
        load_export(tmp_path / "export", target)


def test_the_card_says_how_vllm_serves_it(tiny_llama, tmp_path):
    _, made = exported(tiny_llama, tmp_path / "export", PLAIN, None, base_model="org/tiny", push="me/tiny-dflash")
    card = (tmp_path / "export" / "README.md").read_text()
    assert made["format"] == "dflash-speculators" and "speculators (0.9.0" in card and "- speculators" in card
    assert (
        "vllm serve org/tiny" in card
        and '"model": "me/tiny-dflash", "num_speculative_tokens": 4' in card
        and "sglang" not in card
    )


WORKER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from speculators import SpeculatorModel, SpeculatorModelConfig

work = torch.load(sys.argv[2])
for case in work:
    config = SpeculatorModelConfig.from_pretrained(case["folder"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(case["folder"], config=config).float().eval()
    heard = []
    model.lm_head.register_forward_hook(lambda module, args, output: heard.append(output[0]))
    ids, taps, at, drafts = case["ids"][None], case["taps"][None], case["anchor"], case["drafts"]
    document = torch.zeros_like(ids)
    with torch.no_grad():
        if config.speculators_model_type == "eagle3":
            model(hidden_states=taps[:, :-1], input_ids=ids[:, 1:], document_ids=document[:, 1:], ttt_steps=drafts)
            case["logits"] = torch.stack([step[at - 1] for step in heard])
        else:
            loss_mask = torch.zeros_like(ids)
            loss_mask[0, at] = 1
            last = torch.zeros(1, ids.shape[1], taps.shape[-1] // len(model.target_layer_ids))
            model._backbone_forward(taps, ids, loss_mask, last, document, max_anchors=1)
            case["logits"] = heard[0][1:]
    case["class"] = type(model).__name__
torch.save(work, sys.argv[2])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the library, which is no dependency of ours."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *NEEDED]
    if subprocess.run(command, capture_output=True, timeout=600).returncode:
        pytest.skip("speculators 0.9.0 cannot be installed here (no package index)")
    return site


@pytest.mark.slow
@torch.no_grad()
def test_the_librarys_own_classes_give_our_logits(tiny_llama, tmp_path, library):
    work, wanted = [], []
    for name, config, draft_vocab in CASES:
        net, _ = exported(tiny_llama, tmp_path / name, config, draft_vocab)
        drafts = DRAFTS if isinstance(config, Eagle3) else config.block - 1
        sequences = text(net, PROMPT + 2 * drafts + 3)
        taps_TAD = hf_hidden_states(tiny_llama, sequences.ids_BT, [tap + 1 for tap in net.needs.taps])
        case = {"folder": str(tmp_path / name), "ids": sequences.ids_BT[0], "taps": taps_TAD.flatten(1)}
        work.append(case | {"anchor": PROMPT, "drafts": drafts})
        wanted.append(ours(net, tiny_llama, sequences, drafts)[0][:, net.vocabulary.ids])
    torch.save(work, tmp_path / "work.pt")
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(library), str(tmp_path / "work.pt")], capture_output=True, text=True, timeout=600,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for case, ours_KV in zip(torch.load(tmp_path / "work.pt"), wanted, strict=True):
        assert case["class"] in ("Eagle3DraftModel", "DFlashDraftModel")
        torch.testing.assert_close(case["logits"], ours_KV, rtol=0, atol=1e-4 * max(1.0, float(ours_KV.abs().max())))
