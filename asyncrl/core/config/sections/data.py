"""Prompts: their sources and the order in which they are drawn."""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from asyncrl.core.config.reading.coercion import as_list, as_sources
from asyncrl.core.config.sections.section import Count, Section, Text, refuse

SHUFFLED, SEQUENTIAL = "shuffled", "sequential"
PLAIN_ORDERS = (SHUFFLED, SEQUENTIAL)
ALMOST = 0.8
"""Likeness to one of these from which another word is a slip: 0.93 for `shuffle`, 0.67 for `sequence`."""


class SourceSection(Section):
    """One source of prompts: a path (see `DataSection`), its weight in the mix, and what it leaves out.

    `filter` is one or more of `unique` (equal prompts after the first are left out), `tokens:<min>:<max>`
    (lengths of prompts) and `file.py:function`, which gets a row and says whether it stays.
    """

    path: Text
    """A file, a folder of the `datasets` library, or a built-in task. For example: data/gsm8k.parquet"""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """[1] Prompts drawn from this source for each one from a source of weight 1."""
    filter: Annotated[
        tuple[Text, ...], BeforeValidator(as_list, json_schema_input_type=Text | tuple[Text, ...])
    ] = ()
    """Filters that remove rows of the source. For example: unique, [unique, "tokens:8:256"]"""


Sources = Annotated[
    tuple[SourceSection, ...],
    BeforeValidator(as_sources, json_schema_input_type=Text | tuple[SourceSection | Text, ...]),
    Field(min_length=1),
]


def check_order(order: str) -> str:
    """Raise ValueError for a misspelt word, which would be taken for the field of a row."""
    meant = difflib.get_close_matches(order, PLAIN_ORDERS, n=1, cutoff=ALMOST)
    if meant and order not in PLAIN_ORDERS:
        raise refuse(
            f"{', '.join(PLAIN_ORDERS)}, a row's field, or file.py:function", f"Did you mean '{meant[0]}'?"
        )
    return order


class DataSection(Section):
    """Prompts: a Parquet or jsonl file, a folder of the `datasets` library (`folder/split` for one of its
    splits), `builtin:digit_sort`, or a list of sources `{path, weight, filter}`.

    A source of weight 3 gives three times as many prompts as one of weight 1, independent of their sizes,
    and has its own passes. `order` is `shuffled` (each pass differently), `sequential` (the order of the
    file), or the key that sorts the first pass from easy to hard (later passes are shuffled): a
    field of a row (`extra_info.level`) or a `file.py:function` that returns a number or a text for a row.
    """

    train: Sources
    """Prompts to train on. For example: data/gsm8k.parquet, [{path: a.jsonl, weight: 3}, b.jsonl]"""
    eval: Sources | None = None
    """Held-out prompts for evaluations. For example: data/test.parquet"""
    max_prompt_tokens: Count = 512
    """[tokens] Longer prompts are left out, never cut."""
    order: Annotated[Text, AfterValidator(check_order)] = SHUFFLED
    """Order in which prompts are drawn. For example: shuffled, sequential, extra_info.level"""

    @property
    def is_shuffled(self) -> bool:
        """Whether each pass has an arrangement of its own."""
        return self.order != SEQUENTIAL

    @property
    def curriculum(self) -> str | None:
        """Sort key of the first pass, None without a curriculum."""
        return None if self.order in PLAIN_ORDERS else self.order
