"""Adapters beside a trained drafter: what is merged is what was trained, by our sum and by peft's own code; a stopped run goes on as if nothing had
been; what cannot teach, or is lost, is refused."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from drafters.test_faces import DRAFTERS, drafted_of, net_for
from on_policy_forms import SMALL
from safetensors.torch import load_file
from tasks.test_compiled_drafters import objective_for, step
from tasks.test_speed import packed
from tasks.test_train import Tell, weights
from tiny import build_target_folder
from tiny_run import logged, make_run, start
from torch._dynamo.utils import counters

from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.errors import UserError
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.checkpoints import find_last
from drafttrain.tasks.distill import unreached
from drafttrain.tasks.lora import ADAPTER, BASE, begin, insert, matrices
from drafttrain.tasks.lora_config import LoraConfig
from drafttrain.tasks.optimizer import OptimizerConfig, make_optimizer, token_sides
from drafttrain.tasks.rollouts import Roller
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.teacher import TargetTeacher

peft = pytest.importorskip("peft")
CONFIG = LoraConfig(rank=3, alpha=7.0)
EAGLE3 = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=200)
SOME = ("eagle3", "hydra++", "dflash")


def adapted(target, name, folder, config=CONFIG):
    """A drafter with adapters as if they had been trained: random, B too."""
    net = net_for(target, DRAFTERS[name])
    begin(net, config, DRAFTERS[name], target.identity, 0, folder, resumed=False, rank=0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trained(net).values():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=g))
    return net.eval()


def trained(net):
    return {name: weight for name, weight in net.named_parameters() if weight.requires_grad}


def logits_of(net, target):
    drafted = drafted_of(net, target, packed(0), min(4, net.needs.depth))[2]
    return net.logits(drafted.hidden_NH, drafted.prev_N).detach()


# ---- one net -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_merged_it_says_what_it_said_with_adapters_and_peft_says_the_same(tiny_llama, tmp_path, name):
    net = adapted(tiny_llama, name, tmp_path)
    whole = net.adapters.whole(trained(net))
    save_drafter(
        tmp_path / "merged",
        net,
        DRAFTERS[name],
        tiny_llama.identity,
        {},
        whole,
        lambda f: net.adapters.save(f / ADAPTER, trained(net)),
    )
    merged = load_drafter(tmp_path / "merged", tiny_llama)[0]
    fresh = load_drafter(tmp_path / BASE, tiny_llama)[0]
    before, wanted, ours = (logits_of(each, tiny_llama) for each in (fresh, net, merged))
    theirs = peft.PeftModel.from_pretrained(fresh, tmp_path / "merged" / ADAPTER).eval()  # puts them into `fresh`
    size = wanted.abs().max()
    assert (wanted - before).abs().max() > 0.05 * size
    assert (ours - wanted).abs().max() <= 1e-5 * size
    assert (logits_of(fresh, tiny_llama) - wanted).abs().max() <= 1e-5 * size
    for key, weight in theirs.merge_and_unload().named_parameters():
        torch.testing.assert_close(weight, merged.get_parameter(key), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DRAFTERS)
def test_adapters_stand_beside_every_matrix_but_tables_of_tokens_and_are_taught(tiny_llama, name):
    net = net_for(tiny_llama, DRAFTERS[name])
    before = dict(net.named_parameters())
    matrices_of = {
        key.removesuffix(".weight") for key, w in before.items() if w.ndim == 2 and not set(w.shape) & token_sides(net)
    }
    insert(net, CONFIG)
    assert {key.partition(".lora_")[0] for key in trained(net)} == matrices_of
    assert len(trained(net)) == 2 * len(matrices_of) and all(key.endswith(".default.weight") for key in trained(net))
    assert unreached(tiny_llama, net, objective_for(DRAFTERS[name])) == []


def test_fresh_adapters_change_nothing_and_the_seed_draws_them(tiny_llama, tmp_path):
    plain = net_for(tiny_llama, EAGLE3)
    first, again, other = (net_for(tiny_llama, EAGLE3) for _ in range(3))
    for net, seed in ((first, 5), (again, 5), (other, 6)):
        begin(net, CONFIG, EAGLE3, tiny_llama.identity, seed, tmp_path, resumed=False, rank=0)
    assert torch.equal(logits_of(first, tiny_llama), logits_of(plain, tiny_llama))
    assert all(torch.equal(value, trained(again)[name]) for name, value in trained(first).items())
    assert not all(torch.equal(value, trained(other)[name]) for name, value in trained(first).items())


def test_ends_of_names_choose_matrices_by_whole_parts(tiny_llama):
    net = net_for(tiny_llama, DRAFTERS["eagle3"])
    attention = [f"midlayer.self_attn.{name}_proj" for name in "qkvo"]
    assert matrices(net, ["self_attn.q_proj", "fc"], ()) == ["fc", attention[0]]
    assert matrices(net, ["q_proj", "k_proj", "v_proj", "o_proj"], ()) == attention
    assert matrices(net, ["lm_head"], token_sides(net)) == ["lm_head"]  # a table that is asked for
    with pytest.raises(
        UserError, match=r"lora.layers names proj, roj, but no matrix of this drafter is called so; it has fc, midlayer"
    ):
        matrices(net, ["fc", "proj", "roj"], ())
    insert(net, replace(CONFIG, layers=["q_proj"]))
    assert {name.partition(".lora_")[0] for name in trained(net)} == {attention[0]}


def test_only_adapters_are_stepped(tiny_llama):
    net = net_for(tiny_llama, EAGLE3)
    insert(net, CONFIG)
    optimizer = make_optimizer(OptimizerConfig(muon_lr=1e-2), net, False, token_sides(net))
    stepped = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(stepped) == sorted(id(weight) for weight in trained(net).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_a_compiled_step_gives_the_same_loss_and_gradients_and_is_compiled_once(tiny_llama, tmp_path, name):
    net = adapted(tiny_llama, name, tmp_path).eval()  # without dropout
    objective, teacher, depth = objective_for(DRAFTERS[name]), TargetTeacher(tiny_llama, net), net.needs.depth
    plain, compiled = (make_score(net, objective, teacher, depth, compile=flag) for flag in (False, True))
    counters.clear()
    torch._dynamo.reset()
    for seed in range(3):
        wanted, found = (step(net, score, tiny_llama, seed, depth) for score in (plain, compiled))
        assert wanted.keys() == found.keys() and any("lora_A" in key for key in wanted)
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert not counters["graph_break"], counters["graph_break"]


# ---- a run -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(target_folders):
    return target_folders("llama")


@pytest.fixture(scope="module")
def began(tmp_path_factory, tiny_llama, llama):
    """checkpoints/best of a run."""
    return start(make_run(tmp_path_factory.mktemp("began"), tiny_llama), llama)


def again(folder, target, llama, began, **changes):
    """A run with adapters of that drafter. Returns its folder."""
    run = folder if (folder / "data").exists() else make_run(folder, target)
    checkpoint = {"start": str(began)} | changes.pop("checkpoint", {})
    start(run, llama, **{"lora": {"rank": 3}, "optimizer": {"lr": 1e-2, "warmup_steps": 0}, **changes, "checkpoint": checkpoint})
    return run


def adapters(run, name="last_drafter"):
    return load_file(run / "checkpoints" / name / ADAPTER / "adapter_model.safetensors")


def summed(run, config, name="last_drafter"):
    """The merged weights by hand: lora_base + alpha / rank B A."""
    found, parts = load_file(run / "checkpoints" / BASE / "drafter.safetensors"), adapters(run, name)
    for key in [key for key in parts if "lora_B" in key]:
        matrix = key.removeprefix("base_model.model.").replace(".lora_B", "")
        found[matrix] = found[matrix] + config.alpha / config.rank * parts[key] @ parts[key.replace("lora_B", "lora_A")]
    return found


def test_a_run_saves_merged_drafters_with_their_adapters_apart(tmp_path, tiny_llama, llama, began):
    run = again(tmp_path, tiny_llama, llama, began, checkpoint={"tau_prompts": 3, "tau_tokens": 8, "tau_every": 2})
    base = load_file(run / "checkpoints" / BASE / "drafter.safetensors")
    first = load_file(began / "drafter.safetensors")
    assert base.keys() == first.keys() and all(torch.equal(value, first[name]) for name, value in base.items())
    for name in ("best", "last_drafter"):
        found, wanted = weights(run, name), summed(run, LoraConfig(rank=3), name)
        assert found.keys() == wanted.keys() == base.keys()
        assert all(torch.allclose(value, wanted[key], rtol=0, atol=1e-6) for key, value in found.items())
    moved = {name for name, value in weights(run).items() if not torch.equal(value, base[name])}
    assert moved == {name for name in base if "norm" not in name and name not in ("d2t", "lm_head.weight")}
    state = torch.load(find_last(run / "checkpoints").state, weights_only=True)["state_dict"]
    assert all(".lora_" in name for name in state) and len(state) == len(adapters(run)) == 2 * len(moved)


CASES = {
    "eagle3": (EAGLE3, None),
    "eagle3 muon": (EAGLE3, 1e-2),
    "dflash": (DFlash(block=4, layers=1, taps=[0, 2], mask_token=312), None),  # a token that no chat here holds
    "hydra": (Hydra(heads=2), None),
    "medusa": (Medusa(heads=2), None),
}


@pytest.mark.parametrize(("drafter", "muon_lr"), CASES.values(), ids=CASES)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, tiny_llama, llama, drafter, muon_lr, capsys):
    trainer = {"max_steps": 5, "accumulate_grad_batches": 2}
    first = start(make_run(tmp_path / "first", tiny_llama), llama, drafter=drafter, trainer={"max_steps": 1})
    rest = dict(drafter=drafter, lora={"rank": 3, "dropout": 0.2}, optimizer={"lr": 1e-2, "muon_lr": muon_lr})
    whole = again(tmp_path / "whole", tiny_llama, llama, first, trainer=trainer, **rest)
    told = trainer | {"callbacks": [Tell(micro_batch=3)]}
    broken = again(tmp_path / "broken", tiny_llama, llama, first, trainer=told, **rest)
    assert find_last(broken / "checkpoints").position.step == 3
    shutil.rmtree(tmp_path / "first")  # a run that goes on does not read it again
    capsys.readouterr()
    again(broken, tiny_llama, llama, first, trainer=trainer, **rest)
    assert logged(broken) == logged(whole)
    assert all(torch.equal(value, weights(broken)[name]) for name, value in weights(whole).items())
    assert all(torch.equal(value, adapters(broken)[name]) for name, value in adapters(whole).items())
    said, size = capsys.readouterr().out, sum(value.numel() for value in adapters(whole).values())
    assert f"parameters: {size:,} trained, " in said and (muon_lr is None or f"Muon trains {size:,} of {size:,} weights" in said)


def test_dropout_is_of_training_alone(tmp_path, tiny_llama, llama, began):
    with_it, without = (
        again(tmp_path / str(share), tiny_llama, llama, began, lora={"rank": 3, "dropout": share}) for share in (0.5, 0.0)
    )
    assert logged(with_it)[1] == logged(without)[1]  # B is zero
    assert logged(with_it)[4] != logged(without)[4]


def test_another_target_of_the_same_shape_is_followed(tmp_path, began, capsys):
    """A target that was tuned: other weights, the same sizes and tokens."""
    folder = build_target_folder("llama", tmp_path / "tuned", seed=1)
    tuned = load_target(TargetConfig(path=str(folder)), device="cpu")
    assert tuned.identity.revision not in json.loads((began / "drafter.json").read_text())["identity"].values()
    run = again(tmp_path / "run", tuned, folder, began, trainer={"max_steps": 12}, data={"rows": 4})
    assert "note: it was trained with another target (the revision of the target's weights" in capsys.readouterr().out
    assert logged(run)[12] < logged(run)[1]
    net, record = load_drafter(run / "checkpoints" / "best", tuned)
    assert record["identity"]["revision"] == tuned.identity.revision
    fresh = load_drafter(run / "checkpoints" / BASE, tuned)[0]
    peft.PeftModel.from_pretrained(fresh, run / "checkpoints" / "best" / ADAPTER).eval()
    torch.testing.assert_close(logits_of(fresh, tuned), logits_of(net, tuned), rtol=1e-5, atol=1e-5)


def test_rollouts_are_made_with_merged_weights(tmp_path, tiny_llama, llama, began, monkeypatch):
    taken, take = [], Roller.take
    monkeypatch.setattr(
        Roller, "take", lambda self, found: (taken.append({k: v.clone() for k, v in found.items()}), take(self, found))
    )
    trainer = {"max_steps": 4, "accumulate_grad_batches": 2}
    run = again(tmp_path, tiny_llama, llama, began, trainer=trainer, on_policy=SMALL, objective=OnPolicyDistillation())
    base = load_file(run / "checkpoints" / BASE / "drafter.safetensors")
    assert len(taken) > 1 and all(found.keys() == base.keys() - {"d2t"} for found in taken)
    assert all(torch.equal(value, base[name]) for name, value in taken[0].items())  # B is zero
    assert not torch.equal(taken[-1]["fc.weight"], base["fc.weight"])


# ---- what is refused ---------------------------------------------------------------------------------------------------------


def test_without_a_drafter_to_begin_from_it_is_refused(tmp_path, tiny_llama, llama):
    run = make_run(tmp_path, tiny_llama)
    with pytest.raises(
        UserError, match=r"lora.rank is 3, but checkpoint.start is null, and adapters of random weights teach nothing"
    ):
        start(run, llama, lora={"rank": 3})
    assert not (run / "checkpoints").exists()


def test_without_peft_it_is_refused(tiny_llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        UserError, match=r"lora.rank is 3, but the library peft.* is not installed; run `pip install -e .*peft.*`"
    ):
        insert(net_for(tiny_llama, EAGLE3), CONFIG)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [({"rank": 4}, "lora.rank: 3 before, 4 now"), ({}, "lora: .* before, None now"), ({"rank": 3, "alpha": 1.0}, "lora.alpha: 16.0 before, 1.0 now")],
)  # fmt: skip
def test_other_adapters_are_not_resumed(tmp_path, tiny_llama, llama, began, lora, sentence):
    run = again(tmp_path, tiny_llama, llama, began, trainer={"max_steps": 1})
    with pytest.raises(UserError, match=sentence):
        again(run, tiny_llama, llama, began, lora=lora)


def test_a_run_that_lost_its_base_says_so(tmp_path, tiny_llama, llama, began):
    run = again(tmp_path, tiny_llama, llama, began, trainer={"max_steps": 1}, optimizer={"schedule": "constant"})
    (run / "checkpoints" / BASE / "drafter.safetensors").write_bytes(b"broken")
    with pytest.raises(
        UserError, match=r"lora_base/drafter.safetensors, which holds the drafter that this run adapts, cannot be read"
    ):
        again(run, tiny_llama, llama, began, optimizer={"schedule": "constant"})


@pytest.mark.parametrize(
    "values", [{"rank": 0}, {"rank": 2, "alpha": 0.0}, {"alpha": float("inf")}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_numbers_that_mean_nothing_are_refused(values):
    with pytest.raises(UserError, match=rf"lora\.{list(values)[-1]} is "):
        LoraConfig(**values)
