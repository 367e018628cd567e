"""The frozen target behind one small interface.

Row t is what the target computed while reading token t: taps (outputs of chosen layers, 0-based, before the final norm) and
`final` (after the final norm). `logits(final[t])` is its distribution for token t+1, caps and scales included; nobody computes
logits by accident.

Shapes: B batch rows, T tokens read, S keys, A taps, D width, N rows of logits, V vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from drafttrain.errors import UserError
from drafttrain.layouts import RowRule, every_row
from drafttrain.ops.attention import attend, attend_softcapped, attend_with_sinks
from drafttrain.ops.rows import attend_rows
from drafttrain.target.cache import RaggedCache
from drafttrain.target.template import ChatTemplate
from drafttrain.types import Features, Identity, Sequences

ATTENTION = "drafttrain"
COMPARED = 4096
"""Rows of the embedding that are looked at."""
ROUNDING = 1e-2
"""Relative difference between scaled and multiplied embeddings that bfloat16 explains."""
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def hf_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, position_bias=None, **kwargs
):
    """Our attention switch in the form that transformers' modelling code calls; `s_aux` are sinks. Returns ([B, T, H, D], None)."""
    if position_bias is not None:
        raise UserError(
            "this target's attention has a position bias, which the decoding engine does not implement; use another target."
        )
    if s_aux is not None:
        mixed = attend_with_sinks(
            query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling, s_aux
        )
    elif isinstance(attention_mask, BlockMask):
        mixed = attend_rows(query, key, value, attention_mask, scaling)
    elif softcap is not None:
        mixed = attend_softcapped(query, key, value, attention_mask == 0, scaling, softcap)
    else:
        mixed = attend(query, key, value, attention_mask.to(query.dtype), scaling)
    return mixed.transpose(1, 2).contiguous(), None


class Target:
    """A frozen Hugging Face causal LM. Made by `load_target`, which also proves that this interface agrees with the model."""

    def __init__(self, model: Any, chat: ChatTemplate, identity: Identity, end_ids: tuple[int, ...]):
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self.body = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.chat, self.tokenizer = chat, chat.tokenizer
        self.identity, self.end_ids = identity, end_ids
        self.layers, self.hidden, self.vocab = self.config.num_hidden_layers, self.config.hidden_size, self.config.vocab_size
        self.max_positions: int = self.config.max_position_embeddings
        self.masks_by_layer_type = getattr(self.config, "layer_types", None) is not None
        self.fused_rows = False
        """Whether packed chats are read in kernels that hold no scores. Scores with a cap (Gemma-2) are held all the same."""
        self._captured: dict[int, Tensor] = {}
        self._wanted: tuple[int, ...] = ()
        self._hook_layers()

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Tensor:
        """[V, D]"""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[V, D]"""
        return self.head.weight

    def embed(self, ids: Tensor) -> Tensor:
        """What the first layer reads: [..., D]."""
        return self.model.get_input_embeddings()(ids)

    @property
    def default_taps(self) -> tuple[int, ...]:
        """A low, a middle and a high layer, as EAGLE-3's code takes them: the outputs of layers 1, n//2-1 and n-4; fewer where these coincide."""
        n = self.layers
        return tuple(sorted({min(1, n - 2), max(n // 2 - 1, 0), max(n - 4, 0)}))

    @torch.no_grad()
    def embedding_scale(self) -> float | None:
        """By what the first layer's embeddings differ from the table: 1.0 for most, a factor for Gemma; None if by more than a factor."""
        if self.device.type == "meta" and type(self.model.get_input_embeddings()) is nn.Embedding:
            return 1.0  # an outline has no rows to compare, but this table looks them up and does nothing else
        ids = torch.arange(min(self.vocab, COMPARED), device=self.device)
        raw, read = self.embedding_weight[ids].float(), self.embed(ids).float()
        if torch.equal(raw, read):
            return 1.0
        scale = float((raw * read).sum() / raw.pow(2).sum())
        return scale if float((read - scale * raw).norm()) <= ROUNDING * float(read.norm()) else None

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raises UserError unless the taps are strictly ascending layer numbers of this target."""
        if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < self.layers - 1:
            raise UserError(
                f"drafter.init_args.taps is {list(taps)}, but this target has layers 0 to {self.layers - 1} and taps must be ascending, "
                f"distinct and at most {self.layers - 2} (engines hand out the last layer differently); try "
                f"{list(self.default_taps)}."
            )

    @torch.no_grad()
    def read(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        visible_BTS: Tensor,
        key_position_BS: Tensor,
        taps: tuple[int, ...],
        cache: RaggedCache | None = None,
    ) -> Features:
        """Read tokens at the given positions, each seeing the keys that `visible_BTS` allows (sliding windows are added here).

        Without a cache the keys are the tokens themselves (S = T); with one, they are the addressed slots.
        """
        return self._read(ids_BT, position_BT, self._masks(visible_BTS[:, None], position_BT, key_position_BS), taps, cache)

    @torch.no_grad()
    def _read(
        self, ids_BT: Tensor, position_BT: Tensor, masks: Any, taps: tuple[int, ...], cache: RaggedCache | None = None
    ) -> Features:
        self._wanted, self._captured = taps, {}
        out = self.body(
            input_ids=ids_BT, position_ids=position_BT, attention_mask=masks, cache=cache, use_cache=cache is not None
        )
        final_BTD = out.last_hidden_state
        # A target without taps still owes its caller a well-formed record.
        taps_BTAD = (
            torch.stack([self._captured[i] for i in taps], dim=2)
            if taps
            else final_BTD.new_zeros(*final_BTD.shape[:2], 0, self.hidden)
        )
        self._captured = {}
        return Features(taps_BTAD, final_BTD)

    def read_packed(self, sequences: Sequences, taps: tuple[int, ...]) -> Features:
        """Features of packed chats: causal inside a document, blind across documents, no cache. With `fused_rows` nothing is as large as a row
        squared."""
        document, position = sequences.document_BT, sequences.position_BT
        T = document.shape[1]
        if self.fused_rows and getattr(self.config, "attn_logit_softcapping", None) is None:
            every = every_row(document)
            masks = {kind: RowRule(sequences, every, window).block_mask() for kind, window in self._windows().items()}
            return self._read(sequences.ids_BT, position, self._by_type(masks), taps)
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=document.device).tril()
        visible = (document[:, :, None] == document[:, None, :]) & causal_TT
        return self.read(sequences.ids_BT, position, visible, position, taps)

    @torch.no_grad()
    def logits(self, final_ND: Tensor, ids: Tensor | None = None) -> Tensor:
        """Next-token logits [N, V], or only the columns `ids` [N, len(ids)], exactly as the target's own head gives them."""
        return self.head_of(ids)(final_ND)

    def head_of(self, ids: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """The head cut down to the tokens `ids` (all if None), once: states [N, D] -> logits [N, len(ids)], in the target's type.

        Unlike `logits`, it lets gradients through to the states, for drafters that speak with the target's own head.
        """
        weight, bias = self.head.weight, self.head.bias
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return lambda state_ND: self._scaled(torch.nn.functional.linear(state_ND, weight, bias))

    @property
    def logit_factor(self) -> float:
        """What the head's product is multiplied by before it is capped: 1.0 for most."""
        scale, divisor = self._factors()
        return (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)

    @property
    def logit_cap(self) -> float | None:
        """Where the logits behind that factor are squashed to (Gemma 2); None for most."""
        return getattr(self.config, "final_logit_softcapping", None)

    def _factors(self) -> tuple[float | None, float | None]:
        """Cohere multiplies logits, Granite divides them."""
        return getattr(self.config, "logit_scale", None), getattr(self.config, "logits_scaling", None)

    def _scaled(self, logits: Tensor) -> Tensor:
        scale, divisor = self._factors()
        cap = self.logit_cap
        if scale is not None:
            logits = logits * scale
        if divisor is not None:
            logits = logits / divisor
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def render(self, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
        """Token ids of a chat with the generation prompt at its end; `tools` are JSON schemas of functions."""
        return self.chat.render(messages, tools)

    def user_prefix(self) -> tuple[list[int], tuple[int, ...]]:
        """Token ids of an open user turn, and the ids that close it (besides `end_ids`)."""
        return self.chat.user_prefix()

    def new_cache(self, batch: int, capacity: int) -> RaggedCache:
        return RaggedCache(self.layers, batch, capacity)

    def _masks(self, full_B1TS: Tensor, position_BT: Tensor, key_position_BS: Tensor):
        masks = {}
        for kind, window in self._windows().items():
            near = True if window is None else key_position_BS[:, None, None, :] > position_BT[:, None, :, None] - window
            # As what is added to the scores, once for all layers: a boolean mask would be turned into this in each of them.
            masks[kind] = torch.zeros_like(full_B1TS, dtype=self.dtype).masked_fill(~(full_B1TS & near), float("-inf"))
        return self._by_type(masks)

    def _windows(self) -> dict[str, int | None]:
        """The window of each kind of layer; None where it sees all."""
        window = getattr(self.config, "sliding_window", None)
        windows: dict[str, int | None] = {"full_attention": None}
        if "sliding_attention" in self._layer_types() and window is not None:
            windows["sliding_attention"] = window
        return windows

    def _layer_types(self) -> set[str]:
        window = getattr(self.config, "sliding_window", None)
        return set(getattr(self.config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])

    def _by_type(self, masks: dict[str, Any]) -> Any:
        """As the model takes them: one for each kind of layer, or one for all."""
        return masks if self.masks_by_layer_type else masks[self._layer_types().pop()]

    def _hook_layers(self) -> None:
        def keep(index: int):
            def hook(module, args, output):
                if index in self._wanted:
                    self._captured[index] = output if isinstance(output, Tensor) else output[0]

            return hook

        for index, layer in enumerate(self.body.layers[: self.layers]):
            layer.register_forward_hook(keep(index))


@torch.no_grad()
def prove(target: Target) -> None:
    """Check at load that reading through our masks, cache and head gives the model's own logits. Raises UserError.

    A dozen tokens are read twice: by the model as shipped, with its own attention and masks; and by us, ragged, in two
    pieces through the cache. What disagrees (a head that scales in a way we do not know, layers that keep recurrent state)
    is refused here, by name, and not discovered after a day of training.
    """
    kind = type(target.model).__name__
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab, (2, 12), generator=g).to(target.device)
    with own_attention(target.model):
        wanted = target.model(input_ids=ids, use_cache=False).logits
    if not wanted.isfinite().all():
        raise UserError(
            f"target {target.identity.path} ({kind}) gives logits that are no numbers (inf or NaN) for a dozen tokens in {str(target.dtype).removeprefix('torch.')}; "
            "its weights are damaged or do not fit that type: fetch them again, or set target.dtype."
        )
    for by_type in {target.masks_by_layer_type, False}:
        target.masks_by_layer_type = by_type
        try:
            got = _read_in_two_pieces(target, ids)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        gap = _gap(got, wanted, routed=target.dtype != torch.float32 and _has_experts(target.config))
        allowed = (1e-3 if target.dtype == torch.float32 else 8e-2) * max(1.0, wanted.abs().max().item())
        if gap <= allowed:
            return
        problem = f"logits differ by {gap:.3g}"
    raise UserError(
        f"target {target.identity.path} ({kind}) does not read the same through drafttrain's cache as on its own ({problem}); "
        "its layers or its head do something that is not supported, so choose another target."
    )


FIRST_PIECE = 7
"""Of the dozen tokens."""


def _gap(got_BTV: Tensor, wanted_BTV: Tensor, routed: bool) -> float:
    """How far logits are apart: the most of any position. `routed`: of the two pieces the farther one's median position, since where 16 bits let two
    experts be nearly equal, another kernel may choose the other one, and that position is far off then; what is wrong in the reading is so everywhere
    in a piece."""
    gap_BT = (got_BTV - wanted_BTV).abs().amax(-1)
    if routed:
        return max(piece.median().item() for piece in (gap_BT[:, :FIRST_PIECE], gap_BT[:, FIRST_PIECE:]))
    return gap_BT.max().item()


def _has_experts(config: Any) -> bool:
    """Configs of mixtures have no key in common: num_local_experts, n_routed_experts, moe_num_experts, ..."""
    return any("expert" in key for key in config.to_dict())


def _read_in_two_pieces(target: Target, ids_BT: Tensor) -> Tensor:
    B, T = ids_BT.shape
    cache = target.new_cache(B, T + 2)
    finals = []
    for start, stop in ((0, FIRST_PIECE), (FIRST_PIECE, T)):
        slots = torch.arange(start, stop, device=ids_BT.device).expand(B, -1)
        keys = torch.arange(stop, device=ids_BT.device).expand(B, -1)
        cache.address(slots, extent=stop)
        finals.append(target.read(ids_BT[:, start:stop], slots, keys[:, None, :] <= slots[:, :, None], keys, (), cache).final_BTD)
    missing = [i for i, layer in enumerate(cache.layers) if layer.updates != 2]
    if missing:
        raise ValueError(f"layers {missing[:4]} keep no key/value cache")
    return target.logits(torch.cat(finals, dim=1))


class own_attention:
    """Inside this context the model uses the attention it ships with (eager)."""

    def __init__(self, model: Any):
        self.model = model

    def __enter__(self):
        self.model.set_attn_implementation("eager")

    def __exit__(self, *exc):
        self.model.set_attn_implementation(ATTENTION)


def plain_copy(model: Any) -> Any:
    """The same weights in a model that transformers no longer takes for quantised (a GGUF is dequantised when it is loaded)."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    for name, buffer in model.named_buffers():  # rotary tables are not in the state dict
        owner, _, leaf = name.rpartition(".")
        plain.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    plain.generation_config = model.generation_config
    return plain
