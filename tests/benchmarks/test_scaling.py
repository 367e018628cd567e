"""The benchmark of several processes: what it reads off a log, and (slow) a real training under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.scaling import Trained, distance, read_log

SCRIPT = Path(__file__).with_name("scaling.py")


def test_speed_is_counted_behind_the_warm_up():
    rows = [{"step": 5.0, "tokens_seen": 50, "seconds": 90.0}, {"step": 10.0, "tokens_seen": 100, "seconds": 100.0}]
    rows += [{"step": 20.0, "tokens_seen": 300, "seconds": 110.0}, {"step": 30.0, "tokens_seen": 500, "seconds": 120.0}]
    assert Trained("x", 1, rows).tokens_per_second(10) == (500 - 100) / (120 - 100)


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
