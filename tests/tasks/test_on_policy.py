"""On-policy training with the real engine: what must not change its numbers does not, and its rollouts are the target's own answers."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from on_policy_forms import DFLASH, EAGLE, FORMS, SMALL, Stop, build_easy_target, form_of, make_run
from safetensors.torch import load_file
from tiny_run import logged, start
from transformers import AutoModelForCausalLM

from drafttrain.decoding.engine import Engine, generate
from drafttrain.decoding.propose_chain import ChainProposer
from drafttrain.decoding.sampling import Sampling
from drafttrain.divergences import Confidence, ForwardKL, Selection
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.replay import pack_rollouts, replay_layout
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks import rollouts
from drafttrain.tasks.rollout_buffer import number_of
from drafttrain.tasks.rollouts import Replayer, Roller
from drafttrain.tasks.speed import make_score
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Features, Request, Rollout
from drafttrain.vocab import DraftVocabulary


@pytest.fixture(params=FORMS, ids=list(FORMS))
def form(request):
    return form_of(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_easy_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder):
    return load_target(TargetConfig(path=str(folder)), device="cpu")


def weights(run):
    return load_file(run / "checkpoints" / "last_drafter" / "drafter.safetensors")


def test_accumulations_equal_one_batch(tmp_path, target, folder, form):
    narrow, wide = (make_run(tmp_path / name, target) for name in ("narrow", "wide"))
    start(narrow, folder, trainer={"accumulate_grad_batches": 4}, **form)
    start(wide, folder, data={"rows": 4}, **form)
    for name in ("train/loss", "train/top1_depth_1", "rollout/tau", "rollout/staleness"):
        a, b = logged(narrow, name), logged(wide, name)
        assert a == pytest.approx(b, rel=1e-5), name
    assert all(torch.allclose(value, weights(wide)[name], rtol=1e-4, atol=1e-5) for name, value in weights(narrow).items())


@pytest.mark.parametrize("told_at", [0, 1, 2, 3])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, target, folder, form, told_at):
    """Stopped before, at and behind a refresh."""
    whole, broken = (make_run(tmp_path / name, target) for name in ("whole", "broken"))
    start(whole, folder, trainer={"max_steps": 6}, **form)
    start(broken, folder, trainer={"max_steps": 6, "callbacks": [Stop(told_at)]}, **form)
    assert len(logged(broken)) < 6
    start(broken, folder, trainer={"max_steps": 6}, **form)
    assert logged(broken) == logged(whole)
    assert all(torch.equal(value, weights(broken)[name]) for name, value in weights(whole).items())


def test_steps_whose_sizes_differ_are_not_compiled(tmp_path, target, folder, monkeypatch, form):
    def compiled(*_args, **_options):
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", compiled)
    start(make_run(tmp_path / "run", target), folder, speed={"compile": True}, **form)


def test_a_random_drafter_is_refused(tmp_path, target, folder):
    run = make_run(tmp_path / "run", target)
    with pytest.raises(UserError, match=r"checkpoint\.start is null.*on_policy\.from_random"):
        start(run, folder, on_policy=SMALL | {"from_random": False})


class Spy(pl.Callback):
    """What a run rolled and learnt, seen from outside: the step at which each rollout was made, and the numbers that each step learnt from.

    Behind each refresh, the copy that rolled holds the trained weights and shares none of them, and neither those nor the random stream were
    touched. `beside` is called there too.
    """

    def __init__(self, monkeypatch, beside: Callable[[Roller, list[Request], list[Rollout]], None] = lambda *_: None):
        self.made_at: dict[int, int] = {}
        self.learnt: dict[int, list[int]] = {}
        answer, window, micro = Roller.answer, Replayer.window, Replayer._micro

        def spied_answer(roller, prompts):
            net, before = self.task.net, [weight.clone() for weight in self.task.net.parameters()]
            rollouts = answer(roller, prompts)
            for (name, weight), copy_of, kept in zip(net.named_parameters(), roller.copy.parameters(), before, strict=True):
                assert torch.equal(weight, copy_of) and torch.equal(weight, kept), name
                assert weight.data_ptr() != copy_of.data_ptr() and weight.requires_grad and not copy_of.requires_grad
            assert net.training and not roller.copy.training
            self.made_at |= {number_of(r): self.task.position.step for r in rollouts}
            beside(roller, prompts, rollouts)
            return rollouts

        def spied_window(replayer, step):
            assert torch.equal(torch.get_rng_state(), self._stream)
            return window(replayer, step)

        def spied_micro(replayer, step, micro_batch, numbers):
            self.learnt.setdefault(step, []).extend(numbers)
            return micro(replayer, step, micro_batch, numbers)

        monkeypatch.setattr(Roller, "answer", spied_answer)
        monkeypatch.setattr(Replayer, "window", spied_window)
        monkeypatch.setattr(Replayer, "_micro", spied_micro)

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.task, self._stream = task, torch.get_rng_state()

    @property
    def kept(self) -> dict[int, Rollout]:
        buffer = self.task._replayer.buffer
        return {number: buffer[number] for number in buffer}


def watch(run, folder, spy, form, **on_policy) -> None:
    """Eight steps and four refreshes; the buffer holds the last two."""
    form = form | {"on_policy": form["on_policy"] | on_policy}
    start(run, folder, trainer={"max_steps": 8, "callbacks": [spy] if spy else []}, **form)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rollouts_are_what_the_target_says_without_a_drafter(tmp_path, target, folder, monkeypatch, form, temperature):
    """Made with other weights each time; the greedy ones are also the argmax of one pass over the whole text."""
    spy, stock = Spy(monkeypatch), AutoModelForCausalLM.from_pretrained(folder)
    watch(make_run(tmp_path / "run", target), folder, spy, form, temperature=temperature)
    assert len(spy.kept) == SMALL["buffer"] and {spy.made_at[number] for number in spy.kept} == {4, 6}
    asked = [Request(r.key, tuple(r.ids[: r.prompt_len].tolist()), SMALL["max_tokens"]) for r in spy.kept.values()]
    plain = {number_of(r): r for r in generate(target, asked, sampling=Sampling(temperature=temperature, seed=7), slots=1)}
    for number, rollout in spy.kept.items():
        assert torch.equal(rollout.ids, plain[number].ids) and rollout.stopped == plain[number].stopped
        ends = [token in target.end_ids for token in rollout.answer.tolist()]
        assert not any(ends[:-1]) and (ends[-1] or len(ends) == SMALL["max_tokens"])
        if not temperature:
            with torch.no_grad():
                said_T = stock(rollout.ids[None]).logits[0].argmax(-1)
            assert torch.equal(said_T[rollout.prompt_len - 1 : -1], rollout.answer)


def test_staleness_is_the_age_of_what_was_learnt(tmp_path, target, folder, monkeypatch, form):
    spy, run = Spy(monkeypatch), make_run(tmp_path / "run", target)
    watch(run, folder, spy, form)
    ages = {step + 1: [step - spy.made_at[number] for number in numbers] for step, numbers in spy.learnt.items()}
    assert all(len(of_step) == SMALL["batch"] for of_step in ages.values())
    assert logged(run, "rollout/staleness") == pytest.approx({step: sum(a) / len(a) for step, a in ages.items()})


def test_an_engine_that_saw_no_other_weights_drafts_the_same(tmp_path, target, folder, monkeypatch, form):
    """Nothing that the roller keeps from refresh to refresh is of older weights."""
    compared = []

    def compare(roller, prompts, rollouts):
        fresh = another_engine(target, roller, Sampling(seed=7), keep_rounds=True)
        others = {r.key: r for r in fresh.generate(prompts)}
        for r in rollouts:
            assert r.accepted == others[r.key].accepted
            if r.rounds is not None:
                assert torch.equal(r.rounds.drafted_RK, others[r.key].rounds.drafted_RK)
                assert torch.allclose(r.rounds.final_RPD, others[r.key].rounds.final_RPD, atol=1e-5)
        compared.append(sum(map(sum, (r.accepted for r in rollouts))))

    watch(make_run(tmp_path / "run", target), folder, Spy(monkeypatch, compare), form)
    assert len(compared) == 4 and compared[-1] > 0


def another_engine(target, roller, sampling, **options) -> Engine:
    proposer = ChainProposer(copy.deepcopy(roller.copy), roller.drafts)
    return Engine(target, proposer=proposer, sampling=sampling, keep_features=True, taps=proposer.taps, **options)


def test_rolling_leaves_no_trace_but_its_rollouts(tmp_path, target, folder, monkeypatch):
    """A run that beside every refresh answers the prompts once more, three times as long, drawing as it likes, and throws the answers away,
    learns the same, with the noise that training adds."""
    noisy = {"drafter": Eagle(depth=2, noise=0.5), "on_policy": SMALL | {"replay": "text"}}
    quiet, busy = (make_run(tmp_path / name, target) for name in ("quiet", "busy"))
    watch(quiet, folder, None, noisy)

    def more(roller, prompts, rollouts):
        torch.rand(3)
        engine = another_engine(target, roller, Sampling(temperature=1.0))
        list(engine.generate([replace(prompt, limit=3 * prompt.limit) for prompt in prompts]))

    watch(busy, folder, Spy(monkeypatch, more), noisy)
    assert logged(busy) == logged(quiet)
    assert all(torch.equal(value, weights(busy)[name]) for name, value in weights(quiet).items())


def test_what_does_not_fit_a_row_is_cut(tmp_path, target, folder, monkeypatch, form):
    """Prompts of up to 17 tokens and answers of 12 in rows of 10: prompts that leave no room for a draft are not answered, and some answers are cut."""
    spy, run = Spy(monkeypatch), make_run(tmp_path / "run", target)
    start(run, folder, trainer={"callbacks": [spy]}, data={"length": 10}, **form)
    learnt = [spy.kept[number] for number in {n for numbers in spy.learnt.values() for n in numbers} & spy.kept.keys()]
    assert max(r.prompt_len for r in spy.kept.values()) <= 8 and any(len(r.ids) > 10 for r in learnt)
    assert all(math.isfinite(loss) and loss > 0 for loss in logged(run).values())


def test_a_step_without_a_rejection_is_not_the_end(tmp_path, target, folder, monkeypatch):
    """A drafter that got good: one step's rounds teach nothing, and the run goes on."""
    steps, run = [], make_run(tmp_path / "run", target)

    def none_once(*arguments, **options):
        steps.append(options["streams"])
        return replay_layout(*arguments, **options | ({"streams": (False, False)} if len(steps) == 2 else {}))

    monkeypatch.setattr(rollouts, "replay_layout", none_once)
    start(run, folder, **form_of("eagle3, first rejection"))
    losses = logged(run)
    assert losses[2] == 0 and all(losses[step] > 0 for step in (1, 3, 4)) and steps == [(True, False)] * 4


def test_first_rejections_alone_are_learnt_whatever_the_objective(tmp_path, target, folder):
    one, both = (make_run(tmp_path / name, target) for name in ("one", "both"))
    form = form_of("eagle3, first rejection") | {"objective": OnPolicyDistillation()}
    start(both, folder, **form)
    assert not any(logged(both, "train/loss_rejected_depth_2").values())
    with pytest.raises(UserError, match=r"accepted_weight is 0; raise it, or set replay to rounds\.$"):
        start(one, folder, **form | {"objective": OnPolicyDistillation(accepted_weight=0.0)})


def test_a_refresh_behind_the_last_step_is_refused(tmp_path, target, folder):
    form = form_of("eagle3, rounds")
    with pytest.raises(UserError, match=r"^on_policy\.every is 1000000, but the run ends after 4 steps"):
        start(make_run(tmp_path / "run", target), folder, **form | {"on_policy": form["on_policy"] | {"every": 1_000_000}})


NOTHING = r"^Steps 1 to 2 had nothing to learn from: the last one's 4 rollouts .* raise data\.length.* or on_policy\.batch\.$"
NO_PROMPT = r"has no prompt that leaves room .* within a row of 5; lower on_policy\.max_tokens, or raise data\.length\.$"


@pytest.mark.parametrize(("length", "draft_vocab", "wanted"), [(5, 200, NO_PROMPT), (60, 2, NOTHING)])
def test_a_step_with_nothing_to_learn_from_says_so(tmp_path, target, folder, length, draft_vocab, wanted):
    """Every prompt fills a row; or what the target says in place of a draft is never of the draft vocabulary."""
    run, form = make_run(tmp_path / "run", target, shortest_prompt=5), form_of("eagle3, first rejection")
    form["drafter"] = replace(form["drafter"], draft_vocab=draft_vocab)
    with pytest.raises(UserError, match=wanted):
        start(run, folder, data={"length": length}, **form)


KINDS = {
    "eagle": (Eagle(depth=2), []),
    "eagle3": (EAGLE, []),
    "p-eagle": (PEagle(taps=[1], depth=2, layers=1, mask_token=319), []),
    "medusa": (Medusa(heads=2), []),
    "hydra": (Hydra(heads=2, prefix=True), []),
    "dflash": (DFLASH, []),
    "dspark": (DSpark(block=3, layers=1, taps=[1], mask_token=319, rank=4), [Confidence()]),
    "dflash2": (DFlash2(block=4, layers=1, taps=[1], mask_token=319), [Selection()]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "text"])
def test_a_micro_batch_without_a_rollout_gives_every_weight_a_gradient_of_0(target, kind, rounds):
    """A weight without one would be waited for in vain by the other ranks."""
    drafter, own = KINDS[kind]
    net = drafter.build(target, DraftVocabulary.full(target.vocab)).train()
    objective = OnPolicyDistillation(accepted=[ForwardKL(), *own]) if rounds else Distillation([ForwardKL(), *own])
    like = Features(torch.zeros(0, 0, len(net.needs.taps), target.hidden), torch.zeros(0, 0, target.hidden))
    packed = pack_rollouts([], 48, like=like)
    layout = replay_layout(packed, [], net.needs.depth, net.speaks_V) if rounds else net.layout(packed.sequences, numbers=[(7,)])
    score = make_score(net, objective, TargetTeacher(target, net), net.needs.depth, compile=False)
    terms, _ = score(packed.sequences, packed.features, layout)
    torch.stack([term.sum for term in terms.values()]).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in net.parameters())
