"""`drafttrain export --checkpoint best|last|PATH`: weights of a resume state equal those of the live run bit for bit, and what was interrupted, is
damaged or comes from elsewhere is refused by name. DeepSpeed's own states: tests/tasks/test_deepspeed_states.py."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import make_run, start

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.target.load import load_target
from drafttrain.tasks.state_weights import TrainingState

RECIPE = """\
name: tiny
target: {{path: {target}}}
prepare: {{prompts: [{{class_path: SelfPrompts, init_args: {{count: 8}}}}]}}
drafter: {{class_path: Eagle3, init_args: {{taps: [0, 2, 3], depth: 3, draft_vocab: 200}}}}
objective: {{class_path: Distillation}}
trainer: {{max_steps: 4}}
export: {{dtype: float32}}
"""


@pytest.fixture(scope="module")
def trained(target_folders, tiny_llama, tmp_path_factory):
    """(recipe file, runs folder) of a run whose best drafter is not its newest."""
    folder = tmp_path_factory.mktemp("export-checkpoint")
    (folder / "recipe.yaml").write_text(RECIPE.format(target=target_folders("llama")))
    run = make_run(folder / "runs" / "tiny", tiny_llama)
    start(run, target_folders("llama"), trainer={"max_steps": 2})
    shutil.copytree(run / "checkpoints" / "best", folder / "best")
    start(run, target_folders("llama"), trainer={"max_steps": 4})
    shutil.rmtree(run / "checkpoints" / "best")
    shutil.move(folder / "best", run / "checkpoints" / "best")
    return folder / "recipe.yaml", folder / "runs"


@pytest.fixture
def made(trained, tmp_path):
    """A copy that a test may break."""
    shutil.copytree(trained[1], tmp_path / "runs")
    return trained[0], tmp_path / "runs"


def export(made, *more) -> int:
    return main(["export", "--config", str(made[0]), "--runs", str(made[1]), *map(str, more)])


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in load_file(folder).items() if name not in ("d2t", "t2d")}


def exported(made) -> dict[str, torch.Tensor]:
    return weights_in(made[1] / "tiny" / "export" / "model.safetensors")


def live(made, name="last_drafter") -> dict[str, torch.Tensor]:
    """As the run saved them from the net it trained."""
    return weights_in(made[1] / "tiny" / "checkpoints" / name / "drafter.safetensors")


def same(mine, theirs) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def step(made) -> Path:
    (found,) = (made[1] / "tiny" / "checkpoints" / "last").iterdir()
    return found


def refused(made, capsys, *more) -> str:
    capsys.readouterr()
    assert export(made, *more) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_best_last_and_every_way_to_name_a_state(made):
    assert export(made) == 0 and same(exported(made), live(made, "best")) and not same(exported(made), live(made))
    paths = [step(made), step(made) / "state", made[1] / "tiny" / "checkpoints" / "last_drafter"]
    for asked in ("last", *paths):
        assert export(made) == 0
        assert export(made, "--checkpoint", asked) == 0
        assert same(exported(made), live(made)), asked
        facts = json.loads((made[1] / "tiny" / "export" / "drafttrain.json").read_text())["facts"]
        assert facts["checkpoint"] == Path(asked).name and "held-out tau while training" not in facts
        assert facts["steps"] == 4


def test_what_an_export_replaces_is_said_in_a_line_before_it_is(made, capsys):
    def told(*more) -> list[str]:
        assert export(made, *more) == 0
        lines = capsys.readouterr().out.splitlines()
        place = next(i for i, line in enumerate(lines) if line.startswith("EAGLE-3 drafter"))  # what is there now
        return [line for line in lines[:place] if "earlier export" in line]

    folder = made[1] / "tiny" / "export"
    assert told("--export.format", "speculators") == []
    (line,) = told("--checkpoint", "last")
    assert (
        line.startswith(f"{folder}/ holds an earlier export (EAGLE-3 drafter in float32, 2 steps, for ") and "speculators" in line
    )
    (line,) = told("--export.dtype", "bfloat16")
    assert "in float32, 4 steps, for vLLM" in line and "speculators" not in line
    for broken in ("{", "[]", '{"format": "eagle3"}'):
        (folder / "drafttrain.json").write_text(broken)
        (line,) = told()
        assert "with no drafttrain.json that this version can read" in line


def test_a_training_that_was_stopped_is_not_exported_where_a_finished_one_is_asked_for(made, capsys):
    assert export(made, "--finished", "--trainer.max_steps", "'4'") == 0
    assert export(made, "--finished") == 0 and same(exported(made), live(made, "best"))
    shutil.rmtree(made[1] / "tiny" / "export")
    assert "stopped at step 4 of 6" in refused(made, capsys, "--finished", "--trainer.max_steps", "6")
    shutil.rmtree(made[1] / "tiny" / "checkpoints" / "last")
    assert "stopped at step 0 of 4" in refused(made, capsys, "--finished")
    assert not (made[1] / "tiny" / "export").exists()
    assert export(made) == 0


def test_the_pipeline_ends_behind_a_training_that_was_told_to_stop_and_goes_on_when_run_again(made, tmp_path):
    """Training exits 0 either way. Of the stages the export alone is real."""
    python, script = tmp_path / "python", Path(__file__).parents[1] / "launch" / "pipeline.sh"
    python.write_text(
        f'#!/bin/sh\necho "$2 $3" >> {tmp_path}/calls\ncase "$3" in export) exec {shlex.quote(sys.executable)} "$@";; esac\n'
    )
    python.chmod(0o755)

    def pipeline(steps: int) -> tuple[int, str, list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        flags = ["--runs", str(made[1]), "--trainer.max_steps", str(steps)]
        environment = {name: value for name, value in os.environ.items() if name != "NPROC"} | {"PYTHON": str(python)}
        done = subprocess.run([script, made[0], *flags], env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr, [line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()]

    code, said, stages = pipeline(6)
    assert code == 2 and stages == ["--config", "train", "export"]
    assert said.count("error: ") == 1 and "stopped at step 4 of 6" in said and "Traceback" not in said
    code, said, stages = pipeline(4)  # training has done what was left
    assert code == 0 and stages == ["--config", "train", "export", "validate"], said


def test_the_words_of_its_head_are_chosen_as_training_did_where_no_drafter_was_saved_beside_it(made):
    wanted, words = live(made), load_file(made[1] / "tiny/checkpoints/best/drafter.safetensors")["d2t"]
    for name in ("best", "last_drafter"):
        shutil.rmtree(made[1] / "tiny" / "checkpoints" / name)
    assert export(made, "--checkpoint", "last") == 0
    assert same(exported(made), wanted)
    assert torch.equal(load_file(made[1] / "tiny" / "export" / "model.safetensors")["d2t"], words)


def test_the_words_of_its_head_are_read_from_the_run_that_it_lies_in(made):
    """The recipe's own run has neither data nor a drafter."""
    other = (made[1] / "tiny").rename(made[1] / "other")
    shutil.rmtree(other / "data")
    where = next((other / "checkpoints" / "last").iterdir())
    assert export(made, "--checkpoint", where, "--export.pickle", "true") == 0
    wanted = load_file(other / "checkpoints" / "last_drafter" / "drafter.safetensors")
    assert same(exported(made), {name: value for name, value in wanted.items() if name != "d2t"})
    assert torch.equal(load_file(made[1] / "tiny" / "export" / "model.safetensors")["d2t"], wanted["d2t"])


def test_an_interrupted_state_is_refused_by_name(made, capsys):
    writing = step(made).with_name("writing_00000006")
    shutil.copytree(step(made), writing)
    assert export(made, "--checkpoint", "last") == 0  # the whole one counts
    for asked in (writing, writing / "state"):
        assert f"{writing} was interrupted while it was written" in refused(made, capsys, "--checkpoint", asked)
    shutil.rmtree(step_of_four := writing.with_name("step_00000004"))
    assert not step_of_four.exists() and f"{writing} was interrupted" in refused(made, capsys, "--checkpoint", "last")
    shutil.rmtree(writing)
    assert "holds no training state; run train first" in refused(made, capsys, "--checkpoint", "last")


def test_a_state_that_is_cut_off_or_gone_is_refused(made, capsys):
    state = step(made) / "state"
    whole = bytearray(state.read_bytes())
    whole[len(whole) // 2] ^= 1  # in a weight, where torch.load sees nothing
    state.write_bytes(whole)
    assert "is not whole (state does not hold what was saved there)" in refused(made, capsys, "--checkpoint", step(made))
    os.truncate(state, state.stat().st_size // 2)
    assert f"export.checkpoint {step(made)} is not whole (" in refused(made, capsys, "--checkpoint", step(made))
    state.unlink()
    assert f"{step(made)} was interrupted while it was written" in refused(made, capsys, "--checkpoint", step(made))
    assert "nothing is there; set it to best, last, or the path" in refused(made, capsys, "--checkpoint", made[1] / "no")


class Malice:
    """Unpickled without care, it writes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_state_from_elsewhere_is_read_on_an_explicit_word_only(made, tmp_path, capsys):
    """And then only tensors are unpacked of a plain one."""
    theirs = tmp_path / "theirs.ckpt"
    shutil.copy(step(made) / "state", theirs)
    assert "from outside of this run: it is a pickle, which can run code" in refused(made, capsys, "--checkpoint", theirs)
    assert export(made, "--checkpoint", theirs, "--export.pickle", "true") == 0
    assert same(exported(made), live(made))
    torch.save({"state_dict": Malice(tmp_path / "trace")}, theirs)
    assert "theirs.ckpt is not whole (" in refused(made, capsys, "--checkpoint", theirs, "--export.pickle", "true")
    assert not (tmp_path / "trace").exists()
    link = made[1] / "tiny" / "checkpoints" / "linked.ckpt"
    link.symlink_to(theirs)
    assert "from outside of this run" in refused(made, capsys, "--checkpoint", link)


def test_a_state_without_a_drafter_or_of_another_one(made, tmp_path, capsys):
    word = ("--export.pickle", "true")
    torch.save({"state_dict": {"model.layers.0.weight": torch.ones(2)}}, tmp_path / "other.ckpt")
    assert "holds no drafter that drafttrain trained (but model.layers.0.weight)" in refused(
        made, capsys, "--checkpoint", tmp_path / "other.ckpt", *word
    )
    torch.save({"state_dict": {"net.fc.lora_A.default.weight": torch.ones(2, 2)}}, tmp_path / "lora.ckpt")
    text = refused(made, capsys, "--checkpoint", tmp_path / "lora.ckpt", *word)
    assert "holds LoRA's adapters" in text and "checkpoints/last_drafter, which is as new" in text
    shutil.copy(step(made) / "state", tmp_path / "theirs.ckpt")
    changed = ("--drafter.init_args.fc_norm", "true")
    text = refused(made, capsys, "--checkpoint", tmp_path / "theirs.ckpt", *word, *changed)
    assert "holds another drafter than the recipe's Eagle3: fc_norm.0.weight is missing" in text
    text = refused(made, capsys, "--checkpoint", "last", *changed)
    assert "was made with another recipe (drafter.init_args.fc_norm: False before, True now)" in text


def test_a_dry_run_of_a_push_is_listed_by_the_command(made, monkeypatch, capsys):
    import huggingface_hub
    from export.hub_standin import HubStandin
    from huggingface_hub import constants

    with HubStandin({"hf_good": ["me"]}) as hub:
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_good")
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(huggingface_hub.hf_api.constants, "ENDPOINT", hub.endpoint)
        assert export(made, "--push", "me/tiny-eagle3", "--dry-run", "--export.tag", "v1") == 0
        assert not [request for request in hub.requests if not request.startswith("GET")]
    out = capsys.readouterr().out
    assert (
        "files, " in out and "would go to me/tiny-eagle3 (made anew, private), branch main, in one commit and be tagged v1" in out
    )
    assert "  model.safetensors  " in out and "hf_good" not in out


# ---- folders of DeepSpeed's that are not whole, known from their names alone -------------------------------------------------


def pieces(folder: Path, names: list[str], latest: bool = True) -> Path:
    (folder / "checkpoint").mkdir(parents=True)
    for name in names:
        (folder / "checkpoint" / name).write_bytes(b"")
    if latest:
        (folder / "latest").write_text("checkpoint")
    return folder


OPTIMIZER = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
ZERO3 = ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"]


@pytest.mark.parametrize(
    ("names", "latest", "words"),
    [
        (["mp_rank_00_model_states.pt", *OPTIMIZER], False, "it has no file `latest`, which is written last"),
        (["mp_rank_00_model_states.pt", OPTIMIZER[1]], True, f"checkpoint/ lacks {OPTIMIZER[0]}"),
        ([*ZERO3, OPTIMIZER[1]], True, f"checkpoint/ lacks {OPTIMIZER[0]}"),
        ([ZERO3[0], *OPTIMIZER], True, f"checkpoint/ lacks {ZERO3[1]}"),
        (OPTIMIZER[:1], True, f"checkpoint/ lacks {ZERO3[0]}"),
        (["mp_rank_00_model_states.pt"], True, "checkpoint/ lacks the pieces of the optimizer"),
        ([], True, "checkpoint/ lacks the pieces of the optimizer"),
    ],
)
def test_a_folder_of_deepspeed_that_was_interrupted_is_refused_by_what_it_lacks(tmp_path, names, latest, words):
    folder = pieces(tmp_path / "state", names, latest)
    with pytest.raises(UserError, match="was interrupted while it was written, or copied in part") as caught:
        TrainingState.at(str(folder), tmp_path, pickles=False).weights()
    assert words in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("format", "reason"),
    [("transformers", "it loads stand-alone language models alone"), ("speculators", None)],
)
def test_a_form_that_no_such_drafter_has_is_refused_before_the_target_is_loaded(made, capsys, monkeypatch, format, reason):
    loaded = []
    monkeypatch.setattr("drafttrain.commands.export.load", lambda config: loaded.append(config) or load_target(config))
    assert export(made, "--export.format", format) == (2 if reason else 0)
    assert len(loaded) == (0 if reason else 1)
    if reason:
        assert f"drafters of class Eagle3 cannot be written for transformers: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda best: shutil.rmtree(best), "checkpoints/best holds no trained drafter (no drafter.json); run train first."),
        (
            lambda best: (best / "drafter.json").unlink(),
            "checkpoints/best holds no trained drafter (no drafter.json); run train first.",
        ),
        (lambda best: (best / "drafter.json").write_text("{"), "drafter.json is damaged"),
    ],
)
def test_a_run_without_a_drafter_is_refused_before_the_target_is_loaded(made, capsys, monkeypatch, damage, words):
    monkeypatch.setattr("drafttrain.commands.export.load", lambda config: pytest.fail("the target was loaded"))
    best = made[1] / "tiny" / "checkpoints" / "best"
    damage(best)
    assert export(made) == 2 and words in capsys.readouterr().err
    if (best / "drafter.json").exists():
        assert export(made, "--checkpoint", best) == 2
