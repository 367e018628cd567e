"""Masks of chats against strings written by hand, for small templates with the habits of real ones, and against a simulated target.

`CASES` name every stretch that the target would have generated, as a literal. The simulation puts the target's own prompt (ids of
the chat up to an answer, with the generation prompt) before the ids of that literal: where a case says so, the chat must begin with
just these ids, and the mask must be true on the literal's alone.
"""

import random
from dataclasses import dataclass, field

import pytest
from mask_chats import CALL, CALLED, INLINE, THOUGHTS, TWO, chat_of, says, stretches, user, wrapped

from drafttrain.errors import UserError
from drafttrain.target.masks import BLOCKS, RENDERINGS, supervise
from drafttrain.target.template import MARK


@dataclass
class Case:
    name: str
    template: str
    messages: list[dict]
    expected: list[str]
    at: list[int] | None = None
    """Messages that the stretches belong to; None: all answers."""
    injected: str = ""
    """What the template writes between the prompt and the answer."""
    arguments: dict = field(default_factory=dict)
    tools: list | None = None
    flags: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Words that the notes must hold; no notes at all if empty."""
    spliced: bool = True
    """Whether the chat is the target's prompt and the literal, id for id."""


CASES = [
    Case("default system", "default_system", [user("what?"), says("It is four.")], ["It is four.<|im_end|>"]),
    Case("default system, two turns", "default_system", TWO, ["It is four.<|im_end|>", "Yes.<|im_end|>"]),
    Case("own system", "default_system", [{"role": "system", "content": "Be brief."}, *TWO], ["It is four.<|im_end|>", "Yes.<|im_end|>"]),
    Case("the last turn alone", "default_system", TWO, ["Yes.<|im_end|>"], at=[3], flags={"last_turn_only": True}),
    Case("a question at the end", "default_system", [*TWO, user("and?")], ["It is four.<|im_end|>", "Yes.<|im_end|>"]),
    Case("markers as words of the user", "default_system", [user("<|im_start|>assistant\nYes.<|im_end|>\n"), says("Yes.")], ["Yes.<|im_end|>"]),
    Case("markers as words of the answer", "default_system", [user("how?"), says("a<|im_end|>\n<|im_start|>user\nb"), user("x"), says("c")],
         ["a<|im_end|>\n<|im_start|>user\nb<|im_end|>", "c<|im_end|>"]),
    Case("words of the prompt", "default_system", [user("assistant"), says("assistant"), user("user\n"), says("user")],
         ["assistant<|im_end|>", "user<|im_end|>"]),
    Case("one answer twice", "default_system", [user("a"), says("Yes."), user("a"), says("Yes.")], ["Yes.<|im_end|>", "Yes.<|im_end|>"]),
    Case("empty answer", "default_system", [user("a"), says(""), user("b"), says("")], ["<|im_end|>", "<|im_end|>"]),
    Case("spaces around", "default_system", [user(" a "), says("  four \n"), user(" b"), says(" ")], ["  four \n<|im_end|>", " <|im_end|>"]),
    Case("unicode", "default_system", [user("naïve 日本"), says("🙂é\u200b日本語"), user("é"), says("e\u0301")],
         ["🙂é\u200b日本語<|im_end|>", "e\u0301<|im_end|>"]),
    Case("our own mark as words", "default_system", [user(MARK), says(MARK + "x")], [MARK + "x<|im_end|>"]),
    Case("two answers in a row", "default_system", [user("a"), says("b"), says("c")], ["b<|im_end|>", "c<|im_end|>"]),
    Case("one-token roles", "one_token_roles", TWO, ["It is four.<|end|>", "Yes.<|end|>"]),
    Case("one-token roles, spaces", "one_token_roles", [user("a"), says(" b\n"), user("c"), says("")], [" b\n<|end|>", "<|end|>"]),
    Case("one-token roles, end of text as words", "one_token_roles", [user("a"), says("b<|endoftext|>")], ["b<|endoftext|><|end|>"]),
    Case("thoughts, last kept: one turn", "keeps_last_reasoning", THOUGHTS[:2], ["\n<think>sum</think>\nfour"], notes=("no end-of-turn",)),
    Case("thoughts, last kept: the first turn is rewritten", "keeps_last_reasoning", THOUGHTS, ["\n<think>again</think>\nyes"], at=[3],
         notes=("no end-of-turn", "answer 1 of 2 is not supervised")),
    Case("thoughts, last kept: inline", "keeps_last_reasoning", INLINE, ["\n<think>again</think>\nyes"], at=[3],
         notes=("no end-of-turn", "answer 1 of 2 is not supervised")),
    Case("thoughts, last kept: only the last one thinks", "keeps_last_reasoning", [*TWO[:2], *THOUGHTS[2:]],
         ["It is four.", "\n<think>again</think>\nyes"], spliced=False, notes=("no end-of-turn",)),
    Case("thoughts, last kept: not supervised", "keeps_last_reasoning", THOUGHTS[:2], ["\nfour"], spliced=False, flags={"reasoning": False},
         notes=("no end-of-turn",)),
    Case("injected empty block, every turn", "keeps_last_reasoning", TWO, ["It is four.", "Yes."], injected="\n<think></think>\n",
         notes=("no end-of-turn",)),
    Case("/nothink", "keeps_last_reasoning", TWO, ["\nIt is four.", "\nYes."], arguments={"enable_thinking": False}, notes=("no end-of-turn",)),
    Case("stripped in the injected block", "keeps_last_reasoning", [user("a"), says("\n b \n")], ["b"], injected="\n<think></think>\n",
         notes=("no end-of-turn", "strips white space")),
    Case("drops all thoughts: none were there", "drops_all_reasoning", TWO, ["It is four.<eos>", "Yes.<eos>"]),
    Case("drops all thoughts: one answer had none", "drops_all_reasoning", [*INLINE[:2], user("sure?"), says("Yes.")], ["Yes.<eos>"], at=[3],
         notes=("answer 1 of 2 is not supervised: the template does not show",)),
    Case("injected empty block, newest turn", "empty_think", TWO[:2], ["It is four.<|im_end|>"], injected="<think>\n\n</think>\n\n"),
    Case("injected empty block, earlier turns without", "empty_think", TWO, ["It is four.<|im_end|>", "Yes.<|im_end|>"], spliced=False),
    Case("empty block in the prompt", "empty_think", TWO[:2], ["It is four.<|im_end|>"], arguments={"enable_thinking": False}),
    Case("empty block in the prompt, gone later", "empty_think", TWO, ["Yes.<|im_end|>"], at=[3], arguments={"enable_thinking": False},
         notes=("answer 1 of 2 is not supervised: the target answers behind",)),
    Case("thoughts of the newest turn", "empty_think", THOUGHTS, ["<think>\nagain\n</think>\n\nyes<|im_end|>"], at=[3],
         notes=("answer 1 of 2 is not supervised: it is rendered differently",)),
    Case("thoughts inline", "empty_think", INLINE, ["<think>\nagain\n</think>\n\nyes<|im_end|>"], at=[3], notes=("answer 1 of 2",)),
    Case("thoughts inline, not supervised", "empty_think", INLINE[:2], ["\n\nfour<|im_end|>"], spliced=False, flags={"reasoning": False}),
    Case("thoughts in a field, not supervised", "empty_think", THOUGHTS[:2], ["\n\nfour<|im_end|>"], spliced=False, flags={"reasoning": False}),
    Case("thoughts, last turn only", "empty_think", THOUGHTS, ["<think>\nagain\n</think>\n\nyes<|im_end|>"], at=[3], flags={"last_turn_only": True}),
    Case("a thought that is a substring of the answer", "empty_think", [user("a"), says("4", "4")], ["<think>\n4\n</think>\n\n4<|im_end|>"]),
    Case("thoughts named otherwise", "empty_think", [user("a"), {**says("b"), "reasoning": "c"}], ["<think>\nc\n</think>\n\nb<|im_end|>"]),
    Case("empty answer in an injected block", "empty_think", [user("a"), says("")], ["<|im_end|>"], injected="<think>\n\n</think>\n\n"),
    Case("an empty block that the answer said itself", "empty_think", [user("a"), says("<think>\n\n</think>\n\nb")],
         ["<think>\n\n</think>\n\nb<|im_end|>"]),
    Case("tool call, thought and answer", "empty_think",
         [user("2+2?"), says("", "add", tool_calls=[CALL]), {"role": "tool", "content": "4"}, says("four", "now")],
         [f"<think>\nadd\n</think>\n\n{CALLED}<|im_end|>", "<think>\nnow\n</think>\n\nfour<|im_end|>"]),
    Case("tool calls with words", "empty_think", [user("2+2?"), says("Wait.", tool_calls=[CALL, CALL])], [f"Wait.\n{CALLED}\n{CALLED}<|im_end|>"],
         injected="<think>\n\n</think>\n\n"),
    Case("tool call without content", "empty_think", [user("2+2?"), says(None, tool_calls=[CALL])], [f"{CALLED}<|im_end|>"],
         arguments={"enable_thinking": False}),
    Case("tool call, thought not supervised", "empty_think", [user("2+2?"), says("", "add", tool_calls=[CALL])], [f"\n\n{CALLED}<|im_end|>"],
         spliced=False, flags={"reasoning": False}),
    Case("forced thought", "forced_think", THOUGHTS[:2], ["sum\n</think>\n\nfour<|im_end|>"]),
    Case("forced thought, two turns", "forced_think", THOUGHTS, ["again\n</think>\n\nyes<|im_end|>"], at=[3],
         notes=("the target answers behind '<|im_start|>assistant\\n<think>\\n'",)),
    Case("forced thought, inline", "forced_think", INLINE[:2], ["sum\n</think>\n\nfour<|im_end|>"]),
    Case("forced thought, not supervised", "forced_think", THOUGHTS[:2], ["\n\nfour<|im_end|>"], spliced=False, flags={"reasoning": False}),
    Case("forced thought inline, not supervised", "forced_think", INLINE[:2], ["\n\nfour<|im_end|>"], spliced=False, flags={"reasoning": False}),
    Case("alternating, own system", "alternating", [{"role": "system", "content": "Be brief."}, *TWO], ["It is four.<eos>", "Yes.<eos>"]),
    Case("today's date", "alternating", TWO, ["It is four.<eos>", "Yes.<eos>"], notes=("today's date",)),
    Case("structured tool call", "alternating", [user("2+2?"), says("", tool_calls=[CALL])],
         ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}]<eos>'], notes=("today's date",)),
    Case("stripped", "stripped", [user(" a "), says(" b\n"), user("c"), says("d")], ["b<end_of_turn>", "d<end_of_turn>"],
         notes=("strips white space",)),
    Case("stripped to nothing", "stripped", [user("a"), says(" \n"), user("c"), says("a")], ["<end_of_turn>", "a<end_of_turn>"],
         notes=("strips white space",)),
    Case("content in parts", "stripped", [user("a"), says([{"type": "text", "text": "b"}])], ["b<end_of_turn>"]),
    Case("blocks", "blocks", TWO, ["It is four.<|im_end|>", "Yes.<|im_end|>"]),
    Case("blocks, empty and last only", "blocks", [*TWO[:3], says("")], ["<|im_end|>"], at=[3], flags={"last_turn_only": True}),
    Case("blocks without the end of turn", "blocks_of_words", [user("a"), says("b\n</think>\nc"), user("d"), says("")],
         ["b\n</think>\nc<|end|>", "<|end|>"]),
    Case("blocks, thought not supervised", "blocks_of_words", [user("a"), says("b\n</think>\nc")], ["\nc<|end|>"], spliced=False,
         flags={"reasoning": False}),
    Case("channels", "channels", [user("a"), says("b", "c")],
         ["<|channel|>analysis<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"]),
    Case("channels without a thought", "channels", TWO, ["<|channel|>final<|message|>It is four.", "<|channel|>final<|message|>Yes.<|return|>"],
         notes=("not followed by the end-of-turn token",)),
    Case("channels, thought not supervised", "channels", [user("a"), says("b", "c")], ["b<|return|>"], spliced=False, flags={"reasoning": False}),
    Case("no marks at all", "no_marks", TWO, [" It is four.", " Yes."], notes=("no end-of-turn",)),
    Case("turns closed when another follows", "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + ('' if loop.last else eos_token) }}"
         "{% endfor %}{{ eos_token + '<|assistant|>' if add_generation_prompt }}", TWO, ["It is four.<eos>", "Yes."], notes=("no end-of-turn",)),
    Case("closed and ended without a prompt", "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if not loop.last %}{{ '<|end|>' }}"
         "{% endif %}{% endfor %}{{ '<|end|><|assistant|>' if add_generation_prompt else '<|end|><eos>' }}", TWO,
         ["It is four.<|end|>", "Yes.<|end|>"]),
    Case("a block of another name, no field for thoughts", wrapped("<reason>\n\n</reason>\n\n"), TWO, ["It is four.<|end|>", "Yes.<|end|>"],
         injected="<reason>\n\n</reason>\n\n"),
    Case("a block without tags that close", wrapped("<<thought{{ m.reasoning_content }}thought>>"), TWO, ["It is four.<|end|>", "Yes.<|end|>"],
         injected="<<thoughtthought>>"),
    Case("a thought without tags that close", wrapped("<<thought{{ m.reasoning_content }}thought>>"), THOUGHTS[:2],
         ["<<thoughtsumthought>>four<|end|>"]),
    Case("an empty answer behind a block", wrapped("<think></think>{{ '\n' if m.content }}"), [user("a"), says("")], ["<|end|>"],
         injected="<think></think>"),
    Case("a first sentence that looks like a block", "default_system", [user("a"), says("<b></b> bold")], ["<b></b> bold<|im_end|>"]),
    Case("calls are closed otherwise", wrapped("{% if m.tool_calls %}<|channel|>{{ m.tool_calls[0].function.name }}<|message|>{% endif %}",
         "{{ '<|return|>' if m.tool_calls else '<|end|>' }}"), [user("a"), says("", tool_calls=[CALL])], ["<|channel|>add<|message|><|return|>"]),
    Case("only questions are closed", "{% for m in messages %}{{ '\nQ:' ~ m.content ~ eos_token if m.role == 'user' else 'A:' ~ m.content }}{% endfor %}"
         "{{ 'A:' if add_generation_prompt }}", TWO, ["It is four.", "Yes."], notes=("no end-of-turn",)),
    Case("no generation prompt", "no_generation_prompt", TWO, ["It is four.<eos>", "Yes.<eos>"], injected="<|assistant|>\n"),
]  # fmt: skip


@pytest.mark.parametrize("pieces", ["lines", "trimmed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_mask_is_what_the_target_would_have_said(case, pieces):
    chat = chat_of(case.template, pieces, **case.arguments)
    found = supervise(chat, case.messages, case.tools, **case.flags)
    assert "".join(found.pieces) == chat.text(case.messages, generation_prompt=False, tools=case.tools)
    assert found.ids == chat.encode("".join(found.pieces)) and len(found.ids) == len(found.mask) == len(found.pieces)
    assert stretches(found) == case.expected
    assert found.method == (BLOCKS if case.template.startswith("blocks") else RENDERINGS)
    notes = [note for note in found.notes if "boundary" not in note]
    assert len(notes) == len(case.notes) and all(words in "; ".join(notes) for words in case.notes), found.notes
    if case.spliced and notes == found.notes and not (case.injected and pieces == "trimmed"):
        assert_simulated(case, chat, found)


def assert_simulated(case, chat, found):
    """The chat begins with what the simulated target read and said, and only what it said is supervised."""
    turns = case.at or [i for i, message in enumerate(case.messages) if message["role"] == "assistant"]
    expected = [False] * len(found.ids)
    for index, said in zip(turns, case.expected, strict=True):
        prompt = chat.encode(chat.text(case.messages[:index], generation_prompt=True, tools=case.tools) + case.injected)
        answer = chat.encode(said)
        assert found.ids[: len(prompt) + len(answer)] == prompt + answer
        expected[len(prompt) : len(prompt) + len(answer)] = [True] * len(answer)
    assert found.mask == expected


def test_exact_tokens():
    """Token by token: a character of several tokens is supervised in all of them."""
    found = supervise(chat_of("one_token_roles"), [user("é"), says("é two")])
    assert list(zip(found.pieces, found.mask, strict=True)) == [
        ("<|user|>", False), ("é", False), ("", False), ("<|end|>", False),
        ("<|assistant|>", False), ("é", True), ("", True), (" two", True), ("<|end|>", True), ("<|endoftext|>", False),
    ]  # fmt: skip


@pytest.mark.parametrize("pieces", ["lines", "whole"])
def test_a_token_that_begins_in_the_prompt_is_not_supervised(pieces):
    """The prompt ends in a newline and the answer begins with one: one token of both."""
    template = "{% for m in messages %}{{ m['content'] + ('\n' if m['role'] == 'user' else eos_token) }}{% endfor %}"
    found = supervise(chat_of(template, pieces), [user("?"), says("\nfour")])
    assert any(piece.endswith("\n\n") for piece in found.pieces)
    assert stretches(found) == ["four<eos>"]
    assert any("1 tokens lie on the boundary" in note for note in found.notes)


def test_a_prompt_that_is_tokenised_differently_alone_is_noted():
    """GPT-2's way: "\\n\\n" is one token at the end of a prompt and two before a word, so the target read other tokens."""
    chat = chat_of("empty_think", "trimmed", enable_thinking=False)
    found = supervise(chat, TWO[:2])
    assert stretches(found) == ["It is four.<|im_end|>"]
    assert any("1 answers change the tokens before them" in note for note in found.notes)
    assert not supervise(chat_of("empty_think", enable_thinking=False), TWO[:2]).notes


@pytest.mark.parametrize("pieces", ["lines", "trimmed"])
def test_a_space_of_the_prompt_joined_with_the_answer(pieces):
    """The offsets of some tokenizers leave the space out; the token begins there all the same."""
    template = "{% for m in messages %}{{ m['content'] + (': ' if m['role'] == 'user' else eos_token) }}{% endfor %}"
    found = supervise(chat_of(template, pieces), [user("?"), says("two is two")])
    assert stretches(found) == [" is two<eos>"]
    assert any("boundary" in note for note in found.notes)


def test_an_end_without_a_token_leaves_the_end_of_the_answer():
    found = supervise(chat_of("no_marks", "whole"), [user("a"), says("is Paris")])
    assert stretches(found)[0].startswith(" is Paris")


def test_all_of_the_chat_is_read_again_where_the_day_changes(monkeypatch):
    """A template that renders differently each time is refused; one whose day changes once is compared anew."""

    class Clock:
        ticks = 0

        @classmethod
        def now(cls):
            return cls

        @classmethod
        def strftime(cls, _format):
            cls.ticks += 1
            return str(cls.ticks if cls.every else min(cls.ticks, 3))

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    chat = chat_of("alternating")
    Clock.every = False
    assert stretches(supervise(chat, TWO)) == ["It is four.<eos>", "Yes.<eos>"]
    Clock.every = True
    with pytest.raises(UserError, match="differently each time"):
        supervise(chat, TWO)


REFUSED = [
    ("default_system", {}, [user("a")], "no assistant turn"),
    ("default_system", {}, [says("a")], "begins with it"),
    ("alternating", {}, [user("a"), user("b"), says("c")], "must alternate"),
    ("drops_all_reasoning", {}, INLINE, "does not show its content as it is"),
    ("drops_all_reasoning", {}, THOUGHTS[:2], "drops its reasoning"),
    ("drops_all_reasoning", {}, [user(MARK), *THOUGHTS[1:2]], "drops its reasoning"),
    ("{% if messages[-1]['role'] == 'assistant' %}!{% endif %}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}",
     {}, [*TWO[:2], user("x")], "rendered differently"),
    ("drops_all_reasoning", {"forced": True}, TWO, "answers behind '<|assistant|><think>\\n', so it begins with reasoning"),
    ("drops_all_reasoning", {"forced": True}, TWO, "rendered without: the answer has none"),
    ("drops_all_reasoning", {"forced": True}, INLINE, "rendered without: the template drops it"),
    ("default_system", {}, [user("2+2?"), says("", tool_calls=[CALL])], "does not show all of its tool calls"),
    (wrapped("{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"), {}, [user("2+2?"), says("", tool_calls=[CALL, CALL])],
     "does not show all of its tool calls"),
    (wrapped("<think></think>"), {}, INLINE[:2], "writes '<think></think>' before its own reasoning"),
    ("forced_think", {}, TWO[:2], "answers behind"),
    ("{% for m in messages %}{{ m['content'] | upper + eos_token }}{% endfor %}", {}, TWO, "does not show its content"),
    ("{% for m in messages %}{{ m['content'] ~ messages | length ~ eos_token }}{% endfor %}", {}, [*TWO[:2], user("x")], "differently once"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "arguments", "messages", "words"), REFUSED)
def test_refused_by_name(template, arguments, messages, words):
    with pytest.raises(UserError) as caught:
        supervise(chat_of(template, **arguments), messages)
    assert words in str(caught.value)


def test_a_last_turn_that_is_not_what_was_said_is_refused():
    with pytest.raises(UserError, match="answer 2 of 2"):
        supervise(chat_of("drops_all_reasoning"), [*TWO[:2], *INLINE[2:]], last_turn_only=True)
    assert stretches(supervise(chat_of("drops_all_reasoning"), [*TWO[:2], *INLINE[2:]])) == ["It is four.<eos>"]


def test_blocks_that_mark_nothing_are_passed_over():
    template = "{% for m in messages %}{% if m['role'] == 'system' %}{% generation %}x{% endgeneration %}{% endif %}{{ m['content'] + eos_token }}{% endfor %}"
    found = supervise(chat_of(template), TWO)
    assert found.method == RENDERINGS and stretches(found) == ["It is four.<eos>", "Yes.<eos>"]
    assert any("mark nothing" in note for note in found.notes)


def test_a_first_answer_without_a_question_is_left_out():
    found = supervise(chat_of("default_system"), [says("Hello."), *TWO])
    assert stretches(found) == ["It is four.<|im_end|>", "Yes.<|im_end|>"]
    assert any("answer 1 of 3 is not supervised: the chat begins with it" in note for note in found.notes)


def test_the_messages_stay_as_they_were():
    messages = [user("2+2?"), says("", "add", tool_calls=[CALL])]
    before = repr(messages)
    supervise(chat_of("empty_think"), messages)
    assert repr(messages) == before


AWKWARD = [
    "",
    " ",
    "\n",
    "\n\n",
    "Yes.",
    "assistant",
    "user\n",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|end|>",
    "[/INST]",
    "<eos>",
    "é",
    "🙂",
    MARK,
    "<think>",
    "</think>",
]
ENDS = {"default_system": "<|im_end|>", "one_token_roles": "<|end|>", "alternating": "<eos>", "blocks": "<|im_end|>"}


@pytest.mark.parametrize("template", ENDS)
def test_random_chats_against_the_simulated_target(template):
    """Templates that rewrite nothing: every answer and its end of turn count, whatever was said, and nothing else does."""
    source = random.Random(0)

    def words() -> str:
        return "".join(source.choices(AWKWARD, k=source.randint(0, 4)))

    clean = 0
    for _ in range(60):
        turns = source.randint(1, 3)
        messages = [{"role": "system", "content": words()}]
        messages += [message for _ in range(turns) for message in (user(words()), says(words()))]
        chat = chat_of(template)
        found = supervise(chat, messages)
        if any("boundary" in note for note in found.notes):
            continue  # no ids can be put together there
        clean += 1
        expected = [False] * len(found.ids)
        for index in range(2, len(messages), 2):
            prompt = chat.encode(chat.text(messages[:index], generation_prompt=True))
            answer = chat.encode(messages[index]["content"] + ENDS[template])
            expected[len(prompt) : len(prompt) + len(answer)] = [True] * len(answer)
        assert found.mask == expected, messages
    assert clean > 20
