"""The look at a source before a start: chats as the replicas render them, and how far it looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from asyncrl.core.config.tree import SourceSection
from rollout_service.data import inspection
from rollout_service.data.chat_template import ChatTemplate, has_no_template
from rollout_service.data.inspection import BLOCK_ROWS, MAX_ROWS, Search, find_problem
from rollout_service.data.prompts import Prompt
from tests.planner.plan.model_folder import write_model_folder

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' + (tools | tojson) }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined %}{{- '<think>\\n\\n</think>' }}{%- endif %}
{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if tools is none %}
    {{- strftime_now("%d %b %Y")[-4:] + '\\n\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message['content'] == 'skip' %}{%- continue %}{%- endif %}
  {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|start|>assistant<|end|>\\n\\n' }}
{% endif %}
"""
INSTRUCT = """\
{%- set ns = namespace(system='') -%}
{%- if messages[0]['role'] == 'system' -%}
  {%- set ns.system = messages[0]['content'] + '\\n\\n' -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + ns.system + message['content'] | tojson + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{% endfor %}
"""
SAID = [
    [("user", "1+1=")],
    [("system", "Be <brief> & 'exact'."), ("user", "  two\nlines \t"), ("assistant", "é"), ("user", "skip")],
]
CHATS = [[{"role": role, "content": content} for role, content in one] for one in SAID]


def write_model(folder: Path, template: Any, **tokens: Any) -> Path:
    """Write a model folder with a chat template; `bos` and `eos` are as a token of a config may be."""
    write_model_folder(folder)
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<eos>"}
    if template is not None:
        table["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(table | tokens))
    return folder


def write_rows(folder: Path, prompts: list[Any]) -> SourceSection:
    rows = (json.dumps({"prompt": prompt, "ground_truth": ""}) + "\n" for prompt in prompts)
    (folder / "train.jsonl").write_text("".join(rows))
    return SourceSection(path=str(folder / "train.jsonl"))


@pytest.mark.parametrize("chat", CHATS, ids=["one", "several"])
@pytest.mark.parametrize("template", [CHATML, HEADERS, INSTRUCT], ids=["chatml", "headers", "instruct"])
@pytest.mark.parametrize("form", ["text", "named", "file"])
def test_a_chat_becomes_the_text_that_the_replicas_make_of_it(
    tmp_path: Path, template: str, chat: list[dict[str, str]], form: str
) -> None:
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools"}]
    told = {"text": template, "named": named, "file": "not this one"}[form]
    model = write_model(tmp_path, told, eos_token={"__type": "AddedToken", "content": "<eos>"})
    if form == "file":
        (model / "chat_template.jinja").write_text(template)
    rendered = ChatTemplate.open(model)
    wanted = AutoTokenizer.from_pretrained(str(model)).apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    assert rendered is not None and rendered.render(chat) == wanted != ""


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{{ messages }}{% endgeneration %}",
        "{{ cls_token + messages[0].content }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
    ids=["unknown tag", "default of a class", "torn", "refuses", "wrong type", "unsafe"],
)
def test_a_template_that_cannot_be_rendered_for_certain_counts_for_nothing(
    tmp_path: Path, template: str
) -> None:
    model = write_model(tmp_path, template)
    found = ChatTemplate.open(model)
    assert found is None or found.render(CHATS[0]) is None
    assert find_problem(write_rows(tmp_path, [CHATS[0]]), 4, model) == ""
    assert "none of its 1 prompts fits" in find_problem(write_rows(tmp_path, [CHATS[0]]), 3, model)
    assert not has_no_template(model)


def test_a_chat_that_fits_only_without_its_template_is_refused_unless_an_environment_changes_it(
    tmp_path: Path,
) -> None:
    model, source = write_model(tmp_path, CHATML), write_rows(tmp_path, CHATS[:1])
    template = ChatTemplate.open(model)
    assert template is not None
    length = len(template.render(CHATS[0]) or "")  # a token is a character
    assert find_problem(source, length, model) == ""
    assert "none of its 1 prompts fits" in find_problem(source, length - 1, model)
    assert find_problem(source, length - 1, model, has_environment=True) == ""


class CountingTokenizer:
    """The tokenizer of a folder, which counts the texts and characters that it encodes."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.num_texts = self.num_characters = 0

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        self.num_texts += 1
        self.num_characters += len(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def make_prompts(*contents: Any) -> list[Prompt]:
    return [Prompt(row, content, "", "", {}) for row, content in enumerate(contents)]


def test_the_shortest_prompt_is_tried_first(tmp_path: Path) -> None:
    counting: Any = CountingTokenizer(write_model_folder(tmp_path))
    texts = ["a" * length for length in (500, 400, 4, 300)]
    assert Search(counting, 4).finds_fitting(make_prompts(*texts))
    assert (counting.num_texts, counting.num_characters) == (1, 4)


def test_the_search_ends_after_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_bytes = 1 << 18
    monkeypatch.setattr(inspection, "MAX_BYTES", max_bytes)
    counting: Any = CountingTokenizer(write_model_folder(tmp_path))
    long = "a" * (max_bytes // 4)
    assert not Search(counting, 4).finds_fitting(make_prompts(long, long))
    assert Search(counting, 4).finds_fitting(make_prompts(*[long] * 6)), "it cannot be told"
    assert counting.num_characters <= 2 * len(long) + max_bytes
    chats = Search(counting, 0)
    assert chats.finds_fitting(make_prompts(*[tuple(CHATS[0])] * 300)), "a chat counts for 1000 bytes"


def test_the_search_ends_after_so_many_rows(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path)
    most = write_rows(tmp_path, ["abc"] * (MAX_ROWS - BLOCK_ROWS))
    assert "none of its 49000 prompts fits" in find_problem(most, 2, model)
    assert find_problem(write_rows(tmp_path, ["abc"] * (MAX_ROWS + BLOCK_ROWS)), 2, model) == ""
