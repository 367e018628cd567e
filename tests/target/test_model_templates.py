"""Masks under templates with the habits of twenty-five models, against literals (`golden.py`), for two ways of cutting text."""

import re
from pathlib import Path

import pytest
from golden import CHATS, MODELS
from mask_chats import build, stretches
from tokenizers import AddedToken

from drafttrain.errors import UserError
from drafttrain.target.masks import supervise
from drafttrain.target.template import ChatTemplate

FOLDER = Path(__file__).parent / "templates" / "models"
SPECIAL = re.compile(
    r"<\|[A-Za-z_ ]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\]~!b\[|\]~b\]|\[e~\["
)
"""Spellings of special tokens in the templates; tags of thoughts and calls are text."""
BUILT = {"<|user|>", "<|system|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"}
"""Those that a template puts together from the role."""
THINKING = {"harmony": "thinking", "command_a": "thinking"}
"""Where templates read thoughts under another name."""
HEADERS = {"chatml_bare": "<|im_start|>assistant\n"}
"""What a template without a generation prompt writes before an answer."""


def tokenizers() -> dict:
    found = set().union(*(SPECIAL.findall(file.read_text()) for file in FOLDER.glob("*.jinja"))) | BUILT
    made = {pieces: build(pieces) for pieces in ("lines", "trimmed")}
    for tokenizer in made.values():
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(found)], special_tokens=True)
    return made


TOKENIZERS = tokenizers()


def template_of(model, pieces: str) -> ChatTemplate:
    tokenizer = TOKENIZERS[pieces]
    tokenizer.chat_template = (FOLDER / f"{model.template}.jinja").read_text().rstrip("\n")
    ends = tokenizer.convert_tokens_to_ids(list(model.ends))
    return ChatTemplate(tokenizer, model.arguments, model.template, ends)


def messages_of(model, chat: str) -> list[dict]:
    name = THINKING.get(model.template, "reasoning_content")
    return [{(name if key == "reasoning_content" else key): value for key, value in m.items()} for m in CHATS[chat][0]]


def test_every_template_has_its_models():
    assert {model.template for model in MODELS} == {file.stem for file in FOLDER.glob("*.jinja")}


@pytest.mark.parametrize("pieces", TOKENIZERS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join([model.template, *map(str, model.arguments)]))
def test_masks(model, chat, pieces):
    template, messages, tools, expected = (
        template_of(model, pieces),
        messages_of(model, chat),
        CHATS[chat][1],
        model.expected(chat),
    )
    if isinstance(expected, str):
        with pytest.raises(UserError) as caught:
            supervise(template, messages, tools)
        assert expected.startswith("!") and expected[1:] in str(caught.value)
        return
    found = supervise(template, messages, tools)
    joined = any("boundary" in note for note in found.notes)
    assert stretches(found) == expected or (joined and pieces == "trimmed")
    if not joined:
        assert_behind_what_was_read(template, messages, tools, found)
    assert (len(found.notes) > 0) >= (len(expected) < sum(m["role"] == "assistant" for m in messages))


def assert_behind_what_was_read(template, messages, tools, found):
    """Before every stretch stands a prompt of the chat, token for token, and behind it nothing but what the template writes itself."""
    prompts = [
        template.text(messages[:index], True, tools) for index, m in enumerate(messages) if m["role"] == "assistant" and index
    ]
    starts = [t for t in range(len(found.mask)) if found.mask[t] and not found.mask[t - 1]]
    for start in starts:
        before = "".join(found.pieces[:start])
        prompt = max((text for text in prompts if before.startswith(text)), key=len)
        assert found.ids[: len(template.encode(prompt))] == template.encode(prompt)
        written = before[len(prompt) :].removeprefix(HEADERS.get(template.path, ""))
        assert set(written) <= set("</think>\n"), written


@pytest.mark.parametrize("format", ["%Y-%m-%d", "%d %b %Y"])
def test_a_date_is_noted_only_where_it_is_written(format):
    model = next(model for model in MODELS if model.template == "llama31")
    template = template_of(model, "lines")
    assert any("today's date" in note for note in supervise(template, CHATS["multi"][0]).notes)
    given = ChatTemplate(template.tokenizer, {"date_string": format}, "llama31", template.end_ids)
    assert supervise(given, CHATS["multi"][0]).notes == []
