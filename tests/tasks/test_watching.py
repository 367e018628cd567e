"""What is seen of a run: the line, every column of the log, and tau over the time that training took.

Curves are compared with numbers worked out by hand, columns with docs/metrics.md in both directions.
"""

import csv
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import tau_over_time as curves
from tiny_run import logged, make_run, start

from drafttrain.divergences import HardCrossEntropy, ReverseKL, SoftCrossEntropy
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter
from drafttrain.errors import UserError
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.tasks import conductor
from drafttrain.tasks.conductor import spent
from drafttrain.tasks.distill import Position
from drafttrain.tasks.progress import describe

ROOT = Path(__file__).resolve().parents[2]
DRAFTER = Eagle3(taps=[0, 2, 3], depth=3, draft_vocab=200)
SMALL = {"rollouts": 8, "every": 2, "batch": 4, "buffer": 16, "max_tokens": 12, "slots": 4, "from_random": True}
TWO_EACH = OnPolicyDistillation(accepted=[SoftCrossEntropy(), HardCrossEntropy()], rejected=[ReverseKL(), SoftCrossEntropy()])
MEASURED = {"tau_prompts": 2, "tau_tokens": 8, "tau_every": 2}


# ---- columns and the line ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory, target_folders, targets):
    """Name -> the run folder: supervised with two divergences, on policy with both streams, and on policy on text from the second's drafter."""
    folder, llama = tmp_path_factory.mktemp("runs"), target_folders("llama")
    made = {name: make_run(folder / name, targets("llama")) for name in ("supervised", "rounds", "text")}
    many = {"drafter": DRAFTER, "trainer": {"max_steps": 5}}
    objective = {"divergences": [SoftCrossEntropy(), HardCrossEntropy()]}
    start(made["supervised"], llama, checkpoint=MEASURED, objective=objective, **many)
    start(made["rounds"], llama, checkpoint=MEASURED, on_policy=SMALL, objective=TWO_EACH, **many)
    begin = MEASURED | {"start": str(made["rounds"] / "checkpoints" / "best")}
    start(made["text"], llama, checkpoint=begin, on_policy=SMALL | {"replay": "text", "from_random": False}, **many)
    return made


def columns(run: Path) -> set[str]:
    [file] = (run / "logs").glob("version_*/metrics.csv")
    with file.open() as stream:
        return set(csv.DictReader(stream).fieldnames)


def documented() -> dict[str, re.Pattern]:
    """Name in docs/metrics.md -> what it matches."""
    lines = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
    names = [name for line in lines for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    patterns = {name: re.sub("_k$", r"_\\d+", name).replace("DIVERGENCE", "(?!loss|top1)[A-Za-z_]+?") for name in names}
    return {name: re.compile(pattern) for name, pattern in patterns.items()}


def test_every_column_is_documented_and_every_documented_one_is_logged(runs):
    found, names = {name: columns(run) for name, run in runs.items()}, documented()
    every = set().union(*found.values())
    assert {column for column in every if not any(pattern.fullmatch(column) for pattern in names.values())} == set()
    never = {name for name, pattern in names.items() if not any(pattern.fullmatch(column) for column in every)}
    assert never == {"gpu_seconds"}  # there is none here
    assert "rollout/tau" not in found["supervised"] and "train/loss_accepted" not in found["text"]


def test_what_an_on_policy_run_is_watched_by(runs):
    """All that the line and the curves need, and shares of time that make a whole; the streams' losses are those of the whole."""
    for name in ("rounds", "text"):
        shares = [logged(runs[name], f"time/{part}") for part in ("rollout", "train", "sync")]
        assert all(0 <= value <= 1 for share in shares for value in share.values()) and shares[0][1] > 0
        assert [sum(values) for values in zip(*(share.values() for share in shares), strict=True)] == pytest.approx([1] * 5)
        assert logged(runs[name], "rollout/tau").keys() == {1, 3, 5}  # refreshes stand before these steps
        assert min(logged(runs[name], "rollout/tokens_per_second").values()) > 0
        assert logged(runs[name], "rollout/staleness").keys() == {1, 2, 3, 4, 5}
    whole, accepted, rejected = (logged(runs["rounds"], f"train/loss{part}") for part in ("", "_accepted", "_rejected"))
    assert [whole[step] for step in whole] == pytest.approx([(accepted[step] + rejected[step]) / 2 for step in whole], rel=1e-5)


def test_tau_stands_beside_the_time_it_took(runs):
    """In one row, and no time passes while it is measured."""
    for run in runs.values():
        [file] = (run / "logs").glob("version_*/metrics.csv")
        with file.open() as stream:
            rows = [row for row in csv.DictReader(stream) if row["held_out/tau"]]
        times = {int(row["step"]): float(row["seconds"]) for row in rows}
        assert all(row["tokens_seen"] for row in rows) and times.keys() >= {2, 4, 5}
        assert list(times.values()) == sorted(times.values()) and times[5] > 0
        logs = logged(run, "seconds")
        assert all(logs[step] == time for step, time in times.items())


def test_a_drafter_trained_before_is_measured_before_the_first_step(tmp_path, tiny_llama, target_folders, runs):
    """And stays the best one where training spoils it."""
    good, spoilt = (make_run(tmp_path / name, tiny_llama) for name in ("good", "spoilt"))
    how = {"drafter": DRAFTER, "data": {"rows": 4}}
    measured = {"tau_prompts": 4, "tau_tokens": 16}
    best = start(good, target_folders("llama"), optimizer={"lr": 1e-2}, trainer={"max_steps": 30}, checkpoint=measured, **how)
    drafter, record = load_drafter(best, tiny_llama)
    assert record["facts"]["held_out"]["tau"] > 1
    begin = measured | {"start": str(best)}
    kept = start(spoilt, target_folders("llama"), optimizer={"lr": 10.0, "warmup_steps": 0}, checkpoint=begin, **how)
    taus = logged(spoilt, "held_out/tau")
    assert list(taus) == [0, 4] and taus[0] == record["facts"]["held_out"]["tau"] > taus[4]
    assert logged(spoilt, "seconds")[0] == 0.0
    found, record = load_drafter(kept, tiny_llama)
    assert record["facts"]["position"]["step"] == 0
    assert all(torch.equal(weight, found.state_dict()[name]) for name, weight in drafter.state_dict().items())
    assert logged(runs["rounds"], "held_out/tau").keys() == {2, 4, 5}  # begun from random weights


def test_what_measuring_takes_is_in_no_time(tmp_path, tiny_llama, target_folders, runs, monkeypatch):
    """By a clock that an hour passes on with every measurement."""
    real, hours, done = time.monotonic, [], conductor.measure
    monkeypatch.setattr(time, "monotonic", lambda: real() + 3600 * len(hours))
    monkeypatch.setattr(conductor, "measure", lambda *given: hours.append(1) or done(*given))
    run, on_policy = make_run(tmp_path / "run", tiny_llama), SMALL | {"from_random": False}
    begin = MEASURED | {"start": str(runs["rounds"] / "checkpoints" / "best")}
    start(run, target_folders("llama"), drafter=DRAFTER, checkpoint=begin, on_policy=on_policy, objective=TWO_EACH)
    assert len(hours) == 3 and max(logged(run, "seconds").values()) < 3600
    assert logged(run, "time/rollout")[3] > 0.001  # behind the measurement of step 2


def test_a_run_that_goes_on_does_not_measure_its_start_again(tmp_path, tiny_llama, target_folders, runs, capsys):
    run = make_run(tmp_path / "run", tiny_llama)
    begin = {"drafter": DRAFTER, "checkpoint": MEASURED | {"start": str(runs["rounds"] / "checkpoints" / "best")}}
    for steps in (2, 4):
        start(run, target_folders("llama"), trainer={"max_steps": steps}, **begin)
    assert re.findall(r"^step (\d): held-out tau", capsys.readouterr().out, re.M) == ["0", "2", "4"]
    taken = [curves.read(run).points, logged(run, "held_out/tau")]
    assert list(taken[1]) == [0, 2, 4] and [tau for _, tau in taken[0]] == list(taken[1].values())
    assert [time for time, _ in taken[0]] == sorted(time for time, _ in taken[0])


def test_gpu_seconds_are_those_of_all_gpus():
    position = Position(step=3, tokens=700, seconds=12.5)
    assert spent(position, 4, torch.device("cuda", 1)) == {"tokens_seen": 700.0, "seconds": 12.5, "gpu_seconds": 50.0}
    assert spent(position, 4, torch.device("cpu")) == {"tokens_seen": 700.0, "seconds": 12.5}


def test_the_line_of_a_run():
    speed = {"tokens_per_second": 1234.4, "lr": 5e-4}
    top1 = {f"top1_depth_{k}": 1 - k / 20 for k in range(1, 12)}
    shown = " ".join(f"{1 - k / 20:.2f}" for k in range(1, 12))  # ten stands behind nine
    assert describe({"loss": 3.2144} | top1 | speed) == f"loss 3.214  accepts {shown}  1,234 tokens/s  lr 5.0e-04"
    times = {"time/rollout": 0.412, "time/train": 0.571, "time/sync": 0.017}
    streams = {"loss_accepted": 0.401, "loss_rejected": 0.622, "loss_accepted_depth_1": 9.0, "top1_accepted_depth_1": 0.5}
    on_policy = {"loss": 0.512, "rollout/staleness": 3.5} | streams | times | speed
    line = "  staleness 3.5 steps  time 41% rollout, 57% train, 2% sync  1,234 tokens/s  lr 5.0e-04"
    assert describe(on_policy) == f"loss 0.512 (accepted 0.401, rejected 0.622){line}"
    assert (
        describe(on_policy | {"rollout/tau": 2.4128}) == f"loss 0.512 (accepted 0.401, rejected 0.622)  rollout tau 2.413{line}"
    )
    del on_policy["loss_rejected"]
    assert describe(on_policy).startswith("loss 0.512 (accepted 0.401)  staleness")


# ---- tau over time -----------------------------------------------------------------------------------------------------------


def write(run: Path, version: int, text: str) -> Path:
    folder = run / "logs" / f"version_{version}"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)
    return run


HEAD = "step,gpu_seconds,seconds,held_out/tau,train/loss\n"


def test_a_curve_is_read_over_starts_and_without_what_a_crash_undid(tmp_path):
    run = write(
        tmp_path / "a-seed12",
        2,
        HEAD + "0,0.0,0.0,2.0,\n10,40,20,,3.0\n10,40,20,2.2,\n20,80,40,,3.0\n20,80,40,2.5,\n25,99,49,2.9,\n",
    )
    write(run, 10, HEAD + "20,84,42,,3.0\n20,,,2.4,\n30,120,60,2.6,\n")
    assert curves.read(run) == curves.Curve("a", "gpu_seconds", [(0, 2.0), (40, 2.2), (84, 2.4), (120, 2.6)])


def test_tau_between_measurements_is_on_a_straight_line():
    points = [(0.0, 1.0), (10.0, 2.0), (10.0, 2.5), (40.0, 4.0), (50.0, 3.5)]
    curve = curves.Curve("a", "seconds", points)
    for moment in np.linspace(0, 50, 41):
        if moment != 10:
            assert curve.at(moment) == pytest.approx(np.interp(moment, *zip(*points, strict=True)))
    assert curve.at(-1) is None and curve.at(50.1) is None
    alone = curves.Curve("a", "seconds", [(5.0, 2.0)])
    assert alone.at(5.0) == 2.0 and alone.at(4.0) is None


def test_runs_are_compared_at_equal_times_and_seeds_together(tmp_path, capsys):
    """Two seeds 2 + t/100 and 2.2 + t/100 to t = 120, against 2 + t/50 to t = 80: at 20, 40 and 80."""
    folders = []
    for seed, first in ((0, 2.0), (1, 2.2)):
        rows = "".join(f"{t},{t},{t},{first + t / 100},\n" for t in (0, 30, 60, 90, 120))
        folders.append(write(tmp_path / f"control-seed{seed}", 0, HEAD + rows))
    folders.append(write(tmp_path / "opd", 0, HEAD + "".join(f"{t},{t},{t},{2 + t / 50},\n" for t in (0, 50, 80))))
    picture = tmp_path / "tau.png"
    assert curves.main([*map(str, folders), "--out", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| run | runs | tau at 20 GPU-s | tau at 40 GPU-s | tau at 80 GPU-s | ratio to the first |"
    assert lines[2] == "| control | 2 | 2.300 ± 0.141 | 2.500 ± 0.141 | 2.900 ± 0.141 | 1.000 |"
    assert lines[3] == "| opd | 1 | 2.400 | 2.800 | 3.600 | 1.241 |"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    gpu = write(tmp_path / "gpu", 0, HEAD + "1,4,4,2.0,\n")
    cpu = write(tmp_path / "cpu", 0, "step,seconds,held_out/tau\n1,4,2.0\n")
    silent = write(tmp_path / "silent", 0, HEAD + "1,4,4,,3.0\n")
    write(cpu.parent / "both", 0, HEAD + "1,4,4,2.0,\n")
    both = write(cpu.parent / "both", 1, "step,seconds,held_out/tau\n2,4,2.0\n")
    late = write(tmp_path / "late", 0, HEAD + "1,90,90,2.0,\n")
    for folders, words in (
        ((gpu, cpu), "cpu has no gpu_seconds"),
        ((silent,), "holds no held_out/tau"),
        ((both,), "added up"),
        (
            (gpu, late),
            "late has no held-out tau before 4 GPU-s, where the shortest run ends; set a smaller checkpoint.tau_every.",
        ),
    ):
        assert curves.main([*map(str, folders), "--out", str(tmp_path / "no.png")]) == 1
        assert words in capsys.readouterr().err
    with pytest.raises(UserError, match=r"runs/none/logs holds no held_out/tau"):
        curves.read(Path("runs/none"))
    assert not (tmp_path / "no.png").exists()


def test_curves_of_real_runs(runs, tmp_path, capsys):
    assert curves.main([str(runs["rounds"]), str(runs["text"]), "--out", str(tmp_path / "tau.png")]) == 0
    [header, _, rounds, text, _] = capsys.readouterr().out.splitlines()
    assert header.count(" s |") == 3 and rounds.startswith("| rounds | 1 | ") and text.startswith("| text | 1 | ")
    assert curves.read(runs["text"]).points[0] == (0.0, logged(runs["text"], "held_out/tau")[0])
