"""Every YAML in recipes/ parses, what it asks of Lightning exists there, and its drafter fits its target: weights are counted by hand.

Letters of the counts: D width, K width of all keys, I inner width of the block, V draft vocabulary.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
from recipe_targets import REAL, RECIPES, ROOT
from torch.nn.parallel import DistributedDataParallel

from drafttrain.commands.plan import arithmetic, outline
from drafttrain.drafters.dflash import DFlash
from drafttrain.drafters.dflash2 import DFlash2
from drafttrain.drafters.dspark import DSpark
from drafttrain.drafters.eagle import Eagle
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.heads import Hydra, Medusa
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.p_eagle import PEagle
from drafttrain.recipe import Recipe, load_recipe
from drafttrain.recipe_files import read_file
from drafttrain.replay_loss import OnPolicyDistillation
from drafttrain.run import Run
from drafttrain.topology import Topology
from drafttrain.vocab import DraftVocabulary

HARDWARE = sorted((ROOT / "recipes" / "hardware").glob("*.yaml"))
EIGHT_BILLION = [path for path in RECIPES if path.parent.name.endswith("-8b")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes").with_suffix(""))


def started_from(path: Path) -> Path | None:
    """The recipe whose run `checkpoint.start` of another names."""
    start = load_recipe([path])[0].checkpoint.start
    if start is None:
        return None
    return {Path("runs") / name_of(other).replace("/", "-") / "checkpoints" / "best": other for other in RECIPES}[Path(start)]


def test_they_are_there():
    assert {path.parent.name for path in RECIPES} == set(REAL)
    assert {name_of(path) for path in EIGHT_BILLION} == {
        f"{target}/{method}" for target in ("qwen3-8b", "llama3.1-8b") for method in ("eagle3", "hydra-plus", "dflash", "dspark")
    } | {"qwen3-8b/dflash-opd"}
    assert {path.stem for path in HARDWARE} >= {"cpu", "ddp", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_recipe_parses(path):
    recipe, notes = load_recipe([path])
    assert isinstance(recipe, Recipe) and notes == []
    assert recipe.trainer["max_steps"] >= 1
    assert recipe.name == name_of(path).replace("/", "-")  # two recipes never share a run folder
    assert recipe.target.path.startswith("package:") or recipe.target.path.count("/") == 1  # nothing of anybody's machine


def test_recipes_of_one_target_can_share_their_data():
    """`prepare` is the same for all that may be compared; the quickstart's alone is small enough for a laptop, and adapters are for another domain."""
    for folder in REAL:
        of_target = [load_recipe([path])[0] for path in RECIPES if path.parent.name == folder]
        asked = [recipe.prepare for recipe in of_target if recipe.name != "smollm2-135m-eagle3" and recipe.lora.rank is None]
        assert len(asked) > 1 and all(prepare == asked[0] for prepare in asked)


@pytest.mark.parametrize("path", [path for path in RECIPES if load_recipe([path])[0].checkpoint.start], ids=name_of)
def test_what_begins_from_another_recipes_drafter_has_that_drafter(path):
    """The run that `checkpoint.start` names is a recipe's, of the same drafter and target; warm-up is the share of the steps that is said."""
    recipe, _ = load_recipe([path])
    began, _ = load_recipe([started_from(path)])
    for section in ("drafter", "target", "validate", "bench"):
        assert getattr(recipe, section) == getattr(began, section)
    if recipe.lora.rank is None:
        assert f"../{began.name}/data runs/{recipe.name}/data" in path.read_text()  # the link to its data folder
    [share] = re.findall(r"warmup_steps: \d+ +# ([\d.]+)% of the steps", path.read_text())
    assert recipe.optimizer.warmup_steps == round(float(share) / 100 * recipe.trainer["max_steps"] + 1e-9)


@pytest.mark.parametrize(("method", "base"), [("dflash", "dflash"), ("eagle3", "eagle3-h100")])
def test_the_control_of_an_on_policy_recipe_differs_in_what_it_learns_from_alone(method, base):
    supervised, on_policy, control = (
        load_recipe([ROOT / "recipes" / "smollm2-135m" / f"{name}.yaml"])[0]
        for name in (base, f"{method}-opd", f"{method}-continue")
    )
    assert (on_policy.task, control.task) == ("on_policy", "distill")
    assert on_policy.checkpoint.start == control.checkpoint.start == f"runs/{supervised.name}/checkpoints/best"
    for name in ("lr", "betas", "weight_decay", "schedule", "final_lr_fraction"):
        assert getattr(on_policy.optimizer, name) == getattr(control.optimizer, name), name
    assert (control.objective, control.data) == (supervised.objective, supervised.data)
    for name in ("tau_prompts", "tau_tokens", "drafts"):
        assert getattr(on_policy.checkpoint, name) == getattr(control.checkpoint, name), name


@pytest.mark.parametrize("name", ["smollm2-135m/dflash-opd", "qwen3-8b/dflash-opd"])
def test_draft_opd_writes_its_papers_objective_out(name):
    """The defaults are the paper's, and the recipe says them, but for the memory that it takes."""
    recipe, _ = load_recipe([ROOT / "recipes" / f"{name}.yaml"])
    assert recipe.objective == OnPolicyDistillation(chunk=recipe.objective.chunk)
    assert recipe.on_policy.replay == "rounds" and recipe.on_policy.temperature == 0.0 and recipe.optimizer.lr == 3e-4


@pytest.mark.parametrize("path", HARDWARE, ids=lambda path: path.stem)
def test_hardware_says_only_what_belongs_to_the_machine_and_fits_lightning(path):
    from lightning.pytorch import Trainer, strategies

    assert set(read_file(path).tree) <= {"trainer", "speed"}
    trainer = load_recipe([RECIPES[0], path])[0].trainer
    assert set(trainer) <= set(inspect.signature(Trainer).parameters)
    strategy = trainer["strategy"]
    if isinstance(strategy, dict):
        cls = getattr(strategies, strategy["class_path"].removeprefix("lightning.pytorch.strategies."))
        handed_on = DistributedDataParallel if cls is strategies.DDPStrategy else cls  # what DDP's does not know it hands on
        known = {name for signed in (cls, handed_on) for name in inspect.signature(signed).parameters}
        assert set(strategy["init_args"]) <= known


def test_the_table_of_recipes_is_complete():
    """Every file is linked from recipes/README.md, and every link leads to a file."""
    linked = re.findall(r"\]\(([\w./-]+\.yaml)\)", (ROOT / "recipes" / "README.md").read_text())
    assert sorted(linked) == sorted(str(path.relative_to(ROOT / "recipes")) for path in [*RECIPES, *HARDWARE])


# ---- in real sizes, on the meta device -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folder of recipes -> a folder with the target's config.json alone."""
    folders = {name: tmp_path_factory.mktemp(name) for name in REAL}
    for name, folder in folders.items():
        REAL[name]().save_pretrained(folder)
    return folders


def on_meta(path, configs):
    anew = [("checkpoint.start", "null"), ("lora.rank", "null")]
    recipe, _ = load_recipe([path], [("target.path", str(configs[path.parent.name])), *anew])
    target, reason = outline(recipe)
    assert target is not None, reason
    assert target.device.type == "meta"
    return recipe, target


def weights_by_hand(drafter, config) -> int:
    """Weights that are trained, from the formulas at the top of each drafter's file."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741
    head_dim = getattr(config, "head_dim", None) or D // config.num_attention_heads
    Q, K = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    V = drafter.draft_vocab or config.vocab_size

    def block(inputs):
        """Queries, two of keys and values, output, three matrices of the MLP."""
        return inputs * Q + 2 * inputs * K + Q * D + 3 * D * I

    if isinstance(drafter, Eagle3):
        taps = len(drafter.taps) or 3
        head = D * V if drafter.head_rank is None else drafter.head_rank * (D + V)
        norms = 4 + (taps if drafter.fc_norm else 0)  # of embedding, of state, inside the block, behind it
        return taps * D * D + block(2 * D) + norms * D + head
    if isinstance(drafter, Eagle):
        return 2 * D * D + block(D) + D
    if isinstance(drafter, PEagle):
        taps = len(drafter.taps) or 3
        inputs = taps * D * D + taps * D + (taps * D if drafter.fc_norm else 0)  # fc, the masked state, norms of taps
        return inputs + block(2 * D) + 3 * D + (drafter.layers - 1) * (block(D) + 2 * D) + D + D * V
    if isinstance(drafter, DFlash | DFlash2 | DSpark):
        taps = len(drafter.taps) or drafter.layers
        total = taps * D * D + drafter.layers * (block(D) + 2 * D + 2 * head_dim) + 2 * D  # a norm of the context, one at the end
        if isinstance(drafter, DSpark):
            total += drafter.rank * (config.vocab_size + V) + D + drafter.rank + 1  # Markov head, confidence head
        if isinstance(drafter, DFlash2):
            total += drafter.layers * 2 * (4 * D + 4 * D * D // drafter.group)  # kernels of four taps, and what moves them
            total += drafter.rank * (config.vocab_size + V + D)
        return total
    if isinstance(drafter, Independent):
        own, inner = drafter.hidden, drafter.intermediate
        every = 2 * own * drafter.head_dim * (drafter.heads + drafter.kv_heads) + 3 * own * inner + 2 * own
        return V * own + drafter.layers * every + own
    assert isinstance(drafter, Hydra | Medusa) and not drafter.own_heads
    total = 0
    for k in range(1, drafter.heads + 1):
        inputs = (k + 1) * D if isinstance(drafter, Hydra) else D
        projection = inputs * D if inputs != D else 0
        total += projection + inputs * D + D + (drafter.layers - 1) * (D * D + D)
    if isinstance(drafter, Hydra) and drafter.prefix:
        total += block(D) + 3 * D
    return total


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_trained_weights_are_those_counted_by_hand(path, configs):
    recipe, target = on_meta(path, configs)
    size = recipe.drafter.draft_vocab
    vocabulary = DraftVocabulary.full(target.vocab) if size is None else DraftVocabulary(torch.arange(size), target.vocab)
    with torch.device("meta"):
        net = recipe.drafter.build(target, vocabulary)
    assert {weight.device.type for weight in net.parameters()} == {"meta"}
    trained = sum(weight.numel() for weight in net.parameters())
    assert trained == weights_by_hand(recipe.drafter, REAL[path.parent.name]())
    planned = arithmetic(recipe, Run(configs[path.parent.name] / "none"), Topology())
    assert any(line.startswith(f"parameters: {trained:,} trained, ") for line in planned), planned


def test_the_weights_of_the_8b_recipes_in_numbers(configs):
    """By pocket calculator, so that a fault shared by both formulas shows."""
    found = {}
    for path in EIGHT_BILLION:
        recipe, _ = on_meta(path, configs)
        found[name_of(path)] = weights_by_hand(recipe.drafter, REAL[path.parent.name]())
    # fc 3x4096^2 + block (2x4096x4096 + 4x4096x1024 + 4096^2 + 3x4096xI) + 4x4096 + 32000x4096
    assert found["qwen3-8b/eagle3"] == 50331648 + (33554432 + 16777216 + 16777216 + 150994944) + 16384 + 131072000 == 399_523_840
    assert found["llama3.1-8b/eagle3"] == 50331648 + (33554432 + 16777216 + 16777216 + 176160768) + 16384 + 131072000
    # 2x(2+3+4+5)x4096^2 + 3 further layers of 4 heads + 16 biases + block (2x4096^2 + 2x4096x1024 + 3x4096xI) + 3x4096
    heads = 28 * 16777216 + 12 * 16777216 + 16 * 4096
    assert found["qwen3-8b/hydra-plus"] == heads + (33554432 + 8388608 + 150994944) + 12288
    assert found["llama3.1-8b/hydra-plus"] == heads + (33554432 + 8388608 + 176160768) + 12288 == 889_270_272
    # fc 5x4096^2 + 5 layers of (2x4096^2 + 2x4096x1024 + 3x4096xI + 2x4096 + 2x128) + 2x4096
    dflash = 83886080 + 5 * (33554432 + 8388608 + 8192 + 256) + 8192
    assert found["qwen3-8b/dflash"] == dflash + 5 * 150994944 == 1_048_626_432
    assert found["qwen3-8b/dflash-opd"] == found["qwen3-8b/dflash"]
    assert found["llama3.1-8b/dflash"] == dflash + 5 * 176160768
    # DFlash's, and 2x256xV + (4096 + 256 + 1)
    assert found["qwen3-8b/dspark"] == 1_048_626_432 + 77_791_232 + 4353 == 1_126_422_017
    assert found["llama3.1-8b/dspark"] == found["llama3.1-8b/dflash"] + 65_667_072 + 4353
    rows = (ROOT / "recipes" / "README.md").read_text().splitlines()
    for name, weights in found.items():
        [row] = [row for row in rows if f"({name}.yaml)" in row]
        assert f"| {weights:,} |" in row


@pytest.mark.parametrize("path", [path for path in EIGHT_BILLION if path.stem == "eagle3"], ids=name_of)
def test_taps_left_out_are_those_of_the_released_code(path, configs):
    """Inputs of layers 2, L//2 and L-3 are the outputs of the layers before them."""
    recipe, target = on_meta(path, configs)
    assert recipe.drafter.taps == []
    assert recipe.drafter.taps_of(target) == (2 - 1, target.layers // 2 - 1, target.layers - 3 - 1)


def test_taps_of_block_drafters_left_out_are_the_published_ones(configs):
    """As the paper's code of DSpark gives them for 36 layers, by number."""
    for method in ("dflash", "dspark"):
        [path] = [path for path in EIGHT_BILLION if name_of(path) == f"qwen3-8b/{method}"]
        recipe, target = on_meta(path, configs)
        assert recipe.drafter.taps == [] and recipe.drafter.taps_of(target) == (1, 9, 17, 25, 33)
