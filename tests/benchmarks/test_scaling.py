"""The benchmark of several processes: what it reads off a log, and (slow) a real training under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.scaling import Trained, distance, read_log, weak_scaling

SCRIPT = Path(__file__).with_name("scaling.py")


def test_speed_is_counted_behind_the_warm_up():
    """A pause is in the mean and not in the median."""
    seconds = [90.0, 100.0, 110.0, 160.0, 170.0, 180.0]
    rows = [{"step": 10.0 * i, "tokens_seen": 200.0 * i, "seconds": at} for i, at in enumerate(seconds)]
    assert Trained("x", 1, rows).speeds(10) == (200 / 10, 800 / 80)
    assert Trained("x", 1, rows).speeds(50) is None


def test_efficiency_is_that_of_the_fewest_processes_and_a_run_cut_off_counts_with_what_it_had(capsys):
    class Runs:
        def train(self, name, processes, changes, sharing):
            assert sharing == {2: 3, 1: 2, 4: 1}[processes] and changes["trainer.log_every_n_steps"] == 10
            pace = {1: 100.0, 2: 90.0, 4: 80.0}[processes] * processes
            rows = [
                {"step": s, "tokens_seen": s * pace, "seconds": float(s)} for s in (range(10, 31, 10) if processes < 4 else [10])
            ]
            return Trained(name, processes, rows)

    lines = weak_scaling(Runs(), [2, 1, 4], steps=100, warmup=10)
    assert lines[3:] == ["| 2 | 180 | 180 | 90.0% |", "| 1 | 100 | 100 | 100.0% |"]
    assert "weak-4: time was up at step 10" in capsys.readouterr().out


def test_curves_are_compared_where_both_have_a_loss(tmp_path):
    def curve(values):
        return Trained("x", 1, [{"step": step, "train/loss": loss} for step, loss in values.items()])

    mean, most = distance(curve({1: 2.0, 2: 3.3, 9: 1.0}), curve({1: 2.0, 2: 3.0}))
    assert mean == pytest.approx(0.05) and most == pytest.approx(0.1)


def test_rows_of_a_log_without_a_loss_are_left_out(tmp_path):
    (tmp_path / "logs/version_0").mkdir(parents=True)
    (tmp_path / "logs/version_0/metrics.csv").write_text("step,train/loss,tau\n2,0.5,\n4,,3.0\n1,0.7,\n")
    assert read_log(tmp_path) == [{"step": 1.0, "train/loss": 0.7}, {"step": 2.0, "train/loss": 0.5}]


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    out, steps = tmp_path / "runs.json", ["--steps", "0", "--curve-steps", "6", "--at-once", "2"]
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        "--processes",
        "1,2",
        *steps,
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {run["name"]: Trained(**run) for run in json.loads(out.read_text())}
    one, two, other = runs["curve-ddp-1"], runs["curve-ddp-2"], runs["curve-ddp-1-seed"]
    assert distance(two, one)[1] < 1e-5 < 1e-3 < distance(other, one)[0]
    assert "| ddp | 2 |" in done.stdout
