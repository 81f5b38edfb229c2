"""Formats of tool calls: how a model of each family writes an answer for vLLM's parser of that name.

Written from the parsers' documented formats. A writer takes the calls of an answer, by name and arguments.
"""

# ruff: noqa: RUF001  the letters of the formats are these

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.rollout.gateway.families.writers import (
    Writer,
    dsml,
    dump,
    each,
    elements,
    gemma,
    kimi_k2,
    kimi_k3,
    listed,
    objects,
    python,
    raw,
    tags,
)

HARD: dict[str, Any] = {
    "path": 'src/a "b".txt',
    "text": 'naïve 日本語 🙂\n\tif (a < b && c) {"x": [1]}',
    "options": {"deep": {"list": [1, 2.5, None, True, "é\\n"]}},
    "count": 3,
}
"""Arguments with quotes, escapes, other alphabets, markup and nested values."""
FLAT = {"path": 'src/a "b".txt', "text": "naïve 日本語 🙂\n\tif (a && c)", "count": 3}
NAMES = {"deep": {"name": "é\\n", "list": ["a"]}}


@dataclass(frozen=True)
class Answer:
    """One answer of the model: what it thinks and says, and the calls that it makes."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    thought: str = ""

    def written(self, family: str) -> str:
        """Return it as a model of the parser family writes it."""
        return FORMATS[family].write(self)


@dataclass(frozen=True)
class Format:
    """The way of one family.

    Attributes:
        write_calls: Returns the text of an answer's calls.
        tokens: Markers that are tokens of the family's tokenizers.
        hides_tokens: They are special tokens: text is decoded without them unless its parser wants them.
        reasoning: vLLM's name of the parser of its reasoning, empty if it has none.
        think: Markers around a thought, and around other text.
        says: Markers around text.
        takes_text: A call may follow text; its parser reads none there otherwise.
        is_single: An answer has one call at most.
        opens: End of the template's prompt, after the beginning of an assistant's message.
        asks: Arguments of the template with which a client has it think.
        metadata: Attributes of its tokenizer.
        hard: Arguments of the hard call, as far as its parser reads them.
    """

    write_calls: Writer
    tokens: tuple[str, ...] = ()
    reasoning: str = ""
    think: tuple[str, str] = ("<think>", "</think>")
    says: tuple[str, str] = ("", "")
    takes_text: bool = True
    is_single: bool = False
    hides_tokens: bool = True
    opens: str = ""
    asks: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    hard: Mapping[str, Any] = field(default_factory=lambda: HARD)

    def possible(self, answer: Answer) -> Answer:
        """Return what a model of the family can say of an answer."""
        return Answer(
            answer.text if self.takes_text or not answer.calls else "",
            answer.calls[:1] if self.is_single else answer.calls,
            answer.thought if self.reasoning else "",
        )

    def write(self, answer: Answer) -> str:
        """Return such an answer as the model writes it."""
        thought = answer.thought.join(self.think) if self.reasoning else ""
        said = answer.text.join(self.says) if answer.text else ""
        between = "\n" if said and answer.calls and not self.says[0] else ""
        return thought + said + between + (self.write_calls(answer.calls) if answer.calls else "")


PLAMO = "<|plamo:{}:plamo|>".format
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
THINK, TOOL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
HERMES = Format(objects("<tool_call>\n", "\n</tool_call>"), THINK + TOOL, "qwen3")
ARGUMENT = "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n"
ARG_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = tags("<tool_call>{}\n", ARGUMENT, "</tool_call>")
QWEN = tags(
    "<tool_call>\n<function={}>\n", "<parameter={0}>\n{1}\n</parameter>\n", "</function>\n</tool_call>"
)
QWEN_ON_A_LINE = tags(
    "<tool_call>\n<function={}>\n", "<parameter={0}>{1}</parameter>\n", "</function>\n</tool_call>"
)
SEED = tags(
    "<seed:tool_call>\n<function={}>\n",
    "<parameter={0}>\n{1}\n</parameter>\n",
    "</function>\n</seed:tool_call>",
)
LLAMA = Format(objects("", between="; ", arguments="parameters"), ("<|python_tag|>",), takes_text=False)
HY_TOKENS = ("<tool_calls>", "</tool_calls>", *TOOL, *ARG_TOKENS)
IFM = [
    f"<{slash}ifm|{name}>"
    for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value")
    for slash in ("", "/")
]
ATEM = tags(
    '<|start|>assistant to=tool.{0}<|message|><atem:function_calls>\n<atem:invoke name="{0}">\n',
    '<atem:parameter name="{0}">{1}</atem:parameter>\n',
    "</atem:invoke>\n</atem:function_calls><|eom|>",
    between="",
)
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
    },
}
FORMATS: dict[str, Format] = {
    "apertus": Format(
        lambda calls: f"<|tools_prefix|>{dump([{name: given} for name, given in calls])}<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "deepseek_v3": Format(
        each(
            lambda name, given: (
                f"{DEEPSEEK[1]}function{DEEPSEEK[2]}{name}\n```json\n{dump(given)}\n```{DEEPSEEK[3]}"
            ),
            DEEPSEEK[0],
            "\n",
            DEEPSEEK[4],
        ),
        DEEPSEEK + THINK,
        "deepseek_v3",
        hides_tokens=False,
        asks={"thinking": True},
        opens="<think>",
    ),
    "deepseek_v31": Format(
        each(
            lambda name, given: f"{DEEPSEEK[1]}{name}{DEEPSEEK[2]}{dump(given)}{DEEPSEEK[3]}",
            DEEPSEEK[0],
            "",
            DEEPSEEK[4],
        ),
        DEEPSEEK + THINK,
        "deepseek_v3",
        ("", "</think>"),
        hides_tokens=False,
        asks={"thinking": True},
        opens="<think>",
    ),
    "deepseek_v32": Format(dsml("function_calls"), THINK),
    "deepseek_v4": Format(
        dsml("tool_calls"), THINK, "deepseek_v4", ("", "</think>"), asks={"thinking": True}, opens="<think>"
    ),
    "deepseek_v41": Format(
        dsml("calls", " "), THINK, "deepseek_v41", ("", "</think>"), asks={"thinking": True}, opens="<think>"
    ),
    "dots": Format(
        tags(
            '<dots_function_call>\n<invoke name="{}">\n',
            '<parameter name="{0}">{1}</parameter>\n',
            "</invoke>\n</dots_function_call>",
        )
    ),
    "ernie45": Format(
        objects("<tool_call>\n", "\n</tool_call>\n", between=""),
        (*THINK, *TOOL, "<response>", "</response>"),
        "ernie45",
        ("", "</think>"),
        hides_tokens=False,
        opens="<think>\n",
    ),
    "functiongemma": Format(
        each(
            lambda name, given: (
                f"<start_function_call>call:{name}{{"
                + ",".join(f"{k}:<escape>{raw(v)}<escape>" for k, v in given.items())
                + "}<end_function_call>"
            )
        ),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": Format(
        each(lambda name, given: f"<|tool_call>call:{name}{gemma('<|' + chr(34) + '|>', given)}<tool_call|>"),
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        "gemma4",
        ("<|channel>thought\n", "<channel|>"),
        hard={**HARD, "options": NAMES},
    ),
    "gigachat3": Format(
        objects("<|function_call|>"), ("<|function_call|>", "<|role_sep|>", "<|message_sep|>"), is_single=True
    ),
    "glm45": Format(GLM, THINK + TOOL + ARG_TOKENS, "glm45"),
    "glm47": Format(GLM, THINK + TOOL + ARG_TOKENS, "glm47"),
    "granite": Format(listed("<|tool_call|>"), ("<|tool_call|>",)),
    "granite-20b-fc": Format(objects("<function_call> "), takes_text=False),
    "granite4": Format(objects("<tool_call>\n", "\n</tool_call>"), TOOL),
    "hermes": HERMES,
    "hf": replace(HERMES, reasoning="hf", metadata={"response_template": RESPONSE_TEMPLATE}),
    "hunyuan_a13b": Format(listed("<tool_calls>", "</tool_calls>")),
    "hy_v3": Format(
        tags(
            "<tool_call>{}<tool_sep>\n",
            ARGUMENT,
            "</tool_call>\n",
            "<tool_calls>\n",
            "</tool_calls>",
            between="",
        ),
        (*THINK, *HY_TOKENS, "<tool_sep>"),
        "hy_v3",
        hides_tokens=False,
        asks={"reasoning_effort": "high"},
        opens="<think>",
    ),
    "hy_v4": Format(
        tags(
            "<tool_call>{}",
            ARGUMENT.replace("\n", ""),
            "</tool_call>",
            "<tool_calls>",
            "</tool_calls>",
            between="",
        ),
        THINK + HY_TOKENS,
        "hy_v4",
        hides_tokens=False,
        opens="<think>",
    ),
    "inkling": Format(
        objects(
            "<|message_model|><|content_invoke_tool_json|>", "<|end_message|>", between="", arguments="args"
        ),
        (
            "<|message_model|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_json|>",
            "<|content_invoke_tool_text|>",
            "<|content_tool_error|>",
            "<|content_model_end_sampling|>",
            "<|end_message|>",
        ),
        "inkling",
        ("<|message_model|><|content_thinking|>", "<|end_message|>"),
        ("<|message_model|><|content_text|>", "<|end_message|>"),
    ),
    "internlm": Format(
        objects("<|action_start|><|plugin|>", "<|action_end|>", arguments="parameters"),
        ("<|action_start|>", "<|action_end|>", "<|plugin|>"),
        is_single=True,
    ),
    "jamba": Format(listed("<tool_calls>", "</tool_calls>"), ("<tool_calls>", "</tool_calls>")),
    "k2_horizon": Format(
        tags(
            "<ifm|tool_call>{}",
            "<ifm|arg_key>{0}</ifm|arg_key><ifm|arg_value>{1}</ifm|arg_value>",
            "</ifm|tool_call>",
            "<ifm|tool_calls>",
            "</ifm|tool_calls>",
            between="",
        ),
        tuple(IFM),
        "k2_horizon",
        ("", "</ifm|think>"),
        opens="<ifm|think>",
        hides_tokens=False,
    ),
    "kimi_k2": Format(
        kimi_k2,
        (
            *THINK,
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        "kimi_k2",
    ),
    "kimi_k3": Format(
        kimi_k3,
        ("<|open|>", "<|close|>", "<|sep|>"),
        "kimi_k3",
        ("", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        opens="<|open|>think<|sep|>",
    ),
    "lfm2": Format(
        python("<|tool_call_start|>[", "]<|tool_call_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")
    ),
    "ling3": Format(GLM, THINK + TOOL + ARG_TOKENS, "ling3"),
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": Format(python(), takes_text=False),
    "longcat": Format(
        objects("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        ("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    "mimo": Format(QWEN_ON_A_LINE, THINK + TOOL, "mimo"),
    "minicpm5": Format(
        tags('<function name="{}">', '<param name="{0}">{1}</param>', "</function>"),
        ("<function", "</function>", "<param", "</param>"),
        takes_text=False,
    ),
    "minimax_m2": Format(
        tags(
            '<invoke name="{}">\n',
            '<parameter name="{0}">{1}</parameter>\n',
            "</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            between="",
        ),
        (*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        "minimax_m2",
        ("", "</think>"),
        opens="<think>\n",
    ),
    "minimax_m3": Format(
        each(
            lambda name, given: (
                f']<]minimax[>[<invoke name="{name}">{elements("]<]minimax[>[", given)}]<]minimax[>[</invoke>'
            ),
            "]<]minimax[>[<tool_call>",
            "",
            "]<]minimax[>[</tool_call>",
        ),
        ("]<]minimax[>[", "<mm:think>", "</mm:think>"),
        "minimax_m3",
        ("", "</mm:think>"),
        asks={"thinking_mode": "enabled"},
        opens="<mm:think>",
        hard={**HARD, "options": {"deep": {"name": "é\\n"}}},
        hides_tokens=False,
    ),
    "mistral": Format(
        each(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{dump(given)}"),
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        "mistral",
        ("[THINK]", "[/THINK]"),
    ),
    "muse_glimmer": Format(
        ATEM,
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        "muse_glimmer",
        (" to=self<|message|>", "<|eom|>"),
        ("<|start|>assistant to=user<|message|>", "<|eom|>"),
    ),
    "olmo3": Format(python("<function_calls>\n", "\n</function_calls>", "\n"), takes_text=False),
    "phi4_mini_json": Format(listed("functools"), takes_text=False, hard=FLAT),
    "plamo3": Format(
        each(
            lambda name, given: (
                PLAMO("begin_tool_request")
                + PLAMO("begin_tool_name")
                + name
                + PLAMO("end_tool_name")
                + PLAMO("begin_tool_arguments")
                + "<|plamo:constrain|>json<|plamo:msg|>"
                + dump(given)
                + PLAMO("end_tool_arguments")
                + PLAMO("end_tool_request")
            ),
            PLAMO("begin_tool_requests"),
            "",
            PLAMO("end_tool_requests"),
        ),
        (
            "<|plamo:begin_",
            "<|plamo:end_",
            ":plamo|>",
            "<|plamo:constrain|>",
            "<|plamo:msg|>",
            "<|plamo:tag|>",
        ),
        "plamo3",
        (PLAMO("begin_think"), PLAMO("end_think")),
        hides_tokens=False,
    ),
    "poolside_v1": Format(
        GLM, (*THINK, *TOOL, "<assistant>"), "poolside_v1", opens="<assistant>", asks={"thinking": True}
    ),
    "pythonic": Format(python(), takes_text=False),
    "qwen3_coder": Format(QWEN, THINK + TOOL, "qwen3"),
    "qwen3_json": HERMES,
    "qwen3_xml": Format(QWEN, THINK + TOOL, "qwen3"),
    "seed_oss": Format(
        SEED,
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<seed:bos>"),
        "seed_oss",
        ("<seed:think>", "</seed:think>"),
        opens="<seed:bos>assistant\n",
    ),
    "step3": Format(
        tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">',
            '<steptml:parameter name="{0}">{1}</steptml:parameter>',
            "</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            between="\n",
        ),
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_call_end｜>",
            "<｜tool_sep｜>",
            *THINK,
        ),
        "step3",
        ("", "</think>"),
        opens="<think>\n",
        hard=FLAT,
    ),
    "step3p5": Format(QWEN, THINK + TOOL, "step3p5", ("", "</think>")),
    "xlam": Format(listed(""), takes_text=False, hard=FLAT),
}
"""By vLLM's name of the parser."""
BREAKS_STREAMS = {
    "functiongemma": "of several arguments each but the first follows a closed object",
    "hunyuan_a13b": "a call after text is streamed as text",
    "jamba": "the arguments are streamed without their keys",
    "phi4_mini_json": "neither text nor calls are streamed where there are tools",
}
"""Parsers of vLLM that read an answer as a whole and not as a stream, and what becomes of it."""
TAKES_BROKEN = {
    *("apertus", "deepseek_v32", "deepseek_v4", "deepseek_v41", "functiongemma", "gemma4", "glm45", "glm47"),
    *("granite", "hy_v3", "inkling", "kimi_k2", "ling3", "mimo", "minimax_m2", "minimax_m3", "mistral"),
    *("plamo3", "qwen3_coder", "qwen3_xml", "seed_oss", "step3p5"),
}
"""Parsers that take a call without its end for one."""
LOSES_BROKEN = {"deepseek_v3", "deepseek_v31", "ernie45", "hf", "kimi_k3"}
"""Parsers that show neither a call without its end nor its text: the recorded tokens alone hold it."""
