"""Deliberately broken checkpoints, made from sound exports of six drafters: each is named by `inspect` from the folder alone, or, where the files
fit each other and only the net is another, found by measuring: tau falls below half of the sound one's.

The drafters learn six answers of a tiny target by heart, so that the sound ones keep every draft (tau 5 with 4 drafts a round) and what breaks
them shows. A broken folder is written as a broken exporter would write it: with a sha256 that fits.
"""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.decoding.engine import generate
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.export.inspect import inspect_folder
from drafttrain.files import sha256_file
from drafttrain.types import Request, Sequences
from drafttrain.validation.compare import compare_tau
from drafttrain.vocab import DraftVocabulary

DRAFTS, TAPS, H = 4, [0, 1, 3], 32
BLOCK = dict(block=5, layers=2, taps=TAPS, mask_token=319, anchors=None)
LEARNT = {
    "eagle3": (Eagle3(taps=TAPS, depth=DRAFTS), 120),
    "eagle1": (Eagle(depth=DRAFTS), 60),
    "dflash": (DFlash(**BLOCK), 100),
    "dspark": (DSpark(**BLOCK, rank=8), 80),
    "p-eagle": (PEagle(taps=TAPS, depth=DRAFTS, layers=2, mask_token=319, cod_ratio=1.0), 80),
    "medusa": (Medusa(heads=DRAFTS, own_heads=True), 150),
}
"""Drafter -> how it is built, and steps until it knows the answers."""
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def requests():
    g = torch.Generator().manual_seed(0)
    return [Request(f"p{i}", tuple(torch.randint(3, 300, (6,), generator=g).tolist()), 20) for i in range(6)]


@pytest.fixture(scope="module")
def answers(tiny_llama, requests):
    """All answers as one packed row."""
    rollouts = list(generate(tiny_llama, requests, slots=len(requests)))
    parts = [
        (r.ids, torch.arange(len(r.ids)) >= r.prompt_len, torch.arange(len(r.ids)), torch.full((len(r.ids),), i))
        for i, r in enumerate(rollouts)
    ]
    return Sequences(*(torch.cat(column)[None] for column in zip(*parts, strict=True)))


def by_heart(target, config, steps, answers, vocabulary):
    """A drafter that says these answers."""
    torch.manual_seed(0)
    net = config.build(target, vocabulary).train()
    layout, features = net.layout(answers, numbers=[(0, 0)]), target.read_packed(answers, net.needs.taps)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0)
    row_V = vocabulary.t2d.cumsum(0) - 1
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 10) * (1 - step / steps)
        drafted = net.rows(answers, features, layout)
        loss = torch.nn.functional.cross_entropy(net.logits(drafted.hidden_NH, drafted.prev_N), row_V[drafted.label_N])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def sound(tiny_llama, answers, tmp_path_factory):
    """name -> folder of a sound export in fp32, made when first asked for. EAGLE-3's head has a part of the tokens."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config, steps = LEARNT[name]
            some = torch.tensor(sorted({*answers.ids_BT[0].tolist(), *range(0, 300, 4)}))
            vocabulary = DraftVocabulary(some, tiny_llama.vocab) if name == "eagle3" else DraftVocabulary.full(tiny_llama.vocab)
            net = by_heart(tiny_llama, config, steps, answers, vocabulary)
            made[name] = tmp_path_factory.mktemp(name) / "export"
            export_drafter(net, tiny_llama, made[name], ExportConfig(dtype="float32"), None)
        return made[name]

    return folder


# ---- breaking ----------------------------------------------------------------------------------------------------------------

Tensors, Config = dict[str, Tensor], dict[str, Any]
Change = Callable[[Tensors, Config, dict], None]
"""Of tensors, config.json and drafttrain.json, in place."""


def broken(source: Path, folder: Path, change: Change | None = None, files: Callable[[Path], None] | None = None) -> Path:
    """A copy of an export, changed: what it says, and then its files."""
    shutil.copytree(source, folder)
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    made = json.loads((folder / "drafttrain.json").read_text())
    if change is not None:
        change(tensors, config, made)
        save_file({name: x.contiguous().clone() for name, x in tensors.items()}, folder / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(config))
        made["weights"]["sha256"] = sha256_file(folder / WEIGHTS)
        (folder / "drafttrain.json").write_text(json.dumps(made))
    if files is not None:
        files(folder)
    return folder


def tensors(change: Callable[[Tensors], Any]) -> Change:
    return lambda x, config, made: change(x)


def config_(change: Callable[[Config], Any]) -> Change:
    return lambda x, config, made: change(config)


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    """One tensor made another."""
    return tensors(lambda x: x.update({name: make(x[name])}))


def without(*names: str) -> Change:
    return tensors(lambda x: [x.pop(name) for name in names])


def exchanged(*pairs: tuple[str, str]) -> Change:
    return tensors(lambda x: [x.update({a: x[b], b: x[a]}) for a, b in pairs])


def parts(name: str, *order: int) -> Change:
    """Columns of a matrix, as many equal parts as named, in another order."""
    return put(name, lambda w: torch.cat([w.chunk(len(order), dim=1)[i] for i in order], dim=1))


def layer_ids(nested, top, number=3) -> Change:
    def change(config):
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], config["eagle_aux_hidden_state_layer_ids"] = nested, top
        config["num_aux_hidden_states"] = number

    return config_(change)


def rope(both: bool, **values) -> Change:
    def change(config):
        config["rope_parameters"] |= values
        if both:
            config["rope_theta"] = config["rope_parameters"]["rope_theta"]
            config["rope_scaling"] = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}

    return config_(change)


def shift_map(x: Tensors) -> None:
    """Every token one higher, in both maps."""
    ids = torch.arange(len(x["d2t"])) + x["d2t"] + 1
    x["d2t"], x["t2d"] = ids - torch.arange(len(ids)), torch.zeros_like(x["t2d"]).index_fill(0, ids, True)


def offsets(change: Callable[[Tensor], Tensor]) -> Change:
    """d2t of changed ids."""
    return put("d2t", lambda d2t: change(torch.arange(len(d2t)) + d2t) - torch.arange(len(d2t)))


def spliced(place: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([x[:place], torch.tensor([value]), x[place + 1 :]]).to(x.dtype)


def rows_of_heads(prefix: str) -> Change:
    """Queries as another number of heads would have them: the second half of the heads first."""
    return put(f"{prefix}.self_attn.q_proj.weight", lambda w: w.roll(len(w) // 2, 0))


def nested(key: str, value: Any, top: bool = False) -> Change:
    """A field of dflash_config, and the same at the top."""

    def change(config):
        for place in (config["dflash_config"], *([config] if top else [])):
            if value is None:
                place.pop(key)
            else:
                place[key] = value

    return config_(change)


class Payload:
    """What a pickle would run."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def as_pickle(name: str) -> Callable[[Path], None]:
    def files(folder):
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Payload(), protocol=2))

    return files


def shards(folder: Path) -> None:
    """Two shards with an index, the second of them lost."""
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    first = dict(list(found.items())[: len(found) // 2])
    save_file(first, folder / "model-00001-of-00002.safetensors")
    places = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in found}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def cut(name: str, share: float) -> Callable[[Path], None]:
    def files(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return files


# ---- what the folder tells ------------------------------------------------------------------------------------------------------

SHA, MADE = "sha256 is not the one", r"drafttrain\.json says that the drafter was trained on \[0, 1, 3\]"
LOST = r"is missing: engines leave it at random"
STRANGE = r"is not a tensor of this kind of drafter"
TOLD: dict[str, tuple[str, Change | None, Callable[[Path], None] | None, list[str]]] = {
    # layer ids
    "both lists alike": ("eagle3", layer_ids([0, 1, 3], [0, 1, 3]), None, ["the layer ids disagree.*must be 1 higher than the other"]),
    "one list off by one": ("eagle3", layer_ids([0, 1, 3], [2, 3, 5]), None, [r"\[2, 3, 5\] means layers \[1, 2, 4\]"]),
    "layers out of order": ("eagle3", layer_ids([3, 1, 0], [4, 2, 1]), None, [r"names the layers \[3, 1, 0\], but engines join"]),
    "a layer twice": ("eagle3", layer_ids([0, 1, 1], [1, 2, 2]), None, [r"names the layers \[0, 1, 1\], but engines", "num_aux_hidden_states is 3, but 2", "it reads 3 layers, and config.json names 2", MADE]),
    "a layer beyond": ("eagle3", layer_ids([0, 1, 7], [1, 2, 8]), None, ["the target has layers 0 to 4", MADE]),
    "the last layer": ("eagle3", layer_ids([0, 1, 4], [1, 2, 5]), None, [r"last \(4\) among them", MADE]),
    "layers of another run": ("eagle3", layer_ids([0, 2, 3], [1, 3, 4]), None, [MADE]),
    "fewer layers than fc reads": (
        "eagle3", layer_ids([0, 1], [1, 2], 2), None, [r"fc\.weight is \[32, 96\] instead of \[32, 64\] \(it reads 3 layers, .* names 2\)", MADE],
    ),
    "another number of layers": ("eagle3", layer_ids([0, 1, 3], [1, 2, 4], 4), None, ["num_aux_hidden_states is 4, but 3 layers"]),
    "ids that are no list": ("eagle3", layer_ids([0, 1, 3], "1,2,4"), None, [r"layer_ids is '1,2,4', but must be a list"]),
    "block, ids off by one": ("dflash", nested("target_layer_ids", [1, 2, 4]), None, ["the layer ids disagree"]),
    # names, shapes, types
    "fc transposed": ("eagle3", put("fc.weight", lambda w: w.T), None, [r"fc\.weight is \[96, 32\] instead of \[32, 96\] \(it is transposed\)"]),
    "no last norm": ("eagle3", without("norm.weight"), None, [rf"^norm\.weight \[32\] {LOST}"]),
    "a misspelt name": (
        "eagle3", tensors(lambda x: x.update({"midlayer.self_attn.qproj.weight": x.pop("midlayer.self_attn.q_proj.weight")})), None,
        [rf"q_proj\.weight \[32, 64\] {LOST}", rf"midlayer\.self_attn\.qproj\.weight {STRANGE}"],
    ),
    "a head in fp16": ("eagle3", put("lm_head.weight", torch.Tensor.half), None, [r"lm_head\.weight is float16 instead of float32"]),
    "a quantised head": ("eagle3", put("lm_head.weight", lambda w: w.to(torch.int8)), None, [r"lm_head\.weight is int8 instead of float32"]),
    "a head with fewer rows": ("eagle3", put("lm_head.weight", lambda w: w[:100]), None, [r"lm_head\.weight is \[100, 32\] instead of \[144, 32\]"]),
    "a bias that vLLM drops": ("eagle1", tensors(lambda x: x.update({"fc.bias": torch.ones(32)})), None, [rf"fc\.bias {STRANGE}"]),
    "no norm of queries": ("dflash", without("layers.1.self_attn.q_norm.weight"), None, [rf"layers\.1\.self_attn\.q_norm\.weight \[8\] {LOST}"]),
    "the weights of another drafter": ("medusa", tensors(lambda x: [x.clear(), x.update({"midlayer.a": torch.ones(2, 2) * torch.arange(2)})]), None, ["most of what such a drafter has", STRANGE]),
    "a Markov table transposed": (
        "dspark", put("markov_head.markov_w1.weight", lambda w: w.T), None, [r"markov_w1\.weight is \[8, 320\] instead of \[320, 8\] \(it is transposed\)"],
    ),
    "no state for masked elements": ("p-eagle", without("mask_hidden"), None, [rf"^mask_hidden \[1, 1, 96\] {LOST}"]),
    "no bias of a head": ("medusa", without("blocks.2.layers.0.bias"), None, [rf"blocks\.2\.layers\.0\.bias \[32\] {LOST}"]),
    # the vocabulary map
    "d2t shifted": ("eagle3", put("d2t", lambda d2t: d2t + 1), None, [r"d2t and t2d name different tokens \(\d+ are"]),
    "d2t of ids": ("eagle3", put("d2t", lambda d2t: d2t + torch.arange(len(d2t))), None, ["d2t is wrong .*it looks like the ids themselves", "name different tokens"]),
    "d2t with a token twice": ("eagle3", offsets(lambda ids: spliced(5, int(ids[4]))(ids)), None, ["two rows would say the same token", "name different tokens"]),
    "d2t out of the vocabulary": ("eagle3", offsets(spliced(143, 320)), None, ["row 143 would say token 320, but the target's tokens are 0 to 319", "name different"]),
    "d2t out of order": ("eagle3", offsets(lambda ids: ids.flip(0)), None, ["the tokens do not ascend"]),
    "two tokens of d2t exchanged": ("eagle3", offsets(lambda ids: ids[[*range(70), 71, 70, *range(72, len(ids))]]), None, ["the tokens do not ascend"]),
    "d2t as numbers with a point": ("eagle3", put("d2t", torch.Tensor.float), None, [r"d2t is float32 \[144\], but must be a row of whole numbers"]),
    "no d2t": ("eagle3", without("d2t"), None, ["d2t is missing, but the head has 144 tokens and the target 320"]),
    "t2d of another head": ("eagle3", put("t2d", lambda t2d: ~t2d), None, ["d2t and t2d name different tokens"]),
    "d2t for a full head": (
        "p-eagle", tensors(lambda x: x.update(d2t=torch.ones(320, dtype=torch.int64))), None, ["d2t is there, but the head has all 320 tokens"],
    ),
    # config.json
    "two RoPEs": ("eagle3", rope(False, rope_theta=500000.0), None, ["RoPE is .*10000.* in rope_theta and rope_scaling but .*500000"]),
    "scaling in one RoPE": ("dflash", rope(False, rope_type="linear", factor=8.0), None, ["RoPE is .* in rope_theta and rope_scaling but .*linear"]),
    "no positions": ("eagle3", config_(lambda c: c.pop("max_position_embeddings")), None, ["max_position_embeddings is missing"]),
    "the residual behind the norm": ("eagle3", config_(lambda c: c.update(norm_before_residual=True)), None, ["norm_before_residual is True, not False"]),
    "EAGLE-1's architecture": (
        "eagle3", config_(lambda c: c.update(architectures=["LlamaForCausalLMEagle"])), None, [r"but the tensors are those of a drafter of class Eagle3.*\['LlamaForCausalLMEagle3'\]"],
    ),
    "a field that is missing": ("p-eagle", config_(lambda c: c.pop("pard_token")), None, ["has no 'pard_token'"]),
    "another number of heads": ("medusa", config_(lambda c: c.update(num_heads=3)), None, [rf"blocks\.3\.layers\.0\.{what} {STRANGE}" for what in ("bias", "weight")] + [rf"lm_heads\.3\.weight {STRANGE}"]),
    "DFlash sampled from the anchor": ("dflash", nested("sample_from_anchor", True), None, [r"sample_from_anchor true, but DFlash is 1\+N only"]),
    "DSpark as 1+N": ("dspark", nested("sample_from_anchor", False, top=True), None, ["does not say sample_from_anchor true throughout"]),
    "DSpark with a bonus anchor": ("dspark", config_(lambda c: c.update(dspark_bonus_anchor=True)), None, ["does not say sample_from_anchor true throughout"]),
    "no length of blocks": ("dflash", config_(lambda c: c.pop("block_size")), None, ["block_size is missing, so SGLang takes blocks of 16"]),
    "no masked token": ("dflash", nested("mask_token_id", None), None, ["mask_token_id is missing"]),
    "a masked token beyond": ("dspark", nested("mask_token_id", 320, top=True), None, ["mask_token_id is 320, but .* rows 0 to 319"]),
    # numbers
    "not finite": ("eagle1", put("fc.weight", lambda w: w.index_fill(0, torch.tensor([3]), float("nan"))), None, [r"^fc\.weight holds 64 numbers that are not finite"]),
    "a norm of zeros": ("dspark", put("norm.weight", torch.zeros_like), None, [r"^norm\.weight is nothing but zeros"]),
    "one number throughout": ("eagle3", put("midlayer.mlp.up_proj.weight", torch.ones_like), None, ["up_proj.weight holds one number throughout"]),
    # files
    "config.json cut off": ("eagle3", None, cut("config.json", 0.5), [r"config\.json is not JSON"]),
    "weights cut off": ("dflash", None, cut(WEIGHTS, 0.7), [r"model\.safetensors is damaged or cut off"]),
    "weights empty": ("eagle1", None, cut(WEIGHTS, 0), [r"model\.safetensors is damaged or cut off"]),
    "a pickle": ("medusa", None, as_pickle("pytorch_model.bin"), [r"the weights are a pickle \(pytorch_model\.bin\)"]),
    "a pickle in disguise": ("eagle3", None, as_pickle(WEIGHTS), ["is a pickle under another name"]),
    "a Git LFS pointer": (
        "eagle3", None, lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"), ["is a Git LFS pointer"],
    ),
    "a shard lost": ("eagle3", None, shards, [r"names model-00002-of-00002\.safetensors, which is not there"]),
    "other weights": ("eagle1", None, lambda f: save_file({n: x * 1.1 for n, x in load_file(f / WEIGHTS).items()}, f / WEIGHTS), [SHA]),
    "the record of another": ("dflash", lambda x, c, made: made["config"].update(draft_vocab=100), None, ["draft_vocab_size is 320 in config.json, but 100 in"]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LEARNT))
def test_a_sound_export_has_no_fault(sound, name):
    found = inspect_folder(str(sound(name)))
    assert not found.faults and not found.notes


@pytest.mark.parametrize("label", TOLD)
def test_the_folder_tells(sound, tmp_path, label):
    """Every fault, and nothing else, each in one sentence on one line."""
    name, change, files, words = TOLD[label]
    found = inspect_folder(str(broken(sound(name), tmp_path / "export", change, files)))
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found.faults)
    unsaid = [word for word in words if not any(re.search(word, sentence) for sentence in found.faults)]
    beside = [sentence for sentence in found.faults if not any(re.search(word, sentence) for word in words)]
    assert not unsaid and not beside, found.faults


# ---- what measuring finds -------------------------------------------------------------------------------------------------------


def fitting_ids(nested: list[int]) -> Change:
    """Other layers wherever layers are named."""

    def change(x, config, made):
        layer_ids(nested, [i + 1 for i in nested])(x, config, made)
        made["config"]["taps"] = nested

    return change


ATTENTION = "midlayer.self_attn"
LAYERS = [
    (f"layers.0.{part}.weight", f"layers.1.{part}.weight")
    for part in (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
]


def other_concatenation(x: Tensors) -> None:
    """[state; embedding] instead of [embedding; state]."""
    for which in "qkv":
        parts(f"{ATTENTION}.{which}_proj.weight", 1, 0)(x, {}, {})


MEASURED: dict[str, tuple[str, Change]] = {
    "states of two layers exchanged": ("eagle3", parts("fc.weight", 2, 1, 0)),
    "the attention's inputs exchanged": ("eagle3", tensors(other_concatenation)),
    "keys and values exchanged": ("eagle3", exchanged((f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight"))),
    "heads of the queries in another order": ("eagle3", rows_of_heads("midlayer")),
    "heads of the output in another order": ("eagle3", put(f"{ATTENTION}.o_proj.weight", lambda w: w.roll(16, 1))),
    "both maps shifted": ("eagle3", tensors(shift_map)),
    "rows of the head shifted": ("eagle3", put("lm_head.weight", lambda w: w.roll(1, 0))),
    "halves of fc exchanged": ("eagle1", parts("fc.weight", 1, 0)),
    "RoPE scaled in both schemas": ("dflash", rope(True, rope_type="linear", factor=8.0)),
    "layers exchanged": ("dflash", exchanged(*LAYERS)),
    "another masked token": ("dflash", nested("mask_token_id", 7)),
    "a block's taps exchanged": ("dflash", parts("fc.weight", 2, 1, 0)),
    "a DSpark's layers exchanged": ("dspark", exchanged(*LAYERS)),
    "a P-EAGLE's taps exchanged": ("p-eagle", parts("fc.weight", 2, 1, 0)),
    "heads in another order": (
        "medusa",
        exchanged(*[(f"{n}.0{end}", f"{n}.1{end}") for n, end in (("blocks", ".layers.0.weight"), ("blocks", ".layers.0.bias"), ("lm_heads", ".weight"))]),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def nets(tiny_llama, sound):
    """name -> the sound drafter, read back."""
    return {name: load_export(sound(name), tiny_llama) for name in LEARNT}


@pytest.mark.parametrize("label", MEASURED)
def test_measuring_finds_what_fits_in_every_file(tiny_llama, requests, sound, nets, tmp_path, label):
    """Nothing to say from the folder, and tau below half. What is said stays the target's."""
    name, change = MEASURED[label]
    folder = broken(sound(name), tmp_path / "export", change)
    assert not inspect_folder(str(folder)).faults
    found = compare_tau(tiny_llama, nets[name], load_export(folder, tiny_llama), requests, DRAFTS, len(requests))
    assert found.a.value > 4.5 and found.b.value < found.a.value / 2
    assert found.ratio.low <= found.ratio.value <= found.ratio.high < 0.6 and not found.unequal
