"""Prompts: read from Parquet or jsonl, tokenised once, drawn by index.

Owns the numbering. A prompt's index is its place among the prompts that fit `max_prompt_tokens`; it
follows from the file, the tokenizer and that limit alone, so every replica draws the same prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """One task instance.

    Attributes:
        row: Its row in the file, from 0.
        content: A chat (messages with `role` and `content`) or a plain string.
        ground_truth: What the reward compares with; anything the file holds.
        data_source: verl's name of the data set; empty if the file names none.
        extra_info: Passed on to the reward function.
    """

    row: int
    content: str | tuple[Message, ...]
    ground_truth: Any
    data_source: str
    extra_info: Mapping[str, Any]


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt at its index, with its token ids, int32 [P]."""

    index: int
    prompt: Prompt
    token_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class PromptSet:
    """The prompts that fit, by index, and the digest of the file they come from."""

    prompts: tuple[TokenizedPrompt, ...]
    digest: str

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def at(self, index: int) -> TokenizedPrompt:
        """Return the prompt with this index. Raises DataError if there is none."""
        if not 0 <= index < len(self.prompts):
            raise DataError(f"there is no prompt {index} among {len(self.prompts)}")
        return self.prompts[index]


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> PromptSet:
    """Read and tokenise the prompts of a file; those over the limit are left out and counted in the log.

    Raises:
        DataError: The file or a row cannot be used, or no prompt fits.
    """
    prompts = read_prompts(path)
    fitting: list[TokenizedPrompt] = []
    for prompt, ids in zip(prompts, tokenize(prompts, tokenizer), strict=True):
        if len(ids) <= max_prompt_tokens:
            fitting.append(TokenizedPrompt(len(fitting), prompt, np.asarray(ids, dtype=np.int32)))
    num_dropped = len(prompts) - len(fitting)
    if not fitting:
        raise DataError(f"{path}: none of {len(prompts)} prompts fits", hint="Raise data.max_prompt_tokens")
    log.info(
        "%s: %d prompts, %d dropped as longer than %d tokens",
        path,
        len(fitting),
        num_dropped,
        max_prompt_tokens,
    )
    return PromptSet(tuple(fitting), file_digest(path))


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a `.parquet`, `.jsonl` or `.json` (one object per line) file, in its order.

    Raises:
        DataError: With the file and the row, counted from 0.
    """
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".json": _jsonl_rows}
    if path.suffix not in readers:
        raise DataError(f"{path}: cannot read '{path.suffix}' files", hint="Use .parquet or .jsonl")
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    prompts = [_parse_row(path, row, fields) for row, fields in enumerate(readers[path.suffix](path))]
    if not prompts:
        raise DataError(f"{path} holds no prompt")
    return prompts


def file_digest(path: Path) -> str:
    """Return a digest of the file's bytes, 32 hex characters."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tokenize(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each prompt: chats by the chat template, strings as they are.

    Raises:
        DataError: A chat, but the tokenizer has no chat template.
    """
    ids: dict[int, list[int]] = {}
    texts = {place: prompt.content for place, prompt in enumerate(prompts) if isinstance(prompt.content, str)}
    if texts:
        ids.update(zip(texts, tokenizer(list(texts.values()))["input_ids"], strict=True))
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt.content, str):
            ids[place] = _tokenize_chat(prompt, tokenizer)
    return [ids[place] for place in range(len(prompts))]


def _tokenize_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        raise DataError(
            f"row {prompt.row} is a chat, but the model's tokenizer has no chat template",
            hint="Give prompts as plain strings, or use an instruction-tuned model",
        )
    chat = [dict(message) for message in prompt.content if isinstance(message, Mapping)]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no readable Parquet file: {error}") from error


def _jsonl_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        lines: Iterable[str] = (line for line in file if line.strip())
        for row, line in enumerate(lines):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, row {row}: not JSON: {error.msg} at column {error.colno}"
                ) from error


def _parse_row(path: Path, row: int, fields: Any) -> Prompt:
    try:
        return _prompt_of(row, fields)
    except DataError as error:
        raise DataError(f"{path}, row {row}: {error.message}", hint=error.hint) from error


def _prompt_of(row: int, fields: Any) -> Prompt:
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


def _content(value: Any) -> str | tuple[Message, ...]:
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


def _ground_truth(fields: dict[str, Any]) -> Any:
    """Return verl's `reward_model.ground_truth`, or `ground_truth`."""
    reward_model = fields.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if "ground_truth" in fields:
        return fields["ground_truth"]
    raise DataError("no 'reward_model.ground_truth' and no 'ground_truth'")
