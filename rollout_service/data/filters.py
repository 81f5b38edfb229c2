"""Filters of a source's prompts: user's functions, equal prompts, lengths.

Invariant: the decision on a prompt depends on the source's rows, the tokenizer and the filters alone, so
every replica keeps the same prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.core.errors import ConfigError
from rollout_service.data.functions import load_function

UNIQUE = "unique"
TOKENS = re.compile(r"tokens:([0-9]*):([0-9]*)")


@dataclass(frozen=True)
class Filters:
    """The filters of a source.

    Attributes:
        keeps_row: Asked of each row; may remember earlier ones, so it is for one reading.
        min_tokens, max_tokens: Bounds on a prompt's length.
    """

    keeps_row: Callable[[Mapping[str, object]], bool]
    min_tokens: int
    max_tokens: int

    def keeps_length(self, num_tokens: int) -> bool:
        return self.min_tokens <= num_tokens <= self.max_tokens


def parse_filters(names: Sequence[str], max_prompt_tokens: int) -> Filters:
    """Return the filters of these names: `unique`, `tokens:<min>:<max>`, `file.py:function`.

    Raises:
        ConfigError: A name is none of these, or its function cannot be loaded.
    """
    checks: list[Callable[[Mapping[str, object]], object]] = []
    low, high = 0, max_prompt_tokens
    for name in names:
        if found := TOKENS.fullmatch(name):
            low, high = max(low, int(found[1] or 0)), min(high, int(found[2] or high))
        elif name == UNIQUE:
            checks.append(_make_unique())
        elif name.rpartition(":")[0].endswith(".py"):
            checks.append(load_function(name))
        else:
            hint = f"There are {UNIQUE}, tokens:<min>:<max> and file.py:function"
            raise ConfigError(f"there is no filter '{name}'", hint=hint)
    return Filters(lambda row: all(check(row) for check in checks), low, high)


def _make_unique() -> Callable[[Mapping[str, object]], bool]:
    seen: set[str] = set()

    def is_new(row: Mapping[str, object]) -> bool:
        content = json.dumps(row.get("prompt"), sort_keys=True, default=str)
        is_first = content not in seen
        seen.add(content)
        return is_first

    return is_new
