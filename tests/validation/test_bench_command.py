"""`drafttrain bench` as it is typed: where questions and drafter come from, and what is wrong with them in one sentence."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_command import flags, save_untrained, write_data, write_recipe

from drafttrain.cli import main
from drafttrain.commands.bench import read_questions
from drafttrain.data.store import TokenStore
from drafttrain.decoding.methods import Chain, Lookup, Method
from drafttrain.errors import UserError
from drafttrain.recipe import load_recipe
from drafttrain.validation.bench_config import BenchConfig
from drafttrain.validation.bench_questions import Skipped

BENCH = {"methods": [{"class_path": "Chain", "init_args": {"drafts": 2}}, "Lookup"], "temperatures": [0, 0.5]}
SPEC_BENCH = [
    {"id": "q1", "category": "qa", "turns": ["what is two plus two"]},
    {"id": 2, "category": "talk", "turns": ["the quick brown fox", "and the dog"]},
    {"category": "qa", "prompt": "name three rivers"},
    {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "lazy"}, {"role": "assistant", "content": "no"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def made(target_folders, tiny_llama, tmp_path_factory):
    """(recipe file, runs folder with held-out prompts, folder of a drafter)."""
    folder = tmp_path_factory.mktemp("bench-command")
    recipe = write_recipe(folder, target_folders("llama"), bench=BENCH)
    save_untrained(folder / "draft", tiny_llama, {})
    write_data(folder / "runs" / "tiny", tiny_llama)
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SPEC_BENCH))
    return recipe, folder / "runs", folder / "draft"


def bench(made, *more) -> list[str]:
    return ["bench", *flags(made), *map(str, more)]


def report(made) -> Path:
    """Of a drafter that --draft names: never where the run's own is."""
    (found,) = (made[1] / "tiny" / "report" / "drafts").glob("*/bench")
    assert found.parent.name.endswith(f"{made[2].parent.name}--draft") and not (made[1] / "tiny" / "report" / "bench").exists()
    return found


def result(made) -> dict:
    return json.loads((report(made) / "bench.json").read_text())


def test_on_held_out_prompts(made, capsys):
    assert main(bench(made, "--draft", made[2])) == 0
    found, out = result(made), capsys.readouterr().out
    assert found["categories"] == {"all": 4} and found["lossless"] and found["draft"] == str(made[2])
    text = (report(made) / "README.md").read_text()
    assert "4 without category" in text and text.count("\n| all questions | 4 |") == 2 and "\n| without category |" not in text
    assert [list(t["methods"]) for t in found["temperatures"]] == [["plain", "chain 2", "lookup 5"]] * 2
    for label in ("plain", "chain 2", "lookup 5"):
        for temperature in ("0", "0.5"):
            line = next(line for line in out.splitlines() if f" temperature {temperature}, {label}:" in line)
            assert "4 questions" in line and "tokens/s, speed-up" in line and "equal to plain: yes" in line
    assert json.loads((made[1] / "tiny" / "versions.json").read_text()).keys() == {"bench"}


def test_on_questions_of_a_file_in_any_form(made, capsys):
    questions = made[0].parent / "questions.jsonl"
    assert main(bench(made, "--draft", made[2], "--bench.prompts", questions, "--bench.temperatures", "[0]")) == 0
    found = result(made)
    assert found["categories"] == {"qa": 2, "talk": 1, "all": 1} and found["skipped"] == []
    rows = [json.loads(line) for line in (report(made) / "bench.jsonl").read_text().splitlines()]
    plain = [row for row in rows if row["method"] == "plain"]
    assert [(row["question"], len(row["tokens"])) for row in plain] == [("q1", 1), ("2", 2), ("000003", 1), ("000004", 1)]


def test_what_is_no_question_is_left_out_by_name(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["hello"]}\n{"category": "qa"}\n\nno json\n{"turns": ["x"], "category": 3}\n')
    questions, skipped = read_questions(str(path))
    assert [q.key for q in questions] == ["000001"] and questions[0].category == "all"
    assert skipped[0] == Skipped("line 2", "none of messages, conversations, prompt, turns")
    assert [s.question for s in skipped] == ["line 2", "line 4", "line 5"] and skipped[2].why == "a category that is not text"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "bench.prompts is .*no-such.jsonl"),
        ("", "which has no question \\(it is empty\\)"),
        ('{"category": "qa", "turns": []}\n', "line 1: no list of turns"),
        ('{"category": "qa"}\n', "line 1: none of messages"),
    ],
)
def test_a_file_without_questions(tmp_path, text, words):
    path = tmp_path / "no-such.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_questions(str(path))


def test_without_a_drafter_or_prompts(made, tmp_path, capsys):
    assert main(bench(made)) == 2
    assert "has neither export/ nor checkpoints/best/" in capsys.readouterr().err
    assert main(bench(made, "--draft", tmp_path / "nothing")) == 2
    assert str(tmp_path / "nothing") in capsys.readouterr().err
    elsewhere = ["bench", "--config", str(made[0]), "--runs", str(tmp_path), "--draft", str(made[2])]
    assert main(elsewhere) == 2
    assert "data_prep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("methods", "[Chian]", "'bench.methods[0].class_path' (--bench.methods) names no method: got 'Chian', known are"),
        ("methods", "[{class_path: Chain, init_args: {draft: 3}}]", "did you mean 'bench.methods[0].init_args.drafts'?"),
        ("methods", "[{class_path: Chain, init_args: {drafts: 0}}]", "Chain.drafts is 0"),
        ("methods", "Chain", "'bench.methods' (--bench.methods) should be a list of methods"),
        ("temperatures", "[-1]", "bench.temperatures is [-1.0]"),
        ("batches", "[0]", "bench.batches is 0"),
        ("repeat", "2", "did you mean 'bench.repeats'?"),
    ],
)
def test_a_section_that_makes_no_sense_is_one_sentence(made, capsys, flag, value, words):
    assert main(bench(made, f"--bench.{flag}", value)) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("error: ") and err.count("\n") == 1


def test_the_section_reads_back_and_old_recipes_need_none(made, tmp_path):
    recipe = load_recipe([made[0]])[0]
    assert recipe.bench.methods == [Chain(2), Lookup()]
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(recipe.plain()))
    assert load_recipe([tmp_path / "again.yaml"])[0].bench == recipe.bench
    without = yaml.safe_load(Path(made[0]).read_text())
    del without["bench"]
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(without))
    assert load_recipe([tmp_path / "old.yaml"])[0].bench == BenchConfig()


@pytest.mark.parametrize("from_file", [False, True])
def test_methods_that_measure_something_first_are_given_prompts_that_are_not_benchmarked(made, monkeypatch, from_file):
    given = []

    def prepare(self: Method, target, net, requests):
        given.append(list(requests))
        return self

    monkeypatch.setattr(Lookup, "prepare", prepare)
    more = ["--bench.prompts", made[0].parent / "questions.jsonl"] if from_file else []
    assert main(bench(made, "--draft", made[2], "--bench.count", 1, "--bench.temperatures", "[0]", *more)) == 0
    store = TokenStore.open(made[1] / "tiny" / "data" / ("held_out" if from_file else "train"))
    assert given == [store.requests(6)]
    asked = {json.loads(line)["question"] for line in (report(made) / "bench.jsonl").open()}
    assert len(asked) == (3 if from_file else 1)
