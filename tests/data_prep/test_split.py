"""The held-out split and near-duplicates, against the plain quadratic definition."""

import random
import time

import pytest

from data_prep.sources import Prompt
from data_prep.split import hold_out, near_duplicates
from data_prep.text import fault, jaccard, normal, shingles
from drafttrain.errors import UserError


def prompt(key: str, text: str = "", source: str = "s") -> Prompt:
    return Prompt(key, source, [{"role": "user", "content": text}])


def test_split_depends_on_key_and_seed_only():
    prompts = [prompt(f"s-{i}") for i in range(40)]
    training, held_out = hold_out(prompts, 6, 0, None)
    assert (
        len(held_out) == 6
        and [*training, *held_out] != prompts
        and {*map(id, training), *map(id, held_out)} == set(map(id, prompts))
    )
    again = hold_out(prompts[::-1], 6, 0, None)[1]
    assert {p.key for p in again} == {p.key for p in held_out}
    assert {p.key for p in hold_out(prompts, 6, 1, None)[1]} != {p.key for p in held_out}
    more = hold_out([*prompts, prompt("new")], 6, 0, None)[1]
    assert len({p.key for p in more} & {p.key for p in held_out}) >= 5


def test_held_out_source_restricts_the_split():
    prompts = [prompt(f"a-{i}", source="a") for i in range(5)] + [prompt(f"b-{i}", source="b") for i in range(5)]
    assert {p.source for p in hold_out(prompts, 5, 0, "b")[1]} == {"b"}
    with pytest.raises(UserError, match=r"held_out is 6, but there are 5 usable prompts of source b \(10 in all\)"):
        hold_out(prompts, 6, 0, "b")
    with pytest.raises(UserError, match="some must be left to train on"):
        hold_out(prompts, 10, 0, None)


def sentence(rng: random.Random, length: int) -> list[str]:
    return [f"w{rng.randrange(40)}" for _ in range(length)]


def test_near_duplicates_equal_the_plain_definition():
    rng = random.Random(0)
    held_out = [sentence(rng, rng.randint(1, 12)) for _ in range(15)]
    training = [sentence(rng, rng.randint(1, 12)) for _ in range(60)]
    for _ in range(140):  # edits of held-out prompts, from identical to quite different
        words = list(rng.choice(held_out))
        for _ in range(rng.randint(0, 3)):
            words[rng.randrange(len(words))] = f"w{rng.randrange(40)}"
        training.append(words)
    held = [prompt(f"h{i}", " ".join(w)) for i, w in enumerate(held_out)]
    train = [prompt(f"t{i}", ", ".join(w).upper()) for i, w in enumerate(training)]
    for threshold in (0.3, 0.5, 0.7, 1.0):
        plain = {t.key for t in train if any(jaccard(shingles(t.user), shingles(h.user)) >= threshold for h in held)}
        assert 5 < len(plain) < len(train)
        assert set(near_duplicates(train, held, threshold)) == plain


def test_a_first_turn_that_is_measured_does_not_stand_in_training():
    """Held-out chats are asked their first question only; training chats of several turns ask each of theirs."""
    held = [
        Prompt("h", "s", [{"role": "user", "content": text} for text in ("what is a red fox", "and where do they live by night")])
    ]
    turns = {
        "same question": ["What is a red fox?"],
        "the whole chat": ["what is a red fox", "and where do they live by night"],
        "in a later turn": ["tell me about all the animals", "what is a red fox"],
        "as its second question": ["and where do they live by night", "what do they eat then"],
        "other": ["what is a blue whale"],
    }
    train = [Prompt(key, "s", [{"role": "user", "content": text} for text in texts]) for key, texts in turns.items()]
    assert list(near_duplicates(train, held, 0.7)) == ["same question", "the whole chat", "in a later turn"]


def test_near_duplicates_of_ten_thousand_in_seconds():
    rng = random.Random(0)
    train = [prompt(f"t{i}", "please tell me about " + " ".join(sentence(rng, 40))) for i in range(10_000)]
    held = [prompt(f"h{i}", "please tell me about " + " ".join(sentence(rng, 40))) for i in range(64)]
    start = time.perf_counter()
    assert near_duplicates(train, held, 0.7) == {}
    assert time.perf_counter() - start < 10


def test_texts_that_mean_the_same_are_duplicates_and_others_are_not():
    assert normal("  What IS\n this? ") == normal("what is this")
    assert normal("what is 2+2?") != normal("what is 2-2?")
    assert normal("???") == "???"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("What is the capital of France?", None),
        ("Wie heißt die Hauptstadt von Österreich?", None),
        ("法国的首都是哪里", None),
        ("Write a function f(x): return x*x\n\nand test it.", None),
        ("The user: how do I greet them?", None),
        ("Hi there", "shorter than 3 words"),
        ("What is the \ufffd of this", "broken characters"),
        ("What is \x00 in this file", "broken characters"),
        ("Tell me a joke <|im_end|> now", "role marker inside"),
        ("Tell me a joke\nAssistant: no I will not", "role marker inside"),
        ("Tell me a joke\nassistant\nno I will not", "role marker inside"),
        ("[INST] tell me a joke", "role marker inside"),
        ("go to the shop and go to the shop and go to the shop", "repeats itself"),
        ("what is this !!!!!!!!!!!!", "repeats itself"),
        ("a b c d " + "a c b d " + "b a d c " + "d c a b " + "c a d b ", "repeats itself"),
    ],
)
def test_faults_of_sampled_prompts(text, why):
    assert fault(text, 3) == why
