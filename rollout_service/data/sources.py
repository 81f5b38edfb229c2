"""The prompts of a run: all its sources, filtered, ordered and numbered.

Owns the numbering: an index counts over the sources, one after the other, and in each over the prompts that
its filters keep, in the order of its rows or of a curriculum's key. It follows from the data, the tokenizer
and the configuration alone, so every replica draws the same prompt; the digest says whether it did.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.config.tree import SourceSection
from asyncrl.core.errors import DataError
from rollout_service.data.filters import parse_filters
from rollout_service.data.functions import Key, Row, load_key
from rollout_service.data.prompts import Prompt, PromptSet, TokenizedPrompt, parse_row, tokenize
from rollout_service.data.readers import digest_of, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def load_sources(
    sources: Sequence[SourceSection],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    curriculum: str | None = None,
    tools: Sequence[Mapping[str, object]] = (),
) -> PromptSet:
    """Read, filter, sort and tokenise the prompts of all sources.

    Prompts over the limit are left out and counted in the log. In a mix, a row that names no `data_source`
    has the name of its file. Chats describe `tools`, JSON schemas of functions.

    Raises:
        ConfigError: A filter or the curriculum cannot be used.
        DataError: A file or a row cannot be used, or no prompt of a source is left.
    """
    key = None if curriculum is None else load_key(curriculum)
    loaded = [_load_source(source, tokenizer, max_prompt_tokens, key, tools) for source in sources]
    prompts: list[TokenizedPrompt] = []
    for source, (found, _) in zip(sources, loaded, strict=True):
        default = "" if len(sources) == 1 else Path(source.path).stem
        prompts += [
            TokenizedPrompt(len(prompts) + place, one.prompt.named(default), one.token_ids)
            for place, one in enumerate(found)
        ]
    several = tuple((len(found), source.weight) for source, (found, _) in zip(sources, loaded, strict=True))
    digests = [digest for _, digest in loaded]
    joined = digests[0] if len(digests) == 1 else _digest(*digests)
    return PromptSet(tuple(prompts), joined, several if len(several) > 1 else ())


def _load_source(
    source: SourceSection,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    key: Callable[[Row], Key] | None,
    tools: Sequence[Mapping[str, object]],
) -> tuple[list[TokenizedPrompt], str]:
    """Return a source's prompts in their order, and its digest."""
    path, filters = Path(source.path), parse_filters(source.filter, limit)
    kept: list[Prompt] = []
    keys: list[Key] = []
    num_rows = 0
    for row, fields in enumerate(read_rows(path)):
        num_rows += 1
        prompt = parse_row(path, row, fields)
        assert isinstance(fields, dict), "parse_row looked"
        try:
            if filters.keeps_row(fields):
                kept.append(prompt)
                keys.append(row if key is None else key(fields))
        except DataError as error:
            raise DataError(f"{path}, row {row}: {error.message}", hint=error.hint) from error
    found = [
        TokenizedPrompt(place, prompt, np.asarray(ids, dtype=np.int32))
        for place, (prompt, ids) in enumerate(zip(kept, tokenize(kept, tokenizer, tools), strict=True))
        if filters.keeps_length(len(ids))
    ]
    _check_left(path, num_rows, len(kept), len(found))
    if key is not None:
        found = _sort(path, found, keys)
    is_plain = not source.filter and key is None
    rows = np.asarray([one.prompt.row for one in found], dtype=np.int64).tobytes()
    return found, digest_of(path) if is_plain else _digest(digest_of(path), rows)


def _check_left(path: Path, num_rows: int, num_kept: int, num_fitting: int) -> None:
    """Say what was left out. Raises DataError if nothing is left."""
    if not num_rows:
        raise DataError(f"{path} holds no prompt")
    if not num_fitting:
        raise DataError(
            f"{path}: none of {num_rows} prompts fits: {num_rows - num_kept} left out by filters, the others "
            "by their length",
            hint="Raise data.max_prompt_tokens, or change the source's filter",
        )
    log.info(
        "%s: %d prompts of %d; %d left out by filters, %d by their length",
        path,
        num_fitting,
        num_rows,
        num_rows - num_kept,
        num_kept - num_fitting,
    )


def _sort(path: Path, found: list[TokenizedPrompt], keys: Sequence[Key]) -> list[TokenizedPrompt]:
    try:
        return sorted(found, key=lambda one: keys[one.index])
    except TypeError as error:
        raise DataError(f"{path}: the curriculum's keys are numbers and texts: {error}") from error


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"|")
    return digest.hexdigest()
