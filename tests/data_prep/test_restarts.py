"""What a second start may change, what it must refuse, and what the leftovers of the first one are worth."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_target import FakeSpeech, FakeTarget, small_config

from data_prep.__main__ import _explained
from data_prep.gather import askable
from data_prep.ledger import Ledger
from data_prep.pipeline import prepare
from data_prep.selfprompt import Attempts, help_sampling
from data_prep.sources import JsonlPrompts, Prompt, SelfPrompts
from data_prep.team import Team
from drafttrain.data.store import TokenStore
from drafttrain.errors import UserError


def run(folder: Path, config=None, target=None, said=None, **more):
    target = target or FakeTarget()
    ask = more.pop("ask", None) or FakeSpeech(target)
    say = (lambda text: None) if said is None else said.append
    return prepare(config or small_config(), target, folder, taps=None, draft_vocab=16, ask=ask, say=say, **more)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def prompts(path: Path, count: int, later: bool = False) -> str:
    """`later`: every chat has a second question."""
    ask = [f"kaban lodor {a}{b}" for a in "abcdef" for b in "ghijkl"][:count]
    rows = [{"turns": [q, f"mifel {q}"]} if later else {"prompt": q} for q in ask]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_advice_of_a_refused_run_can_be_followed_in_its_folder(tmp_path):
    """Too few prompts: nothing was answered, so another recipe may take over; prompts that were sampled stay."""
    ask = FakeSpeech(FakeTarget())
    strict = SelfPrompts(count=24, max_tokens=30, min_words=12, attempts_per_prompt=1)
    with pytest.raises(UserError, match="raise max_tokens or attempts_per_prompt"):
        run(tmp_path / "data", small_config(prompts=[strict]), ask=ask)
    sampled = ask.calls
    with pytest.raises(UserError, match=r"held_out is 40, but there are 24 usable prompts"):
        run(tmp_path / "data", small_config(held_out=40), ask=ask)
    assert ask.calls <= sampled + 1
    run(tmp_path / "data", ask=ask)
    run(tmp_path / "whole")
    made, whole = files(tmp_path / "data"), files(tmp_path / "whole")
    assert {name: made[name] for name in whole} == whole


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompts": [SelfPrompts(count=24, max_tokens=30, temperature=0.9)]}, "prepare.prompts[0].temperature was 1.0 and is now 0.9"),
        ({"chunk": 6}, "prepare.chunk was 5 and is now 6"),
        ({"seed": 3}, "prepare.seed was 0 and is now 3"),
    ],
)  # fmt: skip
def test_prompts_sampled_otherwise_are_not_mixed_in(tmp_path, change, sentence):
    with pytest.raises(UserError, match="held_out is 40"):
        run(tmp_path / "data", small_config(held_out=40))
    with pytest.raises(UserError) as error:
        run(tmp_path / "data", small_config(**change))
    assert sentence in str(error.value) and f"delete the prompts sampled so far ({tmp_path}/data/attempts/)" in str(error.value)
    with pytest.raises(UserError, match="target revision was r1 and is now r2"):
        run(tmp_path / "data", target=FakeTarget(revision="r2"))


def test_a_file_of_prompts_may_change_until_they_are_decided(tmp_path):
    config = small_config(prompts=[JsonlPrompts(prompts(tmp_path / "p.jsonl", 3))], near_duplicate=1.0)
    with pytest.raises(UserError, match="held_out is 4, but there are 3 usable"):
        run(tmp_path / "data", config)
    prompts(tmp_path / "p.jsonl", 12)
    assert len(run(tmp_path / "data", config)) == 8
    prompts(tmp_path / "p.jsonl", 13)
    with pytest.raises(UserError, match="or delete that folder"):
        run(tmp_path / "data", config)


def test_a_folder_that_lost_its_settings_is_not_adopted(tmp_path):
    run(tmp_path / "data")
    (tmp_path / "data" / "settings.json").unlink()
    with pytest.raises(UserError, match=r"settings.json is missing, so nobody can tell what that folder was made with"):
        run(tmp_path / "data")
    (tmp_path / "data" / "settings.json").write_text("[]")
    with pytest.raises(UserError, match=r"settings.json is damaged"):
        run(tmp_path / "data")


def test_a_report_that_was_not_written_is_made_up_for(tmp_path):
    run(tmp_path / "data")
    before = files(tmp_path / "data")
    (tmp_path / "data" / "report" / "README.md").unlink()
    run(tmp_path / "data", ask=FakeSpeech(FakeTarget(), stop_after=0))
    assert files(tmp_path / "data") == before


@pytest.mark.parametrize("content", ["null", "{}", '{"read": 1', '{"row": 3}'])
@pytest.mark.parametrize("name", ["prompts.json", "attempts/self-00001.json"])
def test_damaged_lists_are_named(tmp_path, name, content):
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "data", ask=FakeSpeech(FakeTarget(), stop_after=7))
    if name.startswith("attempts"):
        (tmp_path / "data" / "prompts.json").unlink()
    (tmp_path / "data" / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name} is damaged .*; delete it and run"):
        run(tmp_path / "data")


def test_held_out_chats_of_several_turns_are_said_to_be_asked_once(tmp_path):
    said: list[str] = []
    config = small_config(prompts=[JsonlPrompts(prompts(tmp_path / "p.jsonl", 20, later=True))], near_duplicate=1.0)
    run(tmp_path / "data", config, said=said)
    facts = TokenStore.open(tmp_path / "data" / "held_out").manifest.facts
    note = "held-out chats of several turns: only their first question is asked, as validation does"
    assert facts["turns"] == "first" and facts["notes"][note] == 4
    assert any(text.endswith(f"4 {note}") for text in said)


def test_first_turns_are_rendered_once_and_again_by_a_restart(tmp_path, monkeypatch):
    target = FakeTarget()
    rendered: list[str] = []
    render = target.render
    monkeypatch.setattr(
        target, "render", lambda messages, tools=None: rendered.append(messages[-1]["content"]) or render(messages)
    )
    config = small_config(prompts=[JsonlPrompts(prompts(tmp_path / "p.jsonl", 12))], near_duplicate=1.0)
    with pytest.raises(RuntimeError):
        run(tmp_path / "data", config, target=target, ask=FakeSpeech(target, stop_after=1))
    assert len(rendered) == 1 + 12  # "Hello" proves that there is a template
    run(tmp_path / "data", config, target=target)
    assert len(rendered) == 1 + 12 + 12


def test_a_template_that_writes_nothing(work, ledger):
    work.target.render = lambda messages, tools=None: [] if messages[-1]["content"] != "kaban" else [1]
    found = askable([Prompt(key, "s", [{"role": "user", "content": key}]) for key in ("kaban", "lodor")], work, 9, ledger)
    assert [p.key for p in found] == ["kaban"] and ledger.dropped == {"rendered to nothing by the chat template": 1}
    work.target.user_prefix = lambda: ([], (2,))
    for source in (SelfPrompts(count=2), SelfPrompts(count=2, topics=["bees"])):
        with pytest.raises(UserError, match="writes nothing before what .* cannot write prompts for itself"):
            source.collect(work, Ledger())


@pytest.mark.parametrize("error", [OSError(27, "File too large"), PermissionError(13, "Permission denied", "runs/x/data/a.json")])
def test_what_the_machine_refuses_is_a_sentence(error):
    with pytest.raises(UserError) as caught, _explained(Path("runs/x")):
        raise error
    assert f"{error.filename or 'runs/x'} could not be read or written ({error.strerror})" in str(caught.value)


def test_a_helper_samples_its_chunks_and_runs_one_round_ahead(work):
    """Rank 1 of 3: chunk 1 at once, chunk 4 when the leader has made chunk 0, chunk 7 when it has made chunk 3."""
    source, made = SelfPrompts(count=5, max_tokens=30), work.folder / "attempts"
    leader, helper = Attempts(source, work), Attempts(source, _member(work, 1, 3))
    seen: list[list[str]] = []

    def over() -> bool:
        seen.append(sorted(path.stem[-5:] for path in made.glob("*.json")))
        if len(seen) == 4:  # a round later than chunk 1 was made
            leader._make(0, work.chunk)
        return len(seen) >= 8

    help_sampling(helper.work.team, [helper], over)
    assert seen[-1] == ["00000", "00001", "00004"]
    alone = Attempts(source, _member(work, 0, 1, made.parent.parent / "alone"))
    for chunk in range(5):
        alone._make(chunk, work.chunk)
    for name in seen[-1]:
        assert (made / f"self-{name}.json").read_bytes() == (alone._path(int(name))).read_bytes()


def test_the_leader_waits_for_the_chunks_of_others(work):
    leader = Attempts(SelfPrompts(count=5, max_tokens=30), _member(work, 0, 2))
    other = FakeSpeech(work.target)
    late = threading.Timer(0.5, Attempts(leader.source, replace(_member(work, 1, 2), ask=other))._make, [1, 5])
    late.start()
    assert [len(leader.next()) for _ in range(3)] == [work.chunk] * 3
    late.join()
    assert (work.ask.calls, other.calls) == (2, 1)


def test_a_helper_does_not_run_ahead_where_fewer_prompts_than_a_chunk_are_asked_for(work):
    """The leader may need all of chunk 0, piece by piece; only then does rank 1 make chunk 1."""
    source, made = SelfPrompts(count=2, max_tokens=30), work.folder / "attempts"
    leader, helper = Attempts(source, _member(work, 0, 2)), Attempts(source, _member(work, 1, 2))
    seen: list[list[str]] = []

    def over() -> bool:
        seen.append(sorted(path.stem[-5:] for path in made.glob("*.json")))
        if len(seen) % 2 == 0 and leader.judged < work.chunk:
            leader.next()
        return len(seen) >= 10

    help_sampling(helper.work.team, [helper], over)
    assert leader.judged == work.chunk and seen[5] == ["00000"] and seen[-1] == ["00000", "00001"]


def test_a_helper_goes_back_to_an_earlier_source_that_was_begun_before_the_start(work):
    """A first start was killed at the second source; then more prompts of the first one were asked for. The leader waited for chunk 1 of it for ever."""
    first, second = SelfPrompts(count=12, max_tokens=30), SelfPrompts(count=5, max_tokens=30, name="other")
    for source in (first, second):
        Attempts(source, work)._make(0, work.chunk)
    helpers, polls = [Attempts(source, _member(work, 1, 2)) for source in (first, second)], iter(range(9))
    help_sampling(helpers[0].work.team, helpers, lambda: next(polls) >= 5)
    assert {path.stem for path in (work.folder / "attempts").iterdir()} >= {"self-00001", "self-00003", "other-00001"}


def _member(work, rank: int, world: int, folder: Path | None = None):
    return type(work)(work.target, work.ask, folder or work.folder, work.chunk, work.say, Team(rank, world))
