"""What `plan` promises, against what is then there: tensors on disk and in memory, and rows of a store."""

import json
import re
import shutil

import pytest
import torch
from drafters.test_faces import DRAFTERS as EVERY_DRAFTER
from planning import DRAFTERS, EAGLE, EAGLE3, HYDRA, MEDUSA, line, planner, refusal_of
from safetensors.torch import load_file, save_file
from tasks.test_taught import OBJECTIVES, PAIRS
from tiny_run import make_run, ragged_chats, start, write_store

from data_prep.featurize import Stored, featurize
from data_prep.team import ALONE
from drafttrain.commands.plan import outline
from drafttrain.commands.plan_taught import taught
from drafttrain.data.kept_rows import wanted_final
from drafttrain.data.store import TokenStore
from drafttrain.data.token_counts import count
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.vocabulary import choose_vocabulary
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter
from drafttrain.files import human_bytes
from drafttrain.losses import Distillation
from drafttrain.tasks.distill import require_taught
from drafttrain.vocab import DraftVocabulary


@pytest.fixture
def planned(tmp_path, target_folders, capsys):
    return planner(tmp_path, target_folders("llama"), capsys)


@DRAFTERS
def test_stored_features_are_known_to_the_byte(planned, tmp_path, tiny_llama, drafter):
    """Counts in the plan against the tensors that featurising leaves on disk."""
    recipe, _ = planned(drafter)
    make_run(tmp_path / "tiny", tiny_llama)
    store = TokenStore.open(tmp_path / "tiny" / "data" / "train")
    net = recipe.drafter.build(tiny_llama, choose_vocabulary(recipe.drafter, tiny_llama, count(store))[0])
    _, lines = planned(drafter)
    said = line(lines, "disk, features: ")
    featurize(store.folder, tiny_llama, Stored(net.needs.taps, "bfloat16", wanted_final(net.needs)), ALONE, say=lambda text: None)
    made = [load_file(file) for file in sorted(store.folder.glob("features-*.safetensors"))]
    taps, finals = (sum(part[name].numel() // tiny_llama.hidden for part in made) for name in ("taps", "final"))
    assert finals > 0 and (taps > 0) == (drafter is EAGLE3)
    assert f" {taps:,} states of {len(net.needs.taps)} taps + {finals:,} final states " in said
    assert said.endswith(f" = {human_bytes(sum(x.nbytes for part in made for x in part.values()))}")


@pytest.mark.parametrize(
    ("prepare", "tokens"),
    [
        ({}, 10 * 50),
        ({"greedy": True}, 20 * 50),
        ({"samples": 3, "count": 4}, 12 * 50),
        ({"prompts": [{"class_path": "JsonlPrompts", "init_args": {"path": "x", "count": 5, "turns": 2}}]}, 10 * 50),
        ({"prompts": [{"class_path": "JsonlPrompts", "init_args": {"path": "x", "turns": 2}}]}, None),
        ({"prompts": [{"class_path": "JsonlPrompts", "init_args": {"path": "x", "turns": 2}}], "count": 3}, 6 * 50),
        ({"prompts": [{"class_path": "JsonlPrompts", "init_args": {"path": "x", "count": 5}}]}, None),  # any number of turns
    ],
)
def test_before_there_are_chats_the_recipe_bounds_their_features(planned, prepare, tokens):
    for drafter, taps in ((EAGLE3, 3), (HYDRA, 0)):
        said = line(planned(drafter, prepare=prepare)[1], "disk, features: ")
        if tokens is None:
            assert said.endswith(f"= {human_bytes((taps + 1) * 64)} a token; how many tokens is known after data_prep")
        else:
            assert f"at most {tokens:,} tokens x ({taps} taps + 1 final state) x 32 numbers" in said
            assert said.endswith(f" = at most {human_bytes(tokens * (taps + 1) * 64)}")


def test_fp8_features_count_their_scales(planned):
    said = line(planned(HYDRA, data={"feature_dtype": "float8_e4m3fn"})[1], "disk, features: ")
    assert said.endswith(f"at most {human_bytes(10 * 50 * (32 + 4))}")


@DRAFTERS
def test_what_stays_on_the_device_is_what_a_net_and_its_target_hold(planned, tmp_path, tiny_llama, drafter):
    write_store(tmp_path / "tiny" / "data" / "train", ragged_chats(20, tiny_llama.vocab), tiny_llama.identity)
    recipe, lines = planned(drafter)
    vocabulary, _ = choose_vocabulary(recipe.drafter, tiny_llama, count(TokenStore.open(tmp_path / "tiny" / "data" / "train")))
    net = recipe.drafter.build(tiny_llama, vocabulary)
    weights = sum(weight.nbytes for weight in net.parameters())
    target = sum({weight.data_ptr(): weight.nbytes for weight in tiny_llama.model.parameters()}.values())
    head = 200 * tiny_llama.hidden * 4 if drafter is EAGLE else 0  # it alone speaks with the target's head on fewer words
    said = line(lines, "device (cpu)")
    assert f"target {human_bytes(target)} + drafter {human_bytes(weights)} + gradients {human_bytes(weights)} + Adam " in said
    assert (f" + head for the draft vocabulary {human_bytes(head)} = " in said) == bool(head)
    assert said.endswith(f" = {human_bytes(target + 4 * weights + head)}")


def test_logits_are_those_that_are_held_at_once(planned):
    """2 rows x 48 tokens x 3 heads x 320 tokens in fp32, or of a chunk of them."""
    elements = 2 * 48 * 3
    whole = line(planned(HYDRA)[1], "device, on top: ")
    assert whole.endswith(f"one copy of a micro-batch's logits is at most {human_bytes(elements * 320 * 4)}")
    for chunk in (16, elements, 10_000):
        said = line(planned(HYDRA, objective={"init_args": {"chunk": chunk}})[1], "device, on top: ")
        assert ("16 elements' (objective.init_args.chunk)" in said) == (chunk == 16)
        assert said.endswith(human_bytes(min(chunk, elements) * 320 * 4))


@pytest.mark.parametrize("section", ["checkpoint", "validate"])
def test_more_drafts_than_heads_are_refused_before_anything_is_loaded(planned, section):
    _, lines = planned(HYDRA, code=2, **{section: {"drafts": 4}})
    assert re.match(rf"error: {section}\.drafts asks for 4 drafts in a row, but this Hydra drafts at most 3", lines[-1])
    if section == "checkpoint":
        planned(HYDRA, checkpoint={"drafts": 4, "tau_prompts": 0})


def test_a_drafter_without_taps_or_head_of_its_own(planned):
    """A full vocabulary through the target's head: nothing is trained or copied for a token."""
    lines = planned(HYDRA)[1]
    D, K, I = 32, 16, 48  # noqa: E741
    trained = 2 * (2 + 3 + 4) * D * D + 3 * D + (2 * D * D + 2 * D * K + 3 * D * I) + 3 * D
    assert line(lines, "parameters: ").startswith(f"parameters: {trained:,} trained, ")
    # Weights and both of Adam's averages.
    assert f"{human_bytes(12 * trained)} to resume" in line(lines, "disk, checkpoints: ")


# ---- what training would refuse -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [EAGLE3, MEDUSA, EAGLE], ids=lambda drafter: drafter["class_path"])
def test_a_store_of_another_drafters_features_is_named(planned, tmp_path, tiny_llama, drafter):
    make_run(tmp_path / "tiny", tiny_llama, features=(0, 2, 3))
    _, lines = planned(drafter, code=2)
    assert lines[-1].startswith(f"error: {tmp_path}/tiny/data/train/ holds features of layers [0, 2, 3], but the recipe")
    assert "Set data.features to online" in lines[-1] and line(lines, "device (cpu)")  # behind all the rest
    planned(drafter, data={"features": "online"})


def test_a_store_whose_features_fit_or_are_still_to_be_made_passes(planned, tmp_path, tiny_llama):
    make_run(tmp_path / "tiny", tiny_llama, features=(0, 1, 3))
    assert not [each for each in planned()[1] if "holds no features" in each]
    planned({"class_path": "DFlash", "init_args": {"taps": [0, 1, 3], "draft_vocab": 200, "block": 4}})
    planned(data={"feature_dtype": "float8_e4m3fn"}, code=2)
    shutil.rmtree(tmp_path / "tiny")
    make_run(tmp_path / "tiny", tiny_llama)
    assert planned()[1][-1] == f"{tmp_path}/tiny/data/train/ holds no features yet: run data_prep before training"


DSPARK = {"class_path": "DSpark", "init_args": {"block": 4, "layers": 1, "taps": [0, 2], "rank": 4, "mask_token": 319}}
HARD = {"init_args": {"divergences": ["HardCrossEntropy"]}}


def test_what_would_not_be_taught_is_refused_in_the_words_of_training(planned):
    """DSpark's confidence learns from Confidence alone; and a drafter whose states alone are taught has no head to speak with."""
    states = {"init_args": {"divergences": ["SmoothL1"]}}
    for drafter, objective, part in (
        (DSPARK, HARD, "confidence_head of this DSpark"),
        (EAGLE3, states, "lm_head of this Eagle3"),
    ):
        _, lines = planned(drafter, code=2, objective=objective)
        assert lines[-1].startswith(
            f"error: the divergences of objective.init_args teach nothing to {part}, which would be served"
        )
    sure = {"init_args": {"divergences": ["HardCrossEntropy", "Confidence"]}}
    without = {**DSPARK, "init_args": {**DSPARK["init_args"], "confidence": False}}
    for drafter, objective in ((DSPARK, sure), (without, HARD), (EAGLE3, HARD)):
        _, lines = planned(drafter, objective=objective)
        assert line(lines, "parameters: ") and not [each for each in lines if "teaches every weight" in each]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_an_outline_tells_of_every_drafter_what_weights_tell(planned, targets, target_folders, architecture, chunk):
    """All drafters and objectives: the graph of tensors without memory against that of a net and a target with weights."""
    recipe, _ = planned(target={"path": str(target_folders(architecture))})
    target, (sketch, _), told = targets(architecture), outline(recipe), []
    for name, asked in PAIRS:
        config, objective = EVERY_DRAFTER[name], Distillation(OBJECTIVES[asked], chunk=chunk)
        vocabulary = DraftVocabulary(torch.arange(0, 320, 2), 320)
        with torch.device("meta"):
            net = config.build(sketch, vocabulary)
        told.append(refusal_of(taught, sketch, net, vocabulary, objective))
        assert told[-1] == refusal_of(require_taught, target, config.build(target, vocabulary), objective), (name, asked)
    assert 10 < sum(map(bool, told)) < len(told) - 10


def test_an_outline_that_cannot_tell_says_so(planned, monkeypatch):
    """Code that looks at a value: meta tensors have none."""
    monkeypatch.setattr("drafttrain.commands.plan_taught.require_taught", lambda *args: torch.empty(1, device="meta").item())
    said = line(planned()[1], "whether the objective teaches every weight ")
    assert said == "whether the objective teaches every weight is seen when training starts (RuntimeError)"


@pytest.fixture
def trained(tmp_path, tiny_llama):
    """A drafter with 200 tokens as training saves it."""
    config = Eagle3(taps=[0, 1, 3], depth=2, draft_vocab=200)
    net = config.build(tiny_llama, DraftVocabulary(torch.arange(40, 240), tiny_llama.vocab))
    save_drafter(tmp_path / "trained", net, config, tiny_llama.identity, {})
    return tmp_path / "trained"


@pytest.mark.parametrize("data", [False, True])
def test_what_training_would_begin_from_is_read_and_told(planned, tmp_path, tiny_llama, target_folders, capsys, trained, data):
    """Before there is a store and behind it; and training says the same line, the note about tokens among them."""
    if data:
        make_run(tmp_path / "tiny", tiny_llama)
    sections = {"data": {"features": "online"}, "checkpoint": {"start": str(trained)}}
    _, lines = planned(**sections)
    begun = line(lines, f"starting from {trained}: a drafter of drafttrain, ")
    assert not [each for each in lines if "another target" in each]
    tensors = len(load_file(trained / "drafter.safetensors")) - 1  # d2t
    assert begun.endswith(f" {tensors} tensors")
    assert line(lines, "draft vocabulary: ").startswith(
        "draft vocabulary: 200 tokens of the checkpoint, " if data else "draft vocabulary: the checkpoint's 200 tokens, "
    )
    if data:
        start(
            tmp_path / "tiny",
            target_folders("llama"),
            drafter={"taps": [0, 1, 3], "depth": 2},
            checkpoint={"start": str(trained)},
        )
        said = capsys.readouterr().out.splitlines()
        assert begun in said and line(lines, "draft vocabulary: ") in said
        assert f"checkpoint.start {trained} is not read again: the run goes on from its own checkpoint" in planned(**sections)[1]


def test_a_published_drafter_is_planned_with_the_targets_own_tables_left_out(planned, tmp_path, tiny_llama, trained):
    """An export of ours is EAGLE-3's published layout; those of others bring embeddings along, which an outline cannot compare."""
    net = load_drafter(trained, tiny_llama)[0]
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None, {})
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    tensors["embed_tokens.weight"] = tiny_llama.embedding_weight.clone()
    save_file(tensors, tmp_path / "export" / "model.safetensors")
    (tmp_path / "export" / "drafttrain.json").unlink()  # holds the sum of the weights as we exported them
    _, lines = planned(data={"features": "online"}, checkpoint={"start": str(tmp_path / "export")})
    assert line(lines, f"starting from {tmp_path}/export: ")


def test_a_block_drafters_export_is_planned_where_the_recipe_leaves_its_mask_to_be_chosen(planned, tmp_path, tiny_llama):
    """A plan has no tokenizer to choose one by; two that are named are compared."""
    given = {"taps": [0, 1, 3], "block": 4, "layers": 1, "draft_vocab": None}
    mask = 200
    net = DFlash(**given, mask_token=mask).build(tiny_llama, DraftVocabulary(torch.arange(tiny_llama.vocab), tiny_llama.vocab))
    export_drafter(net, tiny_llama, tmp_path / "export", ExportConfig(), None, {})

    def plan(token, code=0) -> list[str]:
        drafter = {"class_path": "DFlash", "init_args": {**given, "mask_token": token}}
        return planned(drafter, code=code, data={"features": "online"}, checkpoint={"start": str(tmp_path / "export")})[1]

    assert line(plan(None), f"starting from {tmp_path}/export: ") and line(plan(mask), f"starting from {tmp_path}/export: ")
    assert f"drafter.init_args.mask_token is {mask + 1}, its own {mask}" in plan(mask + 1, code=2)[-1]


def test_a_start_that_is_not_there_or_does_not_fit_is_refused(planned, tmp_path, trained):
    def refusal(drafter=EAGLE3, **checkpoint) -> str:
        return planned(drafter, code=2, checkpoint=checkpoint)[1][-1]

    assert "there is no such folder" in refusal(start=str(tmp_path / "none"))
    assert "drafter.class_path is Hydra; set that to Eagle3" in refusal(HYDRA, start=str(trained))
    other = {"class_path": "Eagle3", "init_args": {"taps": [0, 1, 2], "depth": 2, "draft_vocab": 200}}
    assert "drafter.init_args.taps is [0, 1, 2], its own [0, 1, 3]" in refusal(other, start=str(trained))
    tensors = load_file(trained / "drafter.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"][:, :-1].contiguous()}, trained / "drafter.safetensors")
    assert "is not the file that was saved (its sha256 is not the one in drafter.json)" in refusal(start=str(trained))
    record = json.loads((trained / "drafter.json").read_text())
    del record["weights"]  # as an earlier version saved it
    (trained / "drafter.json").write_text(json.dumps(record))
    assert re.search(r"fc\.weight is \[32, 95\] instead of \[32, 96\]", refusal(start=str(trained)))
    (trained / "drafter.safetensors").write_bytes(b"cut short")
    assert "drafter.safetensors is damaged" in refusal(start=str(trained))
    [said] = [each for each in planned(checkpoint={"start": "owner/name"})[1] if "owner/name" in each and "Hub id" in each]
    assert said.endswith("it is fetched and checked when training starts")


def processes(monkeypatch, world: int, rank: int = 0) -> None:
    for name, value in {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))


def test_several_processes_plan_once(planned, monkeypatch):
    """The first one speaks, and its code is that of all."""
    processes(monkeypatch, 2)
    assert line(planned()[1], "processes: ") == "processes: 2 process(es) on 1 machine(s), cpu"
    assert planned(code=2, data={"length": 3})[1][-1].startswith("error: ")
    processes(monkeypatch, 2, rank=1)
    assert planned()[1] == []


def test_what_zero_divides_is_counted_for_the_processes_of_the_plan(planned, monkeypatch):
    def told(stage: int) -> tuple[dict[str, float], str]:
        said = line(planned(trainer={"strategy": f"deepspeed_stage_{stage}"})[1], "memory of a step")
        return {name: float(size) for name, size in re.findall(r"(\w+'s weights) ([\d.]+) kB", said)}, said

    whole, said = told(2)
    assert "optimizer, gradients among 1 process(es): this plan has one; torchrun" in said
    processes(monkeypatch, 2)
    for stage, divided in {2: set(), 3: set(whole)}.items():
        parts, said = told(stage)
        assert said.endswith("among 2 process(es)") and f"ZeRO-{stage} divides optimizer, gradients" in said
        assert {name for name in whole if parts[name] == pytest.approx(whole[name] / 2, rel=0.02)} == divided


def test_the_most_that_a_step_holds_is_told_or_that_it_cannot_be(planned, monkeypatch):
    """Parts and sum; more rows hold more; a model that looks at numbers costs the plan one line."""

    def told(**sections):
        return line(planned(EAGLE3, **sections)[1], "memory of a step")

    found = {rows: told(data={"rows": rows}) for rows in (4, 8)}
    assert all(said.startswith("memory of a step on a GPU, each process: target's weights ") for said in found.values())
    elements, megabytes = (
        {rows: float(re.search(words, said)[1]) for rows, said in found.items()}
        for words in (r"\((\d+) el", r"forward ([\d.]+) MB")
    )
    assert elements[8] == 2 * elements[4] and 1.5 < megabytes[8] / megabytes[4] < 2.1
    assert "speed.compile" not in found[4] and "speed.compile holds less" in told(speed={"compile": True})

    def refuses(*args):
        raise RuntimeError("a value is looked at")

    monkeypatch.setattr("drafttrain.commands.plan_memory.peak_of", refuses)
    assert told() == "memory of a step: cannot be told without running one (RuntimeError: a value is looked at)"
