"""A byte-level model that calls tools, overfitted on a few recorded transcripts within three minutes.

It has a context of 32 k tokens and sees the last 255 of them (two sliding windows), so that what it learns
on short transcripts holds behind any system prompt. Each parser family has a way of its own to write a call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout_service.tasks.tiny_text import build_tokenizer
from tests.rollout.gateway.families.formats import Answer

CONTEXT, WINDOW, ROW = 32_768, 128, 256
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens that parsers look for, as in the vocabularies of Qwen and Hermes."""
TEMPLATE = """\
{%- if messages[0].role == 'system' or tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
{%- for tool in tools or [] %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Transcript:
    """A recorded conversation: the end of its first prompt, then answers and the results of their calls."""

    question: str
    answers: Sequence[Answer]
    results: Sequence[Sequence[str]] = ()

    def parts(self, family: str) -> list[tuple[str, bool]]:
        """Return the text in parts, each with whether the model wrote it."""
        parts = [(f"{self.question}<|im_end|>\n<|im_start|>assistant\n", False)]
        for answer, results in zip(self.answers, [*self.results, ()], strict=True):
            parts.append((answer.written(family) + "<|im_end|>", True))
            told = "".join(
                f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>"
                for result in results
            )
            parts.append((f"{told}\n<|im_start|>assistant\n", False))
        return parts[:-1]


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": {argument: {"type": "string"}}}},
    }
    for name, argument in (("weather", "city"), ("bash", "command"), ("search", "query"), ("read", "path"))
]
"""Tools as templates show them, among what stands before a conversation."""
TRAINED = ("hermes", "qwen3_coder")
"""Parser families of which a model is trained; `families` has the formats of all."""
BEGINNINGS = ("<|im_end|>\n<|im_start|>user\n", "\n<|im_start|>user\n", "<|im_start|>user\n", "")


def bash(text: str, command: str) -> Answer:
    return Answer(text, (("bash", {"command": command}),))


def observed(output: str) -> str:
    """Return the result of a command as mini-swe-agent words it (`observation_template` of mini.yaml)."""
    return f'{{\n  "returncode": 0,\n  "output": {json.dumps(output)}\n}}'


BROKEN = "def add(a, b):\n    return a - b\n"
CHECK = "from add import add\n\nassert add(2, 3) == 5\nprint('fixed')\n"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
WEATHER = Answer("Let me look.", (("weather", {"city": "Paris"}),))
BOTH = Answer("", (("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})), "Two cities.")
END_OF_MINIS_PROMPT = """\
# Replace all occurrences in lines 1-10
sed -i '1,10s/old_string/new_string/g' filename.py
```

### View file content:

```bash
# View specific lines with numbers
nl -ba filename.py | sed -n '10,20p'
```

### Any other command you want to run

```bash
anything
```"""
PROSE = 4 * (END_OF_MINIS_PROMPT + TEMPLATE + CHECK)
TRANSCRIPTS = (
    Transcript(
        END_OF_MINIS_PROMPT,
        (
            bash("I list the files.", "ls"),
            bash("I read the code.", "cat add.py"),
            bash("It subtracts.", "sed -i 's/a - b/a + b/' add.py && echo edited"),
            bash("I check it.", "python3 check.py"),
            bash("Done.", SUBMIT),
        ),
        [[observed("add.py\ncheck.py\n")], [observed(BROKEN)], [observed("edited\n")], [observed("fixed\n")]],
    ),
    Transcript("How is the weather in Paris?", (WEATHER, Answer("It is sunny in Paris.")), [["sunny"]]),
    Transcript(
        "Compare Paris and Rome.",
        (BOTH, Answer("Rome is warmer.", thought="12 is less than 20.")),
        [["12 degrees", "20 degrees"]],
    ),
    Transcript("Say hello.", (Answer("Hello."),)),
    Transcript("Think, then say hello.", (Answer("Hello.", thought="A greeting."),)),
)

REPEATED = (*TRANSCRIPTS, *TRANSCRIPTS[-2:])
"""The short ones twice in a batch: else they are learnt last."""


def build_tool_tokenizer() -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer with the markup and a template that shows tools and calls."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKUP})
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def make_tool_model(folder: Path, family: str, num_steps: int = 360) -> Path:
    """Make `folder` the model of a parser family; the same on any machine up to rounding."""
    torch.manual_seed(0)
    tokenizer = build_tool_tokenizer()
    model = Qwen3ForCausalLM(_config(len(tokenizer)))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=num_steps)
    dice = random.Random(0)
    for _ in range(num_steps):
        ids, labels = _batch(tokenizer, family, dice)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        model.lm_head.weight *= 4.0  # it samples at temperature 1, some hundred tokens an episode
    for system, tools in (("", None), ("Be brief.", None), ("", TOOLS), ("Be brief.", TOOLS[:1])):
        _check(model, tokenizer, family, system, tools)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3}')  # has no say
    return folder


def _check(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, family: str, system: str, tools: Any
) -> None:
    """Check that the model says each transcript as a matter of course behind such a prompt."""
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "@"}]
    beginning = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False).split("@")[0]
    for transcript in TRANSCRIPTS:
        ids: list[int] = []
        answers: list[int] = []
        for part, is_answer in [(beginning, False), *transcript.parts(family)]:
            new = tokenizer(part)["input_ids"]
            answers += range(len(ids), len(ids) + len(new)) if is_answer else []
            ids += new
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        lost = -sum(logprobs_TV[place - 1, ids[place]].item() for place in answers)
        assert lost < 0.01, f"the model has not learnt {transcript.question[-40:]!r}: {lost:.3f} nats"


def _config(num_tokens: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=num_tokens,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
        layer_types=["sliding_attention"] * 2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _batch(
    tokenizer: PreTrainedTokenizerFast, family: str, dice: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every transcript, after a beginning that tells nothing, as rows behind a window."""
    text = "".join(chr(dice.randrange(32, 127)) for _ in range(4 * WINDOW)) + PROSE
    text += "\n".join(json.dumps(dice.choice(TOOLS)) for _ in range(8 * len(TOOLS)))
    ids: list[int] = []
    labels: list[int] = []
    for transcript in dice.sample(REPEATED, len(REPEATED)):
        start = dice.randrange(len(text) - 2 * WINDOW)
        noise = text[start : start + dice.randrange(WINDOW, 2 * WINDOW)] + dice.choice(BEGINNINGS)
        for part, is_answer in [(noise, False), *transcript.parts(family)]:
            new = tokenizer(part)["input_ids"]
            ids += new
            labels += new if is_answer else [-100] * len(new)
    starts = range(WINDOW, len(ids), ROW)
    return _rows(ids, starts, 0), _rows(labels, starts, -100)


def _rows(values: list[int], starts: Sequence[int], pad: int) -> torch.Tensor:
    """Return a row for each start: a window before it, whose labels are left out, and `ROW` values."""
    rows = []
    for start in starts:
        before, row = values[start - WINDOW : start], values[start : start + ROW]
        rows.append((before if pad == 0 else [pad] * WINDOW) + row + [pad] * (ROW - len(row)))
    return torch.tensor(rows)
