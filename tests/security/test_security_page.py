"""SECURITY.md: every guard of its table names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| (.+) \| `(tests/\S+)::(test_\w+)` \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE
)


def test_the_table_of_guards_is_there() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("| guard | test |")[2]
    lines = [line for line in table.splitlines() if line.startswith("|")][1:]
    assert len(ROWS) == len(lines) >= 25
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("guard", "path", "name"), ROWS, ids=[row[2][5:60] for row in ROWS])
def test_the_test_of_each_guard_exists_and_is_not_skipped(guard: str, path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    (found,) = [function for function in functions if function.name == name]
    marks = [ast.unparse(decorator) for decorator in found.decorator_list]
    assert not [mark for mark in marks if "skip" in mark or "xfail" in mark]
    assert any(isinstance(node, ast.Assert | ast.With) for node in ast.walk(found)), f"{name} claims nothing"


def test_what_is_trusted_is_named() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    trusted = text.partition("### Trusted")[2].partition("###")[0]
    assert all(name in trusted for name in ("Ray", "torch.distributed", "NCCL", "vLLM", "private interface"))
