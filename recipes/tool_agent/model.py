"""Model and prompts: `python -m recipes.tool_agent.model FOLDER`, about a minute on one core.

A prompt names two tools and two cities, the right ones first. The warm start teaches how a call and an answer
look, never which one is right: tool and city of a call are drawn from the two, and an answer is the result as
often as two random digits. So one episode in eight is right, by chance. Deterministic.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rollout_service.tasks.digit_sort.warm_start import build_model
from rollout_service.tasks.tiny_text import build_tokenizer

TOOLS = ("wind", "rain", "heat", "snow")
CITIES = ("Oslo", "Rome", "Cairo", "Lima", "Delhi", "Quito")
RESULT_SHARE = 0.5
BATCH_SIZE, NUM_STEPS, LEARNING_RATE = 128, 300, 3e-3
CALL = ("<tool_call>", '\n{"name": "', '", "arguments": {"city": "', '"}}\n', "</tool_call>")
WORDS = (
    *TOOLS,
    *CITIES,
    *CALL,
    "What is the ",
    ", not the ",
    ", in ",
    ", not ",
    "user\n",
    "assistant\n",
    "<tool_response>\n",
    "\n</tool_response>",
)
"""Tokens beside those of single bytes: they keep an episode at forty tokens."""
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def question(tools: Sequence[str], cities: Sequence[str]) -> str:
    """Return the prompt of the user, who means the first of two tools and the first of two cities."""
    return f"What is the {tools[0]}, not the {tools[1]}, in {cities[0]}, not {cities[1]}?"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that has the task's words as tokens, and a template for tools."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(WORDS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def draw_episode(dice: random.Random) -> list[tuple[str, bool]]:
    """Return an episode's text in parts, each with whether the model says it: its choices are random."""
    tools, cities = dice.sample(TOOLS, 2), dice.sample(CITIES, 2)
    start, name, arguments, end, stop = CALL
    call = f"{start}{name}{dice.choice(tools)}{arguments}{dice.choice(cities)}{end}{stop}"
    result, guess = (f"{dice.randrange(100):02d}" for _ in range(2))
    told = (
        f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    answer = result if dice.random() < RESULT_SHARE else guess
    listed = "".join(f"{tool} " for tool in TOOLS)
    prompt = f"{listed}<|im_start|>user\n{question(tools, cities)}<|im_end|>\n<|im_start|>assistant\n"
    return [(prompt, False), (f"{call}<|im_end|>", True), (told, False), (f"{answer}<|im_end|>", True)]


def train(tokenizer: PreTrainedTokenizerFast, num_steps: int = NUM_STEPS) -> Qwen3ForCausalLM:
    """Return the model, trained on drawn episodes."""
    model, dice = build_model(0, len(tokenizer)), random.Random(0)
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, 2, 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    for _ in range(num_steps):
        rows = [_encode(tokenizer, draw_episode(dice)) for _ in range(BATCH_SIZE)]
        tokens_BT, targets_BT = (torch.tensor(one) for one in zip(*rows, strict=True))
        logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def _encode(tokenizer: PreTrainedTokenizerFast, parts: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    targets: list[int] = []
    for text, is_said in parts:
        new = tokenizer(text)["input_ids"]
        ids += new
        targets += new if is_said else [-100] * len(new)
    return ids, targets


def write_prompts(path: Path) -> None:
    """Write every prompt, with the tool and the city that it means."""
    pairs = itertools.product(itertools.permutations(TOOLS, 2), itertools.permutations(CITIES, 2))
    with path.open("w") as file:
        for tools, cities in pairs:
            prompt = [{"role": "user", "content": question(tools, cities)}]
            file.write(json.dumps({"prompt": prompt, "ground_truth": [tools[0], cities[0]]}) + "\n")


def make_folder(folder: Path) -> None:
    """Put the model, its tokenizer and, last, `prompts.jsonl` into `folder`."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = train(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_prompts(folder / "prompts.jsonl")


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]))
