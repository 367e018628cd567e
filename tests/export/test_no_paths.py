"""What an export says is public: it holds no place of the machine, whatever was given as a path, and is read back without one."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import build_target_folder
from tiny_run import ragged_chats, write_store
from transformers import LlamaForCausalLM

from drafttrain.cli import main
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.drafters.independent import Independent
from drafttrain.drafters.save import load_drafter, save_drafter
from drafttrain.drafters.warm_start import WarmStart
from drafttrain.export.config import ExportConfig
from drafttrain.export.export import export_drafter, load_export
from drafttrain.files import public_place
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from drafttrain.vocab import DraftVocabulary

RECIPE = """\
name: tiny
target: {{path: {target}}}
prepare: {{prompts: [{{class_path: JsonlPrompts, init_args: {{path: {folder}/chats.jsonl}}}}]}}
drafter: {{class_path: {drafter}, init_args: {options}}}
objective: {{class_path: Distillation}}
bench: {{prompts: {folder}/questions.jsonl, max_tokens: 6, methods: [{{class_path: Chain, init_args: {{drafts: 2}}}}], temperatures: [0], repeats: 1, batches: [2], longest: null}}
validate: {{drafts: 3, max_tokens: 8}}
trainer: {{max_steps: 1}}
"""  # fmt: skip
LOG = "tokens_seen,train/loss,held_out/tau\n100,5.0,\n200,4.0,1.25\n"
QUESTIONS = [{"category": "qa", "turns": ["what is two"]}, {"category": "talk", "turns": ["the quick brown fox"]}]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """One in an absolute folder, loaded from there."""
    return load_target(
        TargetConfig(path=str(build_target_folder("llama", tmp_path_factory.mktemp("secret") / "our-target"))), "cpu"
    )


def run_of(folder: Path, target, config) -> list[str]:
    """The flags of a run as training leaves it, with data and a log."""
    run, recipe = folder / "runs" / "tiny", folder / "recipe.yaml"
    options = {name: value for name, value in vars(config).items() if value != getattr(type(config), name, ...)}
    recipe.write_text(
        RECIPE.format(target=target.identity.path, folder=folder, drafter=type(config).__name__, options=json.dumps(options))
    )
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for part, seed in (("train", 0), ("held_out", 1)):
        write_store(run / "data" / part, ragged_chats(4, target.vocab, seed=seed, longest=16), target.identity)
    torch.manual_seed(0)
    net = config.build(target, DraftVocabulary.full(target.vocab))
    save_drafter(run / "checkpoints" / "best", net, config, target.identity, {"position": {"step": 2, "tokens": 200}})
    (run / "logs" / "version_0").mkdir(parents=True)
    (run / "logs" / "version_0" / "metrics.csv").write_text(LOG)
    return ["--config", str(recipe), "--runs", str(folder / "runs")]


def private(folder: Path, *places) -> list[tuple[str, str]]:
    """(file, place) wherever a file has a place in it. A home that is / says nothing."""
    wanted = [str(place) for place in (*places, Path.home()) if len(str(place)) > 1]
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path.name, place) for path in files for place in wanted if place.encode() in path.read_bytes()]


def chunks(png: bytes) -> set[bytes]:
    """Kinds of chunks: those with text may be packed, so that a search would not see into them."""
    at, found = 8, set()
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        found.add(png[at + 4 : at + 8])
        at += size + 12
    return found


@pytest.mark.parametrize("form", ["vllm", "speculators", "native"])
def test_an_export_with_all_that_was_measured_names_no_place(target, tmp_path, form, capsys):
    flags = run_of(tmp_path, target, Eagle3(taps=[0, 1, 3], depth=3))
    for command in ("export", "validate", "bench"):
        assert main([command, *flags, "--export.format", form]) == 0
    export, said = tmp_path / "runs" / "tiny" / "export", capsys.readouterr().out
    assert private(export, target.identity.path, Path(target.identity.path).parent, tmp_path) == []
    figures = sorted(export.rglob("*.png"))
    assert [path.stem for path in figures] == ["acceptance", "categories", "speed", "training"]
    assert all(chunks(path.read_bytes()) <= {b"IHDR", b"pHYs", b"IDAT", b"IEND"} for path in figures)
    made = json.loads((export / "drafttrain.json").read_text())
    assert made["identity"]["path"] == "our-target" and made["identity"]["revision"] == target.identity.revision
    if form == "speculators":
        config = json.loads((export / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == "our-target"
    assert ("speculators_config.verifier.name_or_path" in said) == (form == "speculators")
    load_export(export, target)
    assert main(["inspect", str(export), "--target", target.identity.path]) == 0
    assert "no fault can be seen" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["transformers", "native"])
def test_a_drafter_that_began_with_a_model_in_a_folder_is_read_without_it(target, tmp_path, form, capsys):
    """Measured and learnt on from, though its own rotary base is not the target's and the folder may be gone."""
    model = tmp_path / "private" / "small-lm"
    small = LlamaForCausalLM.from_pretrained(target.identity.path)
    small.config.rope_parameters = {"rope_type": "default", "rope_theta": 777.0}
    small.save_pretrained(model)
    target.tokenizer.save_pretrained(model)
    config = Independent(model=str(model))
    flags = run_of(tmp_path, target, config)
    for command in ("export", "validate"):
        assert main([command, *flags, "--export.format", form]) == 0
    assert "untrained drafter to compare" not in capsys.readouterr().out  # the recipe says where the model lies
    export = tmp_path / "runs" / "tiny" / "export"
    assert private(export, target.identity.path, tmp_path) == []
    assert json.loads((export / "drafttrain.json").read_text())["init_args"]["model"] == "small-lm"

    if form == "native":
        WarmStart.open(str(export), False, config, target)  # training may begin with it
    model.rename(tmp_path / "elsewhere")
    net = load_export(export, target)
    assert net.config == replace(config, model="small-lm") and net.sizes.shape.rope_parameters["rope_theta"] == 777.0
    best, _ = load_drafter(tmp_path / "runs" / "tiny" / "checkpoints" / "best", target)
    assert net.sizes == best.sizes  # a drafter as training saves it needs the folder as little
    assert main(["validate", *flags]) == 0
    assert "there is no untrained drafter to compare with" in capsys.readouterr().out
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is {i}"}) + "\n" for i in range(4)))
    more = ["--optimizer.schedule", "constant", "--adapt.max_tokens", "6", "--adapt.every", "2", "--data.length", "64"]
    draft = ["--draft", str(export), "--prompts", str(prompts)]
    assert main(["adapt", *flags, "--name", "other", *draft, *more]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_target_may_lie_elsewhere_and_is_known_by_its_content(target, tmp_path):
    net = Eagle3(taps=[0, 1, 3], depth=3).build(target, DraftVocabulary.full(target.vocab))
    export_drafter(net, target, tmp_path / "export", ExportConfig(), None)
    moved = load_target(TargetConfig(path=str(build_target_folder("llama", tmp_path / "moved"))), "cpu")
    assert moved.identity.path != target.identity.path
    load_export(tmp_path / "export", moved)
    other = load_target(TargetConfig(path=str(build_target_folder("llama", tmp_path / "our-target", seed=1))), "cpu")
    with pytest.raises(Exception, match="was made with another target .the revision"):
        load_export(tmp_path / "export", other)  # though its folder has the same name


def test_ids_and_packages_stay_whole(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    for place in ("org/model", "gpt2", "package:carrier/weights/tiny.gguf"):
        assert public_place(place) == place
    for place in (tmp_path / "org" / "model", "../org/model/", "~/org/model", "a/b/model", "./model"):
        assert public_place(str(place)) == "model"
    assert public_place("weights/tiny.gguf") == "tiny.gguf" and public_place("/") == "local"
    monkeypatch.chdir(tmp_path)
    assert public_place("org/model") == "model"  # as the loader takes it: a folder that is there is no id
