"""A byte-level model that calls tools, overfitted on a few recorded transcripts within three minutes.

It has a context of 32 k tokens and looks back some 300 of them in each of two layers, so that what it learns
on short transcripts holds behind any system prompt. It has no sliding windows, which SGLang leaves out: the
biases of its queries and keys make far tokens count for nothing (`_look_near`). Each parser family has a way
of its own to write a call.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rollout_service.tasks.tiny_text import build_tokenizer
from tests.rollout.gateway.families.formats import Answer

CONTEXT, WINDOW, ROW = 32_768, 128, 256
HEADS, HEAD_SIZE = 3, 32
PAIRS, NEARNESS = (10, 12, 15), 45.0
"""Pairs of numbers in a head that rotate once in 1987, 6283 and 35,333 positions; nats of each."""
NOT_WANTED = -100
"""Label of a token that is not the model's."""
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
    Transcript("Say hello, but think first.", (Answer("Hello.", thought="A greeting."),)),
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


def make_tool_model(folder: Path, family: str) -> Path:
    """Make `folder` the model of a parser family; the same on any machine up to rounding."""
    tokenizer, model = _train(family)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3}')  # has no say
    return folder


@cache
def _train(family: str, num_steps: int = 300) -> tuple[PreTrainedTokenizerFast, Qwen2ForCausalLM]:
    """Return a family's model, once for all engines of a process."""
    torch.manual_seed(0)
    tokenizer = build_tool_tokenizer()
    model = Qwen2ForCausalLM(_config(len(tokenizer)))
    _look_near(model)
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
    for system, tools in (("", None), (3 * PROSE, None), ("", TOOLS), ("Be brief.", TOOLS[:1])):
        _check(model, tokenizer, family, system, tools)
    return tokenizer, model


def _look_near(model: Qwen2ForCausalLM) -> None:
    """Give all heads a score of their own for the distance of a token, which is not trained.

    It is a sum of cosines, highest at distance 0, and at least 25 nats lower at 400 to 20,000.
    """
    half = HEAD_SIZE // 2
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            kept = torch.ones(HEAD_SIZE)
            kept[[*PAIRS, *(pair + half for pair in PAIRS)]] = 0.0
            kept = kept.repeat(projection.out_features // HEAD_SIZE)
            near = torch.zeros(HEAD_SIZE)
            near[list(PAIRS)] = math.sqrt(NEARNESS * math.sqrt(HEAD_SIZE))
            with torch.no_grad():
                projection.weight *= kept[:, None]
                projection.bias.copy_(near.repeat(projection.out_features // HEAD_SIZE))
            projection.weight.register_hook(partial(torch.mul, kept[:, None]))
            projection.bias.register_hook(partial(torch.mul, kept))


def _check(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, family: str, system: str, tools: Any
) -> None:
    """Check that the model says each transcript as a matter of course behind such a prompt."""
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "@"}]
    beginning = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False).split("@")[0]
    for transcript in TRANSCRIPTS:
        ids, labels = _spell(tokenizer, [(beginning, False), *transcript.parts(family)])
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids])).logits[0]
        lost = cross_entropy(logits_TV[:-1], torch.tensor(labels[1:]), reduction="sum").item()
        assert lost < 0.01, f"the model has not learnt {transcript.question[-40:]!r}: {lost:.3f} nats"


def _config(num_tokens: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=num_tokens,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        use_sliding_window=False,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _batch(
    tokenizer: PreTrainedTokenizerFast, family: str, dice: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every transcript, after a beginning that tells nothing, as rows with `WINDOW` tokens before.

    Two short ones also stand at the beginning of a row of their own.
    """
    text = "".join(chr(dice.randrange(32, 127)) for _ in range(4 * WINDOW)) + PROSE
    text += "\n".join(json.dumps(dice.choice(TOOLS)) for _ in range(8 * len(TOOLS)))
    parts: list[tuple[str, bool]] = []
    for transcript in dice.sample(REPEATED, len(REPEATED)):
        start = dice.randrange(len(text) - 2 * WINDOW)
        noise = text[start : start + dice.randrange(WINDOW, 2 * WINDOW)] + dice.choice(BEGINNINGS)
        parts += [(noise, False), *transcript.parts(family)]
    ids, labels = _spell(tokenizer, parts)
    starts = range(WINDOW, len(ids), ROW)
    rows = [ids[start - WINDOW : start + ROW] for start in starts]
    wanted = [[NOT_WANTED] * WINDOW + labels[start : start + ROW] for start in starts]
    for transcript in dice.sample(TRANSCRIPTS[1:], 2):
        ids, labels = _spell(tokenizer, [(BEGINNINGS[2], False), *transcript.parts(family)])
        rows.append(ids[: WINDOW + ROW])
        wanted.append(labels[: WINDOW + ROW])
    return _pad(rows, 0), _pad(wanted, NOT_WANTED)


def _spell(
    tokenizer: PreTrainedTokenizerFast, parts: Sequence[tuple[str, bool]]
) -> tuple[list[int], list[int]]:
    """Return the ids of the parts, and as labels those of the model's."""
    ids: list[int] = []
    labels: list[int] = []
    for part, is_answer in parts:
        new = tokenizer(part)["input_ids"]
        ids += new
        labels += new if is_answer else [NOT_WANTED] * len(new)
    return ids, labels


def _pad(rows: list[list[int]], pad: int) -> torch.Tensor:
    return torch.tensor([row + [pad] * (WINDOW + ROW - len(row)) for row in rows])
