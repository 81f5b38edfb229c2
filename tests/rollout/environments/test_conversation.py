"""Observations in chats: the tokens that a chat template puts between two turns."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.config.tree import SourceSection
from asyncrl.core.errors import ConfigError
from rollout_service.data.prompts import PromptSet
from rollout_service.data.sources import load_sources
from rollout_service.environments.conversation import ChatTemplate, PlainText
from rollout_service.environments.registry import Episodes
from rollout_service.evaluation.wiring import open_chats
from rollout_service.tasks.tiny_text import CHAT_TEMPLATE, build_tokenizer
from tests.rollout.environments.parts import TOKENIZER, load, make_prompt, run_episode

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
START, END = "<|im_start|>", "<|im_end|>"
THINKING = (  # as Qwen3's: earlier answers lose their thoughts
    "{% for message in messages %}" + START + "{{ message['role'] }}\n{% if message['role'] == 'assistant' "
    "and not loop.last %}{{ message['content'].split('</think>')[-1].lstrip('\n') }}{% else %}"
    "{{ message['content'] }}{% endif %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
REWRITING = {
    "the last message gets the rules, so the first one loses them": (
        "{% for m in messages %}" + START + "{{ m['role'] }}\n{% if loop.last %}Rules. {% endif %}"
        "{{ m['content'] }}" + END + "\n{% endfor %}" + START + "assistant\n"
    ),
    "earlier answers are left out": (
        "{% for m in messages if m['role'] != 'assistant' %}"
        + START
        + "{{ m['role'] }}\n{{ m['content'] }}"
        + END
        + "\n{% endfor %}"
        + START
        + "assistant\n"
    ),
    "earlier answers are marked": (
        "{% for m in messages %}"
        + START
        + "{{ m['role'] }}\n{% if m['role'] == 'assistant' %}old: {% endif %}"
        "{{ m['content'] }}" + END + "\n{% endfor %}" + START + "assistant\n"
    ),
    "the last question is marked": (
        "{% for m in messages %}" + START + "{{ m['role'] }}\n"
        "{% if m['role'] == 'user' %}{{ 'A' if loop.last else 'B' }}{% endif %}"
        "{{ m['content'] }}" + END + "\n{% endfor %}" + START + "assistant\n"
    ),
    "thinking is opened for the model": (
        "{% for m in messages %}" + START + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
        "{% if add_generation_prompt %}" + START + "assistant\n<think>\n{% endif %}"
    ),
}


def tokenizer_with(template: str) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_turns_and_observations_together_are_what_the_template_makes_of_the_whole_conversation():
    tokenizer = build_tokenizer()
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
    prompt = make_prompt(tuple(QUESTION), "5", tokenizer)
    trajectory, _, _ = run_episode(load("tools"), [(call, [1]), ("5", [1])], prompt, 400, tokenizer)
    conversation = [
        *QUESTION,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    whole = tokenizer.apply_chat_template(conversation, return_dict=False)
    found = [*prompt.token_ids.tolist(), *trajectory.response_ids.tolist()]
    assert tokenizer.decode(found) + "\n" == tokenizer.decode(whole)
    assert [*found, *tokenizer("\n")["input_ids"]] == whole
    assert trajectory.reward == 1.0
    masked = trajectory.response_ids[trajectory.loss_mask == 0].tolist()
    assert tokenizer.decode(masked) == f"\n{START}tool\n5{END}\n{START}assistant\n"


OPENING = (
    "from rollout_service.environments import Environment, Step\n"
    "class Door(Environment):\n"
    "    def __init__(self, prompt, seed, opening):\n        self.opening = opening\n"
    "    async def start(self):\n        return self.opening\n"
    "    async def step(self, answer):\n        return Step(is_done=True)\n"
)


@pytest.mark.parametrize("opening", ["You see a door.", ""])
def test_an_opening_stands_between_the_question_and_the_first_answer(tmp_path: Path, opening: str):
    tokenizer = build_tokenizer()
    (tmp_path / "door.py").write_text(OPENING)
    episodes = load({"name": "door.py:Door", "opening": opening}, tmp_path)
    one = make_prompt(tuple(QUESTION), "5", tokenizer)
    prompt = open_chats(PromptSet((one,), "digest"), tokenizer, episodes).at(0)
    trajectory, engine, _ = run_episode(episodes, [("5", [1])], prompt, 400, tokenizer)
    opened = [*QUESTION, {"role": "user", "content": opening}] if opening else QUESTION
    read = tokenizer.apply_chat_template(opened, add_generation_prompt=True, return_dict=False)
    assert engine.requests[0][0] == read
    assert [*prompt.token_ids.tolist(), *trajectory.response_ids.tolist()][: len(read)] == read
    assert trajectory.loss_mask.tolist() == [0] * (trajectory.num_tokens - 2) + [1, 1]


WITH_TOOLS = (
    "{% if tools %}"
    + START
    + "system\n{% for t in tools %}{{ t['function']['name'] }} {% endfor %}"
    + END
    + "\n{% endif %}"
    + CHAT_TEMPLATE
)


def test_tools_are_described_in_prompts_by_the_template(tmp_path: Path):
    tokenizer, episodes = (
        tokenizer_with(WITH_TOOLS),
        load({"name": "tools", "tools": ["calculator", "python"]}),
    )
    row = {"prompt": QUESTION, "reward_model": {"ground_truth": "5"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    source = SourceSection(path=str(tmp_path / "rows.jsonl"))
    prompts = load_sources([source], tokenizer, 1000, tools=episodes.tools)
    text = tokenizer.decode(prompts.at(0).token_ids.tolist())
    assert text.startswith(f"{START}system\ncalculator python {END}\n{START}system\nBe brief.")
    plain = load_sources([source], tokenizer, 1000).at(0).token_ids.tolist()
    assert tokenizer.decode(plain).startswith(f"{START}system\nBe brief.")


def test_a_template_that_moves_the_tools_into_the_last_message_is_refused():
    template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}", "{% if tools and loop.last %}TOOLS {% endif %}{{ message['content'] }}"
    )
    ChatTemplate(tokenizer_with(template))
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        ChatTemplate(tokenizer_with(template), tools=load("tools").tools)


def test_several_messages_of_one_observation_stand_one_after_the_other():
    tokenizer = build_tokenizer()
    messages = [{"role": "tool", "content": "1"}, {"role": "user", "content": "go on"}]
    ids = ChatTemplate(tokenizer, ("tool", "user")).observation_ids([tokenizer.eos_token_id], messages)
    assert tokenizer.decode(ids) == f"\n{START}tool\n1{END}\n{START}user\ngo on{END}\n{START}assistant\n"


def test_a_turn_that_did_not_end_itself_is_ended_by_the_template():
    tokenizer = build_tokenizer()
    voice = ChatTemplate(tokenizer)
    said = tokenizer("hello")["input_ids"]
    assert tokenizer.decode(voice.observation_ids(said, "9")).startswith(f"{END}\n{START}user\n9")
    assert tokenizer.decode(voice.observation_ids([*said, tokenizer.eos_token_id], "9")).startswith("\n")


def test_a_tokenizer_that_merges_letters_sees_the_observation_as_in_the_whole_text():
    """With merges the tokens of a piece alone may differ from those inside a text; the template's count."""
    tokenizer = build_tokenizer()
    text = f"{START}user\nnew{END}\n"
    ids = ChatTemplate(tokenizer).observation_ids([tokenizer.eos_token_id], "new")
    assert ids == tokenizer("\n" + text + f"{START}assistant\n")["input_ids"]


@pytest.mark.parametrize("template", REWRITING.values(), ids=REWRITING)
def test_a_template_that_rewrites_earlier_turns_is_refused(template: str):
    with pytest.raises(ConfigError, match="rewrites earlier turns") as caught:
        ChatTemplate(tokenizer_with(template))
    assert "chat_template" in caught.value.hint


def test_a_template_that_drops_thoughts_is_taken_and_said(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        voice = ChatTemplate(tokenizer_with(THINKING))
    assert "drops the thoughts" in caplog.text
    ids = voice.observation_ids([build_tokenizer().eos_token_id], "9")
    assert build_tokenizer().decode(ids) == f"\n{START}user\n9{END}\n{START}assistant\n"
    caplog.clear()
    ChatTemplate(tokenizer_with(CHAT_TEMPLATE))
    assert caplog.text == ""


def test_a_template_that_rewrites_earlier_turns_only_for_some_text_is_refused_there():
    template = CHAT_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% if 'secret' in messages[-1]['content'] %}hidden{% endif %}{% for message in messages %}",
    )
    voice = ChatTemplate(tokenizer_with(template))
    assert voice.observation_ids([], "harmless")
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        voice.observation_ids([], "secret")


def test_a_role_that_the_template_does_not_know_is_refused_by_name():
    template = CHAT_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['role'] == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}",
    )
    ChatTemplate(tokenizer_with(template), ("user",))
    with pytest.raises(ConfigError, match=r"tool.*no tools here"):
        ChatTemplate(tokenizer_with(template), ("tool",))


def test_plain_text_needs_no_template_and_gets_no_special_tokens():
    voice = PlainText(TOKENIZER)
    assert TOKENIZER.chat_template is None
    assert voice.observation_ids([], "12=") == [1, 2, 13]
    assert voice.observation_ids(
        [], [{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}]
    ) == [1, 2]
    assert voice.observation_ids([], "") == []


def test_a_template_is_not_asked_where_prompts_are_plain_text():
    tokenizer = tokenizer_with(REWRITING["earlier answers are left out"])
    episodes = Episodes(load("tools").make)
    prompt = make_prompt("2+3=", "5", tokenizer)
    trajectory, _, _ = run_episode(episodes, [("5", [1])], prompt, tokenizer=tokenizer)
    assert trajectory.reward == 1.0
