"""Nothing that takes minutes is silent: each measurement of tau is announced by one line, and none is announced that is not made."""

import re

import pytest
from tiny_run import make_run, start

SAID = re.compile(r"^(?:step (\d): )?measuring tau on 2 held-out prompts(?: for the last time, then saving)?$")


@pytest.mark.parametrize(
    ("every", "steps", "measured"), [(1, 3, ["1", "2", None]), (2, 3, ["2", None]), (3, 3, [None]), (5, 1, [None])]
)
def test_each_measurement_is_announced_once(tmp_path, target_folders, tiny_llama, capsys, every, steps, measured):
    run = make_run(tmp_path / "run", tiny_llama)
    checkpoint = {"tau_prompts": 2, "tau_tokens": 8, "tau_every": every}
    start(run, target_folders("llama"), trainer={"max_steps": steps}, checkpoint=checkpoint)
    lines = capsys.readouterr().out.splitlines()
    found = [(number, SAID.match(line)) for number, line in enumerate(lines) if "measuring" in line]
    assert [match and match[1] for _, match in found] == measured and all(match for _, match in found)
    for number, match in found:
        assert lines[number + 1].startswith(f"step {match[1] or steps}: held-out tau ")
    assert len([line for line in lines if "held-out tau" in line]) == len(measured)
