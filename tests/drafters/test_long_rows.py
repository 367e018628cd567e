"""What long rows need, against the plain way: attention that holds no scores, and layers or steps computed again in the backward pass."""

from dataclasses import replace

import pytest
import torch
from drafters.test_dflash import wide_heads
from drafters.test_faces import DRAFTERS, net_for
from tasks.test_speed import packed
from tiny_run import logged, make_run, start

from drafttrain.divergences import SoftCrossEntropy
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.layouts import chain_layout
from drafttrain.losses import Distillation
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.vocab import DraftVocabulary

READ_TEXT = [name for name in DRAFTERS if name.startswith(("eagle", "hass", "p-eagle", "independent"))]
IN_PIECES = [*READ_TEXT, *(name for name in DRAFTERS if name.startswith(("dflash", "dspark")))]


@pytest.mark.parametrize("name", READ_TEXT)
def test_rows_without_scores_are_the_dense_rows(tiny_llama, name):
    net, sequences = net_for(tiny_llama, DRAFTERS[name]), packed(3, length=160)
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    layout = net.layout(sequences, numbers=[(0, 0), (0, 1)])
    with torch.no_grad():
        wanted = net.rows(sequences, features, layout).hidden_NH
        net.fused_rows = True
        torch.testing.assert_close(net.rows(sequences, features, layout).hidden_NH, wanted, atol=1e-5, rtol=1e-4)


def test_a_target_reads_the_same_without_scores(any_target):
    """Of all kinds of targets, with windows and without."""
    sequences = packed(4, length=150)
    wanted = any_target.read_packed(sequences, (0, 2))
    any_target.fused_rows = True
    try:
        found = any_target.read_packed(sequences, (0, 2))
    finally:
        any_target.fused_rows = False
    read = sequences.document_BT >= 0
    for name in ("taps_BTAD", "final_BTD"):
        torch.testing.assert_close(getattr(found, name)[read], getattr(wanted, name)[read], atol=1e-4, rtol=1e-4)


def gradients(net, target, sequences, features, compile=False):
    score = make_score(net, Distillation([SoftCrossEntropy()]), TargetTeacher(target, net), net.needs.depth, compile)
    layout = chain_layout(sequences, net.needs.depth, net.speaks_V)
    if hasattr(net, "widths"):
        layout = net.layout(sequences, numbers=[(0, 0), (0, 1)])
    net.zero_grad()
    torch.manual_seed(7)  # HASS reads its states with noise
    terms, _ = score(sequences.to(target.device), features, layout.to(target.device))
    loss = torch.stack([term.sum / term.count for term in terms.values()]).sum()
    loss.backward()
    return {"loss": loss.detach()} | {name: w.grad.clone() for name, w in net.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("name", IN_PIECES)
def test_what_is_computed_again_gives_the_same_gradients_to_the_bit_and_keeps_less(tiny_llama, name):
    net, sequences = net_for(tiny_llama, DRAFTERS[name]), packed(5)
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    kept = []
    for recomputes in (False, True):
        net.recomputes, held = recomputes, {}

        def pack(x, held=held):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found = gradients(net, tiny_llama, sequences, features)
        kept.append((found, sum(held.values())))
    (wanted, all_bytes), (found, fewer) = kept
    assert wanted.keys() == found.keys() and len(wanted) > 5
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
    assert fewer < 0.9 * all_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "eagle3 window", "dflash", "p-eagle"])
def test_compiled_steps_compute_again_as_well(tiny_llama, name):
    net, sequences = net_for(tiny_llama, DRAFTERS[name]), packed(5)
    features = tiny_llama.read_packed(sequences, net.needs.taps)
    wanted = gradients(net, tiny_llama, sequences, features)
    net.recomputes = True
    torch._dynamo.reset()
    found = gradients(net, tiny_llama, sequences, features, compile=True)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_a_training_that_computes_again_logs_the_same_losses(tmp_path, tiny_llama, target_folders):
    runs = {flag: make_run(tmp_path / str(flag), tiny_llama) for flag in (False, True)}
    trainer = {"max_steps": 3, "precision": "bf16-mixed"}
    for flag, run in runs.items():
        start(run, target_folders("llama"), trainer=trainer, speed={"checkpoint_activations": flag, "fused_rows": flag})
    assert logged(runs[True]) == logged(runs[False])


def test_a_window_of_nothing_is_refused():
    """Nor one that no engine could hold, nor what a config.json may have in its place."""
    for window in (0, 1 << 31, True, "5"):
        with pytest.raises(
            UserError, match=f"drafter.init_args.window is {window!r}, but must be a number from 1 to 2,147,483,647, or null"
        ):
            Eagle3(window=window)
        with pytest.raises(UserError, match="drafter.init_args.window is"):
            DFlash(window=window)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3 window", "eagle3 window shorter than a draft", "hass", "p-eagle", "independent"]
)
@pytest.mark.parametrize("compile", [False, True])
def test_gradients_of_rows_without_scores_on_a_gpu(tmp_path, name, compile):
    """The kernel's gradients, its logarithm's among them, have no other oracle. Differences by the norm of each weight's gradient."""
    target = load_target(TargetConfig(path=str(wide_heads(tmp_path)), dtype="float32"), device="cuda")
    config = DRAFTERS[name]
    config = replace(config, head_dim=16) if hasattr(config, "head_dim") else config
    config = (
        replace(config, noise=0.0) if hasattr(config, "noise") else config
    )  # a compiled step draws other numbers of the same seed
    torch.manual_seed(0)
    net, sequences = config.build(target, DraftVocabulary(torch.arange(0, 320, 2), target.vocab)), packed(5, length=300)
    net.speaks_V = net.vocabulary.t2d  # layouts are made on the CPU
    found = []
    for fused in (False, True):
        torch._dynamo.reset()
        target.fused_rows = net.fused_rows = fused
        features = target.read_packed(sequences.to("cuda"), net.needs.taps)
        found.append({"features": features.final_BTD[sequences.document_BT.cuda() >= 0]})
        found[-1] |= gradients(net, target, sequences, features, compile=fused and compile)
    dense, kernel = found
    for key, value in dense.items():
        assert float((kernel[key] - value).norm()) <= 2e-3 * float(value.norm()), key
