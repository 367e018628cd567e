"""Chats of several turns: every supervised token stands behind exactly what the target had read when it said it."""

import pytest
import torch
from fake_target import FakeSpeech, FakeTarget, features_of

from data_prep.dialogue import Answering, Question, Rules, Speech, first_turn, thought_tokens
from data_prep.featurize import Stored
from data_prep.quality import QualityConfig, repeated_share, same_script_share
from data_prep.sources import Prompt, Work
from drafttrain.decoding.engine import Sampling, generate
from drafttrain.errors import UserError
from drafttrain.target.target import own_attention
from drafttrain.types import Request


def question(target, key="q", turns=("kaban kador", "loban lodor", "miban"), system="nuban") -> Question:
    messages = [{"role": "system", "content": system}] if system else []
    prompt = Prompt(key, "test", messages + [{"role": "user", "content": text} for text in turns])
    return Question(key, prompt, tuple(target.render(first_turn(prompt))))


def rules(**changes) -> Rules:
    given = {"max_prompt": 200, "limit": 24, "thoughts": True, "last_turn": False, "quality": QualityConfig()}
    return Rules(**(given | changes))


def answering(target, ask=None, taps=None, **changes) -> Answering:
    return Answering(
        Work(target, ask or FakeSpeech(target), None, 5, print),
        rules(**changes),
        Speech(0.7, 1.0, None if taps is None else Stored(taps, "bfloat16", "all")),
    )


def said(chat) -> list[list[int]]:
    """Supervised stretches."""
    stretches, before = [], False
    for token, mine in zip(chat.ids.tolist(), chat.supervised.tolist(), strict=True):
        if mine and not before:
            stretches.append([])
        if mine:
            stretches[-1].append(token)
        before = mine
    return stretches


def test_all_turns_stand_in_one_row_where_the_template_only_appends():
    target, ask = FakeTarget(), FakeSpeech(FakeTarget())
    work = answering(target, ask, taps=(1, 3))
    (chat,) = work.run([question(target)])
    assert [request.key for request in ask.requests] == ["q/answer", "q/answer/2", "q/answer/3"]
    answers = [ask._rollout(request, 0.7, None).answer.tolist() for request in ask.requests]
    assert said(chat) == answers
    # What was read before the third answer is what a server would render from the chat's messages.
    assert chat.ids.tolist() == list(ask.requests[2].ids) + answers[2]
    taps, final = features_of(chat.ids, (1, 3))
    assert torch.equal(chat.features.taps_BTAD.float(), taps) and torch.equal(chat.features.final_BTD.float(), final)
    assert work.ledger.facts(1) == {"in": 1, "kept": 1, "dropped": {}}


class Forgetful(FakeTarget):
    """Its template shows only the last word of earlier answers, as templates do that drop earlier reasoning."""

    def render(self, messages, tools=None):
        shown = [
            {**m, "content": m["content"].split()[-1]} if m["role"] == "assistant" and m["content"].split() else m
            for m in messages
        ]
        return super().render(shown)


def test_a_turn_behind_rewritten_history_begins_a_row_of_its_own():
    target, ask = Forgetful(), FakeSpeech(FakeTarget())
    work = answering(target, ask)
    chats = work.run([question(target)])
    assert [chat.key for chat in chats] == ["q", "q@turn2", "q@turn3"]
    for chat, request in zip(chats, ask.requests, strict=True):
        answer = ask._rollout(request, 0.7, None).answer.tolist()
        assert chat.ids.tolist() == list(request.ids) + answer and said(chat) == [answer]
    assert work.ledger.facts(3) == {"in": 3, "kept": 3, "dropped": {}}
    assert sum(work.ledger.notes.values()) == 2


@pytest.mark.parametrize("target", [FakeTarget(), Forgetful()])
def test_the_last_turn_alone_may_be_supervised(target):
    ask = FakeSpeech(FakeTarget())
    work = answering(target, ask, last_turn=True)
    (chat,) = work.run([question(target)])
    assert said(chat) == [ask._rollout(ask.requests[2], 0.7, None).answer.tolist()]
    facts = work.ledger.facts(1)
    assert facts["in"] == 1 + sum(facts["dropped"].values())


def test_a_chat_ends_where_it_cannot_go_on():
    target = FakeTarget()
    ask = FakeSpeech(target)
    ask.scripted = {"cut/answer": [5] * 40, "empty/answer/2": [2], "lost/answer": [2], "long/answer": [6] * 20 + [2]}
    work = answering(target, ask, max_prompt=30)
    chats = work.run([question(target, key, system=None) for key in ("cut", "empty", "lost", "long")])
    assert {chat.key: len(said(chat)) for chat in chats} == {"cut": 1, "empty": 1, "long": 1}
    assert work.ledger.facts(3) == {"in": 4, "kept": 3, "dropped": {"empty answer": 1}}
    assert work.ledger.notes == {
        "chats ended early: an answer was cut at max_tokens": 1,
        "chats ended early: empty answer": 1,
        "chats ended early: the next prompt is longer than 30 tokens": 1,
    }


def test_a_template_that_refuses_the_next_turn_ends_the_chat():
    class Once(FakeTarget):
        def render(self, messages, tools=None):
            if len(messages) > 2:
                raise UserError("no")
            return super().render(messages)

    work = answering(Once())
    (chat,) = work.run([question(Once())])
    assert len(said(chat)) == 1 and list(work.ledger.notes) == ["chats ended early: the chat template refused the next turn"]


def test_several_chats_are_answered_side_by_side_and_keep_their_order():
    target, ask = FakeTarget(), FakeSpeech(FakeTarget())
    keys = [f"q{i}" for i in range(7)]
    turns = [("kaban kador", "loban", "miban")[: i % 3 + 1] for i in range(7)]
    chats = answering(target, ask).run([question(target, key, turns=t) for key, t in zip(keys, turns, strict=True)])
    assert [chat.key for chat in chats] == keys and ask.calls == 3
    assert [len(said(chat)) for chat in chats] == [len(t) for t in turns]


def test_bad_answers_are_dropped_by_reason():
    target = FakeTarget()
    ask = FakeSpeech(target)
    ask.scripted = {"loops/answer": [5, 6, 7] * 7 + [2], "cut/answer": list(range(4, 40)), "good/answer": [5, 9, 12, 2]}
    work = answering(target, ask, quality=QualityConfig(truncated="drop", max_repeated=0.5))
    chats = work.run([question(target, key, turns=("kaban",)) for key in ("loops", "cut", "good")])
    assert [chat.key for chat in chats] == ["good"]
    assert work.ledger.dropped == {"answer loops": 1, "answer cut at max_tokens": 1}


def test_repetition_and_scripts_are_measured():
    assert repeated_share(list(range(30))) == 0.0 and repeated_share([1, 2]) == 0.0
    assert repeated_share([1, 2, 3, 4] * 10) == 1 - 4 / 33
    assert same_script_share("да yes", "что") == 0.4 and same_script_share("42!", "what") == 1.0
    assert same_script_share("这是", "what is this") == 0.0
    for bad in ({"truncated": "maybe"}, {"max_repeated": 1.5}, {"min_same_script": -1.0}):
        with pytest.raises(UserError, match=next(iter(bad))):
            QualityConfig(**bad)


class Letters:
    """A tokenizer of single letters."""

    @staticmethod
    def decode(ids, skip_special_tokens=False):
        return "".join(map(chr, ids))

    @staticmethod
    def encode(text):
        return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("prompt", "answer", "thought"),
    [
        ("hi", "<think>ab</think>c", "<think>ab</think>"),
        ("<think>", "ab</think>c", "ab</think>"),  # a forced prefix of the template
        ("hi", "plain words", ""),
        ("<think>", "never ends", "never ends"),
        ("</think>", "plain", ""),  # an empty block that the template injected
    ],
)
def test_reasoning_is_found_at_the_beginning_of_an_answer(prompt, answer, thought):
    tokenizer = Letters()
    assert thought_tokens(tokenizer.encode(answer), tokenizer.encode(prompt), tokenizer) == len(thought)


def test_supervised_tokens_are_what_a_real_target_says_behind_the_same_prefix(any_target):
    """Greedy, three turns: each supervised token is the argmax of a plain forward pass over the row before it."""

    def ask(requests, temperature, top_p, taps):
        return generate(any_target, requests, sampling=Sampling(), slots=4, taps=taps or ())

    prompts = [
        Prompt(key, "t", [{"role": "user", "content": text} for text in turns])
        for key, turns in {"a": ["name three rivers", "why?", "go on"], "b": ["what is two plus two"]}.items()
    ]
    questions = [Question(p.key, p, tuple(any_target.render(first_turn(p)))) for p in prompts]
    work = Answering(Work(any_target, ask, None, 4, print), rules(limit=12), Speech(0.0, 1.0, None))
    chats = work.run(questions)
    assert chats and work.ledger.read == len(chats) + sum(work.ledger.dropped.values())
    for chat in chats:
        with torch.no_grad(), own_attention(any_target.model):
            logits = any_target.model(chat.ids[None], use_cache=False).logits[0]
        at = chat.supervised.nonzero()[:, 0]
        assert torch.equal(logits[at - 1].argmax(-1), chat.ids[at])


def test_a_request_is_never_longer_than_the_rules_allow():
    target, ask = FakeTarget(), FakeSpeech(FakeTarget())
    answering(target, ask, limit=7).run([question(target)])
    assert all(isinstance(request, Request) and request.limit == 7 for request in ask.requests)
