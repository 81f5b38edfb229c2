"""A look at a source of prompts before anything starts: can it be read, and does a prompt of it fit?

Reads rows as the replicas do, until one fits, and counts tokens with the `tokenizers` library alone.
Invariant: a source is refused only if the replicas would refuse it. So functions of the user's are not run,
special tokens count for nothing, nor does a chat template that cannot be rendered for certain, and what is
too much to look at in a second passes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.core.config.tree import SourceSection
from asyncrl.core.errors import ConfigError, DataError
from rollout_service.data.chat_template import ChatTemplate, has_no_template
from rollout_service.data.filters import Filters, parse_filters
from rollout_service.data.functions import load_key
from rollout_service.data.prompts import Prompt, parse_row
from rollout_service.data.readers import read_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK_ROWS = 1000
"""Are read at once; a block with a prompt that fits ends the look."""
MAX_ROWS = 50_000
MAX_BYTES = 4 << 20
"""Of prompts that are tokenised in search of one that fits: about a second."""
TOKENIZER = "tokenizer.json"
CHAT_BYTES = 1000
"""A chat counts for at least as much: rendering one takes a tenth of a millisecond or more."""


def find_problem(
    source: SourceSection, max_prompt_tokens: int, model: Path, has_environment: bool = False
) -> str:
    """Say why the replicas could not use `source`; nothing if they can, as far as can be told.

    Args:
        max_prompt_tokens: A longer prompt is left out.
        model: Folder of the policy; without a tokenizer there, lengths are not checked.
        has_environment: Whether one may add to a chat, as the descriptions of tools.
    """
    try:
        filters = parse_filters([name for name in source.filter if ".py:" not in name], max_prompt_tokens)
        template = None if has_environment else ChatTemplate.open(model)
        search = Search(_tokenizer_of(model), filters.max_tokens, template)
        return _look(Path(source.path), filters, search, has_no_template(model))
    except (ConfigError, DataError) as error:
        return str(error)
    except OSError as error:
        return f"'{source.path}' cannot be read: {error.strerror}"


def find_bad_key(source: SourceSection, name: str) -> str:
    """Say which of the first rows of `source` have no key `name`, a field that a curriculum sorts by.

    Nothing is said where a function of the user's may leave rows out, or rows cannot be read: `find_problem`
    tells the latter.
    """
    if any(".py:" in one for one in source.filter):
        return ""
    path, key = Path(source.path), load_key(name)
    try:
        keeps_row = parse_filters(source.filter, 0).keeps_row
        rows = [row for row in itertools.islice(read_rows(path), BLOCK_ROWS) if isinstance(row, dict)]
    except (ConfigError, DataError, OSError):
        return ""
    for number, row in enumerate(rows):
        try:
            if keeps_row(row):
                key(row)
        except DataError as error:
            return f"{path}, row {number}: {error}"
    return ""


def _look(path: Path, filters: Filters, search: Search, is_without_template: bool) -> str:
    """Return the problem of `path`, read block by block until a prompt fits. Raises DataError."""
    rows, num_rows = enumerate(read_rows(path)), 0
    while block := [(row, fields) for row, fields in itertools.islice(rows, BLOCK_ROWS)]:
        num_rows += len(block)
        prompts = [parse_row(path, row, fields) for row, fields in block]
        kept = [
            prompt
            for prompt, (_, fields) in zip(prompts, block, strict=True)
            if isinstance(fields, dict) and filters.keeps_row(fields)
        ]
        chat = next((one for one in kept if not isinstance(one.content, str)), None)
        if chat is not None and is_without_template:
            what = f"{path}, row {chat.row}: it is a chat, and the model's tokenizer has no chat template"
            return f"{what}. Give prompts as plain strings, or use an instruction-tuned model"
        if search.finds_fitting(kept) or num_rows >= MAX_ROWS:
            return ""
    if not num_rows:
        return f"{path} holds no prompt: the file is empty"
    return (
        f"{path}: none of its {num_rows} prompts fits into {filters.max_tokens} tokens. "
        "Raise data.max_prompt_tokens, or change the source's filter"
    )


class Search:
    """Looks for a prompt of at most `max_tokens`, the shortest of each block first."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_tokens: int, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._template = template
        self._bytes_left = MAX_BYTES

    def finds_fitting(self, prompts: Iterable[Prompt]) -> bool:
        """Tell whether one of the prompts fits, or that cannot be told any more."""
        for prompt in sorted(prompts, key=lambda one: len(_least_text(one))):
            text = self._text_of(prompt)
            self._bytes_left -= max(len(text), 0 if isinstance(prompt.content, str) else CHAT_BYTES)
            if self._tokenizer is None or self._bytes_left < 0:
                return True
            if len(self._tokenizer.encode(text, add_special_tokens=False).ids) <= self._max_tokens:
                return True
        return False

    def _text_of(self, prompt: Prompt) -> str:
        """Return the text that the model reads, or one that is no longer."""
        if isinstance(prompt.content, str) or self._template is None:
            return _least_text(prompt)
        return self._template.render(prompt.content) or _least_text(prompt)


def _tokenizer_of(model: Path) -> Tokenizer | None:
    """Return the model's tokenizer; None without one that can be loaded, which `find_bad_tokenizer` tells."""
    try:
        return _read_tokenizer(model / TOKENIZER)
    except DataError:
        return None


def find_bad_tokenizer(model: Path) -> str:
    """Say why `tokenizer.json` in the folder `model` cannot be loaded; nothing if there is none."""
    file = model / TOKENIZER
    try:
        _read_tokenizer(file)
    except DataError as error:
        return f"'{file}' is not a tokenizer: {error}; copy the one that the model was trained with"
    return ""


def _read_tokenizer(file: Path) -> Tokenizer | None:
    """Return the tokenizer of `file`, or None without the file. Raises DataError if it cannot be loaded."""
    return _parse_tokenizer(file, file.stat().st_mtime_ns) if file.is_file() else None


@functools.lru_cache(maxsize=1)
def _parse_tokenizer(file: Path, changed_at_ns: int) -> Tokenizer:
    """Load `file` as it is since `changed_at_ns`, once for all that ask: a large one takes a second."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _least_text(prompt: Prompt) -> str:
    """Return a text that is no longer than the prompt: of a chat its last message, without a template."""
    return prompt.content if isinstance(prompt.content, str) else prompt.content[-1]["content"].strip()
