"""Recipes: what is merged, what is refused, and that a refusal is one sentence naming what was typed."""

import re
from dataclasses import dataclass

import pytest
import yaml

from drafttrain.decoding.methods import Method
from drafttrain.divergences import JSD, LKAlpha, SmoothL1, SoftCrossEntropy
from drafttrain.drafters.base import DrafterConfig
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.losses import Distillation
from drafttrain.position_weights import Decay, DPace, Uniform
from drafttrain.recipe import BASES, Recipe, build_recipe, load_recipe, sections_help
from drafttrain.recipe_build import choices, nearest, places
from drafttrain.recipe_files import Written, load_value
from drafttrain.run import Run, dump_yaml

BASE = """\
name: test
target: {path: somewhere}
prepare:
  prompts:
    - class_path: SelfPrompts
      init_args: {count: 8}
drafter:
  class_path: Eagle3
  init_args: {taps: [0, 1, 3], depth: 3, draft_vocab: 200}
objective: {class_path: Distillation}
optimizer:
  lr: 6e-4
trainer:
  max_steps: 10
"""


@dataclass(frozen=True)
class OtherDrafter(DrafterConfig):
    """A drafter that only these tests know."""

    width: int = 8


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file and returns its path."""

    def make(text, name="base.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return make


@pytest.fixture
def base(write):
    return write(BASE)


def refused(configs, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(configs, overrides)
    return str(caught.value)


def test_files_are_merged_deeply_and_flags_win(base, write):
    top = write("optimizer: {warmup_steps: 7}\ntrainer: {precision: bf16-mixed, max_steps: 20}\n", "top.yaml")
    recipe, notes = load_recipe([base, top], [("trainer.max_steps", "30"), ("drafter.init_args.taps", "[1, 2]")])
    assert recipe.optimizer.lr == 6e-4 and recipe.optimizer.warmup_steps == 7
    assert recipe.trainer == {"max_steps": 30, "precision": "bf16-mixed"}
    assert recipe.drafter == Eagle3(taps=[1, 2], depth=3, draft_vocab=200)
    assert notes == []


@pytest.mark.parametrize("text", ["6e-4", "6.0e-4", "0.0006", "6E-4", "+.0006"])
def test_numbers_as_people_write_them(text, base):
    assert load_recipe([base], [("optimizer.lr", text)])[0].optimizer.lr == 6e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("1e3", 1000.0),
        ("true", True),
        ("null", None),
        ("[1, 14]", [1, 14]),
        ("00:12:00:00", "00:12:00:00"),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_values(text, value):
    assert load_value(text) == value and type(load_value(text)) is type(value)


def test_text_stays_text_on_the_command_line(base):
    recipe, _ = load_recipe([base], [("name", "123"), ("target.revision", "1e5")])
    assert recipe.name == "123" and recipe.target.revision == "1e5"


def test_resolved_recipe_reads_back(base):
    recipe, _ = load_recipe([base], [("prepare.temperature", "0.25")])
    text = dump_yaml(recipe.plain())
    again = build_recipe(Written(tree=yaml.safe_load(text)))
    assert dump_yaml(again.plain()) == text
    assert again.drafter == recipe.drafter and again.prepare == recipe.prepare and again.optimizer.lr == 6e-4


def test_run_folder_records_recipe_and_versions(base, tmp_path):
    recipe, _ = load_recipe([base])
    run = Run(tmp_path / "runs" / recipe.name)
    run.record("train", recipe.plain(), world=4)
    once, _ = load_recipe([base], [("export.push", "me/eagle3-x"), ("export.dry_run", "true")])
    run.record("export", once.plain())
    assert load_recipe([run.folder / "recipe.yaml"])[0].plain() == recipe.plain()  # or each later export would be pushed
    assert load_recipe([run.folder / "recipe-export.yaml"])[0].plain() == once.plain()
    entries = load_recipe_versions(run)
    assert (entries["train"]["world"], entries["export"]["world"]) == (4, 1)
    assert entries["train"]["packages"]["torch"]


def load_recipe_versions(run):
    return yaml.safe_load((run.folder / "versions.json").read_text())


# ---- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("optimzer.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("drafter.taps", "drafter.init_args.taps"),
        ("drafter.init_args.dept", "drafter.init_args.depth"),
        ("target.pathh", "target.path"),
        ("validate.max_token", "validate.max_tokens"),
    ],
)
def test_misspelt_key_is_named_as_typed_with_the_nearest(typed, meant, base):
    sentence = refused([base], (typed, "1"))
    assert f"'{typed}'" in sentence and f"did you mean '{meant}'?" in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.optimizer.lr", "did you mean 'optimizer.lr'?"),
        ("drafter.init_args.init_args.depth", "did you mean 'drafter.init_args.depth'?"),
        ("target.target.target.path", "did you mean 'target.path'?"),
        ("drafter.init_args.heads", "keys of drafter.init_args: draft_vocab, least_coverage, taps, depth, "),  # a key of Medusa
        ("drafter.init_args.zzz", "keys of drafter.init_args: draft_vocab, least_coverage, taps, depth, "),
        ("objective.init_args.positions.zzz", "keys of objective.init_args.positions: class_path, init_args."),
        ("objective.init_args.positions.bas", "did you mean 'objective.init_args.positions.init_args.base'?"),
        ("drafter.zzz", "keys of drafter: class_path, init_args."),
        ("data.draft_vocab", "did you mean 'drafter.init_args.draft_vocab'?"),
    ],
)
def test_a_suggestion_is_another_place_or_the_keys_of_that_level(typed, meant, base):
    sentence = refused([base], ("objective.init_args.positions.class_path", "Decay"), (typed, "1"))
    assert sentence.startswith(f"unknown key '{typed}' (--{typed}): {meant}") and "\n" not in sentence


def test_no_suggestion_is_what_was_typed():
    """Every place of every class, where this level has other keys, or one level too deep."""
    known = [place for place in places(Recipe, "", BASES) if "." in place]
    for place in known:
        section, level = place.partition(".")[0], place.rpartition(".")[0]
        for unknown, typed, siblings in ((place, place, ["other"]), (f"{section}.{section}", f"{section}.{place}", ["other"])):
            way_out = nearest(unknown, siblings, known, typed)
            assert f"'{typed}'" not in way_out
            assert f"'{level}." not in way_out or unknown != place, way_out  # a key of another class's


def test_misspelt_key_in_a_file_has_its_line(write):
    path = write(BASE.replace("  lr: 6e-4", "  lr: 6e-4\n  warmup: 3"))
    assert f"'optimizer.warmup' ({path} line 13): did you mean 'optimizer.warmup_steps'?" in refused([path])


def test_key_without_a_neighbour_gets_the_list(base):
    assert "the sections: name, target, prepare" in refused([base], ("zzz", "1"))


def test_key_inside_a_prompt_source(write):
    sentence = refused([write(BASE.replace("{count: 8}", "{cout: 8}"))])
    assert "'prepare.prompts[0].init_args.cout'" in sentence and "'prepare.prompts[0].init_args.count'" in sentence


def test_unknown_class_gets_the_list(base):
    sentence = refused([base], ("drafter.class_path", "Eagle4"))
    assert "'Eagle4'" in sentence and "Eagle3" in sentence and "OtherDrafter" in sentence
    assert "known are" in refused([base], ("drafter.class_path", "no.such.module.Drafter"))
    assert "JsonlPrompts, SelfPrompts" in refused([base], ("prepare.prompts", "[{class_path: Jsonl}]"))


OBJECTIVE = """\
objective:
  class_path: Distillation
  init_args:
    divergences:
      - {class_path: SmoothL1}
      - {class_path: JSD, init_args: {beta: 0.3, weight: 0.1}}
    positions: {class_path: DPace, init_args: {smoothing: 0.25}}
    reduction: drafts
"""


def test_an_objective_is_put_together_in_the_recipe(base, write):
    recipe, _ = load_recipe([base, write(OBJECTIVE, "objective.yaml")])
    assert recipe.objective == Distillation([SmoothL1(), JSD(0.3, weight=0.1)], DPace(0.25), "drafts")
    assert build_recipe(Written(tree=recipe.plain())).objective == recipe.objective
    assert load_recipe([base])[0].objective == Distillation([SoftCrossEntropy()], Decay(0.8), "depths", 0)
    short = load_recipe([base], [("objective.init_args.divergences", "[LKAlpha]"), ("objective.init_args.positions", "Uniform")])[
        0
    ]
    assert short.objective == Distillation([LKAlpha()], Uniform())


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "SmoothL1",
            "SmoothL2",
            "'objective.init_args.divergences[0].class_path' ({} line 5) names no divergence: got 'SmoothL2', known are",
        ),
        (
            "SmoothL1",
            "SmoothL2",
            "ReverseKL, Selection, SmoothL1, SoftCrossEntropy, TopKCrossEntropy, TotalVariation",
        ),
        (
            "DPace",
            "Pace",
            "names no position weight: got 'Pace', known are DPace, Decay, Exponential, Streak, Uniform, ValidPrefix",
        ),
        ("DPace", "SmoothL1", "names no position weight: got 'SmoothL1'"),
        ("beta: 0.3", "beta: 1.0", "beta of JSD is 1.0, but must be above 0 and below 1"),
        ("beta: 0.3", "bate: 0.3", "unknown key 'objective.init_args.divergences[1].init_args.bate'"),
        ("reduction: drafts", "reduction: weights", "reduction is weights, but those of DPace are not known"),
    ],
)
def test_an_objective_that_cannot_be_is_refused_in_a_sentence(base, write, before, after, words):
    file = write(OBJECTIVE.replace(before, after), "objective.yaml")
    sentence = refused([base, file])
    assert words.format(file) in sentence and "\n" not in sentence


def test_a_class_of_the_wrong_kind_is_refused(base):
    assert "names no drafter" in refused([base], ("drafter.class_path", "drafttrain.losses.Distillation"))


@pytest.mark.parametrize(
    ("place", "value", "wanted"),
    [
        ("optimizer.lr", "abc", "float, got 'abc' (str)"),
        ("data.length", "2.5", "int, got 2.5 (float)"),
        ("drafter.init_args.taps", "3", "a list of int, got 3 (int)"),
        ("drafter.init_args.depth", "true", "int, got True (bool)"),
        ("target.trust_remote_code", "3", "bool, got 3 (int)"),
        ("drafter.init_args.draft_vocab", "many", "int or float or best or null, got 'many' (str)"),
        ("optimizer", "3", "keys (lr,"),
        ("prepare.prompts", "3", "a list of prompt sources"),
        ("trainer", "3", "keys and values, got 3 (int)"),
    ],
)
def test_wrong_type_says_got_and_wanted(place, value, wanted, base):
    sentence = refused([base], (place, value))
    assert f"'{place}' (--{place})" in sentence and wanted in sentence and "\n" not in sentence


LONG = 123456789012345678901234


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("adapt.buffer", LONG, "adapt.buffer"),
        ("data.seed", -LONG, "data.seed"),
        ("drafter.init_args.taps", [0, LONG], "drafter.init_args.taps[1]"),
        ("trainer.max_steps", LONG, "trainer.max_steps"),
    ],
)
def test_a_number_that_nothing_counts_to_is_refused_by_its_place(place, value, named, base):
    """`adapt.buffer` once ended in OverflowError, in a deque."""
    with pytest.raises(UserError, match=re.escape(f"'{named}' (--{place}) is {'-' if value == -LONG else ''}{LONG}, but whole")):
        load_recipe([base], [(place, str(value))])
    assert load_recipe([base], [("adapt.buffer", str(2**63 - 1))])[0].adapt.buffer == 2**63 - 1


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000], ids=["long", "negative", "hexadecimal"])
@pytest.mark.parametrize(
    ("place", "named", "around"),
    [
        ("optimizer.warmup_steps", "optimizer.warmup_steps", "{}"),
        ("optimizer.lr", "optimizer.lr", "{}"),
        ("drafter.init_args.taps", "drafter.init_args.taps[1]", "[0, {}]"),
        ("drafter.init_args.draft_vocab", "drafter.init_args.draft_vocab", "{}"),
        ("trainer.max_steps", "trainer.max_steps", "{}"),
        ("trainer.profiler", "trainer.profiler.init_args[0].x", "{{init_args: [{{x: {}}}]}}"),
    ],
)
def test_a_number_that_python_does_not_write_is_refused_by_its_place(place, named, around, number, base, write):
    """Python's own limit (4,300 digits) once ended in its ValueError. From a flag and from a file."""
    value = around.format(number)
    words = f"is a whole number written in {len(number):,} characters, but whole numbers lie between -2^63 and 2^63"
    assert refused([base], (place, value)).startswith(f"'{named}' (--{place}) {words}")
    *above, last = place.split(".")
    nested = "".join(f"{key}: {{" for key in above) + f"{last}: {value}" + "}" * len(above)
    assert re.match(
        re.escape(f"'{named}' (") + r"\S*long.yaml line 1\) " + re.escape(words), refused([base, write(nested, "long.yaml")])
    )


def test_where_no_number_is_wanted_a_long_one_is_as_any_other(base):
    digits = "9" * 5000
    assert load_recipe([base], [("target.revision", digits)])[0].target.revision == digits  # text, as it stands
    assert "should hold keys" in refused([base], ("optimizer", digits))
    assert "names no drafter" in refused([base], ("drafter.class_path", digits))


def test_a_whole_number_too_long_for_a_float_is_refused(base):
    with pytest.raises(UserError, match=r"'optimizer\.lr' .* should be float, got 10000"):
        load_recipe([base], [("optimizer.lr", "1" + 400 * "0")])


@pytest.mark.parametrize("digits", [20_000, 40_000])
def test_a_number_in_binary_digits_is_refused_by_its_place(digits, base):
    """It is text to YAML, and a number to jsonargparse."""
    words = f"'data.length' (--data.length) is a whole number of {digits:,} binary digits, but whole numbers lie"
    assert refused([base], ("data.length", "0b" + "1" * digits)).startswith(words)
    assert load_recipe([base], [("data.length", "0b10000000")])[0].data.length == 128


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("!!int abc", "'abc' is no !!int"),
        ("!!int ''", "'' is no !!int"),
        ("!!float abc", "'abc' is no !!float"),
        ("!!bool abc", "'abc' is no !!bool"),
        ("!!timestamp 2020-99-99", "'2020-99-99' is no !!timestamp"),
        (r'"\U00110000"', "an escape stands for no character"),
        ("&a [*a]", "it holds itself, or is nested too deeply"),
        ("[" * 2_000, "it holds itself, or is nested too deeply"),
    ],
)
def test_what_yaml_takes_and_python_does_not_is_a_sentence(value, words, base, write):
    """PyYAML lets Python's own errors through. From a file with its line, and from a flag."""
    path = write(f"data:\n  length: {value}\n", "odd.yaml")
    place = "" if words.startswith("it holds") else " in line 2"
    assert refused([base, path]) == f"{path} is not YAML: {words}{place}."
    assert f"is not YAML: {words}".replace("is not YAML: ", "is not a YAML value (") in refused([base], ("data.length", value))


def test_a_recipe_that_is_one_long_number_is_refused(write):
    path = write("9" * 5000)
    assert refused([path]) == f"{path} should hold sections such as 'target:' and 'drafter:', got int."


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("target.path", r'"a\0b"', "target.path"),
        ("trainer.default_root_dir", r'"a\0b"', "trainer.default_root_dir"),
        ("prepare.prompts", r'[{class_path: JsonlPrompts, init_args: {path: "a\0b"}}]', "prepare.prompts[0].init_args.path"),
    ],
)
def test_a_path_with_a_nul_character_is_refused_by_its_place(place, value, named, base):
    """Python says `embedded null byte`, wherever it first asks the machine for it."""
    assert refused([base], (place, value)).startswith(f"'{named}' (--{place}) is 'a\\x00b', which holds a NUL character")


@pytest.mark.parametrize("place", ["export.checkpoint", "bench.prompts", "trainer.default_root_dir"])
def test_a_path_that_is_too_long_is_refused_by_its_place(base, place):
    """In bytes, as file systems count."""
    for path in ("runs/" + "x" * 256 + "/best", "\u00e4" * 128, "/".join(["y" * 200] * 21)):
        assert refused([base], (place, path)).startswith(
            f"'{place}' (--{place}) is {path[:60]}..., which is longer than paths can be"
        )
    for path in ("x" * 255, "\u00e4" * 127 + "/" + "x" * 255, "/".join(["y" * 200] * 20)):
        load_recipe([base], [(place, path)])


def test_missing_keys_are_all_named(write):
    sentence = refused([write("optimizer: {lr: 1.0}\n")])
    for place in ("name", "target.path", "drafter.class_path", "objective.class_path", "prepare.prompts"):
        assert f"'{place}' is missing" in sentence


def test_several_faults_are_reported_together(base):
    lines = refused([base], ("optimizer.lrr", "1"), ("data.rows", "x"), ("drafter.init_args.depth", "0")).splitlines()
    assert len(lines) == 3 and "lrr" in lines[0] + lines[1] + lines[2]


def test_a_dataclass_that_refuses_its_values_is_heard(base):
    assert "a drafter drafts at least 1 token" in refused([base], ("drafter.init_args.depth", "0"))


def test_duplicate_keys_are_refused_with_lines(write):
    path = write(BASE + "optimizer:\n  lr: 1.0\n")
    assert f"{path}: 'optimizer' is written twice, in lines 11 and 15" in refused([path])
    path = write(BASE.replace("  lr: 6e-4", "  lr: 6e-4\n  lr: 7e-4"))
    assert "'optimizer.lr' is written twice, in lines 12 and 13" in refused([path])


def test_dropped_arguments_of_a_changed_class_are_announced(base, write):
    recipe, notes = load_recipe([base], [("drafter", "OtherDrafter")])
    assert recipe.drafter == OtherDrafter()
    assert notes == ["drafter is now OtherDrafter (--drafter): the arguments of Eagle3 are dropped (taps, depth, draft_vocab)."]
    with pytest.raises(UserError) as raised:  # beside an error they are no errors
        load_recipe([base], [("drafter", "OtherDrafter"), ("optimizer.lrr", "1")])
    assert "lrr" in str(raised.value) and "dropped" not in str(raised.value) and list(raised.value.notes) == notes
    top = write("drafter: {class_path: OtherDrafter, init_args: {width: 3}}\n", "top.yaml")
    recipe, notes = load_recipe([base, top])
    assert recipe.drafter == OtherDrafter(3) and "dropped" in notes[0] and str(top) in notes[0]


def test_a_class_that_was_given_by_name_alone_takes_arguments_from_above(base, write):
    named = write("objective: {class_path: Distillation, init_args: {positions: Decay}}\n", "named.yaml")
    recipe, notes = load_recipe([base, named], [("objective.init_args.positions.init_args.base", "0.5")])
    assert recipe.objective.positions == Decay(0.5) and notes == []
    recipe, _ = load_recipe([base, named], [("objective.init_args.positions.class_path", "Uniform")])
    assert recipe.objective.positions == Uniform()


def test_the_same_class_by_its_full_name_keeps_its_arguments(base):
    recipe, notes = load_recipe([base], [("drafter.class_path", "drafttrain.drafters.eagle3.Eagle3")])
    assert recipe.drafter == Eagle3(taps=[0, 1, 3], depth=3, draft_vocab=200) and notes == []


def test_missing_and_broken_files(write, tmp_path):
    assert "nope.yaml: no such file" in refused([tmp_path / "nope.yaml"])
    assert "in line 2" in refused([write("a: [1\nb: {")])
    assert "should hold sections" in refused([write("- 1\n")])
    assert "no recipe: pass --config" in refused([])


@pytest.mark.parametrize("key", ["devices", "num_nodes", "accelerator", "use_distributed_sampler"])
def test_devices_belong_to_torchrun(key, base):
    sentence = refused([base], (f"trainer.{key}", "2"))
    assert f"trainer.{key}" in sentence and "torchrun" in sentence


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "a b", "a" * 201])
def test_name_becomes_a_folder(name, base):
    assert "becomes a folder" in refused([base], ("name", f"'{name}'"))


# ---- help --------------------------------------------------------------------------------------------------------------


def test_help_shows_every_key_with_its_docstring():
    text = sections_help()
    for place in places(Recipe, "", BASES):
        if place not in ("name", "task", "trainer", "prepare.prompts") and not place.endswith("class_path"):
            assert f"--{place} " in text, place
    assert "task (str): distill or on_policy" in text
    assert "Peak learning rate." in text and "SelfPrompts" in text and "class_path: Eagle3" in text
    assert ".help" not in text


def test_methods_that_only_code_makes_cannot_be_named():
    assert "Tree" in choices(Method) and not any(name.startswith("_") for name in choices(Method))


@pytest.mark.parametrize(("key", "wanted"), [("data.length", "int"), ("optimizer.lr", "float"), ("target.dtype", "text")])
def test_null_is_refused_where_a_value_is_needed(write, key, wanted):
    section, field = key.split(".")
    assert f"should be {wanted}, got null" in refused([write(BASE), write(f"{section}: {{{field}: null}}", "null.yaml")])


def test_null_is_taken_where_it_means_something(write):
    top = write("drafter: {init_args: {draft_vocab: null}}\nvalidate: {prompts: null}", "null.yaml")
    recipe, _ = load_recipe([write(BASE), top])
    assert recipe.drafter.draft_vocab is None and recipe.validate.prompts is None
