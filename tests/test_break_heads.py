"""Faults that an attempt to break heads found, and targets that scale or cap their logits."""

import json

import pytest
import torch
from drafters import test_faces
from safetensors.torch import load_file
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from drafttrain.decoding.calibrate import fingerprint
from drafttrain.decoding.methods import Chain
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.trim import trim
from drafttrain.errors import UserError
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.layouts import one_chat
from drafttrain.target.target import ATTENTION, Target
from drafttrain.validation.bench import Benchmark
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.bench_questions import Question
from drafttrain.vocab import DraftVocabulary


def medusa(target, **arguments):
    torch.manual_seed(0)
    return Medusa(heads=2, **arguments).build(target, DraftVocabulary.full(target.vocab)).eval()


def test_a_trimmed_drafter_does_not_take_the_acceptance_of_the_whole_one(tiny_llama):
    net = medusa(tiny_llama)
    assert fingerprint(net) != fingerprint(trim(net, tiny_llama, DraftVocabulary(torch.arange(90), tiny_llama.vocab)))


def test_a_bench_that_names_no_longest_draft_goes_as_far_as_the_drafter(tiny_llama):
    question = Question("a", "talk", ({"role": "user", "content": "two"},))
    Benchmark(tiny_llama, medusa(tiny_llama), [question], BenchConfig(methods=[Chain(2)]))


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_a_temperature_is_a_number(temperature):
    with pytest.raises(Exception, match="temperature"):
        Sampling(temperature=temperature)


SIZES = dict(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    initializer_range=0.3,
)  # fmt: skip
SCALING = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=13.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625)),
    "cohere, larger": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=3.7)),
}
OWN = {
    "medusa": Medusa(heads=2, own_heads=True),
    "hydra": Hydra(heads=2, prefix=True, own_heads=True),
    "eagle3": Eagle3(taps=[1], depth=2, draft_vocab=None),
    "eagle3 of few tokens": Eagle3(taps=[1], depth=2, draft_vocab=20),
    "p-eagle": PEagle(taps=[1], depth=2, layers=1, draft_vocab=None, mask_token=49),
}
SHARED = {
    "medusa": Medusa(heads=2),
    "eagle1": Eagle(depth=2),
    "dflash": DFlash(block=3, layers=1, taps=[1], mask_token=49),
    "dspark": DSpark(block=3, layers=1, taps=[1], mask_token=49, rank=4),
}


def target_of(make, tiny_llama) -> Target:
    torch.manual_seed(0)
    model = make()
    model.set_attn_implementation(ATTENTION)
    return Target(model, tiny_llama.chat, tiny_llama.identity, ())


def fresh(config, target):
    torch.manual_seed(1)
    ids = torch.arange(target.vocab)[:: target.vocab // (config.draft_vocab or target.vocab)]
    return config.build(target, DraftVocabulary(ids, target.vocab)).eval()


@torch.no_grad()
def said(net, state_NH):
    """Of the head of depth 1, where each depth has one."""
    width = net.lm_head.weight.shape[1] if "lm_head.weight" in net.words else state_NH.shape[1]
    hidden_NH = nn.functional.pad(state_NH, (0, width - state_NH.shape[1]))
    return net.logits(hidden_NH, torch.zeros(len(state_NH), dtype=torch.long))


@torch.no_grad()
def of_the_model(target, state_NH):
    """Logits as transformers itself computes them: the model's own code behind its decoder, which is replaced by the states."""
    body = target.model.get_decoder()
    forward, body.forward = body.forward, lambda **_: BaseModelOutputWithPast(last_hidden_state=state_NH[None])
    try:
        return target.model(input_ids=torch.zeros(1, len(state_NH), dtype=torch.long), use_cache=False).logits[0]
    finally:
        body.forward = forward


@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("drafter", OWN)
def test_a_head_of_its_own_begins_by_saying_what_a_scaled_target_says(tiny_llama, name, drafter):
    target = target_of(SCALING[name], tiny_llama)
    net, state_NH = fresh(OWN[drafter], target), torch.randn(7, target.hidden, generator=torch.Generator().manual_seed(2))
    wanted = of_the_model(target, state_NH)[:, net.vocabulary.ids]
    assert not torch.allclose(wanted, (state_NH @ target.head_weight.T)[:, net.vocabulary.ids], atol=0.1)
    torch.testing.assert_close(said(net, state_NH), wanted, rtol=1e-4, atol=1e-4)


def test_a_factored_head_begins_as_the_nearest_to_what_a_scaled_target_says(tiny_llama):
    """The rest of its singular values is what it misses, and no matrix of that rank misses less (Eckart and Young)."""
    target = target_of(SCALING["granite"], tiny_llama)
    weight_VH = target.head_weight / 13.0
    missed = fresh(Eagle3(taps=[1], depth=2, draft_vocab=None, head_rank=5), target).lm_head.weight - weight_VH
    torch.testing.assert_close(missed.norm(), torch.linalg.svdvals(weight_VH)[5:].norm())


@pytest.mark.parametrize("name", SCALING)
def test_heads_begin_where_the_target_s_own_is(tiny_llama, name):
    """From the target's states on: every head of its own says what it would say with the target's."""
    target = target_of(SCALING[name], tiny_llama)
    sequences = one_chat(torch.randint(0, 50, (20,)), 3)
    features, found = target.read_packed(sequences, ()), []
    for own_heads in (False, True):
        net = medusa(target, own_heads=own_heads)
        drafted = net.rows(sequences, features, net.layout(sequences))
        found.append(net.logits(drafted.hidden_NH, drafted.prev_N))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", [*SCALING, "capped"])
@pytest.mark.parametrize("drafter", SHARED)
def test_a_drafter_that_speaks_with_the_target_s_head_scales_and_caps_as_it_does(tiny_llama, name, drafter):
    target = target_of(SCALING.get(name, capped), tiny_llama)
    net, state_NH = fresh(SHARED[drafter], target), torch.randn(7, target.hidden, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(said(net, state_NH), of_the_model(target, state_NH))


def capped():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=8))


@pytest.mark.parametrize("drafter", ["medusa", "eagle3"])
def test_a_head_of_its_own_begins_below_the_cap_of_the_target(tiny_llama, drafter):
    """No matrix holds a cap: the head begins as what is capped, which puts the tokens in the same order, and says them more sharply."""
    target = target_of(capped, tiny_llama)
    net, state_NH = fresh(OWN[drafter], target), torch.randn(7, target.hidden, generator=torch.Generator().manual_seed(2))
    wanted, found = of_the_model(target, state_NH), said(net, state_NH)
    torch.testing.assert_close(2.0 * torch.tanh(found / 2.0), wanted)
    assert float(found.abs().max()) > 2.0 > float(wanted.abs().max())
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert bool((found.softmax(-1).amax(-1) > wanted.softmax(-1).amax(-1)).all())


@pytest.mark.parametrize("drafter", ["medusa", "eagle3"])
def test_what_an_engine_loads_says_what_a_scaled_target_does(tiny_llama, tmp_path, drafter):
    """One product with the matrix in the file, and nothing that is told beside it."""
    target = target_of(SCALING["granite"], tiny_llama)
    net, state_NH = fresh(OWN[drafter], target), torch.randn(7, target.hidden, generator=torch.Generator().manual_seed(2))
    export_drafter(net, target, tmp_path / "export", ExportConfig(dtype="float32", format="vllm"), None)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    weight_VH = tensors["lm_heads.0.weight" if drafter == "medusa" else "lm_head.weight"]
    torch.testing.assert_close(state_NH @ weight_VH.T, of_the_model(target, state_NH), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert not {"logits_scaling", "logit_scale"} & config.keys()


CONSTANTS = Hydra(heads=4, own_heads=True, head_bias=True)


@pytest.mark.parametrize(
    "contract",
    [
        test_faces.test_training_forward_equals_decoding_step_by_step,
        test_faces.test_committing_in_pieces_equals_committing_at_once,
        test_faces.test_branches_of_a_tree_equal_chains_of_their_own,
        test_faces.test_rows_that_leave_and_come_back,
        test_faces.test_a_draft_sees_rows_before_its_anchor_only,
        test_faces.test_drafts_do_not_see_each_other,
        test_faces.test_the_weights_of_a_word_are_counted,
    ],
    ids=lambda contract: contract.__name__,
)
def test_heads_with_constants_hold_the_contracts_of_all_drafters(tiny_llama, contract):
    contract(tiny_llama, CONSTANTS)


@torch.no_grad()
def test_each_head_has_a_constant_of_its_own(tiny_llama, tmp_path):
    """One is changed at a time; and trimming, saving and exporting keep them."""
    net = test_faces.net_for(tiny_llama, CONSTANTS)
    base_11H, path_11K = torch.randn(1, 1, 32), torch.randint(0, 320, (1, 1, 4))

    def every(net):
        return torch.cat([net.logits(net.ask(k, base_11H, path_11K)[0], path_11K[0, :, 0]) for k in (1, 2, 3, 4)])

    before = every(net)
    net.head_bias.weight[7, 2] += 1.5
    wanted = before.clone()
    wanted[2, 7] += 1.5
    torch.testing.assert_close(every(net), wanted)
    ids = net.vocabulary.ids
    kept = ids[(ids % 3 == 0) | (ids == ids[7]) | torch.isin(ids, torch.tensor(tiny_llama.end_ids))]
    less = trim(net, tiny_llama, DraftVocabulary(kept, tiny_llama.vocab))
    torch.testing.assert_close(every(less), wanted[:, torch.isin(ids, kept)])
    save_drafter(tmp_path / "best", net, net.config, tiny_llama.identity, {})
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(dtype="float32"), None)
    for again in (load_drafter(tmp_path / "best", tiny_llama)[0], load_export(tmp_path / "export", tiny_llama)):
        assert torch.equal(every(again), every(net))


def test_constants_are_refused_beside_the_target_s_head():
    with pytest.raises(
        UserError, match="head_bias is true, but the heads are the target's, which is frozen; set own_heads to true"
    ):
        Hydra(head_bias=True)
