"""EAGLE-1 and Medusa against plain references of the engines' classes, each known mistake of the field among them."""

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.heads import Medusa
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.target.target import own_attention
from drafttrain.types import Features
from drafttrain.vocab import DraftVocabulary

from .reference import ReferenceEagle, ReferenceMedusa
from .test_eagle3 import DRAFTS, PROMPT, as_target_logits, close, edit_tensors, text

EAGLE = (
    ("vllm", Eagle(), None), ("sglang", Eagle(), None), ("sglang", Eagle(bias=True), None), ("sglang", Eagle(depth=3), 60),
    ("sglang", Eagle(bias=True), 319),
)  # fmt: skip
MEDUSA = (
    (Medusa(heads=DRAFTS, layers=2), None),
    (Medusa(heads=DRAFTS), None),
    (Medusa(heads=DRAFTS, layers=3, own_heads=True), None),
)


def make_net(target, config, draft_vocab, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target.vocab, generator=g)[: draft_vocab or target.vocab].sort().values
    net = config.build(target, DraftVocabulary(ids, target.vocab))
    with torch.no_grad():
        for name, weight in net.named_parameters():
            noise = torch.randn(weight.shape, generator=g)
            plain = noise if name.endswith("bias") else 1 + 0.3 * noise
            weight.copy_(plain if weight.dim() == 1 else noise / weight.shape[-1] ** 0.5)
    return net.eval()


@torch.no_grad()
def hf_final(target, ids_BT, normed=True) -> torch.Tensor:
    """[T, H] by transformers itself: what stands behind the last norm, or in front of it."""
    kept = {}
    hook = target.body.norm.register_forward_hook(lambda module, args, output: kept.update(before=args[0], behind=output))
    with own_attention(target.model):
        target.model(input_ids=ids_BT, use_cache=False)
    hook.remove()
    return kept["behind" if normed else "before"][0]


def capped(target, logits):
    """Engines leave the target's cap out for a drafter, which changes no first choice."""
    cap = getattr(target.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.where(logits.isinf(), logits, cap * torch.tanh(logits / cap))


@torch.no_grad()
def ours(net, target, sequences, drafts=DRAFTS):
    """Logits at the anchor PROMPT by the training face and by the decoding face, [K, V] each, from our own reading of the target."""
    features, layout = target.read_packed(sequences, net.needs.taps), net.layout(sequences, drafts)
    drafted, ids = net.rows(sequences, features, layout), sequences.ids_BT[0]
    mine = layout.anchor_N == PROMPT
    assert layout.depth_N[mine].tolist() == list(range(1, drafts + 1))
    trained = net.logits(drafted.hidden_NH[mine], drafted.prev_N[mine])
    state = net.begin(1, 64, drafts)
    read = Features(features.taps_BTAD[:, :PROMPT], features.final_BTD[:, :PROMPT])
    hidden = net.commit(state, None, read, ids[None, 1 : PROMPT + 1], torch.tensor([PROMPT]), 64)
    rows = [net.logits(hidden, ids[PROMPT : PROMPT + 1])]
    for number, token in enumerate(ids[PROMPT + 1 : PROMPT + drafts]):
        rows.append(net.logits(net.step(state, token[None, None], torch.tensor([[number - 1]]))[0], token[None]))
    return as_target_logits(trained, net), as_target_logits(torch.cat(rows), net)


def eagle_case(target, folder, asked="vllm", config=None, draft_vocab=None):
    net = make_net(target, config or Eagle(), draft_vocab)
    export_drafter(net, target, folder, ExportConfig(dtype="float32", format=asked), None)
    sequences = text(net)
    return net, sequences, lambda: ReferenceEagle(folder, target.embedding_weight, target.head_weight)


def eagle_draft(reference, sequences, final_TH):
    ids = sequences.ids_BT[0].tolist()
    return reference.draft(ids[: PROMPT + 1], final_TH[:PROMPT], ids[PROMPT + 1 : PROMPT + DRAFTS])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("asked", "config", "draft_vocab"), EAGLE)
@torch.no_grad()
def test_an_engine_computes_our_eagle(targets, tmp_path, architecture, asked, config, draft_vocab):
    target = targets(architecture)
    net, sequences, make = eagle_case(target, tmp_path / "export", asked, config, draft_vocab)
    reference = make()
    wanted = capped(target, eagle_draft(reference, sequences, hf_final(target, sequences.ids_BT)))
    assert reference.used | {"d2t", "t2d"} == reference.weights.keys() | {"d2t", "t2d"}
    for got in ours(net, target, sequences):
        close(got, wanted)
    assert float(wanted[wanted.isfinite()].std()) > 0.5
    assert ("fc.bias" in reference.weights) == (asked == "sglang")


EAGLE_MISTAKES = {
    "hidden_first": lambda bent: setattr(bent, "fuse", lambda token, h: bent.linear("fc", torch.cat([h, bent.embedding_VH[token]]))),
    "input_norm": lambda bent: setattr(
        bent, "row", lambda token, h, t: bent.block("layers.0", unit(bent.fuse(token, h)), bent.fuse(token, h), t)
    ),
    "hidden_as_residual": lambda bent: setattr(bent, "row", lambda token, h, t: bent.block("layers.0", bent.fuse(token, h), h, t)),
    "normed_before_the_head": lambda bent: setattr(bent, "logits", lambda state, plain=bent.logits: plain(unit(state))),
    "normed_feedback": lambda bent: setattr(bent, "feed", unit),
    "no_bias": lambda bent: setattr(bent, "bias_H", 0.0),
    "same_positions": lambda bent: setattr(bent, "rotate", lambda x, t: x),
    "wrong_tokens": lambda bent: setattr(bent, "spread", lambda x, ids, plain=bent.spread: plain(x, ids.flip(0))),
}  # fmt: skip


def unit(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("mutation", [*EAGLE_MISTAKES, "feature_before_the_norm", "token_of_its_own_row"])
@torch.no_grad()
def test_the_eagle_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    _, sequences, make = eagle_case(tiny_llama, tmp_path / "export", "sglang", Eagle(bias=True), 60)
    reference, bent = make(), make()
    final = bent_final = hf_final(tiny_llama, sequences.ids_BT)
    if mutation == "feature_before_the_norm":
        bent_final = hf_final(tiny_llama, sequences.ids_BT, normed=False)
    elif mutation == "token_of_its_own_row":
        bent.row = lambda token, h, t, plain=bent.row: plain(int(sequences.ids_BT[0, t]), h, t)
    else:
        EAGLE_MISTAKES[mutation](bent)
    wanted = eagle_draft(reference, sequences, final)
    got = eagle_draft(bent, sequences, bent_final)
    assert not torch.allclose(wanted, got, rtol=0, atol=1e-2)


@torch.no_grad()
def test_engines_feed_raw_embeddings_where_the_target_scales_them(targets, tmp_path):
    """Gemma multiplies its table by the root of its width: fc carries the factor, and a table that is scaled already would be wrong."""
    target = targets("gemma3")
    assert target.embedding_scale() == pytest.approx(target.hidden**0.5, rel=1e-3) and targets("llama").embedding_scale() == 1.0
    net, sequences, make = eagle_case(target, tmp_path / "export")
    final = hf_final(target, sequences.ids_BT)
    right, wrong = make(), make()
    wrong.embedding_VH = wrong.embedding_VH * target.hidden**0.5
    assert not torch.allclose(eagle_draft(right, sequences, final), eagle_draft(wrong, sequences, final), rtol=0, atol=1e-2)
    torch.testing.assert_close(load_export(tmp_path / "export", target).fc.weight, net.fc.weight, rtol=1e-5, atol=1e-6)


def test_a_target_whose_embeddings_are_no_multiple_is_refused(tiny_llama, tmp_path, monkeypatch):
    net = make_net(tiny_llama, Eagle(), None)
    monkeypatch.setattr(tiny_llama, "embed", lambda ids: tiny_llama.embedding_weight[ids] + 1.0)
    with pytest.raises(UserError, match="more than one factor"):
        export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(format="vllm"), None)


def test_a_head_with_a_bias_is_refused(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny_llama.head._parameters, "bias", torch.nn.Parameter(torch.randn(tiny_llama.vocab)))
    for config, wanted in (
        (Eagle(), "head has a bias"),
        (Medusa(heads=2), "head has a bias"),
        (Medusa(heads=2, own_heads=True), None),
    ):
        net = make_net(tiny_llama, config, None)
        folder = tmp_path / str(wanted)
        if wanted is None:
            assert export_drafter(net, tiny_llama, folder, ExportConfig(), None)["format"] == "medusa"
            continue
        with pytest.raises(UserError, match=wanted):
            export_drafter(net, tiny_llama, folder, ExportConfig(format="vllm"), None)
        assert export_drafter(net, tiny_llama, folder, ExportConfig(), None)["format"] == "native"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize(("config", "draft_vocab"), MEDUSA)
@torch.no_grad()
def test_vllm_computes_our_medusa(targets, tmp_path, architecture, config, draft_vocab):
    target = targets(architecture)
    net = make_net(target, config, draft_vocab)
    export_drafter(net, target, tmp_path / "export", ExportConfig(dtype="float32"), None)
    reference, sequences = ReferenceMedusa(tmp_path / "export"), text(net)
    wanted = reference.draft(hf_final(target, sequences.ids_BT)[PROMPT - 1])
    assert reference.used == reference.weights.keys()
    if not config.own_heads:  # the target's head, with the target's cap; own heads have none
        wanted = capped(target, wanted)
    for got in ours(net, target, sequences):
        close(got, wanted)
    assert float(wanted[wanted.isfinite()].std()) > 0.5 and len(wanted) == DRAFTS


def from_the_input_each_time(bent, x_H, head):
    """What a block computes whose layers all add to what came in."""
    c_H = x_H
    for layer in range(2):
        name = f"blocks.{head}.layers.{layer}"
        x_H = c_H + torch.nn.functional.silu(bent.linear(name, x_H) + bent.weight(name + ".bias"))
    return x_H


@pytest.mark.parametrize(
    "mutation",
    [
        "from_the_input",
        "no_bias",
        "heads_reversed",
        "one_head_for_all",
        "feature_before_the_norm",
        "a_row_later",
    ],
)
@torch.no_grad()
def test_the_medusa_comparison_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    net = make_net(tiny_llama, Medusa(heads=DRAFTS, layers=2), None)
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(dtype="float32"), None)
    reference, bent = (ReferenceMedusa(tmp_path / "export") for _ in range(2))
    ids_BT = text(net).ids_BT
    final_H = hf_final(tiny_llama, ids_BT)[PROMPT - 1]
    bent_H, plain = final_H, bent.residual
    if mutation == "from_the_input":
        bent.residual = lambda x, h: from_the_input_each_time(bent, x, h)
    if mutation == "no_bias":
        bent.config["medusa_fc_bias"] = False
    if mutation == "heads_reversed":
        bent.residual = lambda x, h: plain(x, DRAFTS - 1 - h)
    if mutation == "one_head_for_all":
        bent.residual = lambda x, h: plain(x, 0)
    if mutation == "feature_before_the_norm":
        bent_H = hf_final(tiny_llama, ids_BT, normed=False)[PROMPT - 1]
    if mutation == "a_row_later":
        bent_H = hf_final(tiny_llama, ids_BT)[PROMPT]
    assert not torch.allclose(reference.draft(final_H), bent.draft(bent_H), rtol=0, atol=1e-2)


def test_nothing_of_the_target_can_overwrite_the_number_of_heads(tiny_llama, tmp_path):
    """vLLM takes any key with "num" and "heads" (or "layers") in it, the last one winning."""
    net = make_net(tiny_llama, Medusa(heads=3, layers=2), None)
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None)
    config = ReferenceMedusa(tmp_path / "export").config
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 2)
    keys = [key for key in config if "num" in key]
    assert sorted(keys) == ["num_heads", "num_hidden_layers"]
    assert "max_position_embeddings" not in config and "logit_scale" not in config


def test_a_medusa_with_a_head_that_is_not_the_targets_is_not_read(tiny_llama, tmp_path):
    export_drafter(make_net(tiny_llama, Medusa(heads=2), None), tiny_llama, tmp_path / "export", ExportConfig(), None)
    (tmp_path / "export" / "drafttrain.json").unlink()
    edit_tensors(tmp_path / "export", lambda t: t["lm_head.weight"].mul_(1.5))
    with pytest.raises(UserError, match="not the target's"):
        load_export(tmp_path / "export", tiny_llama)


def test_sglangs_map_and_ours_name_the_same_tokens(tiny_llama, tmp_path):
    net = make_net(tiny_llama, Eagle(), 60)
    made = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(format="sglang", push="me/eagle-tiny"), None)
    ids = torch.load(tmp_path / "export" / "hot_token_id.pt", weights_only=True)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert ids == net.vocabulary.ids.tolist() == (tensors["d2t"] + torch.arange(60)).tolist()
    card = (tmp_path / "export" / "README.md").read_text()
    assert "--speculative-token-map me/eagle-tiny/hot_token_id.pt" in card and "--speculative-algorithm EAGLE " in card
    assert made["format"] == "eagle-sglang" and "vllm" not in card.lower()
    full = export_drafter(make_net(tiny_llama, Eagle(), None), tiny_llama, tmp_path / "full", ExportConfig(format="sglang"), None)
    assert full["config"]["draft_vocab"] == tiny_llama.vocab and not (tmp_path / "full" / "hot_token_id.pt").exists()
    assert "token-map" not in (tmp_path / "full" / "README.md").read_text()
