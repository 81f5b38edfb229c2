"""Converter of GSM8K's own jsonl (question, answer) into prompts, equal to verl's preprocessing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.core.errors import DataError

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
DATA_SOURCE = "openai/gsm8k"
MARK = "#### "


def convert_gsm8k(source: Path, target: Path, limit: int | None = None) -> int:
    """Write the first `limit` rows of `source` as Parquet to `target` and return how many there are.

    The file appears whole or not at all.

    Raises:
        DataError: A row is not of GSM8K's form.
    """
    rows: list[dict[str, object]] = []
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if limit is not None and number >= limit:
                break
            rows.append(_convert_row(source, number, line))
    if not rows:
        raise DataError(f"{source} holds no row")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    pq.write_table(pa.Table.from_pylist(rows), unfinished)
    unfinished.rename(target)
    return len(rows)


def extract_gold(answer: str) -> str:
    """Return the gold number of a GSM8K answer: what follows the last `#### `, without commas."""
    _, mark, gold = answer.rpartition(MARK)
    if not mark:
        raise DataError("the answer has no '#### '")
    return gold.strip().replace(",", "")


def _convert_row(source: Path, number: int, line: str) -> dict[str, object]:
    try:
        fields = json.loads(line)
        question, answer = fields["question"], fields["answer"]
        gold = extract_gold(answer)
    except (json.JSONDecodeError, KeyError, TypeError, DataError) as error:
        raise DataError(f"{source}, row {number}: not of GSM8K's form: {error}") from error
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": source.stem, "index": number, "answer": answer, "question": question},
    }
