"""What is right for chats under templates with the habits of real models: every supervised stretch as a literal, or why there is none.

`templates/models/` holds one small template a model, written from memory of what its own does. Words behind a "!" are those of the
refusal; everything else is what the target would have said, first answer token to end of turn.
"""

from dataclasses import dataclass, field

from mask_chats import CALL, INLINE, THOUGHTS, TWO, says, user

TOOL = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
RESULT = {"role": "tool", "content": "4"}
CHATS: dict[str, tuple[list[dict], list | None]] = {
    "single": ([user("what?"), says("It is four.")], None),
    "multi": (TWO, None),
    "system": ([{"role": "system", "content": "Be brief."}, *TWO], None),
    "trailing": ([*TWO, user("and?")], None),
    "empty": ([user("a"), says(""), user("b"), says("")], None),
    "spaces": ([user("a"), says(" b \n"), user("c"), says("\n\nd")], None),
    "inline1": (INLINE[:2], None),
    "inline2": (INLINE, None),
    "field1": (THOUGHTS[:2], None),
    "field2": (THOUGHTS, None),
    "tool": ([user("2+2?"), says("", tool_calls=[CALL]), RESULT, says("four")], TOOL),
    "tooltalk": ([user("2+2?"), says("Wait.", tool_calls=[CALL]), RESULT, says("four"), user("and?"), says("done")], TOOL),
    "toolthink": ([user("2+2?"), says("", "add", tool_calls=[CALL]), RESULT, says("four", "now")], TOOL),
}
"""Name -> messages, tools. Thoughts stand in the content (inline) or in a field of their own."""
PLAIN = {
    "single": ["It is four."],
    "multi": ["It is four.", "Yes."],
    "system": ["It is four.", "Yes."],
    "trailing": ["It is four.", "Yes."],
    "empty": ["", ""],
}
"""The words of chats that nothing is special about."""


@dataclass(frozen=True)
class Model:
    template: str
    cases: dict[str, list[str] | str]
    """Chat -> stretches, or "!words of the refusal"; "*" for all chats that are not named."""
    around: tuple[str, str] | None = None
    """What the target says before and after the words of each answer in the chats of PLAIN that `cases` does not name."""
    arguments: dict = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    """What its generation config names as ends of an answer, besides the tokenizer's own."""

    def expected(self, chat: str) -> list[str] | str:
        if chat in self.cases or self.around is None or chat not in PLAIN:
            return self.cases.get(chat, self.cases.get("*", ""))
        return [self.around[0] + words + self.around[1] for words in PLAIN[chat]]


MODELS = [
    Model(
        "chatml_bare",
        {
            "spaces": [" b \n<|im_end|>", "\nd<|im_end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|im_end|>", "<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "tool": ["four<|im_end|>"],
            "tooltalk": ["four<|im_end|>", "done<|im_end|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|im_end|>"),
    ),
    Model(
        "command_a",
        {
            "spaces": ["<|START_RESPONSE|> b \n<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>\n\nd<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "inline1": ["<|START_RESPONSE|><think>\nsum\n</think>\n\nfour<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "inline2": ["<|START_RESPONSE|><think>\nsum\n</think>\n\nfour<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|><think>\nagain\n</think>\n\nyes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "field1": ["<|START_THINKING|>sum<|END_THINKING|><|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "field2": ["<|START_THINKING|>sum<|END_THINKING|><|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|START_THINKING|>again<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "tool": ['<|START_THINKING|><|END_THINKING|><|START_ACTION|>[{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>', "<|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "tooltalk": ["<|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>done<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
            "toolthink": ["<|START_THINKING|>now<|END_THINKING|><|START_RESPONSE|>four<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
        },
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ends=("<|END_OF_TURN_TOKEN|>",),
    ),
    Model(
        "command_r",
        {
            "spaces": ["b<|END_OF_TURN_TOKEN|>", "d<|END_OF_TURN_TOKEN|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|END_OF_TURN_TOKEN|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|END_OF_TURN_TOKEN|>", "<think>\nagain\n</think>\n\nyes<|END_OF_TURN_TOKEN|>"],
            "tool": ["four<|END_OF_TURN_TOKEN|>"],
            "tooltalk": ["four<|END_OF_TURN_TOKEN|>", "done<|END_OF_TURN_TOKEN|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|END_OF_TURN_TOKEN|>"),
    ),
    Model(
        "deepseek_v3",
        {
            "spaces": [" b \n<eos>", "\n\nd<eos>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<eos>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<eos>", "<think>\nagain\n</think>\n\nyes<eos>"],
            "tool": ['<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n{"a": 2, "b": [2, "<|x|>"]}\n```<|tool_call_end|><|tool_calls_end|><eos>', "four<eos>"],
            "tooltalk": ['Wait.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add\n```json\n{"a": 2, "b": [2, "<|x|>"]}\n```<|tool_call_end|><|tool_calls_end|><eos>', "four<eos>", "done<eos>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<eos>"),
    ),
    Model(
        "deepseek_v31",
        {
            "spaces": [" b \n<eos>", "\n\nd<eos>"],
            "inline1": "!does not show its content",
            "inline2": "!does not show its content",
            "tool": ['<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_end|><eos>', "four<eos>"],
            "tooltalk": ['Wait.<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_end|><eos>', "four<eos>", "done<eos>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<eos>"),
    ),
    Model(
        "gemma3",
        {
            "spaces": ["b<end_of_turn>", "d<end_of_turn>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<end_of_turn>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<end_of_turn>", "<think>\nagain\n</think>\n\nyes<end_of_turn>"],
            "field1": "!template drops its reasoning",
            "field2": "!template drops its reasoning",
            "*": "!must alternate",
        },
        around=("", "<end_of_turn>"),
    ),
    Model(
        "gemma4",
        {
            "*": "!but the chat is rendered without that",
        },
    ),
    Model(
        "glm45",
        {
            "single": ["It is four."],
            "multi": ["It is four.<|user|>", "Yes."],
            "system": ["It is four.<|user|>", "Yes."],
            "trailing": ["It is four.<|user|>", "Yes.<|user|>"],
            "empty": ["<|user|>"],
            "spaces": ["b<|user|>", "d"],
            "inline1": ["\n<think>sum</think>\nfour"],
            "inline2": ["\n<think>again</think>\nyes"],
            "field1": ["\n<think>sum</think>\nfour"],
            "field2": ["\n<think>again</think>\nyes"],
            "tool": ['<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2, "<|x|>"]</arg_value>\n</tool_call><|observation|>', "four"],
            "tooltalk": ['Wait.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2, "<|x|>"]</arg_value>\n</tool_call><|observation|>', "four<|user|>", "done"],
            "toolthink": ['\n<think>add</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2, "<|x|>"]</arg_value>\n</tool_call><|observation|>', "\n<think>now</think>\nfour"],
        },
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    Model(
        "granite3",
        {
            "spaces": [" b \n<|end_of_text|>", "\n\nd<|end_of_text|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|end_of_text|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|end_of_text|>", "<think>\nagain\n</think>\n\nyes<|end_of_text|>"],
            "tool": ['<|tool_call|>[{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}]<|end_of_text|>', "four<|end_of_text|>"],
            "tooltalk": ["four<|end_of_text|>", "done<|end_of_text|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|end_of_text|>"),
    ),
    Model(
        "harmony",
        {
            "single": ["<|channel|>final<|message|>It is four.<|return|>"],
            "multi": ["<|channel|>final<|message|>It is four.", "<|channel|>final<|message|>Yes.<|return|>"],
            "system": ["<|channel|>final<|message|>It is four.", "<|channel|>final<|message|>Yes.<|return|>"],
            "trailing": ["<|channel|>final<|message|>It is four.", "<|channel|>final<|message|>Yes."],
            "empty": ["<|channel|>final<|message|>", "<|channel|>final<|message|><|return|>"],
            "spaces": ["<|channel|>final<|message|> b \n", "<|channel|>final<|message|>\n\nd<|return|>"],
            "inline1": ["<|channel|>final<|message|><think>\nsum\n</think>\n\nfour<|return|>"],
            "inline2": ["<|channel|>final<|message|><think>\nsum\n</think>\n\nfour", "<|channel|>final<|message|><think>\nagain\n</think>\n\nyes<|return|>"],
            "field1": ["<|channel|>analysis<|message|>sum<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"],
            "field2": ["<|channel|>analysis<|message|>again<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"],
            "tool": [' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": [2, "<|x|>"]}<|call|>', "<|channel|>final<|message|>four<|return|>"],
            "tooltalk": ['<|channel|>analysis<|message|>Wait.<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": [2, "<|x|>"]}<|call|>', "<|channel|>final<|message|>four", "<|channel|>final<|message|>done<|return|>"],
            "toolthink": ['<|channel|>analysis<|message|>add<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": [2, "<|x|>"]}<|call|>', "<|channel|>analysis<|message|>now<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"],
        },
        ends=("<|return|>", "<|call|>"),
    ),
    Model(
        "kimi_k2",
        {
            "spaces": [" b \n<|im_end|>", "\n\nd<|im_end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|im_end|>", "<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "tool": ['<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', "four<|im_end|>"],
            "tooltalk": ['Wait.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', "four<|im_end|>", "done<|im_end|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|im_end|>"),
    ),
    Model(
        "kimi_k2_thinking",
        {
            "spaces": [" b \n<|im_end|>", "\n\nd<|im_end|>"],
            "inline1": "!before its own reasoning",
            "inline2": "!before its own reasoning",
            "field1": ["<think>sum</think>four<|im_end|>"],
            "field2": ["<think>again</think>yes<|im_end|>"],
            "tool": ['<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', "four<|im_end|>"],
            "tooltalk": ['Wait.<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', "four<|im_end|>", "done<|im_end|>"],
            "toolthink": ['<think>add</think><|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{"a": 2, "b": [2, "<|x|>"]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>', "<think>now</think>four<|im_end|>"],
        },
        around=("", "<|im_end|>"),
    ),
    Model(
        "llama2",
        {
            "spaces": [" b <eos>", " d <eos>"],
            "inline1": [" <think>\nsum\n</think>\n\nfour <eos>"],
            "inline2": [" <think>\nsum\n</think>\n\nfour <eos>", " <think>\nagain\n</think>\n\nyes <eos>"],
            "field1": "!template drops its reasoning",
            "field2": "!template drops its reasoning",
            "*": "!must alternate",
        },
        around=(" ", " <eos>"),
    ),
    Model(
        "llama31",
        {
            "spaces": ["b<|eot_id|>", "d<|eot_id|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|eot_id|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|eot_id|>", "<think>\nagain\n</think>\n\nyes<|eot_id|>"],
            "tool": ['{"name": "add", "parameters": {"a": 2, "b": [2, "<|x|>"]}}<|eot_id|>', "four<|eot_id|>"],
            "tooltalk": ["four<|eot_id|>", "done<|eot_id|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|eot_id|>"),
        ends=("<|eot_id|>",),
    ),
    Model(
        "minimax_m2",
        {
            "inline1": ["sum\n</think>\n\nfour[e~["],
            "inline2": ["again\n</think>\n\nyes[e~["],
            "field1": ["sum\n</think>\n\nfour[e~["],
            "field2": ["again\n</think>\n\nyes[e~["],
            "toolthink": ['add\n</think>\n\n\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n<parameter name="b">[2, "<|x|>"]</parameter>\n</invoke>\n</minimax:tool_call>[e~[', "now\n</think>\n\nfour[e~["],
            "*": "!so it begins with reasoning, and the chat is rendered without: the answer has none",
        },
    ),
    Model(
        "mistral3",
        {
            "system": "!rendered differently once",
            "spaces": [" b<eos>", " d<eos>"],
            "inline1": [" <think>\nsum\n</think>\n\nfour<eos>"],
            "inline2": [" <think>\nsum\n</think>\n\nfour<eos>", " <think>\nagain\n</think>\n\nyes<eos>"],
            "tool": ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}]<eos>', " four<eos>"],
            "tooltalk": [" done<eos>"],
            "*": "!template drops its reasoning",
        },
        around=(" ", "<eos>"),
    ),
    Model(
        "nemotron_super",
        {
            "spaces": ["b<|eot_id|>", "d<|eot_id|>"],
            "inline1": "!does not show its content",
            "inline2": "!does not show its content",
            "tool": ["four<|eot_id|>"],
            "tooltalk": ["four<|eot_id|>", "done<|eot_id|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|eot_id|>"),
    ),
    Model(
        "olmo2",
        {
            "spaces": [" b \n<eos>", "\nd<eos>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<eos>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<eos>", "<think>\nagain\n</think>\n\nyes<eos>"],
            "tool": ["four<eos>"],
            "tooltalk": ["four<eos>", "done<eos>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<eos>"),
    ),
    Model(
        "phi3",
        {
            "spaces": [" b \n<|end|>", "\nd<|end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|end|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|end|>", "<think>\nagain\n</think>\n\nyes<|end|>"],
            "tool": ["four<|end|>"],
            "tooltalk": ["four<|end|>", "done<|end|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|end|>"),
        ends=("<|end|>", "<|endoftext|>"),
    ),
    Model(
        "qwen25",
        {
            "spaces": [" b \n<|im_end|>", "\nd<|im_end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|im_end|>", "<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "tool": ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call><|im_end|>', "four<|im_end|>"],
            "tooltalk": ['Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call><|im_end|>', "four<|im_end|>", "done<|im_end|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|im_end|>"),
    ),
    Model(
        "qwen3",
        {
            "spaces": [" b \n<|im_end|>", "d<|im_end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "field1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "field2": ["<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "tool": ['<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call><|im_end|>', "four<|im_end|>"],
            "tooltalk": ['Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call><|im_end|>', "four<|im_end|>", "done<|im_end|>"],
            "toolthink": ['<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call><|im_end|>', "<think>\nnow\n</think>\n\nfour<|im_end|>"],
        },
        around=("", "<|im_end|>"),
    ),
    Model(
        "qwen3_thinking",
        {
            "single": ["It is four.<|im_end|>"],
            "multi": ["Yes.<|im_end|>"],
            "system": ["Yes.<|im_end|>"],
            "trailing": "!so it begins with reasoning, and the chat is rendered without: the answer has none",
            "empty": ["<|im_end|>"],
            "spaces": ["d<|im_end|>"],
            "inline1": ["sum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["again\n</think>\n\nyes<|im_end|>"],
            "field1": ["sum\n</think>\n\nfour<|im_end|>"],
            "field2": ["again\n</think>\n\nyes<|im_end|>"],
            "tool": ["four<|im_end|>"],
            "tooltalk": ["done<|im_end|>"],
            "toolthink": ['add\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2, "<|x|>"]}}\n</tool_call><|im_end|>', "now\n</think>\n\nfour<|im_end|>"],
        },
    ),
    Model(
        "r1_distill",
        {
            "inline1": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "inline2": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "field1": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "field2": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "toolthink": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "*": "!so it begins with reasoning, and the chat is rendered without: the answer has none",
        },
    ),
    Model(
        "seed_oss",
        {
            "spaces": ["b<eos>", "d<eos>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<eos>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<eos>", "<think>\nagain\n</think>\n\nyes<eos>"],
            "field1": ["<seed:think>sum</seed:think>four<eos>"],
            "field2": ["<seed:think>sum</seed:think>four<eos>", "<seed:think>again</seed:think>yes<eos>"],
            "tool": ['<seed:tool_call>\n<function=add>{"a": 2, "b": [2, "<|x|>"]}</function>\n</seed:tool_call><eos>', "four<eos>"],
            "tooltalk": ['Wait.<seed:tool_call>\n<function=add>{"a": 2, "b": [2, "<|x|>"]}</function>\n</seed:tool_call><eos>', "four<eos>", "done<eos>"],
            "toolthink": ['<seed:think>add</seed:think><seed:tool_call>\n<function=add>{"a": 2, "b": [2, "<|x|>"]}</function>\n</seed:tool_call><eos>', "<seed:think>now</seed:think>four<eos>"],
        },
        around=("", "<eos>"),
    ),
    Model(
        "smollm3",
        {
            "spaces": [" b \n<|im_end|>", "d<|im_end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|im_end|>", "<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "tool": ["four<|im_end|>"],
            "tooltalk": ["four<|im_end|>", "done<|im_end|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|im_end|>"),
    ),
    Model(
        "zephyr",
        {
            "spaces": ["\n b \n<eos>", "\n\n\nd<eos>"],
            "inline1": ["\n<think>\nsum\n</think>\n\nfour<eos>"],
            "inline2": ["\n<think>\nsum\n</think>\n\nfour<eos>", "\n<think>\nagain\n</think>\n\nyes<eos>"],
            "tool": ["\nfour<eos>"],
            "tooltalk": ["\nfour<eos>", "\ndone<eos>"],
            "*": "!template drops its reasoning",
        },
        around=("\n", "<eos>"),
    ),
    Model(
        "qwen3",
        {
            "single": ["It is four.<|im_end|>"],
            "multi": ["Yes.<|im_end|>"],
            "system": ["Yes.<|im_end|>"],
            "empty": ["<|im_end|>"],
            "spaces": ["d<|im_end|>"],
            "tool": ["four<|im_end|>"],
            "tooltalk": ["done<|im_end|>"],
            "*": "!but the chat is rendered without that",
        },
        arguments={"enable_thinking": False},
    ),
    Model(
        "gemma4",
        {
            "spaces": ["b<turn|>", "d<turn|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<turn|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<turn|>", "<think>\nagain\n</think>\n\nyes<turn|>"],
            "tool": ['<|tool_call>call:add{"a": 2, "b": [2, "<|x|>"]}<tool_call|><turn|>', "four<turn|>"],
            "tooltalk": ['<|tool_call>call:add{"a": 2, "b": [2, "<|x|>"]}<tool_call|>Wait.<turn|>', "four<turn|>", "done<turn|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<turn|>"),
        arguments={"enable_thinking": True},
    ),
    Model(
        "glm45",
        {
            "single": ["\nIt is four."],
            "multi": ["\nIt is four.<|user|>", "\nYes."],
            "system": ["\nIt is four.<|user|>", "\nYes."],
            "trailing": ["\nIt is four.<|user|>", "\nYes.<|user|>"],
            "empty": ["<|user|>"],
            "spaces": ["\nb<|user|>", "\nd"],
            "tool": ['\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2, "<|x|>"]</arg_value>\n</tool_call><|observation|>', "\nfour"],
            "tooltalk": ['\nWait.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>[2, "<|x|>"]</arg_value>\n</tool_call><|observation|>', "\nfour<|user|>", "\ndone"],
            "*": "!but the chat is rendered without that",
        },
        arguments={"enable_thinking": False},
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    Model(
        "smollm3",
        {
            "spaces": [" b \n<|im_end|>", "d<|im_end|>"],
            "inline1": ["<think>\nsum\n</think>\n\nfour<|im_end|>"],
            "inline2": ["<think>\nsum\n</think>\n\nfour<|im_end|>", "<think>\nagain\n</think>\n\nyes<|im_end|>"],
            "tool": ["four<|im_end|>"],
            "tooltalk": ["four<|im_end|>", "done<|im_end|>"],
            "*": "!template drops its reasoning",
        },
        around=("", "<|im_end|>"),
        arguments={"enable_thinking": False},
    ),
    Model(
        "deepseek_v31",
        {
            "inline1": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "inline2": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "field1": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "field2": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "tool": ["four<eos>"],
            "tooltalk": ["four<eos>"],
            "toolthink": "!so it begins with reasoning, and the chat is rendered without: the template drops it",
            "*": "!so it begins with reasoning, and the chat is rendered without: the answer has none",
        },
        arguments={"thinking": True},
    ),
]  # fmt: skip
