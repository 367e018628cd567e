"""Answers from servers: exact token ids, every fault of a server, and that each prompt is accounted for once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from openai_standin import FAULTS, OpenAIStandin, words

import data_prep.server as server_module
import data_prep.server_care as server_care
from data_prep.config import PrepareConfig
from data_prep.engines import OpenAIServer
from data_prep.pipeline import engine, prepare
from data_prep.server import ServerEngine
from data_prep.server_http import retry_after
from data_prep.server_reply import DOUBTFUL, stream_seed
from data_prep.sources import JsonlPrompts
from drafttrain.data.store import TokenStore
from drafttrain.decoding.engine import Sampling, generate
from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_speaker
from drafttrain.types import Request

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in (
        ("FIRST_WAIT", 0.01),
        ("FIRST_REST", 0.02),
        ("OTHERS_FIRST", 0.05),
        ("START", 0.3),
        ("LONGEST_WAIT", 0.2),
    ):
        monkeypatch.setattr(server_module if hasattr(server_module, name) else server_care, name, seconds)


@pytest.fixture(scope="module")
def speaker(target_folders):
    return load_speaker(TargetConfig(path=str(target_folders("llama"))))


@pytest.fixture
def standin(speaker):
    with OpenAIStandin(speaker.tokenizer, words(speaker.tokenizer)) as server:
        yield server


@pytest.fixture
def other(speaker):
    with OpenAIStandin(speaker.tokenizer, words(speaker.tokenizer)) as server:
        yield server


def chat(number: int) -> tuple[dict, ...]:
    return ({"role": "user", "content": f"what is {number} plus two?"},)


def requests(speaker, count: int, limit: int = 60) -> list[Request]:
    return [Request(f"p-{i}", tuple(speaker.render(list(chat(i)))), limit, messages=chat(i)) for i in range(count)]


def ask(speaker, urls, said=None, **options) -> ServerEngine:
    config = OpenAIServer(urls, **{"concurrency": 4, "timeout": 5.0, **options})
    return ServerEngine(config, speaker, seed=7, say=(said if said is not None else []).append)


def answers(speaker, wanted, temperature: float = 1.0) -> dict[str, list[int]]:
    """What the stand-in's words are for these requests."""
    say = words(speaker.tokenizer)
    return {
        r.key: say(list(r.ids), {"seed": stream_seed(7, r.key), "temperature": temperature, "max_tokens": r.limit})
        for r in wanted
    }


def got(rollouts) -> dict[str, list[int]]:
    found = list(rollouts)
    assert len({rollout.key for rollout in found}) == len(found)
    return {rollout.key: rollout.answer.tolist() for rollout in found}


# ---- what is asked and what is made of it ------------------------------------------------------------------------------


def test_a_server_with_the_target_says_what_the_target_says(tiny_llama, speaker):
    def decode(ids, body):
        sampling = Sampling(temperature=body["temperature"])
        return next(generate(tiny_llama, [Request("x", tuple(ids), body["max_tokens"])], sampling=sampling)).answer.tolist()

    wanted = requests(speaker, 5, limit=12)
    with OpenAIStandin(speaker.tokenizer, decode) as standin:
        found = {r.key: r for r in ask(speaker, [standin.url])(wanted, 0.0, 1.0, None)}
    local = {r.key: r for r in generate(tiny_llama, wanted, slots=2)}
    for key, rollout in local.items():
        assert found[key].ids.tolist() == rollout.ids.tolist() and found[key].stopped == rollout.stopped
        assert found[key].accepted == rollout.accepted and found[key].cut == 0 and found[key].failed is None


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_ids_come_from_the_server_or_from_the_text(speaker, standin, api):
    wanted, said = requests(speaker, 9), []
    true = answers(speaker, wanted)
    exact = ask(speaker, [standin.url + "/v1/"], said, api=api)
    assert got(exact(wanted, 1.0, 0.9, None)) == true
    exact.report()
    assert said == []
    standin.token_ids = False
    by_text = ask(speaker, [standin.url], said, api=api)
    assert got(by_text(wanted, 1.0, 0.9, None)) == true
    by_text.report()
    assert said[0].startswith("9 of 9 answers came without token ids")
    body = standin.asked[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, 0.9, -1, 1.0)
    assert body["stop_token_ids"] == list(speaker.end_ids) and body["skip_special_tokens"] is False
    assert ("prompt" in body) == (api == "completions")


def test_every_answer_has_a_random_stream_of_its_own_that_returns(speaker, standin):
    wanted = requests(speaker, 20)
    list(ask(speaker, [standin.url])(wanted, 1.0, 1.0, None))
    list(ask(speaker, [standin.url])(wanted[::-1], 1.0, 1.0, None))
    seeds = [body["seed"] for body in standin.asked]
    assert len(set(seeds)) == 20 and set(Counter(seeds).values()) == {2} and all(0 <= seed < 2**31 for seed in seeds)
    assert stream_seed(8, "p-0") != stream_seed(7, "p-0")


def test_further_ends_of_a_request_end_it(speaker, standin):
    closing = speaker.tokenizer.encode("!", add_special_tokens=False)[0]
    standin.answer = lambda ids, body: [*ids[2:5], closing, 9, 10]  # a server that does not know stop_token_ids
    request = replace(requests(speaker, 1)[0], ends=(closing,))
    rollout = next(ask(speaker, [standin.url])([request], 1.0, 1.0, None))
    assert rollout.answer.tolist() == [*request.ids[2:5], closing] and rollout.stopped
    assert closing in standin.asked[0]["stop_token_ids"]


def test_an_answer_at_the_limit_has_not_stopped(speaker, standin):
    for standin.token_ids in (True, False):
        rollout = next(ask(speaker, [standin.url])(requests(speaker, 1, limit=2), 1.0, 1.0, None))
        assert not rollout.stopped and len(rollout.answer) == 2


def test_text_without_an_end_gets_the_one_that_the_server_names(speaker, standin):
    standin.token_ids = False

    def name_end(reply):
        reply["choices"][0]["stop_reason"] = 65
        return reply

    standin.spoil = name_end
    request = replace(requests(speaker, 1)[0], ends=(65,))
    rollout = next(ask(speaker, [standin.url])([request], 1.0, 1.0, None))
    assert rollout.answer[-1] == 65 and rollout.stopped


def test_an_end_that_only_the_server_knows_stands_for_itself(speaker, standin):
    spoil(standin, token_ids=[65, 66], text=speaker.tokenizer.decode([65, 66]), finish_reason="stop", stop_reason=66)
    rollout = next(ask(speaker, [standin.url])(requests(speaker, 1), 1.0, 1.0, None))
    assert rollout.answer.tolist() == [65, 66] and rollout.stopped
    spoil(standin, token_ids=[65, 66], text=speaker.tokenizer.decode([65, 66]), finish_reason="stop", stop_reason=None)
    rollout = next(ask(speaker, [standin.url])(requests(speaker, 1), 1.0, 1.0, None))
    assert rollout.answer.tolist() == [65, 66, 2] and rollout.stopped  # a server that leaves the end out


def test_features_and_prompts_that_are_no_chat_are_refused(speaker, standin):
    with pytest.raises(UserError, match="set data.features to online"):
        ask(speaker, [standin.url])(requests(speaker, 1), 1.0, 1.0, (1, 2))
    bare = [replace(requests(speaker, 1)[0], messages=None)]
    with pytest.raises(UserError, match="api is chat, but there are prompts that are no chat"):
        ask(speaker, [standin.url], api="chat")(bare, 1.0, 1.0, None)
    assert list(ask(speaker, [standin.url])([], 1.0, 1.0, None)) == []


# ---- a server that is not the target -----------------------------------------------------------------------------------


def spoil(standin, **changes):
    def change(reply):
        reply["choices"][0] |= changes
        return reply

    standin.spoil = change


def test_another_tokenizer_is_refused(speaker, standin):
    spoil(standin, token_ids=[5, 100_000])
    with pytest.raises(UserError, match=r"answers in another tokenizer .* token id 100000, and the target's vocabulary has 320"):
        list(ask(speaker, [standin.url])(requests(speaker, 3), 1.0, 1.0, None))
    spoil(standin, token_ids=[70, 71, 72, 2])
    with pytest.raises(UserError, match=r"another tokenizer .* 2 of its 2 answers have token ids that spell another text"):
        list(ask(speaker, [standin.url], concurrency=1)(requests(speaker, 3), 1.0, 1.0, None))


def test_a_single_doubtful_answer_is_not_kept(speaker, standin):
    first = [True]

    def once(reply):
        if first:
            first.clear()
            reply["choices"][0]["text"] += "!"
        return reply

    standin.spoil = once
    rollouts = list(ask(speaker, [standin.url])(requests(speaker, 30), 1.0, 1.0, None))
    assert Counter(rollout.failed for rollout in rollouts) == {None: 29, DOUBTFUL: 1}


@pytest.mark.parametrize("named", ["ids", "count"])
def test_another_template_is_refused(speaker, standin, named):
    standin.tokenizer = load_speaker(TargetConfig(path=speaker.identity.path)).tokenizer
    standin.tokenizer.chat_template = "system: be brief\n" + speaker.tokenizer.chat_template
    standin.token_ids = named == "ids"
    with pytest.raises(UserError, match=r"read prompt p-\d as other tokens .* or another chat template"):
        list(ask(speaker, [standin.url], api="chat")(requests(speaker, 3), 1.0, 1.0, None))


def test_reasoning_that_was_parsed_away_needs_token_ids(speaker, standin):
    def parse(reply):
        message = reply["choices"][0]["message"]
        message |= {"reasoning_content": message["content"], "content": None}
        return reply

    standin.spoil = parse
    wanted = requests(speaker, 3)
    assert got(ask(speaker, [standin.url], api="chat")(wanted, 1.0, 1.0, None)) == answers(speaker, wanted)
    standin.token_ids = False
    rollouts = list(ask(speaker, [standin.url], api="chat")(wanted, 1.0, 1.0, None))
    assert {rollout.failed for rollout in rollouts} == {
        "the server returned neither token ids nor the whole text of its answer"
    } and not any(len(rollout.answer) for rollout in rollouts)


def test_servers_must_serve_one_name(speaker, standin, other):
    other.models = ["else", "more"]
    # Slow enough that one of the two cannot answer everything before the other is asked what it serves.
    standin.answer = other.answer = words(speaker.tokenizer, slow=0.02)
    with pytest.raises(UserError, match=r"serves (else, more, but not tiny|tiny, but not else), which another .* one name"):
        list(ask(speaker, [standin.url, other.url])(requests(speaker, 60), 1.0, 1.0, None))
    standin.answer = other.answer = words(speaker.tokenizer)
    other.models = ["else", "tiny"]
    assert len(list(ask(speaker, [standin.url, other.url], model="tiny")(requests(speaker, 9), 1.0, 1.0, None))) == 9
    with pytest.raises(UserError, match=r"serves tiny, but not big; all must serve"):
        list(ask(speaker, [standin.url], model="big")(requests(speaker, 1), 1.0, 1.0, None))


# ---- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_what_may_be_tried_again_is(speaker, standin, fault):
    standin.plant(fault, fault)
    wanted = requests(speaker, 5)
    assert got(ask(speaker, [standin.url], timeout=0.4)(wanted, 1.0, 1.0, None)) == answers(speaker, wanted)
    assert len(standin.asked) == 7 and standin.happened[fault] == 2


@pytest.mark.parametrize("status", ["400", "401", "403", "404", "422"])
def test_a_refusal_is_not_tried_again_and_never_shows_the_key(speaker, standin, status, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sk-secret-123")
    standin.key = "sk-secret-123"
    standin.cursed = lambda body: status
    with pytest.raises(UserError) as error:
        list(ask(speaker, [standin.url], concurrency=1, api_key_env="SERVER_KEY")(requests(speaker, 5), 1.0, 1.0, None))
    assert f"HTTP {status}: " in str(error.value) and f"planted {status}" in str(error.value)
    assert "secret" not in str(error.value) and "***" in str(error.value) and len(standin.asked) == 1


def test_a_missing_key_is_asked_for(speaker, standin, monkeypatch):
    standin.key = "sk-secret-123"
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(UserError, match=r"HTTP 401.* put the server's key into the environment variable SERVER_KEY"):
        list(ask(speaker, [standin.url], api_key_env="SERVER_KEY")(requests(speaker, 1), 1.0, 1.0, None))
    monkeypatch.setenv("SERVER_KEY", "bad\u00e9key")
    with pytest.raises(UserError, match="SERVER_KEY does not hold a key"):
        ask(speaker, [standin.url], api_key_env="SERVER_KEY")


def test_retry_after_is_honoured(speaker, standin):
    standin.retry_after = "0.5"
    standin.plant("429")
    begun = time.monotonic()
    list(ask(speaker, [standin.url], concurrency=1)(requests(speaker, 2), 1.0, 1.0, None))
    assert 0.5 <= time.monotonic() - begun < 3
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0 and retry_after("soon") is None and retry_after(None) is None


def test_a_prompt_that_fails_on_every_try_is_given_up_and_named(speaker, standin):
    wanted = requests(speaker, 12)
    standin.cursed = lambda body: "500" if body["prompt"] == list(wanted[3].ids) else None
    said: list[str] = []
    engine_ = ask(speaker, [standin.url], said, attempts=3)
    rollouts = {rollout.key: rollout for rollout in engine_(wanted, 1.0, 1.0, None)}
    assert set(rollouts) == {request.key for request in wanted}
    lost = rollouts["p-3"]
    assert lost.failed == "no answer from a server in 3 tries (HTTP 500)"
    assert lost.ids.tolist() == list(wanted[3].ids) and not len(lost.answer) and not lost.stopped
    assert all(rollout.failed is None for key, rollout in rollouts.items() if key != "p-3")
    engine_.report()
    assert said[-1] == "1 requests got no answer in 3 tries."


def test_when_most_prompts_fail_the_run_stops(speaker, standin):
    standin.cursed = lambda body: "json"
    with pytest.raises(UserError, match=r"20 of the last 20 prompts .*: malformed JSON\). Finished shards are kept"):
        list(ask(speaker, [standin.url], attempts=2)(requests(speaker, 40), 1.0, 1.0, None))


def test_a_dead_servers_work_goes_to_the_other(speaker, standin, other):
    wanted, said = requests(speaker, 60), []
    engine_ = ask(speaker, [standin.url, other.url], said)
    found = {}
    for rollout in engine_(wanted, 1.0, 1.0, None):
        found[rollout.key] = rollout.answer.tolist()
        if len(found) == 10:
            other.close()
    assert found == answers(speaker, wanted)
    assert len(other.told) and any(line.startswith(f"{other.url} failed 3 times in a row") for line in said)
    other.open(other.port)  # it comes back, and gets work again
    told = len(other.told)
    for _ in range(20):
        list(engine_(wanted, 1.0, 1.0, None))
        if len(other.told) > told:
            break
    assert len(other.told) > told


def test_servers_that_are_not_there(speaker, standin):
    standin.close()
    said: list[str] = []
    with pytest.raises(UserError, match=rf"no server could be asked for 0 s \({standin.url}: cannot be reached\)"):
        list(ask(speaker, [standin.url], said)(requests(speaker, 3), 1.0, 1.0, None))
    assert said == [f"waiting for {standin.url}, up to 0 s if no server can be asked: cannot be reached"]
    threading.Timer(0.1, lambda: standin.open(standin.port)).start()  # one that is still loading
    assert len(list(ask(speaker, [standin.url])(requests(speaker, 3), 1.0, 1.0, None))) == 3


# ---- bounds ------------------------------------------------------------------------------------------------------------


def test_requests_at_once_are_bounded_and_shared(speaker, standin, other):
    standin.answer = other.answer = words(speaker.tokenizer, slow=0.02)
    list(ask(speaker, [standin.url, other.url], concurrency=3)(requests(speaker, 60), 1.0, 1.0, None))
    assert max(standin.most, other.most) == 3 and min(len(standin.told), len(other.told)) > 5  # a busy machine is not fair


def test_answers_that_nobody_fetches_stop_the_asking(speaker, standin):
    rollouts = ask(speaker, [standin.url], concurrency=3)(requests(speaker, 100), 1.0, 1.0, None)
    next(rollouts)
    time.sleep(0.3)
    assert len(standin.asked) <= 1 + 2 * 3 + 3
    assert len(list(rollouts)) == 99


def test_leaving_early_ends_the_thread(speaker, standin):
    standin.plant("time-out")
    rollouts = ask(speaker, [standin.url])(requests(speaker, 50), 1.0, 1.0, None)
    next(rollouts)
    rollouts.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "servers"]


# ---- the data stage ----------------------------------------------------------------------------------------------------


def write_prompts(path: Path, count: int) -> str:
    rows = ({"messages": [{"role": "user", "content": f"what is {i} plus {i * i}?"}]} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_data_from_a_server_is_data_from_the_target(tiny_llama, speaker, tmp_path):
    """Greedy answers of a server with the target, byte for byte those of the in-process engine."""

    def decode(ids, body):
        return next(generate(tiny_llama, [Request("x", tuple(ids), body["max_tokens"])])).answer.tolist()

    path = write_prompts(tmp_path / "p.jsonl", 12)
    common = dict(held_out=2, near_duplicate=1.0, max_tokens=8, held_out_max_tokens=6, max_prompt=80, chunk=4, temperature=0.0)
    with OpenAIStandin(speaker.tokenizer, decode) as standin:
        config = PrepareConfig([JsonlPrompts(path)], engine=OpenAIServer([standin.url]), **common)
        assert isinstance(engine(speaker, config), ServerEngine)
        prepare(config, speaker, tmp_path / "served", taps=None, draft_vocab=None, say=lambda text: None)
    local = PrepareConfig([JsonlPrompts(path)], **common)
    prepare(local, tiny_llama, tmp_path / "local", taps=None, draft_vocab=None, say=lambda text: None)
    for name in ("train", "held_out"):
        files = [file.name for file in (tmp_path / "local" / name).iterdir()]
        for file in files:
            assert (tmp_path / "served" / name / file).read_bytes() == (tmp_path / "local" / name / file).read_bytes(), file


def test_the_data_stage_sends_chats_and_names_what_was_lost(speaker, standin, tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 12)
    standin.cursed = lambda body: "500" if "plus 9?" in body["messages"][0]["content"] else None
    options = dict(held_out=2, near_duplicate=1.0, max_tokens=40, held_out_max_tokens=40, max_prompt=80, chunk=4)
    config = PrepareConfig([JsonlPrompts(path)], engine=OpenAIServer([standin.url], api="chat", attempts=2), **options)
    store = prepare(config, speaker, tmp_path / "data", taps=None, draft_vocab=None, say=lambda text: None)
    rows = Counter(store.manifest.rows["dropped"]) + Counter(
        TokenStore.open(tmp_path / "data" / "held_out").manifest.rows["dropped"]
    )
    assert rows == {"no answer from a server in 2 tries (HTTP 500)": 1, "split off as held out": 2}


def start(folder: Path, target: str, prompts: str, urls: list[str]) -> subprocess.Popen:
    program = [sys.executable, str(Path(__file__).parent / "openai_standin.py"), target, prompts, str(folder), *urls]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


@pytest.mark.slow
def test_two_thousand_prompts_through_every_fault_and_a_kill(speaker, standin, other, tmp_path):
    """10% of the requests go wrong, three prompts go wrong for ever, the process is killed in the middle and started again."""
    prompts, folder = write_prompts(tmp_path / "p.jsonl", 2000), tmp_path / "data"
    cursed = [speaker.render([{"role": "user", "content": f"what is {i} plus {i * i}?"}]) for i in (500, 1000, 1500)]
    for server in (standin, other):
        server.share, server.hang = 0.1, 1.5
        server.cursed = lambda body: "500" if body["prompt"] in cursed else None
    begun = time.monotonic()
    with start(folder, speaker.identity.path, prompts, [standin.url, other.url]) as process:
        for line in process.stdout:
            if line.startswith("train: shard 8 "):
                break
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL and process.stderr.read() == ""
    finished = [json.loads(file.read_text()) for file in (folder / "train").glob("shard-*.json")]
    assert 8 <= len(finished) < 20 and not (folder / "train" / "manifest.json").exists()
    asked = len(standin.asked), len(other.asked)
    with start(folder, speaker.identity.path, prompts, [standin.url, other.url]) as process:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    seconds = time.monotonic() - begun
    stores = [TokenStore.open(folder / name) for name in ("train", "held_out")]
    keys = [key for store in stores for key in store.keys]
    assert len(keys) == len(set(keys))
    rows = stores[0].manifest.rows
    lost = sum(count for reason, count in rows["dropped"].items() if reason != "split off as held out")
    held_lost = sum(stores[1].manifest.rows["dropped"].values())
    assert rows["in"] == 2000 == rows["kept"] + sum(rows["dropped"].values()) and lost + held_lost == 3
    assert len(keys) == 2000 - 3
    kept = {stream_seed(0, key + "/answer") for shard in finished for key in shard["keys"]}
    again = {body["seed"] for server, before in zip((standin, other), asked, strict=True) for body in server.asked[before:]}
    assert not kept & again and len(kept) >= 790
    happened = standin.happened + other.happened
    assert set(FAULTS) <= set(happened)
    print(f"\n{seconds:.0f} s; asked {len(standin.asked)} + {len(other.asked)}; faults {dict(happened)}")
    print(f"kept {len(keys)}, lost {lost + held_lost}; {len(finished)} shards before the kill; dropped {rows['dropped']}")
