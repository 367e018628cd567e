"""Every recipe on a shrunken copy of its target: trained for two steps by its own command, loaded, drafting; and what it says is plain decoding's.

Drafter, objective, optimizer and trainer are the recipe's, and the target has its layers; only sizes are small.
"""

from pathlib import Path

import pytest
import torch
from recipe_targets import REAL, RECIPES, save_target, shrunken
from test_recipes import name_of
from tiny_run import logged, make_run

from drafttrain.cli import main
from drafttrain.decoding.engine import Engine, generate
from drafttrain.decoding.measure import count
from drafttrain.decoding.methods import Chain, Method, Tree
from drafttrain.decoding.sampling import Sampling
from drafttrain.drafters.save import load_drafter
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.recipe_files import read_file
from drafttrain.target.load import load_target
from drafttrain.types import Request

DRAFT_VOCAB, CHUNK, RANK, LIMIT = 200, 16, 5, 16


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
    }
    if recipe.drafter.draft_vocab is not None:
        sizes["drafter.init_args.draft_vocab"] = DRAFT_VOCAB
    if getattr(recipe.drafter, "head_rank", None) is not None:
        sizes["drafter.init_args.head_rank"] = RANK
    if recipe.objective.chunk:
        sizes["objective.init_args.chunk"] = CHUNK
    return [(place, str(value)) for place, value in sizes.items()]


@pytest.fixture(params=RECIPES, ids=name_of)
def trained(request, tmp_path, folders):
    """(flags of the commands, recipe, target, run folder) behind `drafttrain train`."""
    path: Path = request.param
    changed = smaller(load_recipe([path])[0], folders[path.parent.name])
    recipe, notes = load_recipe([path], changed)
    assert notes == []
    target = load_target(recipe.target, device="cpu")
    taps = recipe.drafter.taps_of(target) if recipe.data.features == "stored" else None
    make_run(tmp_path / recipe.name, target, features=taps)
    flags = ["--config", str(path), "--runs", str(tmp_path)]
    flags += [part for place, value in changed for part in (f"--{place}", value)]
    assert main(["train", *flags]) == 0
    return flags, recipe, target, tmp_path / recipe.name


def requests_for(target) -> list[Request]:
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, target.vocab, (n,), generator=g).tolist() for n in (5, 17, 2)]
    return [Request(f"p{number}", tuple(ids), LIMIT) for number, ids in enumerate(prompts)]


def ways_of(path: Path, recipe: Recipe) -> list[Method]:
    """Those that the recipe's `bench` names, a chain, and a tree so wide that a drafter of two steps is right now and then."""
    drafts = recipe.validate.drafts
    named = recipe.bench.methods if "bench" in read_file(path).tree else []
    return [Chain(drafts), Tree(drafts, top_k=60, nodes=120), *named]


def says_what_the_target_says(target, net, ways: list[Method]) -> int:
    """Greedy answers against plain decoding, token for token; returns the number of accepted drafts."""
    requests, accepted = requests_for(target), 0
    plain = {rollout.key: rollout.ids.tolist() for rollout in generate(target, requests, slots=3)}
    for way in ways:
        proposer = way.prepare(target, net, requests).proposer(net, Sampling())
        rollouts = list(Engine(target, proposer=proposer, slots=2, debug=True).generate(requests))
        assert {rollout.key: rollout.ids.tolist() for rollout in rollouts} == plain, way.label
        count(rollouts, proposer.drafts, way.label)
        accepted += sum(sum(rollout.accepted) for rollout in rollouts)
    return accepted


def test_two_steps_a_drafter_and_its_drafts(trained):
    flags, recipe, target, run = trained
    losses = logged(run)
    assert losses.keys() == {1, 2} and all(0 < loss < 100 for loss in losses.values())
    net, record = load_drafter(run / "checkpoints" / "best", target)
    assert record["facts"]["position"]["step"] == 2 and net.config == recipe.drafter
    torch.manual_seed(recipe.data.seed)
    fresh = recipe.drafter.build(target, net.vocabulary).state_dict()
    still = [name for name, weight in net.state_dict().items() if torch.equal(weight, fresh[name])]
    assert not still  # every weight learnt something
    assert says_what_the_target_says(target, net, ways_of(Path(flags[1]), recipe)) > 3
