"""The memory of attention that docs/features.md tells, by length: what is kept for the backward pass."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

TOKENS = (1 << 12, 1 << 15, 1 << 17)
HEADS, HEAD_SIZE = 32, 128
SIZE = re.compile(r"([\d.,]+) (MB|GB)")


def count_fused(num_tokens: int) -> float:
    """Return the bytes of a fused kernel: 16-bit outputs, and of each query the logarithm of its sum."""
    return num_tokens * HEADS * (2 * HEAD_SIZE + 4)


def count_scores(num_tokens: int) -> float:
    """Return the bytes of scores that are written out, in float32."""
    return 4 * HEADS * num_tokens**2


def show(num_bytes: float) -> str:
    """Return a size with two digits."""
    unit, size = ("GB", 1e9) if num_bytes >= 1e9 else ("MB", 1e6)
    return f"{float(f'{num_bytes / size:.2g}'):,g} {unit}"


@pytest.mark.parametrize(
    ("where", "count"),
    [("GPU from compute", count_fused), ("GPU otherwise", count_scores), ("CPU", count_fused)],
)
def test_the_table_of_attention_tells_the_memory_of_each_kernel(where: str, count: object) -> None:
    lines = (ROOT / "docs" / "features.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {where}")]
    assert callable(count)
    told = [f"{size} {unit}" for size, unit in SIZE.findall(row.rpartition(" | ")[2])]
    assert told == [show(count(num_tokens)) for num_tokens in TOKENS]
