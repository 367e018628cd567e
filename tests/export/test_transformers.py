"""Stand-alone drafters as folders of transformers: its own classes load them, say what we say, and draft with them; and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from drafters.test_faces import SMALL, shaken
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drafttrain.drafters.independent import Independent
from drafttrain.drafters.language_model import first_token
from drafttrain.errors import UserError
from drafttrain.export.card import card_text
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.layouts import one_chat
from drafttrain.vocab import DraftVocabulary

NARROW = SMALL | {"hidden": 24, "head_dim": 6}
FORMS = {
    "llama": Independent(**NARROW, layers=3, tied=False),
    "llama tied": Independent(**NARROW, layers=2),
    "qwen3": Independent(**SMALL, layers=2, tied=False, qk_norm=True),
    "qwen3 tied": Independent(**SMALL, layers=1, qk_norm=True),
}
ANSWER = 24


def net_for(target, config, seed=0):
    torch.manual_seed(seed)
    return shaken(config.build(target, DraftVocabulary.full(target.vocab)))


def written(target, folder, config=FORMS["llama tied"], dtype="float32"):
    net = net_for(target, config)
    return net, export_drafter(net, target, folder, ExportConfig(dtype=dtype), None)


def text(target, count=40):
    ids_T = torch.randint(3, target.vocab, (count,), generator=torch.Generator().manual_seed(2))
    ids_T[0] = first_token(target)
    return ids_T


@torch.no_grad()
def along(net, target, ids_T):
    """[T-2, V]: what is scored behind tokens 1, ..., T-2."""
    sequences = one_chat(ids_T, 0)
    drafted = net.rows(sequences, target.read_packed(sequences, ()), net.layout(sequences, 1))
    return net.logits(drafted.hidden_NH, drafted.prev_N)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("form", FORMS)
def test_transformers_says_what_the_trained_drafter_says(targets, tmp_path, architecture, form):
    target, ids_T = targets(architecture), text(targets(architecture))
    net, made = written(target, tmp_path / "export", FORMS[form])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        theirs = model(ids_T[None]).logits[0, 1:-1]
    torch.testing.assert_close(theirs, along(net, target, ids_T), atol=1e-5, rtol=1e-5)
    assert model.dtype == torch.float32 and float(theirs.std()) > 0.1
    assert type(model).__name__ == ("Qwen3ForCausalLM" if "qwen3" in form else "LlamaForCausalLM")
    assert model.config.max_position_embeddings == target.max_positions
    # Every tensor of the file is the model's, and every weight of the model is in the file.
    names = load_file(tmp_path / "export" / "model.safetensors").keys()
    assert names == {name for name, _ in model.named_parameters()} and made["format"] == "transformers"


def test_in_half_precision_it_is_the_rounded_net(tiny_llama, tmp_path):
    net, _ = written(tiny_llama, tmp_path / "export", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.dtype == torch.bfloat16
    for name, weight in net.state_dict().items():
        outer = "model.embed_tokens.weight" if name == "tokens.weight" else f"model.{name}"
        assert torch.equal(model.state_dict()[outer], weight.to(torch.bfloat16)), name


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "right"), [("llama", False), ("qwen3", False), ("gemma3", False), ("llama", True), ("qwen3", True)]
)
def test_assisted_generation_is_the_targets_own_answer(targets, target_folders, tmp_path, architecture, right):
    """Greedy, token for token, by transformers alone. A drafter that is always right is heard: the target is asked less often."""
    trained, own = targets(architecture), Independent(model=str(target_folders(architecture)))
    net = own.build(trained, DraftVocabulary.full(trained.vocab)) if right else net_for(trained, FORMS["qwen3"])
    export_drafter(net, trained, tmp_path / "export", ExportConfig(dtype="float32"), None)
    target = AutoModelForCausalLM.from_pretrained(target_folders(architecture), dtype=torch.float32).eval()
    drafter = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    drafter.generation_config.assistant_confidence_threshold = 0.0  # random weights are never sure
    prompt_1T = text(trained, 12)[None]
    calls: list[int] = []
    handle = target.get_decoder().register_forward_hook(lambda *args: calls.append(1))
    ask = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(prompt_1T)}
    plain = target.generate(prompt_1T, **ask)
    alone = len(calls)
    assisted = target.generate(prompt_1T, assistant_model=drafter, **ask)
    handle.remove()
    assert torch.equal(assisted, plain)
    if right:
        assert len(calls) - alone < alone / 3


def test_tokenizer_template_and_ends_of_turn_are_the_targets(tiny_llama, target_folders, tmp_path):
    written(tiny_llama, tmp_path / "export")
    mine, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "export", target_folders("llama")))
    chat = [{"role": "user", "content": "name three rivers"}]
    assert mine.get_vocab() == theirs.get_vocab()
    assert mine.apply_chat_template(chat, add_generation_prompt=True) == theirs.apply_chat_template(
        chat, add_generation_prompt=True
    )
    said = GenerationConfig.from_pretrained(tmp_path / "export")
    assert said.eos_token_id == list(tiny_llama.end_ids) and (said.bos_token_id, said.pad_token_id) == (1, 0)


def test_it_is_read_back_without_our_record_and_a_drafter_begins_from_the_folder(tiny_llama, tmp_path):
    net, _ = written(tiny_llama, tmp_path / "export", FORMS["qwen3"])
    (tmp_path / "export" / "drafttrain.json").unlink()
    ids_T = text(tiny_llama)
    again = load_export(tmp_path / "export", tiny_llama)
    assert again.config == Independent(model=str(tmp_path / "export"))
    fresh = again.config.build(tiny_llama, again.vocabulary)
    for other in (again, fresh):
        assert torch.equal(along(other, tiny_llama, ids_T), along(net, tiny_llama, ids_T))


def test_a_part_of_the_vocabulary_is_refused(tiny_llama, tmp_path):
    config = replace(FORMS["llama"], draft_vocab=100)
    net = shaken(config.build(tiny_llama, DraftVocabulary(torch.arange(100), tiny_llama.vocab)))
    for asked in ("vllm", "sglang", "transformers"):
        with pytest.raises(UserError, match="a language model says every token of the target, and this drafter says 100 of them"):
            export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(format=asked), None)
    made = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None)
    assert made["format"] == "native" and made["notes"][0].startswith(
        "Not written for transformers, vLLM and SGLang: a language model says"
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_theta": 5000.0}, "RoPE is .* in the older fields but .* in rope_parameters"),
        ({"max_position_embeddings": 256}, "max_position_embeddings 256, but the target reads 512"),
        ({"model_type": "qwen3"}, "architectures is .'LlamaForCausalLM'., not .'Qwen3ForCausalLM'."),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures is .'Qwen3ForCausalLM'., not .'LlamaForCausalLM'."),
        ({"vocab_size": 321}, "embed_tokens.weight is .320, 24. instead of .321, 24."),
        ({"num_hidden_layers": 3}, "model.layers.2.mlp.up_proj.weight is missing"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"attention_bias": True}, "attention_bias is True, not False"),
        ({"mlp_bias": True}, "mlp_bias is True, not False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
    ],
)
def test_a_folder_that_contradicts_itself_or_the_target_is_refused(tiny_llama, tmp_path, change, complaint):
    written(tiny_llama, tmp_path / "export")
    file = tmp_path / "export" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=complaint):
        load_export(tmp_path / "export", tiny_llama)


def test_a_tensor_more_or_less_is_refused(tiny_llama, tmp_path):
    written(tiny_llama, tmp_path / "export")
    (tmp_path / "export" / "drafttrain.json").unlink()
    file = tmp_path / "export" / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("model.layers.1.input_layernorm.weight")
    for changed, complaint in (
        (tensors, "model.layers.1.input_layernorm.weight is missing"),
        (tensors | {"layers.1.input_layernorm.weight": lost}, "layers.1.input_layernorm.weight is not one of the format's"),
    ):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(UserError, match=complaint):
            load_export(tmp_path / "export", tiny_llama)


def test_the_card_says_how_each_of_three_drafts_with_it(tiny_llama, tmp_path):
    _, made = written(tiny_llama, tmp_path / "export")
    card = card_text(made | {"repository": "owner/draft", "base_model": "owner/target"}, None)
    assert 'drafter = AutoModelForCausalLM.from_pretrained("owner/draft")' in card and "assistant_model=drafter" in card
    assert '{"method": "draft_model", "model": "owner/draft", "num_speculative_tokens": 3}' in card
    assert "--speculative-algorithm STANDALONE" in card and "--speculative-draft-model-path owner/draft" in card
