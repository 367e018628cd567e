"""A run of two processes that is killed again and again, any rank, by any signal, at any moment: every start goes on, and the end is the same."""

import random
import signal
from pathlib import Path

import pytest
import torch
from on_policy_forms import build_easy_target
from safetensors.torch import load_file
from tasks.train_process import StopAt
from tasks.warm_ranks import Job, train_in
from tiny_run import logged, make_run, start

from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.tasks.checkpoints import find_last

STEPS_A_KILL = 6
"""How far apart the steps lie at which a kill is due."""


def sections(steps: int) -> dict:
    """Few prompts, but tau above 1: the target mostly says one of eight tokens, which are soon learnt."""
    trainer = {"max_steps": steps, "log_every_n_steps": 1, "accumulate_grad_batches": 2, "strategy": "ddp"}
    checkpoint = {"every": 2, "tau_prompts": 2, "tau_every": 5, "tau_tokens": 8}
    return {"trainer": trainer, "checkpoint": checkpoint, "optimizer": {"lr": 1e-2}}


def step_of(run: Path) -> int:
    """Of the newest whole checkpoint, by its name: it is asked while a rank may be renaming it."""
    return max((int(path.name.removeprefix("step_")) for path in (run / "checkpoints/last").glob("step_*")), default=0)


def wait_for_a_moment(job: Job, kind: str, chance: random.Random, due: int) -> None:
    """Returns at a moment drawn by chance, not before step `due` was saved unless it is one of the start."""
    delay = chance.random()
    if kind == "starting":
        job.wait_until(lambda: step_of(job.run) >= due, 1.5 * delay)  # on a fast machine the run would be over by then
        return
    job.wait_until(lambda: step_of(job.run) >= due, 60)
    if kind == "training":
        job.wait_until(lambda: False, 0.1 * delay)
    else:
        job.wait_until(lambda: any((job.run / "checkpoints/last").glob("writing_*")), 10)
        job.wait_until(lambda: False, 0.01 * delay)


def drill(run: Path, target: Path, kills: int, seed: int, kinds: list[str]) -> list[str]:
    """Trains through so many kills. Returns what was done, in words. AssertionError if a start does not go on from what was saved."""
    chance, steps, done = random.Random(seed), STEPS_A_KILL * (kills + 1), []
    while len(done) < kills:
        before, kind = step_of(run), chance.choice(kinds)
        job = Job(run, target, 2, sections(steps))
        wait_for_a_moment(job, kind, chance, max(before + 1, STEPS_A_KILL * len(done)))
        rank, number = chance.randrange(2), chance.choice([signal.SIGTERM, signal.SIGKILL])
        heard = job.tell(rank, number)
        codes, saved = job.finish(60), step_of(run)
        done.append(f"{number.name} to rank {rank} while {kind}: {codes}, step {before} -> {saved} of {steps}")
        story = "\n".join([*done, job.said(0), job.said(1)])
        assert heard and before <= saved < steps, story
        assert not before or "parameters" not in job.said() or f"step_{before:08d}: {before} of {steps} steps" in job.said(), (
            story
        )
        if kind != "starting":
            assert saved > before and (number == signal.SIGKILL or codes == [0, 0]), story
    train_in(run, target, 2, sections(steps))
    return done


def hold(tmp_path, kills: int, seed: int, kinds: list[str]) -> None:
    folder = build_easy_target(tmp_path / "target")
    target = load_target(TargetConfig(path=str(folder)), device="cpu")
    whole, killed = (make_run(tmp_path / name, target) for name in ("whole", "killed"))
    print("\n".join(drill(killed, folder, kills, seed, kinds)))
    train_in(whole, folder, 2, sections(STEPS_A_KILL * (kills + 1)))
    for name in ("train/loss", "held_out/tau", "tokens_seen"):
        assert logged(killed, name) == logged(whole, name), name
    ends = [find_last(run / "checkpoints").position for run in (killed, whole)]
    assert ends[0] == ends[1] and ends[0].best_tau > 1
    for name in ("last_drafter", "best"):
        mine, theirs = (load_file(run / "checkpoints" / name / "drafter.safetensors") for run in (killed, whole))
        assert mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items()), name
    assert [path.name for path in (killed / "checkpoints/last").iterdir()] == [f"step_{ends[0].step:08d}"]


def test_a_measurement_that_a_stop_put_off_is_made_when_the_run_goes_on(tmp_path, tiny_llama, target_folders):
    whole, stopped = (make_run(tmp_path / name, tiny_llama) for name in ("whole", "stopped"))
    given = {"checkpoint": sections(8)["checkpoint"]}
    for run, starts in ((whole, [[]]), (stopped, [[StopAt(5)], [StopAt(7)], []])):
        for callbacks in starts:
            start(run, target_folders("llama"), **given, trainer={"max_steps": 8, "callbacks": callbacks})
    assert logged(stopped, "held_out/tau").keys() == {5, 8}
    assert logged(stopped, "held_out/tau") == logged(whole, "held_out/tau")
    assert find_last(stopped / "checkpoints").position == find_last(whole / "checkpoints").position


def test_two_kills(tmp_path):
    hold(tmp_path, kills=2, seed=3, kinds=["training", "saving"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_twenty_kills(tmp_path, seed):
    hold(tmp_path, kills=20, seed=seed, kinds=["starting", "training", "training", "saving", "saving"])
