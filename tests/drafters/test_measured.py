"""Published drafters as they are, with blocks of sizes and rotary bases other than their target's: folders of random tensors, written down from the
engines' tables, against the plain references, which import nothing of drafttrain."""

import json

import pytest
import torch
from export.reference import ReferenceDFlash, ReferenceEagle, ReferenceEagle3
from export.reference_blocks import ReferencePEagle
from export.test_eagle3 import DRAFTS, PROMPT, close, text
from export.test_eagle_medusa import ours
from safetensors.torch import save_file

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra
from drafttrain.drafters.measured import AsPublished
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError

H, V, HEADS, KV, D, INNER = 32, 320, 2, 1, 12, 40
TAPS = [0, 2, 3]
BLOCK = {
    "hidden_size": H, "vocab_size": V, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "intermediate_size": INNER,
    "hidden_act": "silu", "rms_norm_eps": 1e-3, "rope_theta": 500.0, "max_position_embeddings": 512, "target_hidden_size": None,
}  # fmt: skip
EAGLE3 = BLOCK | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 70, "num_aux_hidden_states": 3,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}, "norm_before_residual": False,
    "norm_before_fc": False, "fc_norm": False, "norm_output": False,
}  # fmt: skip


def layer(name, inputs):
    shapes = {"q_proj": (HEADS * D, inputs), "k_proj": (KV * D, inputs), "v_proj": (KV * D, inputs), "o_proj": (H, HEADS * D)}
    found = {f"{name}.self_attn.{part}.weight": shape for part, shape in shapes.items()}
    found |= {f"{name}.mlp.{part}_proj.weight": (INNER, H) for part in ("gate", "up")} | {
        f"{name}.mlp.down_proj.weight": (H, INNER)
    }
    return found | {f"{name}.post_attention_layernorm.weight": (H,)}


def drawn(shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return {name: 1 + 0.3 * x if x.dim() == 1 else 1.5 * x / x.shape[-1] ** 0.5 for name, x in noise.items()}


def some_words():
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:70].sort().values
    return {"d2t": ids - torch.arange(70)}


def written(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle3(folder, **more):
    shapes = layer("midlayer", 2 * H) | {"midlayer.input_layernorm.weight": (H,), "midlayer.hidden_norm.weight": (H,)}
    tensors = drawn(shapes | {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (70, H)})
    return written(folder, EAGLE3 | more, tensors | some_words())


def eagle(folder):
    config = BLOCK | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    return written(folder, config, drawn(layer("layers.0", H) | {"fc.weight": (H, 2 * H)}))


def dflash(folder):
    nested = {"mask_token_id": 317, "target_layer_ids": TAPS, "sample_from_anchor": False, "causal": False}
    config = BLOCK | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": DRAFTS + 1, "dflash_config": nested,
        "layer_types": ["full_attention"] * 2, "sliding_window": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }  # fmt: skip
    shapes = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        name = f"layers.{i}"
        norms = {f"{name}.self_attn.{n}_norm.weight": (D,) for n in "qk"} | {f"{name}.input_layernorm.weight": (H,)}
        shapes |= layer(name, H) | norms
    return written(folder, config, drawn(shapes))


def p_eagle(folder):
    config = EAGLE3 | {"num_hidden_layers": 2, "pard_token": 316}
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (70, H), "mask_hidden": (1, 1, 3 * H)}
    shapes |= layer("layers.0", 2 * H) | layer("layers.1", H) | {f"layers.{i}.input_layernorm.weight": (H,) for i in range(2)}
    return written(folder, config, drawn(shapes | {"layers.0.hidden_norm.weight": (H,)}) | some_words())


def build(folder, target, like=Hydra()):  # noqa: B008  # a frozen dataclass
    return AsPublished.open(str(folder), False, like, target).build()[0]


@torch.no_grad()
def reading(net, target):
    """A chat, and what the target computes of it."""
    sequences = text(net)
    features = target.read_packed(sequences, tuple(TAPS))
    return sequences, sequences.ids_BT[0].tolist(), features.taps_BTAD[0, :PROMPT], features.final_BTD[0, :PROMPT]


@torch.no_grad()
def test_eagle3_of_its_own_shape(tiny_llama, tmp_path):
    folder = eagle3(tmp_path / "it")
    net = build(folder, tiny_llama)
    sequences, ids, taps, _ = reading(net, tiny_llama)
    wanted = ReferenceEagle3(folder, tiny_llama.embedding_weight).draft(
        ids[: PROMPT + 1], taps, ids[PROMPT + 1 : PROMPT + DRAFTS]
    )
    for got in ours(net, tiny_llama, sequences):
        close(got, wanted)
    assert net.config == Eagle3(taps=TAPS, draft_vocab=70) and net.shape.head_dim == D


@torch.no_grad()
def test_eagle_of_its_own_shape(tiny_llama, tmp_path):
    folder = eagle(tmp_path / "it")
    net = build(folder, tiny_llama)
    sequences, ids, _, final = reading(net, tiny_llama)
    reference = ReferenceEagle(folder, tiny_llama.embedding_weight, tiny_llama.head_weight)
    wanted = reference.draft(ids[: PROMPT + 1], final, ids[PROMPT + 1 : PROMPT + DRAFTS])
    for got in ours(net, tiny_llama, sequences):
        close(got, wanted)


@torch.no_grad()
def test_dflash_of_its_own_shape(tiny_llama, tmp_path):
    folder = dflash(tmp_path / "it")
    net = build(folder, tiny_llama)
    sequences, ids, taps, _ = reading(net, tiny_llama)
    wanted = ReferenceDFlash(folder, tiny_llama.embedding_weight, tiny_llama.head_weight).draft(ids[PROMPT], taps, DRAFTS)
    for got in ours(net, tiny_llama, sequences):
        close(got, wanted)


@torch.no_grad()
def test_p_eagle_of_its_own_shape_takes_its_depth_from_the_recipe(tiny_llama, tmp_path):
    folder = p_eagle(tmp_path / "it")
    net = build(folder, tiny_llama, PEagle(depth=DRAFTS))
    sequences, ids, taps, _ = reading(net, tiny_llama)
    wanted = ReferencePEagle(folder, tiny_llama.embedding_weight).draft(ids[: PROMPT + 1], taps, DRAFTS)
    for got in ours(net, tiny_llama, sequences):
        close(got, wanted)


def test_fields_that_config_json_leaves_out_are_those_of_transformers_and_not_the_target_s(tiny_llama, tmp_path):
    folder = eagle3(tmp_path / "it")
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_theta", "rms_norm_eps"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    shape = build(folder, tiny_llama).shape
    assert (shape.rope_parameters, shape.rms_eps) == ({"rope_type": "default", "rope_theta": 10000.0}, 1e-6)
    assert shape.max_positions == tiny_llama.max_positions and (shape.heads, shape.kv_heads, shape.intermediate) == (
        HEADS,
        KV,
        INNER,
    )


def test_scaled_positions_in_either_spelling(tiny_llama, tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    new = eagle3(tmp_path / "new", rope_parameters=scaling | {"rope_theta": 600.0}, rope_theta=None)
    old = eagle3(tmp_path / "old", rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=600.0)
    shapes = [build(folder, tiny_llama).shape.rope_parameters for folder in (new, old)]
    assert shapes == [scaling | {"rope_theta": 600.0}] * 2


@pytest.mark.parametrize(
    ("change", "words"), [({"hidden_size": 48}, "hidden_size is 48"), ({"vocab_size": 321}, "vocab_size is 321")]
)
def test_a_drafter_of_another_target_is_refused(tiny_llama, tmp_path, change, words):
    with pytest.raises(
        UserError, match=rf"--draft .* is no net that can be built here: {words}, but this target's drafters have"
    ):
        build(eagle3(tmp_path / "it", **change), tiny_llama)


def test_a_whole_net_is_wanted(tiny_llama, tmp_path):
    folder = eagle3(tmp_path / "it", fc_norm=True)
    with pytest.raises(
        UserError, match=r"does not fit the class Eagle3 for this target: fc_norm.0.weight is missing.*Give a whole checkpoint"
    ):
        build(folder, tiny_llama)
