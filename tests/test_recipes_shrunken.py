"""Every recipe on a shrunken copy of its target: trained for two steps, exported and read back by the commands; what its drafts lead to is
plain decoding's answer. One that begins from another recipe's drafter begins from that one's two steps, on its data.

Drafter, objective, optimizer and trainer are the recipe's, and the target has its layers; only sizes are small.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from recipe_targets import REAL, RECIPES, save_target, shrunken
from test_recipes import name_of, started_from
from tiny_run import logged, make_run

from data_prep.__main__ import main as data_prep
from drafttrain.cli import main
from drafttrain.decoding.engine import Engine, generate
from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import Chain, Method, Tree
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.save import load_drafter
from drafttrain.export.export import load_export
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.recipe_files import read_file
from drafttrain.target.load import load_target
from drafttrain.types import Request

DRAFT_VOCAB, CHUNK, RANK, GROUP, LIMIT = 200, 16, 5, 8, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of recipes -> folder of the shrunken target."""
    return {name: save_target(shrunken(config()), tmp_path_factory.mktemp(name)) for name, config in REAL.items()}


def smaller(recipe: Recipe, folder: Path) -> list[tuple[str, str]]:
    """The sizes that are changed, and nothing else."""
    sizes = {
        "target.path": folder,
        "target.dtype": "float32",  # one token and several then lead to the same first choices
        "data.length": 48,
        "data.rows": min(recipe.data.rows, 2),
        "data.workers": 0,
        "optimizer.warmup_steps": 1,
        "trainer.max_steps": 2,
        "trainer.log_every_n_steps": 1,
        "checkpoint.tau_every": 2,
        "checkpoint.tau_prompts": 2,
        "checkpoint.tau_tokens": 8,
        "export.dtype": "float32",  # what is read back is then what was trained
    }
    if recipe.drafter.draft_vocab is not None:
        sizes["drafter.init_args.draft_vocab"] = DRAFT_VOCAB
    if getattr(recipe.drafter, "head_rank", None) is not None:
        sizes["drafter.init_args.head_rank"] = RANK
    if getattr(recipe.drafter, "group", None) is not None:
        sizes["drafter.init_args.group"] = GROUP
    if recipe.objective.chunk:
        sizes["objective.init_args.chunk"] = CHUNK
    if recipe.task == "on_policy":
        counts = {"rollouts": 4, "every": 1, "batch": 2, "buffer": 4, "max_tokens": LIMIT, "slots": 2}
        sizes |= {f"on_policy.{name}": value for name, value in counts.items()}
        sizes["trainer.accumulate_grad_batches"] = 2
    return [(place, str(value)) for place, value in sizes.items()]


@pytest.fixture(params=RECIPES, ids=name_of)
def trained(request, tmp_path, folders):
    """(flags of the commands, recipe, target, run folder) behind `drafttrain train`."""
    path: Path = request.param
    return two_steps(path, tmp_path, folders[path.parent.name])


def two_steps(path: Path, runs: Path, target_folder: Path):
    """As `trained` says."""
    changed = smaller(load_recipe([path])[0], target_folder)
    if load_recipe([path])[0].lora.rank is not None:
        pytest.importorskip("peft")
    first = started_from(path)
    if first is not None:
        began = two_steps(first, runs, target_folder)[-1]
        changed.append(("checkpoint.start", str(began / "checkpoints" / "best")))
        changed.append(("checkpoint.tau_prompts", "0"))  # the newest is the best one, also where two steps made it no better
    recipe, notes = load_recipe([path], changed)
    assert notes == []
    target = load_target(recipe.target, device="cpu")
    run = runs / recipe.name
    if first is None:
        make_run(run, target, features=recipe.drafter.taps_of(target) if recipe.data.features == "stored" else None)
    else:
        run.mkdir()
        (run / "data").symlink_to(Path("..") / began.name / "data")
    flags = ["--config", str(path), "--runs", str(runs)]
    flags += [part for place, value in changed for part in (f"--{place}", value)]
    assert main(["train", *flags]) == 0
    return flags, recipe, target, run


def beginning(recipe: Recipe, target, vocabulary) -> dict[str, torch.Tensor]:
    """The weights before the first step."""
    if recipe.checkpoint.start is not None:
        return load_drafter(Path(recipe.checkpoint.start), target)[0].state_dict()
    torch.manual_seed(recipe.data.seed)
    return recipe.drafter.build(target, vocabulary).state_dict()


def requests_for(target) -> list[Request]:
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, target.vocab, (n,), generator=g).tolist() for n in (5, 17, 2)]
    return [Request(f"p{number}", tuple(ids), LIMIT) for number, ids in enumerate(prompts)]


def ways_of(path: Path, recipe: Recipe) -> list[Method]:
    """Those that the recipe's `bench` names, a chain, and a tree so wide that a drafter of two steps is right now and then."""
    drafts = recipe.validate.drafts
    named = recipe.bench.methods if "bench" in read_file(path).tree else []
    return [Chain(drafts), Tree(drafts, top_k=40, nodes=80), *named]


def drafts_of(target, net, ways: list[Method]) -> list[dict[str, list[int]]]:
    """Accepted drafts of every round, for each way and prompt; and every greedy answer is plain decoding's, token for token."""
    requests, found = requests_for(target), []
    plain = {rollout.key: rollout.ids.tolist() for rollout in generate(target, requests, slots=3)}
    for way in ways:
        proposer = way.prepare(target, net, requests).proposer(net, Sampling())
        rollouts = list(Engine(target, proposer=proposer, slots=2, debug=True).generate(requests))
        assert {rollout.key: rollout.ids.tolist() for rollout in rollouts} == plain, way.label
        count(rollouts, proposer.drafts, way.label)
        found.append({rollout.key: rollout.accepted for rollout in rollouts})
    return found


def test_two_steps_an_export_and_its_drafts(trained):
    flags, recipe, target, run = trained
    losses = logged(run)
    assert losses.keys() == {1, 2} and all(0 < loss < 100 for loss in losses.values())
    newest, record = load_drafter(run / "checkpoints" / "last_drafter", target)
    assert record["facts"]["position"]["step"] == 2
    before = beginning(recipe, target, newest.vocabulary)
    still = {name for name, weight in newest.state_dict().items() if torch.equal(weight, before[name])}
    frozen = set() if recipe.lora.rank is None else {name for name in before if "norm" in name or name in newest.words}
    assert still == frozen  # every weight learnt something
    net, record = load_drafter(run / "checkpoints" / "best", target)
    assert net.config == recipe.drafter
    assert record["facts"]["position"]["step"] == 2
    ways = ways_of(Path(flags[1]), recipe)
    drafts = drafts_of(target, net, ways)
    assert sum(sum(accepted) for way in drafts for accepted in way.values()) > 0

    assert main(["export", *flags]) == 0
    reloaded = load_export(run / "export", target)
    assert drafts_of(target, reloaded, ways) == drafts


def test_two_methods_share_one_data_folder(tmp_path, folders, capsys):
    """As recipes/README.md says: a link, after which data_prep finds everything done and both train on the same chats."""
    prompts = [{"class_path": "JsonlPrompts", "init_args": {"path": str(tmp_path / "prompts.jsonl"), "name": "sharegpt"}}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"count {n} to {9 * n}"}) + "\n" for n in range(14)))
    here = {
        "prepare.prompts": json.dumps(prompts), "prepare.engine": "LocalEngine", "prepare.held_out": "3", "prepare.max_tokens": "12",
        "prepare.held_out_max_tokens": "12", "prepare.near_duplicate": "1.0",
    }  # fmt: skip
    runs, seen = {}, []
    for method in ("eagle3", "hydra-plus"):
        [path] = [path for path in RECIPES if path.parent.name == "qwen3-8b" and path.stem == method]
        changed = dict(smaller(load_recipe([path])[0], folders["qwen3-8b"])) | here
        flags = ["--config", str(path), "--runs", str(tmp_path), *(part for k, v in changed.items() for part in (f"--{k}", v))]
        runs[method] = tmp_path / f"qwen3-8b-{method}"
        if method == "hydra-plus":
            runs[method].mkdir()
            (runs[method] / "data").symlink_to(Path("..") / runs["eagle3"].name / "data")
            before = snapshot(runs["eagle3"] / "data" / "train")
        assert data_prep(flags) == 0
        capsys.readouterr()
        assert main(["train", *flags]) == 0
        seen.append(re.findall(r"epochs of (\d+ chats, [\d,]+ tokens)", capsys.readouterr().out))
    assert snapshot(runs["eagle3"] / "data" / "train") == before
    assert seen[0] == seen[1] and len(seen[0]) == 1


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> (bytes, nanosecond of the last change) of every file."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir()}
