"""A drafter that learns while it serves: what it answers, what it learns from, what guards it, and where it goes on."""

import csv
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from two_domains import A, B, build_two_domains, next_token, prompts_of

from drafttrain.decoding.engine import generate
from drafttrain.decoding.quick import held_out_tau
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.replay import pack_rollouts
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.adapt import Adapter
from drafttrain.tasks.adapt_config import AdaptConfig
from drafttrain.tasks.adapt_files import AdaptFiles
from drafttrain.tasks.adapt_learner import AdaptSections, Learnt
from drafttrain.tasks.optimizer import OptimizerConfig
from drafttrain.tasks.stop import StopSignal
from drafttrain.tasks.teacher import TargetTeacher
from drafttrain.types import Request
from drafttrain.vocab import DraftVocabulary

EAGLE = Eagle3(taps=[0, 2, 3], depth=3)
DFLASH = DFlash(block=4, layers=2, taps=[0, 2], mask_token=319, anchors=None)
SMALL = {"every": 4, "slots": 4, "max_tokens": 12, "hold_out_every": 4, "guard_every": 100, "guard_prompts": 8}


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    return load_target(TargetConfig(path=str(build_two_domains(tmp_path_factory.mktemp("domains")))), device="cpu")


class Listed:
    """Prompts that are there from the beginning; a stop may be wanted behind the last one."""

    def __init__(self, prompts, stop=None):
        self.prompts, self.stop = list(prompts), stop

    def take(self, most):
        found, self.prompts = self.prompts[:most], self.prompts[most:]
        if not found and self.stop is not None:
            self.stop.requested = True
        return found


def sections(lr=1e-2, objective=None, clip=None, **adapt):
    optimizer = OptimizerConfig(lr=lr, warmup_steps=2, schedule="constant")
    return AdaptSections(AdaptConfig(**SMALL | adapt), objective or Distillation(), optimizer, length=64, seed=5, clip=clip)


def adapter(target, folder, drafter=EAGLE, said=None, **changes):
    """One over the files of a folder, from the same fresh drafter each time."""
    torch.manual_seed(1)
    net = drafter.build(target, DraftVocabulary.full(target.vocab))
    files = AdaptFiles(folder / "checkpoints", folder / "logs", {"optimizer.betas": [0.9, 0.95]})
    return Adapter(target, net, sections(**changes), files, StopSignal(), (said if said is not None else []).append)


def serve(adapter, prompts, stop=False):
    answers = []
    adapter.serve(Listed(prompts, adapter.stop if stop else None), answers.append)
    return answers


def random_prompts(target, count, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=g).tolist()
    return [Request(f"p{i}", tuple(torch.randint(3, 319, (n,), generator=g).tolist()), 12) for i, n in enumerate(lengths)]


def same(a, b):
    """Whether two states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Learnt):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def rows_of(adapter):
    with adapter.log.path.open() as file:
        return list(csv.DictReader(file))


# ---- answers ---------------------------------------------------------------------------------------------------------------


FORMS = {
    "eagle3, first rejection": (EAGLE, {}),
    "eagle3, two steps, clipped": (EAGLE, {"steps": 2, "clip": 0.5}),
    "dflash, rounds": (DFLASH, {"replay": "rounds", "objective": OnPolicyDistillation()}),
    "eagle3, text, of a buffer": (EAGLE, {"replay": "text", "steps": 3, "buffer": 8}),
    "dflash, anchors": (DFLASH, {"replay": "anchors"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_plain_decodings_while_it_learns(tiny_llama, tmp_path, form):
    drafter, changes = FORMS[form]
    prompts = random_prompts(tiny_llama, 21)
    adapting = adapter(tiny_llama, tmp_path, drafter, guard_every=2, **changes)
    before = adapting.learner.learnt()
    answers = serve(adapting, prompts)
    plain = {rollout.key: rollout.answer.tolist() for rollout in generate(tiny_llama, prompts)}
    assert [(answer.id, answer.tokens) for answer in answers] == [(prompt.key, plain[prompt.key]) for prompt in prompts]
    assert [answer.text for answer in answers] == [
        tiny_llama.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers
    ]
    # of 21 prompts the 4th, 8th, ... are held out, and four of the others make an update: behind the 5th, 10th, 15th and 21st
    assert [answer.update for answer in answers] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 6
    assert adapting.progress.updates == 4 and adapting.learner.steps == 4 * changes.get("steps", 1)
    assert not same(adapting.learner.learnt().weights, before.weights)


def test_slots_change_no_answer(tiny_llama, tmp_path):
    prompts = random_prompts(tiny_llama, 12)
    one, four = (serve(adapter(tiny_llama, tmp_path / str(slots), slots=slots), prompts) for slots in (1, 4))
    assert [answer.tokens for answer in one] == [answer.tokens for answer in four]


def test_what_drafts_is_what_has_learnt(domains, tmp_path):
    """The copy that serves has the learner's weights, in the target's type."""
    adapting = adapter(domains, tmp_path)
    serve(adapting, prompts_of(A, 12, seed=0))
    served = dict(adapting.roller.copy.named_parameters())
    assert adapting.progress.updates and all(torch.equal(w, served[n]) for n, w in adapting.learner.net.named_parameters())


# ---- learning --------------------------------------------------------------------------------------------------------------


def test_it_follows_a_stream_that_changes_domain(domains, tmp_path):
    """Trained on domain A alone it drafts nothing of B that is kept; behind prompts of B it does, and its guard has let it."""
    adapting = adapter(domains, tmp_path, guard_every=8)
    tests = {first: prompts_of(first, 12, seed=99) for first in (A, B)}
    serve(adapting, prompts_of(A, 240, seed=0))
    frozen = {first: held_out_tau(domains, adapting.learner.net, tests[first], 3).tau for first in (A, B)}
    answers = serve(adapting, prompts_of(B, 240, seed=1))
    tau = held_out_tau(domains, adapting.learner.net, tests[B], 3).tau
    assert frozen[A] > 2 and frozen[B] < 1.3 and tau > 2
    assert sum(answer.tau for answer in answers[-24:]) > 1.5 * sum(answer.tau for answer in answers[:24])
    assert all(next_token(a) == b for answer in answers for a, b in zip(answer.tokens, answer.tokens[1:], strict=False))
    best, record = load_drafter(adapting.files.best, domains)
    assert held_out_tau(domains, best, tests[B], 3).tau > 1.7
    assert record["facts"]["position"]["best_tau"] == adapting.progress.tau


def noisy_rows(rollout, places_RP):
    """The rollout with other final states at these places of its rounds, and in all of its text."""
    final_RPD = torch.where(places_RP[..., None], torch.randn_like(rollout.rounds.final_RPD), rollout.rounds.final_RPD)
    return replace(rollout, rounds=replace(rollout.rounds, final_RPD=final_RPD), final_TD=torch.randn_like(rollout.final_TD))


def test_only_first_rejections_teach(domains, tmp_path):
    """By hand: of a round, the row of the target at place r, unless all its drafts were accepted or the answer was cut there."""
    adapting = adapter(domains, tmp_path)
    serve(adapting, prompts_of(A, 40, seed=0))  # so that some drafts are accepted
    start = adapting.learner.learnt()
    rollouts = adapting.roller.answer(prompts_of(A, 8, seed=1))
    teaching = []
    for rollout in rollouts:
        rounds, places_RP = rollout.rounds, torch.zeros(rollout.rounds.final_RPD.shape[:2], dtype=torch.bool)
        for i, (accepted, proposed, kept) in enumerate(zip(rounds.accepted_R, rounds.proposed_R, rounds.kept_R, strict=True)):
            places_RP[i, accepted] = accepted < proposed and accepted < kept
        teaching.append(places_RP)
    assert len({int(p) for places in teaching for p in places.nonzero()[:, 1]}) > 1  # rejected at more than one depth

    def learnt_from(rollouts):
        adapting.learner.go_back(start)
        assert adapting.learner.learn(rollouts, update=7) is not None
        return adapting.learner.learnt()

    plainly = learnt_from(rollouts)
    assert not same(plainly.weights, start.weights)
    assert same(learnt_from([noisy_rows(r, ~p) for r, p in zip(rollouts, teaching, strict=True)]), plainly)
    for one in range(len(rollouts)):
        places = [p if i == one else torch.zeros_like(p) for i, p in enumerate(teaching)]
        changed = learnt_from([noisy_rows(r, p) for r, p in zip(rollouts, places, strict=True)])
        assert same(changed.weights, plainly.weights) != bool(teaching[one].any())


def test_rounds_teach_more_than_first_rejections(domains, tmp_path):
    adapting = adapter(domains, tmp_path, replay="rounds", objective=OnPolicyDistillation())
    rollouts = adapting.roller.answer(prompts_of(A, 4, seed=1))
    start = adapting.learner.learnt()
    found = []
    for given in (rollouts, [noisy_rows(r, ~first_places(r)) for r in rollouts]):
        adapting.learner.go_back(start)
        adapting.learner.learn(given, update=0)
        found.append(adapting.learner.learnt())
    assert not same(found[0].weights, found[1].weights)


@pytest.mark.parametrize("drafter", [EAGLE, replace(DFLASH, anchors=3)], ids=["eagle3", "dflash"])
def test_text_teaches_what_supervised_training_would(domains, tmp_path, drafter):
    """The loss of an update against that of the same texts as chats, which the target reads anew."""
    adapting = adapter(domains, tmp_path, drafter, replay="text")
    rollouts = adapting.roller.answer(prompts_of(A, 4, seed=1))
    learner, net, objective = adapting.learner, adapting.learner.net, adapting.learner.sections.objective
    sequences = pack_rollouts(rollouts, 64).sequences
    layout = net.layout(sequences, numbers=[(5, 2, 0, row) for row in range(len(sequences.ids_BT))])
    with torch.no_grad():
        features = domains.read_packed(sequences, net.needs.taps)
        drafted = net.rows(sequences, features, layout)
        terms, _ = objective.terms(drafted, net.logits, TargetTeacher(domains, net), net.needs.depth)
    counts = objective.counts(layout, net.needs.depth)
    expected = sum(float(term.sum) / counts[name] for name, term in terms.items())
    assert learner.learn(rollouts, update=2) == pytest.approx(expected, rel=1e-5)


def test_text_needs_an_objective_of_texts():
    with pytest.raises(
        UserError, match="adapt.replay is text, .* objective.class_path is OnPolicyDistillation.*set adapt.replay to rounds"
    ):
        sections(replay="text", objective=OnPolicyDistillation())


def first_places(rollout):
    return torch.arange(rollout.rounds.final_RPD.shape[1]) == rollout.rounds.accepted_R[:, None]


def test_later_steps_learn_from_the_newest_answers_kept(domains, tmp_path, monkeypatch):
    """The first step of an update takes its new answers, each further one as many of the buffer, drawn anew; which ones follows from seed and update."""
    learner = adapter(domains, tmp_path, steps=5, buffer=10).learner
    rollouts = adapter(domains, tmp_path).roller.answer([replace(p, key=f"{i}") for i, p in enumerate(prompts_of(A, 16, seed=1))])
    rollouts.sort(key=lambda r: int(r.key))
    read, replayed = [], learner._replayed
    monkeypatch.setattr(
        learner, "_replayed", lambda given, seed: read.append([int(r.key) for r in given]) or replayed(given, seed)
    )
    start = learner.learnt()

    def drawn():
        learner.go_back(start)
        learner._kept.clear()
        read.clear()
        for update in range(4):
            learner.learn(rollouts[4 * update : 4 * update + 4], update)
        return [list(keys) for keys in read]

    steps = drawn()
    assert len(steps) == 4 * 5 and learner.steps == 20
    for update in range(4):
        first, *later = steps[5 * update : 5 * update + 5]
        newest = list(range(4 * update, 4 * update + 4))
        kept = range(max(0, newest[-1] + 1 - 10), newest[-1] + 1)
        assert first == newest
        assert all(len(set(keys)) == 4 and set(keys) <= set(kept) for keys in later)
    assert min(min(keys) for keys in steps[16:]) < 12  # answers of earlier updates come again
    assert len({tuple(keys) for keys in steps[16:]}) > 1
    found = learner.learnt()
    assert drawn() == steps and same(learner.learnt(), found)


def test_a_buffer_changes_no_first_step(domains, tmp_path):
    rollouts = adapter(domains, tmp_path).roller.answer(prompts_of(A, 4, seed=1))
    found = []
    for buffer in (None, 8):
        learner = adapter(domains, tmp_path, buffer=buffer).learner
        learner.learn(rollouts, update=0)
        found.append(learner.learnt())
    assert same(*found)


def test_a_drawn_batch_with_nothing_to_learn_is_no_step(domains, tmp_path):
    """Answers that teach stand beside some that do not: a draw of those alone divides by nothing and makes no step."""
    learner = adapter(domains, tmp_path, steps=40, every=2, buffer=2).learner
    a, b = adapter(domains, tmp_path).roller.answer(prompts_of(A, 2, seed=1))
    assert learner.learn([a], update=0) is not None and learner.steps == 40
    empty = replace(b, ids=b.ids[: b.prompt_len + 1], taps_TAD=b.taps_TAD[: b.prompt_len + 1], final_TD=b.final_TD[: b.prompt_len + 1],
                    accepted=[], rounds=replace(b.rounds, **{f: getattr(b.rounds, f)[:0] for f in vars(b.rounds)}))  # fmt: skip
    learner._kept.append(empty)
    taken = learner.steps
    loss = learner.learn([a], update=1)
    assert loss is not None and loss == loss and taken < learner.steps < taken + 40


def test_a_held_out_prompt_that_comes_again_is_not_learnt_from(domains, tmp_path, monkeypatch):
    """As where a run is started again over the same file: its prompts then stand at other places of the count."""
    prompts, learnt = prompts_of(A, 10, seed=3), []
    adapting = adapter(domains, tmp_path)
    learn = adapting.learner.learn
    monkeypatch.setattr(adapting.learner, "learn", lambda rollouts, update: learnt.extend(rollouts) or learn(rollouts, update))
    serve(adapting, prompts)
    held_out = {request.ids for request in adapting.guard.held_out}
    assert held_out == {prompts[3].ids, prompts[7].ids}
    other, *others = prompts_of(A, 7, seed=4)
    serve(adapting, [prompts[3], other, prompts[7], prompts[0], *others])  # numbers 11, 12 (held out), 13, 14, ...
    read = [tuple(rollout.ids[: rollout.prompt_len].tolist()) for rollout in learnt]
    assert not held_out & set(read) and read.count(prompts[0].ids) == 2


def test_held_out_prompts_are_never_learnt_from(domains, tmp_path):
    """Other prompts in the places that are held out lead to the same drafter bit for bit, another one elsewhere does not."""
    prompts = prompts_of(A, 24, seed=0)
    other = prompts_of(A, 24, seed=3)
    held_out_changed = [b if number % 4 == 0 else a for number, (a, b) in enumerate(zip(prompts, other, strict=True), 1)]
    one_changed = [b if number == 5 else a for number, (a, b) in enumerate(zip(prompts, other, strict=True), 1)]
    found = []
    for name, given in (("a", prompts), ("b", held_out_changed), ("c", one_changed)):
        adapting = adapter(domains, tmp_path / name, slots=1, fall=0.9)
        serve(adapting, given)
        assert [request.ids for request in adapting.guard.held_out] == [request.ids for request in given[3::4]]
        found.append(adapting.learner.learnt())
    assert same(found[0], found[1]) and not same(found[0].weights, found[2].weights)


def test_the_newest_prompts_are_held_out(domains, tmp_path):
    adapting = adapter(domains, tmp_path, guard_prompts=2)
    prompts = prompts_of(A, 16, seed=0)
    serve(adapting, prompts)
    assert [request.ids for request in adapting.guard.held_out] == [prompts[11].ids, prompts[15].ids]


def test_nothing_to_learn_is_no_update(domains, tmp_path):
    said: list[str] = []
    adapting = adapter(domains, tmp_path, said=said)
    answers = serve(adapting, prompts_of(A, 9, seed=0, limit=1))  # the prefill says it all: no round
    assert len(answers) == 9 and all(answer.tau == 1 for answer in answers) and adapting.progress.updates == 0
    assert not adapting.log.path.exists() and len(said) == 1 and "nothing to learn from" in said[0]


def test_answers_with_a_masked_token_are_not_learnt_from(tiny_llama, tmp_path):
    adapting = adapter(tiny_llama, tmp_path, DFLASH, replay="rounds", objective=OnPolicyDistillation())
    prompt = random_prompts(tiny_llama, 1)[0]
    clean, masked = adapting.roller.answer([prompt, replace(prompt, key="m", ids=(319, *prompt.ids))])
    if 319 in clean.ids:
        clean, masked = masked, clean
    assert adapting.learner.learn([masked], update=0) is None
    assert adapting.learner.learn([clean], update=0) is not None


# ---- the guard -------------------------------------------------------------------------------------------------------------


def test_a_sabotaged_update_is_rolled_back_bit_for_bit(domains, tmp_path):
    """Twice, since what is put back must not be stepped in."""
    good = adapter(domains, tmp_path)
    serve(good, prompts_of(A, 80, seed=0))
    said: list[str] = []
    bad = adapter(domains, tmp_path, lr=1e3, guard_every=1, said=said)
    before = bad.learner.learnt()
    assert same(before, good.learner.learnt()) and before.optimizer["state"]
    for rollbacks in (1, 2):
        serve(bad, prompts_of(A, 5, seed=rollbacks))
        assert bad.progress.rollbacks == rollbacks and f"(rollback {rollbacks})" in said[-1]
        assert same(bad.learner.learnt(), before) and same(bad.guard.passed, before)
        assert same(load_file(bad.files.last_drafter / "drafter.safetensors"), load_file(bad.files.best / "drafter.safetensors"))
    test = prompts_of(A, 8, seed=9)
    assert held_out_tau(domains, bad.roller.copy, test, 3) == held_out_tau(domains, good.learner.net, test, 3)
    assert [row["rollbacks"] for row in rows_of(bad)] == ["1", "2"]


def test_a_drafter_that_does_not_fall_passes(domains, tmp_path):
    said: list[str] = []
    adapting = adapter(domains, tmp_path, guard_every=4, said=said)
    serve(adapting, prompts_of(A, 63, seed=0))
    assert adapting.progress.rollbacks == 0 and len(said) == 3 and all("saved" in line for line in said)
    rows = [row for row in rows_of(adapting) if row["held_out/tau"]]
    assert [int(row["step"]) for row in rows] == [4, 8, 12]
    for row, line in zip(rows, said, strict=True):
        assert f"tau {float(row['held_out/tau']):.3f}" in line and f"{float(row['held_out/tau_passed']):.3f} by" in line
    net, _ = load_drafter(adapting.files.best, domains)
    assert held_out_tau(domains, net, list(adapting.guard.held_out), 3).tau == pytest.approx(float(rows[-1]["held_out/tau"]))


@pytest.mark.parametrize(("fall", "rollbacks"), [(0.2, 0), (0.1, 1)])
def test_how_much_tau_may_fall(domains, tmp_path, monkeypatch, fall, rollbacks):
    taus = iter([2.0, 1.7])
    monkeypatch.setattr("drafttrain.tasks.adapt.Guard._tau", lambda guard: next(taus))
    adapting = adapter(domains, tmp_path, fall=fall)
    serve(adapting, prompts_of(A, 8, seed=0))
    assert adapting.progress.rollbacks == rollbacks


def test_a_loss_that_is_not_finite_is_rolled_back_at_once(domains, tmp_path):
    said: list[str] = []
    adapting = adapter(domains, tmp_path, lr=1e30, said=said)
    before = adapting.learner.learnt()
    answers = serve(adapting, prompts_of(A, 11, seed=0))  # one update breaks it, the next one notices
    assert len(answers) == 11 and adapting.progress.rollbacks == 1 and "the loss is not finite" in said[0]
    assert same(adapting.learner.learnt(), before) and same(adapting.guard.passed, before)
    assert any(row["train/loss"] == "" for row in rows_of(adapting))


# ---- the log and the files -------------------------------------------------------------------------------------------------


def test_the_log_counts_the_rounds_since_the_row_before(domains, tmp_path, monkeypatch):
    adapting = adapter(domains, tmp_path)
    rounds: list[list[int]] = []
    answer = adapting.roller.answer

    def noted(prompts):
        rollouts = {rollout.key: rollout for rollout in answer(prompts)}
        rounds.extend(rollouts[prompt.key].accepted for prompt in prompts)
        return list(rollouts.values())

    monkeypatch.setattr(adapting.roller, "answer", noted)
    answers = serve(adapting, prompts_of(A, 42, seed=0))
    assert [answer.tau for answer in answers] == pytest.approx([1 + sum(each) / len(each) for each in rounds])
    rows = [row for row in rows_of(adapting) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    for update, row in enumerate(rows):
        window = [r for each, said in zip(rounds, answers, strict=True) if said.update == update for r in each]
        assert float(row["serve/tau"]) == pytest.approx(1 + sum(window) / len(window))
    assert [int(row["prompts"]) for row in rows] == [5, 10, 15, 21, 26, 31, 37, 42]
    assert [float(row["lr"]) for row in rows] == pytest.approx([1e-2 / 3, 2e-2 / 3, *[1e-2] * 6])
    assert all(float(row["train/loss"]) > 0 for row in rows)


def test_a_stopped_run_goes_on_bit_for_bit(domains, tmp_path):
    prompts = prompts_of(A, 42, seed=0)
    whole = adapter(domains, tmp_path / "whole", guard_every=3)
    serve(whole, prompts)
    first = adapter(domains, tmp_path / "broken", guard_every=3)
    answers = serve(first, prompts[:21], stop=True)  # behind update 4, of which 3 were measured
    assert first.progress.updates == 4 and first.progress.checked == 3
    second = adapter(domains, tmp_path / "broken", guard_every=3)
    assert same(second.learner.learnt(), first.learner.learnt()) and same(second.guard.passed, first.guard.passed)
    assert second.guard.held_out == first.guard.held_out and second.progress == first.progress
    answers = serve(second, prompts[21:])
    assert answers[0].update == 4
    assert same(second.learner.learnt(), whole.learner.learnt()) and same(second.guard.passed, whole.guard.passed)
    assert second.progress == whole.progress
    assert second.log.path != first.log.path and rows_of(second)[0]["step"] == "5"


def test_nothing_is_written_where_nothing_was_answered(domains, tmp_path):
    serve(adapter(domains, tmp_path), [])
    assert not list(tmp_path.iterdir())


def test_a_few_prompts_leave_the_best_drafter_of_training_alone(domains, tmp_path):
    adapting = adapter(domains, tmp_path)
    serve(adapting, prompts_of(A, 2, seed=0))
    assert adapting.files.state.exists() and (adapting.files.best / "drafter.json").exists()
    (adapting.files.best / "drafter.json").write_text("training's")
    serve(adapter(domains, tmp_path), prompts_of(A, 2, seed=0))
    assert (adapting.files.best / "drafter.json").read_text() == "training's"


def test_a_damaged_state_and_other_settings_are_refused(domains, tmp_path):
    adapting = adapter(domains, tmp_path)
    serve(adapting, prompts_of(A, 2, seed=0))
    files = AdaptFiles(tmp_path / "checkpoints", tmp_path / "logs", {"optimizer.betas": [0.5, 0.95]})
    with pytest.raises(
        UserError, match=r"optimizer\.betas: \[0\.9, 0\.95\] before, \[0\.5, 0\.95\] now\); undo the change, or delete"
    ):
        files.read()
    whole = files.state.read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        files.state.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(
            UserError, match=r"cannot be read \(its content is not what was written there\); restore it, or delete"
        ):
            files.read()
    for count in (0, 20, 100, len(whole) - 1):
        files.state.write_bytes(whole[:count])
        with pytest.raises(UserError, match="cannot be read"):
            files.read()


# ---- what is refused -------------------------------------------------------------------------------------------------------


def test_what_has_no_end_or_nothing_to_learn_is_refused(domains, tmp_path):
    optimizer = OptimizerConfig()
    with pytest.raises(UserError, match="optimizer.schedule is cosine.*set it to constant"):
        AdaptSections(AdaptConfig(), Distillation(), optimizer, length=64, seed=0)
    for clip in (-1.0, float("nan"), "a"):
        with pytest.raises(UserError, match=r"trainer\.gradient_clip_val is"):
            sections(clip=clip)
    rejected = OnPolicyDistillation(accepted_weight=0.0)
    with pytest.raises(UserError, match=r"accepted_weight 0.*adapt\.replay to rounds"):
        sections(objective=rejected)
    assert sections(objective=rejected, replay="rounds").streams == (False, True)
    with pytest.raises(UserError, match=r"adapt\.drafts asks for 9 drafts"):
        adapter(domains, tmp_path, DFLASH, drafts=9)


def test_what_is_drawn_follows_from_the_seed_and_the_update(domains, tmp_path):
    """EAGLE-1 adds noise to what it reads: the same in every run of an update, another in the next one; and nobody else's stream moves."""
    drafter = Eagle(depth=2, noise=0.5)
    adapting = adapter(domains, tmp_path, drafter)
    rollouts = adapting.roller.answer(prompts_of(A, 4, seed=1))
    start, found = adapting.learner.learnt(), []
    for update in (3, 3, 4):
        torch.rand(update + len(found))
        before = torch.get_rng_state()
        adapting.learner.go_back(start)
        adapting.learner.learn(rollouts, update)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(adapting.learner.learnt())
    assert same(found[0], found[1]) and not same(found[0].weights, found[2].weights)
