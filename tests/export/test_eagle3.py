"""Exporting a drafter: a plain reference of the engines' class reads the folder, and what would not serve is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.export import eagle3 as module
from drafttrain.export.config import ExportConfig
from drafttrain.export.eagle3 import embedding_gap
from drafttrain.export.export import export_drafter, load_export
from drafttrain.export.inspect import inspect_folder
from drafttrain.target.target import own_attention
from drafttrain.types import Features, Sequences
from drafttrain.vocab import DraftVocabulary

from .reference import ReferenceEagle3

FLOAT32 = ExportConfig(dtype="float32")
PROMPT, DRAFTS = 7, 4


def make_net(target, taps=(0, 1, 3), draft_vocab: int | None = 60, seed=0, **options):
    """A drafter whose every weight is random: norms too, so that no order or omission cancels out."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target.vocab, generator=g)[:draft_vocab].sort().values
    vocabulary = DraftVocabulary(ids, target.vocab) if draft_vocab else DraftVocabulary.full(target.vocab)
    net = Eagle3(taps=list(taps), depth=DRAFTS, draft_vocab=draft_vocab, **options).build(target, vocabulary)
    with torch.no_grad():
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=g)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 1.5 * noise / parameter.shape[-1] ** 0.5)
    return net.eval()


def text(net, length=PROMPT + DRAFTS + 1, seed=3) -> Sequences:
    """One chat of speakable tokens in which every token but the first counts."""
    ids = net.vocabulary.ids.cpu()
    ids_BT = ids[torch.randint(len(ids), (1, length), generator=torch.Generator().manual_seed(seed))]
    position = torch.arange(length)[None]
    return Sequences(ids_BT, position > 0, position, torch.zeros_like(position))


def hf_hidden_states(target, ids_BT, layers: list[int]) -> torch.Tensor:
    """What an engine's target hands over: [T, A, D], the residual stream after k layers = transformers' hidden_states[k]."""
    with own_attention(target.model):
        states = target.model(input_ids=ids_BT, output_hidden_states=True, use_cache=False).hidden_states
    return torch.stack([states[k][0] for k in layers], dim=1)


def close(got, wanted):
    """Differences count as a share of the largest logit, where that is above 1."""
    largest = float(wanted[wanted.isfinite()].abs().max())
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5 * max(1.0, largest))


def as_target_logits(small_NV: torch.Tensor, net) -> torch.Tensor:
    full = torch.full((len(small_NV), net.vocabulary.size), -torch.inf)
    return full.index_copy(1, net.vocabulary.ids, small_NV)


V31 = {"fc_norm": True, "norm_output": True}


@pytest.mark.parametrize(
    ("taps", "draft_vocab", "options"),
    [
        ((0, 1, 3), 60, {}), ((2,), None, {}), ((0, 1, 2, 3), 319, {}), ((0, 1, 3), 60, V31), ((1, 2), None, {"fc_norm": True}),
        ((1, 2), 60, {"norm_output": True}), ((0, 1, 3), 60, {"head_rank": 7}), ((0, 1, 3), None, {"head_rank": 3} | V31),
        ((0, 1, 3), 60, {"window": 5}), ((1, 2), None, {"window": 2}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_an_engine_computes_the_logits_of_the_training_forward_and_of_the_decoding_steps(
    tiny_llama, tmp_path, taps, draft_vocab, options
):
    """Three computations: the unrolled training forward, the cached decoding steps, the plain reference on the folder."""
    net = make_net(tiny_llama, taps, draft_vocab, **options)
    export_drafter(net, tiny_llama, tmp_path / "export", FLOAT32, None)
    sequences = text(net)
    ids, anchor = sequences.ids_BT[0], PROMPT
    reference = ReferenceEagle3(tmp_path / "export", tiny_llama.embedding_weight)
    assert reference.vllm_layers() == reference.sglang_layers()  # though of a window SGLang knows nothing
    taps_TAD = hf_hidden_states(tiny_llama, sequences.ids_BT, reference.vllm_layers())[:anchor]
    wanted = reference.draft(ids[: anchor + 1].tolist(), taps_TAD, ids[anchor + 1 : anchor + DRAFTS].tolist())

    assert reference.used | {"d2t", "t2d"} == reference.weights.keys() | {"d2t", "t2d"}

    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences)
    drafted = net.rows(sequences, features, layout)
    mine = layout.anchor_N == anchor
    assert layout.depth_N[mine].tolist() == list(range(1, DRAFTS + 1))
    trained = as_target_logits(net.logits(drafted.hidden_NH[mine], drafted.prev_N[mine]), net)
    close(trained, wanted)
    assert float(wanted[wanted.isfinite()].std()) > 0.5  # the comparison is not one of zeros

    decoded = decoding_logits(net, ids, taps_TAD, anchor)
    close(decoded, wanted)


def decoding_logits(net, ids, taps_TAD, anchor) -> torch.Tensor:
    state = net.begin(1, 64, DRAFTS)
    hidden = net.commit(
        state, None, Features(taps_TAD[None], taps_TAD[None, :, 0]), ids[None, 1 : anchor + 1], torch.tensor([anchor]), 64
    )
    rows = [net.logits(hidden, ids[anchor : anchor + 1])]
    for number, token in enumerate(ids[anchor + 1 : anchor + DRAFTS]):
        rows.append(net.logits(net.step(state, token[None, None], torch.tensor([[number - 1]]))[0], token[None]))
    return as_target_logits(torch.cat(rows), net)


@pytest.mark.parametrize(
    "mutation",
    [
        "embeds_second",
        "normed_residual",
        "post_norm_feedback",
        "absolute_d2t",
        "layers_off_by_one",
        "other_feedback",
        "no_fc_norm",
        "window_one_longer",
        "window_ignored",
    ],
)
@torch.no_grad()
def test_the_comparison_above_notices_each_known_mistake(tiny_llama, tmp_path, mutation):
    """The reference is bent in one place each time; if it still agreed, the parity test would prove nothing."""
    slides = {"window": 5} if mutation.startswith("window") else {}
    net = make_net(tiny_llama, **(V31 if mutation in ("other_feedback", "no_fc_norm") else slides))
    export_drafter(net, tiny_llama, tmp_path / "export", FLOAT32, None)
    sequences = text(net)
    ids = sequences.ids_BT[0].tolist()
    reference, bent = (ReferenceEagle3(tmp_path / "export", tiny_llama.embedding_weight) for _ in range(2))
    layers = reference.vllm_layers()
    taps = hf_hidden_states(tiny_llama, sequences.ids_BT, layers)[:PROMPT]
    bent_taps = taps
    if mutation == "embeds_second":
        for n in "qkv":
            name = f"midlayer.self_attn.{n}_proj.weight"
            bent.weights[name] = torch.cat(bent.weights[name].chunk(2, dim=1)[::-1], dim=1)
    if mutation == "normed_residual":
        plain = bent.row
        bent.row = lambda token, hidden, position: plain(token, bent.norm("midlayer.hidden_norm", hidden), position)
    if mutation == "post_norm_feedback":
        row, logits = bent.row, bent.logits
        bent.row, bent.logits = (lambda *a: bent.norm("norm", row(*a))), (lambda state: logits(state))
    if mutation == "absolute_d2t":
        bent.weights["d2t"] = torch.zeros_like(bent.weights["d2t"])
    if mutation == "layers_off_by_one":
        bent_taps = hf_hidden_states(tiny_llama, sequences.ids_BT, [k - 1 for k in layers])[:PROMPT]
    if mutation in ("other_feedback", "no_fc_norm"):
        bent.config["norm_output" if mutation == "other_feedback" else "fc_norm"] = False
    if mutation == "window_one_longer":
        bent.config["sliding_window"] += 1
    if mutation == "window_ignored":
        bent.config["layer_types"] = ["full_attention"]
    wanted = reference.draft(ids[: PROMPT + 1], taps, ids[PROMPT + 1 : PROMPT + DRAFTS])
    got = bent.draft(ids[: PROMPT + 1], bent_taps, ids[PROMPT + 1 : PROMPT + DRAFTS])
    assert not torch.allclose(wanted, got, rtol=0, atol=1e-2)


def test_the_folder_holds_what_engines_and_people_read(tiny_llama, tmp_path):
    net = make_net(tiny_llama)
    made = export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None, {"steps": 120})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]
    assert sorted(os.listdir(tmp_path / "export")) == ["README.md", "config.json", "drafttrain.json", "model.safetensors"]
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    ids = torch.arange(60) + tensors["d2t"]
    assert torch.equal(ids, net.vocabulary.ids) and torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert torch.equal(tensors["fc.weight"], net.fc.weight.detach().bfloat16()) and "embed_tokens.weight" not in tensors
    assert json.loads((tmp_path / "export" / "drafttrain.json").read_text()) == made
    assert made["identity"]["revision"] == tiny_llama.identity.revision and made["class_path"] == "Eagle3"
    assert made["init_args"]["taps"] == [0, 1, 3] and made["facts"] == {"steps": 120} and made["measured"] is None
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["max_position_embeddings"] == tiny_llama.max_positions == 512 and config["vocab_size"] == 320


def test_float32_reads_back_to_the_bit_and_bfloat16_says_what_rounding_cost(tiny_llama, tmp_path):
    net = make_net(tiny_llama)
    exact = export_drafter(net, tiny_llama, tmp_path / "exact", FLOAT32, None)["check"]
    rounded = export_drafter(net, tiny_llama, tmp_path / "rounded", ExportConfig(), None)["check"]
    assert exact["against_cast"] <= 1e-6 and exact["against_trained"] <= 1e-6
    assert rounded["against_cast"] <= 1e-6 < 1e-3 < rounded["against_trained"]
    assert exact["rows"] > 80 and exact["largest_logit"] > 1  # every anchor of the fixed text, five depths


def test_any_target_architecture_exports_and_reads_back(any_target, tmp_path):
    net = make_net(any_target)
    made = export_drafter(net, any_target, tmp_path / "export", FLOAT32, None)
    again = load_export(tmp_path / "export", any_target)
    assert made["check"]["against_trained"] <= 1e-6 * max(1, made["check"]["largest_logit"])
    assert again.needs.taps == (0, 1, 3) and again.shape == net.shape and torch.equal(again.vocabulary.ids, net.vocabulary.ids)


def test_reading_uses_config_json_and_not_our_own_record(tiny_llama, tmp_path):
    """An engine has only config.json: without drafttrain.json the drafter is the same, and another config is another drafter."""
    net = make_net(tiny_llama)
    export_drafter(net, tiny_llama, tmp_path / "export", FLOAT32, None)
    made = tmp_path / "export" / "drafttrain.json"
    made.unlink()
    again = load_export(tmp_path / "export", tiny_llama)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in net.state_dict().items())
    edit_config(tmp_path / "export", rms_norm_eps=0.5)
    assert load_export(tmp_path / "export", tiny_llama).shape.rms_eps == 0.5


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("writes_wrong", "complaint"),
    [
        (lambda config: config | {"rms_norm_eps": 1e-2}, "does not read back"),
        (
            lambda config: config | {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            "does not read back",
        ),
        (lambda config: config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "layer ids"),
    ],
)
def test_a_folder_that_reads_back_as_another_net_is_not_put_in_place(tiny_llama, tmp_path, monkeypatch, writes_wrong, complaint):
    """The exporter is made to write a wrong config; the check must see it in the logits, and keep the earlier export."""
    net = make_net(tiny_llama)
    export_drafter(net, tiny_llama, tmp_path / "export", FLOAT32, None)
    before = (tmp_path / "export" / "config.json").read_bytes()
    right = module.engine_config
    monkeypatch.setattr(module, "engine_config", lambda *args: writes_wrong(right(*args)))
    with pytest.raises(UserError, match=complaint):
        export_drafter(make_net(tiny_llama, seed=5), tiny_llama, tmp_path / "export", FLOAT32, None)
    assert (tmp_path / "export" / "config.json").read_bytes() == before
    monkeypatch.undo()
    assert torch.equal(load_export(tmp_path / "export", tiny_llama).fc.weight, net.fc.weight)


def test_an_export_killed_at_any_moment_leaves_the_earlier_one(tiny_llama, tmp_path, monkeypatch):
    folder = tmp_path / "export"
    old, new = make_net(tiny_llama), make_net(tiny_llama, seed=9)
    export_drafter(old, tiny_llama, folder, FLOAT32, None)

    class Killed(BaseException):
        pass

    real = os.replace
    survived = 0
    for moment in range(20):
        calls = iter(range(100))

        def replace_or_die(source, place, moment=moment, calls=calls):
            if next(calls) == moment:
                raise Killed
            real(source, place)

        monkeypatch.setattr(os, "replace", replace_or_die)
        try:
            export_drafter(new, tiny_llama, folder, FLOAT32, None)
            break
        except Killed:
            monkeypatch.undo()
            assert torch.equal(load_export(folder, tiny_llama).fc.weight, old.fc.weight)
            survived += 1
    monkeypatch.undo()
    assert survived == 6  # four files, the earlier folder moved away, the new one moved in
    assert torch.equal(load_export(folder, tiny_llama).fc.weight, new.fc.weight)
    assert os.listdir(tmp_path) == ["export"]


def add_query_norm(net):
    net.midlayer.self_attn.q_norm = torch.nn.LayerNorm(8, bias=False)


def add_bias(net):
    net.fc.bias = torch.nn.Parameter(torch.zeros(32))


def lose_a_norm(net):
    del net.midlayer.hidden_norm


def not_finite(net):
    net.norm.weight.data[3] = float("nan")


def other_positions(net):
    net.shape = replace(net.shape, max_positions=2048)


@pytest.mark.parametrize(
    ("break_net", "complaint"),
    [
        (add_query_norm, "q_norm"), (add_bias, "fc.bias"), (lose_a_norm, "hidden_norm.weight is missing"),
        (not_finite, "not finite"), (other_positions, "2048 positions"),
    ],
)  # fmt: skip
def test_a_net_that_no_engine_loads_is_refused_before_anything_is_written(tiny_llama, tmp_path, break_net, complaint):
    net = make_net(tiny_llama)
    break_net(net)
    with pytest.raises(UserError, match=complaint):
        export_drafter(net, tiny_llama, tmp_path / "export", FLOAT32, None)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x05" * 40), "sha256 differs"),
        (lambda f: (f / "config.json").write_text("{"), "damaged"),
        (lambda f: edit_tensors(f, lambda t: t["fc.weight"].add_(1)), "sha256 differs"),
    ],
)
def test_a_damaged_folder_is_refused(tiny_llama, tmp_path, damage, complaint):
    export_drafter(make_net(tiny_llama), tiny_llama, tmp_path / "export", FLOAT32, None)
    damage(tmp_path / "export")
    with pytest.raises(UserError, match=complaint):
        load_export(tmp_path / "export", tiny_llama)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
        (lambda t: t["t2d"].logical_not_(), "name different tokens"),
        (lambda t: t["d2t"].zero_(), "name different tokens"),
    ],
)
def test_tensors_of_others_are_checked_too(tiny_llama, tmp_path, change, complaint):
    export_drafter(make_net(tiny_llama), tiny_llama, tmp_path / "export", FLOAT32, None)
    (tmp_path / "export" / "drafttrain.json").unlink()
    edit_tensors(tmp_path / "export", change)
    with pytest.raises(UserError, match=complaint):
        load_export(tmp_path / "export", tiny_llama)


@pytest.mark.parametrize("value", [None, True, "5"])
def test_a_layer_that_slides_by_no_number_is_refused(tiny_llama, tmp_path, value):
    """It would be read as a drafter that sees all, which is another one, by `inspect` too."""
    export_drafter(make_net(tiny_llama, window=5), tiny_llama, tmp_path / "export", FLOAT32, None)
    assert not inspect_folder(str(tmp_path / "export")).faults
    edit_config(tmp_path / "export", sliding_window=value)
    with pytest.raises(UserError, match="sliding_window is|drafter.init_args.window is"):
        load_export(tmp_path / "export", tiny_llama)
    assert any("sliding_window" in fault for fault in inspect_folder(str(tmp_path / "export")).faults)


def test_an_export_of_another_target_is_refused(targets, tmp_path):
    export_drafter(make_net(targets("llama")), targets("llama"), tmp_path / "export", FLOAT32, None)
    with pytest.raises(UserError, match=r"another target.*revision"):
        load_export(tmp_path / "export", targets("qwen3"))


def test_no_space(tiny_llama, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match="the export needs"):
        export_drafter(make_net(tiny_llama), tiny_llama, tmp_path / "export", FLOAT32, None)


def test_scaled_embeddings_are_noticed(targets):
    """Gemma multiplies its embeddings; the drafter's first norm takes that out again, up to its epsilon."""
    assert embedding_gap(targets("llama"), 1e-6) < 1e-6
    gemma = targets("gemma3")
    rows = gemma.embedding_weight.float()
    rows = rows[rows.pow(2).mean(-1) > 0]
    scaled = rows * gemma.hidden**0.5
    norm = lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)  # noqa: E731
    for eps in (1e-6, 1e-2):
        ratio = (norm(rows, eps).abs().sum(-1) / norm(scaled, eps).abs().sum(-1)).sub(1).abs().max()
        assert embedding_gap(gemma, eps) == pytest.approx(float(ratio), rel=0.02, abs=1e-6)
    assert embedding_gap(gemma, 1e-2) > 0.01


def test_the_repository_name_is_judged_at_export(tiny_llama, tmp_path):
    made = export_drafter(make_net(tiny_llama), tiny_llama, tmp_path / "export", replace(FLOAT32, push="me/tiny-drafter"), None)
    assert any("does not contain 'eagle3'" in note for note in made["notes"])
    made = export_drafter(make_net(tiny_llama), tiny_llama, tmp_path / "export", replace(FLOAT32, push="me/tiny-eagle3"), None)
    assert made["notes"] == []


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "float16"), ("format", "eagle3"), ("push", "no-owner"), ("base_model", "a/b/c")]
)
def test_export_config_refuses_nonsense(field, value):
    with pytest.raises(UserError, match=f"export.{field}"):
        ExportConfig(**{field: value})
