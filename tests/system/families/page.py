"""The page of families, from the results of their tests.

python -m tests.system.families.page        runs them (about ten minutes) and writes docs/families.md
"""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.system.families.cells import COLUMNS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "families.md"
Cells = dict[str, dict[str, str]]
HEAD = """# Families of models
<!-- Generated: python -m tests.system.families.page -->

One tiny model of each family through every part, on a CPU in float32; last run on {day} by
`python -m tests.system.families.page`. A dense family that differs from Llama in no more than a record can
say is added as one record of `asyncrl/models/architectures.py`; `learner.backend: fsdp2` trains what
`transformers` can build.
"""


def render(cells: Cells, day: str) -> str:
    """Return the page in Markdown; a refusal is told in the words of its error."""
    lines = [HEAD.format(day=day), f"| family | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    reasons = sorted({cell for row in cells.values() for cell in row.values() if cell != "yes"})
    for family, row in cells.items():
        shown = [
            "yes" if row[column] == "yes" else f"no ({reasons.index(row[column]) + 1})" for column in COLUMNS
        ]
        lines.append(f"| `{family}` | {' | '.join(shown)} |")
    lines += ["", "What a yes shows:", ""]
    lines += [f"* `{column}`: {what}" for column, what in COLUMNS.items()]
    lines += ["", "Refused, with these words in the error:", ""]
    lines += [f"{number}. {reason.removeprefix('no: ')}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def cells_of(page: str) -> Cells:
    """Return the cells that a page shows."""
    reasons = {
        f"no ({number})": f"no: {words}"
        for line in page.splitlines()
        for number, dot, words in [line.partition(". ")]
        if dot and number.isdigit()
    }
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {
        name.strip("`"): {
            column: reasons.get(cell, cell) for column, cell in zip(COLUMNS, shown, strict=True)
        }
        for name, *shown in rows
    }


def read_results(report: Path) -> Cells:
    """Return what the tests found, of a report in JUnit's format. A test that failed shows as that."""
    cells: Cells = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, has_cell, rest = case.attrib["name"].partition("test_cell[")
        if not has_cell or name:
            continue
        family, _, column = rest.removesuffix("]").rpartition("-")
        told = {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
        cells.setdefault(family, {})[column] = told.get("cell", "failed")
    return cells


def main() -> int:
    """Run the tests and write the page; 1 if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "long", "tests/system/families"]
        done = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False)
        cells = read_results(report) if report.exists() else {}
        if any(row.keys() != COLUMNS.keys() for row in (cells or {"": {}}).values()):
            print("The tests did not come to their end; docs/families.md stays as it was", file=sys.stderr)
            return 1
        PAGE.write_text(render(cells, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
