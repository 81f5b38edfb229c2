"""`docs/benchmarks.md`: texts written by hand, and tables made of the stored rows.

    python -m benchmarks.reports.page > docs/benchmarks.md

Owns the form of the page. The texts lie in `benchmarks/results/texts`, in the order of their names; a line
`<!-- rows: FILE | bench: NAME | case: a, b | values: x, y | where: part=rows -->` in one of them is replaced
by a table of that file's rows, with where and when they were taken. Without `case` or `values` all are
shown. Invariant: the page says nothing of a file that is not stored, and leaves no stored file of rows out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.errors import DataError
from benchmarks.harness.rows import Row, RowFile

RESULTS = Path(__file__).parents[1] / "results"
NOT_OF_ROWS = ("concurrency_vllm.json",)
"""Files of a form of their own, which other pages show."""
_DIRECTIVE = re.compile(r"^<!-- rows: (.+) -->$", re.MULTILINE)
_PARTS = ("bench", "case", "values", "where")


@dataclass(frozen=True)
class Directive:
    """Selection of a file's rows and of their columns; empty means all."""

    file: str
    bench: str = ""
    case: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    where: Mapping[str, str] | None = None

    def takes(self, row: Row) -> bool:
        """Tell whether the table has this row."""
        return self.bench in ("", row.bench) and row.is_of(self.where or {})


def render(results: Path = RESULTS) -> str:
    """Return the page.

    Raises:
        DataError: A directive cannot be followed, or a stored file is on no table.
    """
    texts = sorted((results / "texts").glob("*.md"))
    shown: set[str] = set()

    def replace(found: re.Match[str]) -> str:
        directive = parse_directive(found.group(1))
        shown.add(directive.file)
        return table(RowFile.read(results / directive.file), directive)

    pages = [_DIRECTIVE.sub(replace, path.read_text(encoding="utf-8").strip()) for path in texts]
    missing = {path.name for path in results.glob("*.json")} - shown - set(NOT_OF_ROWS)
    if missing:
        raise DataError(
            f"no text in {results / 'texts'} shows {', '.join(sorted(missing))}",
            hint="Add a line '<!-- rows: FILE -->' where its table belongs",
        )
    return "\n\n".join(pages) + "\n"


def parse_directive(text: str) -> Directive:
    """Return what `FILE | bench: NAME | …` asks for. Raises DataError if it is of another form."""
    file, *parts = [part.strip() for part in text.split("|")]
    given = {}
    for part in parts:
        name, colon, value = part.partition(":")
        if not colon or name not in _PARTS:
            raise DataError(f"'{part}' of '{text}' is none of {', '.join(_PARTS)}")
        given[name] = value.strip()
    pairs = [pair.strip().partition("=") for pair in given.get("where", "").split(",") if pair.strip()]
    return Directive(
        file,
        given.get("bench", ""),
        _list_of(given.get("case", "")),
        _list_of(given.get("values", "")),
        {name: value for name, _, value in pairs},
    )


def table(file: RowFile, directive: Directive) -> str:
    """Return where the rows were taken, and the rows: medians, with their spread where there is one.

    Raises:
        DataError: No row fits, or none has a column that is asked for.
    """
    rows = [row for row in file.rows if directive.takes(row)]
    if not rows:
        raise DataError(f"{directive.file} has no row of {directive}")
    values = directive.values or _names_of([row.values for row in rows])
    rows = [row for row in rows if any(name in row.values for name in values)]
    cases = directive.case or _names_of([row.case for row in rows])
    absent = [name for name in values if not any(name in row.values for row in rows)]
    absent += [name for name in cases if not any(name in row.case for row in rows)]
    if absent:
        raise DataError(f"no row of {directive.file} has {', '.join(absent)}")
    lines = [f"| {' | '.join([*cases, *values])} |", "|---" * (len(cases) + len(values)) + "|"]
    for row in rows:
        cells = [str(row.case.get(name, "")) for name in cases]
        lines.append(f"| {' | '.join([*cells, *(_cell(row, name) for name in values)])} |")
    return "\n".join([f"{caption(file, directive.file)}:", "", *lines])


def caption(file: RowFile, name: str) -> str:
    """Return one sentence: the command, when and on what it ran, and where its rows are."""
    start = "python -m benchmarks." if file.command.startswith("gpu.") else "asyncrl bench "
    torch = f"; torch {file.versions['torch']}" if "torch" in file.versions else ""
    machine = _machine(file.hardware)
    return f"`{start}{file.command}`, {file.taken[:10]}, {machine}{torch} (`benchmarks/results/{name}`)"


def _machine(hardware: Mapping[str, str | int]) -> str:
    """Return what is recorded of the machine, and say so where nothing of its hardware is."""
    told = [str(hardware["processor"])] if "processor" in hardware else []
    if "cores" in hardware:
        told.append(f"{hardware['cores']} cores")
    if "memory_bytes" in hardware:
        told.append(f"{int(hardware['memory_bytes']) / 2**30:.0f} GiB")
    if not told:
        return f"{hardware.get('machine', '')} (hardware not recorded)".strip()
    if "gpus" in hardware:
        told.append(f"{hardware['gpus']} x {hardware['gpu']}" if hardware["gpus"] else "no GPU")
    return ", ".join(told)


def show(value: float) -> str:
    """Return a number with four digits, thousands apart.

    >>> show(12345.6), show(0.012346), show(3.0)
    ('12,346', '0.01235', '3')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cell(row: Row, name: str) -> str:
    if name not in row.values:
        return ""
    spread = row.spread.get(name)
    return show(row.values[name]) + (f" ± {spread:.2g}" if spread else "")


def _names_of(mappings: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for mapping in mappings for name in mapping))


def _list_of(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.stdout.write(render())
