"""What `plan` refuses and warns of in on-policy recipes, against what training refuses and what its steps learn from."""

import pytest
from on_policy_forms import SMALL
from planning import BOTH, HYDRA, line, notes, on_policy_planner, trainer_of, warnings
from recipe_targets import REAL, RECIPES
from tiny_run import make_run

from drafttrain.commands.plan import arithmetic
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError
from drafttrain.recipe import load_recipe
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.run import Run
from drafttrain.topology import Topology


@pytest.fixture
def planned(tmp_path, target_folders, capsys):
    return on_policy_planner(tmp_path, target_folders("llama"), capsys)


@pytest.fixture
def began(tmp_path, tiny_llama, target_folders):
    return trainer_of(tmp_path, tiny_llama, target_folders("llama"))


# ---- what training would refuse -------------------------------------------------------------------------------------------------


def test_a_random_drafter_is_refused_as_training_does(planned, began):
    refused = began(SMALL | {"from_random": False})
    assert planned(code=2, on_policy={"from_random": False})[1][-1] == f"error: {refused}"


def test_a_run_that_goes_on_needs_no_start(planned, began):
    assert began(objective=OnPolicyDistillation()) == ""
    planned(on_policy={"from_random": False})


def test_processes_that_cannot_share_a_step_are_refused_as_training_does(planned, began, monkeypatch):
    refused = began(topology=Topology(3, 3, 0, 0, "cpu"))
    for name, value in {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert planned(code=2)[1][-1] == f"error: {refused}"
    assert "on_policy.batch is 4, which 3 processes" in refused


def test_an_objective_of_rounds_is_refused_where_there_are_none(planned, began):
    refused = began(None, objective=OnPolicyDistillation())
    assert planned(code=2, task="distill", objective=BOTH)[1][-1] == f"error: {refused}"
    assert planned(code=2, on_policy={"replay": "text"})[1][-1] == f"error: {refused}"
    assert began(SMALL | {"replay": "text"}, objective=OnPolicyDistillation()) == refused != ""
    for replay in ("rounds", "first_rejection"):
        planned(on_policy={"replay": replay})
        planned(on_policy={"replay": replay}, objective={"class_path": "Distillation"})


def test_what_first_rejections_or_few_steps_cannot_teach_is_refused_as_training_does(planned, began):
    """No place of a rejected draft is learnt with accepted_weight 0; and there must be a step for every one of a refresh."""
    refused = began(SMALL | {"replay": "first_rejection"}, objective=OnPolicyDistillation(accepted_weight=0.0))
    alone = {**BOTH, "init_args": {"accepted_weight": 0.0}}
    assert planned(code=2, on_policy={"replay": "first_rejection"}, objective=alone)[1][-1] == f"error: {refused}"
    planned(objective=alone)
    refused = began(trainer={"max_steps": 1})
    assert planned(code=2, trainer={"max_steps": 1})[1][-1] == f"error: {refused}"


def test_more_drafts_than_heads_are_refused(planned):
    _, lines = planned(HYDRA, code=2, on_policy={"drafts": 4})
    assert lines[-1].startswith("error: on_policy.drafts asks for 4 drafts in a row, but this Hydra drafts at most 3")
    planned(HYDRA, on_policy={"drafts": 3})


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("runs/first/checkpoints/best", "train the recipe named first first, which makes it, or "),
        ("runs/first/checkpoints/last_drafter", "train the recipe named first first, which makes it, or "),
        ("runs/first/export", "train the recipe named first first, which makes it, or "),
        ("elsewhere/first/best", ""),
        ("./a", ""),
    ],
)
def test_a_start_that_is_still_to_be_trained_is_refused_behind_the_plan(planned, where, first):
    for task in ("on_policy", "distill"):
        _, lines = planned(code=2, task=task, checkpoint={"start": where})
        assert (
            lines[-1]
            == f"error: checkpoint.start is {where}, but there is no such folder; {first}give an existing folder or a Hub id (owner/name)."
        )
        assert line(lines, f"checkpoint.start {where}: no such folder yet") and line(lines, "device (cpu)")


# ---- what is hardly meant --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, []),
        ({"data": {"length": 42}}, []),
        ({"data": {"length": 41}}, ["warning: a prompt of prepare.max_prompt 30 tokens and on_policy.max_tokens 12 make more than data.length 41"]),
        ({"trainer": {"accumulate_grad_batches": 4}}, []),
        ({"trainer": {"accumulate_grad_batches": 5}}, ["warning: trainer.accumulate_grad_batches is 5, but a process has 4 rollouts a step"]),
        ({"data": {"features": "stored"}}, ["warning: data.features is stored, but on-policy training"]),
        ({"objective": {"class_path": "Distillation"}}, ["note: of every round Distillation scores what was accepted"]),
        ({"objective": {"class_path": "Distillation"}, "on_policy": {"replay": "text"}}, []),
        ({"objective": {"class_path": "Distillation"}, "on_policy": {"replay": "first_rejection"}}, []),
        ({"on_policy": {"fresh": 1.0}}, []),  # 8 new ones for 2 steps of 4
        ({"on_policy": {"every": 4, "fresh": 0.5}}, []),
        ({"on_policy": {"every": 4, "fresh": 0.6}}, ["note: on_policy.fresh is 0.6, but 8 new rollouts for 4 steps of 4"]),
        ({"on_policy": {"every": 4, "fresh": 1.0, "buffer": 8}}, []),  # there are no others
    ],
)  # fmt: skip
def test_what_is_hardly_meant_is_said(planned, sections, said):
    found = notes(planned(**{"trainer": {"max_steps": 4}} | sections)[1])
    assert len(found) == len(said) and all(a.startswith(b) for a, b in zip(found, said, strict=True)), found


@pytest.mark.parametrize(("every", "buffer", "share"), [(4, 16, "50%"), (8, 32, "25%"), (8, 64, "25%"), (5, 32, "40%")])
def test_the_share_of_new_rollouts_is_what_steps_have(planned, every, buffer, share):
    """Of `every` draws of a lane two are new, while the older ones suffice."""
    _, lines = planned(on_policy={"every": every, "buffer": buffer, "fresh": 1.0}, trainer={"max_steps": 8})
    assert f": {share} of a step's are new; " in line(lines, "note: on_policy.fresh is 1")


def test_answers_that_are_cut_are_counted_where_there_are_chats(planned, tmp_path, tiny_llama):
    make_run(tmp_path / "tiny", tiny_llama)
    store = TokenStore.open(tmp_path / "tiny" / "data" / "train")
    prompts = {tuple(chat.ids[: chat.supervised.tolist().index(True)].tolist()) for chat in map(store.chat, range(len(store)))}
    longest = max(map(len, prompts))
    assert not notes(planned(data={"length": longest + 12})[1])
    for less in (1, 5):
        length = longest + 12 - less
        cut = sum(len(prompt) + 12 > length for prompt in prompts)
        [said] = notes(planned(data={"length": length})[1])
        assert said.startswith(
            f"warning: {cut} of {len(prompts)} prompts, the longest of {longest} tokens, and on_policy.max_tokens 12 make more than"
        )
        assert f"raise data.length to {longest + 12}, " in said


def test_a_section_that_nobody_reads_is_said(planned):
    [said] = warnings(planned(task="distill", on_policy={"rollouts": 8, "batch": 4})[1])
    assert said.startswith("warning: on_policy is set, but task is distill")
    assert not warnings(planned(task="distill")[1])


def test_learning_while_serving_is_told_where_it_is_set(planned):
    steady = {"optimizer": {"schedule": "constant"}}
    assert not [each for each in planned(**steady)[1] if each.startswith("adapt: ")]
    _, lines = planned(adapt={"every": 5, "fall": 0.1}, **steady)
    assert line(lines, "adapt: ").startswith(
        "adapt: learns 1 step(s) from the places of first rejected drafts of every 5 answers; "
    )
    assert not warnings(lines)
    [said] = warnings(planned(adapt={"every": 5, "buffer": 9}, **steady)[1])
    assert said.startswith("warning: no step of adapt reads its buffer of 9 answers")
    assert not warnings(planned(adapt={"every": 5, "buffer": 9, "steps": 2}, **steady)[1])
    [said] = warnings(planned(adapt={"every": 5}, optimizer={"schedule": "cosine"})[1])
    assert said.startswith("warning: adapt would refuse: optimizer.schedule is cosine")


def test_the_memory_of_a_step_is_that_of_training_alone_where_a_drafter_learns_while_serving(planned):
    sections = {"task": "distill", "optimizer": {"schedule": "constant"}}
    assert "adapt" not in line(planned(**sections)[1], "memory of a step on a GPU, ")
    told = "; adapt learns from answers instead, in steps as large as those are"
    said = line(planned(adapt={"every": 5}, **sections)[1], "memory of a step of train on a GPU, ")
    assert told in said and "recorded" not in said and "records" not in said
    sections["speed"] = {"compile": True, "graph_step": True}
    said = line(planned(adapt={"every": 5}, **sections)[1], "memory of a step of train on a GPU, ")
    assert "recorded step's copies" in said and f"{told}, and records none" in said


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if load_recipe([path])[0].task == "on_policy"],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_recipes_have_no_warning_and_wait_for_their_start(tmp_path, path):
    REAL[path.parent.name]().save_pretrained(tmp_path)
    recipe, _ = load_recipe([path], [("target.path", str(tmp_path))])
    lines = []
    with pytest.raises(UserError, match=r"train the recipe named [\w.-]+ first, which makes it"):
        for each in arithmetic(recipe, Run(tmp_path / "run"), Topology()):
            lines.append(each)
    assert not notes(lines) and line(lines, "device (cpu)")
