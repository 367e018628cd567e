"""What vLLM (0.26.0, 0.33.0), SGLang (0.5.23) and the speculators library (0.9.0) do with the tensors of a folder: their own renaming, fusing, skipping.

Written from the engines' loading code and from the parameters that their classes make for a config.json, with nothing of drafttrain: what an exporter
believes of names and shapes is not asked. `load` puts each tensor where an engine would, and says what it left at random, what it passed over
and what stopped it.

A parameter is a pair of a name and a part: an engine makes one matrix of q, k and v and one of gate and up, so a missing k_proj leaves a third of a
matrix at random.

Letters: H width, V target vocabulary, Vd draft vocabulary, A taps, D head width.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from .reference import as_vllm_reads

Parts = dict[tuple[str, str], tuple[int, ...]]
FUSED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"), "gate_proj": ("gate_up_proj", "0"), "up_proj": ("gate_up_proj", "1")}  # fmt: skip
SKIPPED = None


@dataclass
class Loader:
    """A class of an engine as it stands before anything is loaded."""

    parts: Parts
    """All that it makes room for."""
    renamed: Callable[[str], str | None] = lambda name: name
    """Name in the file -> the engine's, before fusing; None where it is skipped on purpose."""
    lent: set[str] = field(default_factory=set)
    """Parameters that become the target's where the file has none."""
    stops: bool = True
    """Whether a name that it does not know stops it, rather than being passed over."""
    fuses: bool = True


@dataclass
class Outcome:
    """Sentences; all empty where all is well."""

    random: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.random or self.ignored or self.stopped)


def load(loader: Loader, shapes: dict[str, tuple[int, ...]]) -> Outcome:
    """What becomes of a file with tensors of these names and shapes."""
    outcome, filled = Outcome(), set()
    for name, shape in shapes.items():
        own = loader.renamed(name)
        if own is SKIPPED:
            continue
        part = _fused(own) if loader.fuses else (own, "")
        if part not in loader.parts:
            known_end = loader.stops and not own.endswith(".bias")  # a bias that nobody expects is dropped by all of them
            (outcome.stopped if known_end else outcome.ignored).append(name)
        elif loader.parts[part] != shape:
            outcome.stopped.append(f"{name} is {list(shape)}, not {list(loader.parts[part])}")
        filled.add(part)
    outcome.random += [" ".join(filter(None, part)) for part in loader.parts if part not in filled and part[0] not in loader.lent]
    return outcome


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _fused(name: str) -> tuple[str, str]:
    for own, (fused, part) in FUSED.items():
        if f".{own}." in name:
            return name.replace(own, fused), part
    return name, ""


def _whole(shapes: dict[str, tuple[int, ...]]) -> Parts:
    return {(name, ""): shape for name, shape in shapes.items()}


def _decoder(c: dict, prefix: str, inputs: int, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Matrices of a layer by the file's names, and these norms of width H."""
    H, inner, D = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, inputs),
        f"{prefix}.self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}.self_attn.o_proj.weight": (H, q),
        f"{prefix}.mlp.gate_proj.weight": (inner, H),
        f"{prefix}.mlp.up_proj.weight": (inner, H),
        f"{prefix}.mlp.down_proj.weight": (H, inner),
        **{f"{prefix}.{norm}.weight": (H,) for norm in norms},
    }


def _fuse(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> Parts:
    return {_fused(prefix + name): shape for name, shape in shapes.items()}


def _reduced(c: dict) -> bool:
    return c["draft_vocab_size"] != c["vocab_size"]


# ---- EAGLE ---------------------------------------------------------------------------------------------------------------


def _eagle3_body(c: dict, aux: int, further: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """`further` are the norms in layers behind the first."""
    H = c["hidden_size"]
    first = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes = {
        "embed_tokens.weight": (c["vocab_size"], H),
        "fc.weight": (H, c.get("target_hidden_size", H) * aux),
        "norm.weight": (H,),
    }
    for i in range(c["num_hidden_layers"]):
        shapes |= _decoder(c, f"layers.{i}", H if i else 2 * H, further if i else first)
    if c.get("norm_before_fc"):
        shapes["input_norm.weight"] = (H * aux,)
    return shapes | ({f"fc_norm.{i}.weight": (H,) for i in range(aux)} if c.get("fc_norm") else {})


def _counted_aux(c: dict) -> int:
    """Both engines' way to find A: not by the list at the top."""
    nested = (c.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return c.get("num_aux_hidden_states") or (len(nested) if nested else 3)


def vllm_eagle3(c: dict, release: str, parallel: bool) -> Loader:
    aux = _counted_aux(c)
    parts = _fuse(_eagle3_body(c, aux, ("input_layernorm", "post_attention_layernorm")), "model.")
    parts |= _whole({"lm_head.weight": (c["draft_vocab_size"], c["hidden_size"])})
    if _reduced(c):  # without it 0.26 takes the first tokens, 0.33 too
        parts |= _whole({"draft_id_to_target_id": (c["draft_vocab_size"],)})
    if parallel:
        parts |= _whole({"mask_hidden": (1, 1, c["hidden_size"] * aux)})

    def renamed(name: str) -> str | None:
        if "t2d" in name:
            return SKIPPED
        if "d2t" in name:
            return "draft_id_to_target_id"
        plain = "mask_hidden" in name or "lm_head" in name
        return name if plain else f"model.{name}".replace("midlayer.", "layers.0.")

    return Loader(parts, renamed, lent={"model.embed_tokens.weight"})


def sglang_eagle3(c: dict) -> Loader:
    body = _eagle3_body(c, _counted_aux(c), ("hidden_norm", "post_attention_layernorm"))
    head = {"lm_head.weight": (c["draft_vocab_size"], c["hidden_size"])}
    maps = {"hot_token_id": (c["draft_vocab_size"],)} if _reduced(c) else {}

    def renamed(name: str) -> str | None:
        if "t2d" in name:
            return SKIPPED
        if "d2t" in name:
            return "hot_token_id"
        name = name.replace("midlayer", "layers.0")
        return name if name == "lm_head.weight" else f"model.{name}"

    return Loader(_fuse(body, "model.") | _whole(head | maps), renamed, lent={"model.embed_tokens.weight"}, stops=False)


def _eagle1(c: dict, bias: bool) -> Parts:
    H = c["hidden_size"]
    shapes = {"embed_tokens.weight": (c["vocab_size"], H), "fc.weight": (H, 2 * H)} | ({"fc.bias": (H,)} if bias else {})
    for i in range(c["num_hidden_layers"]):
        shapes |= _decoder(
            c, f"layers.{i}", H, ("input_layernorm", "post_attention_layernorm") if i else ("post_attention_layernorm",)
        )
    return _fuse(shapes, "model.")


def vllm_eagle(c: dict, release: str, parallel: bool) -> Loader:
    return Loader(
        _eagle1(c, bias=False), lambda name: name if "lm_head" in name else f"model.{name}", lent={"model.embed_tokens.weight"}
    )


def sglang_eagle(c: dict) -> Loader:
    """Its map of tokens is a file that the command line names, so it passes over d2t."""
    return Loader(
        _eagle1(c, bias=True), lambda name: SKIPPED if name in ("d2t", "t2d") else f"model.{name}",
        lent={"model.embed_tokens.weight"}, stops=False,
    )  # fmt: skip


def vllm_medusa(c: dict, release: str, parallel: bool) -> Loader:
    H, V, Vd = c["hidden_size"], c["vocab_size"], c["truncated_vocab_size"]
    shapes = (
        {"lm_head.weight": (Vd, H)} if c["original_lm_head"] else {f"lm_heads.{h}.weight": (V, H) for h in range(c["num_heads"])}
    )
    for h in range(c["num_heads"]):
        for layer in range(c["num_hidden_layers"]):
            shapes[f"blocks.{h}.layers.{layer}.weight"] = (H, H)
            if c["medusa_fc_bias"]:
                shapes[f"blocks.{h}.layers.{layer}.bias"] = (H,)
    if (
        Vd < V
    ):  # the map becomes a parameter that the class does not count among what it loaded, so the loader around it stops (seen with 0.26.0)
        shapes["token_map, not initialized from checkpoint"] = (Vd,)
    return Loader(_whole(shapes), stops=False)


# ---- blocks --------------------------------------------------------------------------------------------------------------


def _block_body(c: dict, aux: int) -> dict[str, tuple[int, ...]]:
    H, D, V, nested = c["hidden_size"], c["head_dim"], c["vocab_size"], c.get("dflash_config") or {}
    shapes = {"fc.weight": (H, aux * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(c["num_hidden_layers"]):
        shapes |= _decoder(c, f"layers.{i}", H, ("input_layernorm", "post_attention_layernorm"))
        shapes |= {f"layers.{i}.self_attn.{norm}.weight": (D,) for norm in ("q_norm", "k_norm")}
        if taps := nested.get("conv_kernel_size"):
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{conv}.base_kernel"] = (2, taps, H)
                shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * taps * (H // nested["conv_group_size"]), H)
    if rank := nested.get("selector_rank"):
        shapes |= {f"candidate_selector.{name}": (V, rank) for name in ("predecessor_codebook", "successor_codebook")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, H)
    return shapes


def _dspark_heads(c: dict, words: int, sure: bool) -> dict[str, tuple[int, ...]]:
    rank, H = c["markov_rank"], c["hidden_size"]
    shapes = {"markov_head.markov_w1.weight": (c["vocab_size"], rank), "markov_head.markov_w2.weight": (words, rank)}
    width = H + (rank if c.get("confidence_head_with_markov") else 0)
    return shapes | ({"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)} if sure else {})


def vllm_block(c: dict, release: str, parallel: bool) -> Loader:
    nested, H, Vd = c.get("dflash_config") or {}, c["hidden_size"], c["draft_vocab_size"]
    if release == "0.26":
        aux = len(nested["target_layer_ids"]) if "target_layer_ids" in nested else c["num_hidden_layers"]
    else:
        aux = len(c["eagle_aux_hidden_state_layer_ids"])
    shapes = _block_body(c, aux) | {"embed_tokens.weight": (c["vocab_size"], H)}
    if "markov_rank" in c:
        shapes |= _dspark_heads(c, Vd, sure=release != "0.26" and c["enable_confidence_head"])
    parts = _fuse(shapes, "model.") | _whole({"lm_head.weight": (Vd, H)})
    if _reduced(c):
        parts |= _whole({"draft_id_to_target_id": (Vd,)})

    def renamed(name: str) -> str | None:
        if "t2d" in name or (release == "0.26" and "markov_rank" in c and "confidence_head" in name):
            return SKIPPED
        if "d2t" in name:
            return "draft_id_to_target_id"
        return name if "lm_head" in name else f"model.{name}"

    return Loader(parts, renamed, {"model.embed_tokens.weight"} | (set() if _reduced(c) else {"lm_head.weight"}))


def sglang_block(c: dict) -> Loader:
    """With ragged verification a DSpark's confidence head is made; the card says where it must stay off."""
    shapes = _block_body(c, len(c["dflash_config"]["target_layer_ids"]))
    if "markov_rank" not in c:
        return Loader(_fuse(shapes), stops=False)
    shapes |= _dspark_heads(c, c["vocab_size"], c["enable_confidence_head"])
    skipped = ("lm_head.", "rotary_emb.", "embed_tokens.")
    return Loader(_fuse(shapes), lambda name: SKIPPED if name.startswith(skipped) else name, stops=False)


# ---- language models -----------------------------------------------------------------------------------------------------


def _language_model(c: dict, stops: bool) -> Loader:
    """A tied head is the table of embeddings, whatever the file has."""
    H, tied = c["hidden_size"], c["tie_word_embeddings"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], H), "model.norm.weight": (H,)}
    shapes |= {} if tied else {"lm_head.weight": (c["vocab_size"], H)}
    norms = {"q_norm": c["head_dim"], "k_norm": c["head_dim"]} if c["architectures"] == ["Qwen3ForCausalLM"] else {}
    for i in range(c["num_hidden_layers"]):
        shapes |= _decoder(c, f"model.layers.{i}", H, ("input_layernorm", "post_attention_layernorm"))
        shapes |= {f"model.layers.{i}.self_attn.{norm}.weight": (size,) for norm, size in norms.items()}
    return Loader(_fuse(shapes), lambda name: SKIPPED if tied and name.startswith("lm_head.") else name, stops=stops)


def vllm_language_model(c: dict, release: str, parallel: bool) -> Loader:
    return _language_model(c, stops=True)


def sglang_language_model(c: dict) -> Loader:
    return _language_model(c, stops=False)


# ---- the speculators library ---------------------------------------------------------------------------------------------


def library(c: dict) -> Loader:
    """Its names are the file's. Embeddings that are not in the file it loads only where fresh memory happens to hold NaN, but for blocks."""
    layer, kind, Vd = c["transformer_layer_config"], c["speculators_model_type"], c["draft_vocab_size"]
    eagle, ids = kind in ("eagle3", "peagle"), c.get("eagle_aux_hidden_state_layer_ids") or c.get("aux_hidden_state_layer_ids")
    if eagle:
        tops = {key: c[key] for key in ("norm_before_fc", "fc_norm")}
        shapes = _eagle3_body(layer | tops, len(ids), ("input_layernorm", "post_attention_layernorm"))
        shapes |= {"mask_hidden": (1, 1, len(ids) * layer["hidden_size"])} if kind == "peagle" else {}
    else:
        shapes = _block_body(layer | {"dflash_config": c if kind == "dflash2" else {}}, len(ids))
        shapes |= {"embed_tokens.weight": (layer["vocab_size"], layer["hidden_size"])}
        shapes |= _dspark_heads(c | layer, Vd, c["enable_confidence_head"]) if kind == "dspark" else {}
    shapes["lm_head.weight"] = (Vd, layer["hidden_size"])
    if reduced := Vd != layer["vocab_size"]:
        shapes |= {"d2t": (Vd,), "t2d": (layer["vocab_size"],)}
    lent = set() if eagle else {"embed_tokens.weight"} | (set() if reduced else {"lm_head.weight"})
    return Loader(_whole(shapes), lent=lent, stops=False, fuses=False)


# ---- which class a config.json gets ----------------------------------------------------------------------------------------

VLLM = {
    "EagleLlamaForCausalLM": vllm_eagle, "LlamaForCausalLMEagle3": vllm_eagle3, "Eagle3LlamaForCausalLM": vllm_eagle3,
    "PeagleLlamaForCausalLM": vllm_eagle3, "MedusaModel": vllm_medusa, "DFlashDraftModel": vllm_block, "DFlash2DraftModel": vllm_block,
    "Qwen3DSparkModel": vllm_block, "LlamaForCausalLM": vllm_language_model, "Qwen3ForCausalLM": vllm_language_model,
}  # fmt: skip
SGLANG = {
    "LlamaForCausalLMEagle": sglang_eagle, "LlamaForCausalLMEagle3": sglang_eagle3, "DFlashDraftModel": sglang_block,
    "DFlash2DraftModel": sglang_block, "Qwen3DSparkModel": sglang_block, "LlamaForCausalLM": sglang_language_model,
    "Qwen3ForCausalLM": sglang_language_model,
}  # fmt: skip


def _as_method(architecture: str, method: str) -> str:
    """vLLM's renaming of an architecture."""
    if method == "eagle":
        return architecture if architecture.startswith("Eagle") else f"Eagle{architecture}"
    word = {"eagle3": "Eagle3", "dflash": "DFlash"}.get(method)
    return architecture if word is None or architecture.startswith(word) or architecture.endswith(word) else word + architecture


def loader_of(folder: Path, engine: str, release: str, method: str, parallel: bool = False) -> Loader:
    """`method` is the word that the server is started with; `parallel` whether it is told parallel_drafting, which speculators' form does."""
    config = json.loads((folder / "config.json").read_text())
    if engine == "speculators":
        return library(config)
    if engine == "sglang":
        return SGLANG[config["architectures"][0]](config)
    c, kind = as_vllm_reads(config, release), config.get("speculators_model_type")
    name = c["architectures"][0] if kind else _as_method(c["architectures"][0], method)
    return VLLM[name](c, release, parallel or kind == "peagle")
