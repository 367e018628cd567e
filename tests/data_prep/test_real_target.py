"""The data stage with a tiny random Llama and the real engine: what is stored is what the target says and computes."""

import json

import pytest
import torch
from fake_target import check_kept

from data_prep.config import PrepareConfig
from data_prep.pipeline import engine, prepare
from data_prep.selfprompt import Attempts
from data_prep.sources import JsonlPrompts, SelfPrompts, Work
from drafttrain.data.store import TokenStore
from drafttrain.types import Request, Sequences

TAPS = (0, 2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    texts = [f"what is {a} plus {b}, and why?" for a in ("one", "two", "three") for b in ("dog", "fox", "river", "lazy day")]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    return str(path)


def config(path: str, **changes) -> PrepareConfig:
    values = {
        "held_out": 2,
        "near_duplicate": 1.0,
        "max_tokens": 8,
        "max_prompt": 80,
        "held_out_max_tokens": 6,
        "slots": 3,
        "chunk": 4,
    }
    return PrepareConfig([JsonlPrompts(path)], **{**values, **changes})


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.name != ".lock"}


def near(left: torch.Tensor, right: torch.Tensor) -> bool:
    """bf16 keeps eight bits."""
    return torch.allclose(left, right, rtol=1e-2, atol=1e-2)


def test_answers_and_features_are_the_targets_own(tiny_llama, prompts, tmp_path):
    store = prepare(
        config(prompts, temperature=0.0), tiny_llama, tmp_path / "data", taps=TAPS, draft_vocab=100, say=lambda text: None
    )
    assert len(store) + store.manifest.rows["dropped"].get("empty answer", 0) == 10
    for index in range(len(store)):
        chat = store.chat(index, features=True)
        ids_1T, T = chat.ids[None], len(chat.ids)
        whole = Sequences(ids_1T, chat.supervised[None], torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long))
        features = tiny_llama.read_packed(whole, TAPS)
        check_kept(chat, features.taps_BTAD[0], features.final_BTD[0], near)
        greedy = tiny_llama.logits(features.final_BTD[0]).argmax(-1)[:-1]
        assert torch.equal(greedy[chat.supervised[1:]], chat.ids[1:][chat.supervised[1:]])
        assert not chat.supervised[: int(chat.supervised.long().argmax())].any() and chat.supervised[-1]


def test_final_states_alone_are_kept_by_the_engine(tiny_llama, prompts, tmp_path):
    """For heads, which read no layer."""
    given = dict(taps=(), final="all", draft_vocab=100, say=lambda text: None)
    store = prepare(config(prompts, temperature=0.0), tiny_llama, tmp_path / "data", **given)
    store.require(tiny_llama.identity, (), "bfloat16", "all")
    agree = []
    for index in range(len(store)):
        chat = store.chat(index, features=True)
        found = chat.features.final_BTD.float()
        assert not found[-1].any()
        # The state behind each token says the next, which a greedy target said: but for ties of bf16.
        agree += (tiny_llama.logits(found).argmax(-1)[:-1] == chat.ids[1:])[
            chat.supervised[1:] & (torch.arange(len(chat.ids) - 1) > 0)
        ].tolist()
    assert sum(agree) > 0.9 * len(agree) > 30


def test_interrupted_engine_run_gives_the_same_bytes(tiny_llama, prompts, tmp_path):
    wanted = config(prompts, temperature=1.0, top_p=0.9)

    def run(folder, ask=None):
        return prepare(wanted, tiny_llama, folder, taps=TAPS, draft_vocab=None, ask=ask, say=lambda text: None)

    run(tmp_path / "whole")
    real, calls = engine(tiny_llama, wanted), [0]

    def stops(requests, temperature, top_p, taps):
        calls[0] += 1
        for number, rollout in enumerate(real(requests, temperature, top_p, taps)):
            if calls[0] == 3 and number == 2:
                raise KeyboardInterrupt
            yield rollout

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", stops)
    assert not (tmp_path / "data" / "train" / "shard-00001.json").exists()
    run(tmp_path / "data")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_held_out_answers_are_greedy_and_can_be_asked_again(tiny_llama, prompts, tmp_path):
    prepare(config(prompts), tiny_llama, tmp_path / "data", taps=None, draft_vocab=None, say=lambda text: None)
    store = TokenStore.open(tmp_path / "data" / "held_out")
    store.require(tiny_llama.identity)
    assert store.manifest.taps is None
    ask = engine(tiny_llama, config(prompts))
    answers = {rollout.key: rollout.ids for rollout in ask(store.requests(6), 0.0, 1.0, None)}
    assert len(store) and all(torch.equal(answers[store.keys[i]], store.chat(i).ids) for i in range(len(store)))


def test_target_writes_its_own_prompts(tiny_llama, tmp_path):
    """A random model writes nothing fit to be asked; but each attempt is its own, and the judge sees where it ended."""
    source = SelfPrompts(count=12, max_tokens=60)
    settings = PrepareConfig([source], slots=5)
    ask = engine(tiny_llama, settings)
    attempts = Attempts(source, Work(tiny_llama, ask, tmp_path, 12, print)).next()
    rows = json.loads((tmp_path / "attempts" / "self-00000.json").read_text())["rows"]
    assert [key for key, _, _ in attempts] == [row["key"] for row in rows] == [f"self-{i:06d}" for i in range(12)]
    for row, (key, _, why) in zip(rows, attempts, strict=True):
        assert (why == "did not end within 60 tokens") == (row["ids"][-1] not in tiny_llama.end_ids) and why
        alone = next(ask([Request(key, tuple(tiny_llama.user_prefix()[0]), 60)], 1.0, 1.0, None))
        assert alone.answer.tolist() == row["ids"]
    assert len({tuple(row["ids"]) for row in rows}) == 12
