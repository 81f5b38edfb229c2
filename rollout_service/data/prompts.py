"""Prompts: what a row says, and its tokens.

Owns the columns that are read. Sources, filters and the numbering are `sources`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncrl.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """One task instance.

    Attributes:
        row: Its row in the file, from 0.
        content: A chat (messages with `role` and `content`) or a plain string.
        ground_truth: Reference for the reward; anything the file holds.
        data_source: verl's name of the data set; empty if the file names none.
        extra_info: Passed on to the reward function.
    """

    row: int
    content: str | tuple[Message, ...]
    ground_truth: object
    data_source: str
    extra_info: Mapping[str, object]

    def named(self, data_source: str) -> Prompt:
        """Return the prompt with this `data_source`, unless it has one."""
        return self if self.data_source or not data_source else replace(self, data_source=data_source)


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt at its index, with its token ids, int32 [P]."""

    index: int
    prompt: Prompt
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run, by index.

    Attributes:
        digest: Of what they were read from, and of what was left out or sorted.
        sources: (prompts, weight) of each source, empty for a single one.
    """

    prompts: tuple[TokenizedPrompt, ...]
    digest: str
    sources: tuple[tuple[int, float], ...] = ()

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def at(self, index: int) -> TokenizedPrompt:
        """Return the prompt with this index. Raises DataError if there is none."""
        if not 0 <= index < len(self.prompts):
            raise DataError(f"there is no prompt {index} among {len(self.prompts)}")
        return self.prompts[index]

    def first_of_each(self, limit: int) -> tuple[TokenizedPrompt, ...]:
        """Return the first `limit` prompts of each source."""
        sizes = [size for size, _ in self.sources] or [self.num_prompts]
        begins = [sum(sizes[:number]) for number in range(len(sizes))]
        return tuple(
            prompt
            for begin, size in zip(begins, sizes, strict=True)
            for prompt in self.prompts[begin : begin + min(size, limit)]
        )


def tokenize(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, object]] = ()
) -> list[list[int]]:
    """Return the token ids of each prompt: chats by the chat template, strings as they are.

    Args:
        tools: JSON schemas of functions, which the chat template describes to the model.

    Raises:
        DataError: A chat, but the tokenizer has no chat template.
    """
    ids: dict[int, list[int]] = {}
    texts = {place: prompt.content for place, prompt in enumerate(prompts) if isinstance(prompt.content, str)}
    if texts:
        ids.update(zip(texts, tokenizer(list(texts.values()))["input_ids"], strict=True))
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt.content, str):
            ids[place] = _tokenize_chat(prompt, tokenizer, tools)
    return [ids[place] for place in range(len(prompts))]


def _tokenize_chat(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, object]]
) -> list[int]:
    if not tokenizer.chat_template:
        raise DataError(
            f"row {prompt.row} is a chat, but the model's tokenizer has no chat template",
            hint="Give prompts as plain strings, or use an instruction-tuned model",
        )
    chat = [dict(message) for message in prompt.content if isinstance(message, Mapping)]
    described = [dict(tool) for tool in tools] or None
    ids = tokenizer.apply_chat_template(chat, tools=described, add_generation_prompt=True, return_dict=False)
    return list(ids)


def parse_row(path: Path, row: int, fields: object) -> Prompt:
    """Return the prompt that a row holds. Raises DataError with the file and the row."""
    try:
        return _prompt_of(row, fields)
    except DataError as error:
        raise DataError(f"{path}, row {row}: {error.message}", hint=error.hint) from error


def _prompt_of(row: int, fields: object) -> Prompt:
    if not isinstance(fields, dict):
        raise DataError(f"a row must be an object, not {type(fields).__name__}")
    if "question" in fields and "answer" in fields and "prompt" not in fields:
        raise DataError("this is GSM8K's own form", hint="Convert it with `asyncrl data gsm8k`")
    if "prompt" not in fields:
        raise DataError(f"no 'prompt' among {sorted(fields)}")
    extra_info = fields.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise DataError("'extra_info' must be an object")
    return Prompt(
        row=row,
        content=_content(fields["prompt"]),
        ground_truth=_ground_truth(fields),
        data_source=str(fields.get("data_source") or ""),
        extra_info=extra_info,
    )


def _content(value: object) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise DataError("'prompt' must be a string or a list of messages, and not empty")
    for message in value:
        is_message = isinstance(message, dict) and all(
            isinstance(message.get(k), str) for k in ("role", "content")
        )
        if not is_message:
            raise DataError("a message of 'prompt' must have the strings 'role' and 'content'")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _ground_truth(fields: Mapping[str, object]) -> object:
    """Return verl's `reward_model.ground_truth`, or `ground_truth`."""
    reward_model = fields.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if "ground_truth" in fields:
        return fields["ground_truth"]
    raise DataError("no 'reward_model.ground_truth' and no 'ground_truth'")
